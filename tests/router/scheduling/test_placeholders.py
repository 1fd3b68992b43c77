"""Asynchronous scheduling: steps that are submitted before the tokens of those before them are
known.
"""

import random

import pytest
from examples import examples
from fake_pipeline import (
    EOS,
    FakePipeline,
    new_cache,
    new_pipeline,
    new_sequence,
    some_token,
    submit_traffic,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tramontane.proto.plan import CachePlan, WindowClass
from tramontane.proto.request import FinishReason
from tramontane.proto.step import PLACEHOLDER_TOKEN, MicroBatch, StageTiming
from tramontane.router.scheduling.balanced_policy import BalancedPolicy
from tramontane.router.scheduling.policy import FixedInFlightPolicy, Policy
from tramontane.router.scheduling.round_times import MEASURE_AGAIN_AFTER, HostGap


def _pipeline(
    room: float = 8, *, seqs: int = 8, budget: int = 64, page_size: int = 4
) -> FakePipeline:
    return new_pipeline(
        new_cache(page_size, room, None),
        seqs=seqs,
        budget=budget,
        in_flight=2,
        async_scheduling=True,
    )


def _submitted(pipe: FakePipeline) -> MicroBatch:
    batch = pipe.submit()
    assert batch is not None
    return batch


def test_a_decode_follows_before_its_token_is_known() -> None:
    pipe = _pipeline()
    pipe.scheduler.add(new_sequence(0, 6, 4))
    assert _submitted(pipe).chunks[0].num_tokens == 6
    decodes = _submitted(pipe).decodes
    assert decodes[:3] == ((0,), (6,), (PLACEHOLDER_TOKEN,))
    assert pipe.submit() is None, "two are in flight"
    pipe.answer()
    assert _submitted(pipe).decodes[:3] == ((0,), (7,), (PLACEHOLDER_TOKEN,))


def test_the_last_token_of_all_is_not_waited_for() -> None:
    """A prompt of 6 and two tokens: one step for the prompt, and one with the first of them."""
    pipe = _pipeline()
    pipe.scheduler.add(new_sequence(0, 6, 2))
    _submitted(pipe)
    _submitted(pipe)
    pipe.answer()
    assert pipe.submit() is None
    pipe.answer()
    assert [event.finish for event in pipe.events] == [None, FinishReason.LENGTH]
    assert pipe.scheduler.is_idle
    pipe.scheduler.check_integrity()


def test_prompts_and_decodes_share_every_micro_batch() -> None:
    """Without it a prompt's chunks would travel alone in every second one."""
    pipe = _pipeline(budget=10)
    pipe.scheduler.add(new_sequence(0, 4, 9))
    _submitted(pipe)
    pipe.scheduler.add(new_sequence(1, 40, 9))
    for _ in range(4):
        batch = _submitted(pipe)
        assert [(len(batch.decodes.seq_ids), chunk.num_tokens) for chunk in batch.chunks] == [
            (1, 9)
        ]
        pipe.answer()


def test_an_end_is_noticed_one_step_later() -> None:
    """The row that was submitted before that is in vain: its token is dropped, and its pages are
    free when it has returned.
    """
    pipe = _pipeline()
    pipe.token_at = lambda _seq_id, position: EOS if position == 7 else 50
    pipe.scheduler.add(new_sequence(0, 6, 9))
    _submitted(pipe)
    _submitted(pipe)
    pipe.answer()
    assert _submitted(pipe).decodes.starts == (7,), "with the token that ends it"
    pipe.answer()
    assert [event.finish for event in pipe.events] == [None, FinishReason.STOP]
    assert pipe.scheduler.num_running == 1
    pipe.answer()
    assert len(pipe.events) == 2
    assert pipe.scheduler.is_idle
    pipe.scheduler.check_integrity()


def test_an_urgent_sequence_gets_the_slot_of_a_decoding_one() -> None:
    """A decoding sequence is always in flight; for one that waits for its slot it is held back
    until it is not.
    """
    pipe = _pipeline(seqs=1)
    pipe.scheduler.add(new_sequence(0, 6, 100, priority=5))
    for _ in range(3):
        while pipe.submit():
            pass
        pipe.answer()
    pipe.scheduler.add(new_sequence(1, 6, 3, priority=0))
    num_in_flight, num_answers = len(pipe.in_flight), 0
    while not pipe.tokens_of(1):
        while pipe.submit():
            pass
        pipe.answer()
        num_answers += 1
    assert num_answers == num_in_flight + 1, "what is in flight, and its own prompt"
    pipe.drain()
    assert len(pipe.tokens_of(0)) == 100


@settings(max_examples=examples(300), deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    page_size=st.sampled_from([1, 3, 16]),
    windows=st.sampled_from([(64,), (None,), (5, None), (1,)]),
    budget=st.integers(1, 70),
    seqs=st.integers(1, 6),
    room=st.floats(1, 4),
    is_balanced=st.booleans(),
    in_flight=st.integers(1, 4),
    priorities=st.sampled_from([(0,), (0, 1), (0, 1, 9)]),
)
def test_any_traffic(
    seed: int,
    page_size: int,
    windows: tuple[int | None, ...],
    budget: int,
    seqs: int,
    room: float,
    is_balanced: bool,
    in_flight: int,
    priorities: tuple[int, ...],
) -> None:
    """Arrivals, aborts, ends, fences and scarce pages: every sequence gets its own tokens, all of
    them, and each once.
    """
    policy: Policy = (
        BalancedPolicy(1, budget, async_scheduling=True)
        if is_balanced
        else FixedInFlightPolicy(in_flight, budget)
    )
    cache = new_cache(page_size, room, *windows)
    pipe = new_pipeline(cache, seqs=seqs, budget=budget, policy=policy, async_scheduling=True)
    pipe.token_at, pipe.num_stages, pipe.gap_s = some_token, 1, 1e-4
    wanted = submit_traffic(pipe, random.Random(seed), priorities, with_fences=True)
    pipe.drain()
    for seq_id, tokens in wanted.items():
        assert [event.token_id for event in pipe.tokens_of(seq_id)] == tokens
    assert pipe.scheduler.is_idle
    pipe.scheduler.check_integrity()


@pytest.mark.parametrize("num_decoding", [1, 6])
@pytest.mark.parametrize(("gap_s", "with_lookahead"), [(1e-4, True), (1e-5, False)])
def test_the_balanced_policy_goes_ahead_where_that_matters_and_never_cuts_decodes_in_two(
    num_decoding: int, gap_s: float, with_lookahead: bool
) -> None:
    """A step takes 1 ms. Cut in two, weights would be read twice for the same tokens; learned times
    do not change that.
    """
    policy = BalancedPolicy(1, 64, async_scheduling=True)
    pipe = new_pipeline(new_cache(16, 8, None), policy=policy, async_scheduling=True)
    pipe.num_stages, pipe.gap_s = 1, gap_s
    for seq_id in range(num_decoding):
        pipe.scheduler.add(new_sequence(seq_id, 5, 100))
    sizes = []
    while not pipe.scheduler.is_idle:
        while (batch := pipe.submit()) is not None:
            sizes.append(len(batch.decodes.seq_ids))
        pipe.answer()
    assert sizes[-80:] == [num_decoding] * 80, "once times are known"
    assert (
        pipe.num_placeholders > 80 * num_decoding
        if with_lookahead
        else pipe.num_placeholders < 20 * num_decoding
    )


def test_gaps_are_those_of_steps_that_waited_for_their_tokens() -> None:
    """Steps from 0 on of 10 ms, with gaps of 1 ms, which is more than 3 percent; what went ahead
    shows none.
    """
    gap, now = HostGap(), 0.0
    for number in range(6):
        gap.observe([StageTiming(0, now, 0.010, 1)], pipeline_was_idle=number > 0)
        now += 0.011
        assert gap.is_long(0.010) == (number >= 4)
    for _ in range(9):
        gap.observe([StageTiming(0, now, 0.010, 1)], pipeline_was_idle=False)
        now += 0.010
    assert gap.is_long(0.030)
    assert not gap.is_long(0.034)
    for _ in range(MEASURE_AGAIN_AFTER):
        gap.observe([StageTiming(0, now, 0.010, 1)], pipeline_was_idle=False)
        now += 0.010
    assert not gap.is_long(0.010), "it may have become short, and is measured again"


@pytest.mark.parametrize("gap_s", [0.0, 0.0005, 0.001])
def test_the_gap_of_stages_that_take_turns_is_between_the_last_and_the_first(gap_s: float) -> None:
    """What the second stage computes in its turn, and the way to it, is no gap."""
    gap, now = HostGap(), 0.0
    for number in range(5):
        gap.observe(
            [StageTiming(0, now, 0.005, 1), StageTiming(1, now + 0.006, 0.004, 1)],
            pipeline_was_idle=number > 0,
        )
        now += 0.010 + gap_s
    assert gap.is_long(0.010) is (gap_s > 0.0003)


def test_a_sequence_whose_pages_another_row_of_its_micro_batch_needs_goes_no_further() -> None:
    """20 pages of one token. Both decode in one micro-batch, the less urgent one first; the other
    then lacks a page.
    """
    cache = CachePlan(1, (WindowClass(None, 256, 20),))
    pipe = new_pipeline(cache, budget=64, in_flight=1, async_scheduling=True)
    for seq_id, priority in enumerate((5, 0)):
        pipe.scheduler.add(new_sequence(seq_id, 4, 16, priority))
        _submitted(pipe)
        pipe.answer()
    while not pipe.scheduler.num_preempted:
        batch = _submitted(pipe)
        pipe.answer()
    assert batch.decodes.seq_ids == (0,), "it was preempted when it had its place"
    assert _submitted(pipe).decodes.seq_ids == (1,)
    pipe.drain()
    assert [len(pipe.tokens_of(seq_id)) for seq_id in (0, 1)] == [16, 16]
    pipe.scheduler.check_integrity()
