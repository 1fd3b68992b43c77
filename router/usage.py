"""How busy the stages were, from the stages' own clocks."""

from collections.abc import Iterable
from dataclasses import dataclass

from tramontane.proto.step import StageTiming, StepResult


@dataclass(frozen=True, slots=True)
class StageUsage:
    busy_s: float
    num_tokens: int
    num_batches: int


class UsageMeter:
    """Sums of every stage's timings since it was made."""

    def __init__(self, num_stages: int) -> None:
        self._stages = [StageUsage(0.0, 0, 0) for _ in range(num_stages)]
        self._first_start, self._last_end = float("inf"), float("-inf")
        self.num_sampled = 0

    def observe(self, result: StepResult) -> None:
        self.num_sampled += len(result.tokens)
        for timing in result.timings:
            old = self._stages[timing.stage_id]
            self._stages[timing.stage_id] = StageUsage(
                old.busy_s + timing.busy_s, old.num_tokens + timing.num_tokens, old.num_batches + 1
            )
            self._first_start = min(self._first_start, timing.started_at)
            self._last_end = max(self._last_end, timing.ended_at)

    @property
    def stages(self) -> tuple[StageUsage, ...]:
        return tuple(self._stages)

    @property
    def span_s(self) -> float:
        """From the first stage's first start to the last end of any."""
        return max(self._last_end - self._first_start, 0.0)

    def busy_share(self, stage_id: int) -> float:
        return self._stages[stage_id].busy_s / self.span_s if self.span_s else 0.0

    @property
    def bubble(self) -> float:
        """Share of all stages' time in which they had nothing to do."""
        return 1 - sum(self.busy_share(i) for i in range(len(self._stages))) / len(self._stages) if self.span_s else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.num_sampled / self.span_s if self.span_s else 0.0


def overlap_share(timings: Iterable[StageTiming]) -> float:
    """Time in which at least two stages worked, over the time in which at least one did.

    Stage 0 busy 0..2, stage 1 busy 1..3: two at once during 1..2, one at least during 0..3: 1/3.
    """
    edges = sorted(edge for t in timings for edge in ((t.started_at, 1), (t.ended_at, -1)))
    busy = overlapped = 0.0
    working, since = 0, 0.0
    for at, change in edges:
        busy += (at - since) if working >= 1 else 0.0
        overlapped += (at - since) if working >= 2 else 0.0
        working, since = working + change, at
    return overlapped / busy if busy else 0.0
