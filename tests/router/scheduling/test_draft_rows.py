"""Drafts in micro-batches: sequences get the tokens that they would get without, and stages find
what they need.
"""

import random
from collections.abc import Sequence as Several

import pytest
from examples import examples
from fake_pipeline import EOS, FakePipeline, new_cache, new_pipeline, new_sequence
from guessing_drafter import guess
from hypothesis import given, settings
from hypothesis import strategies as st

from tramontane.proto.plan import CachePlan, SpeculativeConfig, WindowClass
from tramontane.proto.request import FinishReason, SamplingParams
from tramontane.proto.step import NO_TOKEN, MicroBatch
from tramontane.router.scheduling.balanced_policy import BalancedPolicy
from tramontane.router.scheduling.policy import NEVER, FixedInFlightPolicy
from tramontane.router.scheduling.sequence import Sequence

FOUR = SpeculativeConfig(4, 1, 3)


def token_at(seq_id: int, position: int) -> int:
    """Return an answer's token, rarely the end of the output."""
    number = random.Random(1000 * seq_id + position).randrange(40)
    return EOS if number == 0 else 10 + number


def expected(sequence: Sequence) -> list[int]:
    tokens: list[int] = []
    while len(sequence.prompt_ids) + len(tokens) < sequence.max_len and EOS not in tokens:
        tokens.append(token_at(sequence.seq_id, len(sequence.prompt_ids) + len(tokens)))
    return tokens


def next_token_of(sequences: Several[Sequence]) -> object:
    """Return a function from a text to its next token; prompts tell the sequences apart."""
    by_prompt = {sequence.prompt_ids: sequence.seq_id for sequence in sequences}

    def next_token(text: Several[int]) -> int:
        seq_id = next(
            number for prompt, number in by_prompt.items() if tuple(text[: len(prompt)]) == prompt
        )
        return token_at(seq_id, len(text))

    return next_token


def drafting_pipeline(config: SpeculativeConfig = FOUR, **settings: object) -> FakePipeline:
    cache = new_cache(4, 4, None, 9, num_drafts=config.max_drafts())
    pipe = new_pipeline(cache, speculative=config, **settings)  # type: ignore[arg-type]
    pipe.token_at = token_at
    return pipe


def certain_pipeline(monkeypatch: pytest.MonkeyPatch, **settings: object) -> FakePipeline:
    """Return a pipeline whose tokens are all 50, as they are drafted."""
    guess(monkeypatch, lambda _: 50, 1.0)
    pipe = drafting_pipeline(**settings)  # type: ignore[arg-type]
    pipe.token_at = lambda *_: 50
    return pipe


def next_batch(pipe: FakePipeline) -> MicroBatch:
    batch = pipe.submit()
    assert batch is not None
    return batch


def second_batch(pipe: FakePipeline) -> MicroBatch:
    """Return the first micro-batch after prompts were answered."""
    next_batch(pipe)
    pipe.answer()
    return next_batch(pipe)


@settings(max_examples=examples(120), deadline=None)
@given(
    share=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    num_drafts=st.integers(1, 6),
    max_drafts=st.integers(1, 20),
    page_size=st.sampled_from([1, 2, 4, 16]),
    window=st.sampled_from([1, 3, 9, 17]),
    num_seqs=st.floats(1, 6),
    in_flight=st.integers(1, 4),
    budget=st.integers(1, 40),
    num_stages=st.integers(0, 4),
    seed=st.integers(0, 2**16),
)
def test_tokens_are_those_without_drafts(
    share: float,
    num_drafts: int,
    max_drafts: int,
    page_size: int,
    window: int,
    num_seqs: float,
    in_flight: int,
    budget: int,
    num_stages: int,
    seed: int,
) -> None:
    """Packed, preempted where pages are few, cancelled, and fenced."""
    rng = random.Random(seed)
    config = SpeculativeConfig(num_drafts, 1, 2)
    cache = new_cache(page_size, num_seqs, None, window, num_drafts=max_drafts)
    policy = (
        BalancedPolicy(num_stages, budget) if num_stages else FixedInFlightPolicy(in_flight, budget)
    )
    pipe = new_pipeline(cache, seqs=8, budget=budget, policy=policy, speculative=config)
    pipe.token_at, pipe.num_stages = token_at, num_stages
    sequences = [
        new_sequence(number, rng.randint(1, 60), rng.randint(1, 40), rng.randrange(3))
        for number in range(6)
    ]
    with pytest.MonkeyPatch.context() as patch:
        guess(patch, next_token_of(sequences), share, seed)  # type: ignore[arg-type]
        for sequence in sequences:
            pipe.scheduler.add(sequence)
        aborted = set[int]()
        for _ in range(rng.randrange(160)):
            if not pipe.submit() and pipe.in_flight:
                pipe.answer()
            if rng.random() < 0.02:
                pipe.scheduler.restart(pipe.scheduler.epoch + 1)
                pipe.fence()
            if rng.random() < 0.02:
                aborted.add(seq_id := rng.randrange(6))
                pipe.scheduler.abort(seq_id)
        pipe.drain()
    for sequence in sequences:
        events = pipe.tokens_of(sequence.seq_id)
        tokens = expected(sequence)
        assert [event.token_id for event in events] == tokens[: len(events)]
        if sequence.seq_id not in aborted:
            assert len(events) == len(tokens)
            assert events[-1].finish is (
                FinishReason.STOP if EOS in tokens else FinishReason.LENGTH
            )
    counts = pipe.scheduler.draft_counts
    assert not any(event.token_id == NO_TOKEN for event in pipe.events)
    assert counts.num_draft_tokens >= pipe.num_drafts, (
        "what was in flight at a fence is not counted there"
    )


def test_right_drafts_save_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    sequence = new_sequence(3, 7, 31)
    pipe = drafting_pipeline()
    pipe.token_at = lambda _, position: 50 + position % 3
    guess(monkeypatch, lambda text: 50 + len(text) % 3, 1.0)
    pipe.scheduler.add(sequence)
    pipe.drain()
    assert len(pipe.tokens_of(3)) == 31
    assert pipe.scheduler.num_steps == 1 + 6, "one token with the prompt, then five in each of six"
    counts = pipe.scheduler.draft_counts
    assert (counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens) == (6, 29, 29)
    assert pipe.num_lookahead == 5, "all but the first micro-batch of decodes"


def test_drafts_follow_those_in_flight_while_micro_batches_may_be_submitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next one goes where the last one ended; when all are in flight none does."""
    guess(monkeypatch, lambda text: 50 + len(text) % 3, 1.0)
    pipe = drafting_pipeline(in_flight=3)
    pipe.token_at = lambda _, position: 50 + position % 3
    pipe.scheduler.add(new_sequence(3, 7, 60))
    pipe.submit()
    pipe.answer()
    batches = [pipe.submit() for _ in range(4)]
    assert [batch and (batch.decodes.is_lookahead, batch.decodes.starts) for batch in batches] == [
        (False, (7, 8, 9, 10, 11)),
        (True, (12, 13, 14, 15, 16)),
        (True, (17, 18, 19, 20, 21)),
        None,
    ]
    pipe.answer()
    assert len(pipe.tokens_of(3)) == 6
    batch = next_batch(pipe)
    assert batch.decodes.starts == (22, 23, 24, 25, 26)


def test_n_grams_of_what_is_confirmed_in_flight_are_drafted_too() -> None:
    """As many micro-batches stay in flight, one after the other, once the text repeats itself."""
    pipe = drafting_pipeline(in_flight=4, seqs=32)
    pipe.token_at = lambda _, position: 50 + position % 3
    pipe.scheduler.add(new_sequence(3, 7, 150))
    for _ in range(12):
        while pipe.submit():
            pass
        pipe.answer()
    depths = []
    for _ in range(12):
        while pipe.submit():
            pass
        depths.append(len(pipe.in_flight))
        pipe.answer()
    assert depths == [4] * 12
    pipe.drain()


def test_after_a_wrong_draft_the_right_token_goes_at_once_and_what_followed_is_in_vain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = {12: 99}  # in place of what is drafted
    guess(monkeypatch, lambda text: 50 + len(text) % 3, 1.0)
    pipe = drafting_pipeline(in_flight=3)
    pipe.token_at = lambda _, position: answer.get(position, 50 + position % 3)
    pipe.scheduler.add(new_sequence(3, 7, 20))
    pipe.submit()
    pipe.answer()
    assert [pipe.submit() is not None for _ in range(4)] == [True, True, True, False]
    pipe.answer()
    assert [event.token_id for event in pipe.tokens_of(3)][-1] == 99
    batch = next_batch(pipe)
    assert (batch.decodes.is_lookahead, batch.decodes.starts[0], batch.decodes.token_ids[0]) == (
        False,
        12,
        99,
    )
    pipe.answer()
    pipe.answer()
    assert len(pipe.tokens_of(3)) == 6, "no token came from what was in vain"
    pipe.drain()
    assert [event.token_id for event in pipe.tokens_of(3)] == [
        answer.get(n, 50 + n % 3) for n in range(7, 27)
    ]


def test_after_a_fence_nothing_is_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    guess(monkeypatch, lambda text: 50 + len(text) % 3, 1.0)
    pipe = drafting_pipeline(in_flight=3)
    pipe.token_at = lambda _, position: 50 + position % 3
    pipe.scheduler.add(new_sequence(3, 7, 60))
    pipe.submit()
    pipe.answer()
    assert [pipe.submit() is not None for _ in range(4)] == [True, True, True, False]
    pipe.scheduler.restart(2)
    pipe.fence()
    batch = next_batch(pipe)
    assert batch.chunks[0].num_tokens == 8, "the prompt and the token that was known"
    pipe.drain()
    assert [event.token_id for event in pipe.tokens_of(3)] == [50 + n % 3 for n in range(7, 67)]


def test_the_drafts_in_flight_are_no_more_than_page_rings_have_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guess(monkeypatch, lambda _: 50, 1.0)
    pipe = new_pipeline(new_cache(4, 4, 9, num_drafts=7), in_flight=8, speculative=FOUR)
    pipe.token_at = lambda *_: 50
    pipe.scheduler.add(new_sequence(0, 5, 40))
    pipe.submit()
    pipe.answer()
    starts = [batch.decodes.starts for batch in iter(pipe.submit, None)]
    assert starts == [(5, 6, 7, 8, 9), (10, 11, 12)]
    pipe.drain()


def test_a_sequence_whose_tokens_depend_on_those_before_has_no_drafts_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipe = certain_pipeline(monkeypatch)
    pipe.scheduler.add(
        Sequence(0, (5, 6, 7), SamplingParams(max_tokens=30, presence_penalty=0.5), 33)
    )
    pipe.drain()
    assert pipe.num_accepted
    assert not pipe.num_lookahead


def test_no_draft_goes_beyond_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = certain_pipeline(monkeypatch)
    pipe.scheduler.add(new_sequence(0, 5, 4))
    batch = second_batch(pipe)
    assert batch.decodes.starts == (5, 6, 7), (
        "the first token is known, and the last is sampled from the third row"
    )
    pipe.drain()
    assert len(pipe.tokens_of(0)) == 4


def test_decodes_with_drafts_are_no_more_than_sequences_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every sequence keeps its own row, and drafts share the rest."""
    pipe = certain_pipeline(monkeypatch, seqs=6, in_flight=1)
    for number in range(4):
        pipe.scheduler.add(new_sequence(number, 3, 20))
    batch = second_batch(pipe)
    assert len(batch.decodes.seq_ids) == 6
    assert set(batch.decodes.seq_ids) == {0, 1, 2, 3}


def test_drafts_leave_pages_for_other_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sequence that would need the last page for its drafts only the next token goes."""
    guess(monkeypatch, lambda _: 50, 1.0)
    cache = new_cache(4, 1, None, max_len=16, num_drafts=4)
    pipe = new_pipeline(cache, in_flight=1, speculative=FOUR)
    pipe.token_at = lambda *_: 50
    pipe.scheduler.add(new_sequence(0, 10, 6))
    batch = second_batch(pipe)
    assert batch.decodes.starts == (10,), (
        "positions 10 and 11 are on page 2 of 4, and one is to be left"
    )
    pipe.drain()


def test_a_sequence_whose_experts_are_returned_has_no_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guess(monkeypatch, lambda _: 50, 1.0)
    pipe = drafting_pipeline()
    pipe.scheduler.add(
        Sequence(0, (5, 6, 7), SamplingParams(max_tokens=9, return_experts=(0,)), 12)
    )
    pipe.drain()
    assert not pipe.num_drafts


def test_nothing_is_drafted_where_the_policy_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    guess(monkeypatch, lambda _: 50, 1.0)
    policy = FixedInFlightPolicy(2, 64)
    monkeypatch.setattr(policy, "draft_break_even", lambda _: NEVER)
    pipe = drafting_pipeline(policy=policy)
    pipe.scheduler.add(new_sequence(0, 5, 20))
    pipe.drain()
    assert not pipe.num_drafts


def test_no_sequence_has_drafts_while_a_prompt_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of either policy: the prompt's tokens are certain to be needed."""
    pipe = certain_pipeline(monkeypatch, in_flight=1, budget=8)
    pipe.scheduler.add(new_sequence(0, 3, 30))
    pipe.submit()
    pipe.answer()
    pipe.scheduler.add(new_sequence(1, 40, 2))
    for _ in range(5):
        batch = next_batch(pipe)
        assert len(batch.decodes.seq_ids) == 1
        pipe.answer()
    pipe.drain()
    assert pipe.num_accepted


def test_blocks_that_drafts_have_filled_are_found_by_the_next_sequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And what wrong drafts have left is not: its rows are checked when they are read."""
    for share in (1.0, 0.6):
        first = new_sequence(0, 6, 31)
        guess(monkeypatch, lambda text: 50 + len(text) % 7, share)
        pipe = drafting_pipeline(in_flight=1)
        pipe.token_at = lambda _, position: 50 + position % 7
        pipe.scheduler.add(first)
        pipe.drain()
        known = (*first.prompt_ids, *(50 + position % 7 for position in range(6, 37)))
        pipe.scheduler.add(Sequence(1, known, SamplingParams(max_tokens=3), len(known) + 3))
        pipe.drain()
        assert pipe.num_reused == 36, "of 37 tokens, the last of which was never computed"


@pytest.mark.parametrize("num_spare", range(4))
def test_where_pages_are_short_drafts_and_sequences_stay_together(
    monkeypatch: pytest.MonkeyPatch, num_spare: int
) -> None:
    """Of two sequences one is preempted when the other one needs a page, in the middle of making a
    micro-batch.
    """
    guess(monkeypatch, lambda text: 50 + len(text) % 7, 0.7)
    ring = 16
    for seed in range(20):
        rng = random.Random(seed)
        pipe = new_pipeline(
            CachePlan(4, (WindowClass(None, ring, ring + num_spare),), FOUR.max_drafts()),
            speculative=FOUR,
        )
        pipe.token_at = lambda _, position: 50 + position % 7
        for number in range(2):
            pipe.scheduler.add(
                new_sequence(number, rng.randint(1, 20), rng.randint(20, 40), max_len=64)
            )
        pipe.drain()
        assert all(len(pipe.tokens_of(number)) >= 20 for number in range(2))
