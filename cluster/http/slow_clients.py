"""Clients that do not read what they asked for: their answers stand still, and after a while they are dropped.

Ray Serve passes an application's answer on through a queue without a bound, so that writing never waits; what is in it is
looked at here. Behind it everything waits for whoever reads: gRPC between replica and proxy, and the proxy's HTTP server.
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

from tramontane.proto.log_fields import request_fields

logger = logging.getLogger(__name__)

LIMIT = "x-slow-reader-timeout"  # from a door to its proxy, seconds; clients do not see it
MOST_UNREAD = 16  # writes of a stream
LOOK_EVERY_S = 0.05
PIECE = 2**16  # an HTTP server takes a write whole, however large, and lets the next one wait

# Returns how many messages Ray Serve holds for the request that is being answered; set by ``response_queues``.
buffered_messages: ContextVar[Callable[[], int]] = ContextVar("buffered_messages")


class SlowReaderError(Exception):
    """A client has not read for too long."""


def num_buffered() -> int:
    """Messages of this request's answer that nobody has fetched; 0 where Ray Serve is not between."""
    buffered = buffered_messages.get(None)
    return buffered() if buffered is not None else 0


def with_backpressure(send: Send, limit_s: float, unread: Callable[[], int] = num_buffered) -> Send:
    """Writes, and waits while much is unread. Raises SlowReaderError where that takes longer than the limit."""

    async def send_and_wait(message: Message) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await send(message)
                while unread() > MOST_UNREAD:
                    await asyncio.sleep(LOOK_EVERY_S)
        except TimeoutError:
            raise SlowReaderError from None

    return send_and_wait


class BackpressureMiddleware:
    """For the door, ASGI middleware around its endpoints: each answer waits for its reader, and is given up after ``limit_s``."""

    def __init__(self, app: ASGIApp, limit_s: float) -> None:
        self._app, self._limit_s = app, limit_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._limit_s == math.inf:
            await self._app(scope, receive, send)
            return
        patient_send = with_backpressure(send, self._limit_s)

        async def send_with_limit(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[LIMIT] = f"{self._limit_s:g}"
            await patient_send(message)

        try:
            await self._app(scope, receive, send_with_limit)
        except SlowReaderError:
            own_id = str(scope.get("state", {}).get("request_id", "-"))
            why = "request %s was dropped: its client did not read for %g s"
            logger.warning(why, own_id, self._limit_s, extra=request_fields(own_id))


class SlowClientMiddleware:
    """For the proxy, ASGI middleware around all others: a connection that takes nothing for as long as the door says is cut.

    A large message is written in pieces: a whole answer would otherwise lie in the HTTP server's buffer until its client goes.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limit_s: float | None = None

        async def send_or_cut(message: Message) -> None:
            nonlocal limit_s
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                limit_s = float(headers[LIMIT]) if LIMIT in headers else None
                del headers[LIMIT]
            try:
                for piece in (message,) if limit_s is None else _pieces(message):
                    async with asyncio.timeout(limit_s):
                        await send(piece)
            except TimeoutError:
                logger.warning("a connection was cut: its client had not read for %g s", limit_s)
                _reset_connection(send)

        await self._app(scope, receive, send_or_cut)


def _pieces(message: Message) -> Iterator[Message]:
    """Of a body; 150 KiB are 64, 64 and 22."""
    body: bytes = message.get("body", b"")
    for start in range(0, len(body) - PIECE, PIECE):
        yield {**message, "body": body[start : start + PIECE], "more_body": True}
    yield message if len(body) <= PIECE else {**message, "body": body[(len(body) - 1) // PIECE * PIECE :]}


def _reset_connection(send: Send) -> None:
    """At once, with what is unsent. Uvicorn has no way to say that; its application then hears that the client has left."""
    transport = getattr(getattr(send, "__self__", None), "transport", None)
    if transport is None:
        raise SlowReaderError("a client does not read")
    if (own := transport.get_extra_info("socket")) is not None:
        with socket.socket(fileno=os.dup(own.fileno())) as same:  # else the system would go on offering what it has of the stream
            same.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
