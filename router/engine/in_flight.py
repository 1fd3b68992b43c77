"""Micro-batches that are on their way through the pipeline, and by when they must be back.

By when a micro-batch must have come back, and since when nothing has.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable

from tramontane.proto.errors import PipelineError
from tramontane.proto.ports import StageChain
from tramontane.proto.step import MicroBatch, StepResult
from tramontane.router.engine.pipeline_stats import PipelineStats

SLOW_FACTOR = 4.0  # times the slowest micro-batch so far: what is only slow is not given up
FORGETTING = 0.99  # what counts of the slowest one with each that comes back
FIRST_FACTOR = 4.0  # times the limit for the first one: kernels are chosen, memory is laid out


class StepDeadline:
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

    def on_submit(self, now: float) -> None:
        if self._waiting_since is None:
            self._waiting_since = now

    def on_complete(self, now: float, num_in_flight: int) -> None:
        """The oldest; so many are in flight still."""
        assert self._waiting_since is not None
        self._slowest_s = max(FORGETTING * self._slowest_s, now - self._waiting_since)
        self._num_done += 1
        self._waiting_since = now if num_in_flight else None

    def reset(self) -> None:
        """Nothing is in flight any more."""
        self._waiting_since = None

    def overdue_s(self, now: float) -> float:
        """How long the oldest one has taken too long; negative while it has time."""
        return -math.inf if self._waiting_since is None else now - self._waiting_since - self.limit_s


WATCH_EVERY_S = 0.2
RECHECK_S = 1.0  # where somebody was computing or loading still


class InFlightBatches:
    """Of one pipeline, oldest first. ``on_result`` is called whenever one of them has come back, or failed."""

    def __init__(
        self,
        chain: StageChain,
        timeout_s: float,
        clock: Callable[[], float],
        on_result: Callable[[], None],
        counts: PipelineStats,
    ) -> None:
        self._chain = chain
        self._counts = counts
        self._clock = clock
        self._on_result = on_result
        self._batches: deque[tuple[MicroBatch, asyncio.Future[StepResult]]] = deque()
        self._watch = StepDeadline(timeout_s)

    @property
    def oldest(self) -> MicroBatch | None:
        return self._batches[0][0] if self._batches else None

    @property
    def step_limit_s(self) -> float:
        """What a micro-batch may take now, before the stages are looked at."""
        return self._watch.limit_s

    def submit(self, batch: MicroBatch) -> None:
        future = asyncio.ensure_future(self._chain.submit(batch))
        future.add_done_callback(lambda _: self._on_result())
        self._batches.append((batch, future))
        now = self._clock()
        self._watch.on_submit(now)
        self._counts.on_submit(now)

    def pop_completed(self) -> tuple[MicroBatch, StepResult] | None:
        """The oldest, if it has come back: results come in the order of submission.

        Raises PipelineError if it has failed; it then stays, as the one to look at.
        """
        if not self._batches or not self._batches[0][1].done():
            return None
        batch, future = self._batches[0]
        result = future.result()
        self._batches.popleft()
        now, num_left = self._clock(), len(self._batches)
        self._watch.on_complete(now, num_left)
        self._counts.on_complete(batch, result, now, num_left)
        return batch, result

    def cancel_all(self) -> None:
        """Nobody waits for them any more."""
        for _, future in self._batches:
            if not future.cancel() and not future.cancelled():
                future.exception()  # looked at, or asyncio would log it
        self._batches.clear()
        self._watch.reset()
        self._counts.reset()

    async def watch_for_hang(self) -> PipelineError:
        """Returns once something that stood still had to be replaced. Looks now and then: no timer for each step."""
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            if self._watch.overdue_s(self._clock()) > 0:
                if reason := await self._chain.replace_hung_workers(self._watch.limit_s):
                    return PipelineError(reason)
                await asyncio.sleep(RECHECK_S)
