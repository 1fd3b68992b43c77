"""An ingress sends each turn of a chat to the pipeline that has the turns before, whatever becomes
of routers. Without Ray.
"""

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from chat_turns import take_turns
from harness import random_ids
from simulated_routers import Handle, Replica, driven, fill, stuck
from virtual_time import in_virtual_time, run_in_virtual_time

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.serving import pipeline_client, router_queries
from tramontane.cluster.serving.pipeline_client import PipelineClient
from tramontane.proto.errors import RequestError
from tramontane.proto.plan import CachePlan, WindowClass
from tramontane.proto.ports import TokenSource
from tramontane.proto.request import Identity, Request, SamplingParams
from tramontane.router.engine import prefix_aware_routing
from tramontane.router.engine.prefix_aware_routing import (
    Choice,
    Known,
    PrefixAwareRouting,
    PrefixDigest,
)
from tramontane.router.openai.request_context import RequestTokenSource
from tramontane.router.scheduling.waiting_queue import SchedulerLimits

VOCABULARY = 1000
CACHE = CachePlan(16, (WindowClass(None, 64, 400), WindowClass(64, 5, 200)))
LIMITS = SchedulerLimits(8, 64, 1024, VOCABULARY, max_queued_seqs=4, enable_prefix_caching=True)
# of virtual time: after it the ingress knows what is cached
PAUSE_S = 2 * router_queries.DIGEST_INTERVAL_S


def _replicas(names: str, limits: SchedulerLimits = LIMITS) -> list[Replica]:
    return [Replica(name, limits=limits, cache=CACHE) for name in names]


@asynccontextmanager
async def _ingress(
    replicas: list[Replica], *, shares: bool = False
) -> AsyncIterator[tuple[PipelineClient, PrefixAwareRouting]]:
    """An ingress that follows the digests, and routers that are all driven."""
    handle: Any = Handle(replicas)
    config = EngineConfig.build(None, {"share_prefixes": shares})
    routing = router_queries.prefix_aware_routing(config, "")
    assert routing is not None
    routers = PipelineClient(handle, max_unaccepted=1000, routing=routing)
    async with driven(list(replicas)):
        await asyncio.sleep(0.01)
        try:
            yield routers, routing
        finally:
            routers.close()


async def _pause(_turn: int) -> None:
    await asyncio.sleep(PAUSE_S)


def _chats(num_chats: int) -> list[list[int]]:
    """Which have nothing in common."""
    return [random_ids(100 + 10 * number, number, VOCABULARY) for number in range(num_chats)]


async def _ask(routers: TokenSource, prompt: Sequence[int], max_tokens: int = 5) -> int:
    """Return how many tokens of the prompt were cached, once all tokens have come."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    batches = [batch async for batch in routers.generate(Request.of(tuple(prompt), sampling))]
    assert sum(len(batch.events) for batch in batches) == max_tokens
    return sum(batch.num_cached for batch in batches)


@pytest.mark.parametrize("names", ["ab", "abcd"])
def test_each_turn_goes_to_the_pipeline_that_has_the_chat(names: str) -> None:
    """Of what one pipeline alone would find cached at least nine tenths are found, and all
    pipelines have chats.
    """

    async def hits(names: str) -> list[int]:
        replicas = _replicas(names)
        async with _ingress(replicas) as (routers, _):
            await _ask(routers, [1])  # with which the ingress begins to query digests
            await take_turns(routers, _chats(8), 5, _pause, VOCABULARY)
        return [each.router.scheduler.allocator.num_hit for each in replicas]

    (alone,) = run_in_virtual_time(hits("a"))
    found = run_in_virtual_time(hits(names))
    assert sum(found) >= 0.9 * alone > 0
    assert min(found) > 0


@in_virtual_time
async def test_a_pipeline_that_seems_to_need_no_time_does_not_get_all_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fit of short times may find that a token more takes none."""
    replicas = _replicas("ab")
    monkeypatch.setattr(replicas[0].router.scheduler.policy, "seconds", lambda _: 0.0)
    async with _ingress(replicas) as (routers, _):
        await _ask(routers, [1])
        await _pause(0)
        before = [each.router.scheduler.allocator.num_queried for each in replicas]
        await asyncio.gather(*(_ask(routers, [1, 2]) for _ in range(8)))
        assert [each.router.scheduler.allocator.num_queried for each in replicas] == [
            number + 8 for number in before
        ]


@in_virtual_time
async def test_the_work_of_a_request_counts_until_it_has_ended() -> None:
    """By itself, because its client leaves, or because it is refused."""
    replicas = _replicas("ab")
    async with _ingress(replicas) as (routers, routing):
        await _ask(routers, [1])
        await _pause(0)

        def num_unreleased() -> int:
            sent = (
                each for pipeline in routing._pipelines.values() for each in pipeline.sent.values()
            )
            return sum(each.ended_at == math.inf for each in sent)

        request = asyncio.create_task(_ask(routers, [1, 2], 20))
        while not num_unreleased():
            await asyncio.sleep(0)
        await request
        await asyncio.sleep(0.1)  # the call ends after the last tokens
        assert not num_unreleased()
        for each in replicas:
            each.chain.gate = stuck
        request = asyncio.create_task(_ask(routers, [1, 2]))
        await asyncio.sleep(0.1)
        assert num_unreleased() == 1
        request.cancel()
        await asyncio.sleep(0.1)
        assert not num_unreleased()
        with pytest.raises(RequestError):
            await _ask(routers, [2**20])
        assert not num_unreleased()


@pytest.mark.parametrize("shares", [False, True])
def test_clients_with_other_keys_share_only_where_they_may(shares: bool) -> None:
    """On one pipeline. On two, another client's prefix makes no difference to the choice, or it is
    found wherever it is.
    """

    async def scenario(names: str) -> None:
        replicas = _replicas(names, replace(LIMITS, share_prefixes=shares))
        chat = _chats(1)[0]
        async with _ingress(replicas, shares=shares) as (routers, _):
            await _ask(routers, [1])
            anna, bert = (
                RequestTokenSource(routers, Identity(owner, f"key-{owner}")) for owner in (1, 2)
            )
            for client, num_cached in ((anna, 0), (anna, 96), (bert, 96 * shares), (bert, 96)):
                await _pause(0)
                assert await _ask(client, chat) == num_cached

    for names in ("a", "ab"):
        run_in_virtual_time(scenario(names))


class _OlderReplica(Replica):
    """Of a version without digests."""

    async def prefix_digest(self, known: Mapping[str, Known]) -> tuple[PrefixDigest | None, str]:
        raise AttributeError("RouterReplica has no attribute prefix_digest")


@in_virtual_time
async def test_routers_without_digests_do_not_disturb_the_others() -> None:
    """Of an older version that is being replaced, or gone while the query was on its way."""
    chat = _chats(1)[0]
    older, *replicas = _OlderReplica("a", limits=LIMITS, cache=CACHE), *_replicas("bc")
    async with _ingress([older, *replicas]) as (routers, routing):
        await _ask(routers, [1])
        await _pause(0)
        assert routing.known.keys() == {"b", "c"}
        for num_cached in (0, 96, 96):
            assert await _ask(routers, chat) == num_cached
            await _pause(0)
    async with _ingress([_OlderReplica("a", limits=LIMITS, cache=CACHE)]) as (routers, routing):
        assert await _ask(routers, chat) == 0
        await _pause(0)
        assert not routing.known
        assert await _ask(routers, chat) == 96


def test_a_router_that_hangs_does_not_keep_the_digests_of_others_from_being_believed() -> None:
    """At any time of a minute, with the longest pause between queries."""

    async def scenario() -> None:
        replicas = _replicas("abc")
        chat = _chats(1)[0]
        async with _ingress(replicas) as (routers, routing):
            while await _ask(routers, chat) == 0 or routing.known.keys() != set("abc"):
                await asyncio.sleep(0.1)
            replicas[2].is_cut_off = True
            while "c" in routing.known:
                await asyncio.sleep(0.1)
            for _ in range(200):
                await asyncio.sleep(0.3)
                assert (
                    routing.choose(Request.of(tuple(chat), SamplingParams(max_tokens=1)))
                    is not None
                )
            replicas[2].is_cut_off = False
            while "c" not in routing.known:
                await asyncio.sleep(0.1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(router_queries, "S_PER_DIGEST", 1e3)
        run_in_virtual_time(scenario())


@in_virtual_time
async def test_a_chosen_router_that_has_gone_leads_to_no_refusal_while_another_one_is_free() -> (
    None
):
    """The second choice is full and the least loaded one; it is asked once, and then the third."""
    gone, full, free = replicas = _replicas("abc")
    chat = _chats(1)[0]
    async with _ingress(replicas) as (routers, routing):
        others = itertools.count(1)
        while not gone.router.scheduler.allocator.prefix_hashes.since(-1).added:
            await _ask(routers, random_ids(40, next(others), VOCABULARY))
        await _pause(0)
        for each in (full, free):
            each.chain.gate = stuck
        routing.choose = lambda _specs, excluded, _only: None if "c" in excluded else Choice("c", 0)  # type: ignore[method-assign]
        # so that the full one has fewer requests of this ingress
        waiting = asyncio.create_task(_ask(routers, chat))
        while not free.router.num_requests:
            await asyncio.sleep(0.01)
        fill(full)
        full.call_counts.clear()
        replicas.remove(gone)
        routing.choose = lambda _specs, _excluded, _only: Choice("a", 1)  # type: ignore[method-assign]
        requested = asyncio.create_task(_ask(routers, chat))
        while not requested.done() and free.router.num_requests < 2:
            await asyncio.sleep(0.01)
        assert not requested.done()
        assert full.call_counts["generate"] <= 2, "once to open the stream"
        for task in (waiting, requested):
            task.cancel()
        await asyncio.gather(waiting, requested, return_exceptions=True)


@in_virtual_time
async def test_a_chat_whose_pipeline_is_fenced_again_continues_with_another_one() -> None:
    """And what the first one had is not looked for there when it is back."""
    replicas = _replicas("ab")
    chat = _chats(1)[0]
    async with _ingress(replicas) as (routers, routing):
        await _ask(routers, [1])
        await _pause(0)
        assert await _ask(routers, chat) == 0
        await _pause(0)
        holder = max(
            replicas,
            key=lambda each: len(each.router.scheduler.allocator.prefix_hashes.since(-1).added),
        )
        (other,) = [each for each in replicas if each is not holder]
        await holder.lose_stages()
        assert await _ask(routers, chat) == 0
        assert other.router.scheduler.allocator.num_queried >= len(chat)
        holder.chain.may_fence.set()
        while not holder.router.is_ready:
            await asyncio.sleep(0.01)
        await _pause(0)
        assert len(routing.known) == 2
        before = holder.router.scheduler.allocator.num_queried
        for _ in range(10):
            assert await _ask(routers, chat) == 96
            await _pause(0)
        assert holder.router.scheduler.allocator.num_queried == before


@in_virtual_time
async def test_a_request_that_is_too_large_for_grpc_goes_to_the_chosen_pipeline_by_reference() -> (
    None
):
    """Here it is refused there, for good."""
    replicas = _replicas("ab")
    async with _ingress(replicas) as (routers, _):
        await _ask(routers, [1])
        await _pause(0)
        for each in replicas:
            each.by_reference.clear()
        with pytest.raises(RequestError):
            # of 5 bytes each
            await _ask(routers, [2**20] * (pipeline_client.MAX_GRPC_BYTES // 5))
        assert {by for each in replicas for by in each.by_reference["generate"]} == {True}


@in_virtual_time
async def test_digests_are_followed_from_the_first_request_until_the_client_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One task follows them; if it fails, for a reason that only another version knows, the next
    request starts another.
    """
    replicas = _replicas("ab")
    async with driven(replicas):
        await asyncio.sleep(0.01)
        before = asyncio.all_tasks()
        handle: Any = Handle(replicas)
        routing = PrefixAwareRouting(lambda _: "", asyncio.get_running_loop().time)
        routers = PipelineClient(handle, max_unaccepted=10, routing=routing)
        await asyncio.sleep(10.0)
        assert asyncio.all_tasks() == before, "nothing is queried without requests"
        for _ in range(3):
            await _ask(routers, [1, 2])
        followers = [
            task for task in asyncio.all_tasks() - before if "follow_digests" in repr(task)
        ]
        assert len(followers) == 1
        with monkeypatch.context() as patch:
            patch.setattr(routing, "update", lambda *_: 1 / 0)
            while not followers[0].done():
                await asyncio.sleep(0.1)
        with pytest.raises(ZeroDivisionError):
            followers[0].result()
        await asyncio.sleep(prefix_aware_routing.MAX_AGE_S)
        assert routing.choose(Request.of((1, 2), SamplingParams(max_tokens=1))) is None
        await _ask(routers, [1, 2])
        await _pause(0)
        assert routing.choose(Request.of((1, 2), SamplingParams(max_tokens=1))) is not None
        routers.close()
        await asyncio.sleep(60.0)
        assert asyncio.all_tasks() == before
