"""Products of one and two tokens: the kernel interpreted, compiled for a GPU that is not there, and which one is chosen."""

from collections.abc import Callable

import pytest
import torch
from compiled_kernels import resource_usage
from gemv_checks import CHECKS
from interpreted_checks import run_interpreted
from torch.nn import functional as F

from tramontane.workers.device.kernel_selection import Compute
from tramontane.workers.kernels import triton_gemv
from tramontane.workers.kernels.gemv_selection import select_gemv
from tramontane.workers.kernels.linear import Linear
from tramontane.workers.kernels.triton_gemv import BLOCKS, GemvBlock


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return run_interpreted("gemv_checks")


@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(failures: dict[str, str], name: str) -> None:
    assert not failures[name], failures[name]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("name", CHECKS)
def test_on_a_gpu(name: str) -> None:
    CHECKS[name]("cuda")


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_it_compiles_for_hopper_without_spills(block: GemvBlock) -> None:
    constants = (1, block.outputs, block.inputs, True)
    types = ("*bf16", "*bf16", "*bf16", "i32", "i32", "i32")
    usage = resource_usage("tramontane.workers.kernels.triton_gemv", "_kernel", types, constants, (0, 1, 2, 4, 5), block.warps, 3)
    assert usage.spilled_bytes == 0
    assert usage.has_wide_loads


def _layers(dtype: torch.dtype) -> list[Linear]:
    layers = [Linear(8, 16), Linear(8, 16), Linear(16, 8)]
    return [layer.to(dtype) for layer in layers]


def _clock(fast: Callable[[str], bool], timed: list[str]) -> Callable[[Compute], float]:
    """Return a clock by which the products that are ``fast`` take half as long; ``timed`` gets what is timed."""

    def clock(compute: Compute) -> float:
        timed.clear()
        compute()
        return 1.0 if fast(timed[0] if timed else "the library") else 2.0

    return clock


@pytest.mark.parametrize(("fast", "expected"), [("GemvBlock(outputs=8", True), ("the library", False)])
def test_a_block_size_is_used_where_it_is_faster(fast: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[str] = []

    def gemv(x_TK: torch.Tensor, weight_NK: torch.Tensor, block: GemvBlock) -> torch.Tensor:
        timed.append(str(block))
        return F.linear(x_TK, weight_NK)

    monkeypatch.setattr(triton_gemv, "gemv", gemv)
    layers = _layers(torch.bfloat16)
    select_gemv(layers, _clock(lambda name: name.startswith(fast), timed))
    for layer in layers:
        assert list(layer.few_token_products) == ([1, 2] if expected else [])
        for num_tokens in (1, 2, 3):
            timed.clear()
            x_TK = torch.ones(num_tokens, layer.in_features, dtype=torch.bfloat16)
            assert torch.equal(layer(x_TK), F.linear(x_TK, layer.weight))
            assert len(timed) == (expected and num_tokens <= 2)


def test_a_block_size_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_gemv, "gemv", lambda x_TK, weight_NK, block: F.linear(x_TK, weight_NK) * 1.1)
    layers = _layers(torch.bfloat16)
    select_gemv(layers, lambda _: 1.0)
    assert not any(layer.few_token_products for layer in layers)


def test_matrices_in_float32_keep_the_library() -> None:
    layers = _layers(torch.float32)
    select_gemv(layers, lambda _: pytest.fail("nothing is timed"))
    assert not any(layer.few_token_products for layer in layers)
