"""Sampling on a device in integers: every kernel draws the same token, bit for bit, in any batch.

A token's weight is an integer proportional to its probability, ``UNITS`` for the likeliest token.
It is computed by one division and one subtraction of float32, which every device rounds alike, and
then in integers; sums of integers do not depend on their order. So ``choose_plainly``, which sorts,
is the reference for kernels, and replaces them where there is none.

The rule. Tokens are ranked by their logits, the largest first, of equal ones the lower id first.
The first ``top_k`` are kept, of these the tokens with at least ``min_p`` of the best token's weight
(Nguyen et al., arXiv 2407.01082), of these the fewest first ones with a share ``top_p`` of the
weight (Holtzman et al., arXiv 1904.09751), and always the best. The kept weights, in the order of
token ids, divide the interval of the row's random number; the drawn token is the one whose share
contains the number.

Shape letters: S rows, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tramontane.proto.request import NOT_FINITE_TOKEN, SamplingParams
from tramontane.workers.device.cuda import tensor_on
from tramontane.workers.sampling.logprobs import MAX_LOGITS
from tramontane.workers.sampling.row_sampler import MIN_TEMPERATURE

# the weight of the likeliest token: a weight fits into 32 bits, 2**20 of them into 50
UNITS = 2**30
SHARE_BITS = 36  # of random numbers and of top_p
# in float32 a larger temperature may be infinite, and minus infinity divided by it is NaN
MAX_TEMPERATURE = 1e30
FARTHEST = 24.0  # logits below the best by this or more have no weight: e^-24 of 2**30 is 0.04
DISTANCE_UNITS = 2.0**26  # of a distance of 1, so that 24 fits into 31 bits
LOG2_E = 1549082005  # log2(e) * 2**30
# 2^-f for f from 0 to 1 as a polynomial, the constant first, in units of 2**-30: the interpolation
# at seven Chebyshev points, with 1 and 1/2 at the ends. It is right to 6 units.
POLYNOMIAL = (2**30, -744261047, 257939510, -59584643, 10288330, -1370516, 117454)
NO_TOP_K = 2**31 - 1
NUM_PARAMS = 5

# Chooses tokens [S], in int64, from logits [S, V] in float32 and parameters [S, 5], see
# ``row_params``.
ChooseTokens = Callable[[Tensor, Tensor], Tensor]


def row_params(
    params: Sequence[SamplingParams], uniforms: Sequence[float], device: torch.device
) -> Tensor:
    """Return the sampling parameters of each row for a device, [S, 5] in int64, in one copy, or
    without a copy if all rows are greedy.

    The bits of its temperature in float32 (0: greedy), top_k, the smallest weight to keep, and
    top_p and the random number in units of 2**-36. Temperature 0.5, top_p 0.75 and a random number
    of 0.25: 0x3f000000, 2**31 - 1, 0, 3 * 2**34, 2**34.
    """
    if not any(p.temperature for p in params):
        return torch.zeros(len(params), NUM_PARAMS, dtype=torch.int64, device=device)
    temperatures = [
        p.temperature and min(max(p.temperature, MIN_TEMPERATURE), MAX_TEMPERATURE) for p in params
    ]
    bits = torch.tensor(temperatures, dtype=torch.float32).view(torch.int32).tolist()
    scale = 2**SHARE_BITS
    rows = [
        [
            each,
            p.top_k or NO_TOP_K,
            math.ceil(p.min_p * UNITS),
            round(p.top_p * scale),
            int(uniform * scale),
        ]
        for each, p, uniform in zip(bits, params, uniforms, strict=True)
    ]
    return tensor_on(rows, torch.int64, device)


def integer_weights(logits_SV: Tensor, best_S1: Tensor, temperature_S1: Tensor) -> Tensor:
    """Return the weights of tokens, [S, V] in int64; the best logit has the weight ``UNITS``.

    Logits 0 and -1 at temperature 1: the distance is 2**26 units, which is 1.4426950 octaves, e = 1
    and f = 0.4426950. 2^-f is 790015085 of 2**30, and half of that 395007543; e^-1 of 2**30 is
    395007542.2.
    """
    distance_SV = best_S1 / temperature_S1 - logits_SV / temperature_S1
    # NaN also becomes FARTHEST
    distance_SV = torch.where(distance_SV < FARTHEST, distance_SV, FARTHEST)
    octaves_SV = (distance_SV * DISTANCE_UNITS).long() * LOG2_E  # in units of 2**-56
    fraction_SV = octaves_SV.bitwise_right_shift(26).bitwise_and_(2**30 - 1)
    octaves_SV = octaves_SV.bitwise_right_shift_(56)
    power_SV = torch.full_like(fraction_SV, POLYNOMIAL[-1])
    for coefficient in POLYNOMIAL[-2::-1]:
        power_SV = power_SV.mul_(fraction_SV).bitwise_right_shift_(30).add_(coefficient)
    return power_SV.mul_(2).bitwise_right_shift_(octaves_SV).add_(1).bitwise_right_shift_(1)


def share(total: Tensor, part: Tensor) -> Tensor:
    """Return the whole part of ``total * part / 2**36``, for totals below 2**50 and parts up to
    2**36.

    Their product may have 86 bits, so the lower 24 bits of the total are multiplied separately.
    """
    upper, lower = total >> 24, total & (2**24 - 1)
    return (upper * part + (lower * part >> 24)) >> (SHARE_BITS - 24)


def choose_plainly(logits_SV: Tensor, params_S5: Tensor) -> Tensor:
    """Choose a token for each row by the rule above, [S].

    The result is NOT_FINITE_TOKEN for a row with NaN or plus infinity, or with only minus infinity:
    its largest number shows it, as NaN counts as larger than any. A temperature that makes the best
    logit infinite is greedy. A limited number of rows is sorted at a time, which bounds the memory.
    """
    assert logits_SV.dtype == torch.float32
    num_rows, step = len(logits_SV), max(MAX_LOGITS // logits_SV.shape[1], 1)
    if num_rows <= step:
        return _choose_rows(logits_SV, params_S5)
    pieces = (slice(first, first + step) for first in range(0, num_rows, step))
    return torch.cat([_choose_rows(logits_SV[rows], params_S5[rows]) for rows in pieces])


def _choose_rows(logits_SV: Tensor, params_S5: Tensor) -> Tensor:
    chosen_S = logits_SV.argmax(-1)  # the first of equal ones
    best_S1 = logits_SV.gather(1, chosen_S[:, None])
    temperature_S1 = params_S5[:, :1].to(torch.int32).view(torch.float32)
    is_drawn_S = (params_S5[:, 0] > 0) & (best_S1 / temperature_S1)[:, 0].isfinite()
    weights_SV = keep_likeliest(
        integer_weights(logits_SV, best_S1, temperature_S1), logits_SV, params_S5
    )
    ends_SV = weights_SV.cumsum(-1)
    targets_S1 = share(ends_SV[:, -1:], params_S5[:, 4:])
    drawn_S = (ends_SV <= targets_S1).sum(-1)  # undefined for rows that are not drawn
    chosen_S = torch.where(is_drawn_S, drawn_S, chosen_S)
    return torch.where(best_S1[:, 0].isfinite(), chosen_S, NOT_FINITE_TOKEN)


def keep_likeliest(weights_SV: Tensor, logits_SV: Tensor, params_S5: Tensor) -> Tensor:
    """Return the weights that top-k, min-p and top-p keep, and 0 for all other tokens, [S, V]."""
    top_k_S1, min_weight_S1, top_p_S1 = (params_S5[:, each, None] for each in (1, 2, 3))
    order_SV = logits_SV.sort(dim=-1, descending=True, stable=True).indices
    ranked_SV = weights_SV.gather(1, order_SV)
    ranks_V = torch.arange(logits_SV.shape[1], device=logits_SV.device)
    ranked_SV.masked_fill_((ranks_V >= top_k_S1) | (ranked_SV < min_weight_S1), 0)
    ends_SV = ranked_SV.cumsum(-1)
    needed_S1 = share(ends_SV[:, -1:], top_p_S1).clamp(min=1)
    ranked_SV.masked_fill_(ends_SV.sub_(ranked_SV) >= needed_S1, 0)
    return ends_SV.scatter_(1, order_SV, ranked_SV)
