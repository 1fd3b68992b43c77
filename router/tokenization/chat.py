"""Conversations, and the protocol of chat templates, which turn them into prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, get_args

from tramontane.proto.errors import RequestError
from tramontane.router.tokenization.reasoning_parser import ReasoningFormat

Role = Literal["system", "user", "assistant", "tool"]
# a model may know a subset
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
VARIABLES = "chat_template_kwargs"  # the parameter of requests with variables of a template
# a function that the model may call, an item of OpenAI's ``tools``
ToolSpec = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool. ``id``: nine letters and digits, as Mistral's format requires.
    ``arguments``: JSON.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Thought:
    """A thought of the model, in an answer or in the example that a system message gives.
    ``closed``: it has ended.
    """

    text: str
    closed: bool = True


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A message. An assistant may call tools; the result is a message with the role tool and the
    call's id.

    ``parts``: the content and the thoughts between its texts, if there are any. ``content`` has
    only the texts, as lines. ``name``: of the speaker, for templates that use it. ``is_prefix``:
    the answer continues this last message of the assistant.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    parts: tuple[str | Thought, ...] = ()
    name: str = ""
    is_prefix: bool = False

    @property
    def thoughts(self) -> str:
        """All thoughts, as lines, as mistral-common joins them; empty without any."""
        return "\n".join(part.text for part in self.parts if isinstance(part, Thought))


def with_thoughts(
    role: Role,
    parts: Sequence[str | Thought],
    tool_calls: tuple[ToolCall, ...] = (),
    tool_call_id: str = "",
) -> ChatMessage:
    """Return a message with texts and thoughts."""
    content = "\n".join(part for part in parts if isinstance(part, str))
    has_thoughts = any(isinstance(part, Thought) for part in parts)
    return ChatMessage(
        role, content, tool_calls, tool_call_id, tuple(parts) if has_thoughts else ()
    )


def message_texts(messages: Sequence[ChatMessage]) -> list[str]:
    """Return every text that a user, a model or a tool wrote."""
    calls = [
        text
        for message in messages
        for call in message.tool_calls
        for text in (call.id, call.name, call.arguments)
    ]
    thoughts = [
        part.text for message in messages for part in message.parts if isinstance(part, Thought)
    ]
    texts = [
        text
        for message in messages
        for text in (message.content, message.tool_call_id, message.name)
    ]
    return texts + calls + thoughts


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model calls tools: the ids of the control tokens [TOOL_CALLS], [ARGS] and [CALL_ID].

    Without ``args``: [TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]. With it, for each call:
    [TOOL_CALLS]f[ARGS]{...}. With ``call_id`` the model may name the call's id:
    [TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{...}.
    """

    calls: int
    args: int | None = None
    call_id: int | None = None


class ChatTemplate(Protocol):
    """Turns conversations into prompts. Texts of users and models stay text, even if they look like
    control tokens.
    """

    @property
    def tool_format(self) -> ToolFormat | None:
        """The model's format for tool calls; None for a format without tools."""
        ...

    @property
    def reasoning_format(self) -> ReasoningFormat | None:
        """The model's markers of reasoning; None for a format without reasoning."""
        ...

    @property
    def efforts(self) -> Sequence[str]:
        """The values of ``reasoning_effort`` that the model knows; empty if it has no setting."""
        ...

    def unused_variables(self, variables: Mapping[str, Any]) -> Sequence[str]:
        """Return the names of the client's variables that have no effect."""
        ...

    def encode(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec] = (),
        variables: Mapping[str, Any] | None = None,
        *,
        reasoning_effort: str | None = None,
    ) -> tuple[int, ...]:
        """Return token ids up to the beginning of the assistant's answer, after the repairs of
        ``history``. Raises RequestError if the format does not support the conversation.

        ``variables``: the client's, for a template that uses them. ``reasoning_effort``: how much
        the model is to think, None for its default; see ``supported_effort``. Raises ParameterError
        for variables that the server sets itself.
        """
        ...


def ignored_variables(template: ChatTemplate, variables: Mapping[str, Any] | None) -> Sequence[str]:
    """Return the paths of a request's variables that have no effect."""
    return [f"{VARIABLES}.{name}" for name in template.unused_variables(variables or {})]


@dataclass(frozen=True, slots=True)
class NoChatTemplate:
    """Template of a model without a chat format: it refuses all conversations, with ``reason``."""

    reason: str

    @property
    def tool_format(self) -> ToolFormat | None:
        """Always None: tools are not supported."""
        return None

    @property
    def reasoning_format(self) -> ReasoningFormat | None:
        """Always None: reasoning is not supported."""
        return None

    @property
    def efforts(self) -> Sequence[str]:
        """Always empty: reasoning is not supported."""
        return ()

    def unused_variables(self, variables: Mapping[str, Any]) -> Sequence[str]:
        """Return none: every conversation is refused."""
        return ()

    def encode(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec] = (),
        variables: Mapping[str, Any] | None = None,
        *,
        reasoning_effort: str | None = None,
    ) -> tuple[int, ...]:
        """Raise RequestError."""
        raise RequestError(self.reason)


def check_effort(effort: str | None, known: Sequence[str]) -> None:
    """Raise RequestError for an effort that a model does not know: a Python program has no header
    that names what has no effect, as a client over HTTP has.
    """
    if effort is not None and effort not in known:
        reason = (
            f"this model knows {', '.join(known)}"
            if known
            else "this model's format has no such setting; leave it out"
        )
        raise RequestError(f"reasoning_effort is {effort!r}; {reason}")


def supported_effort(effort: str | None, known: Sequence[str]) -> str | None:
    """Return the effort that a model knows: the nearest one, the higher of two. None, the model's
    default, for a model that knows none: "medium" of ("none", "high") becomes "high".
    """
    order = get_args(ReasoningEffort)
    if effort is None or effort in known or effort not in order:
        return effort if effort in known else None
    at = order.index(effort)
    ranks = [order.index(each) for each in known if each in order]
    return order[min(ranks, key=lambda rank: (abs(rank - at), -rank))] if ranks else None


@dataclass(frozen=True, slots=True)
class Conversation:
    """Alternating questions and answers: the latest ones that leave room for an answer."""

    prompt: ChatTemplate
    context: int  # positions
    max_tokens: int  # of an answer
    system: tuple[ChatMessage, ...] = ()  # a system message or none; never dropped
    turns: tuple[ChatMessage, ...] = ()
    num_dropped: int = 0  # messages

    def with_question(self, question: str) -> tuple["Conversation", tuple[int, ...]]:
        """Return the conversation with a question, and its prompt. Raises RequestError if the
        question alone is too long.
        """
        turns = (*self.turns, ChatMessage("user", question))
        max_prompt = self.context - min(self.max_tokens, self.context // 2)
        ids = self.prompt.encode((*self.system, *turns))
        while len(ids) > max_prompt and len(turns) > 1:
            turns = turns[2:]
            ids = self.prompt.encode((*self.system, *turns))
        if len(ids) >= self.context:
            raise RequestError(
                f"that takes {len(ids)} tokens; with a context of {self.context} positions it may"
                f" take {self.context - 1}"
            )
        dropped = len(self.turns) + 1 - len(turns)
        return replace(self, turns=turns, num_dropped=self.num_dropped + dropped), ids

    def with_answer(self, answer: str) -> "Conversation":
        """Return the conversation with the last question's answer; a question with an empty answer
        is dropped.
        """
        turns = (
            (*self.turns, ChatMessage("assistant", answer)) if answer.strip() else self.turns[:-1]
        )
        return replace(self, turns=turns)
