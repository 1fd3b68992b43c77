"""Edges between stages without a GPU: one TCP connection each.

What a neighbour has sent waits in the kernel until it is wanted: taking it costs a copy, and nobody has to be woken.
A process group of gloo, which first agrees with the sender that somebody wants it, took three to ten times as long.
"""

import contextlib
import hmac
import secrets
import socket
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from tramontane.proto.errors import LinkError
from tramontane.workers.links.channel import CONNECT_TIMEOUT, MAX_PENDING_SENDS, Address

AUTH_TOKEN_BYTES = 16
AUTH_TOKEN_TIMEOUT_S = 2.0  # a neighbour says it at once; whoever else has connected must not keep it out
# A process that dies is missed at once; a machine that vanishes, after the last of these probes. A limit for unanswered
# data (TCP_USER_TIMEOUT) would also end the link to a neighbour who only takes long to compute.
PROBES = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 2}


class TcpChannel:
    """What does not fit into the kernel's buffers is sent by a thread, so that the next micro-batch can be computed."""

    def __init__(self, connection: socket.socket) -> None:
        configure_socket(connection)
        self._connection = connection
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="edge")
        self._unsent: deque[Future[None]] = deque()

    def send(self, hidden_TD: Tensor) -> None:
        data = _bytes_of(hidden_TD.contiguous())
        try:
            while self._unsent and (self._unsent[0].done() or len(self._unsent) >= MAX_PENDING_SENDS):
                self._unsent.popleft().result()
            num_sent = 0 if self._unsent else self._send_now(data)
            if num_sent < len(data):
                self._unsent.append(self._sender.submit(self._connection.sendall, data[num_sent:]))
        except (OSError, RuntimeError) as error:  # RuntimeError: the thread was told to end
            raise LinkError(f"the link to a neighbour is broken: {error}") from error

    def receive(self, hidden_TD: Tensor) -> None:
        data = _bytes_of(hidden_TD)
        try:
            while data:
                if not (num_received := self._connection.recv_into(data, 0, socket.MSG_WAITALL)):
                    raise LinkError("the link to a neighbour is broken: it was closed")
                data = data[num_received:]
        except OSError as error:
            raise LinkError(f"the link to a neighbour is broken: {error}") from error

    def close(self) -> None:
        _close_socket(self._connection)
        self._sender.shutdown(wait=False)

    def _send_now(self, data: memoryview) -> int:
        """What the kernel takes at once."""
        try:
            return self._connection.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0


class TcpListener:
    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.address: Address = (host, self._listener.getsockname()[1], secrets.token_hex(AUTH_TOKEN_BYTES // 2))

    def accept(self) -> TcpChannel:
        """Raises TimeoutError, or another OSError."""
        return TcpChannel(self.accept_connection())

    def accept_connection(self) -> socket.socket:
        """Of the first who knows the word; raises as ``accept`` does."""
        deadline = time.monotonic() + CONNECT_TIMEOUT.total_seconds()
        with self._listener:
            while (left := deadline - time.monotonic()) > 0:
                self._listener.settimeout(left)
                connection, _ = self._listener.accept()
                if self._authenticate(connection):
                    return connection
                connection.close()
        raise TimeoutError("nobody came but strangers")

    def _authenticate(self, connection: socket.socket) -> bool:
        connection.settimeout(AUTH_TOKEN_TIMEOUT_S)
        said = b""
        with contextlib.suppress(OSError):
            while len(said) < AUTH_TOKEN_BYTES and (more := connection.recv(AUTH_TOKEN_BYTES - len(said))):
                said += more
        return hmac.compare_digest(said, self.address[2].encode())

    def close(self) -> None:
        _close_socket(self._listener)


class TcpChannelFactory:
    """``ChannelFactory`` of TCP connections."""

    def listen(self, host: str) -> TcpListener:
        return TcpListener(host)

    def connect(self, address: Address, _host: str, /) -> TcpChannel:
        return TcpChannel(connect(address))


def connect(address: Address) -> socket.socket:
    """To a ``TcpListener``. Raises OSError."""
    host, port, word = address
    connection = socket.create_connection((host, port), CONNECT_TIMEOUT.total_seconds())
    try:
        connection.sendall(word.encode())
        return connection
    except OSError:
        connection.close()
        raise


def configure_socket(connection: socket.socket) -> None:
    """Nothing waits to be joined by more, and a neighbour whose machine has vanished is missed."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in PROBES.items():
        if hasattr(socket, option):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.view(torch.uint8).reshape(-1).numpy()
    return memoryview(array)


def _close_socket(opened: socket.socket) -> None:
    """Wakes whoever waits for it."""
    with contextlib.suppress(OSError):  # it was never connected, or is not any more
        opened.shutdown(socket.SHUT_RDWR)
    opened.close()
