"""What a door knows, without asking anybody, of whether routers would take more."""

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tramontane.proto.errors import FullError, OverloadedError

LONGEST_RETRY_S = 60  # nobody is sent away for longer: a pipeline that loads may be there before
FULL_FOR_S = 0.25  # that routers are full is believed for so long, unless a request ends before


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that no router is known to work on."""

    num_sequences: int
    since: float  # by the event loop's clock


class Room:
    """``max_unaccepted``: sequences that may be on their way to a router. Where no router is running they
    would wait in Ray Serve, which has no bound and no end to its patience.
    """

    def __init__(self, max_unaccepted: int) -> None:
        self._max_unaccepted = max_unaccepted
        self.unaccepted: dict[int, Waiting] = {}  # by request
        self._pausing: list[Waiting] = []  # requests that wait until a router can be asked again
        self._full: dict[int, tuple[FullError, float]] = {}  # what all routers said, and until when it holds, by owner

    def check(self, num_sequences: int, owner: int) -> None:
        """Raises OverloadedError. What routers have said is an answer for those who come soon after, too."""
        waiting = (*self.unaccepted.values(), *self._pausing)
        on_their_way = sum(each.num_sequences for each in waiting)
        if num_sequences <= self._max_unaccepted < on_their_way + num_sequences:  # what is larger is refused for good, by others
            oldest = min(each.since for each in waiting)
            raise OverloadedError("too many requests are on their way to a pipeline", _retry_after_s(oldest))
        error, until = self._full.get(owner, (None, 0.0))
        if error is not None and asyncio.get_running_loop().time() < until:
            raise FullError(str(error), error.retry_after_s)
        self._full.pop(owner, None)

    @contextmanager
    def pausing(self, request: Waiting) -> Iterator[None]:
        """While this block waits until a router can be asked again."""
        self._pausing.append(request)
        try:
            yield
        finally:
            self._pausing.remove(request)

    def is_full(self, owner: int, error: FullError) -> None:
        """As all routers have just said."""
        self._full[owner] = error, asyncio.get_running_loop().time() + FULL_FOR_S

    def left(self, number: int) -> None:
        """A request is with no router any more. It had a place, or stood in the way of others, if one had accepted it."""
        if self.unaccepted.pop(number, None) is None:
            self._full.clear()


def _retry_after_s(since: float) -> int:
    """As long as the one that waits longest has waited by now, in whole seconds: 0.2 s give 1, 12.3 s give 13, 100 s give 60."""
    waited_s = math.ceil(asyncio.get_running_loop().time() - since)
    return min(max(1, waited_s), LONGEST_RETRY_S)
