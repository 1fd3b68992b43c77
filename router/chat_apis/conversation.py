"""Conversations of other APIs as requests for chat completions, and the names of parameters in
these APIs.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Discriminator, Field, Tag

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
    check_continuation,
)
from tramontane.router.openai.errors import TYPE_TAG
from tramontane.router.structured.request_model import (
    RequestBody,
    RequestModel,
    unsupported_except,
)

Names = Sequence[tuple[str, str]]

PLACE = re.compile(r"\bmessages\[(\d{1,9})\]")


class ClientTool(NamedTuple):
    """A tool that the client knows by another form than a function of its own name: in a namespace,
    or custom, with one text as input.
    """

    name: str
    namespace: str | None
    is_custom: bool


@dataclass(frozen=True, slots=True)
class Conversation:
    """A request for a chat completion. ``places`` has the location of each message in the client's
    request, ``input[3]``.

    ``names``: patterns of a chat's parameters, and their names in the client's API. ``echo``:
    fields of the request that its answer repeats, of about ``echo_bytes`` of JSON.
    """

    request: ChatRequest
    places: tuple[str, ...]
    names: Names
    refuses_thoughts: bool = False  # the client disables reasoning
    echo: Mapping[str, Any] = field(default_factory=dict)
    echo_bytes: int = 0
    client_tools: Mapping[str, ClientTool] = field(default_factory=dict)  # by the function's name
    ignored: tuple[str, ...] = ()  # this and the next: see ``RequestBody``
    unknown: str = ""

    @property
    def model(self) -> str | None:
        """The model that the client names."""
        return self.request.model

    @property
    def stream(self) -> bool:
        """Whether the answer is streamed."""
        return self.request.stream

    def name_of(self, parameter: str) -> str:
        """Return the name of a chat's parameter in the client's API."""
        return str(self.renamed(ParameterError("", parameter)).parameter)

    def renamed(self, error: ParameterError) -> ParameterError:
        """Return an error about the client's parameter."""
        given, message = error.parameter or "", str(error)
        for pattern, new in self.names:
            name, is_found = re.subn(pattern, new, given)
            if is_found:
                message = message if given == "messages" else message.replace(given, name, 1)
                return error.about(name, PLACE.sub(self._place, message))
        return error.about(PLACE.sub(self._place, given) or None, PLACE.sub(self._place, message))

    def _place(self, found: re.Match[str]) -> str:
        index = int(found[1])
        return self.places[index] if index < len(self.places) else found[0]


@dataclass(slots=True)
class ConversationBuilder:
    """Assembles messages from items that are smaller than the messages of a chat."""

    messages: list[Message] = field(default_factory=list)
    places: list[str] = field(default_factory=list)

    def add_text(self, role: str, texts: Sequence[str], place: str) -> None:
        """Add a message of a user or of the system."""
        kind = UserMessage if role == "user" else SystemMessage
        self._add(kind.model_construct(role=role, content=tuple(texts)), place)

    def add_answer(
        self, thought: str, text: str | None, calls: Sequence[AssistantToolCall], place: str
    ) -> None:
        """Add a message of the assistant; ``text`` is None if it has only calls or reasoning."""
        message = AssistantMessage.model_construct(
            role="assistant",
            content=() if text is None else (text,),
            reasoning_content=thought or None,
            tool_calls=tuple(calls),
        )
        self._add(message, place)

    def add_result(
        self, call_id: str, texts: Sequence[str], place: str, name: str | None = None
    ) -> None:
        """Add the result of a call. ``name``: of the function, if the client gives it."""
        self._add(
            ToolMessage.model_construct(
                role="tool", content=tuple(texts), tool_call_id=call_id, name=name
            ),
            place,
        )

    def _add(self, message: Message, place: str) -> None:
        self.messages.append(message)
        self.places.append(place)

    def build(self, fields: Mapping[str, Any], names: Names, body: RequestBody) -> Conversation:
        """Return the conversation as a request with additional fields. Raises ParameterError."""
        request = ChatRequest.model_construct(messages=tuple(self.messages), **fields)
        conversation = Conversation(
            request, tuple(self.places), names, ignored=body.ignored, unknown=body.unknown
        )
        try:
            check_continuation(request.messages)
        except ParameterError as error:
            raise conversation.renamed(error) from None
        return conversation


def tool_call(call_id: str, name: str, arguments: str) -> AssistantToolCall:
    """Return a call of an earlier message."""
    function = FunctionCall.model_construct(name=name, arguments=arguments)
    return AssistantToolCall.model_construct(id=call_id, function=function)


# The common parts of both APIs' requests: fields that are refused with a reason, and objects chosen
# by their ``type``.

MAX_METADATA, MAX_KEY, MAX_VALUE = 16, 64, 512  # as OpenAI bounds them
NO_SEED = "this API has none; use temperature: 0 for repeatable answers, or /v1/chat/completions"
# how much a model is to think, if it supports that
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ShortText = Annotated[str, Field(max_length=MAX_VALUE)]


def refused(reason: str, *allowed: Any) -> BeforeValidator:  # any JSON
    """Refuse a parameter with a reason, unless its value has no effect: null, false, or one of
    ``allowed``.
    """
    return unsupported_except(*allowed, reason=reason)


OTHER = "other"


def typed(name: str) -> Tag:
    """Mark one of several objects, which has this ``type``. Names of parameters in errors omit the
    mark.
    """
    return Tag(f"{TYPE_TAG}{name}")


def by_type(*known: str | Sequence[str], default: str = "") -> Discriminator:
    """Choose one of several objects by its ``type``; ``default``: used without a ``type``.

    Types of one object are given together, and marked as the first of them. An object of a type
    that is not known is marked as ``OTHER``.
    """
    groups = [(names,) if isinstance(names, str) else names for names in known]
    marks = {name: f"{TYPE_TAG}{names[0]}" for names in groups for name in names}

    def tag(value: Any) -> str:
        name = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        name = default if name is None else name
        return marks.get(name, TYPE_TAG + OTHER) if isinstance(name, str) else TYPE_TAG + OTHER

    return Discriminator(tag)


def known_types(names: Sequence[str], reason: str) -> BeforeValidator:
    """Refuse objects of other types.

    ``reason`` is the message for an object of another type, whose name replaces ``{type}``.
    """

    def check(value: Any) -> Any:
        if isinstance(value, RequestModel):
            return value
        if not isinstance(value, dict):
            raise ValueError(f"it must be an object with a type, one of {', '.join(names)}")
        name = value.get("type")
        if not name:
            raise ValueError(f"its type is missing, which is one of {', '.join(names)}")
        if not isinstance(name, str) or name not in names:
            raise ValueError(
                reason.replace("{type}", f"{name!r:.40}" if isinstance(name, str) else "it has")
            )
        return value

    return BeforeValidator(check)


def _check_metadata(value: Any) -> Any:
    if not isinstance(value, dict) or len(value) > MAX_METADATA:
        raise ValueError(f"it must be an object of at most {MAX_METADATA} texts")
    if not all(
        isinstance(text, str) and len(text) <= MAX_VALUE and len(key) <= MAX_KEY
        for key, text in value.items()
    ):
        raise ValueError(
            f"its values must be texts of at most {MAX_VALUE} characters, its names of at most"
            f" {MAX_KEY}"
        )
    return value


MetadataInput = Annotated[
    dict[Annotated[str, Field(max_length=MAX_KEY)], ShortText], Field(max_length=MAX_METADATA)
]
RequestMetadata = Annotated[
    dict[str, str], BeforeValidator(_check_metadata, json_schema_input_type=MetadataInput)
]
