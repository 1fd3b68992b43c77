"""Our policy: micro-batches that take the stages equally long, as many as keep all of them at work, and no more."""

import math
from collections.abc import Sequence
from itertools import islice

import numpy as np

from tramontane.proto.step import StageTiming
from tramontane.router.scheduling.cost_model import CostColumns, CostModel, Seconds
from tramontane.router.scheduling.policy import BatchBudget, BatchWork, FixedInFlightPolicy, SchedulerState, reserved_for_prefill
from tramontane.router.scheduling.round_times import SpreadTuner

MAX_KEY_TIME_SHARE = (
    0.2  # decodes count as alike where their keys take at most this share of the time that the rest of them takes
)
MIN_CHUNK = 8  # prompt tokens that go with decodes however tight the latency target is
SPREAD_ROUNDS = 4  # over which waiting prompts are spread while sequences decode
IDLE_SHARE = 0.03  # of the slowest stage's time; above it another micro-batch is allowed in flight
SATURATED = 0.9  # of the time
RECENT = 0.98  # what a stage did 35 micro-batches ago counts half
LOOK_EVERY = 4  # micro-batches per stage


class BalancedPolicy:
    """What goes into a micro-batch is decided by predicted time, once the times of some have been seen.

    * M, the micro-batches in flight, begins at stages + 1 and grows to at most twice the stages while the slowest
      stage is seen to wait although there was more to do. Where stages have to take turns at the same processors,
      it is as many as can work at once.
    * Decodes alone are spread over as few micro-batches as make a round shortest: with one, the stages take turns,
      and where a stage takes as long for half of the tokens nothing is gained by cutting. What is foretold is tried.
    * Prompts are cut so that the last piece is out soonest: n pieces take n - 1 times the slowest stage (or a turn of
      all stages shared by M, where that is longer) and once through all of them. Each piece is what brings its
      micro-batch to the same time, decodes included.
    * Prompts that are more urgent than something else that runs travel with no others, and are always out soonest.
    * With a target for the time between a sequence's tokens, a round of M micro-batches may not take longer.
    """

    overlaps_chunks = True

    def __init__(
        self,
        num_stages: int,
        max_tokens: int,
        itl_target_s: float | None = None,
        stages_at_once: int | None = None,
        open_per_stage: int | None = None,
    ) -> None:
        self._num_stages, self._max_tokens, self._itl_target_s = num_stages, max_tokens, itl_target_s
        self._times = CostColumns(num_stages, has_expert_actors=open_per_stage is not None)
        self._cost = CostModel(self._times.num_columns)
        at_once = num_stages if stages_at_once is None else stages_at_once
        # Whether stages work at the same time, or a stage and its experts, so that it matters how work is cut.
        self._overlaps = at_once > 1 or (open_per_stage or 1) > 1
        most = (at_once if at_once < num_stages else 2 * num_stages) if open_per_stage is None else open_per_stage * num_stages
        self._watch = InFlightTuner(num_stages, most)
        self._even = FixedInFlightPolicy(self._watch.max_in_flight, max_tokens)
        self._rounds = SpreadTuner()
        self._rounds_foretold: tuple[tuple[int, ...], dict[int, float]] = ((), {})  # rounds by spread, and for what
        self._slopes: tuple[int, tuple[float, float]] = (-1, (0.0, 0.0))  # of decodes, and by which fit
        self._spreads = sorted({2**power for power in range(num_stages.bit_length())} | {num_stages, num_stages + 1})
        self._decode_debt = 0.0  # seconds of decodes that earlier micro-batches left over, or took too many

    @property
    def max_in_flight(self) -> int:
        """M, as measured so far."""
        return self._watch.max_in_flight

    def choose_budget(self, load: SchedulerState) -> BatchBudget | None:
        if load.num_in_flight >= self._watch.max_in_flight:
            self._watch.has_more_to_do = bool(load.num_ready or load.pending_tokens)
            return None
        if not self._cost.is_ready:
            return self._even.choose_budget(load)
        if load.pending_tokens:
            spread = self._watch.max_in_flight if self._overlaps else 1
            own = self._decodes(load, spread)
            prefill = self._prefill(load, spread, own)
            return BatchBudget(own.decodes, min(prefill, self._max_tokens - own.decodes))
        rounds_s = self._rounds_s(load)
        spread = self._rounds.choose(rounds_s)
        if load.num_in_flight >= spread:
            return None
        return BatchBudget(self._decodes(load, spread).decodes, 0, spread, rounds_s[spread])

    def observe(self, share: BatchBudget, work: BatchWork, timings: Sequence[StageTiming]) -> None:
        if len(timings) == self._num_stages:
            self._cost.observe(work, self._times.columns(timings))
            self._watch.observe(timings)
            self._rounds.observe(share.spread, share.round_s, timings[-1].ended_at)

    def _rounds_s(self, load: SchedulerState) -> dict[int, float]:
        """What a round takes by spread m: round(m) = max(m slowest(D/m), sum over stages(D/m)).

        Computed anew where there is a new fit, another number of decodes, or a sixteenth more keys are seen.
        """
        most = max(min(self._watch.max_in_flight, load.num_decoding), 1)
        asked = (self._cost.version, most, load.num_decoding, int(16 * math.log2(max(load.decoding_keys, 1))))
        if asked != self._rounds_foretold[0]:
            spreads = [m for m in self._spreads if m < most] + [most]
            works = [BatchWork(0, 0, -(-load.num_decoding // m), load.decoding_keys // m) for m in spreads]
            slowest_M, through_M = self._predict(works)
            rounds = np.maximum(slowest_M * np.array(spreads), through_M)
            self._rounds_foretold = asked, dict(zip(spreads, rounds.tolist(), strict=True))
        return self._rounds_foretold[1]

    def _decodes(self, load: SchedulerState, spread: int) -> BatchWork:
        """Of the sequences that can go, so many that this micro-batch has its share of all decodes' time.

        Ten alike over four: 2.5 each, so that 3, 2, 3 and 2 go; what was taken too much or too little is carried on.
        """
        if not load.num_ready:
            return BatchWork()
        per_token, per_key = self._decode_slopes()
        even = (per_token * load.num_decoding + per_key * load.decoding_keys) / spread
        quota, taken, count, seen = even + self._decode_debt, 0.0, 0, 0
        most = min(load.num_ready, self._max_tokens - reserved_for_prefill(load, self._max_tokens))
        if per_key * load.decoding_keys < MAX_KEY_TIME_SHARE * per_token * load.num_decoding:
            keys = load.decoding_keys // load.num_decoding
            cost = per_token + per_key * keys
            count = min(max(round(quota / cost), 1), most)
            taken, seen = count * cost, count * keys
        else:
            for keys in islice(load.ready_keys, most):
                cost = per_token + per_key * keys
                if count and taken + cost / 2 > quota:
                    break
                taken, count, seen = taken + cost, count + 1, seen + keys
        self._decode_debt = min(max(quota - taken, -even), even) if count < load.num_ready else 0.0
        return BatchWork(decodes=count, decode_keys=seen)

    def _decode_slopes(self) -> tuple[float, float]:
        """Seconds per decode and per key that it sees, summed over the stages: only their proportion matters."""
        if self._slopes[0] != self._cost.version:
            base, token, key = self._predict([BatchWork(), BatchWork(decodes=1), BatchWork(decode_keys=1)])[1]
            self._slopes = self._cost.version, (max(float(token - base), 1e-9), max(float(key - base), 0.0))
        return self._slopes[1]

    def _prefill(self, load: SchedulerState, spread: int, own: BatchWork) -> int:
        """Prompt tokens beside these decodes.

        While the stages have all they can do, prompts are spread over the next rounds, so that all micro-batches are
        alike: what comes now and then all at once would have to be waited for in every stage. Otherwise they are cut
        to be out soonest, which is not at all where one stage works at a time.
        """
        even = own if load.urgent_tokens else BatchWork(0, 0, -(-load.num_decoding // spread), load.decoding_keys // spread)
        pending = load.urgent_tokens or load.pending_tokens
        fewest = -(-pending // max(self._max_tokens - max(even.decodes, own.decodes), 1))
        is_full = load.num_decoding and (load.waiting_tokens or self._watch.is_saturated)
        if self._overlaps and is_full and not load.urgent_tokens:
            pieces = [max(fewest, min(SPREAD_ROUNDS * spread, pending // MIN_CHUNK))]
        else:
            pieces = list(range(fewest, fewest + 2 * self._num_stages))
        sizes = [-(-pending // n) for n in pieces]
        works = [_with_prefill(even, size, load.prefill_start) for size in sizes]
        slowest, through = self._predict(works)
        interval = np.maximum(slowest, through / self._watch.max_in_flight)
        out_after = (np.array(pieces) - 1) * interval + through
        best = int(np.argmin(out_after))
        if not load.num_decoding:
            return sizes[best]
        size = sizes[best] if load.urgent_tokens else self._adjusted(sizes[best], works[best], own, even)
        return self._within_target(size, own, load)

    def _adjusted(self, size: int, nominal: BatchWork, own: BatchWork, even: BatchWork) -> int:
        """More prompt tokens where there are fewer decodes than in an even share, fewer where there are more."""
        with_both, alone, ours = (float(t) for t in self._predict([nominal, even, own])[0])
        per_token = (with_both - alone) / size
        return max(size + round((alone - ours) / per_token), 1) if per_token > 0 else size

    def _within_target(self, size: int, own: BatchWork, load: SchedulerState) -> int:
        """The most prompt tokens up to ``size`` with which a round of micro-batches like this one keeps the target."""
        if self._itl_target_s is None:
            return size
        least = min(MIN_CHUNK, size)
        sizes = [max(size * eighths // 8, least) for eighths in range(8, 0, -1)]
        slowest, through = self._predict([_with_prefill(own, each, load.prefill_start) for each in sizes])
        rounds = np.maximum(slowest * self._watch.max_in_flight, through)
        fitting = [each for each, seconds in zip(sizes, rounds, strict=True) if seconds <= self._itl_target_s]
        return fitting[0] if fitting else least

    def _predict(self, works: Sequence[BatchWork]) -> tuple[Seconds, Seconds]:
        """Of each: what whoever has most to do takes, and the way through the whole pipeline."""
        return self._times.bottleneck_and_latency(self._cost.predict(works))


class InFlightTuner:
    """Measures M: how many micro-batches in flight, of ``most``, keep the slowest stage at work."""

    def __init__(self, num_stages: int, most: int) -> None:
        self._num_stages, self._most = num_stages, most
        self.max_in_flight = min(num_stages + 1, most)
        self.has_more_to_do = False
        self._last_end = [0.0] * num_stages
        self._busy, self._idle = [0.0] * num_stages, [0.0] * num_stages
        self._num_seen = 0
        self._recently_busy, self._recently_free = 0.0, 0.0  # seconds of the last stage, older ones counting less

    @property
    def is_saturated(self) -> bool:
        """Whether the last stage hardly ever waits."""
        return self._recently_busy > SATURATED * (self._recently_busy + self._recently_free)

    def observe(self, timings: Sequence[StageTiming]) -> None:
        for timing in timings:
            stage = timing.stage_id
            self._busy[stage] += timing.busy_s
            # Where several are open at once the stage was idle for what is between two ends beside work.
            gap = max(timing.ended_at - self._last_end[stage] - timing.busy_s, 0.0) if self._last_end[stage] else 0.0
            self._idle[stage] += gap if self.has_more_to_do else 0.0
            if stage == self._num_stages - 1:
                self._recently_busy = RECENT * self._recently_busy + timing.busy_s
                self._recently_free = RECENT * self._recently_free + gap
            self._last_end[stage] = timing.ended_at
        self._num_seen += 1
        if self._num_seen >= LOOK_EVERY * self._num_stages:
            self._adjust()

    def _adjust(self) -> None:
        slowest = max(range(self._num_stages), key=self._busy.__getitem__)
        if self._idle[slowest] > IDLE_SHARE * self._busy[slowest]:
            self.max_in_flight = min(self.max_in_flight + 1, self._most)
        self._busy, self._idle, self._num_seen = [0.0] * self._num_stages, [0.0] * self._num_stages, 0


def _with_prefill(decodes: BatchWork, tokens: int, start: int) -> BatchWork:
    """A piece of a prompt after ``start`` positions sees on average half of itself and all before."""
    return BatchWork(tokens, tokens * start + tokens * (tokens + 1) // 2, decodes.decodes, decodes.decode_keys)
