"""Budgets of ``BalancedPolicy``, worked out by hand, once it has learned what the stages take."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from tramontane.proto.step import StageTiming
from tramontane.router.scheduling.balanced_policy import BalancedPolicy
from tramontane.router.scheduling.policy import (
    BatchBudget,
    BatchWork,
    FixedInFlightPolicy,
    SchedulerState,
)

STAGES, MAX_TOKENS = 4, 512


def _trained(
    policy: BalancedPolicy,
    num_stages: int = STAGES,
    *,
    prefill_key_s: float = 0.0,
    decode_key_s: float = 0.0,
    wait_s: float = 0.0,
) -> BalancedPolicy:
    """Let each stage take 1 ms, 0.1 ms per token, and so much per key; after ``wait_s`` comes the
    next micro-batch.
    """
    rng, now = random.Random(0), 1.0
    for _ in range(400):
        tokens, decodes = rng.choice((0, 0, rng.randint(1, 256))), rng.randint(0, 64)
        work = BatchWork(
            tokens, tokens * rng.randint(1, 200), decodes, decodes * rng.randint(1, 400)
        )
        busy_s = (
            1e-3
            + 1e-4 * (tokens + decodes)
            + prefill_key_s * work.prefill_keys
            + decode_key_s * work.decode_keys
        )
        timings = [StageTiming(stage, now, busy_s, 8) for stage in range(num_stages)]
        policy.observe(BatchBudget(8, 0), work, timings)
        now += busy_s + wait_s
    return policy


def _state(**fields: Any) -> SchedulerState:
    """Return a state in which nothing is to do, except for these fields."""
    nothing = dict.fromkeys(
        (
            "num_in_flight",
            "num_decoding",
            "decoding_keys",
            "num_ready",
            "pending_tokens",
            "prefill_start",
        ),
        0,
    )
    return SchedulerState(
        **({"ready_keys": [], "waiting_tokens": 0, "free_share": 0.5, **nothing} | fields)
    )


def _decoding(num: int, keys: int = 0, **fields: Any) -> SchedulerState:
    """Return a state in which so many sequences decode, all of which are ready."""
    return _state(
        num_decoding=num, decoding_keys=num * keys, num_ready=num, ready_keys=[keys] * num, **fields
    )


def test_before_it_has_learned_it_is_a_policy_with_a_fixed_number() -> None:
    policy, fixed = BalancedPolicy(STAGES, MAX_TOKENS), FixedInFlightPolicy(STAGES + 1, MAX_TOKENS)
    for state in (
        _decoding(32),
        _decoding(32, pending_tokens=900),
        _state(pending_tokens=900),
        _decoding(3, num_in_flight=4),
    ):
        assert policy.choose_budget(state) == fixed.choose_budget(state)
    assert policy.choose_budget(_decoding(32, num_in_flight=5)) is None


@pytest.mark.parametrize("waiting", [{"num_ready": 1}, {"pending_tokens": 1}, {}])
def test_stages_wait_in_vain_only_where_more_is_to_do(waiting: dict[str, int]) -> None:
    """M grows while a stage waits, but not because all that there is to do is in flight."""
    policy = BalancedPolicy(STAGES, MAX_TOKENS)
    assert policy.choose_budget(_state(num_in_flight=5, **waiting)) is None
    _trained(policy, wait_s=1.0)
    assert policy.max_in_flight == (8 if waiting else 5)


def test_timings_of_other_stages_are_not_learned() -> None:
    """A result of a pipeline that has failed may lack some."""
    policy = BalancedPolicy(STAGES, MAX_TOKENS)
    _trained(policy, num_stages=3)
    assert policy.choose_budget(_decoding(32)) == FixedInFlightPolicy(5, MAX_TOKENS).choose_budget(
        _decoding(32)
    )


@pytest.mark.parametrize(
    ("num_decoding", "budget"),
    [
        # 4.2 ms in each of four stages: 16.8. Two of 16: 10.4. Four of 8: 7.2, five of 7: 8.5,
        # where the stages are full.
        (32, BatchBudget(8, 0, 4, pytest.approx(7.2e-3))),
        # 5.2, two of at most 2: 4.8, three of 1: 4.4; more there cannot be.
        (3, BatchBudget(1, 0, 3, pytest.approx(4.4e-3))),
        (1, BatchBudget(1, 0, 1, pytest.approx(4.4e-3))),
    ],
)
def test_decodes_alone_go_round_soonest(num_decoding: int, budget: BatchBudget) -> None:
    policy = _trained(BalancedPolicy(STAGES, MAX_TOKENS))
    assert (
        policy.choose_budget(_decoding(num_decoding, num_in_flight=budget.decode_groups - 1))
        == budget
    )
    assert policy.choose_budget(_decoding(num_decoding, num_in_flight=budget.decode_groups)) is None


def test_one_stage_cuts_no_decodes() -> None:
    """Two micro-batches of 16 would take 5.2 ms instead of 4.2."""
    policy = _trained(BalancedPolicy(1, MAX_TOKENS), 1)
    assert policy.choose_budget(_decoding(32)) == BatchBudget(32, 0, 1, pytest.approx(4.2e-3))


def test_rounds_are_predicted_again_where_the_keys_have_changed() -> None:
    """Each key takes 10 us: 32 decodes of 10 keys take as long as 64 of none; with 100 keys each of
    8 takes 9.6 ms.
    """
    policy = _trained(BalancedPolicy(1, MAX_TOKENS), 1, decode_key_s=1e-5)
    for keys, round_s in ((10, 7.4e-3), (100, 36.2e-3), (10, 7.4e-3)):
        assert policy.choose_budget(_decoding(32, keys)) == BatchBudget(
            32, 0, 1, pytest.approx(round_s)
        )


def test_half_a_decode_is_carried_over() -> None:
    """12 decodes over five micro-batches are 2.4 each: 2, 2.8, 2.2, 2.6 and 2 with what is carried
    over, and 2.4 again.
    """
    policy = _trained(BalancedPolicy(STAGES, MAX_TOKENS))
    budgets = [policy.choose_budget(_decoding(12, pending_tokens=400)) for _ in range(6)]
    assert [budget and budget.decodes for budget in budgets] == [2, 3, 2, 3, 2, 2]


def test_nothing_is_carried_over_where_all_ready_ones_go() -> None:
    """Of 12 decodes, 2.4 each, only one is ready: it goes, and the next micro-batch gets no more
    for it.
    """
    policy = _trained(BalancedPolicy(STAGES, MAX_TOKENS))
    for num_ready, decodes in ((1, 1), (12, 2), (12, 3)):
        state = _state(
            num_decoding=12, num_ready=num_ready, ready_keys=[0] * num_ready, pending_tokens=400
        )
        budget = policy.choose_budget(state)
        assert budget is not None
        assert budget.decodes == decodes


def test_decodes_with_many_keys_count_for_several() -> None:
    """A decode takes 0.4 ms in all stages, and 0.4 ms per 100 keys. Of eight with 300, 4 x 100 and
    3 x 50 keys, 850 in all, a fifth is 1.32 ms: the first takes 1.6, so 0.28 less are left for the
    next, which takes one of 0.8; then two get 1.56.
    """
    policy = _trained(BalancedPolicy(STAGES, MAX_TOKENS), decode_key_s=1e-6)
    keys = [300, 100, 100, 100, 100, 50, 50, 50]
    common: dict[str, Any] = {"num_decoding": 8, "decoding_keys": 850, "pending_tokens": 400}
    for decodes, ready in ((1, keys), (1, keys[1:]), (2, keys[2:])):
        budget = policy.choose_budget(_state(num_ready=len(ready), ready_keys=ready, **common))
        assert budget is not None
        assert budget.decodes == decodes


def _soonest(pending: int, stage_ms: Callable[[int], float]) -> int:
    """Return the size of the pieces, of which all are finished soonest: eight numbers of pieces are
    compared.
    """
    fewest = -(-pending // MAX_TOKENS)
    sizes = {pieces: -(-pending // pieces) for pieces in range(fewest, fewest + 2 * STAGES)}
    return sizes[min(sizes, key=lambda pieces: (pieces - 1 + STAGES) * stage_ms(sizes[pieces]))]


@pytest.mark.parametrize(("pending", "size"), [(100, 20), (4, 4), (3000, 231)])
def test_a_prompt_alone_is_cut_to_be_finished_soonest(pending: int, size: int) -> None:
    """100 tokens at once take 11 ms in each of four stages: 44 ms. Five pieces of 20 take 3 ms: 4 *
    3 + 12 = 24 ms, four 24.5 and six 24.3. 4 tokens take 5.6 ms at once and 6 ms in two pieces.
    3000 tokens need six pieces at least.
    """
    policy = _trained(BalancedPolicy(STAGES, MAX_TOKENS))
    assert size == _soonest(pending, lambda tokens: 1 + 0.1 * tokens)
    assert policy.choose_budget(_state(pending_tokens=pending)) == BatchBudget(0, size)


def test_where_one_stage_works_at_a_time_a_prompt_is_not_cut() -> None:
    policy = _trained(BalancedPolicy(STAGES, MAX_TOKENS, stages_at_once=1))
    assert policy.choose_budget(_state(pending_tokens=100)) == BatchBudget(0, 100)
    assert policy.choose_budget(_state(pending_tokens=1000)) == BatchBudget(0, 500)
    assert policy.choose_budget(_decoding(32, pending_tokens=100, waiting_tokens=9)) == BatchBudget(
        32, 100
    )


def test_a_turn_of_stages_that_share_cores_is_counted() -> None:
    """Two stages of four work at once, so M is 2: a piece after another takes half of the way
    through, 2 (1 + 0.1 s) ms for s tokens. 100 tokens in n pieces: 44, 2 * 6 + 24 = 36, 2 * 2 * 4.4
    + 17.6 = 35.2, 3 * 7 + 14 = 35 and 4 * 6 + 12 = 36.
    """
    policy = _trained(BalancedPolicy(STAGES, MAX_TOKENS, stages_at_once=2))
    assert policy.choose_budget(_state(pending_tokens=100)) == BatchBudget(0, 25)


@pytest.mark.parametrize(
    ("pending", "size"), [(400, 20), (80, 8), (15, 15), (9000, 450), (12_000, 500)]
)
def test_with_a_queue_prompts_are_spread_over_four_rounds(pending: int, size: int) -> None:
    """M is 5: 20 pieces, none smaller than 8 tokens nor larger than what 7 of 35 decodes leave of
    512: 12,000 need 24.
    """
    policy = _trained(BalancedPolicy(STAGES, MAX_TOKENS))
    state = _decoding(35, pending_tokens=pending, waiting_tokens=1)
    assert policy.choose_budget(state) == BatchBudget(7, size)


def test_a_pipeline_that_is_always_busy_is_as_full_as_one_with_a_queue() -> None:
    """Otherwise 400 tokens next to 7 decodes are cut to be finished soonest: five or more pieces
    are better than 20.
    """
    state = _decoding(35, pending_tokens=400)
    assert _trained(BalancedPolicy(STAGES, MAX_TOKENS)).choose_budget(state) == BatchBudget(7, 20)
    soonest = _trained(BalancedPolicy(STAGES, MAX_TOKENS), wait_s=1.0).choose_budget(state)
    assert soonest is not None
    assert soonest.prefill_tokens > 30


def test_more_prompt_tokens_go_where_fewer_decodes_do() -> None:
    """20 with an even share of 7 decodes, 27 without any decode, 24 with three that are ready."""
    policy = _trained(BalancedPolicy(STAGES, MAX_TOKENS))
    for num_ready in (0, 3):
        state = _state(
            num_decoding=35,
            num_ready=num_ready,
            ready_keys=[0] * num_ready,
            pending_tokens=400,
            waiting_tokens=1,
        )
        assert policy.choose_budget(state) == BatchBudget(num_ready, 27 - num_ready)


def test_urgent_prompts_go_alone_and_soonest() -> None:
    """100 urgent tokens of 400 are cut as if there were no others, also with a queue."""
    policy = _trained(BalancedPolicy(STAGES, MAX_TOKENS))
    state = _decoding(35, pending_tokens=400, waiting_tokens=1, urgent_tokens=100)
    size = _soonest(100, lambda tokens: 1 + 0.1 * (7 + tokens))
    assert size < 100
    assert policy.choose_budget(state) == BatchBudget(7, size)


@pytest.mark.parametrize(
    ("target_ms", "size"), [(18.6, 20), (18.4, 17), (15.1, 12), (14.9, 12), (12.6, 8), (1.0, 8)]
)
def test_a_round_keeps_the_target_for_the_time_between_tokens(target_ms: float, size: int) -> None:
    """Five micro-batches of 7 decodes and 20 prompt tokens take 5 * 3.7 = 18.5 ms. Eighths of 20
    are 17, 15, 12, 10 and 7, but at least 8 go: 17.0, 16.0, 14.5, 13.5 and 12.5 ms.
    """
    policy = _trained(BalancedPolicy(STAGES, MAX_TOKENS, itl_target_s=target_ms * 1e-3))
    assert policy.choose_budget(_decoding(35, pending_tokens=400, waiting_tokens=1)) == BatchBudget(
        7, size
    )


@pytest.mark.parametrize(("target_ms", "size"), [(25, 200), (24, 175), (20, 150), (9, 25)])
def test_a_round_of_asynchronous_scheduling_is_one_step(target_ms: float, size: int) -> None:
    """32 decodes and 200 prompt tokens take 24.2 ms, 175 take 21.7, 150 take 19.2, 50 take 9.2 and
    25 take 6.7 ms.

    Two micro-batches are in flight, but every sequence has a token in each.
    """
    policy = _trained(
        BalancedPolicy(1, MAX_TOKENS, itl_target_s=target_ms * 1e-3, async_scheduling=True),
        num_stages=1,
    )
    assert policy.max_in_flight > 1
    assert policy.choose_budget(_decoding(32, pending_tokens=200)) == BatchBudget(32, size)


def test_what_a_prompt_token_sees_counts() -> None:
    """A key takes 1 us. 200 tokens after 1000 others, at once: 1000 * 200 + 20,100 keys, 220.1 ms
    and 21 ms in each stage.
    """
    policy = _trained(BalancedPolicy(STAGES, MAX_TOKENS), prefill_key_s=1e-6)
    size = _soonest(
        200, lambda tokens: 1 + 0.1 * tokens + 1e-3 * (1000 * tokens + tokens * (tokens + 1) // 2)
    )
    assert policy.choose_budget(_state(pending_tokens=200, prefill_start=1000)) == BatchBudget(
        0, size
    )
