"""``/v1/responses`` without HTTP: the answer of a chat as a response, whole or as typed events with
increasing numbers.

In a stream log-probabilities come with the deltas. The events that end a part repeat its text,
without them.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tramontane.proto.request import FinishReason
from tramontane.router.chat_apis.block_answer import BlockAnswer, prepare_chat
from tramontane.router.chat_apis.blocks import Block, Step
from tramontane.router.chat_apis.conversation import Conversation
from tramontane.router.chat_apis.responses_answer import (
    Status,
    item_id,
    item_of,
    output_logprobs,
    part_of,
    usage_of,
)
from tramontane.router.openai.chat_completion import ChatCompletion
from tramontane.router.openai.chunks import Event
from tramontane.router.openai.resume_state import ResumeState
from tramontane.router.openai.served_model import ServedModel
from tramontane.router.tokenization.chat import ChatTemplate

# Events of a stream apart from deltas: two at its beginning, and for each block two that open it
# and three that close it.
OPENING_EVENTS, BLOCK_EVENTS = 2, 5
DELTA_NAMES = {
    "thought": "response.reasoning_text",
    "text": "response.output_text",
    "call": "response.function_call_arguments",
}


def next_number(num_tokens: int, num_blocks: int) -> int:
    """Return a number above those of all events of so many tokens and blocks, however the tokens
    arrived.

    A write has tokens, and one delta at most for the block that was open before and for each new
    one.
    """
    return OPENING_EVENTS + num_tokens + (BLOCK_EVENTS + 1) * num_blocks


class ResponsesAnswers(BlockAnswer):
    """The response to one request."""

    def __init__(self, chat: ChatCompletion, conversation: Conversation) -> None:
        super().__init__(chat, conversation.echo_bytes)
        self._echo = conversation.echo
        self._id = str(chat.head["id"]).partition("-")[2]
        is_resumed = chat.has_begun
        self._number = (
            next_number(self._choice.num_tokens, len(self._blocks.all)) if is_resumed else 0
        )

    @classmethod
    async def prepare(
        cls,
        model: ServedModel,
        template: ChatTemplate,
        conversation: Conversation,
        arrived_at: float,
        state: ResumeState,
    ) -> "ResponsesAnswers":
        """Render, tokenize and validate. Raises RequestError for what can never run."""
        return cls(
            await prepare_chat(model, template, conversation, arrived_at, state), conversation
        )

    @property
    def next_number(self) -> int:
        """Number of the next event."""
        return self._number

    def whole(self, logprobs: Mapping[str, Any] | None) -> dict[str, Any]:
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

    def events_of(self, steps: Sequence[Step], logprobs: Mapping[str, Any] | None) -> list[Event]:
        """Return the events of what happens to blocks; log-probabilities are in the first delta of
        text.
        """
        events: list[Event] = []
        scores = output_logprobs(logprobs)
        for action, block, parts in steps:
            if action == "open":
                events += self._opening_of(block)
                continue
            is_scored = block.kind == "text" and bool(scores)
            if action == "add" or is_scored:
                events.append(self._delta(block, "".join(parts), scores if is_scored else []))
                scores = [] if is_scored else scores
            if action == "close":
                events += self._closing_of(block)
        return events

    def _opening_of(self, block: Block) -> list[Event]:
        item = item_of(self._id, block, "in_progress", [])
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
        if block.kind == "call":
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
        """Return a block as an item that has ended; the last one of an answer that was cut off is
        incomplete.
        """
        is_cut = block is self._blocks.all[-1] and self._choice.finish is FinishReason.LENGTH
        content = block.content
        parts = [] if block.kind == "call" else [part_of(block, content, logprobs)]
        return item_of(self._id, block, "incomplete" if is_cut else "completed", parts, content)

    @property
    def _status(self) -> Status:
        return "incomplete" if self._choice.finish is FinishReason.LENGTH else "completed"

    def _response(self, status: Status, items: list[dict[str, Any]]) -> dict[str, Any]:
        head = self._chat.head
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
            "usage": None if status == "in_progress" else usage_of(self._chat.usage),
            **self._echo,
        }

    def _event(self, kind: str, **fields: Any) -> Event:
        event = Event(kind, {"type": kind, **fields, "sequence_number": self._number})
        self._number += 1
        return event


def error_event(body: bytes, number: int) -> Event:
    """Return the event for an error. ``body``: of a response with that error."""
    try:
        error = json.loads(body)["error"]
        fields = {name: error[name] for name in ("code", "message", "param")}
    except (ValueError, LookupError, TypeError, RecursionError):
        fields = {"code": None, "message": "the server failed", "param": None}
    return Event("error", {"type": "error", **fields, "sequence_number": number})
