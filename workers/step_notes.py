"""What is to be told of one step of a stage beside its outcome: its times, what its experts did and who chose them."""

import time
from collections import Counter
from typing import TypeVar

from torch import Tensor

from tramontane.proto.ports import AskedExperts
from tramontane.proto.step import ExpertTiming, StageTiming
from tramontane.workers.chosen_experts import NOBODY_ASKS
from tramontane.workers.waiting import Waiting

T = TypeVar("T")


class StepNotes:
    """Made when the step begins. The thread that computes it writes them."""

    def __init__(self) -> None:
        self._started_at = time.time()
        self._began = self._resumed = time.perf_counter()
        self._busy_s = self._asked_s = self._experts_busy_s = 0.0
        self._actors_busy_s: Counter[int] = Counter()
        self._actors_rows: Counter[int] = Counter()
        self.experts = NOBODY_ASKS

    def timed(self, waiting: Waiting[T]) -> Waiting[T]:
        """The same, whose waiting does not count as work."""
        try:
            while True:
                asked = next(waiting)
                self._busy_s += time.perf_counter() - self._resumed
                yield asked
                self._resumed = time.perf_counter()
        except StopIteration as end:
            value: T = end.value
            return value

    def chosen(self, layer: int, expert_ids_Tk: Tensor) -> None:
        """Which experts this layer's tokens have chosen."""
        self.experts.keep(layer, expert_ids_Tk)

    def answered(self, asked: AskedExperts) -> None:
        """All experts of a layer have done their part."""
        usage = asked.usage
        self._asked_s += usage.asked_s
        self._experts_busy_s += max((each.busy_s for each in usage.actors), default=0.0)
        for actor_id, busy_s, num_rows in usage.actors:
            self._actors_busy_s[actor_id] += busy_s  # type: ignore[assignment]
            self._actors_rows[actor_id] += num_rows

    def timing(self, stage_id: int, num_tokens: int) -> StageTiming:
        """Of the step, which ends now."""
        now = time.perf_counter()
        return StageTiming(
            stage_id,
            self._started_at,
            self._busy_s + now - self._resumed,
            num_tokens,
            now - self._began,
            self._asked_s,
            self._experts_busy_s,
            tuple(ExpertTiming(actor, busy_s, self._actors_rows[actor]) for actor, busy_s in self._actors_busy_s.items()),
        )
