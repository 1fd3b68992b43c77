"""Micro-batches in flight: submission, results in order, and the deadline that reveals a hang."""

import asyncio
import math
from collections import deque
from collections.abc import Callable

from tramontane.proto.errors import PipelineError
from tramontane.proto.ports import StageChain
from tramontane.proto.step import MicroBatch, StepResult
from tramontane.proto.timing import HANG_WATCH_INTERVAL_S
from tramontane.router.engine.stats import PipelineStats

# limit as a multiple of the slowest recent time: a slow micro-batch is not given up
SLOW_FACTOR = 4.0
SLOWEST_DECAY = 0.99  # factor of the slowest time with each micro-batch that is completed
# factor of the limit for the first micro-batch: kernels are tuned, memory is laid out
FIRST_FACTOR = 4.0
RECHECK_S = 1.0  # wait after a check has found that a stage still computes or loads


class StepDeadline:
    """The deadline of the oldest micro-batch of one pipeline; all times are given by the caller.

    A micro-batch's time counts from its submission or the completion of the micro-batch before it,
    whichever was later: in a pipeline of four stages, four micro-batches that were submitted
    together return one after the other, and the time of each counts from the one before.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._slowest_s = 0.0
        self._num_done = 0
        self._waiting_since: float | None = None  # None: no micro-batch is in flight

    @property
    def limit_s(self) -> float:
        """Time that a micro-batch may take. Timeout 30 s: 120 s for the first, then 30 s; 40 s
        after one that took 10 s.
        """
        if not self._num_done:
            return FIRST_FACTOR * self._timeout_s
        return max(self._timeout_s, SLOW_FACTOR * self._slowest_s)

    def on_submit(self, now: float) -> None:
        """Start the time if no other micro-batch is in flight."""
        if self._waiting_since is None:
            self._waiting_since = now

    def on_complete(self, now: float, num_in_flight: int) -> None:
        """Record that the oldest micro-batch is completed; ``num_in_flight`` are left."""
        assert self._waiting_since is not None
        self._slowest_s = max(SLOWEST_DECAY * self._slowest_s, now - self._waiting_since)
        self._num_done += 1
        self._waiting_since = now if num_in_flight else None

    def reset(self) -> None:
        """Record that no micro-batch is in flight any more."""
        self._waiting_since = None

    def overdue_s(self, now: float) -> float:
        """Return by how much the oldest micro-batch has exceeded its limit; negative while it has
        time.
        """
        return (
            -math.inf if self._waiting_since is None else now - self._waiting_since - self.limit_s
        )


class InFlightBatches:
    """The micro-batches of one pipeline, oldest first. ``on_result`` is called whenever one is
    completed or has failed.
    """

    def __init__(
        self,
        chain: StageChain,
        timeout_s: float,
        clock: Callable[[], float],
        on_result: Callable[[], None],
        stats: PipelineStats,
    ) -> None:
        self._chain = chain
        self._stats = stats
        self._clock = clock
        self._on_result = on_result
        self._batches: deque[tuple[MicroBatch, asyncio.Future[StepResult]]] = deque()
        self._deadline = StepDeadline(timeout_s)

    @property
    def oldest(self) -> MicroBatch | None:
        """The oldest micro-batch in flight."""
        return self._batches[0][0] if self._batches else None

    @property
    def step_limit_s(self) -> float:
        """The time that a micro-batch may take now, before the stages are checked for a hang."""
        return self._deadline.limit_s

    def submit(self, batch: MicroBatch) -> None:
        """Send a micro-batch down the chain."""
        future = asyncio.ensure_future(self._chain.submit(batch))
        future.add_done_callback(lambda _: self._on_result())
        self._batches.append((batch, future))
        now = self._clock()
        self._deadline.on_submit(now)
        self._stats.on_submit(now)

    def pop_completed(self) -> tuple[MicroBatch, StepResult] | None:
        """Remove and return the oldest micro-batch if it is completed: results come in the order of
        submission.

        Raises PipelineError if it has failed; the micro-batch then stays the oldest, so that the
        failure can be attributed to it.
        """
        if not self._batches or not self._batches[0][1].done():
            return None
        batch, future = self._batches[0]
        result = future.result()
        self._batches.popleft()
        now, num_left = self._clock(), len(self._batches)
        self._deadline.on_complete(now, num_left)
        self._stats.on_complete(batch, result, now, num_left)
        return batch, result

    def cancel_all(self) -> None:
        """Cancel and drop all micro-batches."""
        for _, future in self._batches:
            if not future.cancel() and not future.cancelled():
                future.exception()  # asyncio would log an exception that is never retrieved
        self._batches.clear()
        self._deadline.reset()
        self._stats.reset()

    async def watch_for_hang(self) -> PipelineError:
        """Return once a hung process had to be replaced. Polls, because a timer for each step would
        cost more.
        """
        while True:
            await asyncio.sleep(HANG_WATCH_INTERVAL_S)
            if self._deadline.overdue_s(self._clock()) > 0:
                if reason := await self._chain.replace_hung_workers(self._deadline.limit_s):
                    return PipelineError(reason)
                await asyncio.sleep(RECHECK_S)
