"""Channels between stages without a GPU: one TCP connection each.

Data from the neighbor waits in the kernel until it is received: that costs one copy, and no thread
has to be woken. A gloo process group, which first agrees with the sender on the transfer, took
three to ten times as long.
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
AUTH_TOKEN_TIMEOUT_S = 2.0  # a neighbor sends it at once; other connections must not block it
# The death of a process is noticed at once, the loss of a machine after the last of these probes. A
# limit for unacknowledged data (TCP_USER_TIMEOUT) would also end the link to a neighbor that
# computes for a long time.
KEEPALIVE_OPTIONS = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 2}


class TcpChannel:
    """The ``Channel`` over TCP.

    A thread sends the bytes that do not fit into the kernel's buffers, so that the next micro-batch
    can be computed.
    """

    def __init__(self, connection: socket.socket) -> None:
        configure_socket(connection)
        self._connection = connection
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="channel")
        self._unsent: deque[Future[None]] = deque()

    def send(self, hidden_TD: Tensor) -> None:
        """See ``Channel``."""
        data = _bytes_of(hidden_TD.contiguous())
        try:
            while self._unsent and (
                self._unsent[0].done() or len(self._unsent) >= MAX_PENDING_SENDS
            ):
                self._unsent.popleft().result()
            num_sent = 0 if self._unsent else self._send_now(data)
            if num_sent < len(data):
                self._unsent.append(self._sender.submit(self._connection.sendall, data[num_sent:]))
        except (OSError, RuntimeError) as error:  # RuntimeError: the sender was shut down
            raise LinkError(f"the link to a neighbor is broken: {error}") from error

    def receive(self, hidden_TD: Tensor) -> None:
        """See ``Channel``."""
        data = _bytes_of(hidden_TD)
        try:
            while data:
                if not (num_received := self._connection.recv_into(data, 0, socket.MSG_WAITALL)):
                    raise LinkError("the link to a neighbor is broken: it was closed")
                data = data[num_received:]
        except OSError as error:
            raise LinkError(f"the link to a neighbor is broken: {error}") from error

    def close(self) -> None:
        """See ``Channel``."""
        _close_socket(self._connection)
        self._sender.shutdown(wait=False)

    def _send_now(self, data: memoryview) -> int:
        """Send as many bytes as the kernel accepts at once; returns how many."""
        try:
            return self._connection.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0


class TcpListener:
    """A socket that accepts one connection, from the peer that knows the token of the address."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.address: Address = (
            host,
            self._listener.getsockname()[1],
            secrets.token_hex(AUTH_TOKEN_BYTES // 2),
        )

    def accept(self) -> TcpChannel:
        """Wait for the peer. Raises TimeoutError, or another OSError."""
        return TcpChannel(self.accept_connection())

    def accept_connection(self) -> socket.socket:
        """Return the first connection that sends the token. Raises as ``accept`` does."""
        deadline = time.monotonic() + CONNECT_TIMEOUT.total_seconds()
        with self._listener:
            while (remaining_s := deadline - time.monotonic()) > 0:
                self._listener.settimeout(remaining_s)
                connection, _ = self._listener.accept()
                if self._authenticate(connection):
                    return connection
                connection.close()
        raise TimeoutError(
            f"no authenticated peer connected within {CONNECT_TIMEOUT.total_seconds():.0f} s"
        )

    def _authenticate(self, connection: socket.socket) -> bool:
        connection.settimeout(AUTH_TOKEN_TIMEOUT_S)
        token = b""
        with contextlib.suppress(OSError):
            while len(token) < AUTH_TOKEN_BYTES and (
                more := connection.recv(AUTH_TOKEN_BYTES - len(token))
            ):
                token += more
        return hmac.compare_digest(token, self.address[2].encode())

    def close(self) -> None:
        """See ``Listener``."""
        _close_socket(self._listener)


class TcpChannelFactory:
    """The ``ChannelFactory`` of TCP connections."""

    def listen(self, host: str) -> TcpListener:
        """See ``ChannelFactory``."""
        return TcpListener(host)

    def connect(self, address: Address, _host: str, /) -> TcpChannel:
        """See ``ChannelFactory``."""
        return TcpChannel(connect(address))


def connect(address: Address) -> socket.socket:
    """Connect to a ``TcpListener`` and authenticate. Raises OSError."""
    host, port, token = address
    connection = socket.create_connection((host, port), CONNECT_TIMEOUT.total_seconds())
    try:
        connection.sendall(token.encode())
        return connection
    except OSError:
        connection.close()
        raise


def configure_socket(connection: socket.socket) -> None:
    """Disable Nagle's algorithm, and detect a neighbor whose machine is lost by keepalive
    probes.
    """
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE_OPTIONS.items():
        if hasattr(socket, option):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.view(torch.uint8).reshape(-1).numpy()
    return memoryview(array)


def _close_socket(opened: socket.socket) -> None:
    """Close a socket and wake the threads that wait on it."""
    with contextlib.suppress(OSError):  # it is not connected
        opened.shutdown(socket.SHUT_RDWR)
    opened.close()
