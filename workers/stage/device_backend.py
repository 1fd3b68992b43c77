"""What a kind of device offers to a stage."""

from dataclasses import dataclass

import torch

from tramontane.proto.plan import StagePlan
from tramontane.workers.attention.autotune import select_kernels
from tramontane.workers.attention.backend import AttentionKernels
from tramontane.workers.device.events import DeviceEvent, RecordEvent
from tramontane.workers.kernels.fused_ops import EAGER, FusedOps, compile_ops, native_ops
from tramontane.workers.stage.cuda_graphs import CudaGraphCapture, GraphCapture


@dataclass(frozen=True, slots=True)
class DeviceBackend:
    """The kernels, fused operations, graph capture and events of a device.

    ``graph_capture`` is None if steps of decodes are computed like all others, ``make_event`` if the device is synchronous.
    """

    kernels: AttentionKernels
    fused_ops: FusedOps = EAGER
    graph_capture: GraphCapture | None = None
    make_event: RecordEvent | None = None

    @property
    def pads_decodes(self) -> bool:
        """Whether decodes are padded, which needs a scratch page in the caches."""
        return self.graph_capture is not None or self.make_event is not None


def backend_for(plan: StagePlan, device: torch.device) -> DeviceBackend:
    """Choose the backend of a stage on this device. This compiles and times kernels."""
    dtype = getattr(torch, plan.dtype)
    if device.type != "cuda":
        return DeviceBackend(select_kernels(plan, device), native_ops(plan.args, dtype))
    with torch.cuda.device(device):  # events and graphs belong to the current one
        kernels = select_kernels(plan, device)
        return DeviceBackend(kernels, compile_ops(plan.args, device, dtype), CudaGraphCapture(), DeviceEvent)
