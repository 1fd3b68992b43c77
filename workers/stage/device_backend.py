"""What a kind of device offers to a stage on it."""

from dataclasses import dataclass

import torch

from tramontane.proto.plan import StagePlan
from tramontane.workers.attention.autotune import kernels_for
from tramontane.workers.attention.backend import Kernels
from tramontane.workers.device.events import CudaMark, MakeMark
from tramontane.workers.kernels.fused_ops import PLAIN, Pointwise, compiled
from tramontane.workers.stage.cuda_graphs import CudaRecorder, Recorder


@dataclass(frozen=True, slots=True)
class Means:
    """``recorder``: None where steps of decodes are computed like all others. ``mark``: None where what was asked for is done."""

    kernels: Kernels
    pointwise: Pointwise = PLAIN
    recorder: Recorder | None = None
    mark: MakeMark | None = None

    @property
    def pads(self) -> bool:
        """Whether decodes are padded, which takes a page of the caches."""
        return self.recorder is not None or self.mark is not None


def means_for(plan: StagePlan, device: torch.device) -> Means:
    if device.type != "cuda":
        return Means(kernels_for(plan, device))
    with torch.cuda.device(device):  # marks and recordings are of the current one
        kernels = kernels_for(plan, device)
        return Means(kernels, compiled(plan.args, device, getattr(torch, plan.dtype)), CudaRecorder(), CudaMark)
