"""Chat requests: OpenAI's fields and vLLM's extensions. Other fields are refused."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, model_validator
from pydantic_core import PydanticKnownError

from tramontane.proto.errors import ParameterError
from tramontane.proto.request import MAX_LOGPROBS
from tramontane.router.openai.completion_request import StreamOptions, Text, check_text, parse_body, unsupported_except
from tramontane.router.openai.request_fields import SamplingFields, default_if_null
from tramontane.router.structured.grammar import MAX_TOOLS, RequestModel, ResponseFormat, Tool, ToolChoice
from tramontane.router.tokenization.chat import ChatMessage, Thought, ToolCall, with_thoughts

MAX_MESSAGES = 2048
MAX_PARTS = 128
MAX_CALLS = 128


class TextPart(RequestModel):
    """Part of a message's content. Only texts are supported."""

    type: Literal["text"]
    text: str


def _content(value: Any) -> Any:  # noqa: ANN401
    """Join parts as lines of one text."""
    if not isinstance(value, list):
        return value
    if not value or len(value) > MAX_PARTS:
        raise ValueError(f"a list of parts must have 1 to {MAX_PARTS}")
    return "\n".join(map(_part_text, value))


def _part_text(part: Any) -> str:  # noqa: ANN401
    if not isinstance(part, dict) or part.get("type") != "text":
        raise ValueError("only parts of the type text are supported")
    if part.keys() != {"type", "text"} or not isinstance(part["text"], str):
        raise ValueError('a part must be as {"type": "text", "text": "..."}')
    return part["text"]


Parts = Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS)]
Content = Annotated[Text, BeforeValidator(_content, json_schema_input_type=str | Parts)]


class ThinkingPart(RequestModel):
    """A thought as a part of a message's content. Mistral's client sends its text in parts, mistral-common as one text."""

    type: Literal["thinking"]
    thinking: Text | Parts
    closed: bool = True


ThoughtfulParts = Annotated[list[TextPart | ThinkingPart], Field(min_length=1, max_length=MAX_PARTS)]


def _thoughtful(value: Any) -> tuple[str | Thought, ...]:  # noqa: ANN401
    """Return the texts and thoughts of a content; texts without a thought are joined."""
    is_list = isinstance(value, list) and len(value) <= MAX_PARTS
    if not is_list or not any(isinstance(part, dict) and part.get("type") == "thinking" for part in value):
        text = _content(value)
        if not isinstance(text, str):
            raise PydanticKnownError("string_type")
        return (check_text(text),)
    return tuple(
        _thought(part) if isinstance(part, dict) and part.get("type") == "thinking" else _part_text(part) for part in value
    )


def _thought(part: dict[str, Any]) -> Thought:
    text = part.get("thinking")
    text = "".join(map(_part_text, text)) if isinstance(text, list) and len(text) <= MAX_PARTS else text
    closed = part.get("closed", True)
    if not part.keys() <= {"type", "thinking", "closed"} or not isinstance(text, str) or not isinstance(closed, bool):
        raise ValueError('a thought must be as {"type": "thinking", "thinking": "...", "closed": true}')
    return Thought(check_text(text), closed)


ThoughtfulContent = Annotated[
    tuple[str | Thought, ...], PlainValidator(_thoughtful, json_schema_input_type=str | ThoughtfulParts)
]


class SystemMessage(RequestModel):
    """Instructions for the assistant, which may show by an example how it thinks."""

    role: Literal["system", "developer"]
    content: ThoughtfulContent
    name: Annotated[Any, unsupported_except()] = None

    def message(self) -> ChatMessage:
        """Return the message as chat templates take it."""
        return with_thoughts("system", self.content)


class UserMessage(RequestModel):
    """Message of the user."""

    role: Literal["user"]
    content: Content
    name: Annotated[Any, unsupported_except()] = None

    def message(self) -> ChatMessage:
        """Return the message as chat templates take it."""
        return ChatMessage("user", self.content)


class FunctionCall(RequestModel):
    """Name and arguments (JSON) of a call."""

    name: Text
    arguments: Text


class AssistantToolCall(RequestModel):
    """A call in an earlier message of the assistant."""

    id: Text
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(RequestModel):
    """Earlier answer of the assistant, with its thoughts by either name or as parts of the content."""

    role: Literal["assistant"]
    content: ThoughtfulContent | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    tool_calls: Annotated[tuple[AssistantToolCall, ...], default_if_null(())] = Field(
        (), max_length=MAX_CALLS, strict=False, fail_fast=True
    )
    name: Annotated[Any, unsupported_except()] = None
    refusal: Annotated[Any, unsupported_except()] = None
    audio: Annotated[Any, unsupported_except()] = None
    annotations: Annotated[Any, unsupported_except([])] = None
    function_call: Annotated[Any, unsupported_except()] = None

    @model_validator(mode="after")
    def _check_thoughts(self) -> Self:
        texts = {text for text in (self.reasoning_content, self.reasoning) if text}
        if len(texts) > 1:
            raise ValueError("reasoning_content and reasoning are the same thing, and differ; give one of them")
        if texts and any(isinstance(part, Thought) for part in self.content or ()):
            raise ValueError("a thought is given twice, as a part of the content and as reasoning; give it once")
        return self

    def message(self) -> ChatMessage:
        """Return the message as chat templates take it."""
        calls = tuple(ToolCall(call.id, call.function.name, call.function.arguments) for call in self.tool_calls)
        reasoning = self.reasoning_content or self.reasoning
        thoughts = (Thought(reasoning),) if reasoning else ()
        return with_thoughts("assistant", (*thoughts, *(self.content or ())), calls)


class ToolMessage(RequestModel):
    """Result of a tool call."""

    role: Literal["tool"]
    content: Content
    tool_call_id: Text
    name: str | None = None  # ignored: the call's id determines it

    def message(self) -> ChatMessage:
        """Return the message as chat templates take it."""
        return ChatMessage("tool", self.content, tool_call_id=self.tool_call_id)


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


def _require_messages(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    if not messages:
        raise ValueError("it must not be empty")
    return messages


# fail_fast: a body of some megabytes has room for a million bad messages.
Messages = Annotated[
    tuple[Message, ...],
    Field(max_length=MAX_MESSAGES, fail_fast=True, json_schema_extra={"minItems": 1}),
    AfterValidator(_require_messages),
]
Tools = Annotated[tuple[Tool, ...], Field(max_length=MAX_TOOLS, fail_fast=True)]


class ChatRequest(SamplingFields):
    """Body of ``POST /v1/chat/completions``."""

    model: str | None = None
    messages: Messages
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: Annotated[bool, default_if_null(False)] = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    stream: Annotated[bool, default_if_null(False)] = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    parallel_tool_calls: Annotated[bool, default_if_null(True)] = True
    return_token_ids: Annotated[bool, default_if_null(False)] = False
    user: str | None = None  # ignored

    audio: Annotated[Any, unsupported_except()] = None
    function_call: Annotated[Any, unsupported_except("none")] = None
    functions: Annotated[Any, unsupported_except([])] = None
    metadata: Annotated[Any, unsupported_except({})] = None
    modalities: Annotated[Any, unsupported_except(["text"])] = None
    prediction: Annotated[Any, unsupported_except()] = None
    service_tier: Annotated[Any, unsupported_except("auto", "default")] = None
    store: Annotated[Any, unsupported_except()] = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk about the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def max_new_tokens(self) -> int | None:
        """Limit of new tokens, by either name; None: as many as the context has room for."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


def parse_chat(body: bytes) -> ChatRequest:
    """Parse and validate a body. Raises ParameterError, which names the first problem."""
    request = parse_body(ChatRequest, body)
    if request.stream_options is not None and not request.stream:
        raise ParameterError("stream_options is only allowed with stream: true", "stream_options")
    if request.top_logprobs is not None and not request.logprobs:
        raise ParameterError("top_logprobs is only allowed with logprobs: true", "top_logprobs")
    if None not in (request.max_tokens, request.max_completion_tokens) and request.max_tokens != request.max_completion_tokens:
        raise ParameterError("max_tokens and max_completion_tokens are the same thing; give one of them", "max_tokens")
    if request.max_new_tokens is not None and request.min_tokens > request.max_new_tokens:
        raise ParameterError(f"min_tokens is {request.min_tokens}, above max_tokens, {request.max_new_tokens}", "min_tokens")
    return request
