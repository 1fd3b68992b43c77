"""Triton norm in which the order of a row's sum depends on its width alone.

PyTorch's may depend on the number of rows and on where they begin in memory. With and without an addition before it the norm is
the same kernel: the first layer of a stage and all others must agree.

Shape letters: T tokens, D model width; d of a row that is padded to a power of two.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from tramontane.workers.device.alignment import aligned
from tramontane.workers.kernels.fused_ops import EAGER, FusedOps

WARPS = 8


def row_wise_ops() -> FusedOps:
    """Return the operations with this norm. PyTorch computes the others, element by element."""
    return replace(EAGER, rms_norm=rms_norm, fused_add_rms_norm=add_rms_norm)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Compute ``FusedOps.rms_norm``."""
    x_TD = aligned(x_TD)
    num_tokens, width = x_TD.shape
    out_TD = torch.empty_like(x_TD)
    if num_tokens:
        with torch.cuda.device_of(x_TD):  # type: ignore[no-untyped-call]  # Triton launches on the current device
            _kernel[(num_tokens,)](x_TD, weight_D, out_TD, width, eps, triton.next_power_of_2(width), num_warps=WARPS)
    return out_TD


def add_rms_norm(h_TD: Tensor, more_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute ``FusedOps.fused_add_rms_norm``, with two kernels."""
    sum_TD = h_TD + more_TD
    return sum_TD, rms_norm(sum_TD, weight_D, eps)


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(x_TD, weight_D, out_TD, width, eps, d_block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Normalize one row. Row 2 of width 4096 begins at element 8192."""
    begins = tl.program_id(0).to(tl.int64) * width
    d = tl.arange(0, d_block)
    x_d = tl.load(x_TD + begins + d, mask=d < width, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x_d * x_d, axis=0) / width + eps)
    weight_d = tl.load(weight_D + d, mask=d < width, other=0.0).to(tl.float32)
    tl.store(out_TD + begins + d, (x_d * scale * weight_d).to(out_TD.dtype.element_ty), mask=d < width)
