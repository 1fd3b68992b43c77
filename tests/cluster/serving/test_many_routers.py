"""64 routers, some of which refuse: what the client, the balancing and the token streams of an
ingress make of it. Without Ray.

All of it is the real code; only Ray Serve's calls and the stages are simulated, in a time that
moves by itself.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from simulated_routers import LIMITS, Handle, Replica, driven, fill, harness, request_tokens, stuck
from virtual_time import block_loop, run_in_virtual_time

from tramontane.cluster.serving import (
    least_loaded_router,
    pipeline_client,
    retry_policy,
    router_streams,
)
from tramontane.cluster.serving.pipeline_client import PipelineClient
from tramontane.cluster.serving.token_stream import DONE, KEEPALIVE, with_idle_timeout
from tramontane.proto.errors import (
    OverloadedError,
    PipelineError,
    PipelineRecoveringError,
    PipelineUnavailableError,
    QueueFullError,
    StreamNotOpenError,
)
from tramontane.proto.request import Request, SamplingParams

NUM_ROUTERS = 64


def _replicas(num: int = NUM_ROUTERS) -> list[Replica]:
    return [Replica(f"r{number}") for number in range(num)]


def _num_calls(replicas: list[Replica]) -> int:
    return sum(each.call_counts["generate"] for each in replicas)


@asynccontextmanager
async def _ingress(
    replicas: list[Replica], num_running: int | None = None
) -> AsyncIterator[PipelineClient]:
    """An ingress and all routers, of which the last ``num_running`` are driven; the others are as
    after a failure.
    """
    handle: Any = Handle(replicas)
    routers = PipelineClient(handle, max_unaccepted=10_000)
    async with driven(replicas[-(num_running or len(replicas)) :]):
        await asyncio.sleep(0.01)
        try:
            yield routers
        finally:
            routers.close()


async def _occupy(replicas: list[Replica], routers: PipelineClient) -> "list[asyncio.Task[int]]":
    """Give each of these routers one request of this ingress that does not end, so that the others
    are the least loaded.
    """
    for each in replicas:
        each.chain.gate = stuck
    running = [asyncio.create_task(request_tokens(routers)) for _ in replicas]
    while sum(each.router.num_requests for each in replicas) < len(replicas):
        assert not any(each.done() for each in running)
        await asyncio.sleep(0.01)
    return running


@pytest.mark.parametrize(("num_refusing", "num_routers"), [(10, 28), (54, 64)])
def test_routers_that_do_not_run_do_not_keep_requests_from_the_others(
    num_refusing: int, num_routers: int
) -> None:
    """They are always the least loaded ones. Each is asked once, not once for each request."""

    async def scenario() -> None:
        replicas = _replicas(num_routers)
        async with _ingress(replicas, num_routers - num_refusing) as routers:
            refusing, running = replicas[:num_refusing], replicas[num_refusing:]
            occupied = await _occupy(running, routers)
            await asyncio.sleep(2 * retry_policy.NOT_RUNNING_TTL_S)
            for each in replicas:
                each.call_counts.clear()
            requests = [asyncio.create_task(request_tokens(routers)) for _ in range(10)]
            while sum(each.router.num_requests for each in running) < len(running) + 10:
                assert not any(each.done() for each in requests), "none is refused"
                await asyncio.sleep(0.01)
            assert _num_calls(refusing) <= num_refusing + 10 * 9, (
                "ten at once, of which nine know nothing of the others"
            )
            assert _num_calls(running) <= 2 * 10, "at some the stream has to be opened first"
            known = [each for each in refusing if each.call_counts["generate"]]
            before = _num_calls(known)
            requests.append(asyncio.create_task(request_tokens(routers)))
            await asyncio.sleep(0.1)
            assert _num_calls(known) == before, "the last one knows it from the others"
            for each in (*occupied, *requests):
                each.cancel()
            await asyncio.gather(*occupied, *requests, return_exceptions=True)

    run_in_virtual_time(scenario())


def test_full_routers_do_not_keep_requests_from_those_with_room() -> None:
    """60 of 64 are full of the requests of other ingresses."""

    async def scenario() -> None:
        replicas = _replicas()
        full, free = replicas[:60], replicas[60:]
        for each in full:
            each.chain.gate = stuck
        async with _ingress(replicas) as routers:
            for each in full:
                fill(each)
            assert await asyncio.gather(*(request_tokens(routers) for _ in range(20))) == [5] * 20
            assert _num_calls(full) <= 60 + 20 * 19
            before = _num_calls(full)
            for _ in range(20):
                assert await request_tokens(routers) == 5
            assert _num_calls(full) == before
            assert sum(each.router.num_requests for each in free) == 0

    run_in_virtual_time(scenario())


def test_where_all_routers_refuse_the_client_gets_the_reason_after_each_was_asked() -> None:
    async def scenario() -> None:
        replicas = _replicas()
        for each in replicas:
            each.chain.gate = stuck
        async with _ingress(replicas, num_running=40) as routers:
            for each in replicas[-40:]:
                fill(each)
            with pytest.raises(QueueFullError):
                await request_tokens(routers)
            assert _num_calls(replicas) <= NUM_ROUTERS + 40 + 1, (
                "40 times there was no stream yet; the last call shows the end"
            )
            assert all(each.call_counts["generate"] for each in replicas)

    run_in_virtual_time(scenario())


def test_a_refusal_is_remembered_for_a_moment_only() -> None:
    """And a full router is asked again as soon as a request on it ends."""

    async def scenario() -> None:
        a, b = Replica("a"), Replica("b")
        async with _ingress([a, b], num_running=1) as routers:
            assert await request_tokens(routers) == 5
            for _ in range(20):
                assert await request_tokens(routers) == 5
            assert a.call_counts["generate"] <= 1
            await asyncio.sleep(retry_policy.NOT_RUNNING_TTL_S)
            async with driven([a]):
                await asyncio.sleep(0.01)
                for _ in range(50):
                    assert await request_tokens(routers) == 5
                assert a.call_counts["generate"] > 5, "it runs now and gets its share"

    run_in_virtual_time(scenario())


def test_that_one_client_has_filled_a_router_is_no_refusal_of_another_client() -> None:
    async def scenario() -> None:
        refusals = retry_policy.RefusalTracker()
        first = replace(Request.of((1,), SamplingParams(max_tokens=1)), owner=1)
        refusals.add("a", QueueFullError("full", 1), first)
        refusals.add("b", OverloadedError("too large for what is left", 1), first)
        refusals.add("c", PipelineUnavailableError("not running"), first)
        assert refusals.matching(first).keys() == {"a", "c"}
        assert refusals.matching(replace(first, owner=2)).keys() == {"c"}
        assert refusals.matching(replace(first, priority=1)).keys() == {"c"}
        assert refusals.matching(first)["a"] is not refusals.matching(first)["a"]
        refusals.forget_full("a")
        refusals.forget_full("c")
        assert refusals.matching(first).keys() == {"c"}
        refusals.add("a", QueueFullError("full", 1), first)
        await asyncio.sleep(retry_policy.FULL_TTL_S)
        assert refusals.matching(first).keys() == {"c"}
        await asyncio.sleep(retry_policy.NOT_RUNNING_TTL_S)
        assert refusals.matching(first) == {}
        assert not refusals._refusals, "what is too old is not kept"

    run_in_virtual_time(scenario())


def test_a_request_searches_until_every_router_has_refused_it() -> None:
    """Pipelines that recover are asked a second time, when the request may wait for them."""

    async def scenario() -> None:
        first = replace(Request.of((1,), SamplingParams(max_tokens=1)), owner=1)
        full, recovering, unopened = (
            QueueFullError("full", 1),
            PipelineRecoveringError("recovers"),
            StreamNotOpenError("no stream"),
        )
        recent = retry_policy.RefusalTracker()
        recent.add("a", full, first)
        search = retry_policy.RouterSearch(recent, first)
        assert (search.refused.keys(), search.may_wait) == ({"a"}, False)
        assert search.add("b", recovering, had_choice=True) is None
        assert search.add("a", unopened, had_choice=False) is None, "others were not asked for"
        assert not search.may_wait
        recent.add("c", full, first)
        assert search.add("d", full, had_choice=True) is None
        assert search.refused.keys() == {"a", "b", "c", "d"}, "c has refused another request since"
        assert search.add("a", full, had_choice=True) is None, "only refused ones are left"
        assert (search.refused.keys(), search.may_wait) == ({"a", "c", "d"}, True)
        assert search.add("b", recovering, had_choice=True) is None
        assert isinstance(search.add("b", recovering, had_choice=True), QueueFullError)

    run_in_virtual_time(scenario())


def test_a_router_whose_streams_cannot_be_opened_is_left_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A missing stream is no refusal, but not one that is missing again and again."""

    async def scenario() -> None:
        a, b = Replica("a"), Replica("b")

        async def no_stream(_ingress: str, _replica: str) -> AsyncIterator[bytes]:
            return
            yield b""

        monkeypatch.setattr(a, "through_the_network", no_stream)
        async with _ingress([a, b]) as routers:
            for _ in range(5):
                assert await request_tokens(routers) == 5
            assert 0 < a.call_counts["subscribe"] <= 5 * pipeline_client.MAX_STREAM_ATTEMPTS

    run_in_virtual_time(scenario())


def test_a_router_asked_alone_that_refuses_is_not_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both routers have just refused another request, so that any may be asked. The first has no
    stream and, once it has one, no room.
    """
    # of equals the first
    monkeypatch.setattr(least_loaded_router, "random", SimpleNamespace(random=lambda: 0.0))

    async def scenario() -> None:
        full, free = Replica("full"), Replica("free")
        full.chain.gate = stuck
        async with harness([full, free], running="") as routers:
            with pytest.raises(PipelineUnavailableError):
                await request_tokens(routers)
            async with driven([full, free]):
                await asyncio.sleep(0.01)
                fill(full)
                for each in (full, free):
                    each.call_counts.clear()
                assert await request_tokens(routers) == 5
                assert full.call_counts["generate"] == free.call_counts["generate"] == 2, (
                    "without a stream, then with one"
                )

    run_in_virtual_time(scenario())


def test_no_request_waits_for_a_pipeline_that_is_fenced_while_others_are_idle() -> None:
    async def scenario() -> None:
        limits = replace(LIMITS, max_queued_seqs=100)
        replicas = [Replica(f"r{number}", limits=limits) for number in range(4)]
        async with _ingress(replicas) as routers:
            await replicas[0].lose_stages()
            assert await asyncio.gather(*(request_tokens(routers) for _ in range(100))) == [5] * 100
            assert not replicas[0].router.num_requests
            assert not replicas[0].router.is_ready, "it is fenced to the end"
            replicas[0].chain.may_fence.set()
            await asyncio.sleep(retry_policy.NOT_RUNNING_TTL_S)
            assert sum(await asyncio.gather(*(request_tokens(routers) for _ in range(20)))) == 100
            assert replicas[0].call_counts["subscribe"] == 1, "and gets requests again"

    run_in_virtual_time(scenario())


@pytest.mark.parametrize("others", ["none", "full", "not running"])
def test_requests_wait_for_a_pipeline_that_is_fenced_where_no_other_accepts_them(
    others: str,
) -> None:
    """As many as its waiting queue takes. New ones, and those that it had."""

    async def scenario() -> None:
        recovering, other = Replica("a"), Replica("b", stuck)
        replicas = [recovering] if others == "none" else [recovering, other]
        async with _ingress(replicas, len(replicas)) as routers:
            recovering.chain.gate = stuck
            if others == "full":
                fill(other)
            elif others == "not running":
                other.router.failure = PipelineError("it is lost")
            accepted = asyncio.create_task(request_tokens(routers))
            while not recovering.router.num_requests:
                await asyncio.sleep(0.01)
            await recovering.lose_stages()
            requests = [asyncio.create_task(request_tokens(routers)) for _ in range(3)]
            await asyncio.sleep(300.0)
            assert not any(each.done() for each in requests)
            assert recovering.router.num_requests == 4
            recovering.chain.gate = other.chain.gate = _no_gate
            recovering.chain.may_fence.set()
            assert await asyncio.gather(accepted, *requests) == [5] * 4

    run_in_virtual_time(scenario())


async def _no_gate(_batch: object) -> None:
    await asyncio.sleep(0)


def test_a_waiting_queue_of_a_pipeline_that_is_fenced_is_bounded() -> None:
    async def scenario() -> None:
        async with _ingress([recovering := Replica("a")]) as routers:
            await recovering.lose_stages()
            requests = [asyncio.create_task(request_tokens(routers)) for _ in range(40)]
            await asyncio.sleep(1.0)
            refused = [each for each in requests if each.done()]
            assert 0 < len(refused) < 40
            assert all(isinstance(each.exception(), OverloadedError) for each in refused)
            recovering.chain.may_fence.set()
            assert {await each for each in requests if each not in refused} == {5}

    run_in_virtual_time(scenario())


async def _delayed(message: bytes, num_turns: int) -> bytes:
    """A message that takes several turns of the event loop to arrive, as those of gRPC do."""
    for _ in range(num_turns):
        await asyncio.sleep(0)
    return message


@pytest.mark.parametrize("blocked_s", [6.0, 60.0])
def test_an_ingress_that_was_blocked_takes_no_router_for_silent(blocked_s: float) -> None:
    """Also where it is blocked again and again, with few turns of its event loop in between."""

    async def messages() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield KEEPALIVE
            await asyncio.sleep(1.0)
        yield await _delayed(b"late", num_turns=7)

    async def block() -> None:
        await asyncio.sleep(2.5)
        for _ in range(3):
            block_loop(blocked_s)
            await asyncio.sleep(0)

    async def scenario() -> None:
        blocking = asyncio.create_task(block())
        assert [message async for message in with_idle_timeout(messages(), 5.0)] == [
            KEEPALIVE
        ] * 3 + [b"late"]
        await blocking

    run_in_virtual_time(scenario())


@pytest.mark.parametrize(("silent_s", "is_lost"), [(4.9, False), (5.6, True)])
def test_a_router_that_sends_nothing_for_the_whole_limit_is_silent(
    silent_s: float, is_lost: bool
) -> None:
    async def messages() -> AsyncIterator[bytes]:
        for _ in range(4):
            yield KEEPALIVE
            await asyncio.sleep(4.9)
        yield KEEPALIVE
        await asyncio.sleep(silent_s)
        yield b"late"

    async def scenario() -> None:
        received = []
        try:
            async for message in with_idle_timeout(messages(), 5.0):
                received.append(message)
        except TimeoutError:
            assert is_lost
        assert len(received) == 6 - is_lost
        assert asyncio.get_running_loop().time() < 5 * 4.9 + 5.6

    run_in_virtual_time(scenario())


def test_a_consumer_that_takes_its_time_does_not_make_a_router_silent() -> None:
    async def messages() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield KEEPALIVE

    async def scenario() -> None:
        num = 0
        async for _ in with_idle_timeout(messages(), 5.0):
            await asyncio.sleep(20.0)
            num += 1
        assert num == 3

    run_in_virtual_time(scenario())


def test_a_router_is_silent_also_after_a_consumer_took_its_time() -> None:
    async def messages() -> AsyncIterator[bytes]:
        yield KEEPALIVE
        await asyncio.sleep(10.0)
        yield b"late"

    async def scenario() -> None:
        received = with_idle_timeout(messages(), 5.0)
        assert await anext(received) == KEEPALIVE
        await asyncio.sleep(20.0)
        with pytest.raises(TimeoutError):
            await anext(received)

    run_in_virtual_time(scenario())


def test_a_router_that_was_silent_gets_requests_again_after_some_time() -> None:
    """It may only have been cut off; the other one has its share until then."""

    async def scenario() -> None:
        a, b = Replica("a", stuck), Replica("b", stuck)
        async with _ingress([a, b]) as routers:
            requests = []
            for number in (1, 2):
                requests.append(asyncio.create_task(request_tokens(routers)))
                while a.router.num_requests + b.router.num_requests < number:
                    await asyncio.sleep(0.01)
            assert a.router.num_requests == b.router.num_requests == 1
            a.is_cut_off = True
            await asyncio.sleep(router_streams.SILENCE_TIMEOUT_S + 2.0)
            assert b.router.num_requests == 2, (
                "what the silent router had is given to the other one"
            )
            a.is_cut_off = False
            for each in (a, b):
                each.chain.gate = _no_gate
                await each.lose_stages()  # with the micro-batches that wait at the gate
                each.chain.may_fence.set()
            await asyncio.sleep(2 * retry_policy.NOT_RUNNING_TTL_S)
            before = a.call_counts["generate"]
            for _ in range(20):
                assert await request_tokens(routers) == 5
            assert a.call_counts["generate"] == before
            await asyncio.sleep(router_streams.SILENT_ROUTER_TTL_S)
            for _ in range(20):
                assert await request_tokens(routers) == 5
            assert a.call_counts["generate"] > before
            for each in requests:
                each.cancel()
            await asyncio.gather(*requests, return_exceptions=True)

    run_in_virtual_time(scenario())


def test_a_request_that_a_broken_stream_may_have_accepted_continues_at_once() -> None:
    """The router has accepted it, and the message that says so is lost with the stream."""

    async def scenario() -> None:
        replica = Replica("a", stuck)
        async with _ingress([replica]) as routers:
            first = asyncio.create_task(request_tokens(routers))
            while not replica.router.num_requests:
                await asyncio.sleep(0.01)
            replica.num_messages = 0  # the next message breaks the stream
            requested = asyncio.create_task(request_tokens(routers))
            while replica.call_counts["subscribe"] < 2:
                await asyncio.sleep(0.01)
            began = asyncio.get_running_loop().time()
            replica.chain.gate = _no_gate
            await replica.lose_stages()  # micro-batches that wait at the gate are given up
            replica.chain.may_fence.set()
            assert await asyncio.gather(first, requested) == [5, 5]
            assert asyncio.get_running_loop().time() - began < pipeline_client.ACCEPT_TIMEOUT_S / 2

    run_in_virtual_time(scenario())


def test_a_request_whose_call_has_ended_is_not_on_its_way_to_a_router(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its call may end before its first tokens arrive; it must not keep others from being accepted
    until they do.
    """

    async def done(*_: object) -> bytes:
        return DONE

    async def scenario() -> None:
        replica = Replica("a")
        monkeypatch.setattr(replica, "generate", done)
        handle: Any = Handle([replica])
        routers = PipelineClient(handle, max_unaccepted=1)
        requested = asyncio.create_task(request_tokens(routers))
        await asyncio.sleep(1.0)
        routers.check_capacity(1)
        assert not requested.done(), "its last tokens may still come"
        requested.cancel()
        await asyncio.gather(requested, return_exceptions=True)
        routers.close()

    run_in_virtual_time(scenario())
