"""Requests for ``/v1/responses``, OpenAI's Responses API, and their conversion to chats.

Unsupported fields that would change an answer are refused by name. Fields that cannot change it are
accepted without effect.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Discriminator, Field, Tag

from tramontane.proto.errors import ParameterError
from tramontane.router.chat_apis.conversation import (
    NO_SEED,
    Conversation,
    Effort,
    RequestMetadata,
    ShortText,
    by_type,
    known_types,
    refused,
    typed,
)
from tramontane.router.chat_apis.responses_items import InputItems, add_items
from tramontane.router.openai.completion_request import Text, parse_body
from tramontane.router.structured.grammar import (
    MAX_TOOLS,
    NAME,
    Function,
    FunctionName,
    JsonSchema,
    JsonSchemaFormat,
    ResponseFormat,
    Tool,
    ToolChoiceFunction,
)
from tramontane.router.structured.request_model import (
    RequestModel,
    bounded,
    default_if_null,
    unsupported_except,
)

NOT_STORED = "this server stores no answers; send the whole conversation as input"
INCLUDED_LOGPROBS = "message.output_text.logprobs"
# Parameters of a chat, and their names here.
NAMES = (
    (r"^messages$", "input"),
    (r"^tools\[(\d+)\]\.function\.parameters", r"tools[\1].parameters"),
    (r"^response_format\.json_schema", "text.format"),
    (r"^response_format", "text.format"),
    (r"^max_tokens$", "max_output_tokens"),
    (r"^logprobs$", "top_logprobs"),
    (r"^reasoning_effort$", "reasoning.effort"),
)
Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class TextFormat(RequestModel):
    """Plain text."""

    type: Literal["text"]


class JsonObjectFormat(RequestModel):
    """Any JSON object."""

    type: Literal["json_object"]


class SchemaFormat(RequestModel):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    name: str = Field(pattern=NAME)
    schema_: JsonSchema = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


Format = Annotated[
    Annotated[TextFormat, typed("text")]
    | Annotated[JsonObjectFormat, typed("json_object")]
    | Annotated[SchemaFormat, typed("json_schema")],
    by_type(),
    known_types(
        ("text", "json_object", "json_schema"),
        "{type} is not supported; it must be text, json_object or json_schema",
    ),
]


class TextConfig(RequestModel):
    """``text`` of a request."""

    format: Format | None = None
    verbosity: Annotated[
        Any,
        refused(
            "this model cannot be set to be brief or detailed; say it in the instructions", "medium"
        ),
    ] = None


class FunctionTool(RequestModel):
    """A function that the model may call."""

    type: Literal["function"]
    name: str = Field(pattern=NAME)
    description: str | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = None
    allowed_callers: Annotated[Any, unsupported_except(["direct"])] = None
    defer_loading: Annotated[Any, unsupported_except()] = None
    output_schema: JsonSchema | None = None

    def tool(self) -> Tool:
        """Return the tool in the format of chats."""
        function = Function(
            name=self.name,
            description=self.description,
            parameters=self.parameters,
            strict=self.strict,
        )
        return Tool(type="function", function=function)


class ChosenFunction(RequestModel):
    """The function that the model has to call."""

    type: Literal["function"]
    name: str


class ReasoningConfig(RequestModel):
    """``reasoning`` of a request. Summaries are not made: thoughts are returned whole."""

    effort: Effort | None = None
    context: Annotated[
        Any, refused("thoughts that are sent are shown to the model as its format has them", "auto")
    ] = None
    mode: Annotated[Any, refused("this server has one way of thinking", "standard")] = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


TOOL_TYPES = "tools of the type {type} are not supported; only functions are, which the client runs"
CHOICES = ("none", "auto", "required")


def _check_tool_choice(value: Any) -> Any:
    is_function = isinstance(value, dict) and value.get("type") == "function"
    if not (is_function or (isinstance(value, str) and value in CHOICES)):
        raise ValueError(
            f'it must be one of {", ".join(CHOICES)}, or {{"type": "function", "name": "..."}}'
        )
    return value


def _form_of_tool_choice(value: Any) -> str:
    return "word" if isinstance(value, str) else "function"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[ChosenFunction, Tag("function")],
    Discriminator(_form_of_tool_choice),
    BeforeValidator(_check_tool_choice),
]
Tools = Annotated[
    tuple[Annotated[FunctionTool, known_types(("function",), TOOL_TYPES)], ...],
    Field(max_length=MAX_TOOLS, fail_fast=True),
]


class ResponsesRequest(RequestModel):
    """Body of ``POST /v1/responses``."""

    model: str | None = None
    messages: Annotated[
        Any,
        refused(
            "a conversation is input here; /v1/chat/completions and /v1/messages take messages"
        ),
    ] = None
    input: InputItems
    instructions: Text | None = None
    max_output_tokens: Annotated[int | None, bounded("max_tokens")] = None
    temperature: Annotated[float, bounded("temperature"), default_if_null(1.0)] = 1.0
    top_p: Annotated[float, bounded("top_p"), default_if_null(1.0)] = 1.0
    text: TextConfig | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: Annotated[bool, default_if_null(True)] = True
    reasoning: ReasoningConfig | None = None
    include: (
        Annotated[tuple[Include, ...], Field(max_length=len(get_args(Include)), fail_fast=True)]
        | None
    ) = None
    top_logprobs: Annotated[int | None, bounded("logprobs")] = None
    stream: Annotated[bool, default_if_null(False)] = False
    metadata: RequestMetadata | None = None
    truncation: Annotated[
        Any,
        refused(
            "this server shortens no conversation; a longer one than the context is refused",
            "disabled",
        ),
    ] = None
    store: Annotated[
        Any, refused("this server stores no answers; leave store out or send false")
    ] = None

    # Without effect on an answer.
    user: ShortText | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None
    prompt_cache_retention: ShortText | None = None
    prompt_cache_options: dict[str, Any] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    max_tool_calls: int | None = Field(None, ge=0, lt=2**31)

    background: Annotated[Any, refused(f"{NOT_STORED}, and wait for its answer")] = None
    context_management: Annotated[
        Any, refused("this server changes no conversation; leave it out", [])
    ] = None
    conversation: Annotated[Any, refused(NOT_STORED)] = None
    moderation: Annotated[Any, refused("this server has no moderation; leave it out")] = None
    previous_response_id: Annotated[Any, refused(NOT_STORED)] = None
    prompt: Annotated[Any, refused("this server stores no prompts; send the text as input")] = None
    seed: Annotated[Any, refused(NO_SEED)] = None
    stream_options: Annotated[Any, unsupported_except({}, {"include_obfuscation": False})] = None

    @property
    def returns_logprobs(self) -> bool:
        """Whether the answer has log-probabilities."""
        return INCLUDED_LOGPROBS in (self.include or ())

    def response_format(self) -> ResponseFormat | None:
        """Return the response format in the format of chats."""
        given = self.text.format if self.text is not None else None
        if not isinstance(given, SchemaFormat):
            return None if given is None else ResponseFormat(type=given.type)
        schema = {"name": given.name, "schema": given.schema_, "strict": given.strict}
        return ResponseFormat(
            type="json_schema", json_schema=JsonSchemaFormat.model_validate(schema)
        )

    def conversation_of(self) -> Conversation:
        """Return the request as a chat. Raises ParameterError for conversations that a chat cannot
        have.
        """
        choice = self.tool_choice
        fields: Mapping[str, Any] = {
            "model": self.model,
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "logprobs": self.returns_logprobs,
            "top_logprobs": self.top_logprobs if self.returns_logprobs else None,
            "stream": self.stream,
            "response_format": self.response_format(),
            "tools": tuple(tool.tool() for tool in self.tools) if self.tools else None,
            "tool_choice": ToolChoiceFunction(
                type="function", function=FunctionName(name=choice.name)
            )
            if isinstance(choice, ChosenFunction)
            else choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.effort if self.reasoning is not None else None,
        }
        return add_items(self.instructions, self.input).build(fields, NAMES)

    def echo(self) -> dict[str, Any]:
        """Return the fields of an answer that repeat the request."""
        choice, form = self.tool_choice, self.text.format if self.text is not None else None
        written: dict[str, Any] = {"type": form.type} if form is not None else {"type": "text"}
        if isinstance(form, SchemaFormat):
            written |= {"name": form.name, "schema": form.schema_, "strict": form.strict}
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {
                "effort": self.reasoning.effort if self.reasoning is not None else None,
                "summary": None,
            },
            "store": False,
            "temperature": self.temperature,
            "text": {"format": written},
            "tool_choice": {"type": "function", "name": choice.name}
            if isinstance(choice, ChosenFunction)
            else choice or "auto",
            "tools": [
                {
                    key: getattr(tool, key)
                    for key in ("type", "name", "description", "parameters", "strict")
                }
                for tool in self.tools or ()
            ],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": self.top_p,
            "truncation": "disabled",
        }


def parse_responses(body: bytes) -> Conversation:
    """Parse and validate a body. Raises ParameterError, which names the first problem."""
    request = parse_body(ResponsesRequest, body)
    if request.top_logprobs and not request.returns_logprobs:
        raise ParameterError(
            f'top_logprobs is only allowed with include: ["{INCLUDED_LOGPROBS}"]', "top_logprobs"
        )
    return replace(request.conversation_of(), echo=request.echo(), echo_bytes=len(body))
