"""Whether an unexpected token can be explained by rounding, which depends on the shape of a batch.

A sampled token is the best one, or, with tokens sorted by falling probability, the one into whose share of the cumulative
probability the position's random number falls. In float32 the demo model's logits differ by up to 2e-5 with the shape of a
batch, and cumulative probabilities by up to 1e-7.
"""

from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tramontane.cluster.config.engine_config import DEMO_MODEL
from tramontane.router.tokenization.backends import SentencePieceTokenizer
from tramontane.workers.sampling.sampler import hashed_uniform

CLOSE_LOGITS = 1e-4  # logits closer than this may swap their order
CLOSE_DRAW = 1e-6  # cumulative probability between a random number and the next token's share


def close_call(body: dict[str, Any], choice: int, index: int, got: list[int], wanted: list[int]) -> str:
    """Describe how close the decision was where two answers of the demo model part; empty if rounding does not explain it.

    ``index`` is the first token that differs. ``body`` is that of a request with a temperature and a seed. A request with a
    schema never is a close call, because its grammar changes what is sampled.
    """
    if index >= min(len(got), len(wanted)) or "response_format" in body:
        return ""
    prompt = body["prompt"] if isinstance(body["prompt"], list) else list(_tokenizer().encode(body["prompt"]))
    known = (*prompt, *wanted[:index])
    logits_V = _logits(known)
    gap = float((logits_V[got[index]] - logits_V[wanted[index]]).abs())
    if gap < CLOSE_LOGITS:
        return f"their logits are {gap:.1e} apart"
    temperature = body.get("temperature", 1.0)
    draw = hashed_uniform(body["seed"], choice, len(known))
    return _close_draw(logits_V / temperature, draw, {got[index], wanted[index]}) if temperature else ""


def _close_draw(scaled_V: Tensor, draw: float, tokens: set[int]) -> str:
    """Describe how close the random number is to the boundary between these two tokens; empty if it is not close.

    Shares of 0.5, 0.3 and 0.2 end at 0.5, 0.8 and 1.0: a draw of 0.7999999 is 1e-7 from where the third token begins.
    """
    shares, ranked = scaled_V.softmax(-1).sort(descending=True)
    ends = shares.cumsum(-1)
    nearest = int((ends - draw).abs().argmin())
    distance = abs(float(ends[nearest]) - draw)
    neighbors = set(ranked[nearest : nearest + 2].tolist())
    is_close = distance < CLOSE_DRAW and neighbors == tokens
    return f"its random number is {distance:.1e} from the other token's share" if is_close else ""


@cache
def _tokenizer() -> SentencePieceTokenizer:
    return SentencePieceTokenizer(DEMO_MODEL / "tokenizer.model")


@cache
def _model() -> Any:  # noqa: ANN401
    """Load Transformers' Mixtral, the oracle."""
    return AutoModelForCausalLM.from_pretrained(str(DEMO_MODEL), dtype=torch.float64, experts_implementation="eager")


@lru_cache(maxsize=4)
def _logits(token_ids: tuple[int, ...]) -> Tensor:
    """Return the logits of the next token, [V]."""
    with torch.no_grad():
        logits_V: Tensor = _model()(torch.tensor([list(token_ids)])).logits[0, -1]
    return logits_V
