"""Our policy, called directly."""

from itertools import pairwise

import pytest

from tramontane.proto.step import StageTiming
from tramontane.router.scheduling.balanced_policy import MIN_CHUNK, BalancedPolicy, PromptPieces
from tramontane.router.scheduling.policy import (
    BatchBudget,
    BatchWork,
    FixedInFlightPolicy,
    SchedulerState,
)


def _experienced(policy: BalancedPolicy, num_stages: int) -> BalancedPolicy:
    """After micro-batches that took a millisecond, and 0.1 ms per token, in every stage."""
    now = 0.0
    for number in range(64):
        work = BatchWork(prefill_tokens=16 * (number % 3), decodes=8 + number % 5, decode_keys=800)
        busy_s = 1e-3 + 1e-4 * (work.prefill_tokens + work.decodes)
        timings = [
            StageTiming(stage, now + stage * busy_s, busy_s, 8) for stage in range(num_stages)
        ]
        policy.observe(BatchBudget(8, 0), work, timings)
        now += busy_s
    return policy


@pytest.mark.parametrize("pending", [1, 3, 7, MIN_CHUNK, 100])
def test_a_prompt_advances_however_tight_the_target_is(pending: int) -> None:
    """Also where decodes alone just keep it."""
    for tenths_of_ms in range(100):
        policy = _experienced(BalancedPolicy(2, 512, itl_target_s=tenths_of_ms * 1e-4), 2)
        share = policy.choose_budget(
            SchedulerState(0, 16, 1600, 16, [100] * 16, pending, 0, 0, 0.5)
        )
        assert share is not None
        assert share.prefill_tokens >= min(pending, MIN_CHUNK)


def test_prompts_that_arrived_together_end_after_twice_the_pieces_in_which_they_began() -> None:
    """By a fixed share of what is left at a time, 2,000 tokens would take 60 micro-batches, the
    last of a few tokens.
    """
    policy = _experienced(BalancedPolicy(2, 512), 2)
    pieces, pending = [], 2000
    while pending:
        budget = policy.choose_budget(
            SchedulerState(0, 16, 1600, 16, [100] * 16, pending, 0, 1, 0.5)
        )
        assert budget is not None
        pieces.append(min(budget.prefill_tokens, pending))
        pending -= pieces[-1]
    first = 2000 / pieces[0]
    assert first > 8, "they are spread"
    assert len(pieces) <= 2 * first
    assert all(later <= earlier + 1 for earlier, later in pairwise(pieces))


def test_the_pieces_of_waiting_prompts() -> None:
    decode_groups = PromptPieces()
    assert decode_groups.pieces(160, 4) == 4
    decode_groups.record(160, 40)
    assert decode_groups.pieces(120, 4) == 4, "3.5 are left"
    decode_groups.record(120, 30)
    assert decode_groups.pieces(90 + 90, 4) == 4, "3 of the old ones and 4 of the new ones"
    decode_groups.record(180, 200)
    assert decode_groups.pieces(7, 0) == 1


def test_pieces_of_prompts_that_are_left_and_of_new_ones_by_their_tokens() -> None:
    decode_groups = PromptPieces()
    assert decode_groups.pieces(1000, 8) == 8
    decode_groups.record(1000, 10)
    assert decode_groups.pieces(10, 8) == 8, "7.5 are left: most have been aborted"
    for _ in range(20):
        decode_groups.record(10, 1)
    assert decode_groups.pieces(18, 9) == 5, "1 of 9 old ones and 9 of 9 new ones"
    for _ in range(3):
        decode_groups.record(18, 0)
    assert decode_groups.pieces(18, 0) == 4, "3.5 are left"
    decode_groups.clear()
    assert decode_groups.pieces(18, 9) == 9


@pytest.mark.parametrize(
    "before",
    [
        SchedulerState(0, 0, 0, 0, [], 900, 0, 0, 0.5),
        SchedulerState(0, 16, 1600, 16, [100] * 16, 900, 0, 1, 0.5, urgent_tokens=30),
    ],
)
def test_prompts_are_spread_as_ever_after_micro_batches_of_another_kind(
    before: SchedulerState,
) -> None:
    """Those at the start, when nothing decodes yet, and those of urgent prompts."""
    full = SchedulerState(0, 16, 1600, 16, [100] * 16, 400, 0, 1, 0.5)
    fresh, policy = (_experienced(BalancedPolicy(2, 512), 2) for _ in range(2))
    for state in [full] * 20 + [before] * 30:
        policy.choose_budget(state)
    budgets = [each.choose_budget(full) for each in (fresh, policy)]
    assert budgets[0] is not None
    assert budgets[0] == budgets[1]


def test_prompts_that_go_on_arriving_are_spread_over_as_many_pieces_as_they_would_be_at_first() -> (
    None
):
    decode_groups, pending, sizes = PromptPieces(), 0, []
    for _ in range(200):
        pending += 10
        sizes.append(-(-pending // decode_groups.pieces(pending, 16)))
        decode_groups.record(pending, sizes[-1])
        pending -= sizes[-1]
    assert set(sizes[-50:]) == {10}


@pytest.mark.parametrize("policy", [FixedInFlightPolicy(2, 64), BalancedPolicy(2, 512)])
def test_without_times_a_token_is_a_millisecond_of_any_kind(
    policy: FixedInFlightPolicy | BalancedPolicy,
) -> None:
    assert policy.seconds(BatchWork()) == 0
    assert policy.seconds(BatchWork(300, 45_000, 20, 5000)) == pytest.approx(0.32)
    assert policy.seconds(BatchWork(20, 200, 300, 90_000)) == pytest.approx(0.32)


def test_the_seconds_of_work_are_those_of_the_busiest_stage_beyond_what_any_micro_batch_takes() -> (
    None
):
    """Once times are known. Of two stages the second takes three times as long: 1 ms, and 0.3 ms
    per token.
    """
    policy, now = BalancedPolicy(2, 512), 0.0
    for number in range(64):
        work = BatchWork(prefill_tokens=16 * (number % 3), decodes=8 + number % 5, decode_keys=800)
        busy_s = 1e-4 * (work.prefill_tokens + work.decodes)
        policy.observe(
            BatchBudget(8, 0),
            work,
            [StageTiming(0, now, 1e-3 + busy_s, 8), StageTiming(1, now, 1e-3 + 3 * busy_s, 8)],
        )
        now += 1e-3 + 3 * busy_s
    assert policy.seconds(BatchWork()) == 0
    assert policy.seconds(BatchWork(100, 0, 0, 0)) == pytest.approx(0.03, rel=0.02)
    assert policy.seconds(BatchWork(0, 0, 50, 0)) == pytest.approx(0.015, rel=0.02)
    assert policy.seconds(BatchWork(100, 0, 50, 0)) == pytest.approx(0.045, rel=0.02)
