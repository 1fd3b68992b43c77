"""How many tokens of a prompt were cached, from the router to an ingress: in one output, once,
whatever is lost or merged.
"""

import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import pytest
from event_loops import in_event_loop
from running_router import new_scheduler, running
from scripted_chain import PAGE_SIZE, StatefulChain

from tramontane.proto import wire
from tramontane.proto.errors import PipelineError
from tramontane.proto.plan import CachePlan, WindowClass
from tramontane.proto.request import (
    FinishReason,
    Logprobs,
    Request,
    RequestOutput,
    RequestTimings,
    SamplingParams,
    SequenceRequest,
    TokenEvent,
)
from tramontane.router.engine.request_output import OutputQueue, ResumableRequest, split_output
from tramontane.router.engine.router import Router
from tramontane.router.scheduling.waiting_queue import SchedulerLimits

TIMES = RequestTimings(0.5, 0.25, 0.125)
PROMPT = tuple(range(100, 170))  # four pages and six tokens
CACHE = CachePlan(PAGE_SIZE, (WindowClass(None, 16, 64),))


def _output(
    *seq_ids: int, num_cached: int = 0, finish: FinishReason | None = None
) -> RequestOutput:
    return RequestOutput(
        tuple(TokenEvent(seq_id, 7, finish) for seq_id in seq_ids), TIMES, num_cached=num_cached
    )


@in_event_loop
async def test_outputs_that_are_merged_have_the_sum() -> None:
    queue = OutputQueue()
    for output in (_output(0, num_cached=16), _output(1), _output(2, num_cached=48)):
        queue.put(output)
    assert (await queue.get()).num_cached == 64
    queue.put(_output(0))
    assert (await queue.get()).num_cached == 0, "what was read is not read again"


def test_an_output_in_parts_has_its_cached_tokens_once() -> None:
    logprobs = Logprobs(0, 1, (-1.0,) * 40, ((),) * 40)
    whole = _output(0, num_cached=48)._replace(logprobs=(logprobs,))

    async def scenario() -> RequestOutput:
        queue, parts = OutputQueue(), list(split_output(whole, 8))
        assert len(parts) == 5
        for _, part in wire.decode_outputs(wire.encode_outputs([(0, part) for part in parts])):
            queue.put(part)
        return await queue.get()

    assert asyncio.run(scenario()).num_cached == 48


@pytest.mark.parametrize(
    "output", [_output(0), _output(0, num_cached=1), _output(0, 1, num_cached=2**20)]
)
def test_outputs_keep_them_over_the_wire(output: RequestOutput) -> None:
    """Also those of one token, which have a short form."""
    assert wire.decode_outputs(wire.encode_outputs([(5, output), (6, output)])) == [
        (5, output),
        (6, output),
    ]


def test_a_request_that_continues_elsewhere_keeps_them() -> None:
    progress = ResumableRequest(Request((SequenceRequest(PROMPT, SamplingParams()),) * 3))
    assert progress.record(_output(1, num_cached=64, finish=FinishReason.STOP)).num_cached == 64
    assert len(progress.remaining().sequences) == 2
    continued = progress.record(_output(1, num_cached=16))
    assert (continued.events[0].seq_id, continued.num_cached) == (2, 16)


def _running(chain: StatefulChain, **limits: bool) -> AbstractAsyncContextManager[Router]:
    scheduler = new_scheduler(CACHE, in_flight=2, enable_prefix_caching=True, **limits)
    return running(Router(scheduler, chain))


async def _num_cached(router: Router, request: Request) -> list[int]:
    return [batch.num_cached async for batch in router.generate(request)]


def _request(
    prompt: tuple[int, ...], tenant: str = "", output: tuple[int, ...] = (), num_choices: int = 1
) -> Request:
    sequence = SequenceRequest(prompt, SamplingParams(max_tokens=4), output)
    return Request((sequence,) * num_choices, cache_salt=tenant)


def _two_prompts() -> Request:
    (sequence,) = _request(PROMPT).sequences
    return Request((sequence, replace(sequence, prompt_ids=(*PROMPT[:40], 1))))


@in_event_loop
async def test_a_router_reports_what_a_request_finds() -> None:
    async with _running(StatefulChain()) as router:
        assert sum(await _num_cached(router, _request(PROMPT, num_choices=2))) == 0, (
            "one choice finds the other's"
        )
        assert router.scheduler.allocator.num_hit == 64
        assert await _num_cached(router, _request(PROMPT)) == [64, 0, 0, 0]
        assert sum(await _num_cached(router, _request(PROMPT, num_choices=3))) == 64
        assert sum(await _num_cached(router, _two_prompts())) == 64 + 32
        assert sum(await _num_cached(router, _request(PROMPT, output=(7, 7)))) == 0, (
            "another router has counted it"
        )


@pytest.mark.parametrize("shares", [False, True])
@in_event_loop
async def test_tenants_find_each_others_text_where_they_share_it(shares: bool) -> None:
    async with _running(StatefulChain(), share_prefixes=shares) as router:
        await _num_cached(router, _request(PROMPT, "mine"))
        for tenant, expected in (("mine", 64), ("theirs", 64 * shares), ("", 64 * shares)):
            assert sum(await _num_cached(router, _request(PROMPT, tenant))) == expected


def test_the_model_is_a_part_of_every_key() -> None:
    """Also where tenants share: an ingress of other weights must not take this router's pages for
    its own.
    """
    salts = [
        SchedulerLimits(8, 64, 256, 1000, share_prefixes=shares, model=model).cache_salt(tenant)
        for model, shares, tenant in (
            ("m1", False, "t"),
            ("m2", False, "t"),
            ("m1", True, "t"),
            ("m2", True, "t"),
            ("m1", False, "u"),
        )
    ]
    assert len(set(salts)) == 5
    assert (
        SchedulerLimits(8, 64, 256, 1000, share_prefixes=True, model="m1").cache_salt("u")
        == salts[2]
    )


@in_event_loop
async def test_a_failure_does_not_count_twice_what_was_cached() -> None:
    """The pipeline fails before the first token: all is computed again, and the first start
    counts.
    """
    chain = StatefulChain()
    async with _running(chain) as router:
        await _num_cached(router, _request(PROMPT))
        failures = iter([PipelineError("stage 1 died")])

        async def fail_once(_batch: object) -> None:
            for failure in failures:
                raise failure

        chain.gate = fail_once
        assert await _num_cached(router, _request(PROMPT)) == [64, 0, 0, 0]
        assert chain.num_failed == 1
        assert router.scheduler.allocator.num_hit == 64, (
            "after the failure there was nothing to find"
        )
