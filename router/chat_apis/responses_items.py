"""Items of a Responses conversation: messages, function calls and their results; and their
conversion to chat messages.
"""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from tramontane.proto.errors import ParameterError
from tramontane.router.chat_apis.conversation import (
    Caller,
    ConversationBuilder,
    ShortText,
    by_type,
    known_types,
    refused,
    tool_call,
    typed,
)
from tramontane.router.openai.chat_request import MAX_CALLS, MAX_MESSAGES, AssistantToolCall
from tramontane.router.openai.completion_request import Text
from tramontane.router.structured.request_model import (
    MAX_PARTS,
    RequestModel,
    TextParts,
    default_if_null,
    unsupported_except,
)

TEXTS = TextParts(
    ("input_text", "output_text", "text"),
    frozenset({"annotations", "logprobs", "cache_control", "prompt_cache_breakpoint"}),
)
OTHER_ITEMS = (
    "items of the type {type} are not supported; there are message, function_call,"
    " function_call_output and reasoning"
)


class InputPart(RequestModel):
    """A text. The further fields of an answer's text, and cache hints, are accepted, without
    effect.
    """

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Any = None
    logprobs: Any = None
    cache_control: Any = None
    prompt_cache_breakpoint: Any = None


Parts = Annotated[list[InputPart], Field(min_length=1, max_length=MAX_PARTS)]
Content = Annotated[Text, BeforeValidator(TEXTS.join, json_schema_input_type=str | Parts)]


class Item(RequestModel):
    """Base of items. Their ids and states are of answers, and have no effect."""

    id: ShortText | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(Item):
    """A message of anybody in the conversation."""

    type: Annotated[Literal["message"], default_if_null("message")] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(Item):
    """A call that the model has made."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text
    caller: Caller = None
    namespace: Annotated[Any, unsupported_except()] = None


class FunctionCallOutputItem(Item):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Content
    name: Text | None = None
    caller: Caller = None
    namespace: Annotated[Any, unsupported_except()] = None


class ReasoningPart(RequestModel):
    """The text of a thought."""

    type: Literal["reasoning_text"]
    text: Text


class ReasoningItem(Item):
    """A thought of the model; its summary has no effect."""

    type: Literal["reasoning"]
    summary: list[Any] | None = None
    content: (
        Annotated[
            tuple[ReasoningPart, ...], Field(max_length=MAX_PARTS, strict=False, fail_fast=True)
        ]
        | None
    ) = None
    encrypted_content: Annotated[
        Any, refused("this server cannot read it; send the content of the thought")
    ] = None


ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")
AnyItem = Annotated[
    Annotated[MessageItem, typed("message")]
    | Annotated[FunctionCallItem, typed("function_call")]
    | Annotated[FunctionCallOutputItem, typed("function_call_output")]
    | Annotated[ReasoningItem, typed("reasoning")],
    by_type("message"),
    known_types(ITEM_TYPES, OTHER_ITEMS, "message"),
]


def _items(value: Any) -> Any:
    if isinstance(value, str):
        return (MessageItem(role="user", content=value),)
    if not isinstance(value, list):
        raise ValueError("it must be a text or a list of items")
    return value


def _require_items(items: tuple[AnyItem, ...]) -> tuple[AnyItem, ...]:
    if not items:
        raise ValueError("it must not be empty")
    return items


# fail_fast: a body of some megabytes may contain a million invalid items.
ItemList = Annotated[
    tuple[AnyItem, ...], Field(max_length=MAX_MESSAGES, strict=False, fail_fast=True)
]
InputItems = Annotated[
    ItemList,
    BeforeValidator(_items, json_schema_input_type=str | Annotated[ItemList, Field(min_length=1)]),
    AfterValidator(_require_items),
]


def add_items(instructions: str | None, items: Iterable[AnyItem]) -> ConversationBuilder:
    """Return the messages of instructions and items: a message of the assistant and the calls after
    it are one.

    Raises ParameterError for no messages, and for more calls in a row than a message may have.
    """
    turn = _AssistantTurn(ConversationBuilder())
    if instructions is not None:
        turn.builder.add_text("system", instructions, "instructions")
    for index, item in enumerate(items):
        turn.add(item, f"input[{index}]")
    turn.end()
    if not turn.builder.messages:
        raise ParameterError("input has no message and no call", "input")
    return turn.builder


class _AssistantTurn:
    """The message of the assistant that is not complete yet, and the messages before it."""

    def __init__(self, builder: ConversationBuilder) -> None:
        self.builder = builder
        self._clear()

    def _clear(self) -> None:
        self._thoughts: list[str] = []
        self._text: str | None = None
        self._calls: list[AssistantToolCall] = []
        self._place = ""

    def add(self, item: AnyItem, place: str) -> None:
        """Add an item."""
        match item:
            case FunctionCallItem():
                if len(self._calls) == MAX_CALLS:
                    raise ParameterError(
                        f"{place}: there may be at most {MAX_CALLS} calls in a row", place
                    )
                self._calls.append(tool_call(item.call_id, item.name, item.arguments))
            case ReasoningItem():
                if self._text is not None or self._calls:
                    self.end()
                self._thoughts += [part.text for part in item.content or ()]
            case FunctionCallOutputItem():
                self.end()
                self.builder.add_result(item.call_id, item.output, place, item.name)
            case MessageItem():
                self._add_message(item, place)
        is_answer = bool(self._thoughts or self._calls) or self._text is not None
        self._place = (self._place or place) if is_answer else ""

    def _add_message(self, item: MessageItem, place: str) -> None:
        if item.role != "assistant":
            self.end()
            self.builder.add_text(item.role, item.content, place)
            return
        if self._text is not None or self._calls:
            self.end()
        self._text = item.content

    def end(self) -> None:
        """Add the assistant's message, if there is one."""
        thought = "\n".join(self._thoughts)
        if thought or self._text is not None or self._calls:
            self.builder.add_answer(thought, self._text, self._calls, self._place)
        self._clear()
