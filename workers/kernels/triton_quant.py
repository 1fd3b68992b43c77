"""Triton kernels for quantized matrices: activations to fp8, and a few tokens times a quantized
matrix.

With few tokens the product is bound by reading the weights: one byte per element takes half the
time of bfloat16, and nothing is converted to float in memory.

Shape letters: T tokens, K inputs, N outputs of a matrix; t, n, k of a block of them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# quantize_rows_fp8
K_BLOCK = 4096  # the same for every width, so that the self test compiles the kernel that is used
WARPS = 8  # 256 threads per token: 16 elements of a block for each thread

# quantized_gemv
# from the minimum of tensor cores to the most that share one reading of the weights
TOKEN_BLOCKS = (16, 32, 64)
# of the matrix per program: 4096 rows are 128 programs, about one per processor of a large GPU
ROWS = 32
STAGES = 4  # blocks that are loaded ahead
X_BLOCK = 4096  # elements of x at a time: 16 tokens by 256 inputs, or 64 by 64


def quantize_rows_fp8(x_TK: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """Quantize each token to fp8 numbers, the largest of which is ``largest``; return them and the
    scales [T, 1] in float32.
    """
    num_tokens, width = x_TK.shape
    numbers_TK = torch.empty(x_TK.shape, dtype=torch.float8_e4m3fn, device=x_TK.device)
    scale_T1 = torch.empty(num_tokens, 1, dtype=torch.float32, device=x_TK.device)
    sizes = width, float(largest), torch.finfo(torch.float32).tiny, K_BLOCK
    if num_tokens:
        # Triton launches on the current device
        with torch.cuda.device_of(x_TK):  # type: ignore[no-untyped-call]
            _quantize_kernel[(num_tokens,)](
                x_TK.contiguous(), numbers_TK, scale_T1, *sizes, num_warps=WARPS
            )
    return numbers_TK, scale_T1


@triton.jit  # type: ignore[untyped-decorator]
def _quantize_kernel(  # type: ignore[no-untyped-def]
    x_TK, numbers_TK, scale_T, width, largest, smallest, k_block: tl.constexpr
):
    """Quantize one token, which is read twice, the second time from a cache. Token 2 of width 4096
    begins at element 8192.
    """
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
        tl.store(
            numbers_TK + begins + start + k,
            (x_k / scale).to(numbers_TK.dtype.element_ty),
            mask=start + k < width,
        )


def quantized_gemv(x_TK: Tensor, numbers_NK: Tensor, scale_N: Tensor) -> Tensor:
    """Compute x (numbers scale)^T in the dtype of x, summed in float32, for up to 64 tokens of
    16-bit floats. 16 divides K.
    """
    (num_tokens, width), num_rows = x_TK.shape, len(numbers_NK)
    block = next(size for size in TOKEN_BLOCKS if num_tokens <= size)
    out_TN = torch.empty(num_tokens, num_rows, dtype=x_TK.dtype, device=x_TK.device)
    sizes = num_tokens, num_rows, width, block, ROWS, X_BLOCK // block
    # Triton launches on the current device
    with torch.cuda.device_of(out_TN):  # type: ignore[no-untyped-call]
        _gemv_kernel[(triton.cdiv(num_rows, ROWS),)](
            x_TK.contiguous(), numbers_NK, scale_N, out_TN, *sizes, num_stages=STAGES
        )
    return out_TN


@triton.jit(do_not_specialize=["num_tokens"])  # type: ignore[untyped-decorator]
def _gemv_kernel(  # type: ignore[no-untyped-def]
    x_TK,
    numbers_NK,
    scale_N,
    out_TN,
    num_tokens,
    num_rows,
    width,
    t_block: tl.constexpr,
    n_block: tl.constexpr,
    k_block: tl.constexpr,
):
    """Compute one block of outputs for all tokens. Row 2 of a matrix of width 4096 begins at
    element 8192.
    """
    t = tl.arange(0, t_block)[:, None]
    n = tl.program_id(0) * n_block + tl.arange(0, n_block)[None, :]
    row_begins = n.to(tl.int64) * width  # 131072 rows of 16384 are 2**31 elements
    sum_tn = tl.zeros((t_block, n_block), dtype=tl.float32)
    for start in range(0, width, k_block):
        k = start + tl.arange(0, k_block)
        x_tk = tl.load(
            x_TK + t * width + k[None, :], mask=(t < num_tokens) & (k[None, :] < width), other=0.0
        )
        numbers_kn = tl.load(
            numbers_NK + row_begins + k[:, None],
            mask=(n < num_rows) & (k[:, None] < width),
            other=0.0,
        )
        sum_tn = tl.dot(x_tk, numbers_kn.to(x_tk.dtype), sum_tn)
    scale_n = tl.load(scale_N + n, mask=n < num_rows, other=0.0).to(tl.float32)
    out_tn = (sum_tn * scale_n).to(out_TN.dtype.element_ty)
    tl.store(out_TN + t * num_rows + n, out_tn, mask=(t < num_tokens) & (n < num_rows))
