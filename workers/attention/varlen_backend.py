"""Prefill on CUDA by torch's own variable-length attention, which is FlashAttention-2 or a later
one where it is installed.

Shape letters: T tokens, S keys of a packed row, C chunks, H query heads, G key/value heads, d
head_dim.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from tramontane.workers.attention.metadata import PrefillMetadata
from tramontane.workers.device.cuda import tensor_on

# Later versions of torch require a flag for grouped query heads; the first version always supports
# them.
attend_packed: Callable[..., Any] = (
    partial(varlen_attn, enable_gqa=True)
    if "enable_gqa" in inspect.signature(varlen_attn).parameters
    else varlen_attn
)


@dataclass(frozen=True, slots=True)
class PackedLengths:
    """The ends of each chunk's queries and keys, [C + 1] (int32), and their maximum lengths."""

    query_ends: Tensor
    key_ends: Tensor
    max_queries: int
    max_keys: int
    window: tuple[int, int]


@dataclass(frozen=True, slots=True)
class VarlenPrefill:
    """Prefill kernel for all chunks of a micro-batch at once."""

    def build_mask(self, index: PrefillMetadata) -> PackedLengths:
        """Build the ends. A window of 4 is the token itself and 3 to its left; causal is 0 to its
        right.
        """
        query_ends, key_ends = (
            tensor_on([0, *accumulate(lens)], torch.int32, index.cached_rows.device)
            for lens in _lens(index)
        )
        window = (-1 if index.window is None else index.window - 1, 0)
        return PackedLengths(
            query_ends, key_ends, max(index.query_lens), max(index.key_lens), window
        )

    def attend(self, q_THd: Tensor, k_SGd: Tensor, v_SGd: Tensor, mask: PackedLengths) -> Tensor:
        """Compute the output [T, H, d]. Queries are aligned with the last keys of their chunk."""
        sizes = (mask.query_ends, mask.key_ends, mask.max_queries, mask.max_keys)
        out_THd: Tensor = attend_packed(q_THd, k_SGd, v_SGd, *sizes, window_size=mask.window)
        return out_THd


def _lens(index: PrefillMetadata) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return index.query_lens, index.key_lens
