"""Grouped products on a GPU: each expert's, without waiting for the device, and in a CUDA graph replayed for other choices."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tiny_models import groups_of, tiny_args, tiny_plan
from torch import Tensor

from tramontane.proto.layer_args import MoeArgs
from tramontane.proto.model_folder import RandomWeights
from tramontane.proto.plan import ExpertId
from tramontane.workers.model.grouped_gemm import MAX_SMALL_BATCH_ROWS
from tramontane.workers.model.moe import LocalExperts, run_experts
from tramontane.workers.model.transformer import StageModel
from tramontane.workers.stage.cuda_graphs import CudaGraphCapture
from tramontane.workers.weights.loader import load_module, supports_grouped_gemm
from tramontane.workers.weights.tensor_specs import stage_tensors

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")

LAYERS = range(2)
ARGS = replace(tiny_args(n_layers=2), dim=256, hidden_dim=512, moe=MoeArgs(8, 2))
PLAN = replace(tiny_plan(ARGS).stages[0], dtype="bfloat16")
TOLERANCE = 2e-2


@pytest.fixture(scope="module")
def model() -> StageModel:
    if not supports_grouped_gemm(PLAN, "cuda"):
        pytest.skip("this GPU has no kernel for grouped products")
    made = load_module(
        lambda: StageModel(ARGS, LAYERS),
        lambda layout: stage_tensors(ARGS, LAYERS, layout),
        PLAN,
        RandomWeights(),
        "cuda",
        lambda _read, _loaded: None,
        contiguous_experts=True,
    )
    made.finalize_weights(torch.device("cuda"))
    return made


@pytest.fixture
def no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # type: ignore[no-untyped-call]
    yield
    torch.cuda.set_sync_debug_mode("default")  # type: ignore[no-untyped-call]


def _rows(num_rows: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, ARGS.dim, generator=torch.Generator().manual_seed(seed)).to("cuda", torch.bfloat16)


def _run(model: StageModel, hidden_TD: Tensor, is_padding_T: Tensor | None) -> Tensor:
    for layer in LAYERS:
        hidden_TD = hidden_TD + model.feed_forward(layer, hidden_TD, None, is_padding_T)
    return hidden_TD


@pytest.mark.parametrize(
    "sizes",
    [[1, 0, 0, 1, 0, 0, 0, 0], [0] * 7 + [1], [0, 300, 0, 0, 0, 0, 0, 0], [5, 0, 17, 64, 1, 0, 129, 40], [0] * 8],
    ids=str,
)
def test_grouped_products_are_those_of_each_expert(model: StageModel, sizes: list[int]) -> None:
    experts, groups = model.experts, groups_of(sizes)
    assert isinstance(experts, LocalExperts)
    assert experts.is_graph_safe
    rows_CD = _rows(sum(sizes) + 2)  # two of which belong to no expert
    with torch.inference_mode():
        grouped = experts(1, rows_CD, replace(groups, offsets_E=groups.offsets_E.cuda()))[: sum(sizes)]
        each = run_experts([experts.expert(ExpertId(1, expert)) for expert in range(8)], sizes, rows_CD)
    torch.testing.assert_close(grouped, each, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("num_rows", range(1, MAX_SMALL_BATCH_ROWS + 1))
def test_few_rows_are_what_a_grouped_product_makes_of_them(model: StageModel, num_rows: int) -> None:
    assert isinstance(model.experts, LocalExperts)
    for stack in model.experts._stacks.values():
        assert stack.has_small_batch_kernel, "the kernel does not work here"
        for ends in ([0] * 7 + [num_rows], [num_rows] * 8, [0, *range(7)], [num_rows // 2] * 3 + [num_rows] * 5):
            ends_E, own = torch.tensor(ends, dtype=torch.int32, device="cuda").clamp(max=num_rows), slice(min(ends[-1], num_rows))
            with torch.inference_mode():
                rows_CD = _rows(num_rows)
                few, grouped = (each.run(rows_CD, ends_E)[own] for each in (stack, stack._replace(has_small_batch_kernel=False)))
            torch.testing.assert_close(few, grouped, rtol=TOLERANCE, atol=TOLERANCE)


def test_nothing_waits_for_the_device(model: StageModel, no_waiting: None) -> None:
    with torch.inference_mode():
        hidden_TD = torch.ones(5, ARGS.dim, dtype=torch.bfloat16, device="cuda")
        _run(model, hidden_TD, None)
        _run(model, hidden_TD, torch.zeros(5, dtype=torch.bool, device="cuda"))


@pytest.mark.parametrize("num_tokens", [4, 16])
def test_a_cuda_graph_follows_other_choices_and_counts_no_padding(model: StageModel, num_tokens: int) -> None:
    """Of 4 tokens row by row, of 16 as a grouped product."""
    hidden_TD, is_padding_T = _rows(num_tokens), torch.ones(num_tokens, dtype=torch.bool, device="cuda")
    with torch.inference_mode():
        replay = CudaGraphCapture()(lambda: _run(model, hidden_TD, is_padding_T))
        for seed in range(1, 9):
            own = num_tokens - seed % 4
            hidden_TD.copy_(_rows(num_tokens, seed))
            is_padding_T.copy_(torch.arange(num_tokens) >= own)
            expected_TD = _run(model, hidden_TD, None)
            replay().fill_(torch.nan)
            torch.cuda.synchronize()  # counts are read without waiting for a step
            before = model.expert_load
            out_TD = replay()
            torch.testing.assert_close(out_TD[:own], expected_TD[:own], rtol=TOLERANCE, atol=TOLERANCE)
            assert torch.equal(out_TD[own:], hidden_TD[own:]), "nothing was added to padding"
            after = model.expert_load
            assert [sum(after[layer]) - sum(before[layer]) for layer in LAYERS] == [2 * own] * 2
