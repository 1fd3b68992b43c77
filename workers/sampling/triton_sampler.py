"""Triton kernel that samples a row by one program, without sorting it:
``integer_sampler.choose_plainly``, bit for bit.

Logits are read as keys, integers of the same order. With top-k or top-p the program searches for
the key of the last kept token: each pass over the row sums the kept amounts for three candidate
keys, and so reduces the range to a quarter, in at most 17 passes. Programs do not wait for each
other and no size depends on data, so launches can be captured in a CUDA graph.

Shape letters: S rows, V vocabulary; B tokens that are read at a time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tramontane.proto.request import NOT_FINITE_TOKEN
from tramontane.workers.device.alignment import aligned
from tramontane.workers.sampling import integer_sampler

BLOCK, WARPS = 4096, 16

NOT_FINITE = tl.constexpr(NOT_FINITE_TOKEN)
NUM_PARAMS = tl.constexpr(integer_sampler.NUM_PARAMS)
FARTHEST = tl.constexpr(integer_sampler.FARTHEST)
DISTANCE_UNITS = tl.constexpr(integer_sampler.DISTANCE_UNITS)
LOG2_E = tl.constexpr(integer_sampler.LOG2_E)
SHARE_BITS = tl.constexpr(integer_sampler.SHARE_BITS)
P0, P1, P2, P3, P4, P5, P6 = (tl.constexpr(each) for each in integer_sampler.POLYNOMIAL)
NAN_KEY, INFINITY_KEY, MINUS_INFINITY_KEY, NO_KEY = (
    tl.constexpr(each) for each in (2**31 - 1, 0x7F800000, -0x7F800001, -(2**31))
)


def choose_tokens(logits_SV: Tensor, params_S5: Tensor) -> Tensor:
    """Choose a token for each row, [S]; see ``integer_sampler``."""
    assert logits_SV.dtype == torch.float32
    assert params_S5.dtype == torch.int64
    num_rows, vocab = logits_SV.shape
    weights_SV = torch.empty_like(logits_SV, dtype=torch.int32)  # the weights of the program's row
    tokens_S = params_S5.new_empty(num_rows)
    block = min(BLOCK, triton.next_power_of_2(vocab))
    if num_rows:
        # Triton launches on the current device
        with torch.cuda.device_of(logits_SV):  # type: ignore[no-untyped-call]
            _kernel[(num_rows,)](
                aligned(logits_SV),
                aligned(params_S5),
                weights_SV,
                tokens_S,
                vocab,
                block,
                num_warps=WARPS,
            )
    return tokens_S


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(logits_SV, params_S5, weights_SV, tokens_S, vocab, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sample one row. Row 2 of 32,000 tokens begins at element 64,000, its parameters at 10."""
    row = tl.program_id(0).to(tl.int64)
    logits_V, weights_V, params_5 = (
        logits_SV + row * vocab,
        weights_SV + row * vocab,
        params_S5 + row * NUM_PARAMS,
    )
    best_key, token = _first_best(logits_V, vocab, block)
    temperature = tl.load(params_5).to(tl.int32).to(tl.float32, bitcast=True)
    is_finite = (best_key > MINUS_INFINITY_KEY) & (best_key < INFINITY_KEY)
    if is_finite & (temperature > 0.0):
        best = tl.div_rn(_logit(best_key), temperature)
        if tl.abs(best) < float("inf"):
            token = _draw(logits_V, weights_V, params_5, vocab, best_key, best, temperature, block)
    tl.store(tokens_S + row, tl.where(is_finite, token, NOT_FINITE).to(tl.int64))


@triton.jit  # type: ignore[untyped-decorator]
def _draw(logits_V, weights_V, params_5, vocab, best_key, best, temperature, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Draw the token of a row. All tokens above ``key`` are kept, and the first ``ties`` tokens
    with this key.
    """
    top_k, min_weight = tl.load(params_5 + 1), tl.load(params_5 + 2)
    top_p, uniform = tl.load(params_5 + 3), tl.load(params_5 + 4)
    kept, num_with_weight, lowest = _write_weights(
        logits_V, weights_V, vocab, best_key, best, temperature, min_weight, block
    )
    tl.debug_barrier()  # other threads may read them
    # all tokens with a weight
    key, ties, weight = lowest - 1, tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    if top_k < num_with_weight:  # else no token with a weight is lost
        key, above = _search(logits_V, weights_V, vocab, lowest, best_key, top_k, True, block)
        weight, ties = _weight(_logit(key), best, temperature, min_weight), top_k - above
        kept = _weight_above(logits_V, weights_V, vocab, key, block) + ties * weight
    needed = tl.maximum(_share(kept, top_p), 1)
    if needed < kept:
        lowest = tl.where(ties > 0, key, key + 1)
        key, above = _search(logits_V, weights_V, vocab, lowest, best_key, needed, False, block)
        weight = _weight(_logit(key), best, temperature, min_weight)
        ties = (needed - above + weight - 1) // weight
        kept = above + ties * weight
    return _token_at(logits_V, weights_V, vocab, key, ties, weight, _share(kept, uniform), block)


@triton.jit
def _keys(logits):  # type: ignore[no-untyped-def]
    """Return integers in the order of the logits, NaN being the largest. 0 and -0 are equal."""
    bits = logits.to(tl.int32, bitcast=True)
    keys = tl.where(logits == 0.0, 0, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return tl.where(logits != logits, NAN_KEY, keys)


@triton.jit
def _logit(key):  # type: ignore[no-untyped-def]
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _first_best(logits_V, vocab, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the largest key and the first token that has it."""
    lanes_B = tl.arange(0, block)
    best_B, tokens_B = tl.full((block,), NO_KEY, tl.int32), lanes_B
    for begin in range(0, vocab, block):
        keys_B = tl.where(
            begin + lanes_B < vocab, _keys(_load(logits_V, begin, vocab, block)), NO_KEY
        )
        is_better_B = keys_B > best_B
        best_B, tokens_B = (
            tl.where(is_better_B, keys_B, best_B),
            tl.where(is_better_B, begin + lanes_B, tokens_B),
        )
    best = tl.max(best_B, axis=0)
    return best, tl.min(tl.where(best_B == best, tokens_B, vocab), axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def _load(numbers_V, begin, vocab, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the numbers of a block of tokens; 0 for logits beyond the vocabulary, whose weight is
    0.
    """
    tokens_B = begin + tl.arange(0, block)
    return tl.load(numbers_V + tokens_B, mask=tokens_B < vocab, other=0)


@triton.jit
def _weight(logits, best, temperature, min_weight):  # type: ignore[no-untyped-def]
    """Compute ``integer_weights`` in int64, and 0 below the least weight that is kept."""
    distance = best - tl.div_rn(logits, temperature)
    distance = tl.where(distance < FARTHEST, distance, FARTHEST)
    octaves = (distance * DISTANCE_UNITS).to(tl.int32).to(tl.int64) * LOG2_E
    fraction = ((octaves >> 26) & 0x3FFFFFFF).to(tl.int32)
    power = _times(fraction, _times(fraction, fraction * 0 + P6, P5), P4)
    power = _times(fraction, _times(fraction, _times(fraction, power, P3), P2), P1)
    weight = (((_times(fraction, power, P0).to(tl.int64) * 2) >> (octaves >> 56)) + 1) >> 1
    return tl.where(weight < min_weight, 0, weight)


@triton.jit  # type: ignore[untyped-decorator]
def _times(fraction, power, coefficient: tl.constexpr):  # type: ignore[no-untyped-def]
    return ((fraction.to(tl.int64) * power.to(tl.int64)) >> 30).to(tl.int32) + coefficient


@triton.jit
def _share(total, part):  # type: ignore[no-untyped-def]
    """Compute ``integer_sampler.share``."""
    return ((total >> 24) * part + (((total & 0xFFFFFF) * part) >> 24)) >> (SHARE_BITS - 24)


@triton.jit  # type: ignore[untyped-decorator]
def _write_weights(  # type: ignore[no-untyped-def]
    logits_V, weights_V, vocab, best_key, best, temperature, min_weight, block: tl.constexpr
):
    """Write the weights; return their sum, the number of nonzero weights, and the lowest key with a
    nonzero weight.
    """
    sums_B, counts_B = tl.zeros((block,), tl.int64), tl.zeros((block,), tl.int32)
    lowest_B = tl.zeros((block,), tl.int32) + best_key
    for begin in range(0, vocab, block):
        tokens_B = begin + tl.arange(0, block)
        logits_B = _load(logits_V, begin, vocab, block)
        new_B = tl.where(tokens_B < vocab, _weight(logits_B, best, temperature, min_weight), 0)
        tl.store(weights_V + tokens_B, new_B.to(tl.int32), mask=tokens_B < vocab)
        sums_B += new_B
        counts_B += (new_B > 0).to(tl.int32)
        lowest_B = tl.where(new_B > 0, tl.minimum(lowest_B, _keys(logits_B)), lowest_B)
    return tl.sum(sums_B, axis=0), tl.sum(counts_B, axis=0), tl.min(lowest_B, axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def _search(  # type: ignore[no-untyped-def]
    logits_V, weights_V, vocab, lowest, highest, needed, is_count: tl.constexpr, block: tl.constexpr
):
    """Return the largest key for which the tokens at or above it have the needed number or weight,
    and the amount above it.

    ``lowest`` satisfies this, and no token is above ``highest``. Keys from 10 to 109 after one pass
    over keys 35, 60 and 85: 10 to 34, 35 to 59, 60 to 84 or 85 to 109. With two or three keys left,
    some of the three are beyond the last key, which no token has.
    """
    # first <= key < last
    first, last, above = lowest.to(tl.int64), highest.to(tl.int64) + 1, needed * 0
    while last - first > 1:
        step = tl.maximum((last - first) // 4, 1)
        low, middle, high = first + step, first + 2 * step, first + 3 * step
        low_B = tl.zeros((block,), tl.int64)
        middle_B, high_B = low_B, low_B
        for begin in range(0, vocab, block):
            keys_B, amounts_B = (
                _keys(_load(logits_V, begin, vocab, block)),
                _load(weights_V, begin, vocab, block),
            )
            if is_count:
                amounts_B = (begin + tl.arange(0, block) < vocab).to(tl.int32)
            low_B += tl.where(keys_B >= low.to(tl.int32), amounts_B, 0)
            middle_B += tl.where(keys_B >= middle.to(tl.int32), amounts_B, 0)
            high_B += tl.where(keys_B >= high.to(tl.int32), amounts_B, 0)
        of_low, of_middle, of_high = (
            tl.sum(low_B, axis=0),
            tl.sum(middle_B, axis=0),
            tl.sum(high_B, axis=0),
        )
        if of_high >= needed:
            first = high
        elif of_middle >= needed:
            first, last, above = middle, high, of_high
        elif of_low >= needed:
            first, last, above = low, middle, of_middle
        else:
            last, above = low, of_low
    return first.to(tl.int32), above


@triton.jit  # type: ignore[untyped-decorator]
def _weight_above(logits_V, weights_V, vocab, key, block: tl.constexpr):  # type: ignore[no-untyped-def]
    sums_B = tl.zeros((block,), tl.int64)
    for begin in range(0, vocab, block):
        is_above_B = _keys(_load(logits_V, begin, vocab, block)) > key
        sums_B += tl.where(is_above_B, _load(weights_V, begin, vocab, block), 0)
    return tl.sum(sums_B, axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def _token_at(logits_V, weights_V, vocab, key, ties, weight, target, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the token whose share contains ``target``, which is less than the total kept weight.

    ``weight``: of a tie. The block is found by the sums of blocks; the last block holds the token
    if no other does, and positions beyond the vocabulary have no weight. Kept weights 3, 0, 2 | 4,
    1 and target 6: the first block ends at 5, the tokens of the second block at 9 and 10, so it is
    the first of these.
    """
    begin, passed, in_block, tied = -block + vocab * 0, target * 0, target * 0, ties * 0
    while (passed + in_block <= target) & (begin + block < vocab):
        passed, ties, begin = passed + in_block, ties - tied, begin + block
        keys_B, weights_B = (
            _keys(_load(logits_V, begin, vocab, block)),
            _load(weights_V, begin, vocab, block),
        )
        tied = tl.minimum(tl.sum((keys_B == key).to(tl.int32), axis=0).to(tl.int64), ties)
        in_block = tl.sum(tl.where(keys_B > key, weights_B, 0).to(tl.int64), axis=0) + tied * weight
    keys_B, weights_B = (
        _keys(_load(logits_V, begin, vocab, block)),
        _load(weights_V, begin, vocab, block),
    )
    is_tie_B = keys_B == key
    is_kept_B = (keys_B > key) | (is_tie_B & (tl.cumsum(is_tie_B.to(tl.int32), axis=0) <= ties))
    ends_B = passed + tl.cumsum(tl.where(is_kept_B, weights_B, 0).to(tl.int64), axis=0)
    return begin + tl.sum((ends_B <= target).to(tl.int32), axis=0)
