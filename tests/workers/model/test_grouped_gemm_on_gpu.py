"""Grouped products on a GPU: each expert's, without waiting for the device, and in a CUDA graph
replayed for other choices.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tiny_models import groups_of, tiny_args, tiny_plan
from torch import Tensor

from tramontane.proto.model_args import MoeArgs
from tramontane.proto.model_folder import RandomWeights
from tramontane.proto.plan import ExpertId
from tramontane.workers.model.expert_kernels import (
    MAX_SMALL_BATCH_ROWS,
    ProductBySize,
    candidates,
    torch_grouped_linear,
    uneven_ends,
)
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
    return torch.randn(num_rows, ARGS.dim, generator=torch.Generator().manual_seed(seed)).to(
        "cuda", torch.bfloat16
    )


def _run(model: StageModel, hidden_TD: Tensor, is_padding_T: Tensor | None) -> Tensor:
    for layer in LAYERS:
        hidden_TD = hidden_TD + model.feed_forward(layer, hidden_TD, None, is_padding_T)
    return hidden_TD


@pytest.mark.parametrize(
    "sizes",
    [
        [1, 0, 0, 1, 0, 0, 0, 0],
        [0] * 7 + [1],
        [0, 300, 0, 0, 0, 0, 0, 0],
        [5, 0, 17, 64, 1, 0, 129, 40],
        [0] * 8,
    ],
    ids=str,
)
def test_grouped_products_are_those_of_each_expert(model: StageModel, sizes: list[int]) -> None:
    experts, groups = model.experts, groups_of(sizes)
    assert isinstance(experts, LocalExperts)
    assert experts.is_graph_safe
    rows_CD = _rows(sum(sizes) + 2)  # two of which belong to no expert
    with torch.inference_mode():
        grouped = experts(1, rows_CD, replace(groups, offsets_E=groups.offsets_E.cuda()))[
            : sum(sizes)
        ]
        each = run_experts(
            [experts.expert(ExpertId(1, expert)) for expert in range(8)], sizes, rows_CD
        )
    torch.testing.assert_close(grouped, each, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("num_tokens", range(1, MAX_SMALL_BATCH_ROWS // 2 + 1))
def test_few_choices_are_what_a_grouped_product_makes_of_them(
    model: StageModel, num_tokens: int
) -> None:
    """Of the gate's own choices, all experts' products by torch; the last token is padding."""
    assert isinstance(model.experts, LocalExperts)
    x_TD, is_padding_T = (
        _rows(num_tokens),
        torch.arange(num_tokens, device="cuda") == max(num_tokens - 1, 1),
    )
    own = x_TD[: max(num_tokens - 1, 1)]
    for layer, stack in model.experts._stacks.items():
        assert stack.has_small_batch_kernel, "the kernels do not work here"
        with torch.inference_mode():
            few_TD = model.feed_forward(layer, x_TD, None, is_padding_T)
            groups, weights_Tk = model.choose_experts(layer, own)
            rows_CD = stack._replace(
                w13_product=torch_grouped_linear, w2_product=torch_grouped_linear
            ).run(groups.permute(own), groups.offsets_E)
            expected_TD = groups.combine(rows_CD, weights_Tk)
        torch.testing.assert_close(few_TD[: len(own)], expected_TD, rtol=TOLERANCE, atol=TOLERANCE)
        assert not few_TD[len(own) :].any()


@pytest.mark.parametrize("num_rows", [17, 64, 200, 512, 600])
def test_every_product_by_size_is_torchs(model: StageModel, num_rows: int) -> None:
    assert isinstance(model.experts, LocalExperts)
    stack, ends_E, rows_CD = (
        model.experts._stacks[0],
        uneven_ends(num_rows, 8).cuda(),
        _rows(num_rows),
    )
    assert isinstance(stack.w13_product, ProductBySize)
    with torch.inference_mode():
        expected_C2F = torch_grouped_linear(rows_CD, stack.w13_E2FD, ends_E)
        for product in (stack.w13_product, *candidates().values()):
            out_C2F = product(rows_CD, stack.w13_E2FD, ends_E)
            torch.testing.assert_close(out_C2F, expected_C2F, rtol=TOLERANCE, atol=TOLERANCE)


def test_nothing_waits_for_the_device(model: StageModel, no_waiting: None) -> None:
    with torch.inference_mode():
        hidden_TD = torch.ones(5, ARGS.dim, dtype=torch.bfloat16, device="cuda")
        _run(model, hidden_TD, None)
        _run(model, hidden_TD, torch.zeros(5, dtype=torch.bool, device="cuda"))


@pytest.mark.parametrize("num_tokens", [4, 16])
def test_a_cuda_graph_follows_other_choices_and_counts_no_padding(
    model: StageModel, num_tokens: int
) -> None:
    """Of 4 tokens choice by choice, of 16 as a grouped product."""
    hidden_TD, is_padding_T = (
        _rows(num_tokens),
        torch.ones(num_tokens, dtype=torch.bool, device="cuda"),
    )
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
            torch.testing.assert_close(
                out_TD[:own], expected_TD[:own], rtol=TOLERANCE, atol=TOLERANCE
            )
            assert torch.equal(out_TD[own:], hidden_TD[own:]), "nothing was added to padding"
            torch.cuda.synchronize()
            after = model.expert_load
            assert [sum(after[layer]) - sum(before[layer]) for layer in LAYERS] == [2 * own] * 2
