"""Progress of a router, and the outcome of its recoveries: for health checks and metrics."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

# this number of recoveries in a row, without a micro-batch between them, counts as progress
MAX_FAILED_RECOVERIES = 5


@dataclass(frozen=True, slots=True)
class Recovery:
    """One recovery of a pipeline; all times are by the router's clock."""

    reason: str
    seen_at: float
    fenced_at: float | None = None  # from this time on all live requests are computed again
    resumed_at: float | None = None  # time of the first token of any request


@dataclass(frozen=True, slots=True)
class PipelineHealth:
    """What becomes of a request that arrives now, and why.

    ``ready``: it is worked on at once. ``degraded``: it is accepted, and waits until the pipeline
    is ready again. ``unavailable``: it may be refused. ``since_s``: for how long it has been so.
    """

    status: Literal["ready", "degraded", "unavailable"]
    reason: str = ""
    since_s: float = 0.0

    @property
    def is_serving(self) -> bool:
        """Whether requests are accepted and will be answered."""
        return self.status != "unavailable"


class HealthTracker:
    """The progress of one router, by its clock. ``previous``: the tracker of an earlier router of
    the same pipeline, whose failed recoveries are counted too.
    """

    def __init__(self, clock: Callable[[], float], previous: "HealthTracker | None" = None) -> None:
        self._clock = clock
        # last progress, or last time of idleness
        self._progress_at: float = previous._progress_at if previous else clock()
        # recoveries since the last completed micro-batch
        self._num_failed: int = previous._num_failed if previous else 0
        self.is_fenced = self.has_begun = False
        self.num_recoveries = 0
        # seconds from the detection of each failure to the first token after it, summed
        self.paused_s = 0.0
        self.last_recovery: Recovery | None = None

    @property
    def now(self) -> float:
        """The time by the router's clock."""
        return self._clock()

    @property
    def is_failing(self) -> bool:
        """Whether the pipeline has failed since the last completed micro-batch."""
        return self._num_failed > 0

    def on_batch_done(self) -> None:
        """Record that a micro-batch has been completed."""
        self._num_failed = 0
        self._progress_at = self._clock()

    def record_progress(self) -> float:
        """Record other progress, or that no work is pending; return the time. See
        ``MAX_FAILED_RECOVERIES``.
        """
        now = self._clock()
        if self._num_failed <= MAX_FAILED_RECOVERIES:
            self._progress_at = now
        return now

    def on_fenced(self) -> None:
        """Record that the stages have accepted a new epoch and work can begin."""
        self.is_fenced = self.has_begun = True
        now = self.record_progress()
        if self.last_recovery is not None and self.last_recovery.fenced_at is None:
            self.last_recovery = replace(self.last_recovery, fenced_at=now)

    def on_failure(self, reason: str) -> None:
        """Record a failure after which the stages must be fenced again."""
        self.is_fenced = False
        self._num_failed += 1
        now = self.record_progress()
        self.num_recoveries += 1
        self.last_recovery = Recovery(reason, now)

    def on_tokens(self) -> None:
        """Record that tokens were emitted: the last recovery is over."""
        if self.last_recovery is not None and self.last_recovery.resumed_at is None:
            now = self._clock()
            self.paused_s += now - self.last_recovery.seen_at
            self.last_recovery = replace(self.last_recovery, resumed_at=now)

    def progressed_within(self, limit_s: float) -> bool:
        """Return whether the last progress is less than this time ago."""
        return self._clock() - self._progress_at < limit_s
