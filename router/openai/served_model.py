"""The model that doors serve: what they know of it, what they say of it, and its prompts as token ids.

What a request that is well-formed may still not ask of the model that is served.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tramontane.proto.errors import ParameterError, UnknownModelError
from tramontane.router.openai.completion_request import CompletionRequest
from tramontane.router.openai.request_stats import RequestStats
from tramontane.router.tokenization.tokenizer import Tokenizer

OFFLOAD_CHARS = 4096  # characters of one request; more are tokenized beside the event loop


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a door knows of the model behind it. Without a tokenizer it takes and gives token ids only.

    ``num_layers`` and ``experts_per_token`` are those of a model with experts, else 0. ``counts``: what becomes of its requests.
    """

    name: str
    tokenizer: Tokenizer | None
    max_model_len: int
    max_sequences: int  # of one request
    vocab_size: int
    num_layers: int = 0
    experts_per_token: int = 0
    counts: RequestStats = field(default_factory=RequestStats, compare=False)


async def tokenize_prompts(model: ServedModel, prompts: Sequence[str | tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Token ids of every prompt. Raises ParameterError."""
    num_characters = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))

    def encode() -> list[tuple[int, ...]]:
        return [prompt if not isinstance(prompt, str) else _encode_text(model, prompt) for prompt in prompts]

    if num_characters <= OFFLOAD_CHARS:
        return encode()
    return await asyncio.get_running_loop().run_in_executor(None, encode)


def _encode_text(model: ServedModel, text: str) -> tuple[int, ...]:
    if model.tokenizer is None:
        raise ParameterError("this model has no tokenizer; give the prompt as token ids", "prompt")
    if len(text) > model.max_model_len * model.tokenizer.max_piece_bytes:  # no need to tokenize to know
        raise ParameterError(
            f"the prompt has {len(text)} characters; with a context of {model.max_model_len} positions that is too long",
            "prompt",
        )
    return model.tokenizer.encode(text)


def model_entry(model: ServedModel, created: int) -> dict[str, Any]:
    """``GET /v1/models/{name}``."""
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "tramontane",
        "max_model_len": model.max_model_len,
        "vocab_size": model.vocab_size,
    }


def model_list(model: ServedModel, created: int) -> dict[str, Any]:
    """``GET /v1/models``."""
    return {"object": "list", "data": [model_entry(model, created)]}


def check_model_name(model: ServedModel, name: str | None) -> None:
    """Raises RequestError if the client asks for another model."""
    if name is not None and name != model.name:
        raise UnknownModelError(f"the model {name!r:.80} does not exist; this server has {model.name!r}")


MAX_EXPERT_IDS = 2**19  # that one request may ask for: 2 MiB on their way from a router, which is half of what a message may have
MAX_PROMPT_LOGPROBS = 2**17  # likewise 2 MiB: they all come with a prompt's first token
MAX_TOTAL_LOGPROBS = 2**19  # of one request's answer, which may be kept whole: some 20 MB of JSON


def validate_request(model: ServedModel, request: CompletionRequest) -> None:
    """Before its prompts are tokenized. Raises ParameterError, as all of these do."""
    if request.num_sequences > model.max_sequences:
        raise ParameterError(
            f"{len(request.prompt)} prompt{'s' * (len(request.prompt) > 1)} with n = {request.n}: "
            f"{request.num_sequences} sequences; one request may have at most {model.max_sequences}",
            "prompt",
        )
    if model.tokenizer is None and request.stop:
        raise ParameterError("stop needs text, and this model has no tokenizer", "stop")
    _check_layers(request.return_experts, model.num_layers)
    _check_logit_bias([token_id for token_id, _ in request.logit_bias], model.vocab_size)


def validate_prompts(model: ServedModel, request: CompletionRequest, lengths: Sequence[int]) -> None:
    """What these many tokens make of it."""
    for length in lengths:
        if length >= model.max_model_len:  # the router would say so too, but many such prompts are a burden to send
            raise ParameterError(
                f"the prompt has {length} tokens; with a context of {model.max_model_len} positions "
                f"it may have at most {model.max_model_len - 1}",
                "prompt",
            )
    _validate_output_size(model, request, lengths)


def _validate_output_size(model: ServedModel, request: CompletionRequest, lengths: Sequence[int]) -> None:
    """As much as there may be to tell of tokens: an answer can be as long as was asked for, or as the context."""
    num_prompt = request.n * sum(lengths)
    num_tokens = request.n * sum(min(length + request.max_tokens, model.max_model_len) for length in lengths)
    _check_num_experts(len(request.return_experts), num_tokens, model.experts_per_token)
    if (num_top := request.prompt_logprobs_count) is not None:
        name = "prompt_logprobs" if request.prompt_logprobs == num_top else "logprobs"
        _check_num_logprobs(name, num_prompt, num_top, MAX_PROMPT_LOGPROBS)
    if request.logprobs is not None:
        _check_num_logprobs("logprobs", num_tokens - num_prompt, request.logprobs, MAX_TOTAL_LOGPROBS)


def _check_layers(layers: Sequence[int], num_layers: int) -> None:
    """``num_layers``: 0 for a model without experts."""
    if layers and not num_layers:
        raise ParameterError("return_experts: this model has no experts", "return_experts")
    if wrong := [layer for layer in layers if layer >= num_layers]:
        raise ParameterError(
            f"return_experts: there is no layer {wrong[0]}; this model has layers 0 to {num_layers - 1}", "return_experts"
        )


def _check_num_experts(num_layers: int, num_tokens: int, experts_per_token: int) -> None:
    """``num_layers`` asked for, of as many tokens as there may be."""
    num_ids = num_tokens * num_layers * experts_per_token
    if num_ids > MAX_EXPERT_IDS:
        raise ParameterError(
            f"return_experts: {num_layers} layers of up to {num_tokens} tokens are {num_ids} experts; "
            f"one request may ask for at most {MAX_EXPERT_IDS}, so ask for fewer layers or tokens",
            "return_experts",
        )


def _check_logit_bias(token_ids: Sequence[int], vocab_size: int) -> None:
    if wrong := [token_id for token_id in token_ids if token_id >= vocab_size]:
        raise ParameterError(f"logit_bias: token id {wrong[0]} is outside the model's vocabulary of {vocab_size}", "logit_bias")


def _check_num_logprobs(name: str, num_tokens: int, num_top: int, most: int) -> None:
    """``num_tokens``: as many as there may be, of all choices. ``name``: of the parameter that asks for them."""
    num_logprobs = num_tokens * (num_top + 1)
    if num_logprobs > most:
        raise ParameterError(
            f"{name}: of up to {num_tokens} tokens, with {num_top} others for each, these are {num_logprobs}; "
            f"one request may ask for at most {most}, so ask for fewer, or for fewer tokens",
            name,
        )
