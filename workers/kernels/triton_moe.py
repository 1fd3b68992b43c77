"""Triton kernels for the experts of a few rows: every row by itself, bound by reading the weights of its expert.

A grouped GEMM makes tiles of 64 rows, of which one or two would be used, and too few tiles to keep a large GPU's memory
busy. Here each program computes some outputs of one row and sums in float32. Rows of the same expert are adjacent, so
that the second one finds the weights in the cache.

Shape letters: C choices (rows sorted by expert), E experts, N outputs and K inputs of one expert's matrix, F feed-forward
width, D model width; n and k of a block of them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

OUTPUTS = 8  # per program: 14336 outputs are 1792 programs per row
INPUTS = 512  # per iteration


def gate_up_gemv(rows_CD: Tensor, w13_E2FD: Tensor, ends_E: Tensor) -> Tensor:
    """Compute silu(w1 x) * w3 x by each row's expert, [C, F]. Rows after the last group are undefined."""
    return _launch(rows_CD, w13_E2FD, ends_E, w13_E2FD.shape[1] // 2, is_gated=True)


def down_gemv(rows_CF: Tensor, w2_EDF: Tensor, ends_E: Tensor) -> Tensor:
    """Compute w2 x by each row's expert, [C, D]. Rows after the last group are undefined."""
    return _launch(rows_CF, w2_EDF, ends_E, w2_EDF.shape[1], is_gated=False)


def _launch(rows_CK: Tensor, weights: Tensor, ends_E: Tensor, num_outputs: int, is_gated: bool) -> Tensor:
    num_rows, width = rows_CK.shape
    out_CN = torch.empty(num_rows, num_outputs, dtype=rows_CK.dtype, device=rows_CK.device)
    grid = num_rows, triton.cdiv(num_outputs, OUTPUTS)
    experts = len(ends_E), triton.next_power_of_2(len(ends_E))
    with torch.cuda.device_of(out_CN):  # type: ignore[no-untyped-call]  # Triton launches on the current device
        _kernel[grid](rows_CK, weights, ends_E, out_CN, num_outputs, width, *experts, is_gated, OUTPUTS, INPUTS)
    return out_CN


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    rows_CK,
    weights,
    ends_E,
    out_CN,
    num_outputs,
    width,
    num_experts: tl.constexpr,
    e_block: tl.constexpr,
    is_gated: tl.constexpr,
    n_block: tl.constexpr,
    k_block: tl.constexpr,
):
    """Compute some outputs of one row. With groups that end at 2, 2 and 5, row 3 is past two ends, so expert 2 has it."""
    row = tl.program_id(0)
    e = tl.arange(0, e_block)
    ends_e = tl.load(ends_E + e, mask=e < num_experts, other=row + 1)
    expert = tl.sum((ends_e <= row).to(tl.int32))
    if expert < num_experts:
        n = tl.program_id(1) * n_block + tl.arange(0, n_block)[:, None]
        matrix = expert.to(tl.int64) * num_outputs * width  # 8 of 28672 by 4096 are nearly 2**30 elements
        if is_gated:
            matrix *= 2  # w3's rows follow w1's
        first_nk = tl.zeros((n_block, k_block), dtype=tl.float32)
        second_nk = tl.zeros((n_block, k_block), dtype=tl.float32)
        for start in range(0, width, k_block):
            k = start + tl.arange(0, k_block)[None, :]
            inside = (n < num_outputs) & (k < width)
            x_k = tl.load(rows_CK + row * width + k, mask=k < width, other=0.0).to(tl.float32)
            elements = weights + matrix + n * width + k
            first_nk += x_k * tl.load(elements, mask=inside, other=0.0).to(tl.float32)
            if is_gated:
                second_nk += x_k * tl.load(elements + num_outputs * width, mask=inside, other=0.0).to(tl.float32)
        out_n = tl.sum(first_nk, axis=1)
        if is_gated:
            out_n = out_n * tl.sigmoid(out_n) * tl.sum(second_nk, axis=1)
        n_flat = tl.program_id(1) * n_block + tl.arange(0, n_block)
        tl.store(out_CN + row * num_outputs + n_flat, out_n.to(out_CN.dtype.element_ty), mask=n_flat < num_outputs)
