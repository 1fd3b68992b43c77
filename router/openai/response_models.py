"""Models of the API server's answers: answers are built from them, and ``/openapi.json`` is
generated from them.
"""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, TypedDict, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from tramontane.proto.errors import ErrorType

FinishReason = Literal["stop", "length", "tool_calls"]
T = TypeVar("T")


def _validate_json(value: Any, validate: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
    return validate(value) if info.mode == "json" else value


# Token ids, log-probabilities and expert ids: an answer may have millions of them, and to validate
# them would take several times as long as to write them as JSON. So they are only validated where
# JSON is read, which tests do.
Bulk = Annotated[T, WrapValidator(_validate_json)]


# ``json.dumps`` creates one per call
to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
# items of a list, each with some tens of values, that are encoded in two milliseconds
MAX_PIECE = 64
# of the list of choices in an answer or a chunk; deeper lists are long ones of small items
CHOICES_DEPTH = 1
BULK_LISTS = frozenset({"choices", "output", "logprobs"})  # of answers and events, by name


def encode_and_free(answer: dict[str, Any], list_depth: int = CHOICES_DEPTH) -> bytes:
    """Encode an answer or an event as JSON, and empty its ``BULK_LISTS``. ``list_depth``: of the
    deepest list of large items.

    Freeing half a million values takes long, so the thread that encodes them does it. They are
    encoded piece by piece: the encoder holds Python's interpreter lock until it returns.
    """
    encoded = b"".join(map(str.encode, _json_pieces(answer, 0, list_depth)))
    for name in BULK_LISTS & answer.keys():
        answer[name].clear()
    return encoded


def _json_pieces(value: Any, depth: int, list_depth: int = CHOICES_DEPTH) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for number, (name, each) in enumerate(value.items()):
            yield f"{',' if number else '{'}{to_json(name)}:"
            yield from _json_pieces(each, depth + 1, list_depth)
        yield "}"
    elif isinstance(value, list) and value and depth <= list_depth:
        for number, each in enumerate(value):
            yield "," if number else "["
            yield from _json_pieces(each, depth + 1, list_depth)
        yield "]"
    elif isinstance(value, list) and len(value) > MAX_PIECE:
        for start in range(0, len(value), MAX_PIECE):
            yield "," if start else "["
            yield to_json(value[start : start + MAX_PIECE])[1:-1]
        yield "]"
    else:
        yield to_json(value)


class Answer(BaseModel):
    """Base of all answers."""

    model_config = ConfigDict(extra="forbid", strict=True)

    def as_json(self) -> dict[str, Any]:
        """Return the JSON object without the fields that were not set. Lists and dictionaries are
        shared, not copied.
        """
        return {name: _as_json(value) for name, value in self if name in self.model_fields_set}


def _as_json(value: Any) -> Any:
    if isinstance(value, Answer):
        return value.as_json()
    return (
        [each.as_json() for each in value]
        if isinstance(value, list) and value and isinstance(value[0], Answer)
        else value
    )


class CompletionTokensDetails(Answer):
    """Kinds of the new tokens. ``reasoning_tokens``: tokens of the reasoning, with its markers.

    With speculation, ``accepted_prediction_tokens`` counts new tokens that were drafted;
    ``rejected_prediction_tokens`` counts drafts that are not among the new tokens.
    """

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class PromptTokensDetails(Answer):
    """Kinds of the prompt's tokens. ``cached_tokens``: tokens found in the prefix cache, which were
    not computed.
    """

    cached_tokens: int


class Usage(Answer):
    """Number of tokens. A prompt counts once, however many choices it has.

    ``completion_tokens_details`` are of chats with models that think, and of servers that
    speculate.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None

    @classmethod
    def of(
        cls,
        num_prompt: int,
        num_completion: int,
        num_cached: int,
        num_reasoning: int | None,
        drafts: tuple[int, int] | None,
    ) -> "Usage":
        """Return the usage for these numbers of tokens.

        ``num_reasoning``: None without reasoning. ``drafts``: accepted and rejected; None without
        speculation.
        """
        usage = cls(
            prompt_tokens=num_prompt,
            completion_tokens=num_completion,
            total_tokens=num_prompt + num_completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached),
        )
        kinds = {} if num_reasoning is None else {"reasoning_tokens": num_reasoning}
        if drafts is not None:
            kinds |= {
                "accepted_prediction_tokens": drafts[0],
                "rejected_prediction_tokens": drafts[1],
            }
        if kinds:
            usage.completion_tokens_details = CompletionTokensDetails(**kinds)
        return usage


class Timings(Answer):
    """Seconds of each phase. ``cached_tokens``: prompt tokens that were not computed in
    ``prefill_s``, as in the usage.
    """

    ingress_s: float
    queue_s: float
    prefill_s: float
    decode_s: float
    cached_tokens: int


class CompletionLogprobs(Answer):
    """Log-probabilities of a completion: lists with one item per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptToken(Answer):
    """Log-probability of one token at a position of the prompt."""

    logprob: float
    decoded_token: str


class _Choice(Answer):
    index: int
    finish_reason: FinishReason | None
    token_ids: Bulk[list[int]] = Field(default=[], description="with return_token_ids")
    prompt_token_ids: Bulk[list[int] | None] = Field(None, description="with return_token_ids")
    prompt_experts: Bulk[dict[str, list[list[int]]]] = Field(
        default={}, description="with return_experts"
    )
    experts: Bulk[dict[str, list[list[int]]]] = Field(default={}, description="with return_experts")
    prompt_logprobs: Bulk[list[dict[str, PromptToken] | None]] = Field(
        default=[], description="with prompt_logprobs"
    )


class CompletionChoice(_Choice):
    """One choice of a completion."""

    text: str
    logprobs: Bulk[CompletionLogprobs | None]


class AnswerHead(Answer):
    """Fields that whole answers and chunks have in common."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None


class _WholeAnswer(AnswerHead):
    usage: Usage
    timings: Timings


class CompletionAnswer(_WholeAnswer):
    """Answer of ``POST /v1/completions`` that is not streamed."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ChatToken(Answer):
    """A token with its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChosenChatToken(ChatToken):
    """A token of the answer, with the likeliest tokens at its position."""

    top_logprobs: list[ChatToken]


class ChatLogprobs(Answer):
    """Log-probabilities of a chat's answer. ``reasoning``: of its thoughts and their markers, if
    there are any.
    """

    content: list[ChosenChatToken]
    refusal: None
    reasoning: list[ChosenChatToken] = Field(default=[])


class FunctionCall(Answer):
    """Name and arguments (JSON) of a call."""

    name: str
    arguments: str


class ToolCall(Answer):
    """A call that the model makes."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class TextChunk(Answer):
    """A text as a part of a message's content, as Mistral's API has it."""

    type: Literal["text"]
    text: str


class ThinkChunk(Answer):
    """Reasoning as a part of a message's content, as Mistral's API has it."""

    type: Literal["thinking"]
    thinking: list[TextChunk]


def content_chunks(thought: str, text: str) -> list[dict[str, Any]]:
    """Return reasoning, and the text after it if there is one, as Mistral's API has them."""
    chunks: list[dict[str, Any]] = [
        {"type": "thinking", "thinking": [{"type": "text", "text": thought}]}
    ]
    return [*chunks, {"type": "text", "text": text}] if text else chunks


class AnswerMessage(Answer):
    """The assistant's message. A reasoning model's message has its reasoning by two names, null if
    there is none; for Mistral's clients it is a part of the content instead.
    """

    role: Literal["assistant"]
    content: str | list[ThinkChunk | TextChunk] | None
    refusal: None
    tool_calls: list[ToolCall] = []
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChatChoice(_Choice):
    """One choice of a chat's answer."""

    message: AnswerMessage
    logprobs: Bulk[ChatLogprobs | None]


class ChatAnswer(_WholeAnswer):
    """Answer of ``POST /v1/chat/completions`` that is not streamed."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Health(Answer):
    """Answer while requests are accepted. ``degraded``: they wait, as no pipeline can make tokens
    now, for a reason and for seconds that are given.
    """

    status: Literal["ready", "degraded"]
    reason: str | None = None
    since_s: float | None = None


class ServerLoad(Answer):
    """Answer to ``GET /load``: sequences that run or wait, in all pipelines."""

    server_load: int


class Version(Answer):
    """Answer to ``GET /version``."""

    version: str


class ExpertTokens(Answer):
    """Number of tokens that each expert was given: one list per layer with one number per
    expert.
    """

    tokens_per_expert: list[list[int]]
    pipelines: int


class MoveExpertsRequest(BaseModel):
    """The load for which experts are distributed, in the format of ``GET /experts``; other fields
    are ignored.
    """

    tokens_per_expert: list[list[int]]


class MoveExpertsResponse(Answer):
    """Number of experts that were loaded, and of pipelines that loaded them."""

    moved: int
    pipelines: int


class ErrorDetails(Answer):
    """The error, and the parameter that caused it, if known."""

    message: str
    type: ErrorType
    param: str | None
    code: str | None


class Error(Answer):
    """Body of every response that is an error. ``message``: once more, where Mistral's clients
    look for it.
    """

    error: ErrorDetails
    message: str


# Models of the events of a stream.
#
# The choices of a chunk are dictionaries (``CompletionChange``, ``ChatChange``): one is made for
# every token, and models would take half as long again as all other work on it. Tests validate them
# against ``CompletionChunk`` and ``ChatChunk``.


class CompletionChange(TypedDict):
    """The chunk's part for one choice: a ``CompletionChoice`` as a dictionary."""

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
    """One server-sent event: its data, and its name, empty if the API does not name events."""

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
    """The chunk's part for one tool call; ``id``, ``type`` and the name come with its first
    delta.
    """

    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionDelta


class Delta(Answer):
    """The chunk's part for one message."""

    role: Literal["assistant"] = "assistant"
    content: str | list[ThinkChunk | TextChunk] = ""
    tool_calls: list[ToolCallDelta] = Field(default=[])
    reasoning_content: str = Field(default="", description="of a thought")
    reasoning: str = Field(default="", description="the same text as reasoning_content")


class ChatChunkChoice(Answer):
    """The chunk's part for one choice of a chat."""

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
