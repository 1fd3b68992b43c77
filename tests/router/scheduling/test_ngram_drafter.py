"""Drafts from the text itself, against a plain search."""

import random
import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tramontane.proto.plan import SpeculativeConfig
from tramontane.router.scheduling import model_drafter
from tramontane.router.scheduling.model_drafter import MAX_PLACES, NgramDrafter


def _searched(text: Sequence[int], low: int, high: int, num_tokens: int) -> tuple[int, ...]:
    """Search all of the text."""
    end = len(text)
    places = [p for p in range(low, end) if list(text[p - low : p]) == list(text[end - low : end])][
        -MAX_PLACES:
    ]
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
def test_a_draft_is_what_followed_the_last_tokens(
    text: list[int], low: int, more: int, num_tokens: int, step: int
) -> None:
    """Asked for at every step of a text that grows, some tokens at a time."""
    tokens: list[int] = []
    drafter = NgramDrafter(tokens, low, low + more)
    for start in range(0, len(text), step):
        tokens += text[start : start + step]
        drafter.index(99)
        assert drafter.draft(num_tokens) == _searched(tokens, low, low + more, num_tokens)


def _drafted(text: list[int], num_tokens: int) -> tuple[int, ...]:
    drafter = NgramDrafter(text, 2, 5)
    drafter.index(99)
    return drafter.draft(num_tokens)


def test_the_examples_of_the_documentation() -> None:
    assert _drafted([5, 6, 7, 8, 5, 6], 4) == (7, 8, 5, 6)
    assert _drafted([1, 1, 1], 3) == (1, 1, 1)
    assert _drafted([1, 2, 3], 3) == ()
    assert _drafted([1], 3) == ()
    assert _drafted([1, 1, 1], 0) == ()


def test_a_long_prompt_is_indexed_in_pieces() -> None:
    text = [*range(100, 130), 100, 101]
    drafter, drafts = NgramDrafter(text, 2, 5), []
    assert [(drafter.index(10), drafts.append(drafter.draft(2)))[0] for _ in range(4)] == [
        10,
        10,
        10,
        0,
    ]
    assert drafts == [(), (), (102, 103), (102, 103)], "of 32 tokens two have nothing before them"


def test_of_a_longer_prompt_the_end_is_indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_drafter, "MAX_INDEXED", 10)
    drafter = NgramDrafter([1, 2, 3, *range(100, 130), 1, 2], 2, 5)
    assert drafter.index(99) == 10
    assert drafter.draft(1) == ()


def test_memory_is_bounded_and_what_was_not_seen_for_longest_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_drafter, "MAX_INDEXED", 100)
    text = random.Random(1).sample(range(10_000), k=90)
    drafter = NgramDrafter(text, 2, 5)
    drafter.index(999)
    repeated, forgotten, new = text[:2], text[10:12], text[80:82]
    text += [*repeated, *random.Random(2).sample(range(20_000, 30_000), k=12)]
    drafter.index(999)
    assert len(drafter._places) == 50
    for last, follower in ((forgotten, ()), (new, (text[82],)), (repeated, (text[92],))):
        text += last
        drafter.index(999)
        assert drafter.draft(1) == follower


@pytest.mark.parametrize("size", [1, 2, 5, 10])
@pytest.mark.parametrize(("period", "num_periods"), [(40_000, 1), (16_000, 5)])
def test_an_index_takes_no_more_than_is_planned(size: int, period: int, num_periods: int) -> None:
    """A text that does not repeat itself, and one in which as many n-grams as are kept stand in as
    many places as are.
    """
    draw = random.Random(size)
    tokens = [draw.randrange(32_000) for _ in range(period)] * num_periods
    planned = SpeculativeConfig(5, size, size).index_bytes(1, len(tokens))
    drafter = NgramDrafter([], size, size)
    drafter._tokens = tokens
    tracemalloc.start()
    try:
        while drafter.index(1000):
            pass
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (0.3 if num_periods == 1 else 0.6) * planned < used <= planned
