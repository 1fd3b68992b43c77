"""However the work is cut, a token's experts are those that the gate scores best, and each token's
are reported once.
"""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from harness import PROMPTS, merge_outputs, random_ids, run_answers, scheduler_for
from local_expert_actors import ExpertActors, expert_plan, ping_pong_chain
from reference import assert_best_experts
from tiny_models import random_model, split_model, tiny_args, tiny_plan, write_checkpoint

from tramontane.cluster.pipeline.local_chain import LocalStageChain
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.plan import PipelinePlan
from tramontane.proto.ports import StageChain
from tramontane.proto.request import Request, RequestOutput, SamplingParams
from tramontane.router.engine.router import Router
from tramontane.router.scheduling.policy import FixedInFlightPolicy
from tramontane.router.scheduling.scheduler import Scheduler

ARGS = tiny_args(n_layers=6)
CHOSEN = [prompt for prompt in PROMPTS if len(prompt) <= 65]
WITH_EXPERTS = SamplingParams(max_tokens=8, temperature=0.0, return_experts=(4, 0, 3))


def _by_layer(answer: RequestOutput) -> dict[int, list[list[int]]]:
    """By layer, position after position: asserts that none is missing, and none reported twice."""
    reported: dict[int, list[list[int]]] = {}
    for _, layer, start, expert_ids in answer.experts:
        own = reported.setdefault(layer, [])
        assert start == len(own)
        own += map(list, expert_ids)
    return reported


def _check(
    args: ModelArgs, prompts: list[list[int]], answers: list[RequestOutput], layers: tuple[int, ...]
) -> None:
    weights = random_model(args).state_dict()
    for prompt, answer in zip(prompts, answers, strict=True):
        reported = _by_layer(answer)
        assert sorted(reported) == sorted(layers)
        assert_best_experts(
            weights, args, prompt + [event.token_id for event in answer.events[:-1]], reported
        )


def _answers(
    chain: StageChain, scheduler: Scheduler, prompts: list[list[int]], sampling: SamplingParams
) -> list[RequestOutput]:
    return asyncio.run(run_answers(chain, scheduler, prompts, sampling))


def _in_process(
    plan: PipelinePlan, scheduler: Scheduler, prompts: list[list[int]], sampling: SamplingParams
) -> list[RequestOutput]:
    chain = LocalStageChain(split_model(random_model(plan.args), plan))
    try:
        return _answers(chain, scheduler, prompts, sampling)
    finally:
        chain.close()


@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("budget", [7, 64])
def test_experts_are_those_with_the_best_scores(num_stages: int, budget: int) -> None:
    plan = tiny_plan(ARGS, num_stages)
    answers = _in_process(plan, scheduler_for(plan, budget), CHOSEN, WITH_EXPERTS)
    _check(ARGS, CHOSEN, answers, WITH_EXPERTS.return_experts)


def test_experts_are_only_reported_on_request_also_next_to_a_request_for_them() -> None:
    wishes = [(5,), (), (0, 1), (), (5,)]
    prompts = CHOSEN[-len(wishes) :]
    plan = tiny_plan(ARGS, 2)
    chain = LocalStageChain(split_model(random_model(ARGS), plan))

    async def one(router: Router, prompt: list[int], layers: tuple[int, ...]) -> RequestOutput:
        request = Request.of(tuple(prompt), replace(WITH_EXPERTS, return_experts=layers))
        return merge_outputs([batch async for batch in router.generate(request)])

    async def scenario() -> list[RequestOutput]:
        router = Router(scheduler_for(plan, 16), chain)
        running = asyncio.create_task(router.run())
        answers = await asyncio.gather(
            *(one(router, *requested) for requested in zip(prompts, wishes, strict=True))
        )
        running.cancel()
        return answers

    for prompt, answer, layers in zip(prompts, asyncio.run(scenario()), wishes, strict=True):
        _check(ARGS, [prompt], [answer], layers)
    chain.close()


def test_a_sequence_that_is_computed_again_is_not_reported_again() -> None:
    """Pages for the prompts, but not for the answers: some sequences give theirs back in the
    middle.
    """
    args = tiny_args(window=None, n_layers=4)
    roomy = tiny_plan(args, 2, 4)
    classes = tuple(replace(c, num_pages=150) for c in roomy.cache.classes)
    scarce = replace(
        roomy,
        stages=tuple(replace(s, cache=replace(s.cache, classes=classes)) for s in roomy.stages),
    )
    prompts = [random_ids(12, seed) for seed in range(12)]
    with_experts = SamplingParams(max_tokens=40, temperature=0.0, return_experts=(1, 3))
    scheduler = scheduler_for(scarce, 64)
    answers = _in_process(scarce, scheduler, prompts, with_experts)
    assert scheduler.num_preempted > 0
    _check(args, prompts, answers, with_experts.return_experts)


@pytest.mark.parametrize(("num_stages", "max_open"), [(1, 3), (2, 2)])
def test_experts_elsewhere_are_chosen_here(tmp_path: Path, num_stages: int, max_open: int) -> None:
    """Several micro-batches open in a stage at once keep what was requested of them apart."""
    plan = tiny_plan(ARGS, num_stages)
    folder = write_checkpoint(tmp_path, ARGS, random_model(ARGS))
    with ping_pong_chain(
        plan, folder, ExpertActors(expert_plan(ARGS, 2), folder), max_open
    ) as chain:
        answers = _answers(
            chain, scheduler_for(plan, 16, FixedInFlightPolicy(4, 16)), CHOSEN, WITH_EXPERTS
        )
    _check(ARGS, CHOSEN, answers, WITH_EXPERTS.return_experts)
