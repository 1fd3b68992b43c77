"""Stages whose clocks are set, and stages that come back as other processes: what the policy learns
stays true.
"""

from collections import Counter
from collections.abc import Callable

import pytest

from tramontane.proto.step import StageTiming
from tramontane.router.scheduling.balanced_policy import BalancedPolicy
from tramontane.router.scheduling.policy import BatchWork, SchedulerState
from tramontane.router.scheduling.round_times import (
    NUM_GAPS,
    TRIAL_ROUNDS,
    GroupTuner,
    HostGap,
    InFlightTuner,
)

HOUR = 3600.0
JUMPS = [-HOUR, -0.2, -0.05, 0.05, 1.0, HOUR]
NUM_DECODING, KEYS = 64, 200
# by the number of the micro-batch: seconds by which each stage's clock is off
Jump = Callable[[int], list[float]]


class Pipeline:
    """A policy and stages that take 2 ms and 0.4 ms per decode, whose clocks are off as ``jump``
    says.
    """

    def __init__(
        self, num_stages: int, jump: Jump, restarts_at: int = -1, **options: int | bool
    ) -> None:
        self.policy = BalancedPolicy(num_stages, 512, **options)  # type: ignore[arg-type]
        self.spreads: list[int] = []
        self.seconds = [0.0]
        self.num_tokens = [0]
        self._num_stages, self._jump, self._restarts_at = num_stages, jump, restarts_at

    def run(self, steps: int) -> "Pipeline":
        now, num_stages = 1e9, self._num_stages
        for step in range(steps):
            state = SchedulerState(
                0,
                NUM_DECODING,
                NUM_DECODING * KEYS,
                NUM_DECODING,
                [KEYS] * NUM_DECODING,
                0,
                0,
                0,
                0.5,
            )
            budget = self.policy.choose_budget(state)
            assert budget is not None
            decode_groups = budget.decode_groups or num_stages
            stage_s = 0.002 + 0.0004 * budget.decodes
            gap = max(stage_s, num_stages * stage_s / decode_groups)  # micro-batches in turn
            now += gap
            if step == self._restarts_at:
                self.policy.restart()
            begins = [
                now + off - stage_s * (num_stages - i) for i, off in enumerate(self._jump(step))
            ]
            timings = [
                StageTiming(i, begin, stage_s, budget.decodes) for i, begin in enumerate(begins)
            ]
            self.policy.observe(
                budget, BatchWork(0, 0, budget.decodes, budget.decodes * KEYS), timings
            )
            self.spreads.append(decode_groups)
            self.seconds.append(self.seconds[-1] + gap)
            self.num_tokens.append(self.num_tokens[-1] + budget.decodes)
        return self

    def tokens_per_s(self, first: int, last: int) -> float:
        return (self.num_tokens[last] - self.num_tokens[first]) / (
            self.seconds[last] - self.seconds[first]
        )


def _all_at(step: int, jump_s: float, num_stages: int) -> Jump:
    return lambda now: [jump_s if now >= step else 0.0] * num_stages


@pytest.mark.parametrize("jump_s", JUMPS)
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_clocks_that_are_set_at_any_step_leave_the_policy_working(
    num_stages: int, jump_s: float
) -> None:
    for step in range(20, 60, 3):
        Pipeline(num_stages, _all_at(step, jump_s, num_stages)).run(130)


@pytest.mark.parametrize("jump_s", JUMPS)
def test_throughput_after_a_jump_is_what_it_was(jump_s: float) -> None:
    """From a thousand modelled steps after the jump, against a pipeline whose clocks were never
    set.
    """
    undisturbed = Pipeline(4, _all_at(0, 0.0, 4)).run(6000)
    pipeline = Pipeline(4, _all_at(2000, jump_s, 4)).run(6000)
    for first, last in ((2000, 3000), (3000, 6000)):
        assert pipeline.tokens_per_s(first, last) > 0.98 * undisturbed.tokens_per_s(first, last)
    assert Counter(pipeline.spreads[3000:]).most_common(1) == Counter(
        undisturbed.spreads[3000:]
    ).most_common(1)


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("jump_s", [-HOUR, HOUR])
def test_a_stage_that_comes_back_with_another_clock_changes_nothing_for_long(
    stage: int, jump_s: float
) -> None:
    off = [jump_s * (each == stage) for each in range(4)]
    undisturbed = Pipeline(4, _all_at(0, 0.0, 4), restarts_at=2000).run(6000)
    pipeline = Pipeline(4, lambda step: off if step >= 2000 else [0.0] * 4, restarts_at=2000).run(
        6000
    )
    assert pipeline.policy.max_in_flight == undisturbed.policy.max_in_flight
    assert pipeline.tokens_per_s(2000, 6000) > 0.98 * undisturbed.tokens_per_s(2000, 6000)


@pytest.mark.parametrize("off_s", [-HOUR, HOUR])
def test_drafts_go_ahead_however_the_clocks_disagree(off_s: float) -> None:
    """What lies between the stages is then not known: as if it were nothing, which it is here."""
    pipeline = Pipeline(4, lambda _: [0.0, 0.0, 0.0, off_s]).run(400)
    state = SchedulerState(0, 1, KEYS, 1, [KEYS], 0, 0, 0, 0.5)
    agreed = Pipeline(4, lambda _: [0.0] * 4).run(400).policy.lookahead_break_even(state)
    assert (
        pipeline.policy.lookahead_break_even(state)
        == pytest.approx(agreed, rel=0.01)
        == pytest.approx(1 / 9, rel=0.01)
    )


def test_a_ratio_is_the_median_round_and_clipped_both_ways() -> None:
    round_s_by_groups = {1: 10.0, 2: 10.0}
    for seconds in (-HOUR, 0.0, HOUR):
        tuner, now = GroupTuner(), 0.0
        for took in [10.0, 10.0, seconds, 10.0]:
            now += took
            tuner.observe(1, 10.0, now)
        assert tuner._known[1].ratio == 1.0, "one of three rounds counts for nothing"
        for took in [seconds] * TRIAL_ROUNDS:
            now += took
            tuner.observe(1, 10.0, now)
        clipped = {-HOUR: 1 / 3, 0.0: 1 / 3, HOUR: 3.0}[seconds]
        assert tuner._known[1].ratio == pytest.approx(1 + 0.3 * (clipped - 1))
        assert tuner.choose(round_s_by_groups) in round_s_by_groups
    tuner, now = GroupTuner(), 0.0
    for _ in range(1 + TRIAL_ROUNDS):
        tuner.observe(1, 10.0, now)
        now -= HOUR
    assert tuner._known[1].ratio == pytest.approx(1 / 3), "also the first"


def test_the_first_ratio_may_be_large() -> None:
    """Where steps take a millisecond, what lies between them takes many times as long."""
    tuner = GroupTuner()
    for step in range(1 + TRIAL_ROUNDS):
        tuner.observe(1, 1.0, 20.0 * step)
    assert tuner._known[1].ratio == 20.0


def test_a_round_that_was_begun_before_a_restart_does_not_count() -> None:
    tuner = GroupTuner()
    for step in range(TRIAL_ROUNDS):
        tuner.observe(1, 1.0, 1.0 * step)
    tuner.restart()
    tuner.observe(1, 1.0, HOUR)
    assert not tuner._known.get(1), "nothing is learned yet"
    for step in range(1, 1 + TRIAL_ROUNDS):
        tuner.observe(1, 1.0, HOUR + 2.0 * step)
    assert tuner._known[1].ratio == 2.0


@pytest.mark.parametrize("jump_s", [-HOUR, HOUR])
def test_saturation_is_noticed_a_few_micro_batches_after_a_jump(jump_s: float) -> None:
    tuner, now = InFlightTuner(2, 4), 100.0
    for step in range(100):
        now += 1.0 + (jump_s if step == 60 else 0.0)
        tuner.observe([StageTiming(0, now - 2.0, 1.0, 8), StageTiming(1, now - 1.0, 1.0, 8)])
        assert tuner.is_saturated or 60 <= step < 90 or step == 0


@pytest.mark.parametrize("jump_s", [-HOUR, HOUR])
def test_after_a_restart_the_time_since_the_last_end_is_no_wait(jump_s: float) -> None:
    tuner, gap = InFlightTuner(2, 4), HostGap()
    tuner.has_more_to_do = True
    for step in range(200):
        now = 100.0 + step + (jump_s if step >= 63 else 0.0)
        if step == 63:
            tuner.restart()
            gap.restart()
        tuner.observe([StageTiming(0, now - 2.0, 1.0, 8), StageTiming(1, now - 1.0, 1.0, 8)])
        gap.observe([StageTiming(0, now, 0.5, 8)], pipeline_was_idle=60 < step < 60 + NUM_GAPS + 3)
        if step > 70:
            assert gap.is_long(10.0), "half a second each, and nothing else"
    assert tuner.max_in_flight == 3
