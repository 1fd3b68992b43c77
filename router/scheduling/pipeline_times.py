"""Which times the cost model learns of a pipeline, and what they say of a micro-batch as a whole."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tramontane.proto.step import StageTiming

Seconds = NDArray[np.float64]


class PipelineTimes:
    """Columns of the cost model: what each stage computes; and, where experts are on actors of their own, what the busiest
    of those does for all stages together, and how long each stage waits for them where it does nothing else.

    Two stages compute 2 and 3 ms, experts 4 ms in all, answers take 3 and 3 ms: columns [2, 3, 4, 3, 3], the slowest takes 4,
    the way through is 2 + 3 + 3 + 3 = 11.
    """

    def __init__(self, num_stages: int, has_expert_actors: bool) -> None:
        self._num_stages, self._has_expert_actors = num_stages, has_expert_actors

    @property
    def num_columns(self) -> int:
        return 2 * self._num_stages + 1 if self._has_expert_actors else self._num_stages

    def columns(self, timings: Sequence[StageTiming]) -> list[float]:
        """Of one micro-batch, in seconds."""
        busy = [timing.busy_s for timing in timings]
        if not self._has_expert_actors:
            return busy
        return [*busy, sum(timing.experts_busy_s for timing in timings), *(timing.asked_s for timing in timings)]

    def slowest_and_through(self, times_WC: Seconds) -> tuple[Seconds, Seconds]:
        """For each micro-batch: how long it keeps whoever has most to do, and how long it takes from one end to the other."""
        stages_WS, rest = times_WC[:, : self._num_stages], times_WC[:, self._num_stages :]
        through_W: Seconds = stages_WS.sum(axis=1) + rest[:, 1:].sum(axis=1)
        slowest_W: Seconds = times_WC[:, : self._num_stages + 1].max(axis=1)
        return slowest_W, through_W
