"""Triton kernel for the product of a few tokens and a matrix, bound by reading the matrix once.

A library's product for one token makes tiles of 8 or more columns, too few of them for a GPU where
a matrix is small, and adds up splits with a second kernel. Here each program computes some outputs
of all tokens in float32.

Shape letters: T tokens, K inputs, N outputs of a matrix; n and k of a block of them, t tokens.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_TOKENS = 4


class GemvBlock(NamedTuple):
    """Outputs of a program, inputs that it reads at a time, and its warps."""

    outputs: int
    inputs: int
    warps: int


# the fastest of six on an H200 for the matrices of Mistral 7B
BLOCKS = (GemvBlock(8, 512, 4), GemvBlock(16, 256, 4))


def gemv(x_TK: Tensor, weight_NK: Tensor, block: GemvBlock) -> Tensor:
    """Compute x W^T, [T, N] in the dtype of x, of up to ``MAX_TOKENS`` tokens."""
    num_tokens, width = x_TK.shape
    num_outputs = len(weight_NK)
    assert num_tokens <= MAX_TOKENS
    out_TN = x_TK.new_empty(num_tokens, num_outputs)
    # Triton launches on the current device
    with torch.cuda.device_of(out_TN):  # type: ignore[no-untyped-call]
        _kernel[(triton.cdiv(num_outputs, block.outputs),)](
            *(x_TK.contiguous(), weight_NK, out_TN, num_tokens, num_outputs, width),
            *(
                int(triton.next_power_of_2(num_tokens)),
                block.outputs,
                block.inputs,
                width % block.inputs == 0,
            ),
            num_warps=block.warps,
        )
    return out_TN


@triton.jit(do_not_specialize=["num_tokens"])  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    x_TK,
    weight_NK,
    out_TN,
    num_tokens,
    num_outputs,
    width,
    t_block: tl.constexpr,
    n_block: tl.constexpr,
    k_block: tl.constexpr,
    is_even: tl.constexpr,
):
    """Compute some outputs. With 4 outputs for each program, program 2 has rows 8 to 11 of the
    matrix.
    """
    t = tl.arange(0, t_block)
    n = tl.program_id(0) * n_block + tl.arange(0, n_block)
    rows = weight_NK + n.to(tl.int64)[None, :, None] * width
    sum_tnk = tl.zeros((t_block, n_block, k_block), dtype=tl.float32)
    for start in range(0, width, k_block):
        k = (start + tl.arange(0, k_block))[None, None, :]
        is_inside_nk = (n < num_outputs)[None, :, None] & (is_even | (k < width))
        is_inside_tk = (t < num_tokens)[:, None, None] & (is_even | (k < width))
        x_tk = tl.load(x_TK + t[:, None, None] * width + k, mask=is_inside_tk, other=0.0).to(
            tl.float32
        )
        weight_nk = tl.load(rows + k, mask=is_inside_nk, other=0.0).to(tl.float32)
        sum_tnk += x_tk * weight_nk
    out_tn = tl.sum(sum_tnk, axis=2).to(out_TN.dtype.element_ty)
    is_inside_tn = (t < num_tokens)[:, None] & (n < num_outputs)[None, :]
    tl.store(out_TN + t[:, None] * num_outputs + n[None, :], out_tn, mask=is_inside_tn)
