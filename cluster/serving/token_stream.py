"""The streams from a router to its ingresses: one stream per ingress, with one message for all
tokens of a step.

A stream per request would cost one message of Ray Serve per token. Here a request is a plain call
that lasts as long as its sequences (so that Ray Serve sees the load and passes cancellation on),
and its tokens travel with the tokens of other requests.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Iterator, Sequence
from contextlib import suppress

from tramontane.cluster.common.load_meter import FULL_LOAD, Load
from tramontane.cluster.common.node_watch import DeadNodeWatcher
from tramontane.cluster.common.ray_api import list_dead_nodes
from tramontane.cluster.observability.logging import log_accepted, log_ended
from tramontane.cluster.observability.tracing import record_spans
from tramontane.proto import wire
from tramontane.proto.errors import (
    ModelMismatchError,
    PipelineError,
    PipelineRecoveringError,
    PipelineUnavailableError,
    StreamNotOpenError,
    TramontaneError,
)
from tramontane.proto.request import RequestOutput, fingerprint_output, request_fields
from tramontane.proto.timing import KEEPALIVE_INTERVAL_S, STREAM_IDLE_TIMEOUT_S
from tramontane.router.engine.request_output import split_output
from tramontane.router.engine.router import Router

KEEPALIVE = b""
DONE = b""
# Tokens, log-probabilities and expert ids in one message, of 50 bytes at most: an ingress decodes
# them within some milliseconds, and Ray Serve's gRPC takes 4 MiB.
MAX_MESSAGE_VALUES = 2**13
NUM_SILENCE_CHECKS = 10  # in that time
PAUSE_SHARE = 0.4  # of the time between two writes of an ingress to one client
MAX_PAUSE_S, MAX_URGENT_PAUSE_S, MIN_PAUSE_PER_REQUEST_S = 0.5, 0.1, 0.001

logger = logging.getLogger(__name__)


class TokenStream:
    """A router's end of the stream to one ingress."""

    def __init__(self, load: Load = FULL_LOAD) -> None:
        self._load = load
        self._ready: list[tuple[int, RequestOutput | TramontaneError]] = []
        self._filled, self._is_urgent = asyncio.Event(), asyncio.Event()
        self.num_requests = 0
        self._pause_per_request_s = 0.0
        self.closed = asyncio.Event()

    @property
    def pause_s(self) -> float:
        """Seconds for which tokens gather after a message; without load, 0.

        Each message has overhead, and the ingress writes to its clients less often than tokens
        come. It has 500 streams, of which 8 are here, and 100 writes per second: each client is
        written to every 5 s, and the pause would be 2 s, so it is 0.5 s. When 1 of the 8 is left,
        0.25 s. With 64 requests and no stream it is 64 ms. At half of the load of this process and
        its machine, half of that.
        """
        shortest = min(MIN_PAUSE_PER_REQUEST_S * self.num_requests, MAX_URGENT_PAUSE_S)
        pause_s = max(shortest, min(self._pause_per_request_s * self.num_requests, MAX_PAUSE_S))
        return pause_s * self._load.level

    def accept(self, write_interval_s: float) -> None:
        """Note that a request has begun, and how often its ingress writes to each stream under full
        load.
        """
        self.num_requests += 1
        self._pause_per_request_s = PAUSE_SHARE * write_interval_s / self.num_requests

    def put(
        self, number: int, output: RequestOutput | TramontaneError, *, is_urgent: bool = False
    ) -> None:
        """Queue tokens, or the failure, of the ingress's request ``number``. Urgent output shortens
        the pause.
        """
        if isinstance(output, RequestOutput) and output.num_values > MAX_MESSAGE_VALUES:
            self._ready += [(number, part) for part in split_output(output, MAX_MESSAGE_VALUES)]
        else:
            self._ready.append((number, output))
        self._filled.set()
        if is_urgent:
            self._is_urgent.set()

    def release(self) -> None:
        """Note that a request has ended. The last one wakes the stream, which then waits with the
        idle timeout.
        """
        self.num_requests -= 1
        if not self.num_requests:
            self._filled.set()

    async def messages(self) -> AsyncGenerator[bytes, None]:
        """Yield messages with all outputs that are ready.

        Keepalive messages without content let either end detect the loss of the other. A stream
        without requests ends after a while: an endless call would keep its router from stopping.
        """
        yield KEEPALIVE
        while True:
            was_idle = not self.num_requests
            try:  # not asyncio.wait_for, which in Python 3.11 may swallow a cancellation
                async with asyncio.timeout(
                    STREAM_IDLE_TIMEOUT_S if was_idle else KEEPALIVE_INTERVAL_S
                ):
                    await self._filled.wait()
            except TimeoutError:
                if was_idle and not self.num_requests:
                    return
            self._filled.clear()
            self._is_urgent.clear()
            ready, self._ready = self._ready, []
            for message in _messages(ready):
                yield message
            await self._pause()

    async def _pause(self) -> None:
        pause_s = self.pause_s
        await asyncio.sleep(min(pause_s, MAX_URGENT_PAUSE_S))
        if pause_s > MAX_URGENT_PAUSE_S:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s - MAX_URGENT_PAUSE_S):
                    await self._is_urgent.wait()


class TokenStreams:
    """A router's streams to all ingresses.

    ``replica``: the name under which ingresses address this router. ``load``: of this process and
    its machine.
    """

    def __init__(
        self,
        replica: str,
        model: str = "",
        nodes: DeadNodeWatcher | None = None,
        load: Load = FULL_LOAD,
    ) -> None:
        self._replica, self._model_key, self._load = replica, model_key(model), load
        self._nodes = nodes or DeadNodeWatcher(list_dead_nodes)
        self._streams: dict[str, TokenStream] = {}

    @property
    def num_open(self) -> int:
        """How many streams are open."""
        return len(self._streams)

    async def subscribe(self, ingress: str, replica: str) -> AsyncGenerator[bytes, None]:
        """Stream to one ingress, which is named ``node/name``. If the stream breaks, the ingress's
        requests are aborted.

        The loss of its machine does not break the stream, so they are also aborted when Ray
        declares the node dead. The stream is empty if it is meant for another, lost replica, and
        the call was routed to this one instead.
        """
        if replica != self._replica:
            return
        stream = TokenStream(self._load)
        # broken, but only the ingress has noticed
        if (previous := self._streams.get(ingress)) is not None:
            previous.closed.set()
        self._streams[ingress] = stream
        losing = asyncio.create_task(self._close_with_node(ingress.rpartition("/")[0], stream))
        try:
            async for message in stream.messages():
                yield message
        finally:
            losing.cancel()
            stream.closed.set()
            if self._streams.get(ingress) is stream:
                del self._streams[ingress]

    async def _close_with_node(self, node: str, stream: TokenStream) -> None:
        if node:
            await self._nodes.wait_until_dead(lambda: node)
            stream.closed.set()

    async def generate(
        self,
        router: Router,
        ingress: str,
        number: int,
        encoded: bytes,
        model: str,
        may_wait: bool = True,
        write_interval_s: float = 0.0,
    ) -> bytes:
        """Run one request to its end; its tokens go through the ingress's stream.

        ``may_wait``: whether the request is queued while the pipeline is being fenced again;
        otherwise it is refused then. ``write_interval_s``: the interval of the ingress's writes to
        each client stream under full load. Returns DONE or an encoded refusal; a request for
        another model is refused, as its token ids have other meanings. Cancelling this call aborts
        the request.
        """
        if (reason := self._reason_to_refuse(router, ingress, model, may_wait)) is not None:
            return self.refusal(reason)
        stream, request = self._streams[ingress], wire.decode_request(encoded)
        sink = _RequestSink(stream, number, len(request.sequences))
        try:
            active = router.submit(request, sink.put)
        except TramontaneError as error:
            name = request.request_id
            fields = request_fields(name)
            logger.info("request %s is refused: %s", name or "-", error, extra=fields)
            return self.refusal(error)
        log_accepted(request)
        stream.accept(write_interval_s)
        # it also tells the ingress that a router has accepted the request
        stream.put(number, fingerprint_output(router.fingerprint))
        try:
            with self._load.watching():
                await _wait_for_any(sink.ended, stream.closed)
        finally:
            stream.release()
            router.abort(active)
            is_complete = sink.ended.is_set() and not sink.has_failed
            log_ended(active, is_complete=is_complete)
            record_spans(active, router.health, is_complete=is_complete)
        return (
            DONE
            if sink.ended.is_set()
            else self.refusal(PipelineError("the stream to the ingress broke"))
        )

    def _reason_to_refuse(
        self, router: Router, ingress: str, model: str, may_wait: bool
    ) -> TramontaneError | None:
        if model != self._model_key:
            return ModelMismatchError(
                "the server has another model or version now; send the request again"
            )
        if not router.is_attached:
            return PipelineUnavailableError("the pipeline is being started again; try again soon")
        if not (router.is_ready or may_wait):
            return PipelineRecoveringError(
                "the pipeline is being fenced again; its requests wait until then"
            )
        if ingress not in self._streams:
            return StreamNotOpenError("no stream from the router could be kept open")
        return None

    def refusal(self, error: TramontaneError) -> bytes:
        """Encode why this router refuses a request, with the router's name."""
        return wire.encode_error(error, self._replica)


class _RequestSink:
    """The pending output of one request for the stream to its ingress."""

    def __init__(self, stream: TokenStream, number: int, num_sequences: int) -> None:
        self._stream, self._number, self._unfinished = stream, number, set(range(num_sequences))
        self._has_begun = False
        self.ended, self.has_failed = asyncio.Event(), False

    def put(self, output: RequestOutput | TramontaneError) -> None:
        """Send tokens, or the failure, which ends all sequences. The first tokens and the ends of
        sequences are urgent.
        """
        if isinstance(output, TramontaneError):
            self.has_failed, finished = True, list(self._unfinished)
        else:
            finished = [event.seq_id for event in output.events if event.finish]
        self._stream.put(self._number, output, is_urgent=bool(finished) or not self._has_begun)
        self._has_begun = self._has_begun or (
            isinstance(output, RequestOutput) and bool(output.events)
        )
        self._unfinished.difference_update(finished)
        if not self._unfinished:
            self.ended.set()


def model_key(model: str) -> str:
    """Return the key that ingresses send with each request: the model, and the digest of the wire
    format.
    """
    return f"{model}/{wire.PROTOCOL_HASH}"


def _messages(ready: Sequence[tuple[int, RequestOutput | TramontaneError]]) -> Iterator[bytes]:
    """Encode one message, or several if it would have too many values."""
    outputs = (output for _, output in ready if isinstance(output, RequestOutput))
    if (
        len(ready) > 1
        and sum(len(output.events) + output.num_values for output in outputs) > MAX_MESSAGE_VALUES
    ):
        yield from _messages(ready[: len(ready) // 2])
        yield from _messages(ready[len(ready) // 2 :])
    else:
        yield wire.encode_outputs(ready) if ready else KEEPALIVE


async def _wait_for_any(*events: asyncio.Event) -> None:
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()


class _SilenceTimer:
    """Ends the wait for a message after a number of checks in a row, ``limit_s`` or up to a tenth
    longer.

    Checks are counted rather than seconds: a blocked event loop counts as one check, however long
    it was blocked, and messages that arrived in the meantime are read before the next check.
    """

    def __init__(self, limit_s: float) -> None:
        self._interval_s, self._num_checks = limit_s / NUM_SILENCE_CHECKS, 0
        self._waiting: asyncio.Timeout | None = None
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._check)

    async def wait_for(self, message: Awaitable[bytes]) -> bytes:
        """Wait for a message. Raises TimeoutError if none comes."""
        self._num_checks = 0
        async with asyncio.timeout(None) as self._waiting:
            received = await message
        self._waiting = None
        return received

    def _check(self) -> None:
        loop = asyncio.get_running_loop()
        self._num_checks += 1
        if self._waiting is not None and self._num_checks == NUM_SILENCE_CHECKS + 1:
            self._waiting.reschedule(loop.time())
        self._timer = loop.call_later(self._interval_s, self._check)

    def close(self) -> None:
        """Stop the checks."""
        self._timer.cancel()


async def with_idle_timeout(
    messages: AsyncIterable[bytes], limit_s: float
) -> AsyncGenerator[bytes, None]:
    """Yield the messages. Raises TimeoutError if none comes for ``limit_s``; see
    ``_SilenceTimer``.
    """
    iterator, timer = aiter(messages), _SilenceTimer(limit_s)
    try:
        while True:
            yield await timer.wait_for(anext(iterator))
    except StopAsyncIteration:
        return
    finally:
        timer.close()
