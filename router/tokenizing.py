"""``/tokenize`` and ``/detokenize``: vLLM's names and shapes."""

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from tramontane.router.completions import LONG_TEXT, ServedModel
from tramontane.router.openai_schema import MAX_TOKEN_ID, ParameterError
from tramontane.router.tokenizer import Tokenizer

TokenId = Annotated[int, Field(ge=0, lt=MAX_TOKEN_ID)]


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the text is not valid Unicode (it holds half of a surrogate pair)") from None
    return text


class TokenizeRequest(BaseModel):
    """Body of ``POST /tokenize`` for a text."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    model: str | None = None
    prompt: Annotated[str, AfterValidator(_encodable)]
    add_special_tokens: Literal[True] | None = None


class DetokenizeRequest(BaseModel):
    """Body of ``POST /detokenize``."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    model: str | None = None
    tokens: Annotated[tuple[TokenId, ...], Field(strict=False)]


async def tokenized(model: ServedModel, request: TokenizeRequest) -> dict[str, Any]:
    """As a prompt of ``/v1/completions`` is. Raises RequestError for what is certainly longer than the context."""
    tokenizer = _tokenizer_of(model, "prompt")
    tokenizer.check_length(request.prompt, model.max_model_len)
    return token_count(model, await beside(len(request.prompt), lambda: tokenizer.encode(request.prompt)))


def token_count(model: ServedModel, token_ids: tuple[int, ...]) -> dict[str, Any]:
    """The answer of ``/tokenize``."""
    return {"count": len(token_ids), "max_model_len": model.max_model_len, "tokens": list(token_ids), "token_strs": None}


async def detokenized(model: ServedModel, request: DetokenizeRequest) -> dict[str, Any]:
    """Ids without a piece decode to nothing, as they do in answers. Raises RequestError for more than the context holds."""
    tokenizer = _tokenizer_of(model, "tokens")
    if len(request.tokens) > model.max_model_len:
        raise ParameterError(f"tokens has {len(request.tokens)}; the context has {model.max_model_len} positions", "tokens")
    if unknown := [token_id for token_id in request.tokens if token_id >= model.vocab_size]:
        raise ParameterError(f"token {unknown[0]} is not in the model's vocabulary of {model.vocab_size}", "tokens")
    return {"prompt": await beside(len(request.tokens), lambda: tokenizer.decode(request.tokens))}


def _tokenizer_of(model: ServedModel, parameter: str) -> Tokenizer:
    if model.tokenizer is None:
        raise ParameterError("this model has no tokenizer; it takes and gives token ids only", parameter)
    return model.tokenizer


Result = TypeVar("Result")


async def beside(size: int, work: Callable[[], Result]) -> Result:
    """Done here, or beside the event loop where there is so much of it that others would wait."""
    return work() if size <= LONG_TEXT else await asyncio.to_thread(work)
