"""Sampling of one row on a CPU: the likeliest tokens are sorted, and the whole vocabulary only if
they do not suffice.

Sorting 131,072 logits takes several times as long as finding the largest thousand and sorting
these. Probabilities are proportional to e^(logit - best), their sums are float64, and NumPy
computes each row by itself, in one thread.

Shape letters: V vocabulary, C candidates.
"""

import numpy as np
from numpy.typing import NDArray

from tramontane.proto.request import SamplingParams

NUM_LIKELIEST = 1024
MIN_TEMPERATURE = 1e-5  # smaller ones would overflow float32; below it sampling is greedy anyway

Logits = NDArray[np.float32]


def sample_row(logits_V: Logits, params: SamplingParams, uniform: float) -> int:
    """Choose a token by inversion of the cumulative distribution at ``uniform``, in [0, 1); see
    ``sampler._sample_randomly``.

    The largest logit is finite.
    """
    with np.errstate(over="ignore"):
        scaled_V = logits_V / np.float32(max(params.temperature, MIN_TEMPERATURE))
    best = scaled_V.max()
    if not np.isfinite(best):  # the temperature has made it too large
        return int(logits_V.argmax())
    if len(scaled_V) > NUM_LIKELIEST:
        limit = np.partition(scaled_V, -NUM_LIKELIEST)[-NUM_LIKELIEST]
        # with all that are equal to the last
        token = _choose(scaled_V, np.flatnonzero(scaled_V >= limit), best, params, uniform)
        if token is not None:
            return token
    token = _choose(scaled_V, np.arange(len(scaled_V)), best, params, uniform)
    assert token is not None
    return token


def _choose(
    scaled_V: Logits,
    candidates_C: NDArray[np.intp],
    best: np.float32,
    params: SamplingParams,
    uniform: float,
) -> int | None:
    """Choose among the likeliest tokens, or return None if more of them are needed."""
    candidates_C = candidates_C[np.argsort(-scaled_V[candidates_C], kind="stable")]
    is_complete = len(candidates_C) == len(scaled_V)  # whether no other token can be chosen
    top_k = params.top_k or len(scaled_V)
    if top_k <= len(candidates_C):
        candidates_C, is_complete = candidates_C[:top_k], True
    elif top_k < len(scaled_V) and not is_complete:
        return None
    # A probability below min_p * best is a logit below best + ln(min_p).
    min_p = np.float32(params.min_p)  # 0 for less than 1e-45, which leaves no token out either
    floor = best + np.log(min_p) if min_p else np.float32(-np.inf)
    if scaled_V[candidates_C[-1]] < floor:
        candidates_C, is_complete = candidates_C[scaled_V[candidates_C] >= floor], True
    weights_C = np.exp(scaled_V[candidates_C] - best).astype(np.float64)
    ends_C = weights_C.cumsum()
    whole = (
        ends_C[-1]
        if is_complete
        else np.exp(scaled_V[scaled_V >= floor] - best).sum(dtype=np.float64)
    )
    if params.top_p < 1:
        needed = params.top_p * whole
        if ends_C[-1] < needed and not is_complete:
            return None
        ends_C = ends_C[: max(int((ends_C - weights_C < needed).sum()), 1)]
        whole, is_complete = ends_C[-1], True
    target = uniform * whole
    if target >= ends_C[-1] and not is_complete:
        return None
    # Rounding may step past the last token with any probability.
    last = max(int((weights_C[: len(ends_C)] > 0).sum()) - 1, 0)
    return int(candidates_C[min(int(np.searchsorted(ends_C, target, side="right")), last)])
