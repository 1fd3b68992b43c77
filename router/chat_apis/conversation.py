"""Conversations of other APIs as requests for chat completions, and the names of parameters in
these APIs.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tramontane.proto.errors import ParameterError
from tramontane.router.openai.chat_request import (
    AssistantMessage,
    AssistantToolCall,
    ChatRequest,
    FunctionCall,
    Message,
    SystemMessage,
    ToolMessage,
    UserMessage,
)

Names = Sequence[tuple[str, str]]

PLACE = re.compile(r"\bmessages\[(\d{1,9})\]")


@dataclass(frozen=True, slots=True)
class Conversation:
    """A request for a chat completion. ``places`` has the client's place of each message,
    ``input[3]``.

    ``names``: patterns of a chat's parameters, and what these are called in the client's API.
    ``echo``: fields of the request that its answer repeats, of about ``echo_bytes`` of JSON.
    """

    request: ChatRequest
    places: tuple[str, ...]
    names: Names
    refuses_thoughts: bool = False  # the client wants none
    echo: Mapping[str, Any] = field(default_factory=dict)
    echo_bytes: int = 0

    @property
    def model(self) -> str | None:
        """The model that the client names."""
        return self.request.model

    @property
    def stream(self) -> bool:
        """Whether the answer is streamed."""
        return self.request.stream

    @property
    def num_sequences(self) -> int:
        """Number of sequences, which is 1."""
        return self.request.num_sequences

    def renamed(self, error: ParameterError) -> ParameterError:
        """Return an error about the client's parameter."""
        given, message = error.parameter or "", str(error)
        for pattern, new in self.names:
            name, is_found = re.subn(pattern, new, given)
            if is_found:
                message = message if given == "messages" else message.replace(given, name, 1)
                return ParameterError(PLACE.sub(self._place, message), name)
        return ParameterError(PLACE.sub(self._place, message), error.parameter)

    def _place(self, found: re.Match[str]) -> str:
        index = int(found[1])
        return self.places[index] if index < len(self.places) else found[0]


@dataclass(slots=True)
class ConversationBuilder:
    """Puts messages together, from items that are smaller than those of a chat."""

    messages: list[Message] = field(default_factory=list)
    places: list[str] = field(default_factory=list)

    def add_text(self, role: str, text: str, place: str) -> None:
        """Add a message of a user or of the system."""
        kind = UserMessage if role == "user" else SystemMessage
        self._add(kind.model_validate({"role": role, "content": text}), place)

    def add_answer(
        self, thought: str, text: str | None, calls: Sequence[AssistantToolCall], place: str
    ) -> None:
        """Add a message of the assistant; ``text`` is None if it has only calls or a thought."""
        fields: dict[str, Any] = {"role": "assistant", "tool_calls": tuple(calls)}
        fields |= {"content": text} if text is not None else {}
        fields |= {"reasoning_content": thought} if thought else {}
        self._add(AssistantMessage.model_validate(fields), place)

    def add_result(self, call_id: str, text: str, place: str, name: str | None = None) -> None:
        """Add the result of a call. ``name``: of the function, if the client gives it."""
        self._add(ToolMessage(role="tool", content=text, tool_call_id=call_id, name=name), place)

    def _add(self, message: Message, place: str) -> None:
        self.messages.append(message)
        self.places.append(place)

    def build(self, fields: Mapping[str, Any], names: Names) -> Conversation:
        """Return the conversation as a request with these fields more."""
        request = ChatRequest.model_construct(messages=tuple(self.messages), **fields)
        return Conversation(request, tuple(self.places), names)


def tool_call(call_id: str, name: str, arguments: str) -> AssistantToolCall:
    """Return a call of an earlier message."""
    return AssistantToolCall(
        id=call_id, type="function", function=FunctionCall(name=name, arguments=arguments)
    )
