"""Thoughts are parsed apart from answers: the same two texts however an answer is cut, and nothing
of it is lost.
"""

import re
from collections.abc import Sequence
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from examples import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from thinking_models import SpelledTokenizer
from tokenizer_files import END_THINK, THINK, json_with_tokens, thinking_tekken

from tramontane.router.tokenization.backends import HfTokenizer, TekkenTokenizer
from tramontane.router.tokenization.reasoning_parser import (
    ReasoningFormat,
    ReasoningParser,
    find_reasoning_format,
    is_open_after,
)
from tramontane.router.tokenization.tokenizer import Tokenizer

BEGIN, END = "<think>", "</think>"
TEXT_MARKERS = ReasoningFormat(BEGIN, END, trims=True)


class _Parsed:
    """Both texts, in the pieces in which they came, and what the places say of each token."""

    def __init__(
        self,
        form: ReasoningFormat,
        tokenizer: Tokenizer,
        ids: Sequence[int],
        *,
        is_open: bool,
        only_first: bool = False,
    ) -> None:
        parser = ReasoningParser(form, tokenizer, is_open=is_open, only_first=only_first)
        splits = [parser.push(token_id) for token_id in ids] + [parser.finish()]
        self.content = "".join(split.content for split in splits)
        self.thought = "".join(split.thought for split in splits)
        self.places = [place for split in splits for place in split.places]
        assert len(self.places) == len(ids), "each token once"

    @property
    def texts(self) -> tuple[str, str]:
        return self.content, self.thought


def _cut(text: str, cuts: Sequence[int]) -> list[bytes]:
    """The text's bytes in pieces, which may be parts of characters."""
    data = text.encode()
    edges = [0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
    return [data[start:end] for start, end in pairwise(edges) if end > start]


def _parse_text(
    text: str,
    cuts: Sequence[int],
    form: ReasoningFormat = TEXT_MARKERS,
    *,
    is_open: bool = False,
    only_first: bool = False,
) -> _Parsed:
    pieces = _cut(text, cuts)
    return _Parsed(
        form, SpelledTokenizer(pieces), range(len(pieces)), is_open=is_open, only_first=only_first
    )


def _expected(text: str, *, is_open: bool, trims: bool = True) -> tuple[str, str]:
    """Both texts, by a regular expression over the whole text."""
    in_thought, content, thoughts, after_marker = is_open, "", [""] * is_open, False
    for part in re.split(f"({BEGIN}|{END})", text):
        if part == BEGIN:
            thoughts += [""] * (not in_thought)
            in_thought = True
        elif part == END:
            thoughts[-1:] = [
                thought.rstrip("\n") if in_thought and trims else thought
                for thought in thoughts[-1:]
            ]
            in_thought, after_marker = False, trims
        elif in_thought:
            thoughts[-1] += part
            thoughts[-1] = thoughts[-1].lstrip("\n") if trims else thoughts[-1]
        else:
            part = part.lstrip("\n") if after_marker else part
            after_marker = after_marker and not part
            content += part
    return content, "\n".join(filter(None, thoughts))


CHUNKS = st.sampled_from(
    [
        BEGIN,
        END,
        "<",
        "</",
        "think",
        ">",
        "<think",
        "/",
        "a",
        " ",
        "\n",
        "\n\n",
        "\u00e9",
        "\U0001f642",
        "x<y",
    ]
)
TEXTS = st.lists(CHUNKS, max_size=14).map("".join)
CUTS = st.lists(st.integers(0, 200), max_size=60)


@settings(deadline=None, max_examples=examples(400))
@given(text=TEXTS, cuts=CUTS, is_open=st.booleans())
@example(text="<think>a</think>\n\nb", cuts=list(range(40)), is_open=False)
@example(text="a</think>\n", cuts=[1, 3, 9], is_open=True)
@example(text="<<think>a\n</</think>b</think>c<think>d", cuts=list(range(60)), is_open=False)
@example(text="<think>\n<think>\na\n\n", cuts=list(range(60)), is_open=False)
def test_markers_that_are_text_split_any_text_alike_at_every_cut(
    text: str, cuts: list[int], is_open: bool
) -> None:
    at_once = _parse_text(text, [], is_open=is_open)
    assert at_once.texts == _expected(text, is_open=is_open)
    assert _parse_text(text, cuts, is_open=is_open).texts == at_once.texts


@settings(deadline=None, max_examples=examples(300))
@given(
    begin=st.text("ab<", min_size=1, max_size=4),
    end=st.text("ab<", min_size=1, max_size=4),
    text=st.text("ab<\n", max_size=24),
    cuts=CUTS,
    is_open=st.booleans(),
    only_first=st.booleans(),
)
@example(begin="bc", end="abcd", text="abcd", cuts=[3], is_open=False, only_first=False)
def test_any_markers_even_such_that_overlap_split_alike_at_every_cut(
    begin: str, end: str, text: str, cuts: list[int], is_open: bool, only_first: bool
) -> None:
    form = ReasoningFormat(begin, end, trims=True)
    whole, parts = (
        _parse_text(text, each, form, is_open=is_open, only_first=only_first) for each in ([], cuts)
    )
    assert whole.texts == parts.texts


@settings(deadline=None, max_examples=examples(200))
@given(text=TEXTS, cuts=CUTS, is_open=st.booleans())
def test_places_of_tokens_tell_thoughts_from_content(
    text: str, cuts: list[int], is_open: bool
) -> None:
    """Tokens of one character: the content is made of those that are not in a thought, each at its
    place.
    """
    pieces = [character.encode() for character in text]
    parsed = _Parsed(TEXT_MARKERS, SpelledTokenizer(pieces), range(len(pieces)), is_open=is_open)
    of_content = [
        (place.offset, text[i]) for i, place in enumerate(parsed.places) if not place.in_thought
    ]
    assert of_content == list(enumerate(parsed.content))
    several = _parse_text(text, cuts, is_open=is_open)
    assert all(
        place.in_thought or 0 <= place.offset <= len(several.content) for place in several.places
    )


@pytest.mark.parametrize(
    ("text", "is_open", "content", "thought"),
    [
        ("391", False, "391", ""),
        ("<think>\n17 * 23\n</think>\n\n391.", False, "391.", "17 * 23"),
        ("17 * 23\n</think>\n\n391.", True, "391.", "17 * 23"),
        ("<think></think>391", False, "391", ""),
        ("<think>\n\n</think>\n\n391", False, "391", ""),
        ("<think>17 * 2", False, "", "17 * 2"),
        ("<think>17 *\n", False, "", "17 *\n"),
        ("<think>17 </thi", False, "", "17 </thi"),
        ("Say <thin", False, "Say <thin", ""),
        ("a<think>b</think>c<think>d</think>e", False, "ace", "b\nd"),
        ("<think>a<think>b</think>c</think>d", False, "cd", "ab"),
        ("a</think>b", False, "ab", ""),
        ("\n\na", False, "\n\na", ""),
        ("<think>a\n\nb</think> c\n\n", False, " c\n\n", "a\n\nb"),
    ],
)
def test_what_is_a_thought(text: str, is_open: bool, content: str, thought: str) -> None:
    assert _parse_text(text, [], is_open=is_open).texts == (content, thought)
    assert _parse_text(text, range(99), is_open=is_open).texts == (content, thought)


def test_where_an_answer_follows_a_grammar_only_its_beginning_is_a_thought() -> None:
    for text, is_open, content, thought in (
        ('<think>a</think>\n\n{"a": "<think>b</think>"}', False, '{"a": "<think>b</think>"}', "a"),
        ('{"a": "<think>b</think>"}', False, '{"a": "<think>b</think>"}', ""),
        ('a</think>{"a": "</think>"}', True, '{"a": "</think>"}', "a"),
        ("<thin", False, "<thin", ""),
        ("<think>a</think><think>b</think>", False, "<think>b</think>", "a"),
    ):
        for cuts in ([], range(99)):
            assert _parse_text(text, cuts, is_open=is_open, only_first=True).texts == (
                content,
                thought,
            )


# Markers that are tokens


@cache
def _tokenizers() -> tuple[Tokenizer, Tokenizer, Tokenizer]:
    """Mistral's, and one in which the markers are added tokens: special ones, and such that have a
    text.
    """
    with TemporaryDirectory() as folder:
        tekken = TekkenTokenizer(thinking_tekken(Path(folder)))
        return tekken, *(_hf_tokenizer(Path(folder), special=special) for special in (True, False))


def _hf_tokenizer(folder: Path, *, special: bool) -> HfTokenizer:
    (folder / "tokenizer.json").write_text(
        json_with_tokens((BEGIN, END), special), encoding="utf-8"
    )
    return HfTokenizer(folder / "tokenizer.json")


def _form(tokenizer: Tokenizer) -> ReasoningFormat:
    form = find_reasoning_format(tokenizer)
    assert form is not None
    assert form.begin_id is not None
    assert form.end_id is not None
    return form


def test_formats_are_found() -> None:
    tekken, special, added = _tokenizers()
    assert _form(tekken) == ReasoningFormat("[THINK]", "[/THINK]", THINK, END_THINK)
    for tokenizer in (special, added):
        assert _form(tokenizer) == ReasoningFormat(BEGIN, END, 32000, 32001, trims=True)
        assert tokenizer.vocabulary()[32000:32002] == (b"", b""), (
            "a grammar names them by their ids"
        )
    plain = SpelledTokenizer([b"a"])
    assert find_reasoning_format(plain, "{{ messages }}") is None
    assert find_reasoning_format(plain, "{{ content.split('</think>')[-1] }}") == TEXT_MARKERS


SAID = st.sampled_from(
    ["a", " b", "\n", "\n\n", "<think>", "</think>", "[/THINK]", "[THINK]", "\u00e9\U0001f642", " "]
)
# texts, and markers: true for one that begins a thought
PARTS = st.lists(SAID | st.booleans(), max_size=10)


@settings(deadline=None, max_examples=examples(300))
@given(parts=PARTS, which=st.integers(0, 2), is_open=st.booleans(), num_lost=st.integers(0, 9))
@example(parts=["a", True, "\n", "b", "\n", False, "\n\n", "c"], which=2, is_open=False, num_lost=0)
@example(parts=[True, "<think>a</think>", False, "</think>"], which=2, is_open=False, num_lost=0)
def test_markers_that_are_tokens_are_known_by_their_ids(
    parts: list[str | bool], which: int, is_open: bool, num_lost: int
) -> None:
    """What only looks like a marker is text. Without its last tokens an answer may end within a
    character.
    """
    tokenizer = _tokenizers()[which]
    form = _form(tokenizer)
    marker_ids = {True: form.begin_id, False: form.end_id}
    said = [
        marker_ids[part] if isinstance(part, bool) else tokenizer.encode(part)[1:] for part in parts
    ]
    ids = [
        token_id
        for each in said
        for token_id in (each if isinstance(each, tuple) else (each,))
        if token_id is not None
    ]
    ids = ids[: max(len(ids) - num_lost, 0)]
    in_thought, content, thoughts = is_open, "", [""] * is_open
    for is_marker, group in groupby(ids, key=list(marker_ids.values()).__contains__):
        run = tuple(group)
        for token_id in run if is_marker else ():
            thoughts += [""] * (token_id == form.begin_id and not in_thought)
            in_thought = token_id == form.begin_id
        decoder = tokenizer.decoder()
        text = "" if is_marker else "".join(map(decoder.push, run)) + decoder.finish()
        if in_thought:
            thoughts[-1] += text
        else:
            content += text
    parsed = _Parsed(form, tokenizer, ids, is_open=is_open)
    if which == 0:
        assert parsed.texts == (content, "\n".join(filter(None, thoughts)))
    # but for what is trimmed
    for text, expected in zip(parsed.texts, (content, "".join(thoughts)), strict=True):
        assert re.sub(r"[ \n]", "", text) == re.sub(r"[ \n]", "", expected)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_prompt_may_end_inside_a_thought(which: int) -> None:
    tokenizer = _tokenizers()[which]
    form = _form(tokenizer)
    begin, end = form.begin_id, form.end_id
    assert begin is not None
    assert end is not None
    said = tokenizer.encode("Hi\n")[1:]
    control = tokenizer.encode("")[0]
    for prompt, is_open in (
        ((), False),
        ((control, *said), False),
        ((control, begin), True),
        ((control, begin, *said), True),
        ((control, begin, *said, end, *said), False),
        ((control, begin, *said, control, *said), False),
        ((control, end, *said, begin), True),
    ):
        assert is_open_after(form, tokenizer, prompt) is is_open, prompt


def test_a_prompt_may_end_inside_a_thought_whose_marker_is_text() -> None:
    tokenizer = SpelledTokenizer([b"Hi", b"<th", b"ink>", b"\n", b"</think>"])
    assert is_open_after(TEXT_MARKERS, tokenizer, (0, 1, 2, 3))
    assert not is_open_after(TEXT_MARKERS, tokenizer, (0, 1, 2, 4, 3))
    assert not is_open_after(TEXT_MARKERS, tokenizer, (1, 2, 0))
