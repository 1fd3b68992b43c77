"""Models of the events of a stream.

The choices of a chunk are dictionaries (``CompletionChange``, ``ChatChange``): one is made for
every token, and models would take half as long again as all other work on it. Tests validate them
against ``CompletionChunk`` and ``ChatChunk``.
"""

from typing import Any, Literal, NamedTuple, NotRequired, TypedDict

from pydantic import Field

from tramontane.router.openai.responses import (
    Answer,
    AnswerHead,
    Bulk,
    ChatLogprobs,
    CompletionChoice,
    FinishReason,
    Timings,
    Usage,
)


class CompletionChange(TypedDict):
    """What a chunk adds to one choice: a ``CompletionChoice`` as a dictionary."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int] | None]
    prompt_experts: NotRequired[dict[str, list[tuple[int, ...]]]]
    experts: NotRequired[dict[str, list[tuple[int, ...]]]]
    prompt_logprobs: NotRequired[list[dict[str, Any] | None]]


class Event(NamedTuple):
    """One server-sent event: its data, and its name where the API names events; empty: none."""

    name: str
    data: dict[str, Any]


class Chunk(AnswerHead):
    """With include_usage, ``usage`` is null in every chunk except the last, which has no
    choices.
    """

    usage: Usage | None = None
    timings: Timings | None = None


class CompletionChunk(Chunk):
    """One event of a streamed completion."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class FunctionDelta(Answer):
    """Piece of a call: the name comes once, the arguments grow."""

    name: str = ""
    arguments: str


class ToolCallDelta(Answer):
    """What a chunk adds to one call; ``id``, ``type`` and the name come with its first delta."""

    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionDelta


class Delta(Answer):
    """What a chunk adds to one message."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    tool_calls: list[ToolCallDelta] = Field(default=[])
    reasoning_content: str = Field(default="", description="of a thought")
    reasoning: str = Field(default="", description="the same text as reasoning_content")


class ChatChunkChoice(Answer):
    """What a chunk adds to one choice of a chat."""

    index: int
    delta: Delta
    logprobs: Bulk[ChatLogprobs | None]
    finish_reason: FinishReason | None
    token_ids: list[int] = Field(default=[])
    prompt_token_ids: list[int] | None = None


class ChatChange(TypedDict):
    """A ``ChatChunkChoice`` as a dictionary."""

    index: int
    delta: dict[str, Any]
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int] | None]


class ChatChunk(Chunk):
    """One event of a streamed chat."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
