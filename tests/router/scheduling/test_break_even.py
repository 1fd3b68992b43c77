"""How likely a draft has to be right, by the cost model and what else there is to do."""

from dataclasses import replace

import pytest

from tramontane.proto.step import StageTiming
from tramontane.router.scheduling.balanced_policy import (
    BREAK_EVEN_MARGIN,
    MIN_BREAK_EVEN,
    BalancedPolicy,
)
from tramontane.router.scheduling.policy import (
    ASSUMED_BREAK_EVEN,
    NEVER,
    BatchBudget,
    BatchWork,
    FixedInFlightPolicy,
    Policy,
    SchedulerState,
)

ALONE = SchedulerState(
    num_in_flight=0,
    num_decoding=1,
    decoding_keys=100,
    num_ready=1,
    ready_keys=(100,),
    pending_tokens=0,
    prefill_start=0,
    waiting_tokens=0,
    free_share=1.0,
)
BASE_S, ROW_S = 2e-3, 2e-4


def _trained(num_stages: int, key_s: float = 0.0) -> BalancedPolicy:
    """Return a policy that has seen micro-batches of 1 to 64 rows and of different keys."""
    policy = BalancedPolicy(num_stages, 512)
    at = 0.0
    for step in range(200):
        rows, keys = 1 + step * 37 % 64, 1000 + step * 7919 % 90_000
        busy = BASE_S + ROW_S * rows + key_s * keys
        timings = [StageTiming(stage, at + stage * busy, busy, rows) for stage in range(num_stages)]
        policy.observe(BatchBudget(rows, 0), BatchWork(0, 0, rows, keys), timings)
        at += num_stages * busy
    return policy


@pytest.mark.parametrize("policy", [FixedInFlightPolicy(2, 64), BalancedPolicy(2, 64), _trained(2)])
def test_nothing_is_drafted_where_prompts_could_use_the_time(policy: Policy) -> None:
    assert policy.draft_break_even(ALONE) < 1
    assert policy.draft_break_even(replace(ALONE, pending_tokens=5)) == NEVER
    assert policy.draft_break_even(replace(ALONE, waiting_tokens=5)) == NEVER


def test_without_times_it_is_assumed() -> None:
    for policy in (FixedInFlightPolicy(2, 64), BalancedPolicy(2, 64)):
        assert policy.draft_break_even(ALONE) == ASSUMED_BREAK_EVEN


@pytest.mark.parametrize("num_stages", [1, 4])
def test_a_stream_alone_drafts_nearly_always(num_stages: int) -> None:
    """A row more takes a tenth of what the first one took, in every stage."""
    assert _trained(num_stages).draft_break_even(ALONE) == pytest.approx(
        BREAK_EVEN_MARGIN * ROW_S / (BASE_S + ROW_S), rel=0.1
    )
    assert _trained(num_stages).draft_break_even(ALONE) >= MIN_BREAK_EVEN


@pytest.mark.parametrize("num_streams", [16, 64])
def test_a_draft_among_many_costs_each_of_them_its_time(num_streams: int) -> None:
    state = replace(
        ALONE, num_decoding=num_streams, decoding_keys=100 * num_streams, num_ready=num_streams
    )
    expected = BREAK_EVEN_MARGIN * ROW_S * num_streams / (BASE_S + ROW_S * num_streams)
    assert _trained(1).draft_break_even(state) == pytest.approx(expected, rel=0.05)


def test_long_contexts_make_rows_dearer() -> None:
    policy = _trained(1, key_s=1e-7)
    short, long = (
        policy.draft_break_even(replace(ALONE, decoding_keys=keys)) for keys in (100, 50_000)
    )
    assert long > 2 * short


def test_a_row_that_seems_to_cost_nothing_still_has_a_price() -> None:
    policy = BalancedPolicy(1, 64)
    for step in range(40):
        policy.observe(
            BatchBudget(1, 0), BatchWork(0, 0, 1 + step % 7, 100), [StageTiming(0, step, BASE_S, 1)]
        )
    assert policy.draft_break_even(ALONE) == MIN_BREAK_EVEN


def test_rounds_with_drafts_say_nothing_about_how_decodes_are_best_spread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They were predicted without them."""
    policy, observed = BalancedPolicy(1, 64), list[tuple[int, bool]]()
    monkeypatch.setattr(
        policy._group_tuner,
        "observe",
        lambda spread, *_, has_drafts: observed.append((spread, has_drafts)),
    )
    for rows in (4, 9):
        policy.observe(
            BatchBudget(4, 0, decode_groups=2, round_s=1.0),
            BatchWork(0, 0, rows, 100),
            [StageTiming(0, 0.0, BASE_S, rows)],
        )
    assert observed == [(2, False), (0, True)]


IN_FLIGHT = replace(ALONE, num_in_flight=1, num_ready=0, ready_keys=())


def test_drafts_go_ahead_where_fewer_streams_than_stages_leave_these_idle() -> None:
    for policy in (FixedInFlightPolicy(4, 64), BalancedPolicy(4, 64), _trained(4)):
        assert policy.lookahead_break_even(IN_FLIGHT) < 1
        assert policy.lookahead_break_even(replace(IN_FLIGHT, num_lookahead=2)) < 1
        assert policy.lookahead_break_even(replace(IN_FLIGHT, num_lookahead=3)) == NEVER, (
            "every stage has one"
        )
        assert policy.lookahead_break_even(replace(IN_FLIGHT, pending_tokens=5)) == NEVER
        assert policy.lookahead_break_even(replace(IN_FLIGHT, waiting_tokens=5)) == NEVER
    assert BalancedPolicy(4, 64, stages_at_once=1).lookahead_break_even(IN_FLIGHT) == NEVER, (
        "stages take turns"
    )
    assert _trained(1).lookahead_break_even(IN_FLIGHT) == NEVER
    for policy in (BalancedPolicy(4, 64), _trained(4)):
        assert policy.lookahead_break_even(replace(IN_FLIGHT, num_decoding=3)) < 1
        assert policy.lookahead_break_even(replace(IN_FLIGHT, num_decoding=4)) == NEVER


@pytest.mark.parametrize("num_stages", [2, 8])
@pytest.mark.parametrize("hop_s", [0.0, 5e-3])
def test_the_longer_the_way_the_less_likely_drafts_ahead_have_to_be_right(
    num_stages: int, hop_s: float
) -> None:
    """Half of a stage's time is at stake, against the whole way. Waiting for a stage now and then
    does not make it longer.
    """
    busy, policy = BASE_S + ROW_S, BalancedPolicy(num_stages, 512)
    for step in range(100):
        waits = 0.2 if step % 5 else 0.0
        timings = [
            StageTiming(n, step + n * (busy + hop_s + waits), busy, 1) for n in range(num_stages)
        ]
        policy.observe(BatchBudget(1, 0), BatchWork(0, 0, 1, 100), timings)
    way = num_stages * busy + (num_stages - 1) * hop_s
    assert policy.lookahead_break_even(IN_FLIGHT) == pytest.approx(
        max(busy / (busy + 2 * way), MIN_BREAK_EVEN), rel=0.06
    )
