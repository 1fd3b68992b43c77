"""The router's loop with chains that misbehave: cancellation, failure, company."""

import asyncio
from contextlib import AbstractAsyncContextManager, suppress

import pytest
from event_loops import in_event_loop
from running_router import CACHE, new_scheduler, running
from scripted_chain import ScriptedChain, all_chunks

from tramontane.proto.errors import PipelineError, RequestError
from tramontane.proto.plan import CachePlan, WindowClass
from tramontane.proto.request import (
    Request,
    RequestOutput,
    SamplingParams,
    SequenceRequest,
    TokenEvent,
)
from tramontane.proto.step import MicroBatch, StepResult
from tramontane.router.engine.router import Router

EXPERTS = {0: 0, 9: 9}  # position p chooses expert p + layer


def _running(
    chain: ScriptedChain, budget: int = 64, cache: CachePlan = CACHE
) -> AbstractAsyncContextManager[Router]:
    return running(Router(new_scheduler(cache, budget=budget), chain))


async def _all(router: Router, prompt: tuple[int, ...], max_tokens: int) -> list[TokenEvent]:
    request = Request.of(prompt, SamplingParams(max_tokens=max_tokens))
    return [event async for batch in router.generate(request) for event in batch.events]


@in_event_loop
async def test_many_at_once_fill_the_pipeline() -> None:
    chain = ScriptedChain()
    async with _running(chain) as router:
        results = await asyncio.gather(*(_all(router, (1,) * n, 5) for n in (1, 30, 100, 3, 3, 3)))
        assert [len(r) for r in results] == [5] * 6
        router.scheduler.check_integrity()
        assert router.scheduler.is_idle
    assert chain.epochs == [0]
    assert chain.max_in_flight == 3


@in_event_loop
async def test_closing_the_stream_frees_everything_within_a_step() -> None:
    async with _running(ScriptedChain()) as router:
        stream = router.generate(Request.of((1, 2, 3), SamplingParams(max_tokens=200)))
        await anext(stream)
        await stream.aclose()
        steps = router.scheduler._next_step
        while not router.scheduler.is_idle:
            await asyncio.sleep(0)
        assert router.scheduler._next_step <= steps + 1
        router.scheduler.check_integrity()
        assert len(await _all(router, (1,), 3)) == 3


@in_event_loop
async def test_a_cancelled_client_leaves_the_others_alone() -> None:
    async with _running(ScriptedChain(), budget=4) as router:
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


@in_event_loop
async def test_a_stopped_router_ends_all_waiting_requests() -> None:
    async def stuck(_batch: MicroBatch) -> None:
        await asyncio.Event().wait()

    async with _running(ScriptedChain(stuck)) as router:
        waiting = asyncio.create_task(_all(router, (1,), 9))
        while router._in_flight.oldest is None:
            await asyncio.sleep(0)
    with pytest.raises(PipelineError, match="has stopped"):
        await waiting
    with pytest.raises(PipelineError, match="has stopped"):
        await _all(router, (3,), 1)


@in_event_loop
async def test_a_failure_is_raised_anew_to_each() -> None:
    """One shared exception would grow its traceback with every client."""

    async def broken(_batch: MicroBatch) -> None:
        raise PipelineError("stage 1 died")

    async with _running(ScriptedChain(broken)) as router:
        results = await asyncio.gather(
            *(_all(router, (1,), 9) for _ in range(3)), return_exceptions=True
        )
        assert len({id(r) for r in results}) == 3
        late = await asyncio.gather(
            _all(router, (1,), 9), _all(router, (1,), 9), return_exceptions=True
        )
        assert late[0] is not late[1]


@in_event_loop
async def test_a_defect_in_the_loop_does_not_leave_clients_waiting() -> None:
    async def defect(_batch: MicroBatch) -> None:
        raise ZeroDivisionError

    async with _running(ScriptedChain(defect)) as router:
        with pytest.raises(PipelineError, match="ZeroDivisionError"):
            await _all(router, (1,), 9)


@in_event_loop
async def test_a_refused_request_touches_nothing() -> None:
    async with _running(ScriptedChain()) as router:
        with pytest.raises(RequestError, match="empty"):
            await _all(router, (), 3)
        with pytest.raises(RequestError, match="256 tokens > 255 maximum"):
            await _all(router, (1,) * 256, 3)
        assert router.scheduler.is_idle
        assert router._requests == {}


# What experts tokens have chosen


async def _batches(
    router: Router, prompts: list[tuple[int, ...]], max_tokens: int
) -> list[RequestOutput]:
    sampling = SamplingParams(max_tokens=max_tokens, return_experts=(0, 9))
    return [
        batch
        async for batch in router.generate(
            Request(tuple(SequenceRequest(prompt, sampling) for prompt in prompts))
        )
    ]


def _check_experts(prompts: list[tuple[int, ...]], batches: list[RequestOutput]) -> None:
    """After every delivery, those of every token of a sequence but the last are known, in order and
    once.
    """
    known = {(index, layer): 0 for index in range(len(prompts)) for layer in (0, 9)}
    num_tokens = [0] * len(prompts)
    for batch in batches:
        for event in batch.events:
            num_tokens[event.seq_id] += 1
        for index, layer, start, expert_ids in batch.experts:
            assert start == known[index, layer]
            assert expert_ids == tuple((start + place + layer,) for place in range(len(expert_ids)))
            known[index, layer] += len(expert_ids)
        for (index, _), num_known in known.items():
            assert num_known == (
                len(prompts[index]) + num_tokens[index] - 1 if num_tokens[index] else 0
            )


@in_event_loop
async def test_experts_of_a_prompt_in_pieces_come_with_its_first_token() -> None:
    """Several prompts of one request, each in its own time."""
    async with _running(ScriptedChain(experts=EXPERTS), budget=5) as router:
        prompts = [(1,) * 23, (2,), (3,) * 11]
        batches = await _batches(router, prompts, 6)
        assert sum(len(batch.events) for batch in batches) == 18
        _check_experts(prompts, batches)


@in_event_loop
async def test_experts_of_recomputed_positions_are_not_emitted_again() -> None:
    """Ten pages of four positions and no window: three sequences of 24 have to take turns."""
    cache = CachePlan(4, (WindowClass(None, 64, 10),))

    chain = ScriptedChain(experts=EXPERTS)
    async with _running(chain, budget=5, cache=cache) as router:
        prompts = [(1,) * 6, (2,) * 6, (3,) * 6]
        batches = await _batches(router, prompts, 18)
        assert router.scheduler.num_preempted > 0
        assert sum(c.num_tokens for b in chain.submitted for c in all_chunks(b)) > 3 * 23
        _check_experts(prompts, batches)


@in_event_loop
async def test_extras_of_an_aborted_request_are_dropped() -> None:
    async with _running(ScriptedChain(experts=EXPERTS), budget=5) as router:
        leaving = asyncio.create_task(_batches(router, [(1,) * 60], 50))
        staying = asyncio.create_task(_batches(router, [(2,) * 9], 20))
        while not staying.done():
            await asyncio.sleep(0)
            leaving.cancel()
        _check_experts([(2,) * 9], staying.result())
        assert router.failure is None
        with suppress(asyncio.CancelledError):
            await leaving


@in_event_loop
async def test_rows_in_vain_are_no_tokens_per_second() -> None:
    """A sequence ends by its first token. The decode after it is submitted before that is known,
    and returns a token.
    """
    observed: list[StepResult] = []
    scheduler = new_scheduler(in_flight=2, async_scheduling=True)
    async with running(Router(scheduler, ScriptedChain(), observed.append)) as router:
        request = Request.of((1, 2, 3), SamplingParams(max_tokens=9, stop_token_ids=(7,)))
        outputs = [output async for output in router.generate(request)]
        assert sum(len(output.events) for output in outputs) == 1
        while not router.scheduler.is_idle:
            await asyncio.sleep(0)
        assert [result.num_sampled for result in observed] == [1, 0]
        assert [batch.num_sampled for batch in router.activity._batches] == [1, 0]
