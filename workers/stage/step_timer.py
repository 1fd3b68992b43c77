"""What is to be told of one step of a stage beside its outcome: its times, what its experts did and who chose them."""

import time
from collections import Counter
from typing import TypeVar

from torch import Tensor

from tramontane.proto.ports import PendingExperts
from tramontane.proto.step import ExpertTiming, StageTiming
from tramontane.workers.device.events import DeviceEvent, RecordEvent
from tramontane.workers.model.transformer import StepCoroutine
from tramontane.workers.stage.expert_choices import NO_RECORDER

T = TypeVar("T")


class StepTimer:
    """Made when the step begins. The thread that computes it writes them, but for what is read at the end.

    ``mark``: for a device that does later what it is asked for. Its time counts then, not the host's: from ``begins``.
    """

    def __init__(self, mark: RecordEvent | None = None) -> None:
        self._mark = mark
        self._first: DeviceEvent | None = None
        self._last: DeviceEvent | None = None
        self._started_at = time.time()
        self._began = self._resumed = time.perf_counter()
        self._busy_s = self._asked_s = self._experts_busy_s = 0.0
        self._actors_busy_s: Counter[int] = Counter()
        self._actors_rows: Counter[int] = Counter()
        self.experts = NO_RECORDER

    def start(self) -> None:
        """What the step computes from is on its way to the device: what the host had to prepare is no time of the device."""
        self._first = self._mark() if self._mark else None

    def exclude_waits(self, waiting: StepCoroutine[T]) -> StepCoroutine[T]:
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

    def record_choices(self, layer: int, expert_ids_Tk: Tensor) -> None:
        """Which experts this layer's tokens have chosen."""
        self.experts.record(layer, expert_ids_Tk)

    def record_usage(self, asked: PendingExperts) -> None:
        """All experts of a layer have done their part."""
        usage = asked.usage
        self._asked_s += usage.wait_s
        self._experts_busy_s += max((each.busy_s for each in usage.actors), default=0.0)
        for actor_id, busy_s, num_rows in usage.actors:
            self._actors_busy_s[actor_id] += busy_s  # type: ignore[assignment]
            self._actors_rows[actor_id] += num_rows

    def stop(self) -> None:
        """All that the step wants has been asked for."""
        self._last = self._mark() if self._mark else None
        self._busy_s += time.perf_counter() - self._resumed

    def timing(self, stage_id: int, num_tokens: int) -> StageTiming:
        """Of the step. Waits for the device; raises what has failed there."""
        open_s = time.perf_counter() - self._began
        if self._first is not None and self._last is not None:
            self._last.wait()
            self._busy_s = open_s = self._last.seconds_since(self._first)
            self._started_at = time.time() - open_s
        return StageTiming(
            stage_id,
            self._started_at,
            self._busy_s,
            num_tokens,
            open_s,
            self._asked_s,
            self._experts_busy_s,
            tuple(ExpertTiming(actor, busy_s, self._actors_rows[actor]) for actor, busy_s in self._actors_busy_s.items()),
        )
