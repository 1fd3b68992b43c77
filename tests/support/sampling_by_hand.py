"""Sampling of one row in Python's own numbers, as one would write it by hand."""

import itertools
import math

from tramontane.proto.request import SamplingParams

SAMPLINGS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=3.0),
    SamplingParams(temperature=1.0, top_k=5),
    SamplingParams(temperature=1.0, top_k=1000),
    SamplingParams(temperature=1.0, top_p=0.5),
    SamplingParams(temperature=1.0, top_p=0.95),
    SamplingParams(temperature=0.7, top_k=7, top_p=0.8),
    SamplingParams(temperature=2.0, top_k=3, top_p=0.99),
    SamplingParams(temperature=1.0, min_p=0.2),
    SamplingParams(temperature=1.5, min_p=0.05),
    SamplingParams(temperature=2.0, min_p=0.1, top_k=9, top_p=0.8),
]


def kept_by_hand(logits: list[float], p: SamplingParams) -> list[tuple[int, float]]:
    """Return (token, probability) after temperature, then min-p, top-k and top-p, likeliest
    first.
    """
    top = max(logits)
    ranked = [(math.exp((x - top) / p.temperature), token) for token, x in enumerate(logits)]
    ranked.sort(key=lambda each: (-each[0], each[1]))  # of equal ones the first
    ranked = [(weight, token) for weight, token in ranked if weight >= p.min_p][: p.top_k or None]
    total = sum(weight for weight, _ in ranked)
    kept, mass = [], 0.0
    for weight, token in ranked:
        kept.append((token, weight / total))
        mass += weight / total
        if mass >= p.top_p:
            break
    return [(token, probability / mass) for token, probability in kept]


def pick_by_hand(kept: list[tuple[int, float]], u: float) -> tuple[int, float]:
    """Return the token in whose share of [0, 1) u falls, and how close u is to the border of that
    share.
    """
    ends = list(itertools.accumulate(probability for _, probability in kept))
    rank = min(sum(end <= u for end in ends), len(kept) - 1)
    return kept[rank][0], min(abs(u - end) for end in ends)
