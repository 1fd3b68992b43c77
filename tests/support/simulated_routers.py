"""Routers in this process behind the real client, balancing and token streams of an ingress.
Without Ray.
"""

import asyncio
import math
import uuid
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from activity_records import pipeline_activity
from running_router import running
from scripted_chain import Gate, ScriptedChain, no_gate

from tramontane.cluster.config.measurements import ExpertLoad
from tramontane.cluster.serving.least_loaded_router import LeastLoadedRouter
from tramontane.cluster.serving.pipeline_client import PipelineClient
from tramontane.cluster.serving.token_stream import TokenStreams
from tramontane.proto.errors import PipelineError
from tramontane.proto.plan import CachePlan, WindowClass
from tramontane.proto.request import Request, SamplingParams, SequenceRequest
from tramontane.proto.step import MicroBatch
from tramontane.router.engine.activity_log import PipelineActivity
from tramontane.router.engine.health import PipelineHealth
from tramontane.router.engine.prefix_aware_routing import (
    Known,
    PrefixAwareRouting,
    PrefixDigest,
    make_digest,
)
from tramontane.router.engine.router import Router
from tramontane.router.scheduling.policy import FixedInFlightPolicy
from tramontane.router.scheduling.scheduler import Scheduler
from tramontane.router.scheduling.waiting_queue import SchedulerLimits

CACHE = CachePlan(16, (WindowClass(64, 5, 10),))
LIMITS = SchedulerLimits(8, 64, 256, 1000, max_queued_seqs=4, enable_prefix_caching=True)


class Replica:
    """A Router replica without Ray Serve; ``call_counts`` has the calls by method."""

    def __init__(
        self,
        name: str,
        gate: Gate = no_gate,
        limits: SchedulerLimits = LIMITS,
        cache: CachePlan = CACHE,
    ) -> None:
        self.name, self.call_counts = name, Counter[str]()
        self.by_reference: defaultdict[str, set[bool]] = defaultdict(set)
        self.chain = ScriptedChain(gate)
        self.router = Router(
            Scheduler(cache, limits, FixedInFlightPolicy(3, 64)), self.chain, clock=_now
        )
        self._channels = TokenStreams(name)
        self.num_messages = math.inf
        self.load: ExpertLoad | None = None  # it has none
        self.pipeline: str | None = None  # that it drives
        self.health_says: PipelineHealth | None = None  # None: whether its router is ready
        self.is_dead = False
        self.is_cut_off = False  # nothing arrives or leaves any more, and no one is notified
        self._kept: list[AsyncIterator[bytes]] = []

    # as in TokenStreams
    def generate(self, ingress: str, number: int, *request: Any) -> Awaitable[bytes]:
        return self._channels.generate(self.router, ingress, number, *request)

    def subscribe(self, ingress: str, replica: str) -> AsyncIterator[bytes]:
        return self._channels.subscribe(ingress, replica)

    async def through_the_network(self, ingress: str, replica: str) -> AsyncIterator[bytes]:
        """A stream that breaks on its way after ``num_messages``."""
        stream = self._channels.subscribe(ingress, replica)
        self._kept.append(stream)  # so that its own end does not notice
        async for message in stream:
            if self.is_cut_off:
                await asyncio.Event().wait()
            if not self.num_messages:
                self.num_messages = math.inf
                raise ConnectionError("the stream broke")
            self.num_messages -= 1
            yield message

    async def lose_stages(self) -> None:
        """Let a stage die; the pipeline is being fenced again until ``chain.may_fence`` is set."""
        self.chain.may_fence.clear()
        self.router.request_recovery(PipelineError("a stage died"))
        while self.router.is_ready:
            await asyncio.sleep(0)

    async def health(self) -> tuple[PipelineHealth, str]:
        if self.is_dead:
            raise ConnectionError("the replica is gone")
        status: Any = "ready" if self.router.is_ready else "unavailable"
        return self.health_says or PipelineHealth(status), self.name

    async def expert_load(self) -> tuple[ExpertLoad | None, str]:
        if self.is_dead:
            raise ConnectionError("the replica is gone")
        return self.load, self.name

    async def activity(self, after: Mapping[str, int]) -> tuple[PipelineActivity | None, str]:
        if self.is_dead:
            raise ConnectionError("the replica is gone")
        return (
            pipeline_activity(self.pipeline, after=after.get(self.pipeline))
            if self.pipeline
            else None
        ), self.name

    async def prefix_digest(self, known: Mapping[str, Known]) -> tuple[PrefixDigest | None, str]:
        if self.is_dead:
            raise ConnectionError("the replica is gone")
        if not self.router.is_attached:
            return None, self.name
        return make_digest(self.name, 0, self.router.scheduler, known.get(self.name)), self.name


class Response:
    """Of a unary call, as Ray Serve gives it; and one of those that a broadcast makes."""

    def __init__(self, task: "asyncio.Task[Any]") -> None:
        self._task = task

    def __await__(self) -> Any:
        return self._task.__await__()

    async def get_async(self) -> Any:
        return await self._task

    def cancel(self) -> None:
        self._task.cancel()


@dataclass(frozen=True)
class Broadcast:
    """Calls to all routers that there are, as Ray Serve gives them."""

    calls: list[Response]

    async def _fetch_replica_results_async(self) -> list[Response]:
        if not self.calls:
            raise ConnectionError("no replica is running")
        return self.calls


def _now() -> float:
    return asyncio.get_running_loop().time()


def policy() -> LeastLoadedRouter:
    """Without the parts of Ray Serve's routing that need a cluster."""
    made = LeastLoadedRouter.__new__(LeastLoadedRouter)
    made.initialize_state()
    return made


def replicas_named(*names: str) -> Any:  # of Ray Serve's class as far as the policy looks at it
    return [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in names]


def pending(wish: str = "") -> Any:  # likewise
    metadata = SimpleNamespace(session_id=wish, internal_request_id=uuid.uuid4().hex)
    return SimpleNamespace(metadata=metadata, future=asyncio.get_running_loop().create_future())


@dataclass(frozen=True)
class Handle:
    """Routes with the real policy."""

    replicas: list[Replica]
    wish: dict[str, Any] = field(default_factory=dict)
    policy: LeastLoadedRouter = field(default_factory=policy)

    def options(self, **wish: Any) -> "Handle":
        return replace(self, wish=wish)

    def remote(self, *args: Any) -> Any:
        if self.wish.get("stream"):
            return self._stream(*args)
        return Response(asyncio.ensure_future(self._call(*args)))

    def broadcast(self, method: str, *args: Any) -> Broadcast:
        return Broadcast(
            [
                Response(asyncio.ensure_future(_answer(each, method, *args)))
                for each in self.replicas
            ]
        )

    async def _call(self, *args: Any) -> Any:
        async with self._chosen() as replica:
            return await getattr(replica, self.wish["method_name"])(*args)

    async def _stream(self, ingress: str, destination: str) -> AsyncIterator[bytes]:
        async with self._chosen() as replica:
            async for message in replica.through_the_network(ingress, destination):
                yield message

    @asynccontextmanager
    async def _chosen(self) -> AsyncIterator[Replica]:
        if not self.replicas:
            await asyncio.Event().wait()
        request = pending(self.wish["session_id"])
        ((chosen,),) = await self.policy.choose_replicas(
            replicas_named(*(each.name for each in self.replicas)), request
        )
        replica = next(each for each in self.replicas if each.name == chosen.replica_id.unique_id)
        replica.call_counts[self.wish["method_name"]] += 1
        if replica.is_cut_off:
            replica.call_counts[self.wish["method_name"] + " in vain"] += 1
            await asyncio.Event().wait()
        replica.by_reference[self.wish["method_name"]].add(self.wish["_by_reference"])
        try:
            yield replica
        finally:
            self.policy.on_request_completed(
                chosen.replica_id, request.metadata.internal_request_id
            )


async def _answer(replica: Replica, method: str, *args: Any) -> Any:
    replica.call_counts[method] += 1
    if replica.is_cut_off:
        try:
            await asyncio.Event().wait()
        finally:
            replica.call_counts[method + " in vain"] += 1
    return await getattr(replica, method)(*args)


@asynccontextmanager
async def harness(
    replicas: list[Replica], running: str, routing: PrefixAwareRouting | None = None
) -> AsyncIterator[PipelineClient]:
    """The routers named in ``running`` are driven; the others are as after a failure."""
    handle: Any = Handle(replicas)
    routers = PipelineClient(handle, max_unaccepted=100, routing=routing)
    async with driven([each for each in replicas if each.name in running]):
        await asyncio.sleep(0.01)
        try:
            yield routers
        finally:
            routers.close()


@asynccontextmanager
async def driven(replicas: list[Replica]) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        for each in replicas:
            await stack.enter_async_context(running(each.router))
        yield


async def request_tokens(
    routers: PipelineClient, num_sequences: int = 1, prompt: tuple[int, ...] = (1, 2)
) -> int:
    """How many tokens came."""
    sequence = SequenceRequest(prompt, SamplingParams(max_tokens=5))
    request = Request((sequence,) * num_sequences)
    return sum([len(batch.events) async for batch in routers.generate(request)])


async def stuck(_batch: MicroBatch) -> None:
    await asyncio.Event().wait()


def fill(replica: Replica) -> None:
    # 8 places, 4 may wait
    sequence = SequenceRequest((1,), SamplingParams(max_tokens=5))
    replica.router.submit(Request((sequence,) * 12), lambda _: None)
