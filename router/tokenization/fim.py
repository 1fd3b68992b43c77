"""Prompts that ask for the text between a prompt and a suffix (FIM, fill in the middle), by mistral-common."""

from functools import lru_cache
from typing import Any

from mistral_common.exceptions import MistralCommonException
from mistral_common.protocol.fim.request import FIMRequest

from tramontane.proto.errors import RequestError
from tramontane.router.tokenization.backends import SentencePieceTokenizer, TekkenTokenizer
from tramontane.router.tokenization.mistral_chat import FORMATS, load_sentencepiece
from tramontane.router.tokenization.tokenizer import Tokenizer, validate_text

NO_FIM = "this model's tokenizer has no tokens for a suffix, as Codestral's has ([SUFFIX] and [PREFIX])"


def encode_fim(tokenizer: Tokenizer, prompt: str, suffix: str) -> tuple[int, ...]:
    """Return the token ids after which the model writes what is between prompt and suffix.

    Call it in a thread: the first call for a tokenizer reads its file. Raises RequestError if the tokenizer knows no such
    prompts, and for invalid Unicode.
    """
    encoder = _encoder(tokenizer)
    if encoder is None:
        raise RequestError(NO_FIM)
    with validate_text(prompt, suffix):
        return tuple(encoder.encode_fim(FIMRequest(prompt=prompt, suffix=suffix)).tokens)


@lru_cache(4)  # a process serves one model
def _encoder(tokenizer: Tokenizer) -> Any:  # noqa: ANN401 - mistral-common's class of each version
    """Return mistral-common's tokenizer, None if it cannot encode such prompts."""
    if isinstance(tokenizer, TekkenTokenizer):
        inner: Any = tokenizer.tekkenizer
    elif isinstance(tokenizer, SentencePieceTokenizer):
        inner = load_sentencepiece(tokenizer.path)
    else:
        return None
    encoder: Any = FORMATS[inner.version](inner)
    try:
        encoder.encode_fim(FIMRequest(prompt="a", suffix="b"))
    except (MistralCommonException, ValueError, KeyError, AttributeError):  # no such format, or no such control tokens
        return None
    return encoder
