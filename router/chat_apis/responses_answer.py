"""Models of the answers of ``/v1/responses``, from which ``/openapi.json`` is made, and their parts
as dictionaries.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tramontane.router.chat_apis.blocks import Block
from tramontane.router.openai.responses import Answer, Bulk, Usage

Status = Literal["in_progress", "completed", "incomplete"]


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
    arguments: str
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
    output: list[OutputMessage | OutputReasoning | OutputCall]
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
) -> dict[str, Any]:
    """Return the item of a block. ``arguments``: of a call, which has no parts."""
    head = {"id": item_id(answer_id, block), "status": status}
    match block.kind:
        case "call":
            call = {
                "type": "function_call",
                "call_id": block.call_id,
                "name": block.name,
                "arguments": arguments,
            }
            return {**head, **call}
        case "thought":
            return {**head, "type": "reasoning", "summary": [], "content": list(parts)}
        case _:
            return {**head, "type": "message", "role": "assistant", "content": list(parts)}


def output_logprobs(logprobs: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return a chat's log-probabilities of its text as this API has them: without text a token has
    no bytes, not null.
    """
    return [
        _with_bytes(token) | {"top_logprobs": [_with_bytes(top) for top in token["top_logprobs"]]}
        for token in (logprobs or {}).get("content", ())
    ]


def _with_bytes(token: Mapping[str, Any]) -> dict[str, Any]:
    return {"token": token["token"], "bytes": token["bytes"] or [], "logprob": token["logprob"]}
