"""Tokens with their log-probabilities, in the formats of client responses: OpenAI's two and
vLLM's.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tramontane.proto.request import Logprobs
from tramontane.router.openai.response_models import CompletionLogprobs
from tramontane.router.tokenization.tokenizer import Tokenizer


class TokenLogprobs(NamedTuple):
    """Log-probability of a token. ``top``: the likeliest tokens at its position with their
    log-probabilities, the likeliest first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


class TokenWithLogprobs(NamedTuple):
    """A token of a text, or of a chat's thought."""

    token_id: int
    offset: int  # index of the character with which the token begins, or which it continues
    score: TokenLogprobs | None  # None for the first token of a prompt
    in_thought: bool = False  # ``offset`` is then undefined


def index_by_position(batch: Iterable[Logprobs]) -> dict[tuple[int, int], TokenLogprobs]:
    """Return log-probabilities by sequence and position."""
    return {
        (seq_id, start + i): TokenLogprobs(*score)
        for seq_id, start, logprobs, top in batch
        for i, score in enumerate(zip(logprobs, top, strict=True))
    }


def prompt_tokens(
    tokenizer: Tokenizer | None,
    token_ids: Sequence[int],
    index: int,
    scores: dict[tuple[int, int], TokenLogprobs],
) -> list[TokenWithLogprobs]:
    """Return the tokens of sequence ``index``'s prompt."""
    offsets = tokenizer.offsets(token_ids) if tokenizer else [0] * len(token_ids)
    tokens = enumerate(zip(token_ids, offsets, strict=True))
    return [
        TokenWithLogprobs(token_id, offset, scores.get((index, position)))
        for position, (token_id, offset) in tokens
    ]


def token_text(tokenizer: Tokenizer | None, token_id: int) -> str:
    """Return a token's own text; its bytes if it contains partial characters, and its id if it has
    no text.
    """
    piece = tokenizer.bytes_of(token_id) if tokenizer else b""
    if not piece:
        return f"token_id:{token_id}"
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def completion_logprobs(
    tokenizer: Tokenizer | None, tokens: Sequence[TokenWithLogprobs], num_top: int
) -> dict[str, Any]:
    """Return OpenAI's ``CompletionLogprobs``: lists of equal length. ``top_logprobs`` always
    includes the chosen token.
    """
    return {
        "tokens": [token_text(tokenizer, token.token_id) for token in tokens],
        "token_logprobs": [token.score and token.score.logprob for token in tokens],
        "top_logprobs": [_by_text(tokenizer, token, num_top) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def _by_text(
    tokenizer: Tokenizer | None, token: TokenWithLogprobs, num_top: int
) -> dict[str, float] | None:
    """Return log-probabilities by text. Of two tokens with the same text the likelier one
    counts.
    """
    if token.score is None:
        return None
    by_text: dict[str, float] = {}
    for token_id, logprob in (*token.score.top[:num_top], (token.token_id, token.score.logprob)):
        by_text.setdefault(token_text(tokenizer, token_id), logprob)
    return by_text


def merge_logprobs(parts: Iterable[dict[str, Any] | None]) -> dict[str, Any]:
    """Concatenate several ``CompletionLogprobs``."""
    present = [part for part in parts if part]
    return {
        name: [each for part in present for each in part[name]]
        for name in CompletionLogprobs.model_fields
    }


def chat_logprobs(
    tokenizer: Tokenizer | None, tokens: Sequence[TokenWithLogprobs], num_top: int
) -> dict[str, Any]:
    """Return OpenAI's ``ChatLogprobs``; ``num_top`` is the request's ``top_logprobs``. Tokens of
    the reasoning are in a separate list.
    """

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        piece = tokenizer.bytes_of(token_id) if tokenizer else b""
        return {
            "token": token_text(tokenizer, token_id),
            "logprob": logprob,
            "bytes": list(piece) if piece else None,
        }

    content: list[dict[str, Any]] = []
    thought: list[dict[str, Any]] = []
    for token in tokens:
        if token.score is not None:
            top = [entry(*each) for each in token.score.top[:num_top]]
            (thought if token.in_thought else content).append(
                entry(token.token_id, token.score.logprob) | {"top_logprobs": top}
            )
    return {"content": content, "refusal": None, **({"reasoning": thought} if thought else {})}


def merge_chat_logprobs(parts: Iterable[dict[str, Any] | None]) -> dict[str, Any]:
    """Concatenate several ``ChatLogprobs``."""
    present = [part for part in parts if part]
    content, thought = (
        [token for part in present for token in part.get(name, ())]
        for name in ("content", "reasoning")
    )
    return {"content": content, "refusal": None, **({"reasoning": thought} if thought else {})}


def prompt_logprobs(
    tokenizer: Tokenizer | None, tokens: Sequence[TokenWithLogprobs], num_top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """Return vLLM's format for prompts, without ranks: by token id, always with the prompt's own
    token; None for the first.
    """

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {"logprob": logprob, "decoded_token": token_text(tokenizer, token_id)}

    return [
        token.score
        and {
            str(each[0]): entry(*each)
            for each in ((token.token_id, token.score.logprob), *token.score.top[:num_top])
        }
        for token in tokens
    ]
