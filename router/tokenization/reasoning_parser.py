"""Separates a model's reasoning from its answer, token by token.

    form = chat.reasoning_format
    parser = ReasoningParser(form, tokenizer, is_open=is_open_after(form, tokenizer, prompt_ids))
    for token_id in answer:
        content, thought, places = parser.push(token_id)
    content, thought, places = parser.finish()

A format's markers are either tokens, which no text can produce ([THINK], and <think> in most
vocabularies), or text. Either way the two texts depend only on the tokens, not on how they are
batched. Markers are in neither text. They do not nest: the first end marker ends a thought, and an
unpaired marker has no effect. Several thoughts are joined as lines, as mistral-common joins them.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tramontane.router.tokenization.tokenizer import (
    THINK_MARKERS,
    THINK_TEXTS,
    IncrementalDecoder,
    Tokenizer,
)

NUM_TAIL_IDS = 64  # last tokens of a prompt, whose text shows whether it ends with a marker


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers before and after a thought: texts and, unless they are plain text, token ids.

    ``trims``: line breaks next to a marker belong to it, as templates with <think> write them.
    Mistral's formats write none.
    """

    begin: str
    end: str
    begin_id: int | None = None
    end_id: int | None = None
    trims: bool = False

    @property
    def has_ids(self) -> bool:
        """Whether both markers are tokens."""
        return self.begin_id is not None and self.end_id is not None


def find_reasoning_format(tokenizer: Tokenizer, template: str = "") -> ReasoningFormat | None:
    """Return the markers that a tokenizer has as tokens, else the markers that a Jinja template
    writes as text; None without reasoning.
    """
    for begin, end in THINK_MARKERS:
        begin_id, end_id = tokenizer.added_id(begin), tokenizer.added_id(end)
        if begin_id is not None and end_id is not None:
            return ReasoningFormat(begin, end, begin_id, end_id, trims=(begin, end) == THINK_TEXTS)
    begin, end = THINK_TEXTS
    return ReasoningFormat(begin, end, trims=True) if begin in template or end in template else None


def is_open_after(form: ReasoningFormat, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> bool:
    """Return whether a prompt ends inside a thought, so that the answer continues it.

    That is so if the last marker is a begin marker, and no control token, which would begin another
    message, is after it.
    """
    if not form.has_ids:
        return tokenizer.decode(tuple(prompt_ids[-NUM_TAIL_IDS:])).rstrip().endswith(form.begin)
    for token_id in reversed(prompt_ids):
        if token_id == form.begin_id:
            return True
        if token_id == form.end_id or not tokenizer.bytes_of(token_id):
            return False
    return False


class Place(NamedTuple):
    """Where a token begins: in a thought or its markers, or at this index of the content."""

    in_thought: bool
    offset: int = 0


class Split(NamedTuple):
    """The additions of a token to both texts, and the places of tokens that are decided now: in
    order, each token once.
    """

    content: str
    thought: str
    places: Sequence[Place]


class ReasoningParser:
    """Parser for one sequence. ``is_open``: the sequence begins inside a thought.

    ``only_first``: the sequence follows a grammar that allows a thought only at the beginning;
    later markers that are text belong to the answer, such as a value in its JSON. Markers that are
    tokens cannot occur there. ``is_text_start``: the sequence is the beginning of a text, and does
    not continue a message.
    """

    def __init__(
        self,
        form: ReasoningFormat,
        tokenizer: Tokenizer,
        *,
        is_open: bool = False,
        only_first: bool = False,
        is_text_start: bool = True,
    ) -> None:
        self._form, self._tokenizer = form, tokenizer
        self._decoder: IncrementalDecoder = tokenizer.decoder(is_text_start=is_text_start)
        self._texts = _TwoTexts(form.trims, is_open)
        self._scanner = None if form.has_ids else _MarkerScanner(form, self._texts, only_first)

    @property
    def in_thought(self) -> bool:
        """Whether the text so far ends inside a thought."""
        return self._texts.in_thought

    def is_of_thought(self, token_id: int) -> bool:
        """Return whether this token, if it came next, would certainly belong to a thought: inside
        of one, or a marker.
        """
        return self._texts.in_thought or (
            self._form.has_ids and token_id in (self._form.begin_id, self._form.end_id)
        )

    def push(self, token_id: int) -> Split:
        """Take the next token."""
        if self._scanner is not None:
            text, offset = self._decoder.push_with_offset(token_id)
            return self._texts.take(self._scanner.push(text, offset))
        if token_id in (self._form.begin_id, self._form.end_id):
            self._texts.add(self._decoder.finish())
            self._texts.mark(begins=token_id == self._form.begin_id)
            self._decoder = self._tokenizer.decoder(is_text_start=not self._texts.has_begun)
            return self._texts.take([Place(in_thought=True)])
        text, offset = self._decoder.push_with_offset(token_id)
        return self._texts.take([self._texts.add(text, offset)])

    def finish(self) -> Split:
        """Return the remaining text, at the end of the sequence."""
        if self._scanner is not None:
            places = self._scanner.finish(self._decoder.finish())
        else:
            self._texts.add(self._decoder.finish())
            places = []
        self._texts.end()
        return self._texts.take(places)


class _TwoTexts:
    """The content and the reasoning so far; new text is appended to one of them."""

    def __init__(self, trims: bool, in_thought: bool) -> None:
        self._trims, self.in_thought = trims, in_thought
        self._content: list[str] = []  # since ``take``
        self._thought: list[str] = []
        self._num_content = 0  # characters of all content
        self._is_after_marker = False  # and the content since has been line breaks, if anything
        self._is_thought_empty, self._has_thought = True, False  # this one; any
        # at the end of this thought so far: they are dropped if a marker follows
        self._num_breaks = 0

    @property
    def has_begun(self) -> bool:
        """Whether the text that grows now has any characters."""
        return not self._is_thought_empty if self.in_thought else self._num_content > 0

    def mark(self, *, begins: bool) -> None:
        """Take a marker. A begin marker inside a thought has no effect."""
        if begins and not self.in_thought:
            self._is_thought_empty = True
        if not begins:
            self._num_breaks, self._is_after_marker = 0, self._trims
        self.in_thought = begins

    def add(self, text: str, offset: int = 0) -> Place:
        """Add text; return the place of a token that begins ``offset`` characters after the
        beginning of this text.

        Line breaks after a marker belong to it, and so does a token of only line breaks.
        """
        if self.in_thought:
            self._add_thought(text)
            return Place(in_thought=True)
        rest = text.lstrip("\n") if self._is_after_marker else text
        if text and not rest:
            return Place(in_thought=True)
        self._is_after_marker = self._is_after_marker and not rest
        start = self._num_content
        self._content.append(rest)
        self._num_content += len(rest)
        return Place(False, start + max(offset - (len(text) - len(rest)), 0))

    def end(self) -> None:
        """Take the end of the sequence: line breaks before it are before no marker."""
        if self.in_thought and self._num_breaks and not self._is_thought_empty:
            self._thought.append("\n" * self._num_breaks)
        self._num_breaks = 0

    def take(self, places: Sequence[Place]) -> Split:
        """Return the text added since the last call."""
        split = Split("".join(self._content), "".join(self._thought), places)
        self._content, self._thought = [], []
        return split

    def _add_thought(self, text: str) -> None:
        if self._trims:
            text = text.lstrip("\n") if self._is_thought_empty else text
            body = text.rstrip("\n")
            num_breaks = len(text) - len(body)
            text, self._num_breaks = (
                ("\n" * self._num_breaks + body, num_breaks)
                if body
                else ("", self._num_breaks + num_breaks)
            )
        if not text:
            return
        if self._is_thought_empty and self._has_thought:
            self._thought.append("\n")
        self._thought.append(text)
        self._is_thought_empty, self._has_thought = False, True


class _MarkerScanner:
    """Finds markers that are text, and holds back text that may become one. A token waits until its
    first character is decided.
    """

    def __init__(self, form: ReasoningFormat, texts: _TwoTexts, only_first: bool) -> None:
        # and whether they begin thoughts
        self._markers: tuple[tuple[str, bool], ...] = ((form.begin, True), (form.end, False))
        self._form, self._texts, self._only_first = form, texts, only_first
        self._held = ""  # characters that are not decided
        self._num_decided = self._num_pushed = 0  # characters
        # where tokens begin, counted from the beginning of the sequence
        self._waiting: deque[int] = deque()

    def push(self, text: str, offset: int) -> list[Place]:
        """Take the text of a token that begins ``offset`` characters after the text's beginning."""
        self._waiting.append(self._num_pushed + offset)
        return self._scan(text)

    def finish(self, text: str) -> list[Place]:
        """Take the last text, and decide everything."""
        places = self._scan(text) + self._decide(self._held)
        self._held = ""
        return places + [self._texts.add("") for _ in range(len(self._waiting))]

    def _scan(self, text: str) -> list[Place]:
        """Decide as much as possible. Of overlapping markers, the first complete one counts, or
        else the longest.
        """
        self._num_pushed += len(text)
        self._held += text
        places: list[Place] = []
        while found := self._find():
            end, start, begins = found
            places += self._decide(self._held[:start])
            self._num_decided += end - start
            places += [Place(in_thought=True) for _ in range(self._pop_waiting())]
            self._texts.mark(begins=begins)
            self._held = self._held[end:]
            if self._only_first and not begins:
                self._markers = ()
        num_decided = len(self._held) - max(
            (_overlap(self._held, each) for each, _ in self._markers), default=0
        )
        places += self._decide(self._held[:num_decided])
        self._held = self._held[num_decided:]
        return places

    def _find(self) -> tuple[int, int, bool] | None:
        """Return the end and the start of the next marker, and whether it begins a thought."""
        begin = self._form.begin
        if (
            self._only_first
            and not self._texts.in_thought
            and not begin.startswith(self._held[: len(begin)])
        ):
            self._markers = ()  # the answer has begun
        found = [
            (at + len(each), at, begins)
            for each, begins in self._markers
            if (at := self._held.find(each)) >= 0
        ]
        return min(found, default=None)

    def _decide(self, text: str) -> list[Place]:
        """Add text without markers, in parts that begin where tokens begin."""
        places: list[Place] = []
        while text:
            start = self._num_decided
            ends = [at - start for at in self._waiting if start < at < start + len(text)]
            part = text[: min(ends, default=len(text))]
            place = self._texts.add(part)
            self._num_decided += len(part)
            places += [place] * self._pop_waiting()
            text = text[len(part) :]
        return places

    def _pop_waiting(self) -> int:
        """Remove the waiting tokens that begin in decided text, and return their number."""
        num_popped = 0
        while self._waiting and self._waiting[0] < self._num_decided:
            self._waiting.popleft()
            num_popped += 1
        return num_popped


def _overlap(text: str, marker: str) -> int:
    """Return the length of the longest suffix of a text that is a prefix of a marker: 2 for "a <t"
    and "<think>".
    """
    lengths = range(min(len(text), len(marker) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(marker[:length])), 0)
