"""Separates the text of an answer from its tool calls in Mistral's formats, token by token.

    parser = ToolCallParser(tokenizer, chat.tool_format)
    for event in events:
        calls = parser.push(event.token_id)
        if not parser.is_calling:
            text = detokenizer.push(event)  # as without tools

The deltas of a call are OpenAI's: the first has its id and name, all have pieces of its arguments;
``merge_deltas`` joins them. A choice with a tool call finishes with the reason ``tool_calls``
instead of ``stop``.
"""

import itertools
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from tramontane.router.tokenization.chat import ToolCall, ToolFormat
from tramontane.router.tokenization.history import ID_LENGTH, ID_LETTERS, MISTRAL_ID, derived_id
from tramontane.router.tokenization.tokenizer import IncrementalDecoder, Tokenizer

# precedes a call's arguments in a list
HEAD = re.compile(r'[\[\s,}]*\{\s*"name":\s*"([^"]*)",\s*"arguments":\s*')


def new_call_id() -> str:
    """Return a random id of nine letters and digits."""
    return "".join(secrets.choice(ID_LETTERS) for _ in range(ID_LENGTH))


def call_ids(answer_id: str) -> Callable[[], str]:
    """Return a function like ``new_call_id`` with ids derived from the answer's id, so that another
    ingress makes the same ids.
    """
    numbers = itertools.count()
    return lambda: derived_id(f"{answer_id} {next(numbers)}")


@dataclass(frozen=True, slots=True)
class CallDelta:
    """Addition to the call with this index; ``id`` and ``name`` are in the first one."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None

    def as_openai(self) -> dict[str, Any]:
        """Return the delta as an item of a streamed message's ``tool_calls``."""
        if self.name is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


def merge_deltas(deltas: Iterable[CallDelta]) -> tuple[ToolCall, ...]:
    """Return the calls of a whole answer."""
    calls: list[ToolCall] = []
    for delta in deltas:
        if delta.name is not None and delta.id is not None:
            calls.append(ToolCall(delta.id, delta.name, delta.arguments))
        else:
            calls[-1] = ToolCall(
                calls[-1].id, calls[-1].name, calls[-1].arguments + delta.arguments
            )
    return tuple(calls)


class CallJoiner:
    """Keeps the deltas of a call until it is complete, and then returns one delta with all of
    it.
    """

    def __init__(self) -> None:
        self._held: list[CallDelta] = []  # of the last call

    def push(self, deltas: Iterable[CallDelta], *, is_complete: bool) -> list[CallDelta]:
        """Return a delta for each call that these deltas end. ``is_complete``: the last call has
        ended.
        """
        ended: list[CallDelta] = []
        for delta in deltas:
            if delta.name is not None:
                ended += self.finish()
            self._held.append(delta)
        return [*ended, *(self.finish() if is_complete else ())]

    def finish(self) -> list[CallDelta]:
        """Return a delta for the last call, which may be cut; nothing if it has been returned."""
        held, self._held = self._held, []
        arguments = "".join(delta.arguments for delta in held)
        return [replace(held[0], arguments=arguments)] if held else []


class ToolCallParser:
    """Parser for one sequence. It follows a grammar (see ``structured.grammar``), so its calls are
    well-formed but may be cut.
    """

    def __init__(
        self, tokenizer: Tokenizer, tool_format: ToolFormat, new_id: Callable[[], str] = new_call_id
    ) -> None:
        self._tokenizer, self._format, self._new_id = tokenizer, tool_format, new_id
        self._decoder: IncrementalDecoder | None = None
        self._rest = ""  # decoded and not yet returned
        self._name: str | None = None  # of the call whose id is being written
        self._object: _JsonObjectScanner | None = None  # None outside of arguments
        self._ids: set[str] = set()
        self.num_calls = 0

    @property
    def is_calling(self) -> bool:
        """True once calls have begun; all later tokens belong to calls."""
        return self._decoder is not None

    @property
    def is_in_arguments(self) -> bool:
        """Whether the last call has begun and its arguments have not ended."""
        return self._object is not None

    def push(self, token_id: int) -> list[CallDelta]:
        """Return the new parts of calls from this token."""
        if token_id == self._format.calls:
            self._decoder, self._rest, self._object = self._tokenizer.decoder(), "", None
            self._name = None
        elif self._decoder is not None and token_id == self._format.call_id:
            self._name, self._rest = self._rest.strip(), ""
        elif self._decoder is not None and token_id == self._format.args:
            written, self._rest = self._rest.strip(), ""
            return self._start_call(self._name or written, written if self._name else "")
        elif self._decoder is not None:
            self._rest += self._decoder.push(token_id)
        return self._drain()

    def _start_call(self, name: str, call_id: str = "") -> list[CallDelta]:
        """Begin a call. ``call_id``: as the model has written it, used if it is a new one of
        Mistral's.
        """
        self._object = _JsonObjectScanner()
        self.num_calls += 1
        derived = self._new_id()
        if not MISTRAL_ID.fullmatch(call_id) or call_id in self._ids:
            call_id = derived
        self._ids.add(call_id)
        return [CallDelta(self.num_calls - 1, "", call_id, name)]

    def _drain(self) -> list[CallDelta]:
        deltas: list[CallDelta] = []
        while True:
            if self._object is None:
                head = HEAD.match(self._rest) if self._format.args is None else None
                if head is None:
                    return deltas
                self._rest = self._rest[head.end() :]
                deltas += self._start_call(head[1])
            assert self._object is not None
            if not self._object.has_begun:
                self._rest = self._rest.lstrip()
            end = self._object.find(self._rest)
            arguments, self._rest = self._rest[:end], self._rest[end:]
            if arguments:
                deltas.append(CallDelta(self.num_calls - 1, arguments))
            if not self._object.is_complete:
                return deltas
            self._object = None


class _JsonObjectScanner:
    """Finds the end of a JSON object that arrives in pieces."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._is_escaped = 0, False, False
        self.is_complete = False

    @property
    def has_begun(self) -> bool:
        return self._depth > 0

    def find(self, piece: str) -> int:
        """Return how many characters of the piece belong to the object: of '1}}' in {"a": 1}}
        two.
        """
        for at, character in enumerate(piece):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped, self._in_string = character == "\\", character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{}":
                self._depth += 1 if character == "{" else -1
                if not self._depth:
                    self.is_complete = True
                    return at + 1
        return len(piece)
