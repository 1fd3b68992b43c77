"""Statistics of one pipeline's steps: plain counters, read by exporters in any thread."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from tramontane.proto.step import ExpertTiming, MicroBatch, StageTiming, StepResult

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
        # without the samples that are added during the loop
        return [self._values.popleft() for _ in range(len(self._values))]


class PipelineStats:
    """Sums over the steps of one router, by its clock; times inside stages are by the stages' own
    clocks.

    ``active_s`` is the time in which any micro-batch was in flight. The part of it in which a stage
    did not work is the stage's waiting time, and the waiting of all stages together is the bubble.
    ``hops_s``, by the stage that a hop leads to: the hop begins when a stage has ended a
    micro-batch and the next stage is free, and ends when the next stage begins the micro-batch. Its
    time is as exact as the stages' clocks agree, and never below 0.
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
        """Record that the oldest micro-batch is completed; ``num_in_flight`` are left."""
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
        """Record that no micro-batch is in flight; the time since the last result is part of a
        recovery, not of work.
        """
        self._active_since = None

    def waiting_s(self, stage_id: int) -> float:
        """Return the part of ``active_s`` in which a stage did not work. As clocks differ, it may
        decrease slightly.
        """
        return max(self.active_s - self.busy_s[stage_id], 0.0)


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Cache pages of one window class, of each stage that has such layers. ``num_cached``: free
    pages that hold prefixes. ``window``: positions, None for all.
    """

    window: int | None
    num_pages: int
    num_free: int
    num_cached: int


@dataclass(frozen=True, slots=True)
class PipelineSnapshot:
    """The state of one pipeline's router and scheduler at a moment, and their counts since the
    router began; for metrics, ``/activity`` and tests. See ``Router.snapshot``.
    """

    epoch: int
    num_running: int  # sequences
    num_waiting: int
    pages: tuple[PageCounts, ...]
    num_steps: int
    num_preempted: int
    num_prefix_queries: int  # tokens of prompts that were looked up among cached prefixes
    num_prefix_hits: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_recoveries: int
    paused_s: float
    policy_failure: str

    @property
    def num_pages(self) -> int:
        """Pages of all window classes."""
        return sum(each.num_pages for each in self.pages)

    @property
    def num_pages_held(self) -> int:
        """Pages that sequences hold."""
        return sum(each.num_pages - each.num_free for each in self.pages)

    @property
    def num_pages_cached(self) -> int:
        """Pages that no sequence holds, with prefixes."""
        return sum(each.num_cached for each in self.pages)


# Utilization of the stages, by the stages' own clocks.


@dataclass(frozen=True, slots=True)
class StageUsage:
    """Sums over the micro-batches of one stage."""

    busy_s: float = 0.0
    num_tokens: int = 0
    num_batches: int = 0
    open_s: float = 0.0  # time with any micro-batch in progress; several at once count once
    # time of waiting for experts, summed over micro-batches
    expert_wait_s: float = 0.0
    last_end: float = float("-inf")

    @property
    def exposed_wait_s(self) -> float:
        """Time with a micro-batch and nothing to compute: the part of the wait for experts that
        ping-pong did not hide.
        """
        return max(self.open_s - self.busy_s, 0.0)

    def add(self, timing: StageTiming) -> "StageUsage":
        """Return the sums with one further micro-batch. Steps end in their order: steps from 0 s to
        3 s and from 1 s to 4 s are open for 3 s, and then for 1 s more.
        """
        return StageUsage(
            self.busy_s + timing.busy_s,
            self.num_tokens + timing.num_tokens,
            self.num_batches + 1,
            self.open_s + timing.ended_at - max(timing.started_at, self.last_end),
            self.expert_wait_s + timing.expert_wait_s,
            timing.ended_at,
        )


class UsageMeter:
    """Sums of the timings of every stage and of every expert actor since the meter was made."""

    def __init__(self, num_stages: int) -> None:
        self._stages = [StageUsage() for _ in range(num_stages)]
        self._experts: dict[int, ExpertTiming] = {}
        self._first_start, self._last_end = float("inf"), float("-inf")
        self.num_sampled = 0

    def observe(self, result: StepResult) -> None:
        """Add the timings of one micro-batch."""
        self.num_sampled += result.num_sampled
        for timing in result.timings:
            self._stages[timing.stage_id] = self._stages[timing.stage_id].add(timing)
            for actor_id, busy_s, num_rows in timing.experts:
                _, sum_s, sum_rows = self._experts.get(actor_id, ExpertTiming(actor_id, 0.0, 0))
                self._experts[actor_id] = ExpertTiming(
                    actor_id, sum_s + busy_s, sum_rows + num_rows
                )
            self._first_start = min(self._first_start, timing.started_at)
            self._last_end = max(self._last_end, timing.ended_at)

    @property
    def stages(self) -> tuple[StageUsage, ...]:
        """The sums of each stage."""
        return tuple(self._stages)

    @property
    def experts(self) -> tuple[ExpertTiming, ...]:
        """The sums of each expert actor; empty where experts are inside the stages."""
        return tuple(self._experts[actor_id] for actor_id in sorted(self._experts))

    @property
    def span_s(self) -> float:
        """Time from the first start of any stage to the last end of any."""
        return max(self._last_end - self._first_start, 0.0)

    def busy_share(self, stage_id: int) -> float:
        """Return the share of the time in which a stage computed."""
        return self.share(self._stages[stage_id].busy_s)

    def share(self, seconds: float) -> float:
        """Return seconds as a share of ``span_s``."""
        return seconds / self.span_s if self.span_s else 0.0

    @property
    def bubble(self) -> float:
        """Share of all stages' time in which they did not compute."""
        return (
            1 - sum(self.busy_share(i) for i in range(len(self._stages))) / len(self._stages)
            if self.span_s
            else 0.0
        )

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens per second."""
        return self.num_sampled / self.span_s if self.span_s else 0.0


@dataclass(frozen=True, slots=True)
class HopTime:
    """Times from the end of a stage's work on a micro-batch to the start of the next stage's.

    Where the next stage was still busy the time includes the wait for it, so the smallest time is
    closest to the transfer itself.
    """

    min_s: float
    median_s: float


def hop_times(steps: Sequence[Sequence[StageTiming]]) -> tuple[HopTime, ...]:
    """Return the time of every hop, from the timings of each step in the order of stages; as exact
    as the stages' clocks agree.

    Stage 0 busy 0..2 and 4..5, stage 1 busy 3..4 and 7..8: stage 1 began 1 s and 2 s later, so the
    minimum is 1 s and the median 1.5 s.
    """
    hops = zip(
        *(
            [later.started_at - earlier.ended_at for earlier, later in pairwise(step)]
            for step in steps
        ),
        strict=True,
    )
    return tuple(HopTime(min(gaps), median(gaps)) for gaps in hops)
