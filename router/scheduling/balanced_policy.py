"""The default policy: micro-batches that take every stage equally long, just as many as keep all
stages busy.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

import numpy as np

from tramontane.proto.step import StageTiming
from tramontane.router.scheduling.cost_model import OUTLIER_CLIP, CostColumns, CostModel, Seconds
from tramontane.router.scheduling.policy import (
    NEVER,
    BatchBudget,
    BatchWork,
    FixedInFlightPolicy,
    SchedulerState,
    assumed_seconds,
    has_prompts,
    reserved_for_prefill,
)
from tramontane.router.scheduling.round_times import (
    GroupTuner,
    HostGap,
    InFlightTuner,
    PromptPieces,
)

# Floor and margin of a draft's break-even probability: a fit of few times may find that a row costs
# nothing.
MIN_BREAK_EVEN, BREAK_EVEN_MARGIN = 0.02, 1.2
# Decodes are treated as equal while their keys take at most this share of their other time.
MAX_KEY_TIME_SHARE = 0.2
TRANSIT_GROWTH = 1.01  # growth per micro-batch: the shortest transit time counts half after 70
MIN_CHUNK = 8  # prompt tokens that accompany decodes however tight the latency target is
SPREAD_ROUNDS = 4  # rounds over which waiting prompts are spread while sequences decode


@dataclass(frozen=True, slots=True)
class PrefillCut:
    """A way to cut the waiting prompts: into ``num_pieces`` micro-batches of up to ``size`` prompt
    tokens each. ``work``: the work of one of these micro-batches, with its decodes.
    """

    num_pieces: int
    size: int
    work: BatchWork


class BalancedPolicy:
    """Chooses the contents of a micro-batch by predicted times, once some micro-batches have been
    timed.

    * M, the number of micro-batches in flight, begins at stages + 1 and grows to at most twice the
      number of stages while the slowest stage is observed to wait although there is more to do.
      Where stages take turns at the same processors, M is the number of stages that can work at
      once.
    * Decodes without prompts are spread over the fewest micro-batches that make a round shortest.
      With one micro-batch, the stages take turns; where a stage takes as long for half of the
      tokens, splitting gains nothing. Predictions are verified by measurement.
    * Prompts are cut so that the last piece is finished soonest. n pieces take n - 1 times the
      slowest stage's time (or 1/M of the time through all stages, where that is longer), plus the
      time through all stages once. Pieces are sized so that all their micro-batches take the same
      time, decodes included.
    * Prompts that are more urgent than a running sequence do not share micro-batches with other
      prompts, and are always cut to be finished soonest.
    * With a target for the time between a sequence's tokens, a round of M micro-batches may not
      take longer.
    * With asynchronous scheduling, where one stage computes at a time, every micro-batch has all
      decodes. The next micro-batch is submitted during the computation of the current one if the
      stages would otherwise wait for a significant share of the time (``HostGap``).
    """

    overlaps_chunks = True

    def __init__(
        self,
        num_stages: int,
        max_tokens: int,
        itl_target_s: float | None = None,
        stages_at_once: int | None = None,
        open_per_stage: int | None = None,
        async_scheduling: bool = False,
    ) -> None:
        at_once = num_stages if stages_at_once is None else stages_at_once
        assert not async_scheduling or (at_once == 1 and open_per_stage is None)
        self._async_scheduling = async_scheduling
        self._host_gap = HostGap()
        self._num_stages, self._max_tokens, self._itl_target_s = (
            num_stages,
            max_tokens,
            itl_target_s,
        )
        self._columns = CostColumns(num_stages, has_expert_actors=open_per_stage is not None)
        self._cost = CostModel(self._columns.num_columns)
        self._stages_at_once = at_once
        # Whether stages work at the same time, or a stage and its experts, so that it matters how
        # work is cut.
        self._overlaps = at_once > 1 or (open_per_stage or 1) > 1
        limit = (
            (at_once if at_once < num_stages else 2 * num_stages)
            if open_per_stage is None
            else open_per_stage * num_stages
        )
        limit = 2 if async_scheduling else limit  # one is computed, and the next one waits for it
        self._in_flight_tuner = InFlightTuner(num_stages, limit)
        self._untrained = FixedInFlightPolicy(self._in_flight_tuner.max_in_flight, max_tokens)
        self._group_tuner = GroupTuner()
        self._prompt_pieces = PromptPieces()
        # predicted rounds by m, and their key
        self._rounds_cache: tuple[tuple[int, ...], dict[int, float]] = ((), {})
        # of decodes, and the version of the fit
        self._slopes_cache: tuple[int, tuple[float, float]] = (-1, (0.0, 0.0))
        self._group_counts = sorted(
            {2**power for power in range(num_stages.bit_length())} | {num_stages, num_stages + 1}
        )
        self._transit_s: float | None = None  # time of one micro-batch between the stages
        # seconds of decodes by which earlier micro-batches took less than their share
        self._decode_debt = 0.0

    @property
    def max_in_flight(self) -> int:
        """M, as measured so far."""
        return self._in_flight_tuner.max_in_flight

    @property
    def _num_per_round(self) -> int:
        """Micro-batches in which each decoding sequence may have one token."""
        return 1 if self._async_scheduling else self.max_in_flight

    def choose_budget(self, state: SchedulerState) -> BatchBudget | None:
        """See ``Policy``."""
        if state.num_in_flight >= self.max_in_flight:
            self._in_flight_tuner.has_more_to_do = bool(state.num_ready or state.pending_tokens)
            return None
        if not self._cost.is_ready:
            return self._untrained.choose_budget(state)
        if state.pending_tokens:
            decode_groups = self.max_in_flight if self._overlaps else 1
            own = self._decodes(state, decode_groups)
            return BatchBudget(own.decodes, self._prefill(state, decode_groups, own))
        round_s_by_groups = self._round_s_by_groups(state)
        decode_groups = self._group_tuner.choose(round_s_by_groups)
        with_lookahead = self._async_scheduling and self._host_gap.is_long(
            round_s_by_groups[decode_groups]
        )
        if state.num_in_flight >= decode_groups + with_lookahead:
            return None
        pipeline_was_idle = (
            self._async_scheduling and not state.num_in_flight and state.num_ready > 0
        )
        return BatchBudget(
            self._decodes(state, decode_groups).decodes,
            0,
            decode_groups,
            round_s_by_groups[decode_groups],
            pipeline_was_idle,
        )

    def observe(self, budget: BatchBudget, work: BatchWork, timings: Sequence[StageTiming]) -> None:
        """See ``Policy``."""
        if len(timings) == self._num_stages:
            self._cost.observe(work, self._columns.columns(timings))
            self._in_flight_tuner.observe(timings)
            self._observe_transit(timings)
            self._host_gap.observe(timings, pipeline_was_idle=budget.pipeline_was_idle)
            has_drafts = work.decodes > budget.decodes  # the round was predicted without them
            decode_groups = 0 if has_drafts else budget.decode_groups
            self._group_tuner.observe(
                decode_groups, budget.round_s, timings[-1].ended_at, has_drafts=has_drafts
            )

    def restart(self) -> None:
        """See ``Policy``."""
        self._transit_s = None
        for measured in (self._in_flight_tuner, self._host_gap, self._group_tuner):
            measured.restart()

    def _observe_transit(self, timings: Sequence[StageTiming]) -> None:
        """Measure the time between stages, by their clocks. The shortest time counts for a while:
        no stage was waited for then.

        If it exceeds ``OUTLIER_CLIP`` times the time in the stages, a stage waited for it, or
        clocks disagree: then it is unknown.
        """
        longest = OUTLIER_CLIP * sum(max(timing.busy_s, timing.elapsed_s) for timing in timings)
        between = max(
            sum(later.started_at - earlier.ended_at for earlier, later in pairwise(timings)), 0.0
        )
        if between <= longest:
            self._transit_s = (
                between
                if self._transit_s is None
                else min(between, TRANSIT_GROWTH * self._transit_s + 1e-6)
            )

    def seconds(self, work: BatchWork) -> float:
        """See ``Policy``."""
        if not self._cost.is_ready:
            return assumed_seconds(work)
        slowest_2, _ = self._predict([work, BatchWork()])
        return float(slowest_2[0] - slowest_2[1])

    def draft_break_even(self, state: SchedulerState) -> float:
        """See ``Policy``: drafts must not reduce the tokens per second.

        64 streams in one micro-batch of 20 ms, 0.2 ms per row: 0.2 * 64 / 20 = 0.64, and 0.77 with
        the margin. One stream, through the stages in 10 ms, and 0.4 ms more with two rows: 0.04,
        which is raised to the least value.
        """
        if has_prompts(state) or not state.num_decoding:
            return NEVER
        if not self._cost.is_ready:
            return self._untrained.draft_break_even(state)
        round_s_by_groups = self._round_s_by_groups(state)
        decode_groups = min(round_s_by_groups, key=round_s_by_groups.__getitem__)
        num_rows, num_keys = (
            -(-state.num_decoding // decode_groups),
            state.decoding_keys // decode_groups,
        )
        more = BatchWork(0, 0, num_rows + 1, num_keys + num_keys // num_rows)
        slowest_2, through_2 = self._predict([BatchWork(0, 0, num_rows, num_keys), more])
        before, after = map(float, np.maximum(slowest_2 * decode_groups, through_2))
        return max(
            BREAK_EVEN_MARGIN * (after - before) * num_rows / max(before, 1e-9), MIN_BREAK_EVEN
        )

    def lookahead_break_even(self, state: SchedulerState) -> float:
        """See ``Policy``: a stage that would wait computes drafts, and the micro-batches after the
        drafts wait for this stage.

        The slowest stage takes 5 ms, all stages and the hops between them 20 ms. Right drafts gain
        20 ms for their sequences; wrong drafts delay the right tokens by 2.5 ms on average. The
        gain equals the loss at a probability of 2.5 / (2.5 + 20) = 0.11. With as many sequences as
        stages, the stages are busy without drafts.
        """
        num_busy = max(state.num_in_flight + state.num_lookahead, state.num_decoding)
        if num_busy >= self._stages_at_once or has_prompts(state) or not state.num_decoding:
            return NEVER
        if not self._cost.is_ready:
            return self._untrained.lookahead_break_even(state)
        slowest_1, through_1 = self._predict(
            [BatchWork(0, 0, state.num_decoding, state.decoding_keys)]
        )
        slowest, through = float(slowest_1[0]), float(through_1[0]) + (self._transit_s or 0.0)
        return max(slowest / max(slowest + 2 * through, 1e-9), MIN_BREAK_EVEN)

    def _round_s_by_groups(self, state: SchedulerState) -> dict[int, float]:
        """Return the predicted seconds of a round by m groups: round(m) = max(m slowest(D/m), sum
        over stages(D/m)).

        They are computed again after a new fit, for another number of decodes, or when the visible
        keys have changed by 4%.
        """
        widest = max(min(self._num_per_round, state.num_decoding), 1)
        key = (
            self._cost.version,
            widest,
            state.num_decoding,
            int(16 * math.log2(max(state.decoding_keys, 1))),
        )
        if key != self._rounds_cache[0]:
            group_counts = [m for m in self._group_counts if m < widest] + [widest]
            works = [
                BatchWork(0, 0, -(-state.num_decoding // m), state.decoding_keys // m)
                for m in group_counts
            ]
            slowest_M, through_M = self._predict(works)
            rounds = np.maximum(slowest_M * np.array(group_counts), through_M)
            self._rounds_cache = key, dict(zip(group_counts, rounds.tolist(), strict=True))
        return self._rounds_cache[1]

    def _decodes(self, state: SchedulerState, decode_groups: int) -> BatchWork:
        """Return as many ready decodes as give this micro-batch its share of the time of all
        decodes.

        Ten equal decodes over four micro-batches are 2.5 each, so 3, 2, 3 and 2 are taken; the
        excess or deficit is carried over.
        """
        if not state.num_ready:
            return BatchWork()
        per_token, per_key = self._decode_slopes()
        even = (per_token * state.num_decoding + per_key * state.decoding_keys) / decode_groups
        quota, taken, count, num_keys = even + self._decode_debt, 0.0, 0, 0
        max_count = min(
            state.num_ready, self._max_tokens - reserved_for_prefill(state, self._max_tokens)
        )
        if per_key * state.decoding_keys < MAX_KEY_TIME_SHARE * per_token * state.num_decoding:
            keys = state.decoding_keys // state.num_decoding
            cost = per_token + per_key * keys
            count = min(max(round(quota / cost), 1), max_count)
            taken, num_keys = count * cost, count * keys
        else:
            for keys in islice(state.ready_keys, max_count):
                cost = per_token + per_key * keys
                if count and taken + cost / 2 > quota:
                    break
                taken, count, num_keys = taken + cost, count + 1, num_keys + keys
        self._decode_debt = min(max(quota - taken, -even), even) if count < state.num_ready else 0.0
        return BatchWork(decodes=count, decode_keys=num_keys)

    def _decode_slopes(self) -> tuple[float, float]:
        """Return the seconds per decode and per visible key, summed over the stages: only their
        ratio matters.
        """
        if self._slopes_cache[0] != self._cost.version:
            base, token, key = self._predict(
                [BatchWork(), BatchWork(decodes=1), BatchWork(decode_keys=1)]
            )[1]
            self._slopes_cache = (
                self._cost.version,
                (max(float(token - base), 1e-9), max(float(key - base), 0.0)),
            )
        return self._slopes_cache[1]

    def _prefill(self, state: SchedulerState, decode_groups: int, own: BatchWork) -> int:
        """Return the number of prompt tokens that accompany these decodes.

        While the stages are fully loaded, prompts are spread over the next rounds, so that all
        micro-batches are alike: every stage would have to wait for a large one. Otherwise they are
        cut to be finished soonest; where one stage works at a time, they are not cut at all.
        """
        pending = state.urgent_tokens or state.pending_tokens
        is_spread = self._spreads_prompts(state)
        even = own if state.urgent_tokens else _even_share(state, decode_groups)
        cut = self._soonest(self._cuts(state, decode_groups, own, even, is_spread=is_spread))
        size = cut.size
        if state.num_decoding:
            size = size if state.urgent_tokens else self._adjusted(cut, own, even)
            size = self._within_target(size, own, state)
        size = min(size, self._max_tokens - own.decodes)
        if is_spread:
            self._prompt_pieces.record(pending, size)
        else:
            self._prompt_pieces.clear()
        return size

    def _spreads_prompts(self, state: SchedulerState) -> bool:
        """Return whether the stages are fully loaded, and micro-batches in them should be alike."""
        is_full = state.num_decoding and (
            state.waiting_tokens or self._in_flight_tuner.is_saturated
        )
        return bool(self._overlaps and is_full and not state.urgent_tokens)

    def _cuts(
        self,
        state: SchedulerState,
        decode_groups: int,
        own: BatchWork,
        even: BatchWork,
        *,
        is_spread: bool,
    ) -> list[PrefillCut]:
        """Return the ways to cut the prompts: the only one while they are spread, or into the
        fewest micro-batches that have room for them, or a few more.

        500 tokens, 64 decodes, at most 256 tokens in a micro-batch: 3 pieces of 167 at least.
        """
        pending = state.urgent_tokens or state.pending_tokens
        fewest = -(-pending // max(self._max_tokens - max(even.decodes, own.decodes), 1))
        counts: Sequence[int] = range(fewest, fewest + 2 * self._num_stages)
        if is_spread:
            most = min(SPREAD_ROUNDS * decode_groups, pending // MIN_CHUNK)
            counts = [max(fewest, self._prompt_pieces.pieces(pending, most))]
        sizes = [-(-pending // count) for count in counts]
        return [
            PrefillCut(count, size, _with_prefill(even, size, state.prefill_start))
            for count, size in zip(counts, sizes, strict=True)
        ]

    def _soonest(self, cuts: Sequence[PrefillCut]) -> PrefillCut:
        """Return the cut whose last piece is predicted to leave the last stage first.

        Three pieces take two intervals, plus the time of the last piece through all stages. The
        interval is the time of the slowest stage, or the share of a micro-batch in a round.
        """
        slowest, through = self._predict([cut.work for cut in cuts])
        interval = np.maximum(slowest, through / self._num_per_round)
        num_before = np.array([cut.num_pieces for cut in cuts]) - 1
        return cuts[int(np.argmin(num_before * interval + through))]

    def _adjusted(self, cut: PrefillCut, own: BatchWork, even: BatchWork) -> int:
        """Return more prompt tokens where there are fewer decodes than in an even share, fewer
        where there are more.
        """
        nominal_s, even_s, own_s = (float(t) for t in self._predict([cut.work, even, own])[0])
        per_token = (nominal_s - even_s) / cut.size
        return max(cut.size + round((even_s - own_s) / per_token), 1) if per_token > 0 else cut.size

    def _within_target(self, size: int, own: BatchWork, state: SchedulerState) -> int:
        """Return the most prompt tokens, up to ``size``, with which a round of such micro-batches
        keeps the latency target.
        """
        if self._itl_target_s is None:
            return size
        smallest = min(MIN_CHUNK, size)
        sizes = [max(size * eighths // 8, smallest) for eighths in range(8, 0, -1)]
        slowest, through = self._predict(
            [_with_prefill(own, each, state.prefill_start) for each in sizes]
        )
        rounds = np.maximum(slowest * self._num_per_round, through)
        fitting = [
            each
            for each, seconds in zip(sizes, rounds, strict=True)
            if seconds <= self._itl_target_s
        ]
        return fitting[0] if fitting else smallest

    def _predict(self, works: Sequence[BatchWork]) -> tuple[Seconds, Seconds]:
        """Return for each micro-batch the time of the slowest stage, and the time through the whole
        pipeline.
        """
        return self._columns.bottleneck_and_latency(self._cost.predict(works))


def _even_share(state: SchedulerState, decode_groups: int) -> BatchWork:
    """Return the decodes of one of ``decode_groups`` equal micro-batches: 3 for 10 decodes in 4
    groups.
    """
    return BatchWork(
        0, 0, -(-state.num_decoding // decode_groups), state.decoding_keys // decode_groups
    )


def _with_prefill(decodes: BatchWork, tokens: int, start: int) -> BatchWork:
    """Add a chunk of a prompt after ``start`` positions: a token sees on average half of the chunk,
    and all before it.
    """
    return BatchWork(
        tokens, tokens * start + tokens * (tokens + 1) // 2, decodes.decodes, decodes.decode_keys
    )
