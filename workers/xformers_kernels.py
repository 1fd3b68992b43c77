"""The CUDA branch: xformers' memory-efficient attention with block-diagonal masks.

The masks are built on any machine (and tested on CPU against the reference's); the
kernels behind them need CUDA.
"""

from typing import Any

from torch import Tensor
from xformers.ops import memory_efficient_attention
from xformers.ops.fmha.attn_bias import (
    BlockDiagonalCausalFromBottomRightMask,
    BlockDiagonalCausalLocalAttentionFromBottomRightMask,
    BlockDiagonalCausalWithOffsetPaddedKeysMask,
)

from tramontane.workers.step_index import DecodeGroup, PrefillIndex

# BlockDiagonalCausal[LocalAttention]FromBottomRightMask, as the layer has a window or not
PrefillMask = Any


class XformersKernels:
    def prefill_bias(self, index: PrefillIndex) -> PrefillMask:
        lens = {"q_seqlen": list(index.query_lens), "kv_seqlen": list(index.key_lens)}
        device = index.cached_rows.device
        causal = BlockDiagonalCausalFromBottomRightMask.from_seqlens(**lens, device=device)
        if index.window is None:
            return causal
        return BlockDiagonalCausalLocalAttentionFromBottomRightMask(
            q_seqinfo=causal.q_seqinfo, k_seqinfo=causal.k_seqinfo, _window_size=index.window
        )

    def prefill(self, q_THd: Tensor, k_SGd: Tensor, v_SGd: Tensor, bias: PrefillMask) -> Tensor:
        return _attend(q_THd, k_SGd, v_SGd, bias)

    def decode_bias(self, group: DecodeGroup) -> BlockDiagonalCausalWithOffsetPaddedKeysMask:
        batch, longest = group.key_rows.shape
        return BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
            q_seqlen=[1] * batch, kv_padding=longest, kv_seqlen=group.key_lens.tolist(), device=group.key_lens.device
        )

    def decode(self, q_BHd: Tensor, k_BLGd: Tensor, v_BLGd: Tensor, bias: BlockDiagonalCausalWithOffsetPaddedKeysMask) -> Tensor:
        return _attend(q_BHd, k_BLGd.flatten(0, 1), v_BLGd.flatten(0, 1), bias)


def _attend(q_THd: Tensor, k_SGd: Tensor, v_SGd: Tensor, bias: Any) -> Tensor:  # noqa: ANN401
    """xformers' grouped-query form: [1, T, G, H/G, d] against keys expanded, not copied, over H/G."""
    tokens, heads, head_dim = q_THd.shape
    kv_heads = k_SGd.shape[1]
    q = q_THd.view(1, tokens, kv_heads, heads // kv_heads, head_dim)
    k, v = (x[None, :, :, None, :].expand(-1, -1, -1, heads // kv_heads, -1) for x in (k_SGd, v_SGd))
    out: Tensor = memory_efficient_attention(q, k, v, attn_bias=bias)
    return out.reshape(tokens, heads, head_dim)
