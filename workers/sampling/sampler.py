"""Sampling: from logits to token ids, one row per sequence that needs a token."""

import hashlib
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from tramontane.proto.request import NOT_FINITE_TOKEN, SamplingParams
from tramontane.workers.device.pinned_memory import tensor_on
from tramontane.workers.sampling.exact_sums import exact_weights
from tramontane.workers.sampling.row_sampler import MIN_TEMPERATURE, sample_row


def hashed_uniform(seed: int, choice: int, position: int) -> float:
    """Return the random number in [0, 1) of one token.

    It is a hash instead of a generator's state: a sequence that is computed again, or batched with others, draws the same
    numbers, and all devices and machines agree on them.
    """
    digest = hashlib.blake2b(struct.pack("<qqq", seed, choice, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def _argmax(logits_SV: Tensor) -> Tensor:
    """Return the index of the first largest number of each row, [S]. NumPy finds it 18 times as fast as PyTorch on a CPU."""
    return torch.from_numpy(logits_SV.numpy().argmax(-1)) if logits_SV.device.type == "cpu" else logits_SV.argmax(-1)


def sample(logits_SV: Tensor, params: Sequence[SamplingParams], positions: Sequence[int], has_exact_sums: bool = False) -> Tensor:
    """Choose one token per row, [S], on the device of the logits, without waiting for it.

    ``positions`` are those of the new tokens. With ``has_exact_sums`` a row's token does not depend on the other rows on GPUs.
    NOT_FINITE_TOKEN stands for a row with NaN or plus infinity, or with nothing but minus infinity, which masks and biases leave
    in some places: its largest number shows it, as NaN counts as larger than any. For the rest of a finite row there is nothing
    to look at.
    """
    assert logits_SV.shape[0] == len(params) == len(positions)
    chosen = _argmax(logits_SV)
    is_finite = logits_SV.gather(1, chosen[:, None])[:, 0].isfinite()
    random_rows = [row for row, p in enumerate(params) if p.temperature > 0]
    if random_rows and logits_SV.device.type == "cpu" and not has_exact_sums:
        for row in random_rows if is_finite.all() else [row for row in random_rows if is_finite[row]]:
            uniform = hashed_uniform(params[row].seed or 0, params[row].choice, positions[row])
            chosen[row] = sample_row(logits_SV[row].numpy(), params[row], uniform)
    elif random_rows:
        rows = tensor_on(random_rows, torch.int64, logits_SV.device)
        draws = [(params[row], positions[row]) for row in random_rows]
        chosen[rows] = _sample_randomly(logits_SV[rows], draws, has_exact_sums)
    return torch.where(is_finite, chosen, NOT_FINITE_TOKEN)


def _sample_randomly(logits_SV: Tensor, draws: list[tuple[SamplingParams, int]], has_exact_sums: bool) -> Tensor:
    """Sample all rows at once by inversion of the cumulative distribution, on a GPU.

    The distribution is that of the temperature, cut by top-k and min-p (Nguyen et al., arXiv 2407.01082), and the rest cut
    by top-p (Holtzman et al., arXiv 1904.09751).
    """

    def column(values: list[float]) -> Tensor:
        return tensor_on(values, torch.float32, logits_SV.device)[:, None]

    vocab = logits_SV.shape[1]
    scaled = logits_SV / column([p.temperature for p, _ in draws]).clamp(min=MIN_TEMPERATURE)
    sorted_logits, token_ids = scaled.sort(dim=-1, descending=True, stable=True)
    top_k = tensor_on([p.top_k or vocab for p, _ in draws], torch.int64, logits_SV.device)[:, None]
    sorted_logits = sorted_logits.masked_fill(torch.arange(vocab, device=logits_SV.device)[None, :] >= top_k, -torch.inf)
    if any(p.min_p for p, _ in draws):
        # A probability below min_p * best is a logit below best + ln(min_p).
        floor = sorted_logits[:, :1] + column([p.min_p for p, _ in draws]).log()
        sorted_logits = sorted_logits.masked_fill(sorted_logits < floor, -torch.inf)
    probs = exact_weights(sorted_logits) if has_exact_sums else sorted_logits.softmax(-1)
    before = probs.cumsum(-1) - probs
    top_p = column([p.top_p for p, _ in draws])
    whole = probs.sum(-1, keepdim=True) if has_exact_sums else 1
    cut = (before >= top_p * whole) & (top_p < 1)
    cut[:, 0] = False  # the likeliest token is kept, however small top_p is
    probs = probs.masked_fill(cut, 0.0)
    cumulative = probs.cumsum(-1)
    targets = column([hashed_uniform(p.seed or 0, p.choice, position) for p, position in draws]) * cumulative[:, -1:]
    picks = (cumulative <= targets).sum(-1, keepdim=True).clamp(max=vocab - 1)
    # Rounding may step past the last kept token: clamp to the last one with any probability.
    # If a row is not finite, none is kept: the token is then arbitrary, and is not used.
    last_kept = ((probs > 0).sum(-1, keepdim=True) - 1).clamp(min=0)
    return token_ids.gather(1, torch.minimum(picks, last_kept))[:, 0]
