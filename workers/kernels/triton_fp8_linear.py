"""Triton's grouped product of fp8 rows and fp8 matrices: the tensor cores multiply fp8 by fp8,
without conversion.

The rows are quantized like the rows of dense layers, see ``triton_linear``; scales of rows and of
outputs multiply the sums.

The matrix is the first operand and the rows are the second, so a tile is computed as its transpose.
Hopper multiplies fp8 only with ``wgmma``, whose first operand has at least 64 rows and whose second
may have 16; Triton converts fewer than 64 rows of the first operand to 16 bits. Ada's ``mma`` takes
either.

Shape letters: C rows (choices sorted by expert), E experts, N outputs and K inputs of a matrix; r,
n, k of a tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tramontane.workers.device.alignment import aligned
from tramontane.workers.kernels.quantized_linear import MAX_FP8
from tramontane.workers.kernels.triton_linear import Tile, find_group, num_tiles, quantize_rows_fp8

# One program of each fits into the 99 KiB of shared memory of a processor of Ada's, and two, but
# for the last tile, into the 227 KiB of an H100's: 96 KiB of a matrix are under way then. Mixtral
# 8x7B has 16 rows for each expert at 64 streams, and 32 rows are one tile of nearly every expert,
# which reads its matrix once. See docs/decisions/0074-fp8-experts.md.
FP8_TILES = (
    Tile(16, 64, 256, 4, 4),
    Tile(16, 128, 128, 4, 5),
    Tile(32, 64, 256, 4, 4),
    Tile(32, 128, 128, 4, 4),
    Tile(64, 128, 128, 4, 4),
    Tile(128, 128, 128, 8, 4),
)


def fp8_grouped_linear(
    x_CK: Tensor, weight_ENK: Tensor, ends_E: Tensor, scale_EN: Tensor | None, tile: Tile
) -> Tensor:
    """Compute x (W scale)^T by each row's expert, [C, N] in the dtype of x; the rows are quantized
    to fp8 here.

    ``weight_ENK`` is in fp8. Expert e has the rows from ``ends_E[e - 1]`` (int32) to ``ends_E[e]``.
    Rows after the last group are undefined. No tensor is read on the host.
    """
    assert scale_EN is not None
    numbers_CK, scale_C1 = quantize_rows_fp8(x_CK, MAX_FP8)
    return scaled_grouped_linear(
        numbers_CK, scale_C1, weight_ENK, ends_E, scale_EN, x_CK.dtype, tile
    )


def scaled_grouped_linear(
    numbers_CK: Tensor,
    scale_C1: Tensor,
    weight_ENK: Tensor,
    ends_E: Tensor,
    scale_EN: Tensor,
    dtype: torch.dtype,
    tile: Tile,
) -> Tensor:
    """Compute (numbers scale) (W scale)^T by each row's expert, [C, N] in this dtype, of numbers
    and matrices in fp8.
    """
    (num_rows, width), (num_experts, num_outputs, _) = numbers_CK.shape, weight_ENK.shape
    assert numbers_CK.dtype == weight_ENK.dtype == torch.float8_e4m3fn
    assert weight_ENK.shape[2] == width
    assert weight_ENK.is_contiguous()
    assert scale_EN.is_contiguous()
    out_CN = torch.empty(num_rows, num_outputs, dtype=dtype, device=numbers_CK.device)
    pointers = aligned(numbers_CK), scale_C1, weight_ENK, scale_EN, ends_E, out_CN
    constants = (
        num_experts,
        triton.next_power_of_2(num_experts),
        *tile[:3],
        width % tile.inputs == 0,
    )
    if num_rows:
        # Triton launches on the current device
        with torch.cuda.device_of(out_CN):  # type: ignore[no-untyped-call]
            grid = num_tiles(num_rows, num_experts, tile), triton.cdiv(num_outputs, tile.outputs)
            options = {"num_warps": tile.warps, "num_stages": tile.stages}
            _fp8_kernel[grid](*pointers, num_rows, num_outputs, width, *constants, **options)
    return out_CN


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _fp8_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    numbers_CK,
    scale_C,
    weight_ENK,
    scale_EN,
    ends_E,
    out_CN,
    num_rows,
    num_outputs,
    width,
    num_experts: tl.constexpr,
    e_block: tl.constexpr,
    r_block: tl.constexpr,
    n_block: tl.constexpr,
    k_block: tl.constexpr,
    is_whole: tl.constexpr,
):
    """Compute one tile of outputs. ``is_whole``: all blocks of inputs are full.

    Hopper accumulates fp8 products with fewer bits than a float32 has: the sum of each block of
    inputs is added to the others in float32 (``max_num_imprecise_acc``), as in torch's product by
    default. 4096 inputs are 32 sums of 128 products.
    """
    expert, first, end = find_group(ends_E, num_rows, num_experts, e_block, r_block)
    if first < end:
        r = first + tl.arange(0, r_block)[None, :]
        n = tl.program_id(1) * n_block + tl.arange(0, n_block)[:, None]
        rows = numbers_CK + r.to(tl.int64) * width  # 131072 rows of 16384 are 2**31 elements
        # As many outputs; 8 matrices of 28672 by 4096 are nearly 2**30.
        matrix_rows = weight_ENK + (tl.cast(expert, tl.int64) * num_outputs + n) * width
        sum_nr = tl.zeros((n_block, r_block), dtype=tl.float32)
        for start in range(0, width, k_block):
            k = start + tl.arange(0, k_block)
            is_row, is_output = r < end, n < num_outputs
            if not is_whole:
                is_row, is_output = is_row & (k[:, None] < width), is_output & (k[None, :] < width)
            weight_nk = tl.load(matrix_rows + k[None, :], mask=is_output, other=0.0)
            numbers_kr = tl.load(rows + k[:, None], mask=is_row, other=0.0)
            sum_nr = tl.dot(weight_nk, numbers_kr, sum_nr, max_num_imprecise_acc=k_block)
        scale_n = tl.load(scale_EN + expert * num_outputs + n, mask=n < num_outputs, other=0.0)
        scale_r = tl.load(scale_C + r, mask=r < end, other=0.0)
        out_nr = (sum_nr * scale_r * scale_n).to(out_CN.dtype.element_ty)
        tl.store(
            out_CN + r.to(tl.int64) * num_outputs + n, out_nr, mask=(r < end) & (n < num_outputs)
        )
