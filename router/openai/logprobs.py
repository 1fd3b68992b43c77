"""Tokens with their log-probabilities, and the shapes in which clients get them: OpenAI's two and vLLM's."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tramontane.proto.request import Logprobs
from tramontane.router.tokenization.tokenizer import Tokenizer


class TokenLogprobs(NamedTuple):
    """``top``: the likeliest tokens in this place, the likeliest first, each with its own log-probability."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class TokenWithLogprobs(NamedTuple):
    """A token of a text. ``score``: None for the first of a prompt, before which there is nothing.

    ``offset``: at which character of the text it begins; for one that continues a character, where that character stands.
    """

    token_id: int
    offset: int
    score: TokenLogprobs | None


def index_by_position(news: Iterable[Logprobs]) -> dict[tuple[int, int], TokenLogprobs]:
    """By sequence and position."""
    return {
        (seq_id, start + place): TokenLogprobs(*score)
        for seq_id, start, logprobs, top in news
        for place, score in enumerate(zip(logprobs, top, strict=True))
    }


def prompt_tokens(
    tokenizer: Tokenizer | None, token_ids: Sequence[int], index: int, scores: dict[tuple[int, int], TokenLogprobs]
) -> list[TokenWithLogprobs]:
    """The prompt of sequence ``index``."""
    offsets = tokenizer.offsets(token_ids) if tokenizer else [0] * len(token_ids)
    placed = enumerate(zip(token_ids, offsets, strict=True))
    return [TokenWithLogprobs(token_id, offset, scores.get((index, position))) for position, (token_id, offset) in placed]


def token_text(tokenizer: Tokenizer | None, token_id: int) -> str:
    """What a token says by itself. One that is no whole characters is shown by its bytes, one that says nothing by its number."""
    piece = tokenizer.bytes_of(token_id) if tokenizer else b""
    if not piece:
        return f"token_id:{token_id}"
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def completion_logprobs(tokenizer: Tokenizer | None, tokens: Sequence[TokenWithLogprobs], num_top: int) -> dict[str, Any]:
    """OpenAI's shape for completions: lists of equal length. ``top_logprobs`` has the chosen token too, though it be unlikely."""
    return {
        "tokens": [token_text(tokenizer, token.token_id) for token in tokens],
        "token_logprobs": [token.score and token.score.logprob for token in tokens],
        "top_logprobs": [_by_text(tokenizer, token, num_top) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def _by_text(tokenizer: Tokenizer | None, token: TokenWithLogprobs, num_top: int) -> dict[str, float] | None:
    """Where two tokens say the same, the likelier one."""
    if token.score is None:
        return None
    told: dict[str, float] = {}
    for token_id, logprob in (*token.score.top[:num_top], (token.token_id, token.score.logprob)):
        told.setdefault(token_text(tokenizer, token_id), logprob)
    return told


def merge_logprobs(parts: Iterable[dict[str, Any] | None]) -> dict[str, Any]:
    """Several of ``completion_logprobs`` in one."""
    there = [part for part in parts if part]
    return {name: [each for part in there for each in part[name]] for name in completion_logprobs(None, (), 0)}


def chat_logprobs(tokenizer: Tokenizer | None, tokens: Sequence[TokenWithLogprobs], num_top: int) -> dict[str, Any]:
    """OpenAI's shape for chats; ``num_top`` is what it calls ``top_logprobs``."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        piece = tokenizer.bytes_of(token_id) if tokenizer else b""
        return {"token": token_text(tokenizer, token_id), "logprob": logprob, "bytes": list(piece) if piece else None}

    content = [
        entry(token.token_id, token.score.logprob) | {"top_logprobs": [entry(*each) for each in token.score.top[:num_top]]}
        for token in tokens
        if token.score is not None
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(
    tokenizer: Tokenizer | None, tokens: Sequence[TokenWithLogprobs], num_top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's shape for prompts, without the ranks: by token id, the prompt's own token always there; null for the first."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {"logprob": logprob, "decoded_token": token_text(tokenizer, token_id)}

    return [
        token.score
        and {str(each[0]): entry(*each) for each in ((token.token_id, token.score.logprob), *token.score.top[:num_top])}
        for token in tokens
    ]
