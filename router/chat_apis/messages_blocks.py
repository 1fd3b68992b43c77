"""Messages of Anthropic's API, whose content is text or blocks, and the messages of a chat that
they are.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from tramontane.proto.errors import ParameterError
from tramontane.router.chat_apis.conversation import ConversationBuilder, tool_call
from tramontane.router.chat_apis.request_parts import Caller, by_type, known_types, typed
from tramontane.router.openai.chat_request import MAX_CALLS, MAX_MESSAGES, AssistantToolCall
from tramontane.router.openai.completion_request import Text
from tramontane.router.openai.responses import to_json
from tramontane.router.structured.request_model import RequestModel, check_depth
from tramontane.router.structured.text_parts import MAX_PARTS, TextParts

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
    """A text where there is nothing else. What else it has is accepted, without effect."""

    type: Literal["text"]
    text: str
    cache_control: Any = None
    citations: Any = None


PlainTexts = Annotated[list[PlainText], Field(min_length=1, max_length=MAX_PARTS)]
JoinedTexts = Annotated[Text, BeforeValidator(TEXTS.join, json_schema_input_type=str | PlainTexts)]


class ToolResultBlock(RequestModel):
    """The result of a call. Formats of chats have no place for ``is_error``: the content says
    it.
    """

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
    """Return the messages of a system prompt and a conversation. Raises ParameterError for what a
    chat cannot have.
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
    """Return whether the model is to continue the last message. Raises ParameterError if that is
    not a text of its own.
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
