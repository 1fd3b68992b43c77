"""Clients that disconnect early, send half a request, or hardly read, on plain sockets."""

import asyncio
import json
import random
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from serve_cluster import content_length, post_request

RECEIVE_BUFFER_BYTES = 4096
PAUSE_S = 0.5  # between the reads of a slow reader, of a few bytes each
SLOW_READS = 100  # before a slow reader disconnects, unless the server did so earlier
# An answer of some megabytes, more than the buffers between server and client hold.
LARGE = {
    "messages": [{"role": "user", "content": "O"}],
    "n": 6,
    "max_tokens": 800,
    "top_logprobs": 20,
}
LARGE |= {"logprobs": True, "ignore_eos": True, "stream": True}


class UnexpectedResponseError(ValueError):
    """The server's response was not the expected one."""


class FaultyClient:
    """A client that misbehaves. Each method returns how the connection ended."""

    def __init__(self, port: int, rng: random.Random) -> None:
        self._port, self._rng = port, rng

    async def leave(self, body: dict[str, Any]) -> str:
        """Disconnect before or during the answer."""
        loop, request = asyncio.get_running_loop(), _request(body)
        async with self._connection() as connection:
            await loop.sock_sendall(connection, request)
            to_read = self._rng.choice((0, 1, 500, 5000, 50_000))
            while to_read > 0 and (part := await loop.sock_recv(connection, to_read)):
                to_read -= len(part)
                if b"[DONE]" in part or not body["stream"]:
                    break
            await asyncio.sleep(self._rng.uniform(0, 0.3))
            return self._go(connection)

    async def half(self, body: dict[str, Any]) -> str:
        """Send a part of a request, cut in its headers or its body."""
        loop, request = asyncio.get_running_loop(), _request(body)
        async with self._connection() as connection:
            await loop.sock_sendall(connection, request[: self._rng.randrange(len(request))])
            await asyncio.sleep(self._rng.choice((0, 0.1, 2.0)))
            return self._go(connection)

    async def read_slowly(self) -> str:
        """Read slowly until the server closes the connection, or for nearly a minute."""
        loop = asyncio.get_running_loop()
        async with self._connection() as connection:
            await loop.sock_sendall(
                connection, _request(LARGE, b"POST /v1/chat/completions HTTP/1.1")
            )
            for _ in range(SLOW_READS):
                # a read would return buffered bytes first
                if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    return "cut"
                if not await loop.sock_recv(connection, 16):
                    return "closed"
                await asyncio.sleep(PAUSE_S)
            return self._go(connection)

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[socket.socket]:
        with socket.socket() as connection:
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
            await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self._port))
            yield connection

    def _go(self, connection: socket.socket) -> str:
        """Close the connection in an orderly way, or reset it, which drops unread data."""
        if self._rng.random() < 0.5:
            return "closed by the client"
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return "reset by the client"


def _request(body: dict[str, Any], line: bytes = b"POST /v1/completions HTTP/1.1") -> bytes:
    data = json.dumps(body).encode()
    return post_request(data, content_length(data), line=line)
