"""From routers to ingresses: one stream per pair, and all that a step made ready travels in one message.

A stream per request would cost Ray Serve's price for a message once per token. Here
the request itself is a plain call that lasts as long as its sequences live (so that
Ray Serve sees the load and carries cancellation), and its tokens come with everybody's.
"""

import asyncio
import contextvars
import itertools
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Coroutine, Sequence
from contextlib import suppress
from typing import Any, cast

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from tramontane.proto import wire
from tramontane.proto.errors import NoStreamError, PipelineError, TramontaneError
from tramontane.proto.request import SequenceSpec, TokenBatch
from tramontane.router.mailbox import Mailbox
from tramontane.router.router import Router

NOTHING_NEW = b""
DONE = b""
KEEPALIVE_S = 5.0
IDLE_S = 2.0
MAX_ATTEMPTS = 5
LAST_TOKENS_S = 10.0

logger = logging.getLogger(__name__)


class TokenChannel:
    """A router's end of the stream to one ingress."""

    def __init__(self) -> None:
        self._ready: list[tuple[int, TokenBatch | str]] = []
        self._filled = asyncio.Event()
        self.num_requests = 0
        self.closed = asyncio.Event()

    def put(self, number: int, what: TokenBatch | PipelineError) -> None:
        """Tokens, or the failure, of the ingress's request ``number``."""
        self._ready.append((number, what if isinstance(what, TokenBatch) else str(what)))
        self._filled.set()

    async def messages(self) -> AsyncIterator[bytes]:
        """Everything that is ready, each time something is.

        Now and then a message comes without anything new, so that a dead reader shows. A
        stream that nobody needs ends: an endless call would keep its router from stopping.
        """
        yield NOTHING_NEW
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._filled.wait(), KEEPALIVE_S if self.num_requests else IDLE_S)
            if not self._ready and not self.num_requests:
                return
            self._filled.clear()
            message, self._ready = wire.encode_deliveries(self._ready) if self._ready else NOTHING_NEW, []
            yield message


class TokenChannels:
    """A router's side: the streams to all ingresses. ``replica`` is how they find back to it."""

    def __init__(self, replica: str) -> None:
        self._replica = replica
        self._channels: dict[str, TokenChannel] = {}

    @property
    def num_open(self) -> int:
        return len(self._channels)

    async def subscribe(self, ingress: str) -> AsyncIterator[bytes]:
        """The stream to one ingress. When it breaks, the ingress's requests are aborted."""
        channel = self._channels[ingress] = TokenChannel()
        try:
            async for message in channel.messages():
                yield message
        finally:
            channel.closed.set()
            if self._channels.get(ingress) is channel:
                del self._channels[ingress]

    async def generate(self, router: Router, ingress: str, number: int, specs: bytes) -> bytes:
        """Run one request to its end; its tokens go through the ingress's channel.

        Returns DONE, or why not. Cancelling aborts the request.
        """
        if (channel := self._channels.get(ingress)) is None:
            return wire.encode_refusal(NoStreamError(self._replica))
        decoded = wire.decode_specs(specs)
        unfinished = set(range(len(decoded)))
        ended = asyncio.Event()

        def sink(what: TokenBatch | PipelineError) -> None:
            channel.put(number, what)
            finished = {e.seq_id for e in what.events if e.finish} if isinstance(what, TokenBatch) else set(unfinished)
            unfinished.difference_update(finished)
            if not unfinished:
                ended.set()

        try:
            request = router.submit(decoded, sink)
        except TramontaneError as error:
            return wire.encode_refusal(error)
        channel.num_requests += 1
        try:
            await _first_of(ended, channel.closed)
        finally:
            channel.num_requests -= 1
            router.abort(request)
        return DONE if ended.is_set() else wire.encode_refusal(PipelineError("the stream to the ingress broke"))


async def _first_of(*events: asyncio.Event) -> None:
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()


async def _cancellable(response: Any) -> bytes:  # noqa: ANN401 - DeploymentResponse, whose types do not say that
    """Ray Serve does not pass on by itself that whoever waits for a response has been cancelled."""
    try:
        outcome: bytes = await response
    except asyncio.CancelledError:
        response.cancel()
        raise
    return outcome


class RemoteRouters:
    """An ingress's side: the routers behind a Ray Serve handle, as one ``TokenSource``."""

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

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _call(self, number: int, specs: bytes, mailbox: Mailbox) -> None:
        """Lasts as long as a router works on the request. Its end and the last tokens come in any order."""
        replica = ""  # any
        refusal: TramontaneError | None = None
        try:
            for _ in range(MAX_ATTEMPTS):
                handle = self._handle.options(method_name="generate", session_id=replica)
                outcome = await _cancellable(handle.remote(self._name, number, specs))
                refusal = wire.decode_refusal(outcome) if outcome != DONE else None
                if not isinstance(refusal, NoStreamError):
                    break
                replica = str(refusal)
                await self._stream_from(replica)
        except Exception as error:  # whatever it is, the client must hear of it
            logger.warning("a request's call failed: %s", error)
            refusal = PipelineError("the router is gone")
        if isinstance(refusal, NoStreamError):
            refusal = PipelineError("no stream from the router could be kept open")
        if refusal is not None:
            mailbox.put(refusal)
        else:  # the last tokens are here or on their way, unless the router has died since; nobody reads this if they came
            asyncio.get_running_loop().call_later(LAST_TOKENS_S, mailbox.put, PipelineError("the router is gone"))

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
        handle = self._handle.options(method_name="subscribe", stream=True, session_id=replica)
        try:
            async for message in cast("AsyncIterable[bytes]", handle.remote(self._name)):
                opened.set()
                for number, what in wire.decode_deliveries(message) if message != NOTHING_NEW else ():
                    if (mailbox := self._mailboxes.get(number)) is not None:  # else its client has left
                        mailbox.put(PipelineError(what) if isinstance(what, str) else what)
        except (RayError, RayServeException) as error:  # then the calls of its requests end as well
            logger.warning("the stream from router %s broke: %s", replica, error)
        finally:
            del self._opening[replica], self._opened[replica]

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, context=contextvars.Context())  # of no request, which Ray Serve would cancel with it
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class LeastLoaded(RequestRouter):
    """Ray Serve's routing for routers: a call goes to the one it names, or else to the one with the fewest requests."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        wanted = pending_request.metadata.session_id if pending_request else ""
        named = [replica for replica in candidate_replicas if replica.replica_id.unique_id == wanted]
        return [named or candidate_replicas]
