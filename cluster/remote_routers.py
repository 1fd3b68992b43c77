"""An ingress's side of the routers: which one gets a request, and the streams by which they answer."""

import asyncio
import contextvars
import itertools
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, Collection, Coroutine, Sequence
from typing import Any, cast

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from tramontane.cluster.token_channel import DONE, NOTHING_NEW
from tramontane.proto import wire
from tramontane.proto.errors import NoStreamError, NotRunningError, OverloadedError, PipelineError, TramontaneError
from tramontane.proto.request import SequenceSpec, TokenBatch
from tramontane.router.mailbox import Mailbox

MAX_ATTEMPTS = 10
LAST_TOKENS_S = 10.0
READY_TIMEOUT_S = 5.0

# What a call wishes of the routing. It travels in the call's session id, which nothing else uses here.
ANY, ONLY, EXCEPT = "", "=", "!"

logger = logging.getLogger(__name__)


class LeastLoaded(RequestRouter):
    """Ray Serve's routing for routers: the fewest requests among those that the call's wish leaves.

    ``=a`` leaves replica a; ``!a,b`` leaves all but a and b. If that is none at all, any will do.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        wish = pending_request.metadata.session_id if pending_request else ANY
        kind, names = wish[:1], wish[1:].split(",")
        left = [r for r in candidate_replicas if kind == ANY or (r.replica_id.unique_id in names) == (kind == ONLY)]
        return [left or candidate_replicas]


class RemoteRouters:
    """The routers behind a Ray Serve handle, as one ``TokenSource``."""

    def __init__(self, handle: "DeploymentHandle[Any]") -> None:
        self._handle = handle
        self._name = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._mailboxes: dict[int, Mailbox] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # calls and streams
        self._opening: dict[str, asyncio.Task[None]] = {}  # streams, by replica
        self._opened: dict[str, asyncio.Event] = {}

    @property
    def num_requests(self) -> int:
        return len(self._mailboxes)

    async def generate(self, specs: Sequence[SequenceSpec]) -> AsyncGenerator[TokenBatch, None]:
        """See ``TokenSource``."""
        number, encoded = next(self._numbers), wire.encode_specs(specs)
        mailbox = self._mailboxes[number] = Mailbox()
        call = self._start(self._call(number, encoded, mailbox))
        num_unfinished = len(specs)
        try:
            while num_unfinished:
                batch = await mailbox.take()
                num_unfinished -= sum(event.finish is not None for event in batch.events)
                yield batch
        finally:
            del self._mailboxes[number]
            if num_unfinished:
                call.cancel()

    async def is_ready(self) -> bool:
        """Whether any router can make tokens now."""
        asked: set[str] = set()
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                while True:
                    ready, replica = await _cancellable(self._method("is_ready", _any_but(asked)).remote())
                    if ready or replica in asked:
                        return bool(ready)
                    asked.add(replica)
        except Exception:  # whatever keeps a router from answering
            return False

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _call(self, number: int, specs: bytes, mailbox: Mailbox) -> None:
        """Lasts as long as a router works on the request. Its end and the last tokens come in any order."""
        try:
            refusal = await self._accepted(number, specs)
        except Exception as error:  # whatever it is, the client must hear of it
            logger.warning("a request's call failed: %s", error)
            refusal = PipelineError("the router is gone")
        if refusal is not None:
            mailbox.put(refusal)
        else:  # the last tokens are here or on their way, unless the router has died since; nobody reads this if they came
            asyncio.get_running_loop().call_later(LAST_TOKENS_S, mailbox.put, PipelineError("the router is gone"))

    async def _accepted(self, number: int, specs: bytes) -> TramontaneError | None:
        """Find a router that takes the request, and wait until it is done; or else the reason why none did."""
        wish = ANY
        refused: dict[str, TramontaneError] = {}  # by replica
        refusal: TramontaneError | None = None
        for _ in range(MAX_ATTEMPTS):
            outcome: bytes = await _cancellable(self._method("generate", wish).remote(self._name, number, specs))
            if outcome == DONE:
                return None
            refusal, replica = wire.decode_refusal(outcome)
            match refusal:
                case NoStreamError():
                    await self._stream_from(replica)
                    wish = ONLY + replica
                case NotRunningError() | OverloadedError() if replica not in refused:
                    refused[replica] = refusal
                    wish = _any_but(refused)
                case NotRunningError() | OverloadedError():  # there is no other; one that is only full says when to come back
                    return next((each for each in refused.values() if isinstance(each, OverloadedError)), refusal)
                case _:
                    return refusal
        return refusal

    async def _stream_from(self, replica: str) -> None:
        """A router takes requests once it has a stream to answer by.

        The stream is nobody's but this object's: the client for whom it is opened may leave.
        """
        if replica not in self._opening:
            opened = asyncio.Event()
            self._opening[replica] = self._start(self._listen(replica, opened))
            self._opening[replica].add_done_callback(lambda _: opened.set())
            self._opened[replica] = opened
        await self._opened[replica].wait()

    async def _listen(self, replica: str, opened: asyncio.Event) -> None:
        call = self._method("subscribe", ONLY + replica, stream=True)
        try:
            async for message in cast("AsyncIterable[bytes]", call.remote(self._name)):
                opened.set()
                for number, what in wire.decode_deliveries(message) if message != NOTHING_NEW else ():
                    if (mailbox := self._mailboxes.get(number)) is not None:  # else its client has left
                        mailbox.put(PipelineError(what) if isinstance(what, str) else what)
        except (RayError, RayServeException) as error:  # then the calls of its requests end as well
            logger.warning("the stream from router %s broke: %s", replica, error)
        finally:
            del self._opening[replica], self._opened[replica]

    def _method(self, name: str, wish: str, *, stream: bool = False) -> "DeploymentHandle[Any]":
        """Over gRPC between the replicas: a fifth less work for an ingress than with an object for each message."""
        return self._handle.options(method_name=name, session_id=wish, stream=stream, _by_reference=False)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, context=contextvars.Context())  # of no request, which Ray Serve would cancel with it
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _any_but(replicas: Collection[str]) -> str:
    """{} gives "", {"b", "a"} gives "!a,b"."""
    return EXCEPT + ",".join(sorted(replicas)) if replicas else ANY


async def _cancellable(response: Any) -> Any:  # noqa: ANN401 - DeploymentResponse, whose types do not say that
    """Ray Serve does not pass on by itself that whoever waits for a response has been cancelled."""
    try:
        return await response
    except asyncio.CancelledError:
        response.cancel()
        raise
