"""From logits to token ids, one row per sequence that wants a token."""

import hashlib
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from tramontane.proto.request import SamplingParams
from tramontane.workers.device.pinned_memory import tensor_on


def hashed_uniform(seed: int, choice: int, position: int) -> float:
    """The random number in [0, 1) that belongs to one token, whatever it is batched with.

    A hash, not a generator's state: a sequence that is computed again draws the same
    numbers, and every device and machine agrees on them.
    """
    digest = hashlib.blake2b(struct.pack("<qqq", seed, choice, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def sample(logits_SV: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
    """One token id per row, [S], where the logits are; nobody waits. ``positions`` are those of the tokens being chosen."""
    assert logits_SV.shape[0] == len(params) == len(positions)
    chosen = logits_SV.argmax(-1)
    random_rows = [row for row, p in enumerate(params) if p.temperature > 0]
    if random_rows:
        rows = tensor_on(random_rows, torch.int64, logits_SV.device)
        draws = [(params[row], positions[row]) for row in random_rows]
        chosen[rows] = _sample_randomly(logits_SV[rows], draws)
    return chosen


def _sample_randomly(logits_SV: Tensor, draws: list[tuple[SamplingParams, int]]) -> Tensor:
    """Invert the cumulative distribution of temperature, then min-p (Nguyen and others, arXiv 2407.01082), top-k, and then
    top-p (Holtzman and others, arXiv 1904.09751) of what these have left.
    """

    def column(values: list[float]) -> Tensor:
        return tensor_on(values, torch.float32, logits_SV.device)[:, None]

    vocab = logits_SV.shape[1]
    # The smallest temperatures would overflow float32; from here on they are greedy anyway.
    scaled = logits_SV / column([p.temperature for p, _ in draws]).clamp(min=1e-5)
    sorted_logits, token_ids = scaled.sort(dim=-1, descending=True, stable=True)
    top_k = tensor_on([p.top_k or vocab for p, _ in draws], torch.int64, logits_SV.device)[:, None]
    sorted_logits = sorted_logits.masked_fill(torch.arange(vocab, device=logits_SV.device)[None, :] >= top_k, -torch.inf)
    if any(p.min_p for p, _ in draws):
        # Less than a share of the best probability is a logit further below the best one than the share's logarithm.
        floor = sorted_logits[:, :1] + column([p.min_p for p, _ in draws]).log()
        sorted_logits = sorted_logits.masked_fill(sorted_logits < floor, -torch.inf)
    probs = sorted_logits.softmax(-1)
    before = probs.cumsum(-1) - probs
    top_p = column([p.top_p for p, _ in draws])
    cut = (before >= top_p) & (top_p < 1)
    cut[:, 0] = False  # the likeliest token always stays, however small top_p
    probs = probs.masked_fill(cut, 0.0)
    cumulative = probs.cumsum(-1)
    targets = column([hashed_uniform(p.seed, p.choice, position) for p, position in draws]) * cumulative[:, -1:]
    picks = (cumulative <= targets).sum(-1, keepdim=True).clamp(max=vocab - 1)
    # Rounding may step past the last kept token; go back to the last one with any weight.
    # Logits that are not numbers (a float16 overflow) keep none: then any token, but no crash.
    last_kept = ((probs > 0).sum(-1, keepdim=True) - 1).clamp(min=0)
    return token_ids.gather(1, torch.minimum(picks, last_kept))[:, 0]
