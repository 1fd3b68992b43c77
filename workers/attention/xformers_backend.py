"""Attention of prompts on CUDA: xformers' memory-efficient attention, with block-diagonal masks
over packed prompts.

Masks can be built on any machine, and are tested on the CPU; the kernels that use them need CUDA.

Shape letters: T tokens, S keys of a packed row, H query heads, G key/value heads, d head_dim.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from xformers.ops import memory_efficient_attention_forward
from xformers.ops.fmha import common, cutlass, flash, flash3
from xformers.ops.fmha.attn_bias import BlockDiagonalMask

from tramontane.workers.attention.metadata import PrefillMetadata

# BlockDiagonalCausalFromBottomRightMask, or BlockDiagonalCausalLocalAttentionFromBottomRightMask
PrefillMask = Any
Operator = Any  # one of xformers' attention operator classes


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
    """Return all kernels of xformers for packed prompts; ``autotune`` finds the usable ones."""
    return {
        "flash 3": PackedPrefill(flash3.FwOp),
        "flash 2": PackedPrefill(flash.FwOp),
        "cutlass": PackedPrefill(cutlass.FwOp),
    }
