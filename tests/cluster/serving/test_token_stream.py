"""Requests that travel from an ingress to a router and back, without Ray: above all those whose
clients leave.
"""

import asyncio
import itertools
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
from event_loops import in_event_loop
from fixed_load import FixedLoad
from ray.serve.handle import DeploymentHandle
from running_router import new_scheduler, running
from scripted_chain import ScriptedChain, all_chunks
from virtual_time import in_virtual_time

from tramontane.cluster.common import node_watch as lost_nodes
from tramontane.cluster.common.node_watch import DeadNodeWatcher
from tramontane.cluster.http.sse import Pacer
from tramontane.cluster.serving import token_stream
from tramontane.cluster.serving.pipeline_client import PipelineClient
from tramontane.cluster.serving.token_stream import (
    DONE,
    KEEPALIVE,
    MAX_MESSAGE_VALUES,
    STREAM_IDLE_TIMEOUT_S,
    TokenStream,
    TokenStreams,
    model_key,
)
from tramontane.proto import wire
from tramontane.proto.errors import ModelMismatchError, PipelineError, StreamNotOpenError
from tramontane.proto.plan import CachePlan, WindowClass
from tramontane.proto.request import (
    ExpertChoices,
    Request,
    RequestOutput,
    RequestTimings,
    SamplingParams,
    TokenEvent,
)
from tramontane.proto.step import MicroBatch
from tramontane.router.engine.request_output import OutputQueue
from tramontane.router.engine.router import Router

CACHE = CachePlan(16, (WindowClass(64, 5, 40),))
LONG = Request.of((1, 2, 3), SamplingParams(max_tokens=200))


class Response:
    """As Ray Serve's: a task that waits for it may be cancelled without the call being so."""

    def __init__(self, call: "asyncio.Task[bytes]") -> None:
        self._call = call
        self.cancel = call.cancel

    def __await__(self) -> Generator[Any, None, bytes]:
        return asyncio.shield(self._call).__await__()


class Handle:
    """As Ray Serve's, to a router in this process."""

    def __init__(self, channels: TokenStreams, router: Router) -> None:
        self._channels, self._router = channels, router
        self.num_calls = 0
        self.write_intervals_s: list[float] = []

    def options(
        self, *, method_name: str, session_id: str, stream: bool, **_transport: bool
    ) -> "Handle":
        assert session_id in ("", "=replica")
        assert stream == (method_name == "subscribe")
        self.remote: Callable[..., Any] = self._subscribe if stream else self._generate
        return self

    def _subscribe(self, ingress: str, replica: str) -> AsyncIterator[bytes]:
        return self._channels.subscribe(ingress, replica)

    def _generate(self, *arguments: Any) -> Response:  # as in TokenStreams
        self.num_calls += 1
        self.write_intervals_s.append(arguments[-1])
        return Response(asyncio.create_task(self._channels.generate(self._router, *arguments)))


class StepByStep(ScriptedChain):
    """Completes as many micro-batches as the test allows."""

    def __init__(self) -> None:
        super().__init__(self._wait)
        self._complete: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)

    def complete(self, num_steps: int) -> None:
        """The first ones, whether they have been submitted or will be."""
        for step in range(num_steps):
            self._complete[step].set()

    async def _wait(self, batch: MicroBatch) -> None:
        await self._complete[batch.step_id].wait()


@asynccontextmanager
async def _remote(
    chain: StepByStep, max_num_seqs: int = 8, nodes: DeadNodeWatcher | None = None, node: str = ""
) -> AsyncIterator[tuple[PipelineClient, Router, Handle]]:
    """With micro-batches so small that not all sequences can be in flight."""
    router = Router(new_scheduler(CACHE, num_seqs=max_num_seqs, budget=2), chain)
    handle = Handle(TokenStreams("replica", nodes=nodes), router)
    async with running(router):
        routers = PipelineClient(
            cast("DeploymentHandle[Any]", handle), max_unaccepted=100, node=node
        )
        yield routers, router, handle
        routers.close()


@in_event_loop
async def test_requests_of_an_ingress_whose_node_has_died_are_aborted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing else would reveal it: its system cannot close the stream. Those of other ingresses
    continue.
    """
    monkeypatch.setattr(lost_nodes, "POLL_INTERVAL_S", 0.001)
    dead: set[str] = set()

    chain = StepByStep()
    async with _remote(chain, nodes=DeadNodeWatcher(lambda: dead), node="far") as (
        dying,
        router,
        handle,
    ):
        staying = PipelineClient(
            cast("DeploymentHandle[Any]", handle), max_unaccepted=100, node="near"
        )
        going, lost = (asyncio.create_task(_num_tokens(each, LONG)) for each in (staying, dying))
        await _until(lambda: router.num_requests == 2)
        dead.add("far")
        await _until(lambda: router.num_requests == 1)
        lost.cancel()
        chain.complete(10_000)
        assert await going == 200
        staying.close()


@in_event_loop
async def test_an_ingress_says_how_often_it_writes_to_each_stream() -> None:
    """Requests that are not streamed do not count: many of them would let streams wait for their
    tokens.
    """
    pacer = Pacer(50, FixedLoad(0.5))  # now it writes twice as often
    pacer.num_streams = 3
    async with _remote(StepByStep()) as (_, _, handle):
        handle_of_any = cast("DeploymentHandle[Any]", handle)
        routers = PipelineClient(
            handle_of_any, max_unaccepted=100, write_interval_s=lambda: pacer.longest_interval_s
        )
        clients = [asyncio.create_task(_num_tokens(routers, LONG)) for _ in range(2)]
        # each a second time, after the stream was opened
        await _until(lambda: len(handle.write_intervals_s) == 4)
        assert handle.write_intervals_s == [0.06] * 4
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        routers.close()


@in_event_loop
async def test_the_pipeline_that_makes_tokens_is_named_once_and_again_when_it_has_changed() -> None:
    chain = StepByStep()
    async with _remote(chain) as (routers, router, _):
        router.fingerprint = "a"
        seen = list[str]()

        async def read() -> None:
            async with aclosing(routers.generate(LONG)) as outputs:
                seen.extend([output.fingerprint async for output in outputs])

        reading = asyncio.create_task(read())
        chain.complete(20)
        await _until(lambda: router.num_requests == 1 and len(chain.submitted) > 20)
        router._read_fingerprint = _as_b
        await router.refresh_fingerprint()
        chain.complete(10_000)
        await reading
        assert [each for each in seen if each] == ["a", "b"]
        assert seen[0] == "a"


async def _as_b() -> str:
    return "b"


@pytest.mark.parametrize("meant_for", ["another/" + wire.PROTOCOL_HASH, "/other"])
@in_event_loop
async def test_what_is_meant_for_another_model_or_written_in_another_form_is_not_read(
    meant_for: str,
) -> None:
    async with _remote(StepByStep()) as (_, router, handle):
        refusal, _ = wire.decode_error(
            await handle._generate("ingress", 1, b"no specs at all", meant_for)
        )
        assert isinstance(refusal, ModelMismatchError)
        assert "another model or version" in str(refusal)
        assert router.num_requests == 0


@in_event_loop
async def test_the_call_of_a_request_that_fails_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its sequences have failed, so that the router does not work on any. It is logged and
    traced as incomplete.
    """
    recorded = list[bool]()
    for name in ("log_ended", "record_spans"):
        monkeypatch.setattr(
            token_stream, name, lambda *_, is_complete: recorded.append(is_complete)
        )

    async with _remote(StepByStep()) as (_, router, handle):
        stream = aiter(handle._subscribe("ingress", "replica"))
        assert await anext(stream) == KEEPALIVE
        response = handle._generate("ingress", 1, wire.encode_request(_of(LONG, 2)), model_key(""))
        await _until(lambda: router.num_requests == 1)
        router._fail(PipelineError("every stage has died"))
        for _ in range(9):
            await asyncio.sleep(0)
        assert response._call.done()
        assert await response == DONE
        assert router.num_requests == 0
        assert recorded == [False, False]


def _of(request: Request, number: int) -> Request:
    return replace(request, sequences=request.sequences * number)


async def _until(condition: Callable[[], bool]) -> None:
    """Bounded by pytest's timeout."""
    while not condition():
        await asyncio.sleep(0)


async def _num_tokens(routers: PipelineClient, request: Request) -> int:
    async with aclosing(routers.generate(request)) as batches:
        return sum([len(batch.events) async for batch in batches])


def _in(batches: list[MicroBatch]) -> set[int]:
    """Sequences of these micro-batches."""
    return {chunk.seq_id for batch in batches for chunk in all_chunks(batch)}


@in_event_loop
async def test_tokens_come_back_to_whom_they_belong() -> None:
    chain = StepByStep()
    chain.complete(10_000)
    async with _remote(chain) as (routers, router, handle):
        requests = [Request.of((1,) * n, SamplingParams(max_tokens=n)) for n in range(1, 21)]
        assert await asyncio.gather(*(_num_tokens(routers, each) for each in requests)) == list(
            range(1, 21)
        )
        assert handle.num_calls == 40, "each was refused until a stream was open"
        assert await _num_tokens(routers, LONG) == 200
        assert handle.num_calls == 41
        assert (routers.num_requests, router.num_requests, router.scheduler.is_idle) == (0, 0, True)


@pytest.mark.parametrize("num_steps", [0, 2, 11, 40])
@in_event_loop
async def test_who_has_left_is_in_no_further_step_and_holds_no_page_when_those_in_flight_are_back(
    num_steps: int,
) -> None:
    """From the moment in which the router gets it. The request that leaves has sequences 0 to 5,
    some of them in flight and some not; the one that stays is 6.
    """
    left = set(range(6))

    chain = StepByStep()
    async with _remote(chain) as (routers, router, _):
        leaving = asyncio.create_task(_num_tokens(routers, _of(LONG, 6)))
        await _until(lambda: router.num_requests == 1)
        staying = asyncio.create_task(_num_tokens(routers, LONG))
        await _until(lambda: router.num_requests == 2)
        chain.complete(num_steps)
        await _until(lambda: len(chain.submitted) > num_steps)

        leaving.cancel()
        await _until(lambda: router.num_requests == 1)
        before = list(chain.submitted)
        assert router.scheduler.num_running > 1, "what is in flight may touch pages"
        assert left & _in(before[num_steps:]), "so they are kept until it is back"

        chain.complete(1 + max(batch.step_id for batch in before if left & _in([batch])))
        await _until(lambda: router.scheduler.num_running == 1)
        router.scheduler.check_integrity()
        (other,) = router.scheduler._running.by_id.values()
        assert (
            len(other.pages[0])
            == CACHE.classes[0].num_pages - router.scheduler.allocator.num_free[0]
        )

        chain.complete(1000)
        assert await staying == 200
        later = chain.submitted[len(before) :]
        assert _in(later) == {6}
        forgotten = {seq_id for batch in chain.submitted for seq_id in batch.freed_seq_ids}
        assert forgotten == left & _in(before), "by the stages"


@in_event_loop
async def test_a_request_that_ends_is_complete_and_one_that_is_cancelled_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = list[bool]()
    for name in ("log_ended", "record_spans"):
        monkeypatch.setattr(
            token_stream, name, lambda *_, is_complete: recorded.append(is_complete)
        )

    chain = StepByStep()
    async with _remote(chain) as (routers, router, _):
        leaving = asyncio.create_task(_num_tokens(routers, LONG))
        await _until(lambda: router.num_requests == 1)
        leaving.cancel()
        await _until(lambda: len(recorded) == 2)
        chain.complete(10_000)
        assert await _num_tokens(routers, LONG) == 200
        await _until(lambda: len(recorded) == 4)
        assert recorded == [False, False, True, True]


@in_event_loop
async def test_a_client_that_leaves_while_it_waits_for_capacity_leaves_nothing_behind() -> None:
    chain = StepByStep()
    async with _remote(chain, max_num_seqs=1) as (routers, router, _):
        staying = asyncio.create_task(_num_tokens(routers, LONG))
        await _until(lambda: router.num_requests == 1)
        leaving = asyncio.create_task(_num_tokens(routers, LONG))
        await _until(lambda: router.scheduler.num_waiting == 1)
        leaving.cancel()
        await _until(lambda: router.num_requests == 1)
        assert router.scheduler.num_waiting == 0
        chain.complete(1000)
        assert await staying == 200
        assert _in(chain.submitted) == {0}


@in_event_loop
async def test_a_request_whose_stream_breaks_continues_over_a_new_one() -> None:
    chain = StepByStep()
    async with _remote(chain) as (routers, router, handle):
        requested = asyncio.create_task(_num_tokens(routers, LONG))
        await _until(lambda: len(chain.submitted) > 0)
        (stream,) = [
            task for task in routers._tasks._tasks if task.get_coro().__name__ == "_listen"
        ]
        stream.cancel()
        chain.complete(1000)
        assert await requested == 200
        await _until(lambda: router.scheduler.is_idle)
        assert router.num_requests == 0, "what was requested over the first one has been given up"
        assert handle.num_calls == 4, "no stream yet, the first; again none, and the second"


@in_event_loop
async def test_a_newer_stream_of_an_ingress_replaces_the_older_one() -> None:
    """The requests of the older one are aborted, as nothing reads their tokens. Its end leaves the
    newer one open.
    """
    encoded = wire.encode_request(LONG)

    chain = StepByStep()
    async with _remote(chain) as (_, router, handle):
        older = handle._subscribe("node/ingress", "replica")
        assert await anext(older) == KEEPALIVE
        call = handle._generate("node/ingress", 1, encoded, model_key(""))
        await _until(lambda: router.num_requests == 1)
        newer = handle._subscribe("node/ingress", "replica")
        assert await anext(newer) == KEEPALIVE
        refusal, _ = wire.decode_error(await call)
        assert isinstance(refusal, PipelineError)
        assert router.num_requests == 0

        await cast("AsyncGenerator[bytes, None]", older).aclose()
        chain.complete(10_000)
        assert await handle._generate("node/ingress", 2, encoded, model_key("")) == DONE, (
            "through the newer stream"
        )
        numbers = [number for number, _ in wire.decode_outputs(await anext(newer))]
        assert numbers
        assert set(numbers) == {2}
        await cast("AsyncGenerator[bytes, None]", newer).aclose()
        refusal, _ = wire.decode_error(
            await handle._generate("node/ingress", 3, encoded, model_key(""))
        )
        assert isinstance(refusal, StreamNotOpenError)


@in_event_loop
async def test_no_message_has_more_values_than_an_ingress_decodes_at_once() -> None:
    """Outputs come in their order, however they are split, and an ingress reads each as it was."""
    times = RequestTimings(0.0, 0.0, 0.0)

    def output(number: int, num_tokens: int) -> tuple[int, RequestOutput]:
        experts = ExpertChoices(0, 3, 0, ((1, 2),) * num_tokens)
        return number, RequestOutput((TokenEvent(0, 7),), times, (experts,))

    ready = [
        output(number, size)
        for number, size in enumerate((1, 30_000, 5, 4096, 4097, 1, 80_000, 1, 1))
    ]

    channel = TokenStream()
    messages = channel.messages()
    assert await anext(messages) == KEEPALIVE
    for number, what in ready:
        channel.put(number, what)
    queues, numbers = [OutputQueue() for _ in ready], list[int]()
    while len(set(numbers)) < len(ready) or not queues[-1]._filled.is_set():
        received = wire.decode_outputs(await anext(messages))
        outputs = [each for _, each in received if isinstance(each, RequestOutput)]
        assert len(outputs) == 1 or sum(each.num_values for each in outputs) <= MAX_MESSAGE_VALUES
        assert all(each.num_values <= MAX_MESSAGE_VALUES for each in outputs)
        for number, each in received:
            queues[number].put(each)
            numbers.append(number)
    assert numbers == sorted(numbers)
    assert [(number, _joined(await queue.get())) for number, queue in enumerate(queues)] == ready
    await messages.aclose()


@pytest.mark.parametrize("num_waiting", [0, 1, 2])
@in_event_loop
async def test_parts_of_an_output_are_read_with_its_tokens(num_waiting: int) -> None:
    """Also if tokens that came before are read while parts arrive."""
    times = RequestTimings(0.0, 0.0, 0.0)
    experts = [ExpertChoices(0, 3, start, ((1, 2),)) for start in range(3)]

    queue = OutputQueue()
    for _ in range(num_waiting):
        queue.put(earlier := RequestOutput((TokenEvent(1, 5),), times))
    if num_waiting:
        queue.put(RequestOutput((), times, (experts[0],)))
        assert await queue.get() == earlier._replace(events=earlier.events * num_waiting)
        experts.pop(0)
        first: tuple[ExpertChoices, ...] = (ExpertChoices(0, 3, 0, ((1, 2),)),)
    else:
        first = ()
    reading = asyncio.ensure_future(queue.get())
    for part in experts[:-1]:
        queue.put(RequestOutput((), times, (part,)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not reading.done()
    queue.put(RequestOutput((TokenEvent(0, 7),), times, (experts[-1],)))
    assert await reading == RequestOutput((TokenEvent(0, 7),), times, (*first, *experts))


def _joined(output: RequestOutput) -> RequestOutput:
    """Join the expert choices of one layer, which have been split."""
    ids = tuple(itertools.chain.from_iterable(each.expert_ids for each in output.experts))
    starts = itertools.accumulate((len(each.expert_ids) for each in output.experts), initial=0)
    assert [each.start for each in output.experts] == list(starts)[:-1]
    return output._replace(experts=(output.experts[0]._replace(expert_ids=ids),))


@in_virtual_time
async def test_a_stream_ends_some_time_after_its_last_request() -> None:
    """Until then there is a keepalive message every second, and tokens do not wait for the next
    one.
    """
    now, channel = asyncio.get_running_loop().time, TokenStream()
    times: list[float] = []

    async def read() -> None:
        async for _ in channel.messages():
            times.append(round(now(), 2))  # there is a pause of 2 ms

    reading = asyncio.create_task(read())
    await asyncio.sleep(STREAM_IDLE_TIMEOUT_S - 0.5)
    channel.num_requests += 2
    await asyncio.sleep(1.75)
    assert times == [0.0, 2.0, 3.0], "the first shows that it is open; it has no request at first"
    channel.put(7, PipelineError("a failure"))
    await asyncio.sleep(0.25)
    channel.release()
    await asyncio.sleep(0)
    assert times[3:] == [3.25]
    await asyncio.sleep(0.25)
    channel.release()
    await reading
    assert times[4:] == [3.75]
    assert now() == 3.75 + STREAM_IDLE_TIMEOUT_S


class _LivingNodes(DeadNodeWatcher):
    """Nodes of which none dies."""

    def __init__(self) -> None:
        super().__init__(set)
        self.num_waiting = 0

    async def wait_until_dead(self, _node: object) -> None:
        self.num_waiting += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.num_waiting -= 1


@in_virtual_time
async def test_after_the_last_request_nothing_of_a_stream_is_left() -> None:
    chain, nodes = StepByStep(), _LivingNodes()
    chain.complete(10_000)
    async with _remote(chain, nodes=nodes, node="near") as (routers, _, handle):
        for _ in range(2):
            assert await _num_tokens(routers, LONG) == 200
            await asyncio.sleep(STREAM_IDLE_TIMEOUT_S - 0.1)
            assert (handle._channels.num_open, nodes.num_waiting) == (1, 1)
        await asyncio.sleep(0.2)
        assert (handle._channels.num_open, nodes.num_waiting) == (0, 0)
