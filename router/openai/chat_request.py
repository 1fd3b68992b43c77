"""Chat requests: the fields of OpenAI, vLLM and Mistral. Other fields are ignored."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Annotated, Any, Literal

import pydantic_core
from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, ValidationInfo

from tramontane.proto.errors import ParameterError
from tramontane.router.openai.completion_request import SamplingFields, Text, parse_body
from tramontane.router.openai.response_models import to_json
from tramontane.router.structured.answer_rules import Constraint
from tramontane.router.structured.grammar import MAX_TOOLS, Tool, ToolChoice
from tramontane.router.structured.guided import answer_constraint
from tramontane.router.structured.request_model import (
    MAX_PARTS,
    NoEffect,
    OtherObject,
    RequestModel,
    TextParts,
    bounded,
    check_text,
    default_if_null,
    no_effect_fields,
    note_ignored,
    refuse_omitted,
    unsupported_except,
)
from tramontane.router.tokenization.chat import (
    ChatMessage,
    ReasoningEffort,
    Thought,
    ToolCall,
    with_thoughts,
)
from tramontane.router.tokenization.template_chat import OPENS_ANSWER, TemplateVariables

MAX_MESSAGES = 2048
MAX_CALLS = 2048  # of one message
CUSTOM_INPUT = "input"  # the argument of a custom tool
FIELDS_OF_MISTRAL = ("random_seed", "safe_prompt", "prompt_mode")

NO_PROMPT_LOGPROBS = (
    "answers to chats have log-probabilities of new tokens alone; /v1/completions has those of"
    " prompts, too"
)
NO_PROMPT_MODE = "this server adds no system message; leave it out, and send the one of the model"
NO_SAFETY_PROMPT = (
    "this server adds no safety prompt; leave it out, and write one into a system message"
)


class TextPart(RequestModel):
    """Part of a message's content. Parts that are not text are left out of a history."""

    type: Literal["text"]
    text: str
    cache_control: NoEffect = None
    prompt_cache_breakpoint: NoEffect = None


TEXTS = TextParts(hints=no_effect_fields(TextPart))
Parts = Annotated[list[TextPart | OtherObject], Field(max_length=MAX_PARTS)]
# of a result: what is no content is JSON
Result = Annotated[tuple[str, ...], PlainValidator(TEXTS.result, json_schema_input_type=Any)]
Content = Annotated[
    tuple[str, ...], PlainValidator(TEXTS.texts, json_schema_input_type=str | Parts | None)
]


class ThinkingPart(RequestModel):
    """A thought as a part of a message's content. Mistral's client sends its text in parts,
    mistral-common as one text.
    """

    type: Literal["thinking"]
    thinking: Text | Parts
    closed: bool = True


ENCRYPTED = "redacted_thinking"  # a thought that only another server can read
ThoughtfulParts = Annotated[
    list[TextPart | ThinkingPart | OtherObject], Field(max_length=MAX_PARTS)
]


def _thoughtful(value: Any, info: ValidationInfo) -> tuple[str | Thought, ...]:
    """Return the texts and thoughts of a content; texts without a thought are joined. Thoughts that
    another server has encrypted are left out.
    """
    is_list = isinstance(value, list) and len(value) <= MAX_PARTS
    if is_list:
        value = [
            part for part in value if not (isinstance(part, dict) and part.get("type") == ENCRYPTED)
        ]
    if not is_list or not any(
        isinstance(part, dict) and part.get("type") == "thinking" for part in value
    ):
        texts = TEXTS.texts(value, info)
        return ("\n".join(texts),) if texts else ()
    return tuple(
        (
            _thought(part, info)
            if isinstance(part, dict) and part.get("type") == "thinking"
            else TEXTS.text_of(part, info)
        )
        for part in value
    )


def _thought(part: dict[str, Any], info: ValidationInfo) -> Thought:
    text = part.get("thinking")
    if isinstance(text, list) and len(text) <= MAX_PARTS:
        text = "".join(TEXTS.text_of(each, info) for each in text)
    text = "" if text is None else text
    closed = True if part.get("closed") is None else part["closed"]
    if not isinstance(text, str) or not isinstance(closed, bool):
        raise ValueError(
            'a thought must be as {"type": "thinking", "thinking": "...", "closed": true}'
        )
    note_ignored(part, ("type", "thinking", "closed"), frozenset(), info)
    return Thought(check_text(text), closed)


ThoughtfulContent = Annotated[
    tuple[str | Thought, ...],
    PlainValidator(_thoughtful, json_schema_input_type=str | ThoughtfulParts | None),
]


class SystemMessage(RequestModel):
    """Instructions for the assistant, which may show by an example how it thinks."""

    role: Literal["system", "developer"]
    content: ThoughtfulContent = ()
    name: Text | None = None

    def message(self) -> ChatMessage:
        """Return the message as chat templates take it."""
        return replace(with_thoughts("system", self.content), name=self.name or "")


class UserMessage(RequestModel):
    """Message of the user."""

    role: Literal["user"]
    content: Content = ()
    name: Text | None = None

    def message(self) -> ChatMessage:
        """Return the message as chat templates take it."""
        return ChatMessage("user", "\n".join(self.content), name=self.name or "")


def _arguments(value: Any) -> Any:
    """Return the arguments of an earlier call as JSON: {} for null and "". Their text is not
    parsed; the chat template does that, and keeps a text that is not JSON.
    """
    if value is None or value == "":
        return "{}"
    if isinstance(value, str):
        return value
    try:
        return to_json(value)
    except ValueError:  # NaN and infinity, which Python's clients can send
        return pydantic_core.to_json(value, inf_nan_mode="null").decode()


Arguments = Annotated[Text, BeforeValidator(_arguments, json_schema_input_type=Any)]


def _id(value: Any) -> Any:
    return "" if value is None else str(value) if type(value) is int else value


CallId = Annotated[Text, BeforeValidator(_id, json_schema_input_type=str | int | None)]


class FunctionCall(RequestModel):
    """Name and arguments (JSON) of a call."""

    name: Annotated[Text, default_if_null("")] = ""
    arguments: Arguments = "{}"


class CustomCall(RequestModel):
    """A call of a custom tool, whose input is one text. In a prompt it is a function's, with one
    argument.
    """

    name: Annotated[Text, default_if_null("")] = ""
    input: Annotated[Text, default_if_null("")] = ""


class AssistantToolCall(RequestModel):
    """A call in an earlier message of the assistant, of a function or of a custom tool."""

    id: CallId = ""
    type: Any = None  # shown by which of the next two there is
    function: FunctionCall | None = None
    custom: CustomCall | None = None
    # without an object for the function, as some clients store calls
    name: Text | None = None
    arguments: Arguments = "{}"
    # Mistral's client sends back the index of a streamed call
    index: NoEffect = None

    def call(self) -> ToolCall:
        """Return the call as chat templates take it."""
        if self.function is None and self.custom is not None:
            return ToolCall(self.id, self.custom.name, to_json({CUSTOM_INPUT: self.custom.input}))
        function = self.function or FunctionCall.model_construct(
            name=self.name or "", arguments=self.arguments
        )
        return ToolCall(self.id, function.name, function.arguments)


class AssistantMessage(RequestModel):
    """Earlier answer of the assistant, with its thoughts by either name or as parts of the
    content.
    """

    role: Literal["assistant"]
    content: ThoughtfulContent = ()
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    tool_calls: Annotated[tuple[AssistantToolCall, ...], default_if_null(())] = Field(
        (), max_length=MAX_CALLS, strict=False, fail_fast=True
    )
    name: Text | None = None
    # Mistral's: the answer continues this message, and includes it
    prefix: Annotated[bool, default_if_null(False)] = False
    refusal: Text | None = None
    audio: NoEffect = None
    annotations: NoEffect = None
    function_call: FunctionCall | None = None

    def message(self) -> ChatMessage:
        """Return the message as chat templates take it. Of thoughts that are given twice the parts
        of the content count, then ``reasoning_content``.
        """
        calls = tuple(call.call() for call in self.tool_calls)
        if self.function_call is not None and not calls:
            calls = (ToolCall("", self.function_call.name, self.function_call.arguments),)
        content = self.content or ((self.refusal,) if self.refusal else ())
        reasoning = self.reasoning_content or self.reasoning
        if reasoning and not any(isinstance(part, Thought) for part in content):
            content = (Thought(reasoning), *content)
        message = with_thoughts("assistant", content, calls)
        return replace(message, name=self.name or "", is_prefix=self.prefix)


class ToolMessage(RequestModel):
    """Result of a tool call."""

    role: Literal["tool", "function"]
    content: Result = ()
    tool_call_id: CallId = ""
    name: Text | None = None

    def message(self) -> ChatMessage:
        """Return the message as chat templates take it."""
        content = "\n".join(self.content)
        return ChatMessage("tool", content, tool_call_id=self.tool_call_id, name=self.name or "")


Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


def _require_messages(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    if not messages:
        raise ValueError("it must not be empty")
    return messages


# fail_fast: a body of some megabytes may contain a million invalid messages.
Messages = Annotated[
    tuple[Message, ...],
    Field(max_length=MAX_MESSAGES, fail_fast=True, json_schema_extra={"minItems": 1}),
    AfterValidator(_require_messages),
]
Tools = Annotated[tuple[Tool, ...], Field(max_length=MAX_TOOLS, fail_fast=True)]


class ChatRequest(SamplingFields):
    """Body of ``POST /v1/chat/completions``."""

    has_history = True
    model: str | None = None
    messages: Messages
    max_tokens: Annotated[int | None, bounded("max_tokens")] = None
    max_completion_tokens: Annotated[int | None, bounded("max_tokens")] = None
    logprobs: Annotated[bool, default_if_null(False)] = False
    top_logprobs: Annotated[int | None, bounded("logprobs")] = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    reasoning_effort: ReasoningEffort | None = None
    parallel_tool_calls: Annotated[bool, default_if_null(True)] = True
    chat_template_kwargs: TemplateVariables | None = None
    continue_final_message: Annotated[bool, default_if_null(False)] = False
    add_generation_prompt: bool | None = None

    add_special_tokens: Annotated[
        Any, unsupported_except(reason="the chat's format has its control tokens; leave it out")
    ] = None
    audio: Annotated[Any, unsupported_except()] = None
    chat_template: Annotated[
        Any, unsupported_except(reason="the chat's format is that of the checkpoint; leave it out")
    ] = None
    documents: Annotated[Any, unsupported_except([])] = None
    echo: Annotated[Any, unsupported_except()] = None
    function_call: Annotated[Any, unsupported_except("none")] = None
    functions: Annotated[
        Any, unsupported_except([], reason="it is not supported; give functions as tools")
    ] = None
    modalities: Annotated[Any, unsupported_except(["text"])] = None
    moderation: Annotated[Any, unsupported_except()] = None
    prediction: NoEffect = None
    prompt_logprobs: Annotated[Any, unsupported_except(reason=NO_PROMPT_LOGPROBS)] = None
    prompt_mode: Annotated[Any, unsupported_except(reason=NO_PROMPT_MODE)] = None
    safe_prompt: Annotated[Any, unsupported_except(reason=NO_SAFETY_PROMPT)] = None
    verbosity: NoEffect = None
    web_search_options: Annotated[Any, unsupported_except()] = None

    @property
    def has_fields_of_mistral(self) -> bool:
        """Whether the body has a field that only Mistral's API has."""
        return any(getattr(self, name) is not None for name in FIELDS_OF_MISTRAL)

    @property
    def echoed_prefix(self) -> str:
        """Text with which the answer begins if the last message has Mistral's ``prefix``; usually
        empty.
        """
        last = self.messages[-1]
        return last.message().content if isinstance(last, AssistantMessage) and last.prefix else ""

    @property
    def continues_message(self) -> bool:
        """Whether the answer continues the last message instead of being a new message."""
        return continues_last(self.messages)

    def conversation(self) -> list[ChatMessage]:
        """Return the messages as chat templates take them."""
        return conversation(self.messages, continue_final=self.continue_final_message)

    @property
    def max_new_tokens(self) -> int | None:
        """Limit of new tokens, by either name; None: as many as fit into the context."""
        return (
            self.max_completion_tokens
            if self.max_completion_tokens is not None
            else self.max_tokens
        )


def continues_last(messages: Sequence[Message]) -> bool:
    """Return whether the answer continues the last message: a text or thought of the assistant."""
    last = messages[-1]
    if not isinstance(last, AssistantMessage):
        return False
    made = last.message()
    return not made.tool_calls and bool(made.content or made.parts)


def conversation(messages: Sequence[Message], *, continue_final: bool) -> list[ChatMessage]:
    """Return the messages as chat templates take them."""
    made = [message.message() for message in messages]
    if continue_final:
        made[-1] = replace(made[-1], is_prefix=True)
    return made


def opens_answer(given: bool | None, variables: Mapping[str, Any] | None) -> bool | None:
    """Return ``add_generation_prompt`` of a request, or of the variables of its template."""
    inside = (variables or {}).get(OPENS_ANSWER)
    return given if given is not None or not isinstance(inside, bool) else inside


def check_continuation(
    messages: Sequence[Message],
    *,
    continue_final: bool = False,
    opens_answer: bool | None = None,
) -> None:
    """Raise ParameterError unless an answer follows the messages, or continues the last one of
    them; and for an image or similar since the last answer, which a text model cannot see.

    ``opens_answer``: ``add_generation_prompt``, which is optional and must be consistent.
    """
    last = messages[-1]
    if continue_final and not isinstance(last, AssistantMessage):
        raise ParameterError(
            "continue_final_message is for messages that end with one of the assistant",
            "continue_final_message",
        )
    is_asked = continue_final or (isinstance(last, AssistantMessage) and last.prefix)
    if (opens_answer and is_asked) or (opens_answer is False and not continues_last(messages)):
        given, is_needed = str(opens_answer).lower(), "false" if is_asked else "true"
        raise ParameterError(
            f"add_generation_prompt is {given}; this conversation needs {is_needed}",
            "add_generation_prompt",
        )
    answers = (isinstance(message, AssistantMessage) for message in reversed(messages))
    num_begun = sum(1 for _ in takewhile(bool, answers))  # the answer's own beginning
    for index, message in reversed(list(enumerate(messages[: len(messages) - num_begun]))):
        if isinstance(message, AssistantMessage):
            break
        if isinstance(message, UserMessage):
            try:
                refuse_omitted(message.content)
            except ValueError as error:
                name = f"messages[{index}].content"
                raise ParameterError(f"{name}: {error}", name) from None


def _check_prefix(request: ChatRequest) -> None:
    if request.echoed_prefix and (constraint := answer_constraint(request)) is not None:
        name = constraint.where if isinstance(constraint, Constraint) else "response_format"
        raise ParameterError(
            f"prefix is the beginning of the answer, which then cannot be what {name} requires;"
            " continue_final_message continues the message without repeating it",
            f"messages[{len(request.messages) - 1}].prefix",
        )


def parse_chat(body: bytes) -> ChatRequest:
    """Parse and validate a body. Raises ParameterError, which names the first problem."""
    request = parse_body(ChatRequest, body)
    request.check_combinations()
    check_continuation(
        request.messages,
        continue_final=request.continue_final_message,
        opens_answer=opens_answer(request.add_generation_prompt, request.chat_template_kwargs),
    )
    _check_prefix(request)
    if request.top_logprobs and not request.logprobs:
        raise ParameterError("top_logprobs is only allowed with logprobs: true", "top_logprobs")
    if (
        None not in (request.max_tokens, request.max_completion_tokens)
        and request.max_tokens != request.max_completion_tokens
    ):
        raise ParameterError(
            "max_tokens and max_completion_tokens are the same thing; give one of them",
            "max_tokens",
        )
    if request.max_new_tokens is not None and request.min_tokens > request.max_new_tokens:
        raise ParameterError(
            f"min_tokens is {request.min_tokens}, above max_tokens, {request.max_new_tokens}",
            "min_tokens",
        )
    return request
