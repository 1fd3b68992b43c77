"""Times of one step of a stage, and what its expert actors did."""

import time
from collections import Counter
from typing import TypeVar

from tramontane.proto.step import ExpertTiming, StageTiming
from tramontane.workers.device.events import DeviceEvent, RecordEvent
from tramontane.workers.experts.remote_experts import PendingExpertCall
from tramontane.workers.experts.remote_forward import StepCoroutine

T = TypeVar("T")


class StepTimer:
    """The clock of one step, which is made when the step begins. Written by the thread that computes the step.

    ``make_event``: for a device that computes asynchronously. Its time counts then, from ``start`` to ``stop``, and not the
    host's.
    """

    def __init__(self, make_event: RecordEvent | None = None) -> None:
        self._make_event = make_event
        self._first: DeviceEvent | None = None
        self._last: DeviceEvent | None = None
        self._started_at = time.time()
        self._began = self._resumed = time.perf_counter()
        self._busy_s = self._expert_wait_s = self._experts_busy_s = 0.0
        self._actors_busy_s: Counter[int] = Counter()
        self._actors_rows: Counter[int] = Counter()

    def start(self) -> None:
        """Mark the start of the device's work: the inputs are on their way, and host preparation before does not count."""
        self._first = self._make_event() if self._make_event else None

    def exclude_waits(self, layers: StepCoroutine[T]) -> StepCoroutine[T]:
        """Run a coroutine, and leave the time between yield and resumption out of the busy time."""
        try:
            while True:
                call = next(layers)
                self._busy_s += time.perf_counter() - self._resumed
                yield call
                self._resumed = time.perf_counter()
        except StopIteration as end:
            value: T = end.value
            return value

    def record_usage(self, call: PendingExpertCall) -> None:
        """Add what the expert actors did for one layer."""
        usage = call.usage
        self._expert_wait_s += usage.wait_s
        self._experts_busy_s += max((each.busy_s for each in usage.actors), default=0.0)
        for actor_id, busy_s, num_rows in usage.actors:
            self._actors_busy_s[actor_id] += busy_s  # type: ignore[assignment]
            self._actors_rows[actor_id] += num_rows

    def stop(self) -> None:
        """Mark the end of the step: all its work has been launched."""
        self._last = self._make_event() if self._make_event else None
        self._busy_s += time.perf_counter() - self._resumed

    def timing(self, stage_id: int, num_tokens: int) -> StageTiming:
        """Return the times of the step. Waits for the device, and raises its errors."""
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
            self._expert_wait_s,
            self._experts_busy_s,
            tuple(ExpertTiming(actor, busy_s, self._actors_rows[actor]) for actor, busy_s in self._actors_busy_s.items()),
        )
