"""Prompts through a router and a chain of stages, all at once or one by one."""

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import starmap
from typing import Any, TypeVar

from tramontane.cluster.actors.pipeline_spec import PipelineSpec
from tramontane.cluster.pipeline.lifecycle import running_pipeline
from tramontane.cluster.pipeline.local_chain import LocalStageChain
from tramontane.cluster.pipeline.stage_chain import ObjectStoreStageChain
from tramontane.proto.plan import PipelinePlan
from tramontane.proto.ports import StageChain
from tramontane.proto.request import Request, RequestOutput, SamplingParams
from tramontane.proto.step import STEP_TIMEOUT_S, StepResult
from tramontane.router.engine.router import Router
from tramontane.router.scheduling.balanced_policy import BalancedPolicy
from tramontane.router.scheduling.policy import FixedInFlightPolicy, Policy
from tramontane.router.scheduling.scheduler import Scheduler
from tramontane.router.scheduling.waiting_queue import SchedulerLimits
from tramontane.workers.stage.stage_worker import StageWorker

T = TypeVar("T")
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


def random_ids(num_tokens: int, seed: int, vocab_size: int = 96) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocab_size) for _ in range(num_tokens)]


def _prompts() -> list[list[int]]:
    """Return 32 prompts: lengths around every boundary of window 24 and pages of 16 and 64, and
    random ones up to 600.
    """
    rng = random.Random(7)
    lengths = [1, 2, 3, 6, 7, 8, 15, 16, 17, 23, 24, 25, 47, 48, 49, 63, 64, 65, 127, 128, 600, 599]
    lengths += [rng.randint(1, 600) for _ in range(32 - len(lengths))]
    return [random_ids(n, seed) for seed, n in enumerate(lengths)]


PROMPTS = _prompts()


def scheduler_for(
    plan: PipelinePlan, budget: int = 512, policy: Policy | None = None, **limits: Any
) -> Scheduler:
    """``limits`` are other fields of ``SchedulerLimits``."""
    sizes = plan.max_num_seqs, budget, plan.max_model_len, plan.args.vocab_size
    return Scheduler(
        plan.cache,
        SchedulerLimits(*sizes, **limits),
        policy or BalancedPolicy(len(plan.stages), budget),
    )


def fixed_scheduler(
    plan: PipelinePlan,
    budget: int,
    in_flight: int,
    *,
    enable_prefix_caching: bool = True,
    **limits: Any,
) -> Scheduler:
    """Return a scheduler with so many micro-batches in flight, whatever they take; ``limits`` are
    other fields of ``SchedulerLimits``.
    """
    policy = FixedInFlightPolicy(in_flight, budget)
    return scheduler_for(
        plan, budget, policy, enable_prefix_caching=enable_prefix_caching, **limits
    )


async def run_prompts(
    chain: StageChain,
    scheduler: Scheduler,
    prompts: Sequence[list[int]],
    sampling: SamplingParams = GREEDY,
    *,
    together: bool = True,
    observe: Callable[[StepResult], None] | None = None,
    step_timeout_s: float = STEP_TIMEOUT_S,
) -> list[list[int]]:
    """Return the token ids of every prompt's continuation. Afterwards every page must be free."""
    answers = await run_answers(
        chain,
        scheduler,
        prompts,
        sampling,
        together=together,
        observe=observe,
        step_timeout_s=step_timeout_s,
    )
    return [[event.token_id for event in answer.events] for answer in answers]


def merge_outputs(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Join consecutive outputs of one request into one."""
    return RequestOutput(
        tuple(event for output in outputs for event in output.events),
        outputs[-1].times,
        tuple(choices for output in outputs for choices in output.experts),
        tuple(logprobs for output in outputs for logprobs in output.logprobs),
    )


async def run_answers(
    chain: StageChain,
    scheduler: Scheduler,
    prompts: Sequence[list[int]],
    sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
    *,
    together: bool = True,
    observe: Callable[[StepResult], None] | None = None,
    step_timeout_s: float = STEP_TIMEOUT_S,
) -> list[RequestOutput]:
    """Run prompts like ``run_prompts``, and return the complete output of each. Each may have
    sampling parameters of its own.
    """
    router = Router(scheduler, chain, observe, step_timeout_s=step_timeout_s)
    running = asyncio.create_task(router.run())

    each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling

    async def one(prompt: list[int], sampling: SamplingParams) -> RequestOutput:
        request = Request.of(tuple(prompt), sampling)
        return merge_outputs([batch async for batch in router.generate(request)])

    requests = list(zip(prompts, each, strict=True))
    outputs = (
        list(await asyncio.gather(*starmap(one, requests)))
        if together
        else [await one(*request) for request in requests]
    )
    scheduler.check_integrity()
    assert scheduler.is_idle
    is_local = isinstance(chain, LocalStageChain)
    assert not (is_local and router.health.num_recoveries), (
        "a stage that fails is recovered, and the answers are the same"
    )
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    return outputs


@contextmanager
def running_chain(
    spec: PipelineSpec, report: Callable[[str], None] = lambda _: None
) -> Iterator[ObjectStoreStageChain]:
    """``running_pipeline`` for synchronous code: an event loop in a thread renews the lease in the
    background.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="pipeline", daemon=True)
    thread.start()

    def run(step: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(step, loop).result()

    pipeline = running_pipeline(spec, report)
    try:
        chain = run(pipeline.__aenter__())
        try:
            yield chain
        finally:
            run(pipeline.__aexit__(None, None, None))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def run_in_process(
    plan: PipelinePlan,
    workers: list[StageWorker],
    prompts: Sequence[list[int]],
    sampling: SamplingParams = GREEDY,
    *,
    budget: int = 512,
    max_in_flight: int | None = None,
    together: bool = True,
    async_scheduling: bool = False,
) -> list[list[int]]:
    chain = LocalStageChain(workers)
    try:
        scheduler = scheduler_for(
            plan, budget, FixedInFlightPolicy(max_in_flight, budget) if max_in_flight else None
        )
        scheduler.limits = replace(scheduler.limits, async_scheduling=async_scheduling)
        return asyncio.run(run_prompts(chain, scheduler, prompts, sampling, together=together))
    finally:
        chain.close()
