"""What a door knows, without asking anybody, of whether routers would take more."""

import asyncio

from tramontane.proto.errors import FullError, OverloadedError

RETRY_AFTER_S = 5
FULL_FOR_S = 0.25  # that routers are full is believed for so long, unless a request ends before


class Room:
    """``max_unaccepted``: sequences that may be on their way to a router. Where no router is running they
    would wait in Ray Serve, which has no bound and no end to its patience.
    """

    def __init__(self, max_unaccepted: int) -> None:
        self._max_unaccepted = max_unaccepted
        self.unaccepted: dict[int, int] = {}  # sequences, by request
        self.num_waiting = 0  # sequences of requests that wait until a router can be asked again
        self._full: dict[int, tuple[FullError, float]] = {}  # what all routers said, and until when it holds, by owner

    def check(self, num_sequences: int, owner: int) -> None:
        """Raises OverloadedError. What routers have said is an answer for those who come soon after, too."""
        on_their_way = sum(self.unaccepted.values()) + self.num_waiting
        if num_sequences <= self._max_unaccepted < on_their_way + num_sequences:  # what is larger is refused for good, by others
            raise OverloadedError("too many requests are on their way to a pipeline", RETRY_AFTER_S)
        error, until = self._full.get(owner, (None, 0.0))
        if error is not None and asyncio.get_running_loop().time() < until:
            raise FullError(str(error), error.retry_after_s)
        self._full.pop(owner, None)

    def is_full(self, owner: int, error: FullError) -> None:
        """As all routers have just said."""
        self._full[owner] = error, asyncio.get_running_loop().time() + FULL_FOR_S

    def left(self, number: int) -> None:
        """A request is with no router any more. It had a place, or stood in the way of others, if one had accepted it."""
        if self.unaccepted.pop(number, None) is None:
            self._full.clear()
