"""Whether a router gets on, and what kept it: for health checks, and for those who measure."""

from collections.abc import Callable
from dataclasses import dataclass, replace

MAX_FAILED_RECOVERIES = 5  # recoveries in a row, without a micro-batch between them, that count as getting on


@dataclass(frozen=True, slots=True)
class Recovery:
    """Of one pipeline that failed. All times are the router's clock's."""

    reason: str
    seen_at: float
    fenced_at: float | None = None  # from then on what was alive is computed again
    resumed_at: float | None = None  # with the first token of anybody


class HealthTracker:
    """Of one router. By its clock, which is told to nobody else.

    ``before``: of the router that drove the same pipeline before this one, which does not make it any better.
    """

    def __init__(self, clock: Callable[[], float], previous: "HealthTracker | None" = None) -> None:
        self._clock = clock
        self._at: float = previous._at if previous else clock()  # when something was last done, or there was last nothing to do
        self._num_fruitless: int = previous._num_fruitless if previous else 0
        self.is_fenced = self.has_begun = False
        self.num_recoveries = 0
        self.paused_s = 0.0  # in recoveries, from what was seen of the failure to the first token after it
        self.last_recovery: Recovery | None = None

    @property
    def now(self) -> float:
        """By the router's clock."""
        return self._clock()

    @property
    def is_failing(self) -> bool:
        """Whether the pipeline has failed since the last micro-batch that came back."""
        return self._num_fruitless > 0

    def on_batch_done(self) -> None:
        """A micro-batch did."""
        self._num_fruitless = 0
        self._at = self._clock()

    def record_progress(self) -> float:
        """Something else was done, or there is nothing to do. No matter where nothing ever comes of it. Returns the time."""
        now = self._clock()
        if self._num_fruitless <= MAX_FAILED_RECOVERIES:
            self._at = now
        return now

    def on_fenced(self) -> None:
        """The stages obey; work can begin."""
        self.is_fenced = self.has_begun = True
        now = self.record_progress()
        if self.last_recovery is not None and self.last_recovery.fenced_at is None:
            self.last_recovery = replace(self.last_recovery, fenced_at=now)

    def on_failure(self, reason: str) -> None:
        """The stages must be fenced anew."""
        self.is_fenced = False
        self._num_fruitless += 1
        now = self.record_progress()
        self.num_recoveries += 1
        self.last_recovery = Recovery(reason, now)

    def on_tokens(self) -> None:
        if self.last_recovery is not None and self.last_recovery.resumed_at is None:
            now = self._clock()
            self.paused_s += now - self.last_recovery.seen_at
            self.last_recovery = replace(self.last_recovery, resumed_at=now)

    def progressed_within(self, limit_s: float) -> bool:
        return self._clock() - self._at < limit_s
