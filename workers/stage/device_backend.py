"""What a kind of device offers to a stage on it."""

from dataclasses import dataclass

import torch

from tramontane.proto.plan import StagePlan
from tramontane.workers.attention.autotune import select_kernels
from tramontane.workers.attention.backend import AttentionKernels
from tramontane.workers.device.events import CudaDeviceEvent, RecordEvent
from tramontane.workers.kernels.fused_ops import EAGER, FusedOps, compile_ops
from tramontane.workers.stage.cuda_graphs import CudaGraphCapture, GraphCapture


@dataclass(frozen=True, slots=True)
class DeviceBackend:
    """``recorder``: None where steps of decodes are computed like all others. ``mark``: None where what was asked for is done."""

    kernels: AttentionKernels
    pointwise: FusedOps = EAGER
    recorder: GraphCapture | None = None
    mark: RecordEvent | None = None

    @property
    def pads_decodes(self) -> bool:
        """Whether decodes are padded, which takes a page of the caches."""
        return self.recorder is not None or self.mark is not None


def backend_for(plan: StagePlan, device: torch.device) -> DeviceBackend:
    if device.type != "cuda":
        return DeviceBackend(select_kernels(plan, device))
    with torch.cuda.device(device):  # marks and recordings are of the current one
        kernels = select_kernels(plan, device)
        return DeviceBackend(
            kernels, compile_ops(plan.args, device, getattr(torch, plan.dtype)), CudaGraphCapture(), CudaDeviceEvent
        )
