"""What the direct link asks of the way from one stage to the next, whatever carries it."""

from datetime import timedelta
from typing import Protocol

from torch import Tensor

Address = tuple[str, int, str]  # host, port, and a word that only who was told it knows

CONNECT_TIMEOUT = timedelta(seconds=20)
MAX_PENDING_SENDS = 2  # micro-batches that wait to be sent; then computing waits


class Channel(Protocol):
    """One thread sends or receives. Both raise LinkError where the neighbour is gone, or the edge is closed."""

    def send(self, hidden_TD: Tensor) -> None:
        """Returns while it is still on its way."""

    def receive(self, hidden_TD: Tensor) -> None:
        """Into this: what comes next from the stage before, of a size that both know from the micro-batch."""

    def close(self) -> None:
        """From any thread; the neighbour hears of it at once."""


class Listener(Protocol):
    """The end of an edge that waits for the other one. Its methods raise OSError or RuntimeError where that does not come."""

    @property
    def address(self) -> Address: ...

    def accept(self) -> Channel: ...

    def close(self) -> None:
        """From any thread."""


class ChannelFactory(Protocol):
    """One way of making edges."""

    def listen(self, host: str) -> Listener:
        """``host`` is the only address at which anything listens."""

    def connect(self, address: Address, host: str, /) -> Channel:
        """To who listens there, from ``host``. Raises as a listener does."""
