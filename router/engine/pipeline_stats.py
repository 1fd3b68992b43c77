"""Statistics of one pipeline's steps: plain numbers that only grow, read by exporters in any
thread.
"""

from collections import deque
from itertools import pairwise

from tramontane.proto.step import MicroBatch, StepResult

# Samples kept between two exports. It is enough for percentiles, and exporting a sample may cost
# more than observing it.
MAX_SAMPLES = 200


class SampleBuffer:
    """Samples that one thread adds and another one takes; the oldest are dropped where too many
    come in between.
    """

    def __init__(self, max_samples: int = MAX_SAMPLES) -> None:
        self._values: deque[float] = deque(maxlen=max_samples)
        self.add = self._values.append

    def take(self) -> list[float]:
        """Remove and return all samples that are there now, the oldest first."""
        # not those that are added during the loop
        return [self._values.popleft() for _ in range(len(self._values))]


class PipelineStats:
    """Sums over the steps of one router, by its clock; times inside stages are by the stages' own
    clocks.

    ``active_s`` is the time in which any micro-batch was in flight. The part of it in which a stage
    did not work is its waiting time, and the waiting of all stages together is the bubble.
    ``hops_s``, by the stage that a hop leads to, is the time from when a stage had ended a
    micro-batch and the next stage was free to when that one began it; it is as good as the stages'
    clocks agree, and never below 0.
    """

    def __init__(self, num_stages: int) -> None:
        self.active_s = 0.0
        self.busy_s = [0.0] * num_stages
        self.stage_tokens = [0] * num_stages
        self.num_micro_batches = self.prefill_tokens = self.decode_tokens = 0
        self.micro_batch_tokens = SampleBuffer()
        self.hops_s = [SampleBuffer() for _ in range(num_stages)]
        self._last_end = [0.0] * num_stages
        self._active_since: float | None = None

    def on_submit(self, now: float) -> None:
        """Record a submission."""
        if self._active_since is None:
            self._active_since = now

    def on_complete(
        self, batch: MicroBatch, result: StepResult, now: float, num_in_flight: int
    ) -> None:
        """Record that the oldest micro-batch is completed; so many are still in flight."""
        assert self._active_since is not None
        self.active_s += now - self._active_since
        self._active_since = now if num_in_flight else None
        decodes = len(batch.decodes.seq_ids)
        tokens = batch.num_tokens
        self.num_micro_batches += 1
        self.prefill_tokens += tokens - decodes
        self.decode_tokens += decodes
        self.micro_batch_tokens.add(tokens)
        for earlier, later in pairwise(result.timings):
            free_at = max(earlier.ended_at, self._last_end[later.stage_id])
            self.hops_s[later.stage_id].add(max(later.started_at - free_at, 0.0))
        for timing in result.timings:
            self.busy_s[timing.stage_id] += timing.busy_s
            self.stage_tokens[timing.stage_id] += timing.num_tokens
            self._last_end[timing.stage_id] = timing.ended_at

    def reset(self) -> None:
        """Record that nothing is in flight any more; the time since the last result is part of a
        recovery, not of work.
        """
        self._active_since = None

    def waiting_s(self, stage_id: int) -> float:
        """Return the part of ``active_s`` in which a stage did not work. As clocks differ, it may
        decrease slightly.
        """
        return max(self.active_s - self.busy_s[stage_id], 0.0)
