"""Triton norm in which the order of a row's sum depends only on its width.

PyTorch's order may depend on the number of rows and on their memory address. With and without an
addition before it the norm is computed in the same way: the first layer of a stage and all others
must agree.

Shape letters: T tokens, D model width; d of a row that is padded to a power of two.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tramontane.workers.device.alignment import aligned

WARPS = 8


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Compute ``FusedOps.rms_norm``."""
    return _launch(aligned(x_TD), None, weight_D, eps)[1]


def add_rms_norm(
    h_TD: Tensor, more_TD: Tensor, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute ``FusedOps.fused_add_rms_norm``."""
    return _launch(aligned(h_TD), aligned(more_TD), weight_D, eps)


def _launch(
    h_TD: Tensor, more_TD: Tensor | None, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the sum, which is ``h_TD`` itself without an addition, and its norm."""
    num_tokens, width = h_TD.shape
    sum_TD, out_TD = h_TD if more_TD is None else torch.empty_like(h_TD), torch.empty_like(h_TD)
    pointers = h_TD, h_TD if more_TD is None else more_TD, weight_D, sum_TD, out_TD
    if num_tokens:
        # Triton launches on the current device
        with torch.cuda.device_of(h_TD):  # type: ignore[no-untyped-call]
            _kernel[(num_tokens,)](
                *pointers,
                width,
                eps,
                triton.next_power_of_2(width),
                more_TD is not None,
                num_warps=WARPS,
            )
    return sum_TD, out_TD


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    h_TD,
    more_TD,
    weight_D,
    sum_TD,
    out_TD,
    width,
    eps,
    d_block: tl.constexpr,
    has_more: tl.constexpr,
):
    """Normalize one row. Row 2 of width 4096 begins at element 8192. A sum is rounded before its
    norm is computed.
    """
    begins = tl.program_id(0).to(tl.int64) * width
    d = tl.arange(0, d_block)
    x_d = tl.load(h_TD + begins + d, mask=d < width, other=0.0)
    if has_more:
        more_d = tl.load(more_TD + begins + d, mask=d < width, other=0.0)
        x_d = (x_d.to(tl.float32) + more_d.to(tl.float32)).to(x_d.dtype)
        tl.store(sum_TD + begins + d, x_d, mask=d < width)
    # is on its way while the sum is computed
    weight_d = tl.load(weight_D + d, mask=d < width, other=0.0).to(tl.float32)
    x_d = x_d.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x_d * x_d, axis=0) / width + eps)
    tl.store(
        out_TD + begins + d, (x_d * scale * weight_d).to(out_TD.dtype.element_ty), mask=d < width
    )
