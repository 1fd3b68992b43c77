"""Small messages between the two ends of an edge whose bytes go another way; by it the death of a neighbour is missed."""

import contextlib
import select
import socket
import threading
from typing import Any

import msgpack

from tramontane.proto.errors import LinkError
from tramontane.workers.links.tcp_channel import configure_socket

LENGTH_BYTES = 4
CLOSE_FRAME = bytes(LENGTH_BYTES)  # a message of no bytes
MAX_BYTES = 2**16
HUP_EVENTS = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)


class ControlSocket:
    """One thread sends or receives; ``close`` and what comes after it may come from any other.

    A line ends in three steps: ``close`` tells the neighbour, ``let_go`` that nothing of its is used here any more, and
    ``wait_peer_closed`` returns when it has let go as well, or is dead.
    """

    def __init__(self, connection: socket.socket) -> None:
        configure_socket(connection)
        self.connection = connection
        self._woken, self._waker = socket.socketpair()
        self._reading, self._writing = threading.Lock(), threading.Lock()
        self._is_closed = self._is_ending = False

    def send(self, message: object) -> None:
        """Plain data. Raises LinkError where the neighbour is gone, or the line is closed."""
        packed: bytes = msgpack.packb(message)
        assert len(packed) <= MAX_BYTES
        with self._writing:
            if self._is_closed:
                raise LinkError("the link to a neighbour is closed")
            try:
                self.connection.sendall(len(packed).to_bytes(LENGTH_BYTES, "big") + packed)
            except OSError as error:
                raise _broken(str(error)) from error

    def receive(self, timeout_s: float | None = None) -> Any:  # noqa: ANN401 - what the neighbour has sent
        """Raises as ``send`` does, also where more time goes by without a byte. What a neighbour that died had sent is lost."""
        with self._reading:
            length = int.from_bytes(self._read(LENGTH_BYTES, timeout_s), "big")
            if not 0 < length <= MAX_BYTES:
                raise _broken("it was closed" if not length else "its messages make no sense")
            return msgpack.unpackb(self._read(length, timeout_s))

    def close(self) -> None:
        """Wakes whoever waits here."""
        with self._writing:
            if self._is_closed:
                return
            self._is_closed = True
            with contextlib.suppress(OSError):
                self.connection.send(CLOSE_FRAME, socket.MSG_DONTWAIT)
            self._waker.send(b".")

    def claim_teardown(self) -> bool:
        """True once, for whoever asks first after ``close``: that one sees to the rest."""
        with self._writing:
            may, self._is_ending = not self._is_ending, True
            return may

    def shutdown_write(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)

    def wait_peer_closed(self) -> None:
        """May take as long as the neighbour takes to close its end."""
        with contextlib.suppress(OSError):
            while self.connection.recv(MAX_BYTES):
                pass
        self.close_fds()

    def close_fds(self) -> None:
        """Of a closed line, whatever the neighbour does."""
        with self._reading, self._writing:  # whoever waited has been woken
            for end in (self.connection, self._woken, self._waker):
                end.close()

    def detach(self) -> socket.socket:
        """The connection, for something else; the line is no more."""
        self._woken.close()
        self._waker.close()
        return self.connection

    def _read(self, num_bytes: int, timeout_s: float | None) -> bytes:
        data = b""
        while len(data) < num_bytes:
            self._wait_for_more(timeout_s)
            try:
                more = self.connection.recv(num_bytes - len(data))
            except OSError as error:
                raise _broken(str(error)) from error
            if not more:
                raise _broken("it was closed")
            data += more
        return data

    def _wait_for_more(self, timeout_s: float | None) -> None:
        if self._is_closed:
            raise LinkError("the link to a neighbour is closed")
        waiting = select.poll()
        waiting.register(self.connection, select.POLLIN | HUP_EVENTS)
        waiting.register(self._woken, select.POLLIN)
        ready = dict(waiting.poll(None if timeout_s is None else timeout_s * 1000))
        if self._woken.fileno() in ready:
            raise LinkError("the link to a neighbour is closed")
        if not ready:
            raise _broken(f"it said nothing for {timeout_s:.0f} s")
        if ready[self.connection.fileno()] & HUP_EVENTS:
            raise _broken("it was closed")


def _broken(why: str) -> LinkError:
    return LinkError(f"the link to a neighbour is broken: {why}")
