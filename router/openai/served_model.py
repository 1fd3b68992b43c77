"""The model that an ingress serves: its description, the token ids of prompts, and the validation
of requests.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal, TypeVar

from tramontane.proto.errors import ParameterError, RequestError, UnknownModelError
from tramontane.proto.request import validate_prompt, validate_token_ids
from tramontane.router.openai.completion_request import CompletionRequest, SamplingFields
from tramontane.router.openai.request_context import RequestStats
from tramontane.router.openai.response_models import Answer
from tramontane.router.tokenization.chat import ChatTemplate, NoChatTemplate
from tramontane.router.tokenization.tokenizer import (
    Tokenizer,
    encode_fim,
    encode_prompt,
    has_fim,
)

T = TypeVar("T")

OFFLOAD_CHARS = 4096  # characters of one request; longer texts are tokenized on a thread
# Limits of one request.
MAX_EXPERT_IDS = 2**19
# kept at one time: of prompts, or of an answer that is not streamed; up to 7 MB of JSON
MAX_WHOLE_LOGPROBS = 2**17
MAX_STREAMED_LOGPROBS = 2**19


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model as an ingress uses it. Without a tokenizer it accepts and returns token ids
    only.
    """

    name: str
    tokenizer: Tokenizer | None
    max_model_len: int
    max_sequences: int  # of one request
    vocab_size: int
    expert_layers: range = range(0)  # empty for a model without experts, as is the next
    experts_per_token: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    aliases: tuple[str, ...] = ()  # by which clients may call it too; answers have ``name``
    counts: RequestStats = field(default_factory=RequestStats, compare=False)

    @property
    def names(self) -> tuple[str, ...]:
        """All names that a request may give."""
        return self.name, *self.aliases


async def tokenize_prompts(
    model: ServedModel, prompts: Sequence[str | tuple[int, ...]], suffix: str | None = None
) -> list[tuple[int, ...]]:
    """Return the token ids of every prompt; with ``suffix`` the ids of a fill-in-the-middle prompt.

    Raises ParameterError for a prompt that cannot be continued.
    """
    if suffix is not None:
        return [
            await asyncio.to_thread(_encode_fim, model, str(prompt), suffix) for prompt in prompts
        ]
    names = (
        ["the prompt"]
        if len(prompts) == 1
        else [f"prompt {number}" for number in range(1, len(prompts) + 1)]
    )
    num_characters = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))

    def encode() -> list[tuple[int, ...]]:
        pairs = zip(prompts, names, strict=True)
        return [
            encode_prompt(model.tokenizer, prompt, model.max_model_len, model.vocab_size, name)
            for prompt, name in pairs
        ]

    try:
        return await offload_if_large(num_characters, encode)
    except RequestError as error:
        raise error.about("prompt") from error


def kept_prompt_tokens(model: ServedModel, request: CompletionRequest) -> int | None:
    """Return how many of the last tokens of a prompt are kept, None for all: as many as are to be
    kept, or as leave room for ``max_tokens`` new ones.
    """
    num_kept = request.truncate_prompt_tokens
    if num_kept is None or num_kept > 0:
        return num_kept and min(num_kept, model.max_model_len)
    return max(model.max_model_len - max(request.max_tokens, 1), 1)


async def cut_prompts(
    model: ServedModel, prompts: Sequence[str | tuple[int, ...]], num_kept: int
) -> tuple[tuple[int, ...], ...]:
    """Return the last token ids of every prompt. Raises ParameterError."""
    tokenizer = model.tokenizer

    def cut(prompt: str | tuple[int, ...]) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return prompt[-num_kept:]
        if tokenizer is None:
            raise RequestError("the prompt is a text, and this model has no tokenizer")
        return tokenizer.encode_end(prompt, num_kept)

    num_characters = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    try:
        return await offload_if_large(num_characters, lambda: tuple(map(cut, prompts)))
    except RequestError as error:
        raise error.about("prompt") from error


def ignores_eos(model: ServedModel, request: SamplingFields) -> bool:
    """Return whether no end-of-sequence token ends an answer: also where none is allowed."""
    allowed = request.allowed_token_ids
    return request.ignore_eos or (allowed is not None and model.eos_token_ids.isdisjoint(allowed))


def _encode_fim(model: ServedModel, prompt: str, suffix: str) -> tuple[int, ...]:
    """Return the token ids of one fill-in-the-middle prompt. Raises ParameterError. It may take
    long.
    """
    if model.tokenizer is None:
        raise ParameterError("suffix needs text, and this model has no tokenizer", "suffix")
    try:
        for text in (prompt, suffix):
            model.tokenizer.check_length(text, model.max_model_len)
            model.tokenizer.check_num_tokens(text, model.max_model_len)
        ids = encode_fim(model.tokenizer, prompt, suffix)
        validate_prompt(ids, model.max_model_len, model.vocab_size, "the prompt with its suffix")
        return ids
    except RequestError as error:
        raise error.about("suffix") from error


async def offload_if_large(num_characters: int, work: Callable[[], T]) -> T:
    """Call ``work`` directly, or in a thread if it is so large that it would delay other requests.

    For tokenizers, several at a time; ``json_limits.run_off_loop`` is for reading and writing JSON
    and gRPC's messages.
    """
    return work() if num_characters <= OFFLOAD_CHARS else await asyncio.to_thread(work)


class Capabilities(Answer):
    """What the model can do, by Mistral's names."""

    completion_chat: bool
    completion_fim: bool
    function_calling: bool
    reasoning: bool
    vision: bool
    fine_tuning: bool


class Model(Answer):
    """The model that is served: OpenAI's fields, vLLM's, and those that Mistral's clients need."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    vocab_size: int
    type: Literal["base"]
    capabilities: Capabilities
    max_context_length: int
    aliases: list[str]


class ModelList(Answer):
    """The served model, once for each of its names."""

    object: Literal["list"]
    data: list[Model]


class AnthropicModel(Answer):
    """The model that is served, as Anthropic's API has it."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int
    max_tokens: int


class AnthropicModelList(Answer):
    """The served model, once for each of its names, as Anthropic's API has it."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str
    last_id: str


@dataclass(frozen=True, slots=True)
class ModelCatalog:
    """The entries of a model, which this server serves since ``created`` (a Unix time)."""

    model: ServedModel
    chat: ChatTemplate
    created: int

    def entry(self, name: str) -> Model:
        """Return the answer of ``GET /v1/models/{name}``."""
        return Model(
            id=name,
            object="model",
            created=self.created,
            owned_by="tramontane",
            max_model_len=self.model.max_model_len,
            vocab_size=self.model.vocab_size,
            type="base",
            capabilities=self._capabilities(),
            max_context_length=self.model.max_model_len,
            aliases=[other for other in self.model.names if other != name],
        )

    def list(self) -> ModelList:
        """Return the answer of ``GET /v1/models``."""
        return ModelList(object="list", data=[self.entry(name) for name in self.model.names])

    def anthropic_entry(self, name: str) -> AnthropicModel:
        """Return the answer of ``GET /v1/models/{name}`` for Anthropic's clients."""
        return AnthropicModel(
            type="model",
            id=name,
            display_name=name,
            created_at=datetime.fromtimestamp(self.created, UTC).isoformat(),
            lifecycle="active",
            max_input_tokens=self.model.max_model_len,
            max_tokens=self.model.max_model_len,
        )

    def anthropic_list(self) -> AnthropicModelList:
        """Return the answer of ``GET /v1/models`` for Anthropic's clients: always one page."""
        names = self.model.names
        data = [self.anthropic_entry(name) for name in names]
        return AnthropicModelList(data=data, has_more=False, first_id=names[0], last_id=names[-1])

    def _capabilities(self) -> Capabilities:
        return Capabilities(
            completion_chat=not isinstance(self.chat, NoChatTemplate),
            completion_fim=self.model.tokenizer is not None and has_fim(self.model.tokenizer),
            function_calling=self.chat.tool_format is not None,
            reasoning=self.chat.reasoning_format is not None,
            vision=False,
            fine_tuning=False,
        )


def check_model_name(model: ServedModel, name: str | None) -> None:
    """Raise UnknownModelError if the client names another model."""
    if name is not None and name not in model.names:
        known = " or ".join(map(repr, model.names))
        raise UnknownModelError(f"the model {name!r:.80} does not exist; this server has {known}")


def validate_request(model: ServedModel, request: CompletionRequest) -> None:
    """Validate a request before its prompts are tokenized. Raises ParameterError."""
    if request.num_sequences > model.max_sequences:
        raise ParameterError(
            f"{len(request.prompt)} prompt{'s' * (len(request.prompt) > 1)} with n = {request.n}: "
            f"{request.num_sequences} sequences; one request may have at most"
            f" {model.max_sequences}",
            "prompt",
        )
    if request.return_experts and not model.expert_layers:
        raise ParameterError("return_experts: this model has no experts", "return_experts")
    if wrong := [layer for layer in request.return_experts if layer not in model.expert_layers]:
        raise ParameterError(
            f"return_experts: layer {wrong[0]} has no experts; this model's layers"
            f" {model.expert_layers.start} to {model.expert_layers.stop - 1} have some",
            "return_experts",
        )
    validate_sampling(model, request)


def validate_sampling(model: ServedModel, request: SamplingFields) -> None:
    """Validate the fields that requests of all APIs have. Raises ParameterError."""
    if model.tokenizer is None and request.stop:
        raise ParameterError("stop needs text, and this model has no tokenizer", "stop")
    validate_token_ids(
        {
            "logit_bias": [token_id for token_id, _ in request.logit_bias],
            "stop_token_ids": request.stop_token_ids,
            "allowed_token_ids": request.allowed_token_ids or (),
        },
        model.vocab_size,
    )


def validate_answer_size(
    model: ServedModel, request: CompletionRequest, lengths: Sequence[int]
) -> None:
    """Validate a request whose prompts have these numbers of tokens. Raises ParameterError."""
    # The answer has up to ``max_tokens`` or fills the context.
    num_prompt = request.n * sum(lengths)
    num_tokens = request.n * sum(
        min(length + request.max_tokens, model.max_model_len) for length in lengths
    )
    num_layers = len(request.return_experts)
    if (num_ids := num_tokens * num_layers * model.experts_per_token) > MAX_EXPERT_IDS:
        raise ParameterError(
            f"return_experts: {num_layers} layers of up to {num_tokens} tokens are {num_ids}"
            f" experts; one request may ask for at most {MAX_EXPERT_IDS}, so ask for fewer layers"
            " or tokens",
            "return_experts",
        )
    if (num_top := request.prompt_logprobs_count) is not None:
        name = "prompt_logprobs" if request.prompt_logprobs == num_top else "logprobs"
        _check_num_logprobs(name, num_prompt, num_top, MAX_WHOLE_LOGPROBS)
    if request.logprobs is not None:
        num_new = num_tokens - num_prompt
        validate_logprobs(num_new, request.logprobs, is_streamed=request.stream)


def validate_logprobs(num_new_tokens: int, num_top: int, *, is_streamed: bool) -> None:
    """Validate the log-probabilities of ``num_new_tokens`` tokens of all choices. Raises
    ParameterError.
    """
    _check_num_logprobs("logprobs", num_new_tokens, num_top, _max_logprobs(is_streamed))


def max_scored_tokens(num_top: int, *, is_streamed: bool) -> int:
    """Return how many tokens of all choices may have log-probabilities."""
    return _max_logprobs(is_streamed) // (num_top + 1)


def _max_logprobs(is_streamed: bool) -> int:
    return MAX_STREAMED_LOGPROBS if is_streamed else MAX_WHOLE_LOGPROBS


def _check_num_logprobs(name: str, num_tokens: int, num_top: int, limit: int) -> None:
    """Check the log-probabilities of at most ``num_tokens`` tokens of all choices. ``name``: the
    parameter that requests them.
    """
    num_logprobs = num_tokens * (num_top + 1)
    if num_logprobs > limit:
        streams = name == "logprobs" and limit < num_logprobs <= MAX_STREAMED_LOGPROBS
        raise ParameterError(
            f"{name}: of up to {num_tokens} tokens, with {num_top} others for each, these are "
            f"{num_logprobs}; one request may ask for at most {limit}, so ask for fewer, or for "
            f"fewer tokens{', or for a stream' if streams else ''}",
            name,
        )
