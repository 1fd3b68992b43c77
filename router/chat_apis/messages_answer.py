"""``/v1/messages`` without HTTP: the answer of a chat as Anthropic's message, whole or as
events.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tramontane.proto.request import FinishReason
from tramontane.router.chat_apis.block_formatter import (
    BlockFormatter,
    encode_conversation,
    prepare_blocks,
)
from tramontane.router.chat_apis.blocks import Block, BlockEvent
from tramontane.router.chat_apis.conversation import Conversation
from tramontane.router.openai.response_models import Answer, Event, to_json
from tramontane.router.openai.resume_state import ResumeState
from tramontane.router.openai.served_model import ServedModel
from tramontane.router.structured.request_model import check_depth
from tramontane.router.tokenization.chat import ChatTemplate

MAX_INPUT_DEPTH = 64  # of the input of a call
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextContent(Answer):
    """A text of the model."""

    type: Literal["text"]
    text: str


class ThinkingContent(Answer):
    """A thought of the model. The signature is empty."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseContent(Answer):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessagesTokensDetails(Answer):
    """Tokens of thoughts."""

    thinking_tokens: int


class MessagesUsage(Answer):
    """Number of tokens. ``input_tokens``: computed tokens of the prompt,
    ``cache_read_input_tokens``: the others.
    """

    input_tokens: int
    output_tokens: int
    output_tokens_details: MessagesTokensDetails
    cache_creation_input_tokens: int
    cache_read_input_tokens: int


class MessagesAnswer(Answer):
    """Answer of ``POST /v1/messages`` that is not streamed."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextContent | ThinkingContent | ToolUseContent]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage


class TokenCount(Answer):
    """Answer of ``POST /v1/messages/count_tokens``."""

    input_tokens: int


class AnthropicErrorDetails(Answer):
    """The type and message of an error."""

    type: str
    message: str


class AnthropicError(Answer):
    """Body of every error response of these endpoints."""

    type: Literal["error"]
    error: AnthropicErrorDetails


class MessagesFormatter(BlockFormatter):
    """Writes the message that answers one request."""

    def whole_blocks(self, logprobs: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the whole message. A call that was cut off is left out: its input is not valid
        JSON.
        """
        content = [
            written for block in self._blocks.all if (written := _content(block)) is not None
        ]
        return self._message(content or [_started(Block("text", 0))], is_whole=True)

    def first_events(self) -> list[Event]:
        """Return the event before all blocks."""
        return [_event("message_start", message=self._message([], is_whole=False))]

    def events_of(
        self, steps: Sequence[BlockEvent], logprobs: Mapping[str, Any] | None
    ) -> list[Event]:
        """Return the events of these block changes."""
        return [_event_of(step) for step in steps]

    def last_events(self) -> list[Event]:
        """Return the events after all blocks."""
        return [
            _event("message_delta", delta=self._stop(), usage=self._output_usage(is_whole=True)),
            _event("message_stop"),
        ]

    def _output_usage(self, *, is_whole: bool) -> dict[str, Any]:
        usage = self.generation.usage
        num_thought = (
            usage.completion_tokens_details.reasoning_tokens
            if usage.completion_tokens_details is not None
            else 0
        )
        return {
            "output_tokens": usage.completion_tokens if is_whole else 0,
            "output_tokens_details": {"thinking_tokens": num_thought if is_whole else 0},
        }

    def _message(self, content: list[dict[str, Any]], *, is_whole: bool) -> dict[str, Any]:
        head, usage = self.generation.head, self.generation.usage
        return {
            "id": f"msg_{str(head['id']).partition('-')[2]}",
            "type": "message",
            "role": "assistant",
            "model": head["model"],
            "content": content,
            **(self._stop() if is_whole else {"stop_reason": None, "stop_sequence": None}),
            "usage": {
                "input_tokens": usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens,
                **self._output_usage(is_whole=is_whole),
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": usage.prompt_tokens_details.cached_tokens,
            },
        }

    def _stop(self) -> dict[str, Any]:
        """Return the reason for the end of the answer."""
        stop, reason = self._choice.stop_string, self._choice.finish_reason
        reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
        if self._choice.finish is FinishReason.STOP and stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": reasons.get(reason or "", "end_turn"), "stop_sequence": None}


async def prepare_message(
    model: ServedModel,
    template: ChatTemplate,
    conversation: Conversation,
    arrived_at: float,
    state: ResumeState,
) -> MessagesFormatter:
    """Render, tokenize and validate. Raises RequestError for requests that can never run."""
    return MessagesFormatter(await prepare_blocks(model, template, conversation, arrived_at, state))


async def count_tokens(
    model: ServedModel, template: ChatTemplate, conversation: Conversation
) -> TokenCount:
    """Count the tokens of a conversation's prompt. Raises ParameterError."""
    return TokenCount(input_tokens=len(await encode_conversation(model, template, conversation)))


def _event(kind: str, **fields: Any) -> Event:
    return Event(kind, {"type": kind, **fields})


def _event_of(step: BlockEvent) -> Event:
    block = step.block
    if step.action == "open":
        return _event("content_block_start", index=block.index, content_block=_started(block))
    if step.action == "close":
        return _event("content_block_stop", index=block.index)
    kind, name = {
        "thought": ("thinking_delta", "thinking"),
        "text": ("text_delta", "text"),
        "call": ("input_json_delta", "partial_json"),
    }[block.kind]
    return _event(
        "content_block_delta", index=block.index, delta={"type": kind, name: "".join(step.parts)}
    )


def _started(block: Block) -> dict[str, Any]:
    """Return the empty form of a block."""
    match block.kind:
        case "thought":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "call":
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}
        case _:
            return {"type": "text", "text": ""}


def _content(block: Block) -> dict[str, Any] | None:
    """Return a whole block; None for a call whose input is not JSON."""
    match block.kind:
        case "thought":
            return {**_started(block), "thinking": block.content}
        case "call":
            arguments = parse_input(block.content)
            return None if arguments is None else {**_started(block), "input": arguments}
        case _:
            return {**_started(block), "text": block.content}


def parse_input(text: str) -> dict[str, Any] | None:
    """Return the arguments of a call; None if they are cut off, or nested too deeply."""
    try:
        value = json.loads(text)
        check_depth(value, MAX_INPUT_DEPTH)
        to_json(value).encode()
    except (ValueError, RecursionError):  # also for numbers and characters that JSON does not have
        return None
    return value if isinstance(value, dict) else None
