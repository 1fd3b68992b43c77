"""Channels: the connection between two processes that the direct link needs, over any transport."""

from datetime import timedelta
from typing import Protocol

from torch import Tensor

# host, port, and a secret token that proves that the peer was given the address
Address = tuple[str, int, str]

CONNECT_TIMEOUT = timedelta(seconds=20)
MAX_PENDING_SENDS = 2  # micro-batches that wait to be sent; then ``send`` blocks


class Channel(Protocol):
    """One end of a one-way connection, used by one thread.

    ``send`` and ``receive`` raise LinkError if the neighbor is gone or the channel is closed.
    """

    def send(self, hidden_TD: Tensor) -> None:
        """Begin to send; the tensor may still be on its way when this returns."""

    def receive(self, hidden_TD: Tensor) -> None:
        """Receive the next tensor into this one. Both ends know its size from the micro-batch."""

    def close(self) -> None:
        """Close this end, from any thread; the neighbor's next or current call fails."""


class Listener(Protocol):
    """The end of a channel that waits for the other one.

    Its methods raise OSError or RuntimeError if the other end does not connect.
    """

    @property
    def address(self) -> Address:
        """The address to connect to."""

    def accept(self) -> Channel:
        """Wait for the other end."""

    def close(self) -> None:
        """Stop listening, from any thread."""


class ChannelFactory(Protocol):
    """A way to make channels."""

    def listen(self, host: str) -> Listener:
        """Listen at ``host``, and at no other address."""

    def connect(self, address: Address, host: str, /) -> Channel:
        """Connect to a listener, from ``host``. Raises as a listener does."""
