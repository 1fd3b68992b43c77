"""Back-pressure for clients that do not read their responses: responses wait, and the client is
dropped after a timeout.

Ray Serve passes a response on through an unbounded queue, so writing never waits; its length is
observed here. Everything behind it waits for its reader: gRPC between replica and proxy, and the
proxy's HTTP server.
"""

import asyncio
import logging
import math
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tramontane.proto.request import request_fields

# from an ingress to its proxy, seconds; not sent to clients
TIMEOUT_HEADER = "x-slow-reader-timeout"
MAX_BUFFERED = 16  # writes of a stream
POLL_INTERVAL_S = 0.05
# an HTTP server buffers a write whole, however large, and lets only the next one wait
PIECE_BYTES = 2**16

logger = logging.getLogger(__name__)

# Returns how many messages Ray Serve holds for the request that is being answered; set by
# ``track_response_queues``.
buffered_messages: ContextVar[Callable[[], int]] = ContextVar("buffered_messages")


class SlowClientError(Exception):
    """A client has not read for too long."""


def num_buffered() -> int:
    """Return how many messages of this request's response are not fetched yet; 0 without Ray
    Serve.
    """
    buffered = buffered_messages.get(None)
    return buffered() if buffered is not None else 0


def with_backpressure(
    send: Send, limit_s: float, count_buffered: Callable[[], int] = num_buffered
) -> Send:
    """Wrap ``send`` so that it waits while too much is buffered. It raises SlowClientError after
    ``limit_s``.
    """
    # a queue takes every message at once, so no time limit is needed
    is_queue = buffered_messages.get(None) is not None

    async def send_and_wait(message: Message) -> None:
        if is_queue:
            await send(message)
            if count_buffered() <= MAX_BUFFERED:
                return
        try:
            async with asyncio.timeout(limit_s):
                if not is_queue:
                    await send(message)
                while count_buffered() > MAX_BUFFERED:
                    await asyncio.sleep(POLL_INTERVAL_S)
        except TimeoutError:
            raise SlowClientError from None

    return send_and_wait


class SlowClientMiddleware:
    """ASGI middleware around an ingress's endpoints: responses wait for their readers, and are
    dropped after ``limit_s``.
    """

    def __init__(self, app: ASGIApp, limit_s: float) -> None:
        self._app, self._limit_s = app, limit_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request at its reader's pace."""
        if scope["type"] != "http" or self._limit_s == math.inf:
            await self._app(scope, receive, send)
            return
        waiting_send = with_backpressure(send, self._limit_s)

        async def send_with_limit(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[TIMEOUT_HEADER] = f"{self._limit_s:g}"
            await waiting_send(message)

        try:
            await self._app(scope, receive, send_with_limit)
        except SlowClientError:
            request_id = str(scope.get("state", {}).get("request_id", "-"))
            message = "request %s was dropped: its client did not read for %g s"
            logger.warning(message, request_id, self._limit_s, extra=request_fields(request_id))


class ProxySlowClientMiddleware:
    """Outermost ASGI middleware of a proxy: closes connections that accept no data for as long as
    the ingress allows.

    A large message is written in pieces: otherwise a whole response would stay in the HTTP server's
    buffer until its client disconnects.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Relay the response, and reset the connection if the client does not read."""
        limit_s: float | None = None

        async def send_or_cut(message: Message) -> None:
            nonlocal limit_s
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                limit_s = float(headers[TIMEOUT_HEADER]) if TIMEOUT_HEADER in headers else None
                del headers[TIMEOUT_HEADER]
            try:
                for piece in (message,) if limit_s is None else _pieces(message):
                    # then it is taken at once; a timer would cost more than that
                    if limit_s is None or not _num_unsent(send):
                        await send(piece)
                        continue
                    async with asyncio.timeout(limit_s):
                        await send(piece)
            except TimeoutError:
                logger.warning("a connection was cut: its client had not read for %g s", limit_s)
                _reset_connection(send)

        await self._app(scope, receive, send_or_cut)


def _num_unsent(send: Send) -> int:
    """Return how many bytes of the connection are unsent; 1 if unknown."""
    transport = _transport(send)
    return 1 if transport is None else transport.get_write_buffer_size()


def _transport(send: Send) -> asyncio.Transport | None:
    """Return the transport of uvicorn's connection; None where another server sends."""
    return getattr(getattr(send, "__self__", None), "transport", None)


def _pieces(message: Message) -> Iterator[Message]:
    """Split a message's body: 150 KiB give pieces of 64, 64 and 22 KiB."""
    body: bytes = message.get("body", b"")
    for start in range(0, len(body) - PIECE_BYTES, PIECE_BYTES):
        yield {**message, "body": body[start : start + PIECE_BYTES], "more_body": True}
    yield (
        message
        if len(body) <= PIECE_BYTES
        else {**message, "body": body[(len(body) - 1) // PIECE_BYTES * PIECE_BYTES :]}
    )


def _reset_connection(send: Send) -> None:
    """Reset the connection at once and discard unsent data; the application then sees a
    disconnected client.

    Uvicorn has no function for that, so the socket is reached through its transport.
    """
    transport = _transport(send)
    if transport is None:
        raise SlowClientError("a client does not read")
    if (connection := transport.get_extra_info("socket")) is not None:
        # without SO_LINGER the system would still send the buffered data
        with socket.socket(fileno=os.dup(connection.fileno())) as copy:
            copy.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
