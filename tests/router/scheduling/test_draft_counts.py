"""How many drafts of a sequence were right: its own count, whatever else is computed, and however
often it begins again.
"""

import random
from collections.abc import Callable

import pytest
from fake_pipeline import EOS, FakePipeline, new_cache, new_pipeline, new_sequence
from guessing_drafter import WRONG, guess

from tramontane.proto.plan import CachePlan, SpeculativeConfig, WindowClass
from tramontane.router.scheduling.sequence import Sequence

FOUR = SpeculativeConfig(4, 1, 3)


def _token_at(_seq_id: int, position: int) -> int:
    return 50 + position % 7


def _pipeline(**settings: object) -> FakePipeline:
    pipe = new_pipeline(new_cache(4, 4, None, 9, num_drafts=4), speculative=FOUR, **settings)  # type: ignore[arg-type]
    pipe.token_at = _token_at
    return pipe


def _counts(*sequences: Sequence) -> tuple[int, int]:
    return sum(each.num_draft_tokens for each in sequences), sum(
        each.num_accepted_draft_tokens for each in sequences
    )


# What is drafted for a position, and the drafts of 30 tokens after the first, and the right ones of
# them.
GUESSES: dict[str, tuple[Callable[[int], int], tuple[int, int]]] = {
    # six times four, each with one more token
    "right": (lambda position: _token_at(0, position), (24, 24)),
    "wrong": (lambda _: WRONG, (26 * 4 + 3 + 2 + 1, 0)),  # none beyond the end
    # Of 8 the draft is right; then of two in a row, and every third token is sampled in place of a
    # wrong draft.
    "partly right": (
        lambda position: WRONG if position % 3 == 0 else _token_at(0, position),
        (9 * 4 + 3, 1 + 9 * 2),
    ),
}


@pytest.mark.parametrize("kind", GUESSES)
def test_drafts_of_a_sequence_and_those_that_became_its_tokens(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    draft, expected = GUESSES[kind]
    guess(monkeypatch, lambda text: draft(len(text)), 1.0)
    pipe, sequence = _pipeline(in_flight=1), new_sequence(0, 7, 31)
    pipe.scheduler.add(sequence)
    pipe.drain()
    assert len(pipe.tokens_of(0)) == 31
    assert _counts(sequence) == expected


def test_drafts_after_the_end_were_not_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four drafts the third is the end of the output, and the fourth would come after it."""
    pipe, sequence = _pipeline(in_flight=1), new_sequence(0, 7, 31)
    pipe.token_at = lambda _, position: EOS if position == 10 else 50
    guess(monkeypatch, lambda text: pipe.token_at(0, len(text)), 1.0)
    pipe.scheduler.add(sequence)
    pipe.drain()
    assert len(pipe.tokens_of(0)) == 4
    assert _counts(sequence) == (4, 3)


def test_each_sequence_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong, silent = new_sequence(0, 7, 21), new_sequence(1, 7, 21), new_sequence(2, 7, 1)
    guess(
        monkeypatch,
        lambda text: _token_at(0, len(text)) if tuple(text[:7]) == right.prompt_ids else WRONG,
        1.0,
    )
    pipe = _pipeline(seqs=16)
    for sequence in (right, wrong, silent):
        pipe.scheduler.add(sequence)
    pipe.drain()
    assert right.num_accepted_draft_tokens == right.num_draft_tokens > 0
    assert wrong.num_draft_tokens > wrong.num_accepted_draft_tokens == 0
    assert _counts(silent) == (0, 0)
    assert _counts(right, wrong) == (pipe.num_drafts, pipe.num_accepted)


@pytest.mark.parametrize("num_spare", range(4))
def test_a_preemption_forgets_none(monkeypatch: pytest.MonkeyPatch, num_spare: int) -> None:
    """Of two sequences one is preempted when the other one needs a page."""
    guess(monkeypatch, lambda text: _token_at(0, len(text)), 0.7)
    num_preempted = num_forgettable = 0
    for seed in range(20):
        rng = random.Random(seed)
        pipe = new_pipeline(
            CachePlan(4, (WindowClass(None, 16, 16 + num_spare),), FOUR.max_drafts()),
            speculative=FOUR,
        )
        pipe.token_at = _token_at
        sequences = [
            new_sequence(number, rng.randint(1, 20), rng.randint(20, 40), max_len=64)
            for number in range(2)
        ]
        for sequence in sequences:
            pipe.scheduler.add(sequence)
        while pipe.in_flight or pipe.submit():
            before = pipe.scheduler.num_preempted
            while pipe.submit():
                pass
            if pipe.scheduler.num_preempted > before:
                num_forgettable += sum(
                    map(bool, _counts(*(s for s in sequences if s.speculation is None)))
                )
            pipe.answer()
        num_preempted += pipe.scheduler.num_preempted
        assert _counts(*sequences) == (pipe.num_drafts, pipe.num_accepted)
    assert num_preempted
    assert num_forgettable, "some had had drafts before"


def test_a_failure_of_the_pipeline_forgets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    guess(monkeypatch, lambda text: _token_at(0, len(text)), 0.7)
    pipe = _pipeline()
    sequences = [new_sequence(number, 7, 60) for number in range(2)]
    for sequence in sequences:
        pipe.scheduler.add(sequence)
    for _ in range(12):
        pipe.submit()
        pipe.answer()
    before = _counts(*sequences)
    assert min(before) > 0
    pipe.submit()
    pipe.scheduler.restart(pipe.scheduler.epoch + 1)
    pipe.fence()
    assert _counts(*sequences) == before, "what was in flight has become nothing"
    pipe.drain()
    assert _counts(*sequences) == (pipe.num_drafts, pipe.num_accepted)
    assert min(map(int.__sub__, _counts(*sequences), before)) > 0
