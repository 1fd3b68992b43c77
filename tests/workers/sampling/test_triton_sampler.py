"""The sampling kernel: interpreted, compiled for GPUs that are not there, and on a GPU."""

import pytest
import torch

pytest.importorskip("triton")

from compiled_kernels import resource_usage
from interpreted_checks import run_interpreted, some
from sampler_checks import CHECKS

from tramontane.workers.sampling.integer_sampler import choose_plainly, row_params
from tramontane.workers.sampling.sampler import kernel_for
from tramontane.workers.sampling.triton_sampler import BLOCK, WARPS, choose_tokens

REGISTERS = 65_536  # of a multiprocessor
TYPES = ("*fp32", "*i64", "*i32", "*i64", "i32")


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return run_interpreted("sampler_checks", *some(CHECKS))


@pytest.mark.interpreted
@pytest.mark.parametrize("name", some(CHECKS))
def test_interpreted(failures: dict[str, str], name: str) -> None:
    assert not failures[name], failures[name]


@pytest.mark.parametrize(
    ("vocab", "capability"), [(32_000, 80), (32_000, 89), (32_000, 90), (131_072, 90), (32_003, 90)]
)
def test_compiled_for_gpus_that_are_not_here(vocab: int, capability: int) -> None:
    """A program of 16 warps has all its numbers in registers, and its quotients are rounded as
    PyTorch's are.

    The code is one for all vocabularies that are multiples of 16.
    """
    aligned = range(5) if vocab % 16 == 0 else range(4)
    usage = resource_usage(
        "tramontane.workers.sampling.triton_sampler",
        "_kernel",
        TYPES,
        (BLOCK,),
        aligned,
        WARPS,
        3,
        capability,
    )
    assert usage.spilled_bytes == 0
    assert usage.rounds_as_pytorch
    assert usage.registers * WARPS * 32 <= REGISTERS
    assert usage.has_wide_loads is (vocab % 16 == 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("name", CHECKS)
def test_on_a_gpu(name: str) -> None:
    CHECKS[name]("cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("vocab", [32_000, 32_003, 131_072])
def test_it_is_used_on_a_gpu_and_recorded_in_a_graph(vocab: int) -> None:
    from sampler_checks import CUTS, _random

    device = torch.device("cuda")
    assert kernel_for(device, vocab) is choose_tokens
    logits_SV = _random(len(CUTS), vocab, seed=1).to(device)
    params_S5 = row_params(CUTS, [0.3] * len(CUTS), device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens_S = choose_tokens(logits_SV, params_S5)
    for uniform in (0.1, 0.9):
        params_S5.copy_(row_params(CUTS, [uniform] * len(CUTS), device))
        graph.replay()
        assert torch.equal(tokens_S, choose_plainly(logits_SV, params_S5))
