"""Whether an unexpected token can be explained by rounding, which depends on the shape of a batch.

A sampled token is the best one, or, on CPUs, with tokens sorted by falling probability, the one
into whose share of the cumulative probability the position's random number falls. In float32 the
demo model's logits differ by up to 2e-5 with the shape of a batch, cumulative probabilities by up
to 1e-7, and expert scores by up to 1e-6. Two experts with almost equal scores at any earlier
position can change every later token. Such a tie explains a difference only if the oracle samples
one of the two tokens, and the other one when it is made to choose the other expert there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
CLOSE_SCORES = 1e-6  # of the last chosen expert and the next one


@dataclass(frozen=True, slots=True)
class GateTie:
    """A position where the last chosen expert and the next one have almost equal scores."""

    layer: int
    position: int
    gap: float


def close_call(
    body: dict[str, Any], choice: int, index: int, got: list[int], wanted: list[int]
) -> str:
    """Describe how close the decision was where two answers of the demo model part; empty if
    rounding does not explain it.

    ``index`` is the first token that differs. ``body`` is that of a request with a temperature and
    a seed. A request with a schema never is a close call, because its grammar changes what is
    sampled.
    """
    if index >= min(len(got), len(wanted)) or "response_format" in body:
        return ""
    prompt = body["prompt"] if isinstance(body["prompt"], list) else encode(body["prompt"])
    known = (*prompt, *wanted[:index])
    if close := _close_decision(
        _logits(known), body, choice, len(known), {got[index], wanted[index]}
    ):
        return close
    sampled = _sampled(_logits(known), body, choice, len(known))
    for tie in gate_ties(known):
        if {got[index], wanted[index]} == {
            sampled,
            _sampled(_logits(known, tie), body, choice, len(known)),
        }:
            where = f"layer {tie.layer}, position {tie.position}"
            return (
                f"the scores of two experts at {where} are {tie.gap:.1e} apart, and each gives one"
                " of the two tokens"
            )
    return ""


@lru_cache(maxsize=4)
def gate_ties(token_ids: tuple[int, ...]) -> list[GateTie]:
    """Return the ties at the gates of all layers and positions, the smallest gap first."""
    scores_by_layer: list[Tensor] = []
    with _gates(lambda layer, outputs: scores_by_layer.append(outputs[0])):
        _logits.__wrapped__(token_ids)
    ties = []
    for layer, scores_TE in enumerate(scores_by_layer):
        best_TE = scores_TE.sort(dim=-1, descending=True).values
        gaps_T = best_TE[:, _num_chosen() - 1] - best_TE[:, _num_chosen()]
        ties += [
            GateTie(layer, int(n), float(gaps_T[n]))
            for n in (gaps_T < CLOSE_SCORES).nonzero()[:, 0]
        ]
    return sorted(ties, key=lambda tie: tie.gap)


def _sampled(logits_V: Tensor, body: dict[str, Any], choice: int, num_known: int) -> int:
    """Return the token that these logits and the position's random number give."""
    if not (temperature := body.get("temperature", 1.0)):
        return int(logits_V.argmax())
    shares, ranked = (logits_V / temperature).softmax(-1).sort(descending=True)
    draw = hashed_uniform(body["seed"], choice, num_known)
    return int(ranked[int((shares.cumsum(-1) <= draw).sum())])


def _close_decision(
    logits_V: Tensor, body: dict[str, Any], choice: int, num_known: int, tokens: set[int]
) -> str:
    """Describe how close the decision between these two tokens was; empty if it was not close."""
    one, other = max(tokens), min(tokens)
    if (gap := float((logits_V[one] - logits_V[other]).abs())) < CLOSE_LOGITS:
        return f"their logits are {gap:.1e} apart"
    temperature = body.get("temperature", 1.0)
    draw = hashed_uniform(body["seed"], choice, num_known)
    return _close_draw(logits_V / temperature, draw, tokens) if temperature else ""


def _close_draw(scaled_V: Tensor, draw: float, tokens: set[int]) -> str:
    """Describe how close the random number is to the boundary between these two tokens; empty if it
    is not close.

    Shares of 0.5, 0.3 and 0.2 end at 0.5, 0.8 and 1.0: a draw of 0.7999999 is 1e-7 from where the
    third token begins.
    """
    shares, ranked = scaled_V.softmax(-1).sort(descending=True)
    ends = shares.cumsum(-1)
    nearest = int((ends - draw).abs().argmin())
    distance = abs(float(ends[nearest]) - draw)
    neighbors = set(ranked[nearest : nearest + 2].tolist())
    is_close = distance < CLOSE_DRAW and neighbors == tokens
    return f"its random number is {distance:.1e} from the other token's share" if is_close else ""


def encode(text: str) -> list[int]:
    """Return the token ids of a prompt, as the demo model's server would."""
    return list(_tokenizer().encode(text))


@cache
def _tokenizer() -> SentencePieceTokenizer:
    return SentencePieceTokenizer(DEMO_MODEL / "tokenizer.model")


@cache
def _model() -> Any:
    """Load Transformers' Mixtral, the oracle."""
    return AutoModelForCausalLM.from_pretrained(
        str(DEMO_MODEL), dtype=torch.float64, experts_implementation="eager"
    )


def _num_chosen() -> int:
    return int(_model().config.num_experts_per_tok)


@contextmanager
def _gates(hook: Any) -> Iterator[None]:  # (layer, outputs) to None, or to other outputs
    """Call ``hook`` with the number of each layer and its gate's scores [T, E], weights [T, k] and
    experts [T, k].
    """
    handles = [
        layer.mlp.gate.register_forward_hook(
            lambda _gate, _inputs, outputs, number=number: hook(number, outputs)
        )
        for number, layer in enumerate(_model().model.layers)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _choose_other(
    tie: GateTie, layer: int, outputs: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Choose the next best expert instead of the last chosen one at a tie.

    Scores of 3, 1 and 1 for the experts 4, 0 and 7 with two chosen: 4 and 7 instead of 4 and 0.
    """
    if layer != tie.layer:
        return None
    scores_TE, weights_Tk, experts_Tk = outputs
    best = scores_TE[tie.position].argsort(descending=True)
    chosen = torch.cat((best[: _num_chosen() - 1], best[_num_chosen() : _num_chosen() + 1]))
    weights_Tk[tie.position] = scores_TE[tie.position, chosen].softmax(-1).to(weights_Tk.dtype)
    experts_Tk[tie.position] = chosen
    return scores_TE, weights_Tk, experts_Tk


@lru_cache(maxsize=4)
def _logits(token_ids: tuple[int, ...], tie: GateTie | None = None) -> Tensor:
    """Return the logits of the next token, [V]; at a tie, with the other expert."""
    if tie is not None:
        with _gates(lambda layer, outputs: _choose_other(tie, layer, outputs)):
            return _logits.__wrapped__(token_ids)  # type: ignore[no-any-return]
    with torch.no_grad():
        logits_V: Tensor = _model()(torch.tensor([list(token_ids)])).logits[0, -1]
    return logits_V
