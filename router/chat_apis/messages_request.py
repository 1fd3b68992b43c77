"""Requests for ``/v1/messages``, Anthropic's Messages API, converted to chats.

Unsupported fields that would change an answer are refused by name. Fields that cannot change it are
accepted without effect.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from tramontane.proto.errors import ParameterError
from tramontane.router.chat_apis.conversation import (
    NO_SEED,
    Caller,
    Conversation,
    ConversationBuilder,
    Effort,
    ShortText,
    by_type,
    known_types,
    refused,
    tool_call,
    typed,
)
from tramontane.router.openai.chat_request import MAX_CALLS, MAX_MESSAGES, AssistantToolCall
from tramontane.router.openai.completion_request import (
    MAX_STOP_CHARS,
    MAX_STOPS,
    Text,
    parse_body,
    parse_stops,
)
from tramontane.router.openai.response_models import to_json
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
    MAX_PARTS,
    RequestModel,
    TextParts,
    bounded,
    check_depth,
    default_if_null,
    unsupported_except,
)

# Messages of Anthropic's API, converted to messages of a chat.

TEXTS = TextParts(ignored=frozenset({"cache_control", "citations"}))
USER_BLOCKS = "blocks of the type {type} are not supported here, only text and tool_result"
ASSISTANT_BLOCKS = (
    "blocks of the type {type} are not supported here, only text, thinking and tool_use"
)
MAX_INPUT_DEPTH = 64  # of the input of a call


class CacheControl(RequestModel):
    """A hint about caches, without effect."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(RequestModel):
    """A text."""

    type: Literal["text"]
    text: Text
    cache_control: CacheControl | None = None
    citations: list[Any] | None = None


class PlainText(RequestModel):
    """A text, where only texts are allowed. Its other fields are accepted, without effect."""

    type: Literal["text"]
    text: str
    cache_control: Any = None
    citations: Any = None


PlainTexts = Annotated[list[PlainText], Field(min_length=1, max_length=MAX_PARTS)]
JoinedTexts = Annotated[Text, BeforeValidator(TEXTS.join, json_schema_input_type=str | PlainTexts)]


class ToolResultBlock(RequestModel):
    """The result of a call. Chat formats lack ``is_error``: the content says it."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: JoinedTexts | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


def check_input(value: Any) -> Any:  # any JSON
    """Return the input of a call. Raises ValueError if it is nested more than ``MAX_INPUT_DEPTH``
    deep.
    """
    return check_depth(value, MAX_INPUT_DEPTH)


class ToolUseBlock(RequestModel):
    """A call that the model has made."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: Annotated[dict[str, Any], AfterValidator(check_input)]
    cache_control: CacheControl | None = None
    caller: Caller = None


class ThinkingBlock(RequestModel):
    """A thought of the model. Thoughts have no signatures here."""

    type: Literal["thinking"]
    thinking: Text
    signature: str | None = None


def _blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


UserBlock = Annotated[
    Annotated[TextBlock, typed("text")] | Annotated[ToolResultBlock, typed("tool_result")],
    by_type(),
    known_types(("text", "tool_result"), USER_BLOCKS),
]
AssistantBlock = Annotated[
    Annotated[TextBlock, typed("text")]
    | Annotated[ToolUseBlock, typed("tool_use")]
    | Annotated[ThinkingBlock, typed("thinking")],
    by_type(),
    known_types(("text", "tool_use", "thinking"), ASSISTANT_BLOCKS),
]
SomeBlocks = Field(min_length=1, max_length=MAX_PARTS, strict=False, fail_fast=True)
UserBlocks = Annotated[tuple[UserBlock, ...], SomeBlocks]
AssistantBlocks = Annotated[tuple[AssistantBlock, ...], SomeBlocks]
UserContent = Annotated[
    UserBlocks, BeforeValidator(_blocks, json_schema_input_type=str | UserBlocks)
]
AssistantContent = Annotated[
    AssistantBlocks, BeforeValidator(_blocks, json_schema_input_type=str | AssistantBlocks)
]


class UserTurn(RequestModel):
    """A message of the user, which may have results of calls."""

    role: Literal["user"]
    content: UserContent


class AssistantTurn(RequestModel):
    """An earlier answer of the model."""

    role: Literal["assistant"]
    content: AssistantContent


class SystemTurn(RequestModel):
    """Instructions within a conversation."""

    role: Literal["system"]
    content: JoinedTexts


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


def add_turns(system: str | None, turns: Sequence[Turn]) -> ConversationBuilder:
    """Return the messages of a system prompt and a conversation. Raises ParameterError for contents
    that no chat has.
    """
    builder = ConversationBuilder()
    if system is not None:
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


def continues_answer(turns: Sequence[Turn]) -> bool:
    """Return whether the model is to continue the last message. Raises ParameterError if that
    message is not a plain text.
    """
    last, place = turns[-1], f"messages[{len(turns) - 1}]"
    if not isinstance(last, AssistantTurn):
        return False
    if not all(isinstance(block, TextBlock) for block in last.content):
        raise ParameterError(
            f"{place}: the model can continue a text only; end with a message of the user", place
        )
    return True


def _add_user(builder: ConversationBuilder, turn: UserTurn, place: str) -> None:
    """Add runs of texts, as lines, and results in their order."""
    texts: list[str] = []
    for block in turn.content:
        if isinstance(block, TextBlock):
            texts.append(block.text)
            continue
        if texts:
            builder.add_text("user", "\n".join(texts), place)
            texts = []
        builder.add_result(block.tool_use_id, block.content or "", place)
    if texts:
        builder.add_text("user", "\n".join(texts), place)


def _arguments(value: dict[str, Any], place: str) -> str:
    try:
        return to_json(value)
    except ValueError:  # NaN, or a number of thousands of digits
        raise ParameterError(
            f"{place}.input has a number that is not JSON, or is too long", f"{place}.input"
        ) from None


def _add_assistant(builder: ConversationBuilder, turn: AssistantTurn, place: str) -> None:
    thoughts, texts = list[str](), list[str]()
    calls: list[AssistantToolCall] = []
    for number, block in enumerate(turn.content):
        here = f"{place}.content[{number}]"
        match block:
            case TextBlock():
                if calls:
                    raise ParameterError(
                        f"{here}: the model's format has no text after a call", here
                    )
                texts.append(block.text)
            case ToolUseBlock():
                calls.append(tool_call(block.id, block.name, _arguments(block.input, here)))
            case ThinkingBlock():
                thoughts.append(block.thinking)
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
        """Return the request as a chat. Raises ParameterError for contents that no chat has."""
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

    max_tokens: Annotated[int, bounded("max_tokens")]
    stop_sequences: Annotated[
        tuple[str, ...], BeforeValidator(_stops, json_schema_input_type=Stops)
    ] = Field((), strict=False)
    temperature: Annotated[float, bounded("temperature"), default_if_null(1.0)] = 1.0
    top_p: Annotated[float, bounded("top_p"), default_if_null(1.0)] = 1.0
    top_k: Annotated[int, bounded("top_k"), default_if_null(0)] = 0
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
