"""Penalties, biases and log-probabilities through router and stages: however the work is cut, those
of a plain loop.
"""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness import random_ids, run_answers, scheduler_for
from logit_formulas import changed_logits
from reference import Expected, assert_same_tokens, reference_logits
from tiny_models import random_model, split_model, tiny_args, tiny_plan
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM, MixtralConfig, MixtralForCausalLM

from tramontane.cluster.pipeline.local_chain import LocalStageChain
from tramontane.proto.model_folder import read_model_args
from tramontane.proto.plan import PipelinePlan
from tramontane.proto.request import RequestOutput, SamplingParams
from tramontane.router.scheduling.scheduler import Scheduler
from tramontane.workers.sampling import logprobs as logprobs_module
from tramontane.workers.stage.stage_worker import StageWorker

ARGS = tiny_args(n_layers=4, window=None, moe=False)
PROMPTS = [random_ids(12, seed) for seed in range(12)]
EOS = 5
PENALTIES = {
    "presence_penalty": 0.6,
    "frequency_penalty": 0.4,
    "repetition_penalty": 1.2,
    "logit_bias": ((3, 2.0), (4, -50.0)),
}
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, **PENALTIES)  # type: ignore[arg-type]
SEEDED = SamplingParams(max_tokens=40, temperature=0.8, seed=5, min_p=0.02, **PENALTIES)  # type: ignore[arg-type]


def _scarce(plan: PipelinePlan, num_pages: int) -> PipelinePlan:
    """With pages for the prompts, but not for the answers: some sequences give theirs back and are
    computed again.
    """
    classes = tuple(replace(c, num_pages=num_pages) for c in plan.cache.classes)
    return replace(
        plan, stages=tuple(replace(s, cache=replace(s.cache, classes=classes)) for s in plan.stages)
    )


def _answers(
    workers: list[StageWorker],
    scheduler: Scheduler,
    prompts: list[list[int]],
    sampling: SamplingParams,
    *,
    together: bool = True,
) -> list[RequestOutput]:
    chain = LocalStageChain(workers)
    try:
        return asyncio.run(run_answers(chain, scheduler, prompts, sampling, together=together))
    finally:
        chain.close()


def _ids(answers: list[RequestOutput]) -> list[list[int]]:
    return [[event.token_id for event in answer.events] for answer in answers]


def test_penalised_tokens_are_those_of_a_plain_loop() -> None:
    model = random_model(ARGS)
    weights = model.state_dict()
    plan = tiny_plan(ARGS, 2, 4)
    answers = _ids(_answers(split_model(model, plan), scheduler_for(plan, 7), PROMPTS[:6], GREEDY))
    plain = _ids(
        _answers(
            split_model(model, plan), scheduler_for(plan, 7), PROMPTS[:6], SamplingParams(12, 0.0)
        )
    )
    assert all(answer != other for answer, other in zip(answers, plain, strict=True)), (
        "it makes a difference"
    )
    for prompt, answer in zip(PROMPTS, answers, strict=False):
        token_ids: list[int] = []
        seconds, gaps = [], []
        for _ in range(GREEDY.max_tokens):
            logits = reference_logits(weights, ARGS, prompt + token_ids)[-1].tolist()
            best = torch.tensor(changed_logits(logits, GREEDY, prompt, token_ids)).topk(2)
            token_ids.append(int(best.indices[0]))
            seconds.append(int(best.indices[1]))
            gaps.append(float(best.values[0] - best.values[1]))
        assert_same_tokens(
            f"penalised, prompt {prompt[:3]}", answer, Expected(token_ids, seconds, gaps)
        )


@pytest.mark.parametrize(
    "sampling", [replace(GREEDY, max_tokens=40), SEEDED], ids=["greedy", "seeded"]
)
def test_penalised_tokens_are_the_same_however_they_are_cut_and_computed_again(
    sampling: SamplingParams,
) -> None:
    model = random_model(ARGS)
    roomy, scarce, one_stage = (
        tiny_plan(ARGS, 2, 4),
        _scarce(tiny_plan(ARGS, 2, 4), 150),
        tiny_plan(ARGS, 1, 16),
    )
    preempting = scheduler_for(scarce, 64)
    outputs = [
        _ids(_answers(split_model(model, roomy), scheduler_for(roomy, 64), PROMPTS, sampling)),
        _ids(_answers(split_model(model, scarce), preempting, PROMPTS, sampling)),
        _ids(
            _answers(split_model(model, one_stage), scheduler_for(one_stage, 5), PROMPTS, sampling)
        ),
        _ids(
            _answers(
                split_model(model, one_stage),
                scheduler_for(one_stage, 512),
                PROMPTS,
                sampling,
                together=False,
            )
        ),
    ]
    assert preempting.num_preempted > 0
    assert outputs[0] == outputs[1] == outputs[2] == outputs[3]


def test_nothing_is_kept_of_sequences_that_have_ended() -> None:
    plan = _scarce(tiny_plan(ARGS, 2, 4), 150)
    workers = split_model(random_model(ARGS), plan)
    with_logprobs = replace(SEEDED, logprobs=1, prompt_logprobs=0)
    _answers(workers, scheduler_for(plan, 7), PROMPTS, with_logprobs)
    # with it the last ones are released
    _answers(workers, scheduler_for(plan, 7), [[1, 2, 3]], SamplingParams(1))
    last = workers[-1].last_stage
    assert last is not None
    assert len(last.logits_processor._states) == last.logprobs.num_sequences == 0


@pytest.mark.parametrize("is_of_model", [True, False])
def test_no_sequence_ends_before_min_tokens(is_of_model: bool) -> None:
    """With a bias that makes everything but the end of the sequence, or one of stop_token_ids, all
    but impossible.
    """
    args = replace(ARGS, eos_token_ids=(EOS,) if is_of_model else ())
    plan = tiny_plan(args, 2)
    stops = {} if is_of_model else {"stop_token_ids": (EOS,), "ignore_eos": True}
    wanting = SamplingParams(max_tokens=9, temperature=1.0, logit_bias=((EOS, 100.0),), **stops)
    for min_tokens in (0, 1, 4, 9):
        scheduler = scheduler_for(plan, 7)
        scheduler.limits = replace(scheduler.limits, eos_token_ids=args.eos_token_ids)
        answers = _answers(
            split_model(random_model(args), plan),
            scheduler,
            PROMPTS[:3],
            replace(wanting, min_tokens=min_tokens),
        )
        for ids in _ids(answers):
            assert EOS not in ids[:min_tokens]
            assert len(ids) == min(min_tokens + 1, 9)
            assert ids[min_tokens:] == [EOS] * (len(ids) - min_tokens)


# Log-probabilities


def _by_position(
    prompt: list[int], answer: RequestOutput, first: int
) -> tuple[list[float], list[tuple[tuple[int, float], ...]]]:
    """Of positions ``first`` to the last, one after the other: asserts that none is missing and
    none reported twice.
    """
    logprobs: list[float] = []
    top: list[tuple[tuple[int, float], ...]] = []
    for _, start, some, some_top in answer.logprobs:
        assert start == first + len(logprobs)
        logprobs += some
        top += some_top
    assert first + len(logprobs) == len(prompt) + len(answer.events)
    return logprobs, top


def _check_reported(
    logits_TV: Tensor, prompt: list[int], answer: RequestOutput, sampling: SamplingParams
) -> None:
    """``logits_TV`` of prompt and answer by the reference."""
    first = len(prompt) if sampling.prompt_logprobs is None else 1
    ids = prompt + [event.token_id for event in answer.events]
    expected_TV = logits_TV.log_softmax(-1)
    for position, logprob, top in zip(
        range(first, len(ids)), *_by_position(prompt, answer, first), strict=True
    ):
        row_V = expected_TV[position - 1]
        assert abs(logprob - row_V[ids[position]].item()) < 1e-3
        most = sampling.logprobs if position >= len(prompt) else sampling.prompt_logprobs
        assert most is not None
        assert len({token_id for token_id, _ in top}) == len(top) == most
        assert [token_logprob for _, token_logprob in top] == pytest.approx(
            row_V.topk(most).values.tolist(), abs=1e-3
        )
        assert all(
            abs(token_logprob - row_V[token_id].item()) < 1e-3 for token_id, token_logprob in top
        )


@pytest.mark.parametrize("moe", [False, True])
def test_logprobs_are_those_of_transformers(tmp_path: Path, moe: bool) -> None:
    """Of prompts and answers, whatever the sampling parameters: they are the model's own. The
    checkpoint is transformers' too.
    """
    config = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 96,
    }
    config |= {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "sliding_window": 16,
    }
    torch.manual_seed(1)
    oracle = (
        MixtralForCausalLM(MixtralConfig(**config, num_local_experts=4))
        if moe
        else MistralForCausalLM(MistralConfig(**config))
    )
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.normal_(1.0, 0.3) if parameter.dim() == 1 else parameter.normal_(0.0, 0.3)
    oracle.eval().save_pretrained(tmp_path)
    args = read_model_args(tmp_path)
    plan = tiny_plan(args, 2)
    prompts = [random_ids(n, n) for n in (1, 2, 16, 33, 70)]
    workers = [StageWorker.load(stage, tmp_path) for stage in plan.stages]
    for sampling in (
        SamplingParams(9, 0.0, logprobs=5, prompt_logprobs=3),
        replace(SEEDED, max_tokens=9, logprobs=0),
    ):
        for prompt, answer in zip(
            prompts, _answers(workers, scheduler_for(plan, 11), prompts, sampling), strict=True
        ):
            ids = prompt + [event.token_id for event in answer.events]
            with torch.inference_mode():
                logits_TV = oracle(torch.tensor([ids]), use_cache=False).logits[0]
            assert logits_TV.std() > 0.1
            _check_reported(logits_TV, prompt, answer, sampling)


def test_what_is_computed_again_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in pieces of two rows at most, which is what a prompt's logits are bounded to here."""
    monkeypatch.setattr(logprobs_module, "MAX_LOGITS", 2 * ARGS.vocab_size)
    plan = _scarce(tiny_plan(ARGS, 2, 4), 150)
    model = random_model(ARGS)
    workers = split_model(model, plan)
    most_rows = 0

    def head(hidden_SD: Tensor) -> Tensor:
        nonlocal most_rows
        most_rows = max(most_rows, len(hidden_SD))
        return type(model).head(workers[-1].model, hidden_SD)

    assert workers[-1].last_stage is not None
    keeper = workers[-1].last_stage.logprobs
    of_prompts = keeper.prompts
    monkeypatch.setattr(
        keeper, "prompts", lambda batch, hidden_TD, _head: of_prompts(batch, hidden_TD, head)
    )
    scheduler = scheduler_for(plan, 64)
    with_logprobs = replace(SEEDED, logprobs=2, prompt_logprobs=1)
    weights = model.state_dict()
    for prompt, answer in zip(
        PROMPTS, _answers(workers, scheduler, PROMPTS, with_logprobs), strict=True
    ):
        ids = prompt + [event.token_id for event in answer.events]
        _check_reported(reference_logits(weights, ARGS, ids), prompt, answer, with_logprobs)
    assert scheduler.num_preempted > 0
    assert most_rows == 2


def test_a_token_without_probability_is_reported_as_openai_does() -> None:
    """Infinity cannot be written as JSON."""
    [found] = logprobs_module.token_logprobs(torch.tensor([[0.0, -torch.inf, 0.0]]), [1], [3])
    assert found is not None
    assert found[0] == -9999.0
    assert [round(logprob, 4) for _, logprob in found[1]] == [-0.6931, -0.6931, -9999.0]
    [found] = logprobs_module.token_logprobs(torch.zeros(1, 3), [1], [20])
    assert found is not None
    assert len(found[1]) == 3, "no more than there are"


@pytest.mark.parametrize("has_exact_sums", [False, True])
def test_rows_that_are_not_finite_have_no_log_probabilities(has_exact_sums: bool) -> None:
    nan, inf = torch.nan, torch.inf
    bad = [[0.0, inf, 0.0], [nan] * 3, [0.0, 1.0, nan], [-inf] * 3, [inf, -inf, nan]]
    good = [[0.0, 1.0, 2.0], [-inf, 3.0, -inf]]
    rows = torch.tensor([*bad, *good])
    reported = logprobs_module.token_logprobs(
        rows, [1] * len(rows), [2] * len(rows), has_exact_sums
    )
    assert reported[: len(bad)] == [None] * len(bad)
    assert reported[len(bad) :] == logprobs_module.token_logprobs(
        rows[len(bad) :], [1, 1], [2, 2], has_exact_sums
    )
    assert None not in reported[len(bad) :]


def test_log_probabilities_are_only_reported_on_request() -> None:
    plan = tiny_plan(ARGS, 2)
    answers = _answers(
        split_model(random_model(ARGS), plan),
        scheduler_for(plan, 16),
        PROMPTS[:4],
        SamplingParams(5),
    )
    assert all(answer.logprobs == () for answer in answers)
