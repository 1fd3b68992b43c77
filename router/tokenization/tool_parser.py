"""What a model says, told apart: text, and calls of tools in Mistral's formats, while it is said.

    parser = ToolCallParser(tokenizer, chat.tool_format)
    for event in events:
        calls = parser.push(event.token_id)
        if not parser.is_calling:
            text = choice_text.push(event)  # as without tools

The deltas of a call are OpenAI's: the first one has its id and name, all have pieces of its arguments; ``merge_deltas`` puts them
together. A choice that has made a call ends with the reason ``tool_calls`` where it would have ended with ``stop``.
"""

import re
import secrets
import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tramontane.router.tokenization.chat import ToolCall, ToolFormat
from tramontane.router.tokenization.tokenizer import IncrementalDecoder, Tokenizer

HEAD = re.compile(r'[\[\s,}]*\{\s*"name":\s*"([^"]*)",\s*"arguments":\s*')  # what stands before a call's arguments in a list
ID_LETTERS, ID_LENGTH = string.ascii_letters + string.digits, 9


def new_call_id() -> str:
    return "".join(secrets.choice(ID_LETTERS) for _ in range(ID_LENGTH))


@dataclass(frozen=True, slots=True)
class CallDelta:
    """News of the call with this index; ``id`` and ``name`` come with its first one."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None

    def as_openai(self) -> dict[str, Any]:
        """One of a streamed message's ``tool_calls``."""
        if self.name is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


def merge_deltas(deltas: Iterable[CallDelta]) -> tuple[ToolCall, ...]:
    """The calls of a whole answer."""
    calls: list[ToolCall] = []
    for delta in deltas:
        if delta.name is not None and delta.id is not None:
            calls.append(ToolCall(delta.id, delta.name, delta.arguments))
        else:
            calls[-1] = ToolCall(calls[-1].id, calls[-1].name, calls[-1].arguments + delta.arguments)
    return tuple(calls)


def as_openai(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """A whole message's ``tool_calls``."""
    return [{"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in calls]


class ToolCallParser:
    """Of one sequence. It follows a grammar (see ``constraints``), so its calls are well-formed as far as they go."""

    def __init__(self, tokenizer: Tokenizer, form: ToolFormat, new_id: Callable[[], str] = new_call_id) -> None:
        self._tokenizer, self._form, self._new_id = tokenizer, form, new_id
        self._decoder: IncrementalDecoder | None = None
        self._rest = ""  # said, and not yet told
        self._object: _JsonObjectScanner | None = None  # of the arguments that are being said
        self.num_calls = 0

    @property
    def is_calling(self) -> bool:
        """Whether the last token, and all that follows, is about calls."""
        return self._decoder is not None

    def push(self, token_id: int) -> list[CallDelta]:
        """What this token makes known of calls."""
        if token_id == self._form.calls:
            self._decoder, self._rest, self._object = self._tokenizer.decoder(), "", None
        elif self._decoder is not None and token_id == self._form.args:
            name, self._rest = self._rest.strip(), ""
            return self._start_call(name)
        elif self._decoder is not None:
            self._rest += self._decoder.push(token_id)
        return self._drain()

    def _start_call(self, name: str) -> list[CallDelta]:
        self._object = _JsonObjectScanner()
        self.num_calls += 1
        return [CallDelta(self.num_calls - 1, "", self._new_id(), name)]

    def _drain(self) -> list[CallDelta]:
        deltas: list[CallDelta] = []
        while True:
            if self._object is None:
                head = HEAD.match(self._rest) if self._form.args is None else None
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
            if not self._object.is_found:
                return deltas
            self._object = None


class _JsonObjectScanner:
    """Where a JSON object ends that comes in pieces."""

    def __init__(self) -> None:
        self._depth, self._in_text, self._is_escaped = 0, False, False
        self.is_found = False

    @property
    def has_begun(self) -> bool:
        return self._depth > 0

    def find(self, piece: str) -> int:
        """How much of the piece belongs to the object: of '1}}' in {"a": 1}} two characters."""
        for at, character in enumerate(piece):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_text:
                self._is_escaped, self._in_text = character == "\\", character != '"'
            elif character == '"':
                self._in_text = True
            elif character in "{}":
                self._depth += 1 if character == "{" else -1
                if not self._depth:
                    self.is_found = True
                    return at + 1
        return len(piece)
