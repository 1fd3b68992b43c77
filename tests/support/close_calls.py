"""Whether another token than expected is a matter of rounding, which changes with the shape of a batch.

A token is the best one, or the one in whose share of the probability, of the likeliest first, the position's random number falls.
In float32 the demo model's logits differ by up to 2e-5 with the shape of a batch, shares of the probability by up to 1e-7.
"""

from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tramontane.cluster.config.engine_config import DEMO_MODEL
from tramontane.router.tokenization.backends import SentencePieceTokenizer
from tramontane.workers.sampling.sampler import hashed_uniform

CLOSE_LOGITS = 1e-4  # two of them may change places
CLOSE_DRAW = 1e-6  # of the probability, between a random number and the next token's share


def close_call(body: dict[str, Any], choice: int, place: int, got: list[int], wanted: list[int]) -> str:
    """How close it was that these two answers of the demo model parted at ``place``; empty where it was not, so that it counts.

    ``body``: of a request with a temperature and a seed. With a schema none is: it changes what is sampled.
    """
    if place >= min(len(got), len(wanted)) or "response_format" in body:
        return ""
    prompt = body["prompt"] if isinstance(body["prompt"], list) else list(_tokenizer().encode(body["prompt"]))
    known = (*prompt, *wanted[:place])
    logits_V = _logits(known)
    apart = float((logits_V[got[place]] - logits_V[wanted[place]]).abs())
    if apart < CLOSE_LOGITS:
        return f"their logits are {apart:.1e} apart"
    temperature = body.get("temperature", 1.0)
    draw = hashed_uniform(body["seed"], choice, len(known))
    return _close_draw(logits_V / temperature, draw, {got[place], wanted[place]}) if temperature else ""


def _close_draw(scaled_V: Tensor, draw: float, tokens: set[int]) -> str:
    """Shares of 0.5, 0.3 and 0.2 end at 0.5, 0.8 and 1.0: a draw of 0.7999999 is 1e-7 from where the third token begins."""
    shares, ranked = scaled_V.softmax(-1).sort(descending=True)
    ends = shares.cumsum(-1)
    nearest = int((ends - draw).abs().argmin())
    distance = abs(float(ends[nearest]) - draw)
    neighbours = set(ranked[nearest : nearest + 2].tolist())
    is_close = distance < CLOSE_DRAW and neighbours == tokens
    return f"its random number is {distance:.1e} from the other token's share" if is_close else ""


@cache
def _tokenizer() -> SentencePieceTokenizer:
    return SentencePieceTokenizer(DEMO_MODEL / "tokenizer.model")


@cache
def _model() -> Any:  # noqa: ANN401
    """Transformers' Mixtral, as the oracle."""
    return AutoModelForCausalLM.from_pretrained(str(DEMO_MODEL), dtype=torch.float64, experts_implementation="eager")


@lru_cache(maxsize=4)
def _logits(token_ids: tuple[int, ...]) -> Tensor:
    """Of the next token, [V]."""
    with torch.no_grad():
        logits_V: Tensor = _model()(torch.tensor([list(token_ids)])).logits[0, -1]
    return logits_V
