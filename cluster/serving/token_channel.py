"""From a router to its ingresses: one stream to each, and all that a step made ready travels in one message.

A stream per request would cost Ray Serve's price for a message once per token. Here
the request itself is a plain call that lasts as long as its sequences live (so that
Ray Serve sees the load and carries cancellation), and its tokens come with everybody's.
"""

import asyncio
import logging
from collections.abc import AsyncIterable, AsyncIterator, Iterator, Sequence

from tramontane.cluster.common.node_watch import DeadNodeWatcher
from tramontane.cluster.observability.logging import log_accepted, log_ended
from tramontane.cluster.observability.tracing import record_spans
from tramontane.proto import wire
from tramontane.proto.errors import (
    ModelMismatchError,
    PipelineError,
    PipelineUnavailableError,
    StreamNotOpenError,
    TramontaneError,
)
from tramontane.proto.log_fields import request_fields
from tramontane.proto.request import RequestOutput, RequestTimings
from tramontane.router.engine.router import Router

logger = logging.getLogger(__name__)

KEEPALIVE = b""
ACCEPTED = RequestOutput((), RequestTimings(0.0, 0.0, 0.0))  # no tokens yet, but a router works on it
DONE = b""
MAX_MESSAGE_BYTES = 2**21  # Ray Serve's gRPC takes 4 MiB, and breaks the stream of everybody where one has more
KEEPALIVE_S = 1.0
IDLE_S = 2.0
SILENT_S = 5.0  # then the other end's machine, or the way to it, is taken to be gone: its system would not say so


class IngressStream:
    """A router's end of the stream to one ingress."""

    def __init__(self) -> None:
        self._ready: list[tuple[int, RequestOutput | TramontaneError]] = []
        self._filled = asyncio.Event()
        self.num_requests = 0
        self.closed = asyncio.Event()

    def put(self, number: int, what: RequestOutput | TramontaneError) -> None:
        """Tokens, or the failure, of the ingress's request ``number``."""
        self._ready.append((number, what))
        self._filled.set()

    def release(self) -> None:
        """A request has ended. The last one to leave wakes the stream, which goes to sleep for less long then."""
        self.num_requests -= 1
        if not self.num_requests:
            self._filled.set()

    async def messages(self) -> AsyncIterator[bytes]:
        """Everything that is ready, each time something is.

        Now and then a message comes without anything new, so that either end misses the other. A
        stream that nobody needs ends: an endless call would keep its router from stopping.
        """
        yield KEEPALIVE
        while True:
            was_idle = not self.num_requests
            try:  # not asyncio.wait_for, which in Python 3.11 may swallow a cancellation
                async with asyncio.timeout(IDLE_S if was_idle else KEEPALIVE_S):
                    await self._filled.wait()
            except TimeoutError:
                if was_idle and not self.num_requests:
                    return
            self._filled.clear()
            ready, self._ready = self._ready, []
            for message in _messages(ready):
                yield message


class IngressStreams:
    """The streams to all ingresses. ``replica`` is how they find back to this router."""

    def __init__(self, replica: str, model: str = "", nodes: DeadNodeWatcher | None = None) -> None:
        self._replica, self._meant_for = replica, model_key(model)
        self._nodes = nodes or DeadNodeWatcher()
        self._channels: dict[str, IngressStream] = {}

    @property
    def num_open(self) -> int:
        return len(self._channels)

    async def subscribe(self, ingress: str, replica: str) -> AsyncIterator[bytes]:
        """The stream to one ingress, which is named ``node/name``. When it breaks, the ingress's requests are aborted.

        That its machine is gone does not show in the stream: so they are when Ray declares the node dead.
        Empty if another replica is meant, which has gone: the call was routed to this one instead.
        """
        if replica != self._replica:
            return
        channel = IngressStream()
        if (former := self._channels.get(ingress)) is not None:  # broken, but only its other end knows
            former.closed.set()
        self._channels[ingress] = channel
        losing = asyncio.create_task(self._close_with(ingress.rpartition("/")[0], channel))
        try:
            async for message in channel.messages():
                yield message
        finally:
            losing.cancel()
            channel.closed.set()
            if self._channels.get(ingress) is channel:
                del self._channels[ingress]

    async def _close_with(self, node: str, channel: IngressStream) -> None:
        if node:
            await self._nodes.wait_until_dead(lambda: node)
            channel.closed.set()

    async def generate(self, router: Router, ingress: str, number: int, specs: bytes, model: str) -> bytes:
        """Run one request to its end; its tokens go through the ingress's channel.

        Returns DONE, or why not; another model would make nonsense of an ingress's token ids. Cancelling aborts the request.
        """
        if model != self._meant_for:
            return self.refusal(ModelMismatchError("the server has another model or version now; send the request again"))
        if not router.is_attached:
            return self.refusal(PipelineUnavailableError("the pipeline is being started again; try again soon"))
        if (channel := self._channels.get(ingress)) is None:
            return self.refusal(StreamNotOpenError("no stream from the router could be kept open"))
        decoded = wire.decode_specs(specs)
        own_id, unfinished = decoded[0].request_id, set(range(len(decoded)))
        ended, has_failed = asyncio.Event(), False

        def sink(what: RequestOutput | TramontaneError) -> None:
            nonlocal has_failed
            channel.put(number, what)
            has_failed |= isinstance(what, TramontaneError)
            finished = {e.seq_id for e in what.events if e.finish} if isinstance(what, RequestOutput) else set(unfinished)
            unfinished.difference_update(finished)
            if not unfinished:
                ended.set()

        try:
            request = router.submit(decoded, sink)
        except TramontaneError as error:
            logger.info("request %s is refused: %s", own_id or "-", error, extra=request_fields(own_id))
            return self.refusal(error)
        log_accepted(request, decoded)
        channel.num_requests += 1
        channel.put(number, ACCEPTED)
        try:
            await _first_of(ended, channel.closed)
        finally:
            channel.release()
            router.abort(request)
            is_complete = ended.is_set() and not has_failed
            log_ended(request, is_complete=is_complete)
            record_spans(request, router.health, is_complete=is_complete)
        return DONE if ended.is_set() else self.refusal(PipelineError("the stream to the ingress broke"))

    def refusal(self, error: TramontaneError) -> bytes:
        """Why this router does not take a request."""
        return wire.encode_error(error, self._replica)


def model_key(model: str) -> str:
    """What a door says with each request: which model it is for, and in which form it is written."""
    return f"{model}/{wire.PROTOCOL_HASH}"


def _messages(ready: Sequence[tuple[int, RequestOutput | TramontaneError]]) -> Iterator[bytes]:
    """One, unless it would be too large, as it may be where experts are asked for. Of one request a door bounds them."""
    message = wire.encode_outputs(ready) if ready else KEEPALIVE
    if len(message) <= MAX_MESSAGE_BYTES or len(ready) == 1:
        yield message
    else:
        yield from _messages(ready[: len(ready) // 2])
        yield from _messages(ready[len(ready) // 2 :])


async def _first_of(*events: asyncio.Event) -> None:
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()


async def with_idle_timeout(messages: AsyncIterable[bytes], limit_s: float) -> AsyncIterator[bytes]:
    """The same. Raises TimeoutError once nothing has come for so long."""
    coming = aiter(messages)
    while True:
        try:
            async with asyncio.timeout(limit_s):
                message = await anext(coming)
        except StopAsyncIteration:
            return
        yield message
