"""The router's loop with chains that misbehave: cancellation, failure, company."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from scripted import ScriptedChain, no_gate

from tramontane.proto.errors import PipelineError, RequestError
from tramontane.proto.plan import CachePlan, WindowClass
from tramontane.proto.request import SamplingParams, SequenceSpec, TokenEvent
from tramontane.proto.step import MicroBatch
from tramontane.router.admission import Limits
from tramontane.router.policy import EvenPolicy
from tramontane.router.router import Router
from tramontane.router.scheduler import Scheduler

CACHE = CachePlan(16, (WindowClass(64, 5, 10),))


@asynccontextmanager
async def _running(chain: ScriptedChain, budget: int = 64, in_flight: int = 3) -> AsyncIterator[Router]:
    router = Router(Scheduler(CACHE, Limits(8, budget, 256, 1000), EvenPolicy(in_flight, budget)), chain)
    task = asyncio.create_task(router.run())
    yield router
    task.cancel()
    with suppress(asyncio.CancelledError, ZeroDivisionError):
        await task


async def _all(router: Router, prompt: tuple[int, ...], max_tokens: int) -> list[TokenEvent]:
    specs = [SequenceSpec(prompt, SamplingParams(max_tokens=max_tokens))]
    return [event async for batch in router.generate(specs) for event in batch.events]


def test_many_at_once_fill_the_pipeline() -> None:
    async def scenario() -> None:
        chain = ScriptedChain(no_gate)
        async with _running(chain) as router:
            results = await asyncio.gather(*(_all(router, (1,) * n, 5) for n in (1, 30, 100, 3, 3, 3)))
            assert [len(r) for r in results] == [5] * 6
            router.scheduler.check_integrity()
            assert router.scheduler.is_idle
        assert chain.epochs == [0]
        assert chain.most_in_flight == 3

    asyncio.run(scenario())


def test_closing_the_stream_frees_everything_within_a_step() -> None:
    async def scenario() -> None:
        async with _running(ScriptedChain(no_gate)) as router:
            stream = router.generate([SequenceSpec((1, 2, 3), SamplingParams(max_tokens=200))])
            await anext(stream)
            await stream.aclose()
            steps = router.scheduler._next_step
            while not router.scheduler.is_idle:
                await asyncio.sleep(0)
            assert router.scheduler._next_step <= steps + 1
            router.scheduler.check_integrity()
            assert len(await _all(router, (1,), 3)) == 3

    asyncio.run(scenario())


def test_a_cancelled_client_leaves_the_others_alone() -> None:
    async def scenario() -> None:
        async with _running(ScriptedChain(no_gate), budget=4) as router:
            leaving = asyncio.create_task(_all(router, (1,) * 60, 50))
            staying = asyncio.create_task(_all(router, (2,) * 9, 20))
            while not staying.done():
                await asyncio.sleep(0)
                leaving.cancel()
            assert len(staying.result()) == 20
            with pytest.raises(asyncio.CancelledError):
                await leaving
            while not router.scheduler.is_idle:
                await asyncio.sleep(0)
            router.scheduler.check_integrity()

    asyncio.run(scenario())


def test_a_failed_pipeline_ends_every_request_with_the_reason() -> None:
    async def broken(batch: MicroBatch) -> None:
        if batch.step_id == 2:
            raise PipelineError("stage 1 died")

    async def scenario() -> None:
        async with _running(ScriptedChain(broken)) as router:
            results = await asyncio.gather(_all(router, (1,), 9), _all(router, (2,), 9), return_exceptions=True)
            assert [str(r) for r in results] == ["stage 1 died"] * 2
            with pytest.raises(PipelineError, match="stage 1 died"):
                await _all(router, (3,), 1)

    asyncio.run(scenario())


def test_a_stopped_router_leaves_nobody_waiting() -> None:
    async def stuck(_batch: MicroBatch) -> None:
        await asyncio.Event().wait()

    async def scenario() -> None:
        async with _running(ScriptedChain(stuck)) as router:
            waiting = asyncio.create_task(_all(router, (1,), 9))
            while not router._in_flight:
                await asyncio.sleep(0)
        with pytest.raises(PipelineError, match="has stopped"):
            await waiting
        with pytest.raises(PipelineError, match="has stopped"):
            await _all(router, (3,), 1)

    asyncio.run(scenario())


def test_a_failure_is_raised_anew_to_each() -> None:
    """One shared exception would grow its traceback with every client."""

    async def broken(_batch: MicroBatch) -> None:
        raise PipelineError("stage 1 died")

    async def scenario() -> None:
        async with _running(ScriptedChain(broken)) as router:
            results = await asyncio.gather(*(_all(router, (1,), 9) for _ in range(3)), return_exceptions=True)
            assert len({id(r) for r in results}) == 3
            late = await asyncio.gather(_all(router, (1,), 9), _all(router, (1,), 9), return_exceptions=True)
            assert late[0] is not late[1]

    asyncio.run(scenario())


def test_a_defect_in_the_loop_does_not_leave_clients_waiting() -> None:
    async def defect(_batch: MicroBatch) -> None:
        raise ZeroDivisionError

    async def scenario() -> None:
        async with _running(ScriptedChain(defect)) as router:
            with pytest.raises(PipelineError, match="ZeroDivisionError"):
                await _all(router, (1,), 9)

    asyncio.run(scenario())


def test_a_refused_request_touches_nothing() -> None:
    async def scenario() -> None:
        async with _running(ScriptedChain(no_gate)) as router:
            with pytest.raises(RequestError, match="empty"):
                await _all(router, (), 3)
            with pytest.raises(RequestError, match="at most 255"):
                await _all(router, (1,) * 256, 3)
            assert router.scheduler.is_idle
            assert router._requests == {}

    asyncio.run(scenario())
