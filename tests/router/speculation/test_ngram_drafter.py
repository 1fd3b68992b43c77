"""Drafts from the text itself, against a plain search."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tramontane.router.speculation import ngram_drafter
from tramontane.router.speculation.ngram_drafter import MAX_PLACES, NgramDrafter


def _searched(text: Sequence[int], low: int, high: int, num_tokens: int) -> tuple[int, ...]:
    """Search all of the text."""
    end = len(text)
    places = [p for p in range(low, end) if list(text[p - low : p]) == list(text[end - low : end])][-MAX_PLACES:]
    if not places:
        return ()

    def common(place: int) -> int:
        count = 0
        while count < min(high, place) and text[place - 1 - count] == text[end - 1 - count]:
            count += 1
        return count

    best = max(places, key=lambda place: (common(place), place))
    known = list(text)
    for i in range(num_tokens):
        known.append(known[best + i])
    return tuple(known[end:])


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(1, 7),
    st.integers(1, 9),
)
def test_a_draft_is_what_followed_the_last_tokens(text: list[int], low: int, more: int, num_tokens: int, step: int) -> None:
    """Asked for at every step of a text that grows, some tokens at a time."""
    tokens: list[int] = []
    drafter = NgramDrafter(tokens, low, low + more)
    for start in range(0, len(text), step):
        tokens += text[start : start + step]
        assert drafter.draft(num_tokens) == _searched(tokens, low, low + more, num_tokens)


def test_the_examples_of_the_documentation() -> None:
    assert NgramDrafter([5, 6, 7, 8, 5, 6], 2, 5).draft(4) == (7, 8, 5, 6)
    assert NgramDrafter([1, 1, 1], 2, 5).draft(3) == (1, 1, 1)
    assert NgramDrafter([1, 2, 3], 2, 5).draft(3) == ()
    assert NgramDrafter([1], 2, 5).draft(3) == ()
    assert NgramDrafter([1, 1, 1], 2, 5).draft(0) == ()


def test_a_long_prompt_is_indexed_over_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_drafter, "TOKENS_PER_CALL", 10)
    text = [*range(100, 130), 100, 101]
    drafter = NgramDrafter(text, 2, 5)
    assert [drafter.draft(2) for _ in range(4)] == [(), (), (102, 103), (102, 103)], "of 32 tokens two have nothing before them"


def test_memory_is_bounded_and_the_newer_half_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_drafter, "MAX_INDEXED", 100)
    text = random.Random(1).sample(range(10_000), k=900)
    drafter = NgramDrafter(text, 2, 5)
    drafter.draft(1)
    assert len(drafter._places) == 50
    old, new = text[-60:-58], text[-20:-18]
    text += old
    assert drafter.draft(1) == ()
    text += new
    assert drafter.draft(1) == (text[902 - 2 - 18],)
