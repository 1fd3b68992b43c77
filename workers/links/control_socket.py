"""Small messages between the two ends of a channel whose tensors use another transport. It also
detects a dead neighbor.
"""

import contextlib
import select
import socket
import threading
from typing import Any

import msgpack

from tramontane.proto.errors import LinkError
from tramontane.workers.links.tcp_channel import configure_socket

LENGTH_BYTES = 4
CLOSE_FRAME = bytes(LENGTH_BYTES)  # a message of length 0
MAX_BYTES = 2**16
HUP_EVENTS = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)


class ControlSocket:
    """A connection for messages. One thread sends or receives; ``close`` and the methods after it
    may be called from any other.

    It ends in three steps: ``close`` notifies the neighbor, ``shutdown_write`` means that this end
    no longer uses resources of the neighbor, and ``wait_peer_closed`` returns when the neighbor has
    done the same or is dead.
    """

    def __init__(self, connection: socket.socket) -> None:
        configure_socket(connection)
        self.connection = connection
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._read_lock, self._write_lock = threading.Lock(), threading.Lock()
        self._is_closed = self._is_teardown_claimed = False

    def send(self, message: object) -> None:
        """Send plain data. Raises LinkError if the neighbor is gone or the socket is closed."""
        packed: bytes = msgpack.packb(message)
        assert len(packed) <= MAX_BYTES
        with self._write_lock:
            if self._is_closed:
                raise LinkError("the link to a neighbor is closed")
            try:
                self.connection.sendall(len(packed).to_bytes(LENGTH_BYTES, "big") + packed)
            except OSError as error:
                raise _broken(str(error)) from error

    def receive(self, timeout_s: float | None = None) -> Any:  # the neighbor's message
        """Receive a message. Raises as ``send`` does, and LinkError after ``timeout_s`` without a
        byte.

        Messages of a dead neighbor that have not been received are lost.
        """
        with self._read_lock:
            length = int.from_bytes(self._read(LENGTH_BYTES, timeout_s), "big")
            if not 0 < length <= MAX_BYTES:
                raise _broken(
                    "it was closed"
                    if not length
                    else f"a message of {length} bytes exceeds {MAX_BYTES}"
                )
            return msgpack.unpackb(self._read(length, timeout_s))

    def close(self) -> None:
        """Notify the neighbor, and wake the thread that waits in ``receive``."""
        with self._write_lock:
            if self._is_closed:
                return
            self._is_closed = True
            with contextlib.suppress(OSError):
                self.connection.send(CLOSE_FRAME, socket.MSG_DONTWAIT)
            self._wake_writer.send(b".")

    def claim_teardown(self) -> bool:
        """Return True to the first caller after ``close``, which then has to release the
        resources.
        """
        with self._write_lock:
            is_first, self._is_teardown_claimed = not self._is_teardown_claimed, True
            return is_first

    def has_peer_ended(self) -> bool:
        """Return True once the neighbor has shut down its end or is dead. Does not block."""
        poll = select.poll()
        poll.register(self.connection, HUP_EVENTS)
        return bool(poll.poll(0))

    def shutdown_write(self) -> None:
        """Notify the neighbor that this end no longer uses its resources."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)

    def wait_peer_closed(self) -> None:
        """Wait until the neighbor has shut down its end or is dead, however long that takes, and
        close the socket.
        """
        with contextlib.suppress(OSError):
            while self.connection.recv(MAX_BYTES):
                pass
        self.close_fds()

    def close_fds(self) -> None:
        """Close the file descriptors of a closed socket, without waiting for the neighbor."""
        with self._read_lock, self._write_lock:  # ``close`` has woken the threads that held them
            for end in (self.connection, self._wake_reader, self._wake_writer):
                end.close()

    def detach(self) -> socket.socket:
        """Give up the connection for another use. This object must not be used afterwards."""
        self._wake_reader.close()
        self._wake_writer.close()
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
            raise LinkError("the link to a neighbor is closed")
        poll = select.poll()
        poll.register(self.connection, select.POLLIN | HUP_EVENTS)
        poll.register(self._wake_reader, select.POLLIN)
        ready = dict(poll.poll(None if timeout_s is None else timeout_s * 1000))
        if self._wake_reader.fileno() in ready:
            raise LinkError("the link to a neighbor is closed")
        if not ready:
            raise _broken(f"nothing was received for {timeout_s:.0f} s")
        if ready[self.connection.fileno()] & HUP_EVENTS:
            raise _broken("it was closed")


def _broken(reason: str) -> LinkError:
    return LinkError(f"the link to a neighbor is broken: {reason}")
