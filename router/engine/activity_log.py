"""The activity log of a pipeline: its recent micro-batches, and how long clients waited for tokens.
Bounded.

The response of ``GET /activity`` is built from the models. All times are in seconds.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice, repeat
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from tramontane.proto.step import MicroBatch, StepResult
from tramontane.proto.timing import steady_time
from tramontane.router.engine.active_request import ActiveRequest

# number of kept records, one for a micro-batch and one for each of its stages: 4000 micro-batches
# of four stages, 300 of sixty-four
MAX_RECORDS = 20_000
MAX_RETURNED = 1000  # micro-batches in one response
MAX_WAITS = 4096  # waits for first tokens, and for further tokens
SHARE_SPAN_S, NEW_SPAN_S, WAIT_SPAN_S = 10.0, 5.0, 60.0


StageWork = tuple[int, float, float, float]  # a stage's entry in ``MicroBatchActivity.stages``


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StageInfo(_Model):
    """A stage and its label for people."""

    label: str
    stage: int


class Percentiles(_Model):
    """Percentiles of the last minute."""

    p50: float
    p95: float


class MicroBatchActivity(_Model):
    """A completed micro-batch.

    ``stages`` has for each stage its number, the start of its work by its own clock (since 1970),
    and the seconds of computing and of the whole work.
    """

    number: int
    step: int
    epoch: int
    prefill_tokens: int
    decodes: int
    stages: list[StageWork]


class PipelineActivity(_Model):
    """The activity of one pipeline.

    ``busy``, a share for each stage, and ``tokens_per_s`` are of the last ten seconds;
    ``prefix_cache_queries``, ``prefix_cache_hits``, ``draft_tokens`` and ``accepted_tokens`` count
    tokens since the router began; ``last`` is for the next ``after``.
    """

    name: str
    stages: list[StageInfo]
    busy: list[float]
    tokens_per_s: float
    running: int
    waiting: int
    pages_held: int
    pages: int
    pages_cached: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    draft_tokens: int = 0  # a router of an older version has none
    accepted_tokens: int = 0
    epoch: int
    recoveries: int
    first_token_s: Percentiles | None
    inter_token_s: Percentiles | None
    micro_batches: list[MicroBatchActivity]
    last: int


class Activity(_Model):
    """The activity of all pipelines; ``now`` is by the clock of the ingress (since 1970)."""

    now: float
    pipelines: list[PipelineActivity]


class MicroBatchRecord(NamedTuple):
    """A micro-batch that was completed ``at`` this time of the router's clock (since 1970); see
    ``MicroBatchActivity``.

    ``number`` counts from 1.
    """

    number: int
    step: int
    epoch: int
    prefill_tokens: int
    decodes: int
    stages: list[StageWork]
    at: float
    num_sampled: int


class ActivityLog:
    """The log of one pipeline, which may outlive its router. Shares and percentiles are computed on
    request, not in a step.
    """

    def __init__(self, clock: Callable[[], float] = steady_time) -> None:
        self._clock = clock
        self._started_at = clock()
        self._batches: deque[MicroBatchRecord] = deque()
        self._num_records = self._number = 0
        self._first_tokens: deque[tuple[float, float]] = deque(maxlen=MAX_WAITS)  # (time, wait)
        self._later_tokens: deque[tuple[float, float]] = deque(maxlen=MAX_WAITS)

    def record(self, batch: MicroBatch, result: StepResult) -> None:
        """Record a completed micro-batch."""
        self._number += 1
        prefill_tokens = sum([len(chunk.token_ids) for chunk in batch.chunks])
        works = [
            (t.stage_id, t.started_at, t.busy_s, max(t.busy_s, t.elapsed_s)) for t in result.timings
        ]
        work = prefill_tokens, len(batch.decodes.seq_ids), works
        record = MicroBatchRecord(
            self._number, batch.step_id, batch.epoch, *work, self._clock(), result.num_sampled
        )
        self._batches.append(record)
        self._num_records += 1 + len(works)
        while self._num_records > MAX_RECORDS:
            self._num_records -= 1 + len(self._batches.popleft().stages)

    def record_tokens(self, requests: Iterable[ActiveRequest], now: float) -> None:
        """Record that these requests are about to get tokens; ``now`` is by the clock of the
        requests' own times.

        The time between tokens counts only for requests of a single sequence: with several
        sequences it cannot be attributed to one of them.
        """
        at, first, later = self._clock(), [], []
        for request in requests:
            if request.last_token_at == math.inf:
                first.append(now - request.arrived_at)
            elif request.is_single:
                later.append(now - request.last_token_at)
        self._first_tokens.extend(zip(repeat(at), first))
        self._later_tokens.extend(zip(repeat(at), later))

    def as_data(self, num_stages: int, after: int | None = None) -> dict[str, Any]:
        """Return the fields of ``PipelineActivity`` that this log has.

        ``after`` is the number of the last micro-batch that the client knows; the oldest of the
        later micro-batches are returned. Without ``after``, or if the log is newer than the
        client's number, the micro-batches of the last five seconds are returned.
        """
        now = self._clock()
        batches = self._select(now, after)
        return {
            **self._shares(now, num_stages),
            "first_token_s": _percentiles(self._first_tokens, now),
            "inter_token_s": _percentiles(self._later_tokens, now),
            "micro_batches": [
                MicroBatchActivity.model_validate(batch, from_attributes=True) for batch in batches
            ],
            "last": batches[-1].number if batches else self._number,
        }

    def _select(self, now: float, after: int | None) -> list[MicroBatchRecord]:
        if after is None or after > self._number:
            return self._since(now - NEW_SPAN_S)[-MAX_RETURNED:]
        num_known = max(len(self._batches) - (self._number - after), 0)
        return list(islice(self._batches, num_known, num_known + MAX_RETURNED))

    def _shares(self, now: float, num_stages: int) -> dict[str, Any]:
        """Return shares of the last ten seconds, or of the time that the log covers, at least one
        second.

        Micro-batches that were completed in this time count as a whole.
        """
        has_dropped = bool(self._batches) and self._batches[0].number > 1
        span_s = max(
            min(SHARE_SPAN_S, now - (self._batches[0].at if has_dropped else self._started_at)), 1.0
        )
        recent, busy_s = self._since(now - SHARE_SPAN_S), [0.0] * num_stages
        for stage_id, _, stage_busy_s, _ in chain.from_iterable(batch.stages for batch in recent):
            busy_s[stage_id] += stage_busy_s
        num_sampled = sum(batch.num_sampled for batch in recent)
        return {
            "busy": [min(seconds / span_s, 1.0) for seconds in busy_s],
            "tokens_per_s": num_sampled / span_s,
        }

    def _since(self, at: float) -> list[MicroBatchRecord]:
        """Return the micro-batches that were completed after this time, oldest first."""
        found = []
        for batch in reversed(self._batches):
            if batch.at <= at:
                break
            found.append(batch)
        return found[::-1]


def _percentiles(waits: Sequence[tuple[float, float]], now: float) -> Percentiles | None:
    """Return percentiles of the last minute by nearest rank: of 1, 2, 3 and 4 half are at most 2,
    and 95% at most 4.
    """
    recent = sorted(seconds for at, seconds in waits if at > now - WAIT_SPAN_S)
    if not recent:
        return None
    p50, p95 = (recent[math.ceil(len(recent) * percent / 100) - 1] for percent in (50, 95))
    return Percentiles(p50=p50, p95=p95)
