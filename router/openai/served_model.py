"""The model that doors serve: what they know of it, what they say of it, and its prompts as token ids."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tramontane.proto.errors import RequestError
from tramontane.router.openai.completion_request import ParameterError
from tramontane.router.openai.request_stats import RequestCounts
from tramontane.router.tokenization.tokenizer import Tokenizer

LONG_TEXT = 4096  # characters of one request; more are tokenized beside the event loop


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
    counts: RequestCounts = field(default_factory=RequestCounts, compare=False)


async def encoded(model: ServedModel, prompts: Sequence[str | tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Token ids of every prompt. Raises ParameterError."""
    num_characters = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))

    def encode() -> list[tuple[int, ...]]:
        return [prompt if not isinstance(prompt, str) else _encode_text(model, prompt) for prompt in prompts]

    if num_characters <= LONG_TEXT:
        return encode()
    return await asyncio.get_running_loop().run_in_executor(None, encode)


def _encode_text(model: ServedModel, text: str) -> tuple[int, ...]:
    if model.tokenizer is None:
        raise ParameterError("this model has no tokenizer; give the prompt as token ids", "prompt")
    if len(text) > model.max_model_len * model.tokenizer.longest_piece:  # no need to tokenize to know
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


class UnknownModelError(RequestError):
    """The client named a model that is not served here."""
