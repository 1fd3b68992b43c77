"""Requests for ``/v1/messages``, Anthropic's Messages API, and the chats that they are.

What cannot be had here and would change an answer is refused by name. What cannot change it is
accepted without effect.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from tramontane.router.chat_apis.conversation import Conversation
from tramontane.router.chat_apis.messages_blocks import (
    CacheControl,
    JoinedTexts,
    Turns,
    add_turns,
    continues_answer,
)
from tramontane.router.chat_apis.request_parts import (
    NO_SEED,
    Effort,
    ShortText,
    by_type,
    known_types,
    refused,
    typed,
)
from tramontane.router.openai.completion_request import parse_body
from tramontane.router.openai.request_fields import MAX_STOP_CHARS, MAX_STOPS, parse_stops
from tramontane.router.structured.answer_rules import JsonSchema
from tramontane.router.structured.grammar import (
    MAX_TOOLS,
    NAME,
    Function,
    FunctionName,
    JsonSchemaFormat,
    ResponseFormat,
    Tool,
    ToolChoiceFunction,
)
from tramontane.router.structured.request_model import (
    RequestModel,
    default_if_null,
    unsupported_except,
)

# Parameters of a chat, and their names here.
NAMES = (
    (r"^tools\[(\d+)\]\.function\.parameters", r"tools[\1].input_schema"),
    (r"^response_format(\.json_schema)?", "output_config.format"),
    (r"^stop$", "stop_sequences"),
    (r"^reasoning_effort$", "output_config.effort"),
)
SERVER_TOOLS = (
    "tools of the type {type} are not supported; only tools with an input_schema are, which the"
    " client runs"
)
Stops = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]],
    Field(max_length=MAX_STOPS),
]


def _stops(value: Any) -> Any:
    if isinstance(value, str):
        raise ValueError("it must be a list of texts")
    return parse_stops(value)


class ToolDefinition(RequestModel):
    """A tool that the client runs."""

    type: Annotated[Literal["custom"], default_if_null("custom")] = "custom"
    name: str = Field(pattern=NAME)
    description: str | None = None
    input_schema: JsonSchema
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    allowed_callers: Annotated[Any, unsupported_except(["direct"])] = None
    defer_loading: Annotated[Any, unsupported_except()] = None
    input_examples: Annotated[
        Any, refused("examples are not shown to the model; put them into the description", [])
    ] = None

    def tool(self) -> Tool:
        """Return the tool as chats have it."""
        function = Function(
            name=self.name,
            description=self.description,
            parameters=self.input_schema,
            strict=self.strict,
        )
        return Tool(type="function", function=function)


class _Choice(RequestModel):
    disable_parallel_tool_use: Annotated[bool, default_if_null(False)] = False


class AutoChoice(_Choice):
    """The model decides whether it calls tools."""

    type: Literal["auto"]


class AnyChoice(_Choice):
    """The model has to call a tool."""

    type: Literal["any"]


class ToolChoice(_Choice):
    """The model has to call this tool."""

    type: Literal["tool"]
    name: str


class NoneChoice(_Choice):
    """The model calls no tool."""

    type: Literal["none"]


Choice = Annotated[
    Annotated[AutoChoice, typed("auto")]
    | Annotated[AnyChoice, typed("any")]
    | Annotated[ToolChoice, typed("tool")]
    | Annotated[NoneChoice, typed("none")],
    by_type(),
    known_types(
        ("auto", "any", "tool", "none"),
        "{type} is not supported; it must be auto, any, tool or none",
    ),
]
Tools = Annotated[
    tuple[Annotated[ToolDefinition, known_types(("custom",), SERVER_TOOLS, "custom")], ...],
    Field(max_length=MAX_TOOLS, fail_fast=True),
]


class SchemaFormat(RequestModel):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    schema_: JsonSchema = Field(alias="schema")


class OutputConfig(RequestModel):
    """``output_config`` of a request."""

    effort: Effort | None = None
    format: SchemaFormat | None = None


class Thinking(RequestModel):
    """Whether a model is to think. It does so as it was trained, and no budget ends a thought."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = Field(None, ge=1, lt=2**31)
    display: Literal["summarized", "omitted"] | None = None


class Diagnostics(RequestModel):
    """``diagnostics`` of a request, which ask about caches, without effect."""

    previous_message_id: ShortText | None = None


class RequestUser(RequestModel):
    """``metadata`` of a request, without effect."""

    user_id: ShortText | None = None


class CountTokensRequest(RequestModel):
    """Body of ``POST /v1/messages/count_tokens``: a conversation, up to where the model answers."""

    model: str | None = None
    messages: Turns
    system: JoinedTexts | None = None
    tools: Tools | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    context_management: Annotated[
        Any, refused("this server changes no conversation; leave it out")
    ] = None
    mcp_servers: Annotated[Any, refused("this server calls no other servers; leave it out", [])] = (
        None
    )
    speed: Annotated[Any, unsupported_except("standard")] = None
    user_profile_id: ShortText | None = None

    def fields(self) -> dict[str, Any]:
        """Return fields of the chat."""
        choice = self.tool_choice
        words = {"auto": "auto", "any": "required", "none": "none"}
        return {
            "model": self.model,
            "tools": tuple(tool.tool() for tool in self.tools) if self.tools else None,
            "tool_choice": (
                ToolChoiceFunction(type="function", function=FunctionName(name=choice.name))
                if isinstance(choice, ToolChoice)
                else choice and words[choice.type]
            ),
            "parallel_tool_calls": choice is None or not choice.disable_parallel_tool_use,
            "response_format": self._response_format(),
            "reasoning_effort": (
                self.output_config.effort if self.output_config is not None else None
            ),
        }

    def conversation(self) -> Conversation:
        """Return the request as a chat. Raises ParameterError for conversations that a chat cannot
        have.
        """
        fields = self.fields() | {"continue_final_message": continues_answer(self.messages)}
        conversation = add_turns(self.system, self.messages).build(fields, NAMES)
        return replace(
            conversation,
            refuses_thoughts=self.thinking is not None and self.thinking.type == "disabled",
        )

    def _response_format(self) -> ResponseFormat | None:
        given = self.output_config.format if self.output_config is not None else None
        if given is None:
            return None
        schema = JsonSchemaFormat.model_validate({"name": "answer", "schema": given.schema_})
        return ResponseFormat(type="json_schema", json_schema=schema)


class MessagesRequest(CountTokensRequest):
    """Body of ``POST /v1/messages``."""

    max_tokens: int = Field(ge=1, lt=2**31)
    stop_sequences: Annotated[
        tuple[str, ...], BeforeValidator(_stops, json_schema_input_type=Stops)
    ] = Field((), strict=False)
    temperature: Annotated[float, default_if_null(1.0)] = Field(1.0, ge=0, allow_inf_nan=False)
    top_p: Annotated[float, default_if_null(1.0)] = Field(1.0, gt=0, le=1)
    top_k: Annotated[int, default_if_null(0)] = Field(0, ge=-1, lt=2**31)
    stream: Annotated[bool, default_if_null(False)] = False
    metadata: RequestUser | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    inference_geo: ShortText | None = None
    diagnostics: Diagnostics | None = None
    container: Annotated[Any, refused("this server runs no code; leave it out")] = None
    seed: Annotated[Any, refused(NO_SEED)] = None
    store: Annotated[Any, refused("this server stores no answers; leave it out")] = None

    def fields(self) -> dict[str, Any]:
        """Return fields of the chat."""
        own: Mapping[str, Any] = {
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stream": self.stream,
        }
        return {**super().fields(), **own}


def parse_messages(body: bytes) -> Conversation:
    """Parse and validate a body. Raises ParameterError, which names the first problem."""
    return parse_body(MessagesRequest, body).conversation()


def parse_count_tokens(body: bytes) -> Conversation:
    """Parse and validate a body. Raises ParameterError, which names the first problem."""
    return parse_body(CountTokensRequest, body).conversation()
