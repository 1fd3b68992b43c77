"""Streamed responses: server-sent events, with a rate of writes that all streams share."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from typing import Any, NamedTuple

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from tramontane.cluster.common.load_meter import FULL_LOAD, Load
from tramontane.cluster.http.errors import (
    error_shape,
    format_event,
    log_and_respond,
)
from tramontane.cluster.http.failover import MESSAGE_UPDATES, SCOPE_RESUME
from tramontane.proto.errors import TramontaneError
from tramontane.router.openai.formatter import AnswerFormatter
from tramontane.router.openai.json_limits import SMALL_BODY, run_off_loop
from tramontane.router.openai.response_models import CompletionChange, encode_and_free, to_json
from tramontane.router.openai.resume_state import ChoiceUpdate

FINGERPRINT_HEADER = "x-tramontane-fingerprint"
# Proxies and load balancers cut a connection without traffic, many of them after 60 s.
KEEP_ALIVE_S = 15.0
MIN_SLEEP_S = 0.001
Changes = AsyncGenerator[list[CompletionChange], None]
FirstChanges = asyncio.Future[list[CompletionChange]]


def fingerprint_header(fingerprint: str | None) -> dict[str, str]:
    """Return the header with the fingerprint of a response, or of the first tokens of a stream; no
    header if it is unknown.
    """
    return {} if fingerprint is None else {FINGERPRINT_HEADER: fingerprint}


class SseChunk(NamedTuple):
    """One write of a stream: whole events, and their updates of the choices."""

    data: bytes
    updates: list[ChoiceUpdate]
    is_last: bool = False


class Pacer:
    """Spreads writes evenly over the open streams: ``writes_per_s`` under full load, and more as
    the load is lower.

    Every write has a fixed cost, in Ray Serve more than in most servers. Tokens that become ready
    while a stream waits are sent in one write. At 500 writes a second one stream waits 2 ms after a
    write, and each of 64 streams 128 ms; at half of the load 64 ms, and without any load each token
    is written at once.
    """

    def __init__(self, writes_per_s: int, load: Load = FULL_LOAD) -> None:
        self._writes_per_s, self._load = writes_per_s, load
        self.num_streams = 0

    @contextmanager
    def open_stream(self) -> Iterator[None]:
        """Count a stream to which is written during the block."""
        self.num_streams += 1
        try:
            with self._load.watching():
                yield
        finally:
            self.num_streams -= 1

    @property
    def longest_interval_s(self) -> float:
        """Seconds between two writes of one stream under full load."""
        return self.num_streams / self._writes_per_s

    @property
    def interval_s(self) -> float:
        """Seconds between two writes of one stream now."""
        return self.longest_interval_s * self._load.level

    async def wait_turn(self, last_write: float) -> None:
        """Wait until a stream that wrote at ``last_write`` (of the event loop's clock) may write
        again.
        """
        wait = last_write + self.interval_s - asyncio.get_running_loop().time()
        if wait > 0:
            await asyncio.sleep(wait)


class KeepAliveSender:
    """Sends messages, and a ``comment`` after each ``KEEP_ALIVE_S`` without any, so that no proxy
    takes a stream that waits for a dead connection.
    """

    def __init__(self, send: Send, comment: Callable[[], Message]) -> None:
        self._send, self._comment = send, comment
        self._loop = asyncio.get_running_loop()
        self._is_sending = False
        self._sent_at = self._loop.time()
        self._timer = self._loop.call_at(self._sent_at + KEEP_ALIVE_S, self._wake)
        self._commenting: asyncio.Task[None] | None = None

    async def __call__(self, message: Message) -> None:
        """Send one message, after a comment that is being sent."""
        if self._commenting is not None:
            await asyncio.wait({self._commenting})
        self._is_sending = True
        try:
            await self._send(message)
        finally:
            self._is_sending, self._sent_at = False, self._loop.time()

    def _wake(self) -> None:
        silent_s = self._loop.time() - self._sent_at
        is_busy = self._is_sending or self._commenting is not None
        if silent_s >= KEEP_ALIVE_S and not is_busy:
            self._commenting = asyncio.create_task(self._send_comment())
            silent_s = 0.0
        left_s = max(KEEP_ALIVE_S - silent_s, MIN_SLEEP_S)
        self._timer = self._loop.call_later(left_s, self._wake)

    async def _send_comment(self) -> None:
        with suppress(Exception):  # the client has gone, which ends the stream elsewhere
            await self._send(self._comment())
        self._commenting, self._sent_at = None, self._loop.time()

    async def comment(self) -> None:
        """Send a comment now."""
        await self(self._comment())

    def close(self) -> None:
        """Send no more comments."""
        self._timer.cancel()
        if self._commenting is not None:
            self._commenting.cancel()


class SseResponse(StreamingResponse):
    """Server-sent events whose generators are closed as soon as the client disconnects.

    Without this the garbage collector would close them, and they would keep their slots until then.
    The last event and the end of the response travel in one message, so an ingress cannot die
    between the two. ``first``: the first changes, which ``events`` await.
    """

    def __init__(
        self,
        events: AsyncGenerator[SseChunk, None],
        first: FirstChanges,
        changes: Changes,
        path: str = "",
        fingerprint: str | None = None,
    ) -> None:
        headers = {"cache-control": "no-cache", **fingerprint_header(fingerprint)}
        super().__init__((), media_type="text/event-stream", headers=headers)
        self.events, self._first, self._changes = events, first, changes
        self._path = path
        self._is_resumable = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, and close their sources at the end."""
        self._is_resumable = SCOPE_RESUME in scope
        async with aclosing(self._changes), aclosing(self.events):
            try:
                with suppress(ClientDisconnect):
                    await super().__call__(scope, receive, send)
            finally:  # ``changes`` cannot be closed while it runs
                await cancel_first(self._first)

    async def stream_response(self, send: Send) -> None:
        """Send all events; with their updates if a proxy can continue the response elsewhere."""
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        sender = KeepAliveSender(send, self._comment)
        try:
            if not self._first.done():  # for KEEP_ALIVE_S already
                await sender.comment()
            async for piece in self.events:
                await sender(self._message(piece))
        finally:
            sender.close()

    def _comment(self) -> Message:
        return self._message(SseChunk(error_shape(self._path).keep_alive, []))

    def _message(self, piece: SseChunk) -> Message:
        message = {
            "type": "http.response.body",
            "body": piece.data,
            "more_body": not piece.is_last,
        }
        return message | {MESSAGE_UPDATES: piece.updates} if self._is_resumable else message


async def cancel_first(first: FirstChanges) -> None:
    """Cancel the wait for the first changes, if there are none yet."""
    if not first.done():
        first.cancel()
        await asyncio.wait({first})
    elif not first.cancelled():
        first.exception()  # if there is one it is not unexpected


async def sse_events(
    pacer: Pacer,
    answer: AnswerFormatter,
    first: FirstChanges,
    changes: Changes,
    request_id: str,
    path: str = "",
) -> AsyncGenerator[SseChunk, None]:
    """Yield writes, each with all events that are ready.

    ``first``: see ``token_endpoints.wait_for_first``. ``path``: of the request.
    """
    clock, generation = asyncio.get_running_loop().time, answer.generation
    try:
        begun = await first
        with pacer.open_stream():
            async with aclosing(changes):
                ready = await _write(answer, begun, is_first=True)
                while not generation.is_finished:
                    yield SseChunk(ready, generation.take_updates())
                    await pacer.wait_turn(clock())
                    ready = await _write(answer, await anext(changes))
            yield SseChunk(ready, generation.take_updates(), is_last=True)
    except TramontaneError as error:
        body = bytes(log_and_respond(error, request_id, path).body)
        last = error_shape(path).event(body, answer.next_number)
        failed = answer.failure(json.loads(body).get("error", {}))
        last += b"".join(format_event(to_json(each.data).encode(), each.name) for each in failed)
        yield SseChunk(last, [], is_last=True)


async def _write(
    answer: AnswerFormatter, changes: list[CompletionChange], *, is_first: bool = False
) -> bytes:
    """Return one write: the events of these changes, after the opening events, and with the last
    changes the end of the stream.
    """

    def events(encode: Callable[[dict[str, Any]], bytes]) -> bytes:
        all_events = [*(answer.opening() if is_first else ()), *answer.events(changes)]
        pieces = [format_event(encode(event.data), event.name) for event in all_events]
        return b"".join(pieces) + (answer.ending if answer.generation.is_finished else b"")

    if answer.change_bytes <= SMALL_BODY:  # nearly always
        return events(lambda data: to_json(data).encode())
    # An event may have 16 MiB, and each copy takes milliseconds.
    return await run_off_loop(answer.change_bytes, lambda: events(encode_and_free))
