"""What the steps of one router have come to: plain numbers that only grow, for whoever watches, in whichever thread.

Values that were seen of late, until whoever watches takes them.
"""

from collections import deque
from itertools import pairwise

from tramontane.proto.step import MicroBatch, StageTiming, StepResult

MAX_SAMPLES = (
    200  # that are kept between two looks, which is enough for percentiles: telling of one may cost more than it took to see
)


class SampleBuffer:
    """One thread adds, another one takes. Where too many come in between, the oldest are forgotten."""

    def __init__(self, max_samples: int = MAX_SAMPLES) -> None:
        self._values: deque[float] = deque(maxlen=max_samples)
        self.add = self._values.append

    def take(self) -> list[float]:
        """All that are there now, the oldest first."""
        taken = []
        for _ in range(len(self._values)):  # not those that come meanwhile
            taken.append(self._values.popleft())
        return taken


class PipelineStats:
    """By the router's clock, but what stages did by their own.

    ``active_s``: in which any micro-batch was in flight. What of it a stage did not work is its waiting, and all stages' waiting
    together the bubble. ``hops_s``, by the stage that they lead to: from when a stage had ended a micro-batch and the next one
    was free to when that began it; as good as the stages' clocks agree, and never below 0.
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
        if self._active_since is None:
            self._active_since = now

    def on_complete(self, batch: MicroBatch, result: StepResult, now: float, num_in_flight: int) -> None:
        """The oldest; so many are in flight still."""
        assert self._active_since is not None
        self.active_s += now - self._active_since
        self._active_since = now if num_in_flight else None
        decodes = len(batch.decodes.seq_ids)
        tokens = batch.num_tokens
        self.num_micro_batches += 1
        self.prefill_tokens += tokens - decodes
        self.decode_tokens += decodes
        self.micro_batch_tokens.add(tokens)
        self._note(result.timings)

    def reset(self) -> None:
        """Nothing is in flight any more. What it would have taken is part of a recovery, not of work."""
        self._active_since = None

    def waiting_s(self, stage_id: int) -> float:
        """Of ``active_s``, without having worked. Stages' clocks and the router's differ, so it may go back by a little."""
        return max(self.active_s - self.busy_s[stage_id], 0.0)

    def _note(self, timings: tuple[StageTiming, ...]) -> None:
        for earlier, later in pairwise(timings):
            free_at = max(earlier.ended_at, self._last_end[later.stage_id])
            self.hops_s[later.stage_id].add(max(later.started_at - free_at, 0.0))
        for timing in timings:
            self.busy_s[timing.stage_id] += timing.busy_s
            self.stage_tokens[timing.stage_id] += timing.num_tokens
            self._last_end[timing.stage_id] = timing.ended_at
