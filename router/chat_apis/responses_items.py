"""Items of a Responses conversation: messages, function calls and their results; and their
conversion to chat messages.
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator

from tramontane.router.chat_apis.conversation import (
    OTHER,
    ClientTool,
    ConversationBuilder,
    by_type,
    tool_call,
    typed,
)
from tramontane.router.openai.chat_request import (
    CUSTOM_INPUT,
    MAX_MESSAGES,
    Arguments,
    AssistantToolCall,
    CallId,
)
from tramontane.router.openai.completion_request import Text
from tramontane.router.openai.response_models import to_json
from tramontane.router.structured.request_model import (
    MAX_PARTS,
    NoEffect,
    Omitted,
    OtherObject,
    RequestModel,
    TextParts,
    default_if_null,
    no_effect_fields,
)


class InputPart(RequestModel):
    """A text."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: NoEffect = None
    logprobs: NoEffect = None
    cache_control: NoEffect = None
    prompt_cache_breakpoint: NoEffect = None


TEXTS = TextParts(
    ("input_text", "output_text", "text", "reasoning_text", "summary_text"),
    no_effect_fields(InputPart),
)
Parts = Annotated[list[InputPart | OtherObject], Field(max_length=MAX_PARTS)]
# of a result: what is no content is JSON
Result = Annotated[tuple[str, ...], PlainValidator(TEXTS.result, json_schema_input_type=Any)]
Texts = Annotated[
    tuple[str, ...], PlainValidator(TEXTS.texts, json_schema_input_type=str | Parts | None)
]


class Item(RequestModel):
    """Base of items. Their ids and states are of answers, and have no effect."""

    id: NoEffect = None
    status: NoEffect = None


class MessageItem(Item):
    """A message of anybody in the conversation."""

    type: Annotated[Literal["message"], default_if_null("message")] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Texts = ()
    phase: NoEffect = None


class CallItem(Item):
    """A call that the model has made: of a function, or of a custom tool, whose ``input`` is one
    text.
    """

    type: Literal["function_call", "custom_tool_call"]
    call_id: CallId = ""
    name: Annotated[Text, default_if_null("")] = ""
    arguments: Arguments = "{}"
    input: Text | None = None
    caller: NoEffect = None
    namespace: Text | None = None


class CallOutputItem(Item):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: CallId = ""
    output: Result = ()
    name: Text | None = None
    caller: NoEffect = None
    namespace: NoEffect = None


class ReasoningItem(Item):
    """A thought of the model; its summary and what another server has encrypted have no effect."""

    type: Literal["reasoning"]
    summary: NoEffect = None
    content: Texts = ()
    encrypted_content: NoEffect = None


CALLS = ("function_call", "custom_tool_call")
OUTPUTS = ("function_call_output", "custom_tool_call_output")
# Items of other types are calls and results of tools that another server runs, and similar.
AnyItem = Annotated[
    Annotated[MessageItem, typed("message")]
    | Annotated[CallItem, typed(CALLS[0])]
    | Annotated[CallOutputItem, typed(OUTPUTS[0])]
    | Annotated[ReasoningItem, typed("reasoning")]
    | Annotated[OtherObject, typed(OTHER)],
    by_type("message", CALLS, OUTPUTS, "reasoning", default="message"),
]


def _items(value: Any) -> Any:
    if isinstance(value, str):
        return (MessageItem.model_validate({"role": "user", "content": value}),)
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


def add_items(
    instructions: str | None, items: Iterable[AnyItem], client_tools: Mapping[str, ClientTool]
) -> ConversationBuilder:
    """Return the messages of instructions and items: a message of the assistant and the calls after
    it are one. ``client_tools``: those of the request, by the names that the model sees.

    Raises ParameterError for more calls in a row than a message may have.
    """
    names = {(tool.namespace, tool.name): name for name, tool in client_tools.items()}
    turn = _AssistantTurn(ConversationBuilder(), names)
    if instructions:
        turn.builder.add_text("system", (instructions,), "instructions")
    for index, item in enumerate(items):
        turn.add(item, f"input[{index}]")
    turn.end()
    if not turn.builder.messages:
        turn.builder.add_text("user", (), "input")
    return turn.builder


class _AssistantTurn:
    """The message of the assistant that is not complete yet, and the messages before it."""

    def __init__(
        self, builder: ConversationBuilder, names: Mapping[tuple[str | None, str], str]
    ) -> None:
        self.builder, self._names = builder, names
        self._clear()

    def _clear(self) -> None:
        self._thoughts: list[str] = []
        self._text: str | None = None
        self._calls: list[AssistantToolCall] = []
        self._place = ""

    def add(self, item: AnyItem, place: str) -> None:
        """Add an item."""
        match item:
            case CallItem():
                name = self._names.get((item.namespace, item.name), item.name)
                self._calls.append(tool_call(item.call_id, name, _arguments_of(item)))
            case ReasoningItem():
                if self._text is not None or self._calls:
                    self.end()
                self._thoughts += item.content
            case CallOutputItem():
                self.end()
                self.builder.add_result(item.call_id, item.output, place, item.name)
            case MessageItem():
                self._add_message(item, place)
            case OtherObject() if output := item.output:
                # of a tool that another server has run; its call has no name that the model knows
                self.end()
                self.builder.add_result("", (output,), place, item.type)
            case OtherObject() if not isinstance(item.text, Omitted):
                self.end()
                self.builder.add_text("user", (item.text,), place)
        is_answer = bool(self._thoughts or self._calls) or self._text is not None
        self._place = (self._place or place) if is_answer else ""

    def _add_message(self, item: MessageItem, place: str) -> None:
        if item.role != "assistant":
            self.end()
            self.builder.add_text(item.role, item.content, place)
            return
        if self._text is not None or self._calls:
            self.end()
        self._text = "\n".join(item.content)

    def end(self) -> None:
        """Add the assistant's message, if there is one."""
        thought = "\n".join(self._thoughts)
        if thought or self._text is not None or self._calls:
            self.builder.add_answer(thought, self._text, self._calls, self._place)
        self._clear()


def _arguments_of(item: CallItem) -> str:
    """Return the arguments of a call. A custom tool is a function with one text argument."""
    if item.input is None or (item.type == CALLS[0] and item.arguments != "{}"):
        return item.arguments
    return to_json({CUSTOM_INPUT: item.input})
