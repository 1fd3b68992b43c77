"""A conversation, and what turns it into a prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from tramontane.proto.errors import RequestError

ToolSpec = Mapping[str, Any]  # a function that the model may call, as OpenAI writes one of ``tools``


@dataclass(frozen=True, slots=True)
class ToolCall:
    """``id`` is nine letters and digits, as Mistral wants it; ``arguments`` is JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """An assistant may call tools; what one answers is a message of the role tool, with the call's id."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""


def message_texts(messages: Sequence[ChatMessage]) -> list[str]:
    """All that somebody wrote."""
    calls = [text for message in messages for call in message.tool_calls for text in (call.id, call.name, call.arguments)]
    return [message.content for message in messages] + [message.tool_call_id for message in messages] + calls


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model calls tools: the control tokens [TOOL_CALLS] and [ARGS].

    Without ``args``: [TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]. With it, for each call: [TOOL_CALLS]f[ARGS]{...}.
    """

    calls: int
    args: int | None = None


class ChatTemplate(Protocol):
    """Token ids up to where the assistant answers.

    What people and models wrote is text, also where it looks like a control token.
    Raises RequestError for conversations that the model's format does not know.
    """

    @property
    def tool_format(self) -> ToolFormat | None:
        """None for a format without tools."""
        ...

    def encode(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Conversation:
    """Questions and answers in turn, as many of the latest as leave room for an answer.

    ``head`` (a system message, or nothing) is never forgotten; ``num_dropped`` counts what was.
    """

    prompt: ChatTemplate
    context: int  # positions
    max_tokens: int  # of an answer
    system: tuple[ChatMessage, ...] = ()
    turns: tuple[ChatMessage, ...] = ()
    num_dropped: int = 0

    def with_question(self, question: str) -> tuple["Conversation", tuple[int, ...]]:
        """With a question, and the prompt for its answer. Raises RequestError if it fits into no context."""
        turns = (*self.turns, ChatMessage("user", question))
        room = self.context - min(self.max_tokens, self.context // 2)
        ids = self.prompt.encode((*self.system, *turns))
        while len(ids) > room and len(turns) > 1:
            turns = turns[2:]
            ids = self.prompt.encode((*self.system, *turns))
        if len(ids) >= self.context:
            raise RequestError(
                f"that takes {len(ids)} tokens; with a context of {self.context} positions it may take {self.context - 1}"
            )
        dropped = len(self.turns) + 1 - len(turns)
        return replace(self, turns=turns, num_dropped=self.num_dropped + dropped), ids

    def with_answer(self, answer: str) -> "Conversation":
        """With the answer to its last question; a question that got none is forgotten."""
        turns = (*self.turns, ChatMessage("assistant", answer)) if answer.strip() else self.turns[:-1]
        return replace(self, turns=turns)
