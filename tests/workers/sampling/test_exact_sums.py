"""Probabilities whose sums are exact: as by floating sums, and none of it depends on an order of
addition.
"""

import asyncio
from dataclasses import replace

import pytest
import torch
from harness import random_ids, run_answers, scheduler_for
from tiny_models import random_model, split_model, tiny_args, tiny_plan
from torch import Tensor

from tramontane.cluster.pipeline.local_chain import LocalStageChain
from tramontane.proto.request import SamplingParams
from tramontane.workers.sampling import logprobs
from tramontane.workers.sampling.logprobs import (
    UNITS,
    exact_logsumexp,
    exact_weights,
    token_logprobs,
)
from tramontane.workers.stage.device_backend import select_backend

VOCAB = 20_000


def _logits(num_rows: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(0)) * scale


@pytest.mark.parametrize("scale", [0.0, 1.0, 8.0])
def test_sums_do_not_depend_on_the_order(scale: float) -> None:
    weights_SV = exact_weights(_logits(3, scale))
    mixed_SV = weights_SV[:, torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))]
    assert torch.equal(weights_SV.sum(-1), mixed_SV.sum(-1))
    assert torch.equal(weights_SV.cumsum(-1)[:, -1], mixed_SV.flip(-1).sum(-1))
    assert torch.equal(weights_SV, weights_SV.round())
    assert torch.equal(weights_SV.amax(-1), torch.full((3,), UNITS, dtype=torch.float64))
    assert UNITS * 2**19 <= 2**53


def test_the_worked_example() -> None:
    assert exact_weights(torch.tensor([[0.0, -1.0, -30.0, -torch.inf]])).tolist() == [
        [2**34, 6320120675, 0, 0]
    ]


def test_log_probabilities_are_those_of_floating_sums() -> None:
    logits_SV = _logits(4)
    torch.testing.assert_close(
        exact_logsumexp(logits_SV), logits_SV.double().logsumexp(-1, keepdim=True).float()
    )
    floating, exact = (
        token_logprobs(logits_SV, [1, 2, 3, 4], [3, 0, 2, 1], has_exact)
        for has_exact in (False, True)
    )
    for (chosen, top), (own, own_top) in zip(floating, exact, strict=True):
        assert own == pytest.approx(chosen, abs=1e-5)
        assert [token for token, _ in own_top] == [token for token, _ in top]


def test_of_equal_logits_the_first_are_the_best() -> None:
    """Of logits in bfloat16, of which many are equal."""
    logits_SV = _logits(20).bfloat16().float()
    for row, (_, top) in zip(
        logits_SV.tolist(),
        token_logprobs(logits_SV, [5] * 20, [20] * 20, has_exact_sums=True),
        strict=True,
    ):
        assert [token for token, _ in top] == sorted(
            range(VOCAB), key=lambda token, row=row: (-row[token], token)
        )[:20]  # type: ignore[misc]


@pytest.mark.parametrize("has_exact_sums", [True, False])
def test_a_stage_adds_as_its_backend_says(
    monkeypatch: pytest.MonkeyPatch, has_exact_sums: bool
) -> None:
    """For log-probabilities of two tokens and of the prompt."""
    calls = 0

    def logsumexp(logits_RV: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return exact_logsumexp(logits_RV)

    monkeypatch.setattr(logprobs, "exact_logsumexp", logsumexp)
    args = tiny_args(n_layers=1, moe=False)
    plan, model = tiny_plan(args), random_model(args)
    backend = replace(
        select_backend(plan.stages[0], torch.device("cpu")), has_exact_sums=has_exact_sums
    )
    chain = LocalStageChain(split_model(model, plan, backend=backend))
    params = SamplingParams(2, 1.0, logprobs=1, prompt_logprobs=1)
    try:
        asyncio.run(run_answers(chain, scheduler_for(plan), [random_ids(5, 0)], params))
    finally:
        chain.close()
    assert calls == (3 if has_exact_sums else 0)
