"""Sums of probabilities that are exact, and so do not depend on the order in which a device adds.

On GPUs PyTorch's sums and running sums of a row depend on how many rows there are. Here every
probability is a whole number in float64, the best token's ``UNITS``: all sums up to 2**53 are
exact.

Shape letters: S rows, V vocabulary.
"""

from torch import Tensor

UNITS = 2.0**34  # of the likeliest token: 2**19 tokens that are as likely add up to 2**53


def exact_weights(logits_SV: Tensor) -> Tensor:
    """Return what the probabilities are proportional to, [S, V]: whole numbers in float64, of the
    best token ``UNITS``.

    Logits [0, -1, -30]: e^-1 of 2**34 is 6320120674.8, so 6320120675; e^-30 of 2**34 is 0.0016, so
    0.
    """
    best_S1 = logits_SV.amax(-1, keepdim=True)
    return ((logits_SV.double() - best_S1.double()).exp() * UNITS).round()


def exact_logsumexp(logits_SV: Tensor) -> Tensor:
    """Return the logarithm of the sum of each row's exponentials, [S, 1]."""
    best_S1 = logits_SV.amax(-1, keepdim=True).double()
    return (best_S1 + (exact_weights(logits_SV).sum(-1, keepdim=True) / UNITS).log()).to(
        logits_SV.dtype
    )
