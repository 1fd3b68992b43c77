"""The number of micro-batches that work is spread over, and of micro-batches in flight, from
predicted and measured times.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from tramontane.proto.step import StageTiming
from tramontane.router.scheduling.cost_model import OUTLIER_CLIP

# decodes are cut into more micro-batches only if a round then takes at most this share of the time
MAX_ROUND_RATIO = 0.97
# a number of groups is not tried if its predicted round takes more than this multiple of the best
# one
MAX_TRIAL_COST = 2.0
TRIAL_ROUNDS = 3  # rounds of one trial
# rounds until a number of groups is tried again; doubled each time that it is not the best
RETRY_ROUNDS = 128
MAX_DRAFTED = 64  # micro-batches with drafts after which a trial is abandoned
SMOOTHING = 0.3  # weight of the newest correction

# of the slowest stage's busy time; above it another micro-batch is allowed in flight
MAX_IDLE_SHARE = 0.03
SATURATED_SHARE = 0.9  # of the time in which the last stage is busy
SATURATION_DECAY = 0.98  # the state 35 micro-batches ago counts half
# decrease of the remaining pieces with each piece: 1 makes the next pieces less even
COUNTDOWN = 0.5
ADJUST_EVERY = 4  # micro-batches per stage
NUM_GAPS = 4  # gaps between steps that are kept; the shortest counts
MEASURE_AGAIN_AFTER = 512  # asynchronously submitted steps


@dataclass
class _GroupStats:
    """Ratio of measured to predicted time for one number of groups, and the time of its next
    trial.
    """

    ratio: float = 1.0
    is_tried: bool = False
    retry_rounds: int = RETRY_ROUNDS
    rounds_left: int = 0


@dataclass
class _Span:
    """Consecutive micro-batches of one number of groups that have left the last stage: seconds,
    measured and predicted.
    """

    decode_groups: int
    measured: list[float] = field(default_factory=list)
    predicted: list[float] = field(default_factory=list)

    def ratio(self) -> float:
        """Return the median over rounds of measured to predicted time, which ignores a single
        delayed round.

        Two groups, measured 1, 3, 1, 3603, 1 and 3, predicted 2 each: rounds of 4, 3604 and 4
        against 4, so the median ratio is 1.
        """
        bounds = range(0, len(self.measured), self.decode_groups)
        return median(
            sum(self.measured[i : i + self.decode_groups])
            / max(sum(self.predicted[i : i + self.decode_groups]), 1e-9)
            for i in bounds
        )


class GroupTuner:
    """Chooses m, the number of groups that a round's decodes are divided into; each group is a
    micro-batch.

    Predicted times include the compute times of the stages, but neither the effect of shared cores
    nor the time between stages. So every m has a ratio of measured to predicted time, and promising
    numbers are tried from time to time.
    """

    def __init__(self) -> None:
        self._known: dict[int, _GroupStats] = {}
        # the number of groups on trial, and the micro-batches left of the trial
        self._trial: tuple[int, int] | None = None
        self._num_drafted = 0  # micro-batches of the trial
        self._span: _Span | None = None
        self._last_end = 0.0

    def choose(self, round_s_by_groups: Mapping[int, float]) -> int:
        """Return the m to use now, from the predicted seconds of a round with each."""
        if self._trial is not None and self._trial[0] in round_s_by_groups:
            return self._trial[0]
        corrected = {m: seconds * self._stats(m).ratio for m, seconds in round_s_by_groups.items()}
        fastest = min(corrected.values())
        best = min(m for m, seconds in corrected.items() if seconds * MAX_ROUND_RATIO <= fastest)
        due = [
            m
            for m in round_s_by_groups
            if m != best
            and self._is_due(m)
            and round_s_by_groups[m] <= MAX_TRIAL_COST * round_s_by_groups[best]
        ]
        if not due or not self._stats(best).is_tried:
            return best
        chosen = self._stats(due[0])
        chosen.retry_rounds *= 2 if chosen.is_tried else 1
        self._num_drafted = 0
        # micro-batches of the previous m are still in flight
        self._trial = due[0], TRIAL_ROUNDS * due[0] + best
        return due[0]

    def observe(
        self,
        decode_groups: int,
        predicted_round_s: float,
        ended_at: float,
        *,
        has_drafts: bool = False,
    ) -> None:
        """Record that a micro-batch of decodes has left the last stage; ``decode_groups`` is 0 for
        a micro-batch with prompts or drafts.

        A trial waits for prompts to end. It is given up after some micro-batches with drafts, as
        sequences may draft for as long as they run.
        """
        elapsed, self._last_end = ended_at - self._last_end, ended_at
        if self._trial is not None and has_drafts:
            self._count_drafted(self._stats(self._trial[0]))
        if self._span is None or self._span.decode_groups != decode_groups or not decode_groups:
            self._span = _Span(decode_groups) if decode_groups else None
            return
        self._span.measured.append(elapsed)
        self._span.predicted.append(predicted_round_s / decode_groups)
        if self._trial is not None:
            self._trial = (self._trial[0], self._trial[1] - 1) if self._trial[1] > 1 else None
        if len(self._span.measured) >= TRIAL_ROUNDS * decode_groups:
            self._learn(decode_groups, self._span.ratio())
            self._span = _Span(decode_groups)

    def restart(self) -> None:
        """Reset the end of the last micro-batch: a stage may be another process since, with another
        clock.
        """
        self._span = None

    def _count_drafted(self, on_trial: _GroupStats) -> None:
        self._num_drafted += 1
        if self._num_drafted >= MAX_DRAFTED:
            self._trial, on_trial.rounds_left = None, on_trial.retry_rounds

    def _learn(self, decode_groups: int, ratio: float) -> None:
        """Update a ratio. A new ratio counts as at least a third of the current one and, after the
        first, as at most three times the current one.

        So it stays above 0 for any clocks of the stages. The first ratio may be large: where steps
        take a millisecond, the time between them is many times as long.
        """
        stats = self._stats(decode_groups)
        ratio = max(ratio, stats.ratio / OUTLIER_CLIP)
        ratio = min(ratio, stats.ratio * OUTLIER_CLIP) if stats.is_tried else ratio
        stats.ratio = stats.ratio + SMOOTHING * (ratio - stats.ratio) if stats.is_tried else ratio
        for other, each in self._known.items():
            each.rounds_left -= TRIAL_ROUNDS if other != decode_groups else 0
        stats.is_tried, stats.rounds_left = True, stats.retry_rounds

    def _is_due(self, decode_groups: int) -> bool:
        return self._stats(decode_groups).rounds_left <= 0

    def _stats(self, decode_groups: int) -> _GroupStats:
        return self._known.setdefault(decode_groups, _GroupStats())


class HostGap:
    """Measures how long the stages wait for the next step if it is submitted after the tokens of
    the last step are known.

    There is one stage, or several on one machine that take turns. The wait is from the end of the
    last stage to the start of the first.

    Asynchronous steps hide this time. They also make a request that arrives wait for one step more,
    and waste one row for each sequence that ends with a stop token, so they must pay: 1.5 ms saved
    do so in a step of 20 ms, and not in one of 200 ms. Only a step that is submitted to an idle
    pipeline shows the gap. The shortest of the last gaps counts, as the router may have been busy.
    """

    def __init__(self) -> None:
        self._last_end = 0.0
        self._gaps_s = deque[float](maxlen=NUM_GAPS)
        self._num_without = 0  # steps since the last one that has shown the gap

    def is_long(self, step_s: float) -> bool:
        """Return whether the stages wait for a significant share of the time. False until
        ``NUM_GAPS`` gaps have been measured.
        """
        return len(self._gaps_s) == NUM_GAPS and min(self._gaps_s) > MAX_IDLE_SHARE * step_s

    def observe(self, timings: Sequence[StageTiming], *, pipeline_was_idle: bool) -> None:
        """Record a step, with the timings of its stages in order.

        ``pipeline_was_idle``: the step was submitted after the previous step had returned, and
        continues its decodes.
        """
        self._num_without += 1
        if pipeline_was_idle and self._last_end:
            self._gaps_s.append(max(timings[0].started_at - self._last_end, 0.0))
            self._num_without = 0
        elif self._num_without >= MEASURE_AGAIN_AFTER:
            self._gaps_s.clear()
        self._last_end = timings[-1].ended_at

    def restart(self) -> None:
        """See ``GroupTuner``."""
        self._last_end = 0.0


class InFlightTuner:
    """Measures M, the number of micro-batches in flight, at most ``limit``, that keeps the slowest
    stage busy.

    A wait counts as at most ``OUTLIER_CLIP`` times the micro-batch's time in all stages, so that an
    hour without requests or a clock jump does not distort it.
    """

    def __init__(self, num_stages: int, limit: int) -> None:
        self._num_stages, self._limit = num_stages, limit
        self.max_in_flight = min(num_stages + 1, limit)
        self.has_more_to_do = False
        self._last_end = [0.0] * num_stages
        self._busy, self._idle = [0.0] * num_stages, [0.0] * num_stages
        self._num_observed = 0
        # seconds of the last stage, with exponential decay
        self._recently_busy, self._recently_idle = 0.0, 0.0

    @property
    def is_saturated(self) -> bool:
        """Whether the last stage hardly ever waits."""
        return self._recently_busy > SATURATED_SHARE * (self._recently_busy + self._recently_idle)

    def observe(self, timings: Sequence[StageTiming]) -> None:
        """Record the timings of one micro-batch in every stage."""
        longest_wait_s = OUTLIER_CLIP * sum(
            max(timing.busy_s, timing.elapsed_s) for timing in timings
        )
        for timing in timings:
            stage = timing.stage_id
            self._busy[stage] += timing.busy_s
            # With several micro-batches open in a stage, it was idle for the time between two ends
            # that was not work.
            gap = (
                max(timing.ended_at - self._last_end[stage] - timing.busy_s, 0.0)
                if self._last_end[stage]
                else 0.0
            )
            gap = min(gap, longest_wait_s)
            self._idle[stage] += gap if self.has_more_to_do else 0.0
            if stage == self._num_stages - 1:
                self._recently_busy = SATURATION_DECAY * self._recently_busy + timing.busy_s
                self._recently_idle = SATURATION_DECAY * self._recently_idle + gap
            self._last_end[stage] = timing.ended_at
        self._num_observed += 1
        if self._num_observed < ADJUST_EVERY * self._num_stages:
            return
        slowest = max(range(self._num_stages), key=self._busy.__getitem__)
        if self._idle[slowest] > MAX_IDLE_SHARE * self._busy[slowest]:
            self.max_in_flight = min(self.max_in_flight + 1, self._limit)
        self._busy, self._idle, self._num_observed = (
            [0.0] * self._num_stages,
            [0.0] * self._num_stages,
            0,
        )

    def restart(self) -> None:
        """See ``GroupTuner``."""
        self._last_end = [0.0] * self._num_stages


class PromptPieces:
    """The number of micro-batches that waiting prompts are still spread over: it falls with each,
    and rises when other prompts arrive.

    160 tokens in 4 pieces: 40 are taken. 120 are left in 3.5, rounded up to 4: 30 are taken. With
    90 left in 3 pieces, and 90 new tokens in 4, (90 * 3 + 90 * 4) / 180 = 3.5, again 4: 45 are
    taken. Always taking a fourth of the remaining tokens would make ever smaller pieces, each of
    which reads all weights.
    """

    def __init__(self) -> None:
        self._num_left, self._pieces_left = 0, 1.0

    def pieces(self, pending: int, pieces_of_new: int) -> int:
        """Return the number of pieces for ``pending`` tokens, whose new ones are cut into
        ``pieces_of_new``.
        """
        num_left = min(self._num_left, pending)
        self._pieces_left = (
            num_left * self._pieces_left + (pending - num_left) * pieces_of_new
        ) / pending
        return max(math.ceil(self._pieces_left), 1)

    def clear(self) -> None:
        """Count all waiting tokens as new: other micro-batches may have taken some of them."""
        self._num_left = 0

    def record(self, pending: int, taken: int) -> None:
        """Record that this number of the pending tokens is submitted now."""
        self._num_left, self._pieces_left = (
            max(pending - taken, 0),
            max(self._pieces_left - COUNTDOWN, 1.0),
        )
