"""However a text is cut into tokens, a client sees what comes before the first stop string, and
nothing of it.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import SupportsIndex

import pytest
from examples import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tramontane.cluster.config.engine_config import DEMO_MODEL
from tramontane.proto.errors import NotFiniteError, UnsatisfiableSchemaError
from tramontane.proto.request import NOT_FINITE_TOKEN, FinishReason, TokenEvent
from tramontane.router.openai.detokenizer import ChoiceDetokenizer, StopMatcher
from tramontane.router.tokenization.backends import SentencePieceTokenizer
from tramontane.router.tokenization.tokenizer import Tokenizer

EOS = 2
LETTERS = "ab"  # so few that stop strings begin, overlap and repeat everywhere


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return SentencePieceTokenizer(DEMO_MODEL / "tokenizer.model")


def _before_stop(text: str, stops: Sequence[str]) -> str | None:
    """The reference: read character by character until a stop string is complete, then drop the
    longest one there is.

    "xabcd" with stops "abc" and "b" is complete at its "b", so that "xa" is left.
    """
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))]
    return None


def _cut(text: str, at: Sequence[int]) -> list[str]:
    """ "abcd" cut at 1 and 3 is "a", "bc", "d"."""
    borders = [0, *sorted(min(border, len(text)) for border in at), len(text)]
    return [text[start:end] for start, end in pairwise(borders)]


def _run(pieces: Sequence[str], stops: Sequence[str]) -> tuple[list[str], bool]:
    """What is shown piece by piece (the last is what was held back), and whether a stop string was
    met.
    """
    matcher = StopMatcher(stops)
    shown = []
    for piece in pieces:
        now, stopped = matcher.push(piece)
        shown.append(now)
        if stopped:
            return shown, True
    return [*shown, matcher.finish()], False


TEXTS = st.text(LETTERS, max_size=24)
CUTS = st.lists(st.integers(0, 24), max_size=24)
STOP = st.text(LETTERS, min_size=1, max_size=5)


# The matcher


@settings(derandomize=True, deadline=None, max_examples=examples(300))
@given(text=TEXTS, at=CUTS, stop=STOP)
@example(text="aab", at=[1], stop="ab")
def test_one_stop_string_cuts_the_text_wherever_its_pieces_are_cut(
    text: str, at: list[int], stop: str
) -> None:
    shown, stopped = _run(_cut(text, at), [stop])
    assert stopped == (stop in text)
    assert "".join(shown) == text.split(stop)[0]


@settings(derandomize=True, deadline=None, max_examples=examples(300))
@given(text=TEXTS, stops=st.lists(STOP, max_size=4))
def test_several_stop_strings_cut_where_the_first_is_complete(text: str, stops: list[str]) -> None:
    shown, stopped = _run(list(text), stops)
    expected = _before_stop(text, stops)
    assert stopped == (expected is not None)
    assert "".join(shown) == (text if expected is None else expected)


@settings(derandomize=True, deadline=None, max_examples=examples(300))
@given(text=TEXTS, at=CUTS, stops=st.lists(STOP, max_size=4))
@example(text="bab", at=[], stops=["bab", "a"])
@example(text="bab", at=[1, 2], stops=["bab", "a"])
def test_several_stop_strings_cut_the_same_wherever_the_pieces_are_cut(
    text: str, at: list[int], stops: list[str]
) -> None:
    shown, stopped = _run(_cut(text, at), stops)
    expected = _before_stop(text, stops)
    assert stopped == (expected is not None)
    assert "".join(shown) == (text if expected is None else expected)


@settings(derandomize=True, deadline=None, max_examples=examples(300))
@given(text=TEXTS, at=CUTS, stops=st.lists(STOP, max_size=4))
def test_nothing_of_a_stop_string_is_ever_shown(text: str, at: list[int], stops: list[str]) -> None:
    shown, _ = _run(_cut(text, at), stops)
    whole = "".join(shown)
    assert text.startswith(whole)
    assert not any(stop in whole for stop in stops)


@settings(derandomize=True, deadline=None, max_examples=examples(300))
@given(text=TEXTS, at=CUTS, stops=st.lists(STOP, min_size=1, max_size=4))
def test_no_more_is_held_back_than_may_begin_a_stop_string(
    text: str, at: list[int], stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    pushed = shown = ""
    for piece in _cut(text, at):
        now, stopped = matcher.push(piece)
        if stopped:
            return
        pushed, shown = pushed + piece, shown + now
        held = pushed.removeprefix(shown)
        longest = max(
            n
            for n in range(len(pushed) + 1)
            if any(stop.startswith(pushed[len(pushed) - n :]) for stop in stops)
        )
        assert shown + held == pushed
        assert len(held) == longest


class _Counted(str):
    """Counts how often something is read of it."""

    num_reads = 0

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        self.num_reads += 1
        return super().__getitem__(key)


def test_stop_strings_that_resemble_the_text_cost_no_more_than_others() -> None:
    alike = [_Counted("a" * length + "b" + "c" * (1023 - length)) for length in (1023, *range(15))]
    matcher = StopMatcher(alike)
    for _ in range(2000):
        assert not matcher.push("a")[1]
    assert len(matcher.finish()) == 1023
    assert max(stop.num_reads for stop in alike) < 5 * 2000


@settings(derandomize=True, deadline=None, max_examples=examples(300))
@given(
    text=st.text(max_size=30), at=CUTS, stops=st.lists(st.text(min_size=1, max_size=3), max_size=3)
)
def test_a_text_without_stop_strings_comes_out_whole(
    text: str, at: list[int], stops: list[str]
) -> None:
    without = [stop for stop in stops if stop not in text]
    shown, stopped = _run(_cut(text, at), without)
    assert not stopped
    assert "".join(shown) == text


@settings(derandomize=True, deadline=None, max_examples=examples(300))
@given(text=st.text(max_size=30), at=CUTS)
def test_without_stop_strings_nothing_waits(text: str, at: list[int]) -> None:
    pieces = _cut(text, at)
    assert _run(pieces, []) == ([*pieces, ""], False)


def test_the_example_of_the_docstring_holds() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("xEN") == ("x", False)
    assert matcher.push("Q") == ("ENQ", False)
    assert matcher.push("EN") == ("", False)
    assert matcher.push("D and more") == ("", True)


def test_what_is_held_back_is_released_once() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("the EN") == ("the ", False)
    assert matcher.finish() == "EN"
    assert matcher.finish() == ""


def test_a_stop_string_longer_than_all_text_holds_it_back_to_the_end() -> None:
    assert _run(list("aaaa"), ["aaaaa"]) == (["", "", "", "", "aaaa"], False)
    assert _run(list("aaab"), ["aaaaa"]) == (["", "", "", "aaab", ""], False)


def _before_late_stop(pieces: Sequence[str], stops: Sequence[str], min_pieces: int) -> str | None:
    """As ``_before_stop``, but a stop string counts only if a piece from number ``min_pieces`` on
    completes it.
    """
    text = "".join(pieces)
    borders = list(accumulate(map(len, pieces)))
    for end in range(1, len(text) + 1):
        # of the piece that this character is in
        number = 1 + sum(border < end for border in borders)
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete and number >= min_pieces:
            return text[: end - max(map(len, complete))]
    return None


@settings(derandomize=True, deadline=None, max_examples=examples(500))
@given(
    text=TEXTS, at=CUTS, stops=st.lists(STOP, min_size=1, max_size=3), min_pieces=st.integers(0, 8)
)
@example(text="aaa", at=[1, 2], stops=["aa"], min_pieces=3)
@example(text="bab", at=[1, 2], stops=["bab", "a"], min_pieces=3)
def test_stop_strings_are_text_before_they_may_stop(
    text: str, at: list[int], stops: list[str], min_pieces: int
) -> None:
    pieces = [piece for piece in _cut(text, at) if piece]
    matcher = StopMatcher(stops)
    shown, stopped = "", False
    for number, piece in enumerate(pieces, start=1):
        now, stopped = matcher.push(piece, may_stop=number >= min_pieces)
        shown += now
        if stopped:
            break
    shown += "" if stopped else matcher.finish()
    expected = _before_late_stop(pieces, stops, min_pieces)
    assert stopped == (expected is not None)
    assert shown == (text if expected is None else expected)


# A choice


def test_no_stop_string_ends_a_choice_before_min_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one, two, three, four")
    commas = [
        number
        for number, token_id in enumerate(ids, start=1)
        if "," in tokenizer.decode((token_id,))
    ]
    for min_tokens, expected in (
        (commas[0], " one"),
        (commas[0] + 1, " one, two"),
        (len(ids), " one, two, three, four"),
    ):
        choice = ChoiceDetokenizer(tokenizer, [","], min_tokens)
        assert (
            "".join(choice.push(event) for event in _events(ids, FinishReason.LENGTH)) == expected
        )
        assert choice.num_tokens >= min_tokens


def _event(token_id: int, finish: FinishReason | None = None) -> TokenEvent:
    return TokenEvent(0, token_id, finish)


def _events(token_ids: Sequence[int], finish: FinishReason) -> list[TokenEvent]:
    return [_event(token_id) for token_id in token_ids[:-1]] + [_event(token_ids[-1], finish)]


def test_every_token_counts_the_end_token_too(tokenizer: Tokenizer) -> None:
    ids = (*tokenizer.encode("Speak, my lord."), EOS)
    choice = ChoiceDetokenizer(tokenizer, [])
    shown = [choice.push(event) for event in _events(ids, FinishReason.STOP)]
    assert "".join(shown) == " Speak, my lord."
    assert choice.num_tokens == len(ids)
    assert choice.finish is FinishReason.STOP


def test_a_choice_continues_until_its_last_token(tokenizer: Tokenizer) -> None:
    choice = ChoiceDetokenizer(tokenizer, [])
    for number, token_id in enumerate(tokenizer.encode("Speak, my"), start=1):
        choice.push(_event(token_id))
        assert choice.finish is None
        assert choice.num_tokens == number
    choice.push(_event(7, FinishReason.LENGTH))
    assert choice.finish is FinishReason.LENGTH


@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT])
def test_the_reason_of_the_end_is_the_last_tokens(
    tokenizer: Tokenizer, finish: FinishReason
) -> None:
    choice = ChoiceDetokenizer(tokenizer, ["never met"])
    choice.push(_event(7, finish))
    assert choice.finish is finish


def test_the_token_that_completes_a_stop_string_counts_and_later_ones_do_not(
    tokenizer: Tokenizer,
) -> None:
    ids = tokenizer.encode("one, two, three")
    pieces = [tokenizer.decode((token_id,)) for token_id in ids]
    first_comma = next(index for index, piece in enumerate(pieces) if "," in piece)
    choice = ChoiceDetokenizer(tokenizer, [","])
    shown = [choice.push(event) for event in _events(ids, FinishReason.LENGTH)]
    assert "".join(shown) == " one"
    assert choice.num_tokens == first_comma + 1
    assert choice.finish is FinishReason.STOP


def test_a_stop_string_met_by_the_last_allowed_token_is_a_stop(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one, two")
    choice = ChoiceDetokenizer(tokenizer, ["two"])
    shown = [choice.push(event) for event in _events(ids, FinishReason.LENGTH)]
    assert "".join(shown) == " one, "
    assert choice.finish is FinishReason.STOP
    assert choice.num_tokens == len(ids)


def test_what_was_held_back_comes_with_the_last_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one, two")
    choice = ChoiceDetokenizer(tokenizer, ["two thousand"])
    events = _events(ids, FinishReason.LENGTH)
    before = "".join(choice.push(event) for event in events[:-1])
    assert "two" not in before
    assert before + choice.push(events[-1]) == " one, two"
    assert choice.finish is FinishReason.LENGTH


def test_an_unfinished_character_ends_as_a_replacement_of_each_byte(tokenizer: Tokenizer) -> None:
    smiley = tokenizer.encode("\U0001f600")[-4:]
    choice = ChoiceDetokenizer(tokenizer, ["\ufffd!"])
    assert [choice.push(event) for event in _events(smiley[:2], FinishReason.LENGTH)] == [
        "",
        "\ufffd\ufffd",
    ]


def test_a_replacement_character_at_the_end_may_complete_a_stop_string(
    tokenizer: Tokenizer,
) -> None:
    smiley = tokenizer.encode("\U0001f600")[-4:]
    choice = ChoiceDetokenizer(tokenizer, ["\ufffd"])
    assert [choice.push(event) for event in _events(smiley[:2], FinishReason.LENGTH)] == ["", ""]
    assert choice.finish is FinishReason.STOP


def test_without_a_tokenizer_tokens_are_counted_and_say_nothing() -> None:
    choice = ChoiceDetokenizer(None, [])
    assert [choice.push(event) for event in _events([5, 6, 7], FinishReason.LENGTH)] == ["", "", ""]
    assert choice.num_tokens == 3
    assert choice.finish is FinishReason.LENGTH


@settings(derandomize=True, deadline=None, max_examples=examples(300))
@given(
    ids=st.lists(st.integers(0, 999), min_size=1, max_size=30),
    start=st.integers(0, 40),
    length=st.integers(1, 6),
    finish=st.sampled_from([FinishReason.LENGTH, FinishReason.STOP]),
)
def test_any_tokens_show_the_text_up_to_a_stop_string_taken_from_it(
    tokenizer: Tokenizer, ids: list[int], start: int, length: int, finish: FinishReason
) -> None:
    continuing = tokenizer.decoder()
    whole = "".join(map(continuing.push, ids)) + continuing.finish()
    stop = whole[start : start + length] or "never met"
    choice = ChoiceDetokenizer(tokenizer, [stop])
    shown = "".join(choice.push(event) for event in _events(ids, finish))
    assert shown == whole.split(stop)[0]
    if stop not in whole:
        assert (choice.finish, choice.num_tokens) == (finish, len(ids))
        return
    assert choice.finish is FinishReason.STOP
    needed = whole.index(stop) + len(stop)
    num_chars = list(accumulate(map(len, map(tokenizer.decoder().push, ids))))
    assert choice.num_tokens == next(
        (number for number, there in enumerate(num_chars, start=1) if there >= needed), len(ids)
    )


def test_a_sequence_that_ended_with_an_error_has_no_text() -> None:
    text = ChoiceDetokenizer(None, ())
    text.push(TokenEvent(0, 5))
    with pytest.raises(UnsatisfiableSchemaError, match="as its schema requires"):
        text.push(TokenEvent(0, 5, FinishReason.ERROR))
    with pytest.raises(NotFiniteError, match="are not finite"):
        text.push(TokenEvent(0, NOT_FINITE_TOKEN, FinishReason.ERROR))
