"""An ingress and several routers, without Ray: which is tried when a router cannot take a
request.
"""

import asyncio
import time
from collections import Counter
from functools import partial
from typing import Any

import pytest
from activity_records import pipeline_activity
from event_loops import in_event_loop
from ray.serve.config import RequestRouterConfig
from simulated_routers import (
    Handle,
    Replica,
    driven,
    fill,
    harness,
    pending,
    policy,
    replicas_named,
    request_tokens,
    stuck,
)

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.config.measurements import MeasuredLoad
from tramontane.cluster.serving import pipeline_client, retry_policy, router_streams, token_stream
from tramontane.cluster.serving import router_queries as router_questions
from tramontane.cluster.serving.least_loaded_router import (
    ANY,
    ONLY,
    LeastLoadedRouter,
    exclude,
    prefer,
)
from tramontane.cluster.serving.pipeline_client import PipelineClient
from tramontane.cluster.serving.retry_policy import AdmissionWindow
from tramontane.cluster.serving.router_queries import (
    prefix_aware_routing as prefix_aware_routing_of,
)
from tramontane.cluster.serving.router_streams import BackgroundTasks, RouterStreams, Stream
from tramontane.proto.errors import (
    OverloadedError,
    PipelineError,
    QueueFullError,
    RequestError,
    RouterLostError,
)
from tramontane.proto.request import Request, SamplingParams, SequenceRequest, fingerprint_output
from tramontane.proto.step import MicroBatch
from tramontane.router.engine import prefix_aware_routing
from tramontane.router.engine.health import PipelineHealth
from tramontane.router.engine.prefix_aware_routing import PrefixAwareRouting
from tramontane.router.scheduling.prefix_cache import cache_salt


@in_event_loop
async def test_a_pipeline_that_is_down_does_not_swallow_requests() -> None:
    """It refuses at once, so it always has the fewest requests; they are retried on the one that
    works.
    """
    replicas = [Replica("a"), Replica("b"), Replica("c")]
    async with harness(replicas, running="c") as routers:
        assert await asyncio.gather(*(request_tokens(routers) for _ in range(8))) == [5] * 8
        # not for now: permanently
        with pytest.raises(RequestError, match="too large for this server"):
            await request_tokens(routers, num_sequences=50)
        assert replicas[2].router.scheduler.is_idle
        assert replicas[2].call_counts["subscribe"] == 1
        assert (await routers.health()).status == "ready"


@in_event_loop
async def test_where_no_pipeline_works_the_client_gets_an_error_after_each_was_tried_again() -> (
    None
):
    replicas = [Replica("a"), Replica("b")]
    async with harness(replicas, running="") as routers:
        with pytest.raises(PipelineError, match="is being started again; try again soon"):
            await request_tokens(routers)
        assert sum(each.call_counts["generate"] for each in replicas) == 3, (
            "a, b, and one of them again"
        )
        assert not (await routers.health()).is_serving
        assert routers.num_requests == 0


@in_event_loop
async def test_the_expert_load_of_every_router_is_requested() -> None:
    """Once; those that have no load, or do not answer, are not counted."""
    replicas = [Replica(name) for name in "abcd"]
    async with harness(replicas, running="") as routers:
        assert await routers.queries.expert_load() == MeasuredLoad((), 0)
        replicas[0].load, replicas[2].load, replicas[3].load = (
            ((1, 2), (3, 4)),
            ((10, 20), (30, 40)),
            ((0, 1), (0, 1)),
        )
        for each in replicas:
            each.call_counts.clear()
        assert await routers.queries.expert_load() == MeasuredLoad(((11, 23), (33, 45)), 3)
        assert [each.call_counts["expert_load"] for each in replicas] == [1, 1, 1, 1]
        for each in replicas:
            each.load, each.is_dead = (), True
        assert await routers.queries.expert_load() == MeasuredLoad((), 0)


@in_event_loop
async def test_the_activity_of_every_router_is_requested() -> None:
    """One that drives nothing, or is lost, does not keep the others from reporting theirs."""
    replicas = [Replica(name) for name in "abcd"]
    async with harness(replicas, running="") as routers:
        replicas[0].pipeline, replicas[2].pipeline = "app-2", "app-1"
        reported = await routers.queries.activity({"app-1": 2})
        assert reported == [pipeline_activity("app-1", after=2), pipeline_activity("app-2")]
        assert [each.call_counts["activity"] for each in replicas] == [1, 1, 1, 1]
        for each in replicas:
            each.is_dead = True
        assert await routers.queries.activity({}) == []


@in_event_loop
async def test_where_no_pipeline_works_the_start_that_is_waited_for_is_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def read_wait(_application: str) -> str:
        return "waiting for 1 of 2 stages"

    monkeypatch.setattr(router_questions, "read_wait", read_wait)
    async with harness([Replica("a")], running="") as routers:
        health = await routers.health()
    assert (health.status, health.reason) == ("unavailable", "waiting for 1 of 2 stages")


@in_event_loop
async def test_where_every_pipeline_replaces_a_stage_requests_are_accepted() -> None:
    replicas = [Replica("a"), Replica("b")]
    for each in replicas:
        each.health_says = PipelineHealth("degraded", "waiting for 1 of 2 stages", 12.0)
    async with harness(replicas, running="ab") as routers:
        health = await routers.health()
    assert (health.status, health.is_serving, health.since_s) == ("degraded", True, 12.0)


@in_event_loop
async def test_a_pipeline_is_well_whatever_became_of_the_router_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A router that is stopped, or whose machine is lost, answers nothing; no caller waits for it,
    and calls to it end.
    """
    monkeypatch.setattr(router_questions, "HEALTH_TTL_S", 0.0)

    replicas = [Replica(name) for name in "abc"]
    replicas[0].is_cut_off = replicas[2].is_cut_off = True
    async with harness(replicas, running="abc") as routers:
        assert all([(await routers.health()).status == "ready" for _ in range(10)])
        for each in (replicas[0], replicas[2]):
            while each.call_counts["health in vain"] < 10:
                await asyncio.sleep(0)


@pytest.mark.parametrize("silent", ["a", "b", "ac", "abc"])
@in_event_loop
async def test_reports_of_others_are_kept_where_a_router_does_not_answer(
    silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_questions, "ROUTER_READY_TIMEOUT_S", 0.05)

    replicas = [Replica(name) for name in "abc"]
    async with harness(replicas, running="") as routers:
        for each in replicas:
            each.pipeline, each.load, each.is_cut_off = (each.name, ((1, 2),), each.name in silent)
        well = [each.name for each in replicas if not each.is_cut_off]
        assert [reported.name for reported in await routers.queries.activity({})] == well
        assert (await routers.queries.expert_load()).num_pipelines == len(well)
        assert not (await routers.health()).is_serving
        assert [each.call_counts["activity in vain"] for each in replicas] == [
            each.is_cut_off for each in replicas
        ]


@in_event_loop
async def test_a_client_that_leaves_while_routers_are_called_leaves_no_call_behind() -> None:
    silent = Replica("a")
    silent.is_cut_off = True
    async with harness([silent], running="a") as routers:
        request_task = asyncio.create_task(routers.queries.activity({}))
        while not silent.call_counts["activity"]:
            await asyncio.sleep(0)
        request_task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request_task
        while not silent.call_counts["activity in vain"]:
            await asyncio.sleep(0)


PROMPT = tuple(range(40))  # two pages of 16, and more


async def _next_digests(replicas: list[Replica]) -> None:
    """Return once every replica has answered a query that began after this call."""
    before = [each.call_counts["prefix_digest"] for each in replicas]
    while any(
        each.call_counts["prefix_digest"] < count + 2
        for each, count in zip(replicas, before, strict=True)
    ):
        await asyncio.sleep(0.001)


def _fast_routing(monkeypatch: pytest.MonkeyPatch) -> PrefixAwareRouting:
    monkeypatch.setattr(router_questions, "DIGEST_INTERVAL_S", 0.001)
    monkeypatch.setattr(router_questions, "S_PER_DIGEST", 0.0)
    monkeypatch.setattr(prefix_aware_routing, "LATE_S", 0.0)
    monkeypatch.setattr(prefix_aware_routing, "MAX_AGE_S", 1e9)
    return PrefixAwareRouting(partial(cache_salt, ""), time.monotonic)


@in_event_loop
async def test_a_request_goes_to_the_pipeline_that_has_its_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once an ingress knows what is cached; the router that has it may be full, lost, or as good as
    the others for others.
    """
    routing = _fast_routing(monkeypatch)

    replicas = [Replica(name) for name in "abc"]
    async with harness(replicas, running="abc", routing=routing) as routers:
        assert await request_tokens(routers) == 5
        await _next_digests(replicas)
        assert await request_tokens(routers, prompt=PROMPT) == 5
        [chosen] = [
            each for each in replicas if each.router.scheduler.allocator.num_queried >= len(PROMPT)
        ]
        for number in range(6):
            await _next_digests(replicas)
            assert await request_tokens(routers, prompt=(*PROMPT, number)) == 5
        assert chosen.router.scheduler.allocator.num_hit == 6 * 32
        assert sum(each.router.scheduler.allocator.num_hit for each in replicas) == 6 * 32
        chosen.chain.gate = stuck
        fill(chosen)
        before = chosen.call_counts["generate"]
        assert await request_tokens(routers, prompt=(*PROMPT, 7)) == 5, (
            "it refuses, and another one computes all"
        )
        assert chosen.call_counts["generate"] <= before + 1, "it is asked once"


@in_event_loop
async def test_a_pipeline_that_sends_no_digest_is_not_chosen_by_its_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    routing = _fast_routing(monkeypatch)

    replicas = [Replica(name) for name in "abc"]
    async with harness(replicas, running="abc", routing=routing) as routers:
        assert await request_tokens(routers) == 5
        await _next_digests(replicas)
        assert set(routing.known) == set("abc")
        replicas[0].is_dead = True
        await _next_digests(replicas)
        assert set(routing.known) == set("bc")
        replicas[0].is_dead = False
        await _next_digests(replicas)
        assert set(routing.known) == set("abc")


def test_pipelines_are_chosen_by_prefixes_where_they_cache_any() -> None:
    """However many there are at first: a Serve config may change ``num_replicas`` alone."""

    def routing(**settings: object) -> PrefixAwareRouting | None:
        return prefix_aware_routing_of(
            EngineConfig.build(None, {"max_replicas": 2} | settings), "mark"
        )

    assert routing(max_replicas=1) is not None
    assert routing(enable_prefix_caching=False) is None
    by_tenant, shared = routing(), routing(share_prefixes=True)
    assert by_tenant is not None
    assert shared is not None
    assert by_tenant._salt_of("t") == cache_salt("mark", "t")
    assert shared._salt_of("t") == cache_salt("mark", "")


@in_event_loop
async def test_a_full_pipeline_passes_a_request_on_to_one_with_room() -> None:
    replicas = [Replica("a", stuck), Replica("b", stuck), Replica("c")]
    async with harness(replicas, running="ab") as routers:
        fill(replicas[0])
        fill(replicas[1])
        with pytest.raises(OverloadedError, match="4 sequences are waiting and at most 4 may"):
            # not the reason of c, which is down: that one does not say when to come back
            await request_tokens(routers)
    replicas = [Replica("a", stuck), Replica("b", stuck), Replica("c")]
    async with harness(replicas, running="abc") as routers:
        fill(replicas[0])
        fill(replicas[1])
        assert await request_tokens(routers, num_sequences=4) == 20


@in_event_loop
async def test_routers_that_are_full_are_not_tried_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What they said holds for the same owner's requests, until one of our own ends or it is
    old.
    """
    monkeypatch.setattr(retry_policy, "FULL_TTL_S", 3600.0)

    release = asyncio.Event()

    async def gate(_batch: MicroBatch) -> None:
        await release.wait()

    replica = Replica("a", gate)
    async with harness([replica], running="a") as routers:
        ours = [asyncio.create_task(request_tokens(routers, num_sequences=n)) for n in (8, 3)]
        while replica.router.num_requests < 2:
            await asyncio.sleep(0)
        with pytest.raises(OverloadedError) as large:
            await request_tokens(routers, num_sequences=2)
        assert not isinstance(large.value, QueueFullError), "one sequence could still wait"
        routers.check_capacity(1)
        ours.append(asyncio.create_task(request_tokens(routers)))
        while replica.router.num_requests < 3:
            await asyncio.sleep(0)
        with pytest.raises(QueueFullError):
            await request_tokens(routers)
        num_generates = replica.call_counts["generate"]
        for _ in range(3):
            with pytest.raises(QueueFullError):
                routers.check_capacity(1)
            with pytest.raises(QueueFullError):
                await request_tokens(routers)
        assert replica.call_counts["generate"] == num_generates
        routers.check_capacity(1, owner=5)
        release.set()
        await asyncio.gather(*ours)
        routers.check_capacity(1)
        assert not routers._refusals.matching(Request.of((1,), SamplingParams(max_tokens=5))), (
            "there is room on it now"
        )
        assert await request_tokens(routers) == 5


@in_event_loop
async def test_that_routers_are_full_is_not_believed_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retry_policy, "FULL_TTL_S", 0.0)

    replica = Replica("a", stuck)
    async with harness([replica], running="a") as routers:
        fill(replica)
        for number in range(1, 4):
            with pytest.raises(QueueFullError):
                await request_tokens(routers)
            routers.check_capacity(1)
            assert replica.call_counts["generate"] >= number


@in_event_loop
async def test_a_request_that_no_router_takes_is_not_kept_forever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where no replica is running, Ray Serve keeps calls until there is one."""
    monkeypatch.setattr(pipeline_client, "ACCEPT_TIMEOUT_S", 0.05)
    monkeypatch.setattr(retry_policy, "ADMISSION_TIMEOUT_S", 0.05)
    monkeypatch.setattr(retry_policy, "ADMISSION_RETRY_INTERVAL_S", 0.01)

    handle: Any = Handle([])
    routers = PipelineClient(handle, max_unaccepted=10)
    with pytest.raises(PipelineError, match="no pipeline was ready in time"):
        await request_tokens(routers)
    waiting = [asyncio.create_task(request_tokens(routers, num_sequences=5)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="on their way to a pipeline"):
        await request_tokens(routers)
    for refused in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(refused, PipelineError)
    assert routers.num_requests == 0


@in_event_loop
async def test_a_request_is_refused_by_the_number_of_its_sequences_and_its_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 10 that may be on their way 9 are: one more may come, two may not."""
    handle: Any = Handle([])
    routers = PipelineClient(handle, max_unaccepted=10)
    waiting = asyncio.create_task(request_tokens(routers, num_sequences=9))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="on their way to a pipeline"):
        await request_tokens(routers, num_sequences=2)
    last = asyncio.create_task(request_tokens(routers))
    await asyncio.sleep(0)
    assert routers.num_requests == 2
    for each in (waiting, last):
        each.cancel()
    await asyncio.wait([waiting, last])
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(routers._window, "check", lambda *about: asked.append(about))
    sequence = SequenceRequest((1,), SamplingParams(max_tokens=5))
    generated = routers.generate(Request((sequence,) * 3, owner=7))
    beginning = asyncio.create_task(anext(generated))
    await asyncio.sleep(0)
    assert asked == [(3, 7)]
    beginning.cancel()
    await asyncio.wait([beginning])


@pytest.mark.parametrize(("waited_s", "expected_s"), [(0.0, 1), (0.2, 1), (7.5, 8), (300.0, 60)])
@in_event_loop
async def test_a_refused_request_is_to_retry_after_as_long_as_others_have_waited(
    waited_s: float, expected_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that waits longest, however often it was tried since; a minute at most."""
    monkeypatch.setattr(retry_policy, "ADMISSION_RETRY_INTERVAL_S", 0.0)

    loop, now = asyncio.get_running_loop(), 1000.0
    monkeypatch.setattr(loop, "time", lambda: now)
    handle: Any = Handle([])
    routers = PipelineClient(handle, max_unaccepted=10)

    def check() -> None:
        with pytest.raises(OverloadedError, match="on their way to a pipeline") as refused:
            routers.check_capacity(10)
        assert refused.value.retry_after_s == expected_s

    async def number_after(last: int) -> int:
        while max(routers._streams.calls, default=-1) <= last:
            await asyncio.sleep(0)
        return max(routers._streams.calls)

    routers.check_capacity(10)
    running_requests = asyncio.create_task(request_tokens(routers))
    number = await number_after(-1)
    now += waited_s
    check()
    routers._streams.calls[number].put(PipelineError("no router has answered in time"))
    while number in routers._streams.calls:
        await asyncio.sleep(0)
    check()
    await number_after(number)
    later = asyncio.create_task(request_tokens(routers))
    await number_after(number + 1)
    check()
    for each in (running_requests, later):
        each.cancel()
    await asyncio.gather(running_requests, later, return_exceptions=True)
    routers.check_capacity(10)


@pytest.fixture
def _soon_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_streams, "SILENCE_TIMEOUT_S", 0.3)
    monkeypatch.setattr(pipeline_client, "ACCEPT_TIMEOUT_S", 0.5)
    monkeypatch.setattr(token_stream, "KEEPALIVE_INTERVAL_S", 0.02)


@pytest.mark.usefixtures("_soon_missed")
@in_event_loop
async def test_the_loss_of_a_routers_machine_is_noticed() -> None:
    """Its system closes nothing, and Ray Serve learns it later. Also by a request that it has not
    answered at all.
    """
    at_work = asyncio.Event()

    async def gate(_batch: MicroBatch) -> None:
        at_work.set()
        await asyncio.Event().wait()

    lost, added = Replica("a", gate), Replica("b")
    replicas = [lost]
    async with harness(replicas, running="a") as routers, driven([added]):
        running_requests = [asyncio.create_task(request_tokens(routers))]
        await at_work.wait()
        lost.is_cut_off = True
        running_requests.append(asyncio.create_task(request_tokens(routers)))
        # the second request, and both once the stream is missed
        while lost.call_counts["generate in vain"] < 3:
            await asyncio.sleep(0)
        replicas[:] = [added]
        assert await asyncio.gather(*running_requests) == [5, 5]


@pytest.mark.usefixtures("_soon_missed")
@in_event_loop
async def test_a_router_that_fell_silent_is_not_the_one_with_least_to_do() -> None:
    lost, other = Replica("a", stuck), Replica("b")
    async with harness([lost], running="a") as routers, driven([other]):
        running_requests = asyncio.create_task(request_tokens(routers))
        while not lost.router.num_requests:
            await asyncio.sleep(0)
        handle: Any = routers.queries._handle
        handle.replicas.append(other)
        lost.is_cut_off = True
        assert await running_requests == 5
        assert await asyncio.gather(*(request_tokens(routers) for _ in range(4))) == [5] * 4
        assert lost.call_counts["generate in vain"] == 0


@in_event_loop
async def test_a_request_that_was_taken_may_wait_as_long_as_it_must(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipeline_client, "ACCEPT_TIMEOUT_S", 0.05)
    opened = asyncio.Event()

    async def gate(_batch: MicroBatch) -> None:
        await opened.wait()

    replica = Replica("a", gate)
    async with harness([replica], running="a") as routers:
        running_requests = asyncio.create_task(request_tokens(routers))
        await asyncio.sleep(0.2)
        opened.set()
        assert await running_requests == 5
        assert replica.call_counts["generate"] == 2, (
            "no stream yet, and once more: it was not given to the router again"
        )


@in_event_loop
async def test_a_stream_that_went_to_another_router_replaces_nothing() -> None:
    """A replica says that it has no stream, and dies: the call that opens one is routed to a
    replica that is well.
    """
    replica = Replica("b")
    async with harness([replica], running="b") as routers:
        assert await request_tokens(routers) == 5
        assert [message async for message in replica.subscribe(routers._streams.name, "a")] == []
        assert await request_tokens(routers) == 5
        assert replica.call_counts["subscribe"] == 1


@in_event_loop
async def test_a_stream_that_broke_on_one_side_is_opened_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The router believes that it still answers through it. The request continues where it was."""
    monkeypatch.setattr(token_stream, "MIN_PAUSE_PER_REQUEST_S", 0.0)  # each token is a message

    replica = Replica("a")
    async with harness([replica], running="a") as routers:
        # of the first stream, of which the second and third are a request's
        replica.num_messages = 3
        assert await request_tokens(routers) == 5
        assert replica.call_counts["subscribe"] == 2
        assert routers.num_requests == 0


@in_event_loop
async def test_what_can_never_run_is_refused_by_the_first_router_that_gets_it() -> None:
    replicas = [Replica("a"), Replica("b")]
    async with harness(replicas, running="ab") as routers:
        with pytest.raises(RequestError):
            await request_tokens(routers, prompt=(1,) * 300)
        assert sum(each.call_counts.total() for each in replicas) == 3, (
            "no stream yet, the stream, and the refusal"
        )


@in_event_loop
async def test_a_large_request_does_not_go_where_messages_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray Serve's gRPC takes 4 MiB."""
    monkeypatch.setattr(pipeline_client, "MAX_GRPC_BYTES", 330)

    replica = Replica("a")
    async with harness([replica], running="a") as routers:
        assert await request_tokens(routers, num_sequences=4) == 20, "a prompt travels once"
        assert replica.by_reference == {"generate": {False}, "subscribe": {False}}
        assert await request_tokens(routers, prompt=tuple(range(1, 200))) == 5
        assert replica.by_reference["generate"] == {False, True}


def test_the_policy_is_one_that_ray_serve_takes() -> None:
    assert (
        RequestRouterConfig(request_router_class=LeastLoadedRouter).get_request_router_class()
        is LeastLoadedRouter
    )


@in_event_loop
async def test_requests_that_come_together_are_spread() -> None:
    """Nothing has been sent when they are routed, and each replica would say that it has none."""
    routing, three = policy(), replicas_named("a", "b", "c")
    requests = [pending() for _ in range(12)]
    chosen = [
        (await routing.choose_replicas(three, request))[0][0].replica_id for request in requests
    ]
    assert Counter(each.unique_id for each in chosen) == {"a": 4, "b": 4, "c": 4}
    for request, replica in zip(requests, chosen, strict=True):
        if replica.unique_id == "b":
            routing.on_request_completed(replica, request.metadata.internal_request_id)
    ((freed,),) = await routing.choose_replicas(three, pending())
    assert freed.replica_id.unique_id == "b"


@pytest.mark.parametrize(
    ("constraint", "allowed"),
    [
        (ANY, "abc"),
        (ONLY + "a", "a"),
        (ONLY + "gone", "abc"),
        (exclude("ac"), "b"),
        (exclude("abc"), "abc"),
        (prefer("a", "ab"), "a"),
        (prefer("gone", "ab"), "c"),
        (prefer("gone", ""), "abc"),
        (prefer(None, "ab"), "c"),
    ],
)
@in_event_loop
async def test_a_call_goes_where_its_constraint_allows(constraint: str, allowed: str) -> None:
    routing, three = policy(), replicas_named("a", "b", "c")
    chosen = [
        (await routing.choose_replicas(three, pending(constraint)))[0][0].replica_id.unique_id
        for _ in range(12)
    ]
    assert Counter(chosen) == {name: 12 // len(allowed) for name in allowed}


@in_event_loop
async def test_a_request_that_was_never_sent_does_not_count() -> None:
    routing, two = policy(), replicas_named("a", "b")
    for _ in range(5):
        left = pending("=a")
        await routing.choose_replicas(two, left)
        left.future.cancel()
    unanswered = pending("=a")
    for _ in range(5):  # once more where the replica did not answer
        await routing.choose_replicas(two, unanswered)
    await asyncio.sleep(0)
    ((other,),) = await routing.choose_replicas(two, pending())
    assert other.replica_id.unique_id == "b"
    assert routing._num_assigned == {"a": 1, "b": 1}


@in_event_loop
async def test_a_stream_that_breaks_ends_the_calls_that_a_router_may_have_accepted() -> None:
    """Those whose tokens it has brought, and those that no router is known to have accepted."""
    queries: Any = None
    streams = RouterStreams(queries, BackgroundTasks(), "node", 0.0)
    window, request = AdmissionWindow(10), Request.of((1,), SamplingParams(max_tokens=2))
    lost, other = (Stream(streams.name, replica) for replica in "ab")
    on_lost, on_other, unknown = (streams.begin_call(request, 0.0, window) for _ in range(3))
    for call, stream in ((on_lost, lost), (on_other, other)):
        call.deliver(fingerprint_output("fp"), stream)
    streams._on_break(lost, ConnectionError("reset"))
    with pytest.raises(RouterLostError, match="the stream from the router broke"):
        await on_lost.next_output()
    with pytest.raises(PipelineError, match="the stream from the router broke") as raised:
        await unknown.next_output()
    assert not isinstance(raised.value, RouterLostError)
    assert streams.name != lost.ingress, "the router may take the old one to be open"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await on_other.next_output()
    for call in (on_lost, on_other, unknown):
        streams.end_call(call)
    window.check(10, 0)
