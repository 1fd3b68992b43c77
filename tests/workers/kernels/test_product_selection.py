"""Products of small batches: the kernel for up to four tokens, by the interpreter and compiled, and
which one is chosen.
"""

from pathlib import Path

import pytest
import torch
from compiled_kernels import resource_usage
from gemv_checks import CHECKS
from kernel_tests import checks_as_tests
from torch.nn import functional as F

from tramontane.workers.device.kernel_choices import KernelChoices
from tramontane.workers.device.kernel_selection import Compute, KernelSelector
from tramontane.workers.kernels import triton_linear
from tramontane.workers.kernels.linear import Linear
from tramontane.workers.kernels.product_selection import select_products
from tramontane.workers.kernels.triton_linear import BLOCKS, SMALL_BATCH_TILES, GemvBlock, Tile

failures, test_interpreted, test_on_a_gpu = checks_as_tests("gemv_checks", CHECKS)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_it_compiles_for_hopper_without_spills(block: GemvBlock) -> None:
    constants = (1, block.outputs, block.inputs, True)
    types = ("*bf16", "*bf16", "*bf16", "i32", "i32", "i32")
    usage = resource_usage(
        "tramontane.workers.kernels.triton_linear",
        "_gemv_kernel",
        types,
        constants,
        (0, 1, 2, 4, 5),
        block.warps,
        3,
    )
    assert usage.spilled_bytes == 0
    assert usage.has_wide_loads


@pytest.mark.parametrize(
    "tile", [tile for tiles in SMALL_BATCH_TILES.values() for tile in tiles], ids=str
)
def test_tiles_compile_for_hopper_without_spills(tile: Tile) -> None:
    types = (*("*bf16", "*bf16", "*bf16", "*bf16", "*bf16"), *("i32",) * 3)
    constants = (0, 1, False, tile.rows, tile.outputs, tile.inputs, True)
    module = "tramontane.workers.kernels.triton_linear"
    usage = resource_usage(
        module, "_kernel", types, constants, (0, 1, 2, 3, 4, 6, 7), tile.warps, tile.stages
    )
    assert usage.spilled_bytes == 0
    assert usage.has_wide_loads
    assert usage.shared_bytes <= 227 * 1024


def _layers(dtype: torch.dtype) -> list[Linear]:
    layers = [Linear(8, 16), Linear(8, 16), Linear(16, 8)]
    return [layer.to(dtype) for layer in layers]


class Kernels:
    """Stands for Triton's kernels, and notes what is computed by which; by its clock those in
    ``fast`` take half as long.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fast: str, factor: float = 1.0) -> None:
        self.used: list[str] = []
        self._fast, self._factor = fast, factor
        monkeypatch.setattr(
            triton_linear,
            "gemv",
            lambda x_TK, weight_NK, block: self._product(f"gemv {block[0]}", x_TK, weight_NK),
        )
        monkeypatch.setattr(
            triton_linear,
            "tiled_linear",
            lambda x_TK, weight_NK, tile: self._product(f"tiles {tile[0]}", x_TK, weight_NK),
        )

    def _product(self, name: str, x_TK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        self.used.append(name)
        return F.linear(x_TK, weight_NK) * self._factor

    def clock(self, compute: Compute) -> float:
        self.used.clear()
        compute()
        return 1.0 if self.used and self.used[0].startswith(self._fast) else 2.0


@pytest.mark.parametrize(
    ("fast", "expected"),
    [
        ("gemv 16", {1: "gemv 16", 2: "gemv 16", 3: "", 64: "", 65: ""}),
        (
            "tiles",
            {1: "", 2: "", 3: "tiles 16", 16: "tiles 16", 17: "tiles 64", 64: "tiles 64", 65: ""},
        ),
        ("none", {1: "", 64: ""}),
    ],
)
def test_a_kernel_is_used_where_it_is_faster(
    fast: str, expected: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the number of tokens; "" is the library's."""
    kernels, layers = Kernels(monkeypatch, fast), _layers(torch.bfloat16)
    select_products(layers, KernelSelector(kernels.clock))
    for layer in layers:
        for num_tokens, name in expected.items():
            kernels.used.clear()
            x_TK = torch.ones(num_tokens, layer.in_features, dtype=torch.bfloat16)
            assert torch.equal(layer(x_TK), F.linear(x_TK, layer.weight))
            assert kernels.used == ([name] if name else []), num_tokens
        kernels.used.clear()
        with torch.no_grad():
            layer(torch.ones(1, layer.in_features))
        assert not kernels.used, "activations in float32 are not multiplied in 16 bits"


def test_a_kernel_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = _layers(torch.bfloat16)
    select_products(layers, KernelSelector(Kernels(monkeypatch, "", factor=1.1).clock))
    assert all(
        name == "the library" for layer in layers for _, name, _ in layer.small_batch_products
    )


def test_the_products_are_the_same_after_a_restart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Though another kernel is the fastest then. Matrices of another data type are asked for by
    themselves.
    """
    choices = KernelChoices("a GPU", tmp_path)

    def chosen(fast: str, dtype: torch.dtype) -> tuple[list[tuple[int, str]], int]:
        kernels, layers, timed = Kernels(monkeypatch, fast), _layers(dtype), list[float]()

        def clock(compute: Compute) -> float:
            timed.append(kernels.clock(compute))
            return timed[-1]

        select_products(layers, KernelSelector(clock, choices))
        names = {
            tuple((most, name) for most, name, _ in layer.small_batch_products) for layer in layers
        }
        return [*names.pop()], len(timed)

    first, num_timed = chosen("gemv 16", torch.bfloat16)
    assert num_timed == 2 * (
        2 * (1 + len(BLOCKS)) + sum(1 + len(SMALL_BATCH_TILES[number]) for number in (16, 64))
    )
    assert [name.split("x")[0] for _, name in first] == [
        "gemv 16",
        "gemv 16",
        "the library",
        "the library",
    ]
    assert chosen("tiles", torch.bfloat16) == (first, 0)
    other, num_timed = chosen("tiles", torch.float16)
    assert num_timed > 0
    assert other != first


def test_matrices_in_float32_keep_the_library() -> None:
    layers = _layers(torch.float32)
    select_products(layers, KernelSelector(lambda _: pytest.fail("nothing is timed")))
    assert not any(layer.small_batch_products for layer in layers)
