"""Triton matrix product by tiles: of one matrix, or of consecutive groups of rows with a matrix
each.

Every tile adds the products of a row in the order of the inputs, in float32. No sum is split
between programs, and the position of a row in its tile has no effect: see ``row_tiles.py`` for
products in which a row has the same bits in any batch.

``FEW_ROWS_TILES`` are for grouped products of few rows per expert and ``SMALL_BATCH_TILES`` for
products of few rows, in stages that need not be batch-invariant: the fastest is selected on the
GPU, see ``workers/model/expert_kernels.py`` and ``product_selection.py``.

Shape letters: C rows (tokens, or choices sorted by expert), E experts, N outputs and K inputs of a
matrix; r, n, k of a tile.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tramontane.workers.device.alignment import aligned


class Tile(NamedTuple):
    """Rows and outputs of a program, inputs per iteration, its warps, and the pipeline stages of
    its loads.
    """

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


# For 16 bits. Low, because the rows of a small batch are distributed over the experts, and with
# long runs of a matrix's inputs. Two programs fit into the 227 KiB of shared memory of a processor
# of an H100: of the first 108 KiB each.
FEW_ROWS_TILES = (
    Tile(16, 128, 128, 4, 4),
    Tile(16, 64, 256, 4, 3),
    Tile(16, 128, 64, 4, 6),
    Tile(32, 128, 128, 4, 3),
    Tile(64, 128, 64, 4, 4),
)
# For quantized expert matrices and many rows; torch has no such product.
MANY_ROWS_TILE = Tile(128, 128, 64, 8, 3)
# For 16 bits and one matrix, by the most rows: with few outputs, so that a matrix of 4096 is read
# by 64 or 128 programs.
SMALL_BATCH_TILES = {
    16: (Tile(16, 32, 256, 4, 4), Tile(16, 64, 128, 4, 4), Tile(16, 128, 128, 4, 4)),
    64: (
        Tile(64, 32, 256, 4, 3),
        Tile(64, 64, 128, 4, 3),
        Tile(32, 64, 128, 4, 4),
        Tile(64, 128, 64, 4, 4),
    ),
}


def tiled_linear(
    x_CK: Tensor, weight_NK: Tensor, scale_N: Tensor | None = None, *, tile: Tile
) -> Tensor:
    """Compute x W^T, or x (W scale)^T for quantized weights, [C, N] in the dtype of x, into which W
    is converted.
    """
    return _launch(x_CK, weight_NK[None], scale_N, None, tile, triton.cdiv(len(x_CK), tile.rows))


def tiled_grouped_linear(
    x_CK: Tensor, weight_ENK: Tensor, ends_E: Tensor, scale_EN: Tensor | None = None, *, tile: Tile
) -> Tensor:
    """Compute x W^T, or x (W scale)^T, by each row's expert, [C, N].

    Expert e has the rows from ``ends_E[e - 1]`` (int32) to ``ends_E[e]``.

    Rows after the last group are undefined. No tensor is read on the host: programs are launched
    for the maximum number of tiles.
    """
    return _launch(
        x_CK, weight_ENK, scale_EN, ends_E, tile, num_tiles(len(x_CK), len(weight_ENK), tile)
    )


def num_tiles(num_rows: int, num_experts: int, tile: Tile) -> int:
    """Return the maximum number of row tiles, for any division of the rows among the experts.

    200 rows of 8 experts: 3 full tiles of 64 rows, and one for each expert that is not full, 11. 20
    rows in tiles of 16: 9.
    """
    return min(num_rows // tile.rows + num_experts, num_rows)


def _launch(
    x_CK: Tensor,
    weight_ENK: Tensor,
    scale_EN: Tensor | None,
    ends_E: Tensor | None,
    tile: Tile,
    tiles: int,
) -> Tensor:
    x_CK = aligned(x_CK)
    assert scale_EN is None or scale_EN.is_contiguous()
    (num_rows, width), num_outputs = x_CK.shape, weight_ENK.shape[1]
    assert weight_ENK.shape[2] == width
    assert weight_ENK.is_contiguous()
    out_CN = torch.empty(num_rows, num_outputs, dtype=x_CK.dtype, device=x_CK.device)
    num_experts = 0 if ends_E is None else len(weight_ENK)
    pointers = (
        x_CK,
        weight_ENK,
        out_CN if scale_EN is None else scale_EN,
        out_CN if ends_E is None else ends_E,
        out_CN,
    )
    constants = num_experts, triton.next_power_of_2(max(num_experts, 1)), scale_EN is not None
    blocks = tile.rows, tile.outputs, tile.inputs, width % tile.inputs == 0
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    if num_rows:
        # Triton launches on the current device
        with torch.cuda.device_of(out_CN):  # type: ignore[no-untyped-call]
            grid = tiles, triton.cdiv(num_outputs, tile.outputs)
            _kernel[grid](*pointers, num_rows, num_outputs, width, *constants, *blocks, **options)
    return out_CN


@triton.jit  # type: ignore[untyped-decorator]
def find_group(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    ends_E, num_rows, num_experts: tl.constexpr, e_block: tl.constexpr, r_block: tl.constexpr
):
    """Return the expert of this program's tile, the tile's first row, and the end of the expert's
    rows.

    With tiles of 64 rows and groups that end at 70, 70 and 100: tiles 0 and 1 are rows 0 to 63 and
    64 to 69 of expert 0, tile 2 is rows 70 to 99 of expert 2, and tile 3 has none: its first row is
    not before the end.
    """
    tile = tl.program_id(0)
    if num_experts == 0:
        expert = 0
        first = tile * r_block
        end = num_rows
    else:
        e = tl.arange(0, e_block)
        starts_e = tl.load(ends_E + e - 1, mask=(e > 0) & (e < num_experts), other=0)
        ends_e = tl.load(ends_E + e, mask=e < num_experts, other=0)
        tiles_e = tl.where(e < num_experts, (ends_e - starts_e + r_block - 1) // r_block, 0)
        expert = tl.sum((tl.cumsum(tiles_e, 0) <= tile).to(tl.int32))
        tiles_before = tl.sum(tl.where(e < expert, tiles_e, 0))
        first = tl.sum(tl.where(e == expert, starts_e, 0)) + (tile - tiles_before) * r_block
        end = tl.sum(tl.where(e == expert, ends_e, 0))
    return expert, first, end


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]  # as above
    x_CK,
    weight_ENK,
    scale_EN,
    ends_E,
    out_CN,
    num_rows,
    num_outputs,
    width,
    num_experts: tl.constexpr,
    e_block: tl.constexpr,
    has_scale: tl.constexpr,
    r_block: tl.constexpr,
    n_block: tl.constexpr,
    k_block: tl.constexpr,
    is_whole: tl.constexpr,
):
    """Compute one tile of outputs. Programs of the same outputs are adjacent, so that they find the
    weights in the cache.

    ``is_whole``: all blocks of inputs are full.
    """
    expert, first, end = find_group(ends_E, num_rows, num_experts, e_block, r_block)
    if first < end:
        r = first + tl.arange(0, r_block)[:, None]
        n = tl.program_id(1) * n_block + tl.arange(0, n_block)[None, :]
        rows = x_CK + r.to(tl.int64) * width  # 131072 rows of 16384 are 2**31 elements
        # As many outputs; 8 matrices of 28672 by 4096 are nearly 2**30.
        matrix_rows = weight_ENK + (tl.cast(expert, tl.int64) * num_outputs + n) * width
        sum_rn = tl.zeros((r_block, n_block), dtype=tl.float32)
        for start in range(0, width, k_block):
            k = start + tl.arange(0, k_block)
            is_row, is_output = r < end, n < num_outputs
            if not is_whole:
                is_row, is_output = is_row & (k[None, :] < width), is_output & (k[:, None] < width)
            x_rk = tl.load(rows + k[None, :], mask=is_row, other=0.0)
            weight_kn = tl.load(matrix_rows + k[:, None], mask=is_output, other=0.0)
            # converts without rounding
            sum_rn = tl.dot(x_rk, weight_kn.to(x_rk.dtype), sum_rn, input_precision="ieee")
        if has_scale:
            sum_rn *= tl.load(
                scale_EN + expert * num_outputs + n, mask=n < num_outputs, other=0.0
            ).to(tl.float32)
        out_rn = sum_rn.to(out_CN.dtype.element_ty)
        tl.store(
            out_CN + r.to(tl.int64) * num_outputs + n, out_rn, mask=(r < end) & (n < num_outputs)
        )


# Triton kernel for the product of a few tokens and a matrix, bound by reading the matrix once.
#
# A library's product for one token makes tiles of 8 or more columns, too few of them for a GPU if a
# matrix is small, and adds up splits with a second kernel. Here each program computes some outputs
# of all tokens in float32.
#
# Shape letters: T tokens, K inputs, N outputs of a matrix; n and k of a block of them, t tokens.

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
        _gemv_kernel[(triton.cdiv(num_outputs, block.outputs),)](
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
def _gemv_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
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


# Triton kernels for quantized matrices: activations to fp8, and a few tokens times a quantized
# matrix.
#
# With few tokens, reading the weights is the bottleneck: one byte per element takes half the time
# of bfloat16, and no weights are converted to float in memory.
#
# Shape letters: T tokens, K inputs, N outputs of a matrix; t, n, k of a block of them.

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
    """Quantize each token to fp8 numbers with the maximum ``largest``; return them and the scales
    [T, 1] in float32.
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
        _quantized_gemv_kernel[(triton.cdiv(num_rows, ROWS),)](
            x_TK.contiguous(), numbers_NK, scale_N, out_TN, *sizes, num_stages=STAGES
        )
    return out_TN


@triton.jit(do_not_specialize=["num_tokens"])  # type: ignore[untyped-decorator]
def _quantized_gemv_kernel(  # type: ignore[no-untyped-def]
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
