"""Attention over the rolling cache: a plain reference, and the kernels that must agree with it.

Shape letters: T tokens, B single tokens, S keys of a packed row, L keys per single
token, H query heads, G key/value heads, d head_dim.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from tramontane.workers.rolling_cache import RollingCache
from tramontane.workers.step_index import DecodeGroup, DecodeIndex, PrefillIndex, StepIndex


def visible_keys(num_queries: int, num_keys: int, window: int | None) -> Tensor:
    """Boolean [queries, keys]: causal from the bottom-right corner, within the window.

    2 queries, 4 keys, W = 3: the queries stand at keys 2 and 3, so the first sees keys
    0..2 and the second 1..3: [[1, 1, 1, 0], [0, 1, 1, 1]].
    """
    distance = torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)[None, :]
    causal = distance >= 0
    return causal if window is None else causal & (distance < window)


def reference_attention(q_THd: Tensor, k_SGd: Tensor, v_SGd: Tensor, window: int | None) -> Tensor:
    """One sequence, its T last positions against all S: softmax(q k / sqrt(d)) v, masked. Returns THd."""
    groups = q_THd.shape[1] // k_SGd.shape[1]
    k_SHd, v_SHd = (x.repeat_interleave(groups, dim=1) for x in (k_SGd, v_SGd))
    scores_HTS = torch.einsum("thd,shd->hts", q_THd.float(), k_SHd.float()) * q_THd.shape[-1] ** -0.5
    mask = visible_keys(q_THd.shape[0], k_SGd.shape[0], window).to(q_THd.device)
    weights_HTS = scores_HTS.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", weights_HTS, v_SHd.float()).to(q_THd.dtype)


class Kernels(Protocol):
    """How a device attends. ``*_bias`` is called once per step and window class (or group), the others per layer."""

    def prefill_bias(self, index: PrefillIndex) -> Any: ...  # noqa: ANN401 - each kernel has its own mask type
    def prefill(self, q_THd: Tensor, k_SGd: Tensor, v_SGd: Tensor, bias: Any) -> Tensor: ...  # noqa: ANN401
    def decode_bias(self, group: DecodeGroup) -> Any: ...  # noqa: ANN401
    def decode(self, q_BHd: Tensor, k_BLGd: Tensor, v_BLGd: Tensor, bias: Any) -> Tensor: ...  # noqa: ANN401


@dataclass(frozen=True, slots=True)
class Block:
    """One sequence's queries and keys inside packed rows; no mask where plain causal will do."""

    queries: slice
    keys: slice
    mask: Tensor | None


class SdpaKernels:
    """PyTorch's scaled_dot_product_attention, block by block; runs anywhere."""

    def prefill_bias(self, index: PrefillIndex) -> list[Block]:
        blocks, query, key = [], 0, 0
        for num_queries, num_keys in zip(index.query_lens, index.key_lens, strict=True):
            plain = num_queries == num_keys and (index.window is None or num_keys <= index.window)
            mask = None if plain else visible_keys(num_queries, num_keys, index.window).to(index.cached_rows.device)
            blocks.append(Block(slice(query, query + num_queries), slice(key, key + num_keys), mask))
            query, key = query + num_queries, key + num_keys
        return blocks

    def prefill(self, q_THd: Tensor, k_SGd: Tensor, v_SGd: Tensor, bias: list[Block]) -> Tensor:
        outs = []
        for block in bias:
            q, k, v = (x.transpose(0, 1)[None] for x in (q_THd[block.queries], k_SGd[block.keys], v_SGd[block.keys]))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=block.mask, is_causal=block.mask is None, enable_gqa=True)
            outs.append(out[0].transpose(0, 1))
        return torch.cat(outs)

    def decode_bias(self, group: DecodeGroup) -> Tensor:
        keys = torch.arange(group.key_rows.shape[1], device=group.key_lens.device)
        return (keys[None, :] < group.key_lens[:, None])[:, None, None, :]

    def decode(self, q_BHd: Tensor, k_BLGd: Tensor, v_BLGd: Tensor, bias: Tensor) -> Tensor:
        """Query heads that share a key head become that head's queries, so that nothing is repeated."""
        batch, heads, head_dim = q_BHd.shape
        q = q_BHd.view(batch, k_BLGd.shape[2], -1, head_dim)
        out = F.scaled_dot_product_attention(q, k_BLGd.transpose(1, 2), v_BLGd.transpose(1, 2), attn_mask=bias)
        return out.reshape(batch, heads, head_dim)


class CachedAttention:
    """The ``Attend`` of one micro-batch: reads and writes the rolling cache around the kernels."""

    def __init__(self, cache: RollingCache, index: StepIndex, kernels: Kernels) -> None:
        self.cache, self.index, self.kernels = cache, index, kernels
        self.prefill_bias = [p and kernels.prefill_bias(p) for p in index.prefill]
        self.decode_biases = [[kernels.decode_bias(group) for group in d.groups] if d else [] for d in index.decode]

    def __call__(self, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor) -> Tensor:
        split, window_class = self.index.num_prefill_tokens, self.cache.class_of[layer]
        outs = []
        if (prefill := self.index.prefill[window_class]) is not None:
            outs.append(self._prefill(layer, prefill, q_THd[:split], k_TGd[:split], v_TGd[:split]))
        if (decode := self.index.decode[window_class]) is not None:
            outs.append(self._decode(layer, decode, q_THd[split:], k_TGd[split:], v_TGd[split:]))
        return torch.cat(outs) if len(outs) > 1 else outs[0]

    def _prefill(self, layer: int, index: PrefillIndex, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor) -> Tensor:
        """Unrotate, attend, then write: the chunk may be longer than what the cache keeps."""
        cached = self.cache.layers[layer]
        k_SGd, v_SGd = k_TGd, v_TGd
        if len(index.cached_rows):
            k_CGd, v_CGd = cached.read(index.cached_rows)
            k_SGd, v_SGd = torch.cat((k_CGd, k_TGd))[index.key_order], torch.cat((v_CGd, v_TGd))[index.key_order]
        out_THd = self.kernels.prefill(q_THd, k_SGd, v_SGd, self.prefill_bias[self.cache.class_of[layer]])
        cached.write(index.write_rows, k_TGd[index.written], v_TGd[index.written])
        return out_THd

    def _decode(self, layer: int, index: DecodeIndex, q_BHd: Tensor, k_BGd: Tensor, v_BGd: Tensor) -> Tensor:
        """Write, then attend: the token's own key is in the cache like any other."""
        cached = self.cache.layers[layer]
        cached.write(index.write_rows, k_BGd, v_BGd)
        biases = self.decode_biases[self.cache.class_of[layer]]
        if len(index.groups) == 1:  # all of them, in their order
            return self.kernels.decode(q_BHd, *cached.read(index.groups[0].key_rows), biases[0])
        out_BHd = torch.empty_like(q_BHd)
        for group, bias in zip(index.groups, biases, strict=True):
            out_BHd[group.tokens] = self.kernels.decode(q_BHd[group.tokens], *cached.read(group.key_rows), bias)
        return out_BHd
