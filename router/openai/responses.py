"""What the door answers, for its description: tests hold its answers against these models."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length", "tool_calls"]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Usage(_Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Timings(_Answer):
    """Seconds."""

    ingress_s: float
    queue_s: float
    prefill_s: float
    decode_s: float


class CompletionLogprobs(_Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptToken(_Answer):
    logprob: float
    decoded_token: str


class _Choice(_Answer):
    """What is there only where it was asked for."""

    index: int
    finish_reason: FinishReason | None
    token_ids: list[int] = Field(default=[], description="with return_token_ids")
    prompt_token_ids: list[int] | None = Field(None, description="with return_token_ids")
    prompt_experts: dict[str, list[list[int]]] = Field(default={}, description="with return_experts")
    experts: dict[str, list[list[int]]] = Field(default={}, description="with return_experts")
    prompt_logprobs: list[dict[str, PromptToken] | None] = Field(default=[], description="with prompt_logprobs")


class CompletionChoice(_Choice):
    text: str
    logprobs: CompletionLogprobs | None


class _CompletionBase(_Answer):
    id: str
    created: int
    model: str
    usage: Usage
    timings: Timings


class CompletionAnswer(_CompletionBase):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ChatToken(_Answer):
    token: str
    logprob: float
    bytes: list[int] | None


class ChosenChatToken(ChatToken):
    top_logprobs: list[ChatToken]


class ChatLogprobs(_Answer):
    content: list[ChosenChatToken]
    refusal: None


class FunctionCall(_Answer):
    name: str
    arguments: str


class ToolCall(_Answer):
    id: str
    type: Literal["function"]
    function: FunctionCall


class AnswerMessage(_Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] = []


class ChatChoice(_Choice):
    message: AnswerMessage
    logprobs: ChatLogprobs | None


class ChatAnswer(_CompletionBase):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Model(_Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    vocab_size: int


class ModelList(_Answer):
    object: Literal["list"]
    data: list[Model]


class Tokens(_Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: None


class Detokenized(_Answer):
    prompt: str


class Health(_Answer):
    status: Literal["ready"]


class ExpertTokens(_Answer):
    """A list for each layer, with a number for each expert."""

    tokens_per_expert: list[list[int]]
    pipelines: int


class MoveExpertsRequest(BaseModel):
    """A load by which experts are to be spread, such as ``GET /experts`` gives; what else it has is passed over."""

    tokens_per_expert: list[list[int]]


class MoveExpertsResponse(_Answer):
    moved: int
    pipelines: int


class ErrorDetails(_Answer):
    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str | None


class Error(_Answer):
    error: ErrorDetails
