"""Models of the answers of ``/v1/responses``, from which ``/openapi.json`` is made, and their parts
as dictionaries.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tramontane.proto.request import FinishReason
from tramontane.router.chat_apis.block_formatter import BlockFormatter, prepare_blocks
from tramontane.router.chat_apis.blocks import Block, BlockEvent
from tramontane.router.chat_apis.conversation import ClientTool, Conversation
from tramontane.router.openai.chat_request import CUSTOM_INPUT
from tramontane.router.openai.generation import Generation
from tramontane.router.openai.response_models import Answer, Bulk, Event, Usage
from tramontane.router.openai.resume_state import ResumeState
from tramontane.router.openai.served_model import ServedModel
from tramontane.router.tokenization.chat import ChatTemplate

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class LogprobBase(Answer):
    """A token with its log-probability."""

    token: str
    bytes: list[int]
    logprob: float


class OutputLogprob(LogprobBase):
    """A token of the answer, with the likeliest tokens at its position."""

    top_logprobs: list[LogprobBase]


class OutputText(Answer):
    """A text of the model."""

    type: Literal["output_text"]
    text: str
    annotations: list[str]
    logprobs: Bulk[list[OutputLogprob]]


class OutputMessage(Answer):
    """A message of the model."""

    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    status: Status
    content: list[OutputText]


class ReasoningText(Answer):
    """The text of a thought."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(Answer):
    """A thought of the model."""

    type: Literal["reasoning"]
    id: str
    status: Status
    summary: list[str]
    content: list[ReasoningText]


class OutputCall(Answer):
    """A call of a function."""

    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str
    status: Status


class OutputCustomCall(Answer):
    """A call of a custom tool, whose input is one text."""

    type: Literal["custom_tool_call"]
    id: str
    call_id: str
    name: str
    namespace: str | None = None
    input: str
    status: Status


class InputTokensDetails(Answer):
    """Tokens of the prompt that were cached. Nothing is written for later that a client would pay
    for.
    """

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Answer):
    """Tokens of thoughts."""

    reasoning_tokens: int


class ResponsesUsage(Answer):
    """Number of tokens."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Answer):
    """Why an answer was cut off."""

    reason: Literal["max_output_tokens"]


class ResponsesAnswer(Answer):
    """Answer of ``POST /v1/responses`` that is not streamed. It repeats parameters of the
    request.
    """

    id: str
    object: Literal["response"]
    created_at: int
    status: Status
    model: str
    output: list[OutputMessage | OutputReasoning | OutputCall | OutputCustomCall]
    usage: ResponsesUsage | None
    incomplete_details: IncompleteDetails | None
    error: None
    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, str | None]
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, str]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]


def usage_of(usage: Usage) -> dict[str, Any]:
    """Return a chat's usage by the names of this API."""
    details = usage.completion_tokens_details
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.prompt_tokens_details.cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {
            "reasoning_tokens": details.reasoning_tokens if details is not None else 0
        },
        "total_tokens": usage.total_tokens,
    }


def item_id(answer_id: str, block: Block) -> str:
    """Return the id of an item, the same at every ingress."""
    return (
        f"{ {'thought': 'rs', 'text': 'msg', 'call': 'fc'}[block.kind] }_{answer_id}_{block.index}"
    )


def part_of(block: Block, text: str, logprobs: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return a thought or a text as a part of an item."""
    if block.kind == "thought":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def item_of(
    answer_id: str,
    block: Block,
    status: Status,
    parts: Sequence[dict[str, Any]],
    arguments: str = "",
    tool: ClientTool | None = None,
) -> dict[str, Any]:
    """Return the item of a block. ``arguments``: of a call, which has no parts. ``tool``: of a call
    whose form at the client is not that of a function of this name.
    """
    head = {"id": item_id(answer_id, block), "status": status}
    match block.kind:
        case "call":
            call = {"call_id": block.call_id, "name": block.name if tool is None else tool.name}
            if tool is not None and tool.namespace is not None:
                call["namespace"] = tool.namespace
            if tool is not None and tool.is_custom:
                written = {"type": "custom_tool_call", "input": custom_input(arguments)}
            else:
                written = {"type": "function_call", "arguments": arguments}
            return {**head, **call, **written}
        case "thought":
            return {**head, "type": "reasoning", "summary": [], "content": list(parts)}
        case _:
            return {**head, "type": "message", "role": "assistant", "content": list(parts)}


def custom_input(arguments: str) -> str:
    """Return the input of a custom tool from the arguments of its function; they are returned
    themselves where they were cut off.
    """
    try:
        text = json.loads(arguments)[CUSTOM_INPUT] if arguments else ""
    except (ValueError, LookupError, TypeError, RecursionError):
        return arguments
    return text if isinstance(text, str) else arguments


def output_logprobs(logprobs: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return a chat's log-probabilities of its text in this API's format: a token without text has
    empty bytes, not null.
    """
    return [
        _with_bytes(token) | {"top_logprobs": [_with_bytes(top) for top in token["top_logprobs"]]}
        for token in (logprobs or {}).get("content", ())
    ]


def _with_bytes(token: Mapping[str, Any]) -> dict[str, Any]:
    return {"token": token["token"], "bytes": token["bytes"] or [], "logprob": token["logprob"]}


# ``/v1/responses`` without HTTP: the answer of a chat as a response, whole or as typed events with
# increasing numbers.
#
# In a stream log-probabilities come with the deltas. The events that end a part repeat its text,
# without them.

# Events of a stream apart from deltas: two at its beginning, and for each block two that open it
# and three that close it.
OPENING_EVENTS, BLOCK_EVENTS = 2, 5
DELTA_NAMES = {
    "thought": "response.reasoning_text",
    "text": "response.output_text",
    "call": "response.function_call_arguments",
}


def next_number(num_tokens: int, num_blocks: int) -> int:
    """Return a number above the numbers of all events of these tokens and blocks, however the
    tokens arrived.

    A write has tokens, and at most one delta for the block that was open before and for each new
    block.
    """
    return OPENING_EVENTS + num_tokens + (BLOCK_EVENTS + 1) * num_blocks


class ResponsesFormatter(BlockFormatter):
    """Writes the response to one request."""

    def __init__(self, generation: Generation, conversation: Conversation) -> None:
        super().__init__(generation, conversation.echo_bytes)
        self._echo, self._tools = conversation.echo, conversation.client_tools
        self._id = str(generation.head["id"]).partition("-")[2]
        num_tokens, num_blocks = self._choice.num_tokens, len(self._blocks.all)
        self._number = next_number(num_tokens, num_blocks) if generation.has_begun else 0

    @property
    def next_number(self) -> int:
        """Number of the next event."""
        return self._number

    def whole_blocks(self, logprobs: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the whole response."""
        items: list[dict[str, Any]] = []
        scores = output_logprobs(logprobs)
        for block in self._blocks.all:
            own: list[dict[str, Any]] = []
            if block.kind == "text":
                own, scores = scores, []
            items.append(self._item(block, own))
        return self._response(self._status, items)

    def first_events(self) -> list[Event]:
        """Return the events before all blocks."""
        response = self._response("in_progress", [])
        return [
            self._event(f"response.{name}", response=response)
            for name in ("created", "in_progress")
        ]

    def last_events(self) -> list[Event]:
        """Return the event with the whole response."""
        status = self._status
        return [
            self._event(
                f"response.{status}",
                response=self._response(status, [self._item(b) for b in self._blocks.all]),
            )
        ]

    def failure(self, error: Mapping[str, Any]) -> list[Event]:
        """Return the event with the response that has failed. ``error``: OpenAI's object."""
        self._number += 1  # of the event of the error
        response = self._response("failed", [self._item(block) for block in self._blocks.all])
        # the API has few codes for this
        code = "rate_limit_exceeded" if error.get("type") == "rate_limit_error" else "server_error"
        response["error"] = {"code": code, "message": error.get("message")}
        return [self._event("response.failed", response=response)]

    def events_of(
        self, steps: Sequence[BlockEvent], logprobs: Mapping[str, Any] | None
    ) -> list[Event]:
        """Return the events of these block changes; log-probabilities are in the first delta of
        text.
        """
        events: list[Event] = []
        scores = output_logprobs(logprobs)
        for action, block, parts in steps:
            if action == "open":
                events += self._opening_of(block)
                continue
            is_scored = block.kind == "text" and bool(scores)
            if (action == "add" and not self._is_custom(block)) or is_scored:
                events.append(self._delta(block, "".join(parts), scores if is_scored else []))
                scores = [] if is_scored else scores
            if action == "close":
                events += self._closing_of(block)
        return events

    def _opening_of(self, block: Block) -> list[Event]:
        item = item_of(self._id, block, "in_progress", [], tool=self._tools.get(block.name))
        added = self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind == "call":
            return [added]
        return [
            added,
            self._event(
                "response.content_part.added", **self._place(block), part=part_of(block, "")
            ),
        ]

    def _delta(self, block: Block, text: str, logprobs: list[dict[str, Any]]) -> Event:
        more = {"logprobs": logprobs} if block.kind == "text" else {}
        return self._event(
            f"{DELTA_NAMES[block.kind]}.delta", **self._place(block), delta=text, **more
        )

    def _closing_of(self, block: Block) -> list[Event]:
        content, place, name = block.content, self._place(block), f"{DELTA_NAMES[block.kind]}.done"
        if self._is_custom(block):  # its input is known when its JSON is complete
            text, name = custom_input(content), "response.custom_tool_call_input"
            events = [
                self._event(f"{name}.delta", **place, delta=text),
                self._event(f"{name}.done", **place, input=text),
            ]
        elif block.kind == "call":
            events = [self._event(name, **place, name=block.name, arguments=content)]
        else:
            more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
            events = [self._event(name, **place, text=content, **more)]
            events.append(
                self._event("response.content_part.done", **place, part=part_of(block, content))
            )
        return [
            *events,
            self._event(
                "response.output_item.done", output_index=block.index, item=self._item(block)
            ),
        ]

    def _place(self, block: Block) -> dict[str, Any]:
        place = {"item_id": item_id(self._id, block), "output_index": block.index}
        return place if block.kind == "call" else {**place, "content_index": 0}

    def _item(self, block: Block, logprobs: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
        """Return a block as an item that has ended; the last item of an answer that was cut off is
        incomplete.
        """
        is_cut = block is self._blocks.all[-1] and self._choice.finish is FinishReason.LENGTH
        content = block.content
        parts = [] if block.kind == "call" else [part_of(block, content, logprobs)]
        status: Status = "incomplete" if is_cut else "completed"
        return item_of(self._id, block, status, parts, content, self._tools.get(block.name))

    def _is_custom(self, block: Block) -> bool:
        tool = self._tools.get(block.name) if block.kind == "call" else None
        return tool is not None and tool.is_custom

    @property
    def _status(self) -> Status:
        return "incomplete" if self._choice.finish is FinishReason.LENGTH else "completed"

    def _response(self, status: Status, items: list[dict[str, Any]]) -> dict[str, Any]:
        head = self.generation.head
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": head["created"],
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"}
            if status == "incomplete"
            else None,
            "model": head["model"],
            "output": items,
            "usage": None if status == "in_progress" else usage_of(self.generation.usage),
            **self._echo,
        }

    def _event(self, kind: str, **fields: Any) -> Event:
        event = Event(kind, {"type": kind, **fields, "sequence_number": self._number})
        self._number += 1
        return event


async def prepare_response(
    model: ServedModel,
    template: ChatTemplate,
    conversation: Conversation,
    arrived_at: float,
    state: ResumeState,
) -> ResponsesFormatter:
    """Render, tokenize and validate. Raises RequestError for requests that can never run."""
    generation = await prepare_blocks(model, template, conversation, arrived_at, state)
    return ResponsesFormatter(generation, conversation)


def error_event(body: bytes, number: int) -> Event:
    """Return the event for an error. ``body``: of a response with that error."""
    try:
        error = json.loads(body)["error"]
        fields = {name: error[name] for name in ("code", "message", "param")}
    except (ValueError, LookupError, TypeError, RecursionError):
        fields = {"code": None, "message": "the server failed", "param": None}
    return Event("error", {"type": "error", **fields, "sequence_number": number})
