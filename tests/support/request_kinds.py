"""Requests of every kind, and their exact answers from real stages in this process."""

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from exact_values import Values, exact_values
from harness import merge_outputs, random_ids

from tramontane.cluster.pipeline.local_chain import LocalStageChain
from tramontane.proto.errors import PipelineError
from tramontane.proto.plan import PipelinePlan
from tramontane.proto.request import ExpertChoices, FinishReason, Request, SamplingParams
from tramontane.proto.step import MicroBatch, StepResult
from tramontane.router.engine.router import Router
from tramontane.router.scheduling.scheduler import Scheduler
from tramontane.router.structured.grammar import ResponseFormat, build_grammar
from tramontane.workers.stage.stage_worker import StageWorker

# of the tiny model, whose vocabulary is larger by one
PIECES = tuple(chr(32 + i).encode() for i in range(95))
RHYMES = {
    "type": "object",
    "properties": {"rhymes": {"type": "array", "items": {"enum": ["moon", "june"]}, "maxItems": 1}},
    "required": ["rhymes"],
}
GRAMMAR = build_grammar(
    ResponseFormat.model_validate(
        {"type": "json_schema", "json_schema": {"name": "r", "schema": RHYMES}}
    )
)
GREEDY = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
WISHES = (
    GREEDY,
    SamplingParams(max_tokens=30, temperature=0.8, seed=5, top_p=0.9),
    SamplingParams(
        max_tokens=24,
        temperature=0.9,
        seed=5,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.2,
    ),
    SamplingParams(
        max_tokens=20,
        temperature=0.7,
        seed=6,
        logprobs=2,
        prompt_logprobs=1,
        stop_token_ids=(7, 8, 9),
    ),
    SamplingParams(
        max_tokens=40,
        temperature=1.0,
        seed=7,
        min_tokens=9,
        stop_token_ids=tuple(range(20)),
        logprobs=1,
    ),
    SamplingParams(max_tokens=40, temperature=1.0, seed=8, grammar=GRAMMAR),
    SamplingParams(
        max_tokens=40, temperature=1.0, seed=9, grammar=GRAMMAR, presence_penalty=1.0, logprobs=0
    ),
    SamplingParams(max_tokens=12, temperature=0.8, seed=5, return_experts=(1,)),
    SamplingParams(max_tokens=30, temperature=0.8, seed=5, choice=1),
)
PROMPTS = [
    tuple(random_ids(length, seed))
    for seed, length in enumerate((5, 17, 40, 70, 16, 9, 30, 23, 17))
]

# with the experts of all tokens in the order of layers
Answer = tuple[Values, FinishReason | None, tuple[tuple[int, ...], ...]]


class FailingChain(LocalStageChain):
    """Stages that fail in the micro-batches with these numbers, before or after they have computed
    them, and are fenced again.

    Their caches are lost, and with them nodes, so that no request is to blame.
    """

    has_lost_node = True

    def __init__(self, stages: Sequence[StageWorker], fails_at: Collection[int]) -> None:
        super().__init__(stages)
        self._fails_at, self._numbers = fails_at, itertools.count()

    def submit(self, batch: MicroBatch) -> Awaitable[StepResult]:
        number = next(self._numbers)
        if number not in self._fails_at:
            return super().submit(batch)
        return self._lose(super().submit(batch) if number % 2 else None)

    async def fence(self) -> int:
        epoch = await super().fence()
        for stage in self.stages:
            for layer in stage.cache.layers.values():
                layer.k_NGd.fill_(math.nan)
                layer.v_NGd.fill_(math.nan)
                if layer.scales is not None:
                    layer.scales.k_NG.fill_(math.nan)
                    layer.scales.v_NG.fill_(math.nan)
            for keys_Ni in stage.cache.index_keys.values():
                keys_Ni.fill_(math.nan)
        return epoch

    def _lose(self, result: Awaitable[StepResult] | None) -> Awaitable[StepResult]:
        async def lose() -> StepResult:
            if result is not None:
                await result
            raise PipelineError("a stage has died")

        return asyncio.ensure_future(lose())


async def _ask(chain: LocalStageChain, scheduler: Scheduler, chosen: Sequence[int]) -> list[Answer]:
    router = Router(scheduler, chain)
    running = asyncio.create_task(router.run())

    async def one(number: int) -> Answer:
        request = Request.of(PROMPTS[number], WISHES[number])
        answer = merge_outputs([batch async for batch in router.generate(request)])
        return exact_values(answer), answer.events[-1].finish, _experts(answer.experts)

    try:
        return list(await asyncio.gather(*map(one, chosen)))
    finally:
        scheduler.check_integrity()
        is_failing = isinstance(chain, FailingChain)
        assert is_failing == (router.health.num_recoveries > 0), (
            "a stage that fails is recovered, and the answers are the same"
        )
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


def _experts(choices: Sequence[ExpertChoices]) -> tuple[tuple[int, ...], ...]:
    return tuple(
        ids
        for each in sorted(choices, key=lambda each: (each.layer, each.start))
        for ids in each.expert_ids
    )


def answers_of(
    folder: Path,
    plan: PipelinePlan,
    scheduler: Scheduler,
    chosen: Sequence[int] = range(len(WISHES)),
    make_chain: Callable[[Sequence[StageWorker]], LocalStageChain] = LocalStageChain,
) -> list[Answer]:
    """Return the answers to the chosen requests, sent together to a new pipeline."""
    chain = make_chain(
        [StageWorker.load(stage, folder, read_pieces=lambda: PIECES) for stage in plan.stages]
    )
    try:
        return asyncio.run(_ask(chain, scheduler, chosen))
    finally:
        chain.close()


def with_scarce_pages(plan: PipelinePlan) -> PipelinePlan:
    """Return the plan with pages for one and a half sequences, so that some are preempted."""
    longest = -(-plan.max_model_len // plan.cache.page_size)
    classes = tuple(
        replace(c, num_pages=min(c.num_pages, longest + longest // 2)) for c in plan.cache.classes
    )
    return replace(
        plan, stages=tuple(replace(s, cache=replace(s.cache, classes=classes)) for s in plan.stages)
    )
