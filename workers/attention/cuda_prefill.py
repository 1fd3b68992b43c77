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
from xformers.ops import memory_efficient_attention_forward
from xformers.ops.fmha import common, cutlass, flash, flash3
from xformers.ops.fmha.attn_bias import BlockDiagonalMask

from tramontane.workers.attention.metadata import PrefillMetadata
from tramontane.workers.device.cuda import tensor_on

# Later versions of torch ask whether query heads share keys; the first one always lets them.
attend_packed: Callable[..., Any] = (
    partial(varlen_attn, enable_gqa=True)
    if "enable_gqa" in inspect.signature(varlen_attn).parameters
    else varlen_attn
)


@dataclass(frozen=True, slots=True)
class PackedLengths:
    """Where each chunk's queries and keys end, [C + 1] (int32), and the most of each."""

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


# Attention of prompts on CUDA: xformers' memory-efficient attention, with block-diagonal masks
# over packed prompts.
#
# Masks can be built on any machine, and are tested on the CPU; the kernels that use them need
# CUDA.
#
# Shape letters: T tokens, S keys of a packed row, H query heads, G key/value heads, d head_dim.

# BlockDiagonalCausalFromBottomRightMask, or BlockDiagonalCausalLocalAttentionFromBottomRightMask
PrefillMask = Any
Operator = Any  # one of xformers' classes that compute attention


def patch_built_with_cuda() -> None:
    """Make xformers accept its operators although its own CUDA extension is not loaded.

    The extension in the wheel of xformers 0.0.35 is for CUDA 12. Next to a torch for CUDA 13 it
    does not load, and xformers then refuses every operator on a GPU. Flash 2 and cutlass do not
    need it: they are torch's own. The other checks of an operator (dtypes, masks, the GPU's
    capability, whether torch has it) remain in force.
    """
    if torch.version.cuda is not None and getattr(common, "_built_with_cuda", True) is False:
        common._built_with_cuda = True


patch_built_with_cuda()


@dataclass(frozen=True, slots=True)
class PackedPrefill:
    """Prefill kernel for all chunks of a micro-batch at once."""

    operator: Operator

    def build_mask(self, index: PrefillMetadata) -> PrefillMask:
        """Build xformers' block-diagonal mask."""
        mask = BlockDiagonalMask.from_seqlens(
            index.query_lens, index.key_lens, device=index.cached_rows.device
        )
        if index.window is None:
            return mask.make_causal_from_bottomright()
        return mask.make_local_attention_from_bottomright(index.window)

    def attend(self, q_THd: Tensor, k_SGd: Tensor, v_SGd: Tensor, mask: PrefillMask) -> Tensor:
        """Compute the output [T, H, d]."""
        return attend(q_THd, k_SGd, v_SGd, mask, self.operator)


def attend(q_THd: Tensor, k_SGd: Tensor, v_SGd: Tensor, mask: Any, operator: Operator) -> Tensor:
    """Call xformers in its grouped-query form: [1, T, G, H/G, d] with keys expanded, not copied,
    over H/G.
    """
    tokens, heads, head_dim = q_THd.shape
    kv_heads = k_SGd.shape[1]
    q = q_THd.view(1, tokens, kv_heads, heads // kv_heads, head_dim)
    k, v = (
        x[None, :, :, None, :].expand(-1, -1, -1, heads // kv_heads, -1) for x in (k_SGd, v_SGd)
    )
    out: Tensor = memory_efficient_attention_forward(q, k, v, attn_bias=mask, op=operator)
    return out.reshape(tokens, heads, head_dim)


def prefill_kernels() -> dict[str, PackedPrefill]:
    """Return all kernels of xformers for packed prompts; ``autotune`` finds out which of them run
    here.
    """
    return {
        "flash 3": PackedPrefill(flash3.FwOp),
        "flash 2": PackedPrefill(flash.FwOp),
        "cutlass": PackedPrefill(cutlass.FwOp),
    }
