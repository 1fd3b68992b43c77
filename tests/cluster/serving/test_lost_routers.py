"""Routers are lost while they work, and their requests continue with others: every token once and
the right one. Without Ray.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from event_loops import in_event_loop
from harness import merge_outputs
from running_router import new_scheduler
from scripted_chain import StatefulChain, answer
from simulated_routers import Response

from tramontane.cluster.serving import retry_policy, token_stream
from tramontane.cluster.serving import router_queries as router_questions
from tramontane.cluster.serving.pipeline_client import PipelineClient
from tramontane.cluster.serving.retry_policy import (
    RouterFailoverBudget,
    WaitingRequest,
    most_useful_error,
)
from tramontane.cluster.serving.token_stream import TokenStreams
from tramontane.proto.errors import (
    DeadlineExceededError,
    DrainingError,
    ModelMismatchError,
    OverloadedError,
    PipelineError,
    PipelineSupersededError,
    PipelineUnavailableError,
    QueueFullError,
    RouterLostError,
    TramontaneError,
)
from tramontane.proto.ports import TokenSource
from tramontane.proto.request import (
    FinishReason,
    Identity,
    Request,
    RequestOutput,
    RequestTimings,
    SamplingParams,
    SequenceRequest,
    TokenEvent,
)
from tramontane.proto.step import MicroBatch
from tramontane.router.engine.health import PipelineHealth
from tramontane.router.engine.request_output import ResumableRequest
from tramontane.router.engine.router import Router
from tramontane.router.openai.request_context import RequestTokenSource


class Replica:
    """A Router replica in this process; once killed it answers no call, and its streams break."""

    def __init__(self, name: str, rng: random.Random, is_stuck: bool = False) -> None:
        self._rng, self.is_stuck, self.is_superseded = rng, is_stuck, False
        self.name, self.is_killed, self.num_steps = name, asyncio.Event(), 0
        chain = StatefulChain(self._gate, experts={3: 0}, logprobs=True)
        self.router = Router(new_scheduler(), chain)
        self.channels = TokenStreams(name)
        self._running = asyncio.create_task(self.router.run())

    async def _gate(self, _batch: MicroBatch) -> None:
        self.num_steps += 1
        if self.is_stuck:
            await self.is_killed.wait()
        for _ in range(self._rng.randrange(4)):
            await asyncio.sleep(0)

    async def kill(self) -> None:
        self.is_killed.set()
        self._running.cancel()
        with suppress(asyncio.CancelledError):
            await self._running


class Routing:
    """Ray Serve's handle: to any replica, or to the one that is wished for if that is there."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.replicas: list[Replica] = []

    def options(self, **wish: Any) -> Any:
        return SimpleNamespace(remote=lambda *args: self._call(wish, *args))

    def _call(self, wish: dict[str, Any], *args: Any) -> Any:
        wished = [
            each for each in self.replicas if each.name == wish["session_id"].removeprefix("=")
        ]
        replica = self._rng.choice(wished or self.replicas)
        if wish["method_name"] == "health":
            return Response(asyncio.ensure_future(_health(replica)))
        if wish["stream"]:
            return _until_killed(replica, *args)
        return Response(asyncio.ensure_future(_or_death(replica, lambda: _answer(replica, args))))


async def _until_killed(replica: Replica, *args: str) -> AsyncIterator[bytes]:
    async with aclosing(replica.channels.subscribe(*args)) as messages:  # type: ignore[type-var]
        while True:
            message = await _or_death(replica, lambda: anext(messages, None))
            if message is None:
                return
            yield message


async def _or_death(replica: Replica, work: Callable[[], Awaitable[Any]]) -> Any:
    task, death = asyncio.ensure_future(work()), asyncio.ensure_future(replica.is_killed.wait())
    try:
        await asyncio.wait([task, death], return_when=asyncio.FIRST_COMPLETED)
        if replica.is_killed.is_set():
            raise ConnectionError("the actor died")
        return task.result()
    finally:
        task.cancel()
        death.cancel()
        await asyncio.gather(task, death, return_exceptions=True)


async def _health(replica: Replica) -> tuple[PipelineHealth, str]:
    await asyncio.sleep(0)
    return PipelineHealth("ready"), replica.name


async def _answer(replica: Replica, args: Any) -> bytes:
    if replica.is_superseded:
        return replica.channels.refusal(PipelineSupersededError("a newer version has the pipeline"))
    return await replica.channels.generate(replica.router, *args)


def _accepted_by(routers: PipelineClient) -> set[str]:
    """Return the routers that send tokens now."""
    calls = routers._streams.calls.values()
    return {call.stream.replica for call in calls if call.stream is not None}


@asynccontextmanager
async def _harness(num_replicas: int, rng: random.Random) -> AsyncGenerator[tuple[Any, Any], None]:
    routing: Any = Routing(rng)
    routing.replicas += [Replica(f"r{n}", rng) for n in range(num_replicas)]
    routers = PipelineClient(routing, max_unaccepted=1000)
    yield routing, routers
    routers.close()
    await asyncio.gather(*(replica.kill() for replica in routing.replicas))


async def _output(routers: TokenSource, request: Request) -> list[RequestOutput]:
    return [batch async for batch in routers.generate(request)]


def _check(request: Request, batches: list[RequestOutput]) -> None:
    """Tokens, and what was reported next to them, for each position once and in order."""
    merged = merge_outputs(batches)
    for number, spec in enumerate(request.sequences):
        end = len(spec.prompt_ids) + spec.sampling.max_tokens
        tokens = [event.token_id for event in merged.events if event.seq_id == number]
        assert tokens == answer(spec.prompt_ids, spec.sampling.max_tokens)
        logprobs = [
            value
            for output in merged.logprobs
            if output.seq_id == number
            for value in output.logprobs
        ]
        assert logprobs == [-float(position) for position in range(1, end)]
        experts = [
            ids for output in merged.experts if output.seq_id == number for ids in output.expert_ids
        ]
        assert experts == [(position,) for position in range(end - 1)]


def _requests(rng: random.Random, num_requests: int) -> list[Request]:
    """Of up to three sequences each, which end at different times."""

    def sequence() -> SequenceRequest:
        prompt = tuple(rng.randrange(900) for _ in range(rng.randint(1, 100)))
        sampling = SamplingParams(
            max_tokens=rng.randint(1, 60), return_experts=(3,), logprobs=0, prompt_logprobs=0
        )
        return SequenceRequest(prompt, sampling)

    return [
        Request(tuple(sequence() for _ in range(rng.randint(1, 3)))) for _ in range(num_requests)
    ]


def _batch(*events: tuple[int, int, bool]) -> RequestOutput:
    output = tuple(
        TokenEvent(number, token_id, FinishReason.STOP if ends else None)
        for number, token_id, ends in events
    )
    return RequestOutput(output, RequestTimings(0.0, 0.0, 0.0))


@pytest.mark.parametrize("seed", range(10))
@in_event_loop
async def test_requests_continue_however_often_a_router_is_lost(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry_policy, "ADMISSION_RETRY_INTERVAL_S", 0.0)
    rng = random.Random(seed)
    requests = _requests(rng, 12)

    async with _harness(2, rng) as (routing, routers):
        requested = [asyncio.create_task(_output(routers, each)) for each in requests]
        num_killed = 0
        while num_killed < 6 and not all(task.done() for task in requested):
            victim = routing.replicas[rng.randrange(2)]
            while victim.num_steps < 12 and not all(task.done() for task in requested):
                await asyncio.sleep(0)
            await victim.kill()
            num_killed += 1
            routing.replicas = [each for each in routing.replicas if each is not victim]
            routing.replicas.append(Replica(f"r{num_killed + 1}", rng))
        assert num_killed >= 3
        for request, task in zip(requests, requested, strict=True):
            _check(request, await task)
        assert routers.num_requests == 0
        assert not routers._streams.calls
        assert not routers._window._waiting


@in_event_loop
async def test_a_request_that_every_router_is_lost_with_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retry_policy, "ADMISSION_RETRY_INTERVAL_S", 0.0)

    async with _harness(0, random.Random(0)) as (routing, routers):
        routing.replicas = [Replica("r0", random.Random(0), is_stuck=True)]
        requested = asyncio.create_task(
            _output(routers, Request.of((1,), SamplingParams(max_tokens=1)))
        )
        num_killed = 0
        while not requested.done():
            # which is known to work on it
            if routing.replicas[0].name in _accepted_by(routers):
                await routing.replicas[0].kill()
                num_killed += 1
                routing.replicas = [Replica(f"r{num_killed}", random.Random(0), is_stuck=True)]
            await asyncio.sleep(0)
        with pytest.raises(PipelineError, match="10 routers were lost with this request"):
            await requested
        assert num_killed == retry_policy.MAX_LOSSES


@in_event_loop
async def test_what_another_ingress_has_begun_is_not_refused_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither because many come at once nor because no pipeline can take it now: it had been
    taken.
    """
    monkeypatch.setattr(retry_policy, "ADMISSION_RETRY_INTERVAL_S", 0.0)
    new = Request.of((1, 2), SamplingParams(max_tokens=5))
    tokens = answer((1, 2), 5)

    async with _harness(1, random.Random(0)) as (routing, others):
        routing.replicas[0]._running.cancel()
        with pytest.raises(PipelineUnavailableError):
            await _output(others, new)
        routers = PipelineClient(routing, max_unaccepted=1)
        # another request's sequence is on its way
        routers._window.add(WaitingRequest(1, 0.0))
        with pytest.raises(OverloadedError):
            await _output(routers, new)
        output, fresh = (
            Request((replace(new.sequences[0], output_ids=tuple(tokens[:2])),)),
            replace(new, already_admitted=True),
        )
        requested = [asyncio.create_task(_output(routers, each)) for each in (output, fresh)]
        for _ in range(50):
            await asyncio.sleep(0)
        assert not any(each.done() for each in requested)
        routing.replicas.append(Replica("r1", random.Random(0)))
        for each, expected in zip(requested, (tokens[2:], tokens), strict=True):
            assert [event.token_id for batch in await each for event in batch.events] == expected
        routers.close()


@in_event_loop
async def test_time_with_a_router_does_not_count_as_failing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each loss comes after a time with a router that is longer than every retry budget, and one
    request survives them.
    """
    monkeypatch.setattr(retry_policy, "ADMISSION_RETRY_INTERVAL_S", 0.0)

    loop, now = asyncio.get_running_loop(), 0.0
    monkeypatch.setattr(loop, "time", lambda: now)
    lasting = RouterFailoverBudget()
    for _ in range(retry_policy.MAX_LOSSES - 1):
        lasting.on_error(RouterLostError("lost"))
        assert lasting.without_router_since == now
        now += retry_policy.LOAD_TIMEOUT_S - 1
        lasting.on_error(PipelineUnavailableError("is being started"))
        now += retry_policy.LOAD_TIMEOUT_S
    with pytest.raises(PipelineError, match="no router could continue"):
        lasting.on_error(PipelineUnavailableError("is being started"))


@in_event_loop
async def test_losses_do_not_add_up_where_tokens_came_between() -> None:
    """A long answer may lose more routers than the bound: the bound is for one that makes no
    progress.
    """
    lasting = RouterFailoverBudget()
    for _ in range(3 * retry_policy.MAX_LOSSES):
        lasting.on_error(RouterLostError("lost"))
        lasting.reset()
    for _ in range(retry_policy.MAX_LOSSES - 1):
        lasting.on_error(RouterLostError("lost"))
    with pytest.raises(PipelineError, match="10 routers were lost with this request"):
        lasting.on_error(RouterLostError("lost"))


@in_event_loop
async def test_every_token_of_a_request_resets_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve routers die after one micro-batch each, and the request ends with all its tokens."""
    monkeypatch.setattr(retry_policy, "ADMISSION_RETRY_INTERVAL_S", 0.0)
    monkeypatch.setattr(token_stream, "MIN_PAUSE_PER_REQUEST_S", 0.0)  # each token is a message
    request = Request.of((1, 2), SamplingParams(max_tokens=40))
    num_lost = retry_policy.MAX_LOSSES + 2

    async with _harness(1, random.Random(0)) as (routing, routers):
        received: list[int] = []

        async def read() -> None:
            async with aclosing(routers.generate(request)) as batches:
                async for batch in batches:
                    received.extend(event.token_id for event in batch.events)

        reading = asyncio.create_task(read())
        for number in range(num_lost):
            (victim,) = routing.replicas
            before = len(received)
            while len(received) == before and not reading.done():
                await asyncio.sleep(0)
            assert not reading.done()
            routing.replicas = [Replica(f"next{number}", random.Random(0))]
            await victim.kill()
        await reading
        assert received == answer((1, 2), 40)


OTHER_MODEL = ModelMismatchError("another model or version")
SILENT = PipelineError("no router has answered in time")


@pytest.mark.parametrize(
    ("was_accepted", "error", "limit_s"),
    [
        (True, SILENT, retry_policy.LOAD_TIMEOUT_S),
        (True, PipelineUnavailableError("is being started"), retry_policy.LOAD_TIMEOUT_S),
        (True, PipelineSupersededError("a newer version has it"), retry_policy.LOAD_TIMEOUT_S),
        (True, OTHER_MODEL, retry_policy.NEW_VERSION_TIMEOUT_S),
        (
            False,
            PipelineSupersededError("a newer version has it"),
            retry_policy.NEW_VERSION_TIMEOUT_S,
        ),
        (False, SILENT, retry_policy.ADMISSION_TIMEOUT_S),
        (False, OTHER_MODEL, -1.0),
    ],
)
@in_event_loop
async def test_retries_last_as_long_as_they_help(
    was_accepted: bool, error: TramontaneError, limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, now = asyncio.get_running_loop(), 1000.0
    monkeypatch.setattr(loop, "time", lambda: now)
    trying = RouterFailoverBudget(was_accepted=was_accepted)
    if limit_s > 0:
        trying.on_error(error)
        now += limit_s
        trying.on_error(error)
        now += 1.0
    with pytest.raises(PipelineError) as refused:
        trying.on_error(error)
    assert isinstance(refused.value, PipelineUnavailableError) is not was_accepted, (
        "it has not begun, and may try elsewhere"
    )


def test_a_router_of_another_model_is_believed_last() -> None:
    """Another one that is being started may still continue the request."""
    starting, full, over = (
        PipelineUnavailableError("is being started"),
        QueueFullError("full", 3),
        PipelineSupersededError("a newer version has it"),
    )
    assert most_useful_error([OTHER_MODEL, starting]) is starting
    assert most_useful_error([OTHER_MODEL, starting, full]) is full
    assert most_useful_error([OTHER_MODEL, full, over]) is over


async def _left_without_a_router(
    routing: Any, routers: Any, source: TokenSource
) -> "asyncio.Task[list[RequestOutput]]":
    """A request whose only router dies once it has accepted it; there is no other."""
    (dies,) = routing.replicas
    dies.is_stuck = True
    requested = asyncio.create_task(
        _output(source, Request.of((1, 2), SamplingParams(max_tokens=5)))
    )
    while not _accepted_by(routers):
        await asyncio.sleep(0)
    routing.replicas = []
    await dies.kill()
    return requested


@in_event_loop
async def test_a_request_survives_the_loss_of_a_router_with_weights_that_take_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retry_policy, "ADMISSION_RETRY_INTERVAL_S", 0.0)

    loop, later_s = asyncio.get_running_loop(), 0.0
    real_time = loop.time
    monkeypatch.setattr(loop, "time", lambda: real_time() + later_s)
    async with _harness(1, random.Random(0)) as (routing, routers):
        requested = await _left_without_a_router(routing, routers, routers)
        for _minute in range(9):
            for _turn in range(20):
                await asyncio.sleep(0)
            later_s += 60.0
        assert not requested.done()
        routing.replicas = [Replica("r1", random.Random(0))]
        assert [event.token_id for batch in await requested for event in batch.events] == answer(
            (1, 2), 5
        )


@in_event_loop
async def test_a_request_without_a_router_ends_with_its_deadline_and_with_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However long it could continue trying."""
    monkeypatch.setattr(retry_policy, "ADMISSION_RETRY_INTERVAL_S", 0.0)

    loop, later_s = asyncio.get_running_loop(), 0.0
    real_time = loop.time
    monkeypatch.setattr(loop, "time", lambda: real_time() + later_s)
    async with _harness(1, random.Random(0)) as (routing, routers):
        source = RequestTokenSource(routers, Identity(), deadline=loop.time() + 3000.0)
        requested = await _left_without_a_router(routing, routers, source)
        monkeypatch.setattr(retry_policy, "LOAD_TIMEOUT_S", 1e6)
        later_s = 3001.0
        with pytest.raises(DeadlineExceededError):
            await requested
        routing.replicas = [Replica("r1", random.Random(0))]
        requested = await _left_without_a_router(routing, routers, routers)
        assert routers.drain() == 1
        routers.end_all()
        with pytest.raises(DrainingError):
            await requested
        assert routers.drain() == 0


@in_event_loop
async def test_a_request_that_waits_for_its_next_attempt_ends_with_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No router has it at that time."""
    waits, may_try = asyncio.Event(), asyncio.Event()

    async def backoff(_: object) -> None:
        assert not waits.is_set(), "there is no attempt after the end"
        waits.set()
        await may_try.wait()

    monkeypatch.setattr(retry_policy.RouterFailoverBudget, "backoff", backoff)
    async with _harness(1, random.Random(0)) as (routing, routers):
        requested = await _left_without_a_router(routing, routers, routers)
        await waits.wait()
        routers.end_all()
        may_try.set()
        with pytest.raises(DrainingError, match="has stopped before this request ended"):
            await requested


@in_event_loop
async def test_new_requests_wait_for_a_newer_version_as_many_as_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retry_policy, "ADMISSION_RETRY_INTERVAL_S", 0.0)
    requests = [Request.of((n, 2), SamplingParams(max_tokens=5)) for n in range(3)]

    async with _harness(1, random.Random(0)) as (routing, _):
        routing.replicas[0].is_superseded = True
        routers = PipelineClient(routing, max_unaccepted=2)
        requested = [asyncio.create_task(_output(routers, each)) for each in requests[:2]]
        for turn in range(50):
            await asyncio.sleep(0)
            if turn > 10:  # whether they wait for an answer, or for the time to try again
                with pytest.raises(OverloadedError):
                    routers.check_capacity(1)
        routing.replicas.append(Replica("r1", random.Random(0)))
        for number, batches in enumerate(await asyncio.gather(*requested)):
            assert [event.token_id for batch in batches for event in batch.events] == answer(
                (number, 2), 5
            )
        routers.check_capacity(2)
        routers.close()


@in_event_loop
async def test_what_a_leaving_router_does_not_finish_in_its_time_continues_with_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router_questions, "RETIREMENT_POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr(retry_policy, "ADMISSION_RETRY_INTERVAL_S", 0.0)
    request = Request.of((1, 2), SamplingParams(max_tokens=5))

    async with _harness(1, random.Random(0)) as (routing, _):
        (leaving,) = routing.replicas
        leaving.is_stuck = True
        routers = PipelineClient(routing, max_unaccepted=10, handover_grace_s=0.0)
        requested = asyncio.create_task(_output(routers, request))
        for _turn in range(100):
            await asyncio.sleep(0)
        assert leaving.router.num_requests == 1, "where there is no other it stays"
        routing.replicas = [Replica("r1", random.Random(0))]
        assert [event.token_id for batch in await requested for event in batch.events] == answer(
            (1, 2), 5
        )
        assert leaving.router.num_requests == 0, "and can be stopped"
        await leaving.kill()
        routers.close()


def test_the_rest_of_a_request_is_numbered_anew() -> None:
    sampling = SamplingParams(max_tokens=3)
    request = Request(tuple(SequenceRequest((n,), sampling) for n in range(3)), owner=7)
    so_far = ResumableRequest(request)
    assert so_far.remaining() == request
    assert [spec.output_ids for spec in so_far.remaining().sequences] == [(), (), ()]
    first = _batch((0, 5, False), (1, 6, True))
    assert so_far.record(first) is first
    assert [(spec.prompt_ids, spec.output_ids) for spec in so_far.remaining().sequences] == [
        ((0,), (5,)),
        ((2,), ()),
    ]
    assert so_far.record(_batch((1, 7, False), (0, 8, True))) == _batch((2, 7, False), (0, 8, True))
    assert not so_far.is_complete
    assert [(spec.prompt_ids, spec.output_ids) for spec in so_far.remaining().sequences] == [
        ((2,), (7,))
    ]
    so_far.record(_batch((0, 9, True)))
    assert so_far.is_complete
