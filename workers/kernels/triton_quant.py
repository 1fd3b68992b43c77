"""Activations as fp8 on a GPU, in one kernel: each token's largest number, its scale, and its numbers.

Shape letters: T tokens, K elements of each; k of a block of them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

K_BLOCK = 4096  # the same for every width, so that the kernel that is tried is the one that is used
WARPS = 8  # 256 threads share a token: 16 elements of a block are each one's


def fused_fp8_rows(x_TK: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """Numbers of fp8, of each token the largest ``largest``, and scales [T, 1] in float32. A token of zeros has a scale, too."""
    num_tokens, width = x_TK.shape
    numbers_TK = torch.empty(x_TK.shape, dtype=torch.float8_e4m3fn, device=x_TK.device)
    scale_T1 = torch.empty(num_tokens, 1, dtype=torch.float32, device=x_TK.device)
    sizes = width, float(largest), torch.finfo(torch.float32).tiny, K_BLOCK
    if num_tokens:
        with torch.cuda.device_of(x_TK):  # type: ignore[no-untyped-call] # Triton would take the current one
            _kernel[(num_tokens,)](x_TK.contiguous(), numbers_TK, scale_T1, *sizes, num_warps=WARPS)
    return numbers_TK, scale_T1


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    x_TK, numbers_TK, scale_T, width, largest, smallest, k_block: tl.constexpr
):
    """One token, read twice: the second time from a cache. Token 2 of width 4096 begins at element 8192."""
    begins = tl.program_id(0).to(tl.int64) * width  # 131072 tokens of 16384 elements are 2**31
    k = tl.arange(0, k_block)
    largest_k = tl.zeros((k_block,), dtype=tl.float32)
    for start in range(0, width, k_block):
        x_k = tl.load(x_TK + begins + start + k, mask=start + k < width, other=0.0).to(tl.float32)
        largest_k = tl.maximum(largest_k, tl.abs(x_k))
    scale = tl.maximum(tl.max(largest_k, axis=0) / largest, smallest)
    tl.store(scale_T + tl.program_id(0), scale)
    for start in range(0, width, k_block):
        x_k = tl.load(x_TK + begins + start + k, mask=start + k < width, other=0.0).to(tl.float32)
        tl.store(numbers_TK + begins + start + k, (x_k / scale).to(numbers_TK.dtype.element_ty), mask=start + k < width)
