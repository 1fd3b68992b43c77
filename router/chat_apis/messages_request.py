"""Requests for ``/v1/messages``, Anthropic's Messages API, converted to chats.

Fields and blocks that this server does not know have no effect. Fields that would change an answer
are refused by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, model_validator

from tramontane.proto.errors import ParameterError
from tramontane.router.chat_apis.conversation import (
    NO_SEED,
    OTHER,
    Conversation,
    ConversationBuilder,
    Effort,
    by_type,
    known_types,
    refused,
    tool_call,
    typed,
)
from tramontane.router.openai.chat_request import (
    MAX_CALLS,
    MAX_MESSAGES,
    Arguments,
    AssistantToolCall,
    CallId,
)
from tramontane.router.openai.completion_request import (
    Text,
    parse_body,
)
from tramontane.router.openai.sampling_values import MAX_STOP_CHARS, MAX_STOPS, parse_stops
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
    MAX_PARTS,
    NoEffect,
    Omitted,
    OtherObject,
    RequestBody,
    RequestModel,
    TextParts,
    bounded,
    default_if_null,
    no_effect_fields,
)
from tramontane.router.structured.schemas import JsonSchema, ToolSchema, writable_schema_of

# Messages of Anthropic's API, converted to messages of a chat.


class TextBlock(RequestModel):
    """A text."""

    type: Literal["text"]
    text: Annotated[Text, default_if_null("")] = ""
    cache_control: NoEffect = None
    citations: NoEffect = None


TEXTS = TextParts(hints=no_effect_fields(TextBlock))
Parts = Annotated[list[TextBlock | OtherObject], Field(max_length=MAX_PARTS)]
Texts = Annotated[
    tuple[str, ...], PlainValidator(TEXTS.texts, json_schema_input_type=str | Parts | None)
]


# of a result: what is no content is JSON
Result = Annotated[tuple[str, ...], PlainValidator(TEXTS.result, json_schema_input_type=Any)]


class ToolResultBlock(RequestModel):
    """The result of a call. Chat formats lack ``is_error``: the content says it."""

    type: Literal["tool_result"]
    tool_use_id: CallId = ""
    content: Result = ()
    is_error: NoEffect = None
    cache_control: NoEffect = None


class ToolUseBlock(RequestModel):
    """A call that the model has made."""

    type: Literal["tool_use"]
    id: CallId = ""
    name: Annotated[Text, default_if_null("")] = ""
    input: Arguments = "{}"
    cache_control: NoEffect = None
    caller: NoEffect = None


class ThinkingBlock(RequestModel):
    """A thought of the model. Thoughts have no signatures here."""

    type: Literal["thinking"]
    thinking: Annotated[Text, default_if_null("")] = ""
    signature: NoEffect = None


def _blocks(value: Any) -> Any:
    """Return a content as blocks; those of other types with their text, or what stands for them."""
    if value is None:
        return []
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


UserBlock = Annotated[
    Annotated[TextBlock, typed("text")]
    | Annotated[ToolResultBlock, typed("tool_result")]
    | Annotated[OtherObject, typed(OTHER)],
    by_type("text", "tool_result"),
]
AssistantBlock = Annotated[
    Annotated[TextBlock, typed("text")]
    | Annotated[ToolUseBlock, typed("tool_use")]
    | Annotated[ThinkingBlock, typed("thinking")]
    | Annotated[OtherObject, typed(OTHER)],
    by_type("text", "tool_use", "thinking"),
]
SomeBlocks = Field(max_length=MAX_PARTS, strict=False, fail_fast=True)
UserBlocks = Annotated[tuple[UserBlock, ...], SomeBlocks]
AssistantBlocks = Annotated[tuple[AssistantBlock, ...], SomeBlocks]
UserContent = Annotated[
    UserBlocks, BeforeValidator(_blocks, json_schema_input_type=str | UserBlocks | None)
]
AssistantContent = Annotated[
    AssistantBlocks, BeforeValidator(_blocks, json_schema_input_type=str | AssistantBlocks | None)
]


class UserTurn(RequestModel):
    """A message of the user, which may have results of calls."""

    role: Literal["user"]
    content: UserContent = ()


class AssistantTurn(RequestModel):
    """An earlier answer of the model."""

    role: Literal["assistant"]
    content: AssistantContent = ()


class SystemTurn(RequestModel):
    """Instructions within a conversation."""

    role: Literal["system", "developer"]
    content: Texts = ()


Turn = Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]


def _require_turns(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    if not turns:
        raise ValueError("it must not be empty")
    return turns


Turns = Annotated[
    tuple[Turn, ...],
    Field(max_length=MAX_MESSAGES, fail_fast=True, json_schema_extra={"minItems": 1}),
    AfterValidator(_require_turns),
]


def add_turns(system: Sequence[str], turns: Sequence[Turn]) -> ConversationBuilder:
    """Return the messages of a system prompt and a conversation. Raises ParameterError for more
    calls than a message may have.
    """
    builder = ConversationBuilder()
    if system:
        builder.add_text("system", system, "system")
    for index, turn in enumerate(turns):
        place = f"messages[{index}]"
        match turn:
            case UserTurn():
                _add_user(builder, turn, place)
            case AssistantTurn():
                _add_assistant(builder, turn, place)
            case SystemTurn():
                builder.add_text("system", turn.content, place)
    return builder


def _add_user(builder: ConversationBuilder, turn: UserTurn, place: str) -> None:
    """Add runs of texts, as lines, and results in their order."""
    texts: list[str] = []
    for block in turn.content:
        if isinstance(block, ToolResultBlock):
            if texts:
                builder.add_text("user", texts, place)
                texts = []
            builder.add_result(block.tool_use_id, block.content, place)
        else:
            texts.append(block.text)
    if texts or not turn.content:
        builder.add_text("user", texts, place)


def _add_assistant(builder: ConversationBuilder, turn: AssistantTurn, place: str) -> None:
    """Add one message with all thoughts, all texts and all calls."""
    thoughts, texts = list[str](), list[str]()
    calls: list[AssistantToolCall] = []
    for block in turn.content:
        match block:
            case TextBlock():
                texts.append(block.text)
            case ToolUseBlock():
                calls.append(tool_call(block.id, block.name, block.input))
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case OtherObject() if not isinstance(block.text, Omitted):
                texts.append(block.text)
    if len(calls) > MAX_CALLS:
        raise ParameterError(f"{place}: there may be at most {MAX_CALLS} calls in a message", place)
    builder.add_answer("\n".join(thoughts), "\n".join(texts) if texts else None, calls, place)


# Parameters of a chat, and their names here.
NAMES = (
    (r"^tools\[(\d+)\]\.function\.parameters", r"tools[\1].input_schema"),
    (r"^response_format(\.json_schema)?", "output_config.format"),
    (r"^stop$", "stop_sequences"),
    (r"^reasoning_effort$", "output_config.effort"),
)
Stops = Annotated[
    list[Annotated[str, Field(max_length=MAX_STOP_CHARS)]],
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
    input_schema: ToolSchema
    strict: bool | None = None
    cache_control: NoEffect = None
    eager_input_streaming: NoEffect = None
    allowed_callers: NoEffect = None
    defer_loading: NoEffect = None
    input_examples: NoEffect = None

    _writable = model_validator(mode="before")(writable_schema_of("input_schema"))

    def tool(self) -> Tool:
        """Return the tool in the format of chats."""
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
    by_type("auto", "any", "tool", "none"),
    known_types(
        ("auto", "any", "tool", "none"),
        "{type} is not supported; it must be auto, any, tool or none",
    ),
]


def _check_tool(tool: OtherObject) -> OtherObject:
    if tool.type == "function":
        raise ValueError(
            'functions of chats have another form; here it is {"name": ..., "input_schema": ...}'
        )
    return tool


# Tools that another server runs, or whose schema only its models know, are left out.
Tools = Annotated[
    tuple[
        Annotated[
            Annotated[ToolDefinition, typed("custom")]
            | Annotated[OtherObject, AfterValidator(_check_tool), typed(OTHER)],
            by_type("custom", default="custom"),
        ],
        ...,
    ],
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
    budget_tokens: NoEffect = None
    display: NoEffect = None


class CountTokensRequest(RequestBody):
    """Body of ``POST /v1/messages/count_tokens``: a conversation, up to where the model answers."""

    has_history = True
    model: str | None = None
    messages: Turns
    system: Texts = ()
    tools: Tools | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: NoEffect = None
    context_management: NoEffect = None  # edits that would make the conversation shorter
    mcp_servers: Annotated[Any, refused("this server calls no other servers; leave it out", [])] = (
        None
    )
    speed: NoEffect = None
    user_profile_id: NoEffect = None

    def fields(self) -> dict[str, Any]:
        """Return fields of the chat."""
        choice = self.tool_choice
        words = {"auto": "auto", "any": "required", "none": "none"}
        return {
            "model": self.model,
            "tools": tuple(
                tool.tool() for tool in self.tools or () if isinstance(tool, ToolDefinition)
            )
            or None,
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
        """Return the request as a chat. Raises ParameterError for contents that no chat has."""
        conversation = add_turns(self.system, self.messages).build(self.fields(), NAMES, self)
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

    # 0: the prompt is computed, so that it is in the cache, and there is no answer
    max_tokens: int = Field(ge=0, lt=2**31)
    stop_sequences: Annotated[
        tuple[str, ...], BeforeValidator(_stops, json_schema_input_type=Stops)
    ] = Field((), strict=False)
    temperature: Annotated[float, bounded("temperature"), default_if_null(1.0)] = 1.0
    top_p: Annotated[float, bounded("top_p"), default_if_null(1.0)] = 1.0
    top_k: Annotated[int, bounded("top_k"), default_if_null(0)] = 0
    stream: Annotated[bool, default_if_null(False)] = False
    metadata: NoEffect = None
    service_tier: NoEffect = None
    inference_geo: NoEffect = None
    diagnostics: NoEffect = None
    container: NoEffect = None
    seed: Annotated[Any, refused(NO_SEED)] = None
    store: NoEffect = None

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
