"""Expert actors that are killed one after the other while requests run, and the effect on the
requests.
"""

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import ray
from harness import GREEDY, scheduler_for
from ray.exceptions import RayError

from tramontane.cluster.actors.pipeline_spec import PipelineSpec
from tramontane.cluster.actors.worker_actor import NAMESPACE
from tramontane.cluster.pipeline.stage_chain import ObjectStoreStageChain
from tramontane.proto.request import Request, SamplingParams
from tramontane.router.engine.router import Router

STREAMS = 8
POLL_S = 0.05


@dataclass(frozen=True)
class KillOutcome:
    """``outputs`` are all prompts with their continuations; ``longest_pause_s`` is the longest
    between two tokens of a stream.
    """

    num_killed: int
    outputs: list[tuple[tuple[int, ...], list[int]]]
    longest_pause_s: float


async def kill_under_load(
    spec: PipelineSpec,
    chain: ObjectStoreStageChain,
    prompts: Sequence[Sequence[int]],
    kills: int,
    sampling: SamplingParams = GREEDY,
    on_kill: Callable[[int], None] = lambda _: None,
    min_outputs: int = 0,
) -> KillOutcome:
    """Run the prompts in turn on several streams until every killed expert actor serves again and
    all streams have ended since.

    ``on_kill`` is called with the number of each kill when its actor serves again. At least
    ``min_outputs`` prompts are run. Raises PipelineError if any request fails.
    """
    scheduler = scheduler_for(spec.plan, 64)
    router = Router(scheduler, chain)
    running = asyncio.create_task(router.run())
    outputs: list[tuple[tuple[int, ...], list[int]]] = []
    turns = itertools.cycle(map(tuple, prompts))
    is_over = asyncio.Event()
    pauses = [0.0]

    async def stream() -> None:
        while not is_over.is_set():
            prompt, token_ids = next(turns), list[int]()
            last = time.monotonic()
            async for batch in router.generate(Request.of(prompt, sampling)):
                token_ids += [event.token_id for event in batch.events]
                now = time.monotonic()
                pauses.append(now - last)
                last = now
            outputs.append((prompt, token_ids))

    async def kill_all() -> None:
        for number in range(kills):
            done_before = len(outputs)
            await asyncio.to_thread(_kill, spec, number)
            await asyncio.to_thread(on_kill, number)
            while len(outputs) < done_before + 2 * STREAMS:  # all have ended at least once since
                await asyncio.sleep(POLL_S)
        while len(outputs) < min_outputs:
            await asyncio.sleep(POLL_S)
        is_over.set()

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(kill_all())
            for _ in range(STREAMS):
                group.create_task(stream())
        scheduler.check_integrity()
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
    return KillOutcome(kills, outputs, max(pauses))


def _kill(spec: PipelineSpec, number: int) -> None:
    """Kill one of the expert actors, in turn; returns when its new process has served. Raises
    ValueError if it gets none.
    """
    assert spec.plan.experts is not None
    name = spec.expert_name(number % len(spec.plan.experts.actors))
    actor = ray.get_actor(name, NAMESPACE)
    pid = ray.get(actor.health.remote()).pid
    os.kill(pid, signal.SIGKILL)
    while True:
        ray.get_actor(name, NAMESPACE)
        with suppress(RayError):
            health = ray.get(actor.health.remote())
            if health.pid != pid and health.num_rows:
                return
        time.sleep(POLL_S)
