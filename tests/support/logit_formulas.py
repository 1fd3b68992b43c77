"""Logit biases and penalties by their formulas, one number at a time: the reference of the
vectorized implementation.
"""

import math
from collections import Counter
from collections.abc import Sequence

from tramontane.proto.request import SamplingParams


def changed_logits(
    logits: Sequence[float],
    sampling: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    eos: Sequence[int] = (),
) -> list[float]:
    """Apply biases and penalties to the logits.

    OpenAI: mu[j] - c[j] * frequency - (c[j] > 0) * presence. CTRL: divide by the repetition
    penalty, or multiply if negative.
    """
    counts, biases = Counter(output), Counter(dict(sampling.logit_bias))
    changed = []
    for token, logit in enumerate(logits):
        x = logit + biases[token]
        if token in counts or token in prompt:
            x = x / sampling.repetition_penalty if x > 0 else x * sampling.repetition_penalty
        x -= counts[token] * sampling.frequency_penalty
        x -= sampling.presence_penalty if counts[token] else 0.0
        ends = token in eos or token in sampling.stop_token_ids
        changed.append(-math.inf if ends and len(output) < sampling.min_tokens else x)
    return changed
