"""Probabilities whose sums are exact: the same tokens as by floating sums, and none of it depends on an order of addition."""

import asyncio
from dataclasses import replace

import pytest
import torch
from harness import random_ids, run_answers, scheduler_for
from tiny_models import random_model, split_model, tiny_args, tiny_plan
from torch import Tensor

from tramontane.cluster.pipeline.local_chain import LocalStageChain
from tramontane.proto.request import SamplingParams
from tramontane.workers.sampling import logprobs, sampler
from tramontane.workers.sampling.exact_sums import UNITS, exact_logsumexp, exact_weights
from tramontane.workers.sampling.logprobs import token_logprobs
from tramontane.workers.sampling.sampler import sample
from tramontane.workers.stage.device_backend import backend_for

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
    assert exact_weights(torch.tensor([[0.0, -1.0, -30.0, -torch.inf]])).tolist() == [[2**34, 6320120675, 0, 0]]


def test_log_probabilities_are_those_of_floating_sums() -> None:
    logits_SV = _logits(4)
    torch.testing.assert_close(exact_logsumexp(logits_SV), logits_SV.double().logsumexp(-1, keepdim=True).float())
    floating, exact = (token_logprobs(logits_SV, [1, 2, 3, 4], [3, 0, 2, 1], has_exact) for has_exact in (False, True))
    for (chosen, top), (own, own_top) in zip(floating, exact, strict=True):
        assert own == pytest.approx(chosen, abs=1e-5)
        assert [token for token, _ in own_top] == [token for token, _ in top]


def test_of_equal_logits_the_first_are_the_best() -> None:
    """Of logits in bfloat16, of which many are equal."""
    logits_SV = _logits(20).bfloat16().float()
    for row, (_, top) in zip(
        logits_SV.tolist(), token_logprobs(logits_SV, [5] * 20, [20] * 20, has_exact_sums=True), strict=True
    ):
        assert [token for token, _ in top] == sorted(range(VOCAB), key=lambda token, row=row: (-row[token], token))[:20]  # type: ignore[misc]


@pytest.mark.parametrize("params", [{}, {"top_p": 0.7}, {"top_k": 5}, {"min_p": 0.1}, {"top_p": 0.9, "top_k": 50}], ids=str)
def test_tokens_are_those_of_floating_sums(params: dict[str, float]) -> None:
    """Of draws that are not next to a border, which are nearly all."""
    logits_SV = _logits(200)
    sampling = [SamplingParams(temperature=1.0, seed=7, **params)] * 200  # type: ignore[arg-type]
    floating, exact = (sample(logits_SV, sampling, range(200), has_exact) for has_exact in (False, True))
    assert int((floating != exact).sum()) <= 1
    alone = torch.cat([sample(logits_SV[row : row + 1], sampling[:1], [row], has_exact_sums=True) for row in range(20)])
    assert torch.equal(alone, exact[:20])


@pytest.mark.parametrize("has_exact_sums", [True, False])
def test_sums_are_exact_where_they_have_to_be_and_nowhere_else(monkeypatch: pytest.MonkeyPatch, has_exact_sums: bool) -> None:
    """The last of the sorted tokens gets nearly all of the weight, and every logarithm is 7."""
    logits_SV = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    monkeypatch.setattr(sampler, "exact_weights", lambda _: torch.tensor([[1.0, 1.0, 1.0, UNITS]], dtype=torch.float64))
    monkeypatch.setattr(logprobs, "exact_logsumexp", lambda _: torch.tensor([[7.0]]))
    params = [SamplingParams(temperature=0.01, seed=1)]
    assert sample(logits_SV, params, [0], has_exact_sums).tolist() == [3 if has_exact_sums else 0]
    ((logprob, _),) = token_logprobs(logits_SV, [0], [1], has_exact_sums)
    assert (logprob == -4.0) is has_exact_sums


def test_top_p_is_a_share_of_all_weights() -> None:
    """Of shares of 0.64, 0.24, 0.09 and 0.03 the first two are kept: 0.64 is less than 0.7, 0.88 is not."""
    logits_SV = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    params = [SamplingParams(temperature=1.0, top_p=0.7, seed=seed) for seed in range(200)]
    tokens = sample(logits_SV.expand(200, -1), params, range(200), has_exact_sums=True)
    assert set(tokens.tolist()) == {0, 1}


@pytest.mark.parametrize("has_exact_sums", [True, False])
def test_a_stage_adds_as_its_backend_says(monkeypatch: pytest.MonkeyPatch, has_exact_sums: bool) -> None:
    """Where it samples two tokens, and for log-probabilities of these and of the prompt."""
    calls = {"weights": 0, "logsumexp": 0}

    def weights(logits_SV: Tensor) -> Tensor:
        calls["weights"] += 1
        return exact_weights(logits_SV)

    def logsumexp(logits_RV: Tensor) -> Tensor:
        calls["logsumexp"] += 1
        return exact_logsumexp(logits_RV)

    monkeypatch.setattr(sampler, "exact_weights", weights)
    monkeypatch.setattr(logprobs, "exact_logsumexp", logsumexp)
    args = tiny_args(n_layers=1, moe=False)
    plan, model = tiny_plan(args), random_model(args)
    backend = replace(backend_for(plan.stages[0], torch.device("cpu")), has_exact_sums=has_exact_sums)
    chain = LocalStageChain(split_model(model, plan, backend=backend))
    params = SamplingParams(2, 1.0, logprobs=1, prompt_logprobs=1)
    try:
        asyncio.run(run_answers(chain, scheduler_for(plan), [random_ids(5, 0)], params))
    finally:
        chain.close()
    assert calls == ({"weights": 2, "logsumexp": 3} if has_exact_sums else {"weights": 0, "logsumexp": 0})
