"""Checks of Triton's products and norm of rows: they are right, and a row has the same bits in any
company.

Shape letters: C rows, E experts, N outputs, K inputs, D width of a norm.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from interpreted_checks import Check
from torch import Tensor

from tramontane.workers.kernels import row_invariance, triton_linear
from tramontane.workers.kernels.fused_ops import EAGER
from tramontane.workers.kernels.quantized_linear import MAX_FP8
from tramontane.workers.kernels.quantized_linear import quantize_rows_fp8 as dense_quantize_rows_fp8
from tramontane.workers.kernels.row_invariance import (
    RowProducts,
    TiledProducts,
    differing_row_count,
    equal_tiles,
    find_group_dependence,
)
from tramontane.workers.kernels.row_tiles import FEW_ROWS, TILES
from tramontane.workers.kernels.triton_fp8_linear import (
    FP8_TILES,
    fp8_grouped_linear,
    scaled_grouped_linear,
)
from tramontane.workers.kernels.triton_linear import (
    FEW_ROWS_TILES,
    MANY_ROWS_TILE,
    Tile,
    quantize_rows_fp8,
    tiled_grouped_linear,
    tiled_linear,
)
from tramontane.workers.kernels.triton_norm import add_rms_norm, rms_norm
from tramontane.workers.kernels.triton_silu import silu_and_mul

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
QUANTIZED = (torch.int8, torch.float8_e4m3fn)
# Relative, by norms. The interpreter cuts numbers off where a GPU rounds them to bfloat16.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 5e-4}
# tiles of rows and outputs and blocks of inputs, most of them ragged
NUM_ROWS, NUM_OUTPUTS, NUM_INPUTS = 70, 75, 133


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _assert_close(out: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert out.dtype == dtype
    difference = float((out.cpu().double() - expected).norm() / expected.norm())
    assert difference < TOLERANCE[dtype], difference


def check_product(dtype: torch.dtype, weight_dtype: torch.dtype, device: str) -> None:
    """Compare with float64, rows with the same rows in other company, and every tile with every
    other, bit for bit.
    """
    is_quantized = weight_dtype in QUANTIZED
    weight_NK = (
        (_random(NUM_OUTPUTS, NUM_INPUTS) * (40 if is_quantized else 1))
        .clamp(-127, 127)
        .to(weight_dtype)
    )
    scale_N = (
        torch.rand(NUM_OUTPUTS, generator=torch.Generator().manual_seed(1))
        if is_quantized
        else None
    )
    x_CK = _random(NUM_ROWS, NUM_INPUTS, seed=2).to(dtype)
    wide_NK = weight_NK.double() * (1 if scale_N is None else scale_N[:, None].double())
    own_NK, own_scale_N, own_CK = (
        weight_NK.to(device),
        None if scale_N is None else scale_N.to(device),
        x_CK.to(device),
    )
    products = _products(dtype, weight_dtype)
    out_CN = products.linear(own_CK, own_NK, own_scale_N)
    _assert_close(out_CN, x_CK.double() @ wide_NK.T, dtype)
    counts = (1, 3, FEW_ROWS, FEW_ROWS + 1)
    assert not differing_row_count(
        lambda some_CK: products.linear(some_CK, own_NK, own_scale_N), own_CK, counts
    )
    assert torch.equal(products.linear(own_CK.flip(0), own_NK, own_scale_N).flip(0), out_CN)
    assert products.linear(own_CK[:0], own_NK, own_scale_N).shape == (0, NUM_OUTPUTS)
    for tile in TILES[dtype.itemsize]:
        for rows in (slice(None), slice(3), slice(-1, None)):
            assert torch.equal(
                tiled_linear(own_CK[rows], own_NK, own_scale_N, tile=tile), out_CN[rows]
            ), (tile, rows)


def check_groups(dtype: torch.dtype, weight_dtype: torch.dtype, device: str) -> None:
    """Compare the grouped product with the product of each group, bit for bit; rows after the last
    group have no result.
    """
    is_quantized, products = weight_dtype in QUANTIZED, _products(dtype, weight_dtype)
    weight_ENK = (
        (_random(5, NUM_OUTPUTS, NUM_INPUTS) * (40 if is_quantized else 1))
        .clamp(-127, 127)
        .to(device, weight_dtype)
    )
    scale_EN = (
        torch.rand(5, NUM_OUTPUTS, generator=torch.Generator().manual_seed(1)).to(device)
        if is_quantized
        else None
    )
    many = (0, 68, 68, 133, 138)
    cases = (
        (NUM_ROWS + 70, many),
        (5 * FEW_ROWS + 1, many),
        (2, (0, 0, 1, 1, 2)),
        (3, (0, 0, 0, 0, 1)),
        (1, (0,) * 5),
    )
    for num_rows, ends in cases:
        x_CK = _random(num_rows, NUM_INPUTS, seed=3).to(device, dtype)
        out_CN = products.grouped(
            x_CK, weight_ENK, torch.tensor(ends, dtype=torch.int32, device=device), scale_EN
        )
        assert out_CN.shape == (num_rows, NUM_OUTPUTS)
        for expert, (start, end) in enumerate(zip((0, *ends), ends, strict=False)):
            own_scale_N = None if scale_EN is None else scale_EN[expert]
            own_CN = products.linear(x_CK[start:end], weight_ENK[expert], own_scale_N)
            assert torch.equal(out_CN[start:end], own_CN), (expert, start, end)
    assert not find_group_dependence(
        weight_ENK, scale_EN, dtype, RowProducts(products.linear, products.grouped)
    )


def _products(dtype: torch.dtype, weight_dtype: torch.dtype) -> TiledProducts:
    return TiledProducts({(dtype, weight_dtype): TILES[dtype.itemsize]})


def check_tiles_of_other_bits(device: str) -> None:
    """Let one tile add in another order, and one need too much memory: neither is used. One that is
    wrong is an error.
    """
    multiply, kept = (
        triton_linear.tiled_linear,
        [tile for tile in TILES[2] if tile.outputs not in (32, 256)],
    )

    def changed(x_CK: Tensor, weight_NK: Tensor, scale_N: Tensor | None, *, tile: Tile) -> Tensor:
        if tile.outputs == 256:
            raise MemoryError("out of resource: shared memory")
        out_CN = multiply(x_CK, weight_NK, scale_N, tile=tile)
        return (
            torch.where(out_CN == out_CN.max(), out_CN * 1.01, out_CN)
            if tile.outputs == 32
            else out_CN
        )

    with (
        patch.object(triton_linear, "tiled_linear", changed),
        patch.object(row_invariance.logger, "warning") as warning,
    ):
        assert equal_tiles(torch.device(device), torch.bfloat16, torch.bfloat16) == tuple(kept)
    assert warning.call_args[0][2:] == ("64x32x256x4x3", "64x128x64x4x4")
    with patch.object(triton_linear, "tiled_linear", side_effect=MemoryError("out of resource")):
        _assert_raises(
            MemoryError, partial(equal_tiles, torch.device(device), torch.float16, torch.int8)
        )
    with patch.object(
        triton_linear, "tiled_linear", lambda *given, tile: 1.1 * multiply(*given, tile=tile)
    ):
        _assert_raises(
            ArithmeticError, partial(equal_tiles, torch.device(device), torch.float16, torch.int8)
        )


def _assert_raises(kind: type[Exception], compute: Callable[[], object]) -> None:
    try:
        compute()
    except kind:
        return
    raise AssertionError(f"there is no {kind.__name__}")


def check_groups_of_other_bits(device: str) -> None:
    """Let a grouped product of some number of rows differ by a bit: the check at load says so."""
    weight_ENK, products = (
        _random(3, NUM_OUTPUTS, NUM_INPUTS).to(device),
        _products(torch.float32, torch.float32),
    )
    for count in (1, 20, 99):

        def grouped(x_CK: Tensor, *given: Any, count: int = count) -> Tensor:
            out_CN = products.grouped(x_CK, *given)
            return out_CN * (1 + 1e-6 * (len(x_CK) == count))

        own = RowProducts(products.linear, grouped, lambda _dtype, _weight: (99,))
        expected = (
            f"the product of {count} tokens in groups and 3 matrices of {NUM_OUTPUTS} x"
            f" {NUM_INPUTS} has other bits"
        )
        assert find_group_dependence(weight_ENK, None, torch.float32, own).startswith(expected)


def check_tile(tile: Tile, device: str) -> None:
    """Compare a grouped product with float64, with full and ragged blocks of inputs, and the most
    tiles that groups fill.
    """
    for num_inputs in (NUM_INPUTS, 2 * tile.inputs):
        for ends in (
            (0, 68, 68, 133, 138),
            (tile.rows + 1, tile.rows + 2, tile.rows + 3, 2 * tile.rows + 4, 2 * tile.rows + 5),
        ):
            weight_ENK = _random(5, 140, num_inputs).to(device, torch.bfloat16)
            x_CK = _random(ends[-1], num_inputs, seed=3).to(device, torch.bfloat16)
            out_CN = tiled_grouped_linear(
                x_CK, weight_ENK, torch.tensor(ends, dtype=torch.int32, device=device), tile=tile
            )
            groups = zip(
                x_CK.cpu().double().tensor_split(ends[:-1]), weight_ENK.cpu().double(), strict=True
            )
            _assert_close(
                out_CN,
                torch.cat([x_cK @ weight_NK.T for x_cK, weight_NK in groups]),
                torch.bfloat16,
            )


def _groups_of_fp8(
    ends: tuple[int, ...], num_inputs: int, device: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return rows, of which two are behind the last group, matrices, ends and scales."""
    weight_ENK = (_random(len(ends), 140, num_inputs) * 40).to(device, torch.float8_e4m3fn)
    x_CK = (
        _random(ends[-1] + 2, num_inputs, seed=3)
        * torch.exp2(torch.arange(ends[-1] + 2) % 5 - 2)[:, None]
    ).bfloat16()
    scale_EN = torch.rand(len(ends), 140, generator=torch.Generator().manual_seed(1)).to(device)
    return (
        x_CK.to(device),
        weight_ENK,
        torch.tensor(ends, dtype=torch.int32, device=device),
        scale_EN,
    )


def check_fp8_tile(tile: Tile, device: str) -> None:
    """Compare with float64: ragged blocks, experts without rows, one row, more rows than a tile,
    rows of no expert.
    """
    full = tile.rows + 1, tile.rows + 2, tile.rows + 3, 2 * tile.rows + 4, 2 * tile.rows + 5
    for num_inputs, ends in (
        (tile.inputs + 16, (0, 21, 21, 21 + tile.rows)),
        (2 * tile.inputs, full),
        (tile.inputs, (0, 1)),
    ):
        x_CK, weight_ENK, ends_E, scale_EN = _groups_of_fp8(ends, num_inputs, device)
        x_CK[-1] = torch.nan  # which stays in its row
        numbers_CK, scale_C1 = quantize_rows_fp8(x_CK, MAX_FP8)
        out_CN = fp8_grouped_linear(x_CK, weight_ENK, ends_E, scale_EN, tile)
        assert out_CN.shape == (len(x_CK), 140)
        wide_CK = (numbers_CK.float().double() * scale_C1.double()).cpu()
        wide_ENK = (weight_ENK.float().double() * scale_EN[..., None].double()).cpu()
        groups = zip(wide_CK.tensor_split([*ends[:-1], ends[-1]])[:-1], wide_ENK, strict=True)
        _assert_close(
            out_CN[: ends[-1]],
            torch.cat([x_cK @ weight_NK.T for x_cK, weight_NK in groups]),
            torch.bfloat16,
        )
        # of which tile a row is part changes nothing
        for start, end in zip((0, *ends), ends, strict=False):
            alone_CN = fp8_grouped_linear(
                x_CK[start:end], weight_ENK, ends_E.clamp(start, end) - start, scale_EN, tile
            )
            assert torch.equal(alone_CN, out_CN[start:end])
    assert fp8_grouped_linear(x_CK[:0], weight_ENK, ends_E * 0, scale_EN, tile).shape == (0, 140)


def check_fp8_rows(device: str) -> None:
    """Rows of experts are quantized bit for bit as those of dense layers, here without anything to
    round.

    Nothing is written outside the rows of groups, whose last tiles are not full.
    """
    x_CK, weight_ENK, ends_E, scale_EN = _groups_of_fp8((0, 21, 21, 38), 144, device)
    rounded_CK, scale_C1 = dense_quantize_rows_fp8(x_CK)
    x_CK = (rounded_CK.float() * torch.exp2(scale_C1.log2().ceil())).bfloat16()
    x_CK[:, 3] = MAX_FP8 * torch.exp2(scale_C1.log2().ceil()).bfloat16().squeeze(1)
    rounded_CK, scale_C1 = dense_quantize_rows_fp8(x_CK)
    assert len(scale_C1.unique()) > 2
    with patch.object(torch, "empty", lambda *shape, **of: torch.full(shape, torch.nan, **of)):
        expected_CN = scaled_grouped_linear(
            rounded_CK, scale_C1, weight_ENK, ends_E, scale_EN, torch.bfloat16, FP8_TILES[0]
        )
    assert expected_CN[38:].isnan().all()
    out_CN = fp8_grouped_linear(x_CK, weight_ENK, ends_E, scale_EN, FP8_TILES[0])
    rtol = 0 if device == "cpu" else 2**-7  # a GPU's division in Triton may be off by a last bit
    torch.testing.assert_close(out_CN[:38], expected_CN[:38], rtol=rtol, atol=0)


def check_norm(dtype: torch.dtype, device: str) -> None:
    """Compare with PyTorch, rows with the same rows in other company, and both entries with each
    other.
    """
    h_TD, more_TD = (_random(9, NUM_INPUTS, seed=seed).to(device, dtype) for seed in (4, 5))
    weight_D = _random(NUM_INPUTS, seed=6).to(device, dtype)
    sum_TD, out_TD = add_rms_norm(h_TD, more_TD, weight_D, 1e-5)
    is_rounded = device != "cpu" or dtype != torch.bfloat16  # the interpreter cuts numbers off
    torch.testing.assert_close(sum_TD, h_TD + more_TD, rtol=0 if is_rounded else 2**-7, atol=0)
    assert torch.equal(out_TD, rms_norm(sum_TD, weight_D, 1e-5))
    alone_TD = torch.cat([rms_norm(row_1D, weight_D, 1e-5) for row_1D in sum_TD.split(1)])
    assert torch.equal(alone_TD, out_TD)
    _assert_close(out_TD, EAGER.rms_norm(sum_TD.double(), weight_D.double(), 1e-5).cpu(), dtype)


def check_silu(dtype: torch.dtype, device: str) -> None:
    """Compare with PyTorch, and rows with the same rows in other company."""
    gate_up_T2F = _random(5, 2 * 1100, seed=7).mul_(4).to(device, dtype)
    out_TF = silu_and_mul(gate_up_T2F)
    _assert_close(out_TF, EAGER.silu_and_mul(gate_up_T2F.double()).cpu(), dtype)
    assert not differing_row_count(silu_and_mul, gate_up_T2F, (1, 2, 4))
    assert torch.equal(
        silu_and_mul(gate_up_T2F[1:2, 1:-1]), torch.cat([silu_and_mul(gate_up_T2F[:, 1:-1])])[1:2]
    )
    assert silu_and_mul(gate_up_T2F[:0]).shape == (0, 1100)


CHECKS: dict[str, Check] = {
    **{
        f"product of {x} and {w}": partial(check_product, x, w)
        for x in DTYPES
        for w in (x, *QUANTIZED)
    },
    "tiles of other bits": check_tiles_of_other_bits,
    "groups of other bits": check_groups_of_other_bits,
    "product of torch.float32 and torch.bfloat16": partial(
        check_product, torch.float32, torch.bfloat16
    ),
    **{f"groups in {dtype}": partial(check_groups, dtype, dtype) for dtype in DTYPES},
    **{f"groups in bfloat16 and {w}": partial(check_groups, torch.bfloat16, w) for w in QUANTIZED},
    **{f"{tile}": partial(check_tile, tile) for tile in (*FEW_ROWS_TILES, MANY_ROWS_TILE)},
    **{f"float8 {tile}": partial(check_fp8_tile, tile) for tile in FP8_TILES},
    "float8 rows": check_fp8_rows,
    **{f"norm in {dtype}": partial(check_norm, dtype) for dtype in DTYPES},
    **{f"silu in {dtype}": partial(check_silu, dtype) for dtype in DTYPES},
}
