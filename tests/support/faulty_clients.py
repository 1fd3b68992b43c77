"""Clients that leave in the middle, say half of what they want, or read next to nothing: on plain sockets."""

import asyncio
import json
import random
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from serve_cluster import content_length, post_request

SMALL = 4096  # what such a client's system takes for it
PAUSE_S = 0.5  # between a slow reader's reads, of a few bytes
SLOW_READS = 100  # then it leaves, unless it has been cut
# Some megabytes, more than the buffers between take.
MUCH = {"messages": [{"role": "user", "content": "O"}], "n": 6, "max_tokens": 800, "top_logprobs": 20}
MUCH |= {"logprobs": True, "ignore_eos": True, "stream": True}


class UnexpectedResponseError(ValueError):
    """What the server said or did."""


class FaultyClient:
    """Each act returns how it ended."""

    def __init__(self, port: int, rng: random.Random) -> None:
        self._port, self._rng = port, rng

    async def leave(self, body: dict[str, Any]) -> str:
        """In the middle of the answer, or before it."""
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
        """Of a request, in its head or its body."""
        loop, request = asyncio.get_running_loop(), _request(body)
        async with self._connection() as connection:
            await loop.sock_sendall(connection, request[: self._rng.randrange(len(request))])
            await asyncio.sleep(self._rng.choice((0, 0.1, 2.0)))
            return self._go(connection)

    async def read_slowly(self) -> str:
        """Until the server has cut the connection, or for nearly a minute."""
        loop = asyncio.get_running_loop()
        async with self._connection() as connection:
            await loop.sock_sendall(connection, _request(MUCH, b"POST /v1/chat/completions HTTP/1.1"))
            for _ in range(SLOW_READS):
                if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):  # reading would first give what is still there
                    return "cut"
                if not await loop.sock_recv(connection, 16):
                    return "closed"
                await asyncio.sleep(PAUSE_S)
            return self._go(connection)

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[socket.socket]:
        with socket.socket() as connection:
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
            await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self._port))
            yield connection

    def _go(self, connection: socket.socket) -> str:
        """Politely, or as when a cable is cut: what is unread is thrown away with the connection."""
        if self._rng.random() < 0.5:
            return "closed by the client"
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return "reset by the client"


def _request(body: dict[str, Any], line: bytes = b"POST /v1/completions HTTP/1.1") -> bytes:
    data = json.dumps(body).encode()
    return post_request(data, content_length(data), line=line)
