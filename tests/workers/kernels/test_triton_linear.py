"""Triton's products with fixed tiles, and its norm: by the interpreter, compiled for GPUs that are
not there, and on a GPU.
"""

from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton")

from compiled_kernels import SM_90, resource_usage, run_compiled
from kernel_launches import Launches, unspecialized
from kernel_tests import checks_as_tests
from product_checks import CHECKS

from tramontane.workers.kernels import triton_fp8_linear, triton_linear, triton_norm, triton_silu
from tramontane.workers.kernels.row_invariance import TiledProducts
from tramontane.workers.kernels.row_tiles import (
    MAX_ROW_TILES,
    TILES,
    WIDE_TILE,
    choose_tile,
    edges,
    tiles_for,
)
from tramontane.workers.kernels.triton_fp8_linear import FP8_TILES
from tramontane.workers.kernels.triton_linear import Tile

# Shared memory of the smallest GPU with tensor cores for bfloat16, 99 KiB. Of an H100's 228 KiB two
# programs of the tiles for few rows take 113 KiB each, and 1 KiB of the system.
COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tramontane.workers.kernels import row_tiles
from tramontane.workers.kernels import triton_linear as linear

def compiled(kernel, types, constants, pointers, capability, warps, stages):
    types = (*types, *("constexpr",) * len(constants))
    sizes = {(i,): each for i, each in enumerate(constants, len(types) - len(constants))}
    aligned = {(i,): [["tt.divisibility", 16]] for i in pointers}
    source = ASTSource(kernel, dict(zip(kernel.arg_names, types, strict=True)), sizes, aligned)
    options = {"num_warps": warps, "num_stages": stages}
    made = triton.compile(source, GPUTarget("cuda", capability, 32), options=options)
    assert "mma" in made.asm["ptx"], "tensor cores"
    return made

for capability in (80, 89, 90):
    fixed = row_tiles.tiles_for(2, capability // 10)
    tiles = (*fixed, *(linear.FEW_ROWS_TILES if capability == 90 else ()))
    for tile in tiles:
        for is_whole in (False, True):
            types = (*("*bf16", "*bf16", "*fp32", "*i32", "*bf16"), *("i32",) * 3)
            sizes, pointers = (8, 8, False, *tile[:3], is_whole), (0, 1, 2, 3, 4, 6, 7)
            made = compiled(linear._kernel, types, sizes, pointers, capability, *tile[3:])
            limit = 113 if tile not in fixed else 227 if capability == 90 else 99
            assert made.metadata.shared <= limit * 1024, (tile, made.metadata.shared)
            # 16 bytes at a time, ahead of their use
            assert "cp.async.cg.shared.global" in made.asm["ptx"]
            assert "st.local" not in made.asm["ptx"]
for number in ("*i8", "*fp8e4nv"):
    for tile in (*linear.FEW_ROWS_TILES, linear.MANY_ROWS_TILE, *row_tiles.TILES[2]):
        types = (*("*bf16", number, "*fp32", "*i32", "*bf16"), *("i32",) * 3)
        sizes, aligned = (8, 8, True, *tile[:3], True), (0, 1, 2, 3, 4, 6, 7)
        made = compiled(linear._kernel, types, sizes, aligned, 90, *tile[3:])
        assert made.metadata.shared <= 227 * 1024, (tile, made.metadata.shared)
        assert "st.local" not in made.asm["ptx"]
"""


failures, test_interpreted, test_on_a_gpu = checks_as_tests("product_checks", CHECKS)


def test_kernels_compile_for_gpus_that_are_not_here() -> None:
    """Those of bfloat16, whose tiles fit into the shared memory of a small GPU."""
    run_compiled(COMPILED)


def test_the_activation_compiles_for_hopper_without_spills() -> None:
    """Of width 14336."""
    types, module = ("*bf16", "*bf16", "i32"), "tramontane.workers.kernels.triton_silu"
    usage = resource_usage(module, "_kernel", types, (triton_silu.F_BLOCK,), range(3), 4, stages=3)
    assert usage.spilled_bytes == 0
    assert usage.has_wide_loads


@pytest.mark.parametrize("tile", FP8_TILES, ids=str)
@pytest.mark.parametrize("capability", [89, SM_90])
def test_tensor_cores_multiply_fp8_by_fp8(capability: int, tile: Tile) -> None:
    """And nothing else: no number is converted first. Ada's processors have 99 KiB of shared
    memory, Hopper's 227.
    """
    types, module = (
        ("*fp8e4nv", "*fp32", "*fp8e4nv", "*fp32", "*i32", "*bf16", *("i32",) * 3),
        triton_fp8_linear.__name__,
    )
    pointers_and_sizes, constants = (*range(6), 7, 8), (8, 8, *tile[:3], True)
    usage = resource_usage(
        module,
        "_fp8_kernel",
        types,
        constants,
        pointers_and_sizes,
        tile.warps,
        tile.stages,
        capability,
    )
    hopper = f"wgmma m64n{tile.rows}k32 e4m3 e4m3"
    assert usage.products == ((hopper,) if capability == SM_90 else ("mma m16n8k32 e4m3 e4m3",))
    if capability == SM_90:  # each block's sum is added to the others
        assert usage.additions >= tile.rows * tile.outputs / (32 * tile.warps)
    assert usage.spilled_bytes == 0
    assert usage.has_wide_loads
    programs = 1 if tile.rows == 128 or capability != SM_90 else 2
    assert programs * (usage.shared_bytes + 1024) <= (228 if capability == SM_90 else 100) * 1024
    assert programs * usage.registers * 32 * tile.warps <= 2**16


def test_ragged_inputs_of_fp8_spill_nothing() -> None:
    types, module = (
        ("*fp8e4nv", "*fp32", "*fp8e4nv", "*fp32", "*i32", "*bf16", *("i32",) * 3),
        triton_fp8_linear.__name__,
    )
    tile = FP8_TILES[-2]  # which takes the most registers
    usage = resource_usage(
        module, "_fp8_kernel", types, (8, 8, *tile[:3], False), (*range(6), 7, 8), *tile[3:], 89
    )
    assert usage.spilled_bytes == 0


@pytest.mark.parametrize("has_more", [False, True], ids=["alone", "after an addition"])
def test_the_norm_compiles_for_hopper_without_spills(has_more: bool) -> None:
    """Of width 4096."""
    types, module = (*("*bf16",) * 5, "i32", "fp32"), "tramontane.workers.kernels.triton_norm"
    usage = resource_usage(
        module, "_kernel", types, (4096, has_more), range(6), triton_norm.WARPS, stages=3
    )
    assert usage.spilled_bytes == 0
    assert usage.has_wide_loads


INSTRUCTIONS = {
    80: {"mma m16n8k16"},
    89: {"mma m16n8k16"},
    90: {f"wgmma m64n{outputs}k16" for outputs in (32, 64, 128, 256)},
}


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "i8"), ("bf16", "fp8e4nv")],
)
@pytest.mark.parametrize("capability", INSTRUCTIONS)
def test_all_tiles_multiply_with_instructions_of_one_kind(
    capability: int, dtype: str, weight_dtype: str
) -> None:
    """Of as many inputs, whatever the tile, without spills, in the shared memory of a GPU: bits are
    the same only then.
    """
    if weight_dtype == "fp8e4nv" and capability < 89:
        pytest.skip("this GPU has no fp8")
    is_quantized = weight_dtype != dtype
    types = (f"*{dtype}", f"*{weight_dtype}", "*fp32", "*i32", f"*{dtype}", *("i32",) * 3)
    found = set()
    for tile in tiles_for(2, capability // 10):
        usage = resource_usage(
            "tramontane.workers.kernels.triton_linear",
            "_kernel",
            types,
            (0, 1, is_quantized, *tile[:3], True),
            (0, 1, 2, 3, 4, 6, 7),
            tile.warps,
            tile.stages,
            capability,
        )
        assert usage.spilled_bytes == 0, tile
        assert usage.shared_bytes <= (227 if capability == 90 else 99) * 1024, tile
        found |= set(usage.products)
    assert found <= {
        f"{each} {dtype.replace('fp', 'f')} {dtype.replace('fp', 'f')}"
        for each in INSTRUCTIONS[capability]
    }
    assert found


def test_tiles_are_chosen_by_rows_and_outputs() -> None:
    """Those of Mistral 7B: queries, keys and values; o and down; gate and up; the head."""
    few = {
        num_outputs: choose_tile(TILES[2], 64, num_outputs)[:3]
        for num_outputs in (6144, 4096, 28672, 32000)
    }
    assert few == {
        6144: (64, 64, 128),
        4096: (64, 32, 256),
        28672: (64, 128, 64),
        32000: (64, 128, 64),
    }
    by_rows = {
        rows: choose_tile(TILES[2], rows, 4096).outputs
        for rows in (0, 1, 65, 384, 385, 896, 897, 2**20)
    }
    assert by_rows == {0: 32, 1: 32, 65: 64, 384: 64, 385: 128, 896: 128, 897: 256, 2**20: 256}
    assert edges(TILES[2], 4096) == (64, 65, 384, 385, 896, 897)
    assert edges(TILES[4], 4096) == ()
    assert [capability for capability in (8, 9, 10) if WIDE_TILE in tiles_for(2, capability)] == [
        9,
        10,
    ]
    assert edges(tiles_for(2, 8), 4096) == (64, 65, 384, 385)


def test_tiles_of_groups_are_chosen_by_the_rows_of_a_group() -> None:
    """Of which the host knows the mean. 8 experts: 128 rows are 16 each."""
    assert edges(TILES[2], 4096, 8) == (512, 513)
    chosen = {rows: choose_tile(TILES[2], rows, 4096, 8)[:2] for rows in (2, 16, 512, 513)}
    assert chosen == {2: (64, 64), 16: (64, 128), 512: (64, 128), 513: (128, 256)}


@pytest.mark.parametrize("num_outputs", [8, 1024, 4096, 6144, 14336, 32000])
@pytest.mark.parametrize("num_groups", [1, 3, 8])
def test_edges_are_all_numbers_of_rows_between_which_a_tile_changes(
    num_outputs: int, num_groups: int
) -> None:
    limit = num_groups * 128 * MAX_ROW_TILES + 2
    chosen = [
        choose_tile(TILES[2], rows, num_outputs, num_groups) for rows in range(num_groups, limit)
    ]
    changes = [rows for rows, pair in enumerate(pairwise(chosen), num_groups) if pair[0] != pair[1]]
    assert edges(TILES[2], num_outputs, num_groups) == tuple(
        rows + more for rows in changes for more in (0, 1)
    )


@pytest.mark.parametrize("num_outputs", [8, 1024, 4096, 6144, 14336, 28672, 32000])
def test_prompts_of_powers_of_two_have_every_tile(num_outputs: int) -> None:
    """A stage computes these before it is ready: nothing is compiled later."""
    tiles = {
        choose_tile(TILES[2], rows, num_outputs) for rows in (1, *(1 << n for n in range(4, 13)))
    }
    assert tiles == {choose_tile(TILES[2], rows, num_outputs) for rows in range(1, 4097)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_number_of_rows_changes_nothing_but_the_tile(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches, weight_ENK, products = (
        Launches(),
        torch.zeros(3, 75, 33, dtype=dtype),
        TiledProducts({(dtype,) * 2: TILES[dtype.itemsize]}),
    )
    monkeypatch.setattr(triton_linear, "_kernel", launches)
    for num_rows in (1, 2, 16, 17, 64, 65, 300):
        x_CK = torch.zeros(num_rows + 1, 33, dtype=dtype)[1:]  # which is not aligned
        products.linear(x_CK, weight_ENK[0], None)
        products.grouped(
            x_CK, weight_ENK, torch.tensor([0, num_rows, num_rows], dtype=torch.int32), None
        )
    assert {numbers[1:3] for numbers in launches.numbers} == {(75, 33)}
    tiles = {
        (*numbers[-4:-1], *options.values())
        for numbers, options in zip(launches.numbers, launches.options, strict=True)
    }
    assert tiles == ({TILES[4][0]} if dtype == torch.float32 else {TILES[2][2], TILES[2][-1]})


def test_kernels_are_not_compiled_again_for_some_numbers_of_rows() -> None:
    assert "num_rows" in unspecialized(triton_linear._kernel)
    assert "num_rows" in unspecialized(triton_fp8_linear._fp8_kernel)


def test_any_number_of_rows_of_a_norm_launches_the_same_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launches = Launches()
    monkeypatch.setattr(triton_norm, "_kernel", launches)
    for num_rows in (1, 2, 16, 300):
        triton_norm.rms_norm(torch.zeros(num_rows + 1, 33)[1:], torch.ones(33), 1e-5)
    assert launches.numbers == [(33, 1e-5, 64, False)] * 4
    assert launches.options == [launches.options[0]] * 4
