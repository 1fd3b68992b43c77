"""By when a micro-batch must have come back, and since when nothing has."""

import math

SLOW_FACTOR = 4.0  # times the slowest micro-batch so far: what is only slow is not given up
FORGETTING = 0.99  # what counts of the slowest one with each that comes back
FIRST_FACTOR = 4.0  # times the limit for the first one: kernels are chosen, memory is laid out


class StepWatch:
    """Of one pipeline, by whatever clock it is told of.

    A micro-batch's time counts from when it was submitted or the one before it came back, whichever was later: in a
    pipeline of four stages, four that were submitted together come back one after the other, each in its own time.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._slowest_s = 0.0
        self._num_done = 0
        self._waiting_since: float | None = None  # None: nothing is in flight

    @property
    def limit_s(self) -> float:
        """Of a timeout of 30 s: 30 s where none took longer than 7.5, 40 s after one of 10; 120 s for the first one of all."""
        if not self._num_done:
            return FIRST_FACTOR * self._timeout_s
        return max(self._timeout_s, SLOW_FACTOR * self._slowest_s)

    def submitted(self, now: float) -> None:
        if self._waiting_since is None:
            self._waiting_since = now

    def came_back(self, now: float, num_in_flight: int) -> None:
        """The oldest; so many are in flight still."""
        assert self._waiting_since is not None
        self._slowest_s = max(FORGETTING * self._slowest_s, now - self._waiting_since)
        self._num_done += 1
        self._waiting_since = now if num_in_flight else None

    def forget(self) -> None:
        """Nothing is in flight any more."""
        self._waiting_since = None

    def overdue_s(self, now: float) -> float:
        """How long the oldest one has taken too long; negative while it has time."""
        return -math.inf if self._waiting_since is None else now - self._waiting_since - self.limit_s
