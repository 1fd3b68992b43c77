"""Attention over the rolling cache: its mask, the protocols of kernels, and their use for one
micro-batch.

Shape letters: T tokens, B single tokens, S keys of a packed row, H query heads, G key/value heads,
d head_dim. Sparse attention: n tokens and S keys of one sequence, K chosen keys, N rows of a cache,
I heads of an indexer, i width of its queries and keys.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tramontane.workers.attention.metadata import AttentionMetadata, DecodeMetadata, PrefillMetadata
from tramontane.workers.attention.quantized_rows import FP8, RowScales
from tramontane.workers.attention.rolling_cache import LayerCache, PageRings, RollingCache


def causal_window_mask(
    num_queries: int, num_keys: int, window: int | None, device: torch.device | None = None
) -> Tensor:
    """Return a boolean mask [queries, keys]: causal from the bottom-right corner, within the
    window.

    Equals the mask of xformers' ``LowerTriangularFromBottomRightMask``, with a window of its
    ``make_local_attention``. 2 queries, 4 keys, W = 3: the queries are at keys 2 and 3, so the
    first sees keys 0..2 and the second 1..3: [[1, 1, 1, 0], [0, 1, 1, 1]].
    """
    query_positions = torch.arange(num_keys - num_queries, num_keys, device=device)
    distance = query_positions[:, None] - torch.arange(num_keys, device=device)[None, :]
    causal = distance >= 0
    return causal if window is None else causal & (distance < window)


class PrefillKernel(Protocol):
    """Attention of packed queries to the keys of their chunks."""

    def build_mask(self, index: PrefillMetadata) -> Any:  # each kernel has its own mask type
        """Build the mask for ``attend``, once per step and window class."""

    def attend(self, q_THd: Tensor, k_SGd: Tensor, v_SGd: Tensor, mask: Any) -> Tensor:
        """Compute the output [T, H, d] of one layer. With latent attention d may be the width of
        the values only.
        """


class PagedPrefillKernel(Protocol):
    """A ``PrefillKernel`` that also reads cached keys in place, with a mask built from an index
    with pages.
    """

    def attend_pages(
        self, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, cached: LayerCache, mask: Any
    ) -> Tensor:
        """Compute the output [T, H, d] of one layer from the chunks' own keys and the earlier keys
        in the cache.
        """


class Fp8PrefillKernel(Protocol):
    """A ``PrefillKernel`` that also takes keys and values in FP8."""

    def attend_fp8(self, q_THd: Tensor, keys: LayerCache, mask: Any) -> Tensor:
        """Compute the output [T, H, d] of one layer; ``keys``: keys and values of a packed row."""


class DecodeKernel(Protocol):
    """Attention of single tokens to the keys of their sequences in the cache."""

    def build_mask(self, index: DecodeMetadata) -> Any:
        """Build the mask for ``attend``, once per step and window class."""

    def attend(self, q_BHd: Tensor, cached: LayerCache, mask: Any) -> Tensor:
        """Compute the output [B, H, d] of one layer. With latent attention d may be the width of
        the values only.
        """


@dataclass(frozen=True, slots=True)
class ChosenKeys:
    """Cache rows [T, K] (int32) that each token attends to: the first ``counts_T`` of its row, in
    the order of positions.
    """

    rows_TK: Tensor
    counts_T: Tensor


class SparseKernels(Protocol):
    """The scores of an indexer, and attention to chosen keys."""

    def score(self, q_nIi: Tensor, weights_nI: Tensor, keys_Ni: Tensor, rows_S: Tensor) -> Tensor:
        """Compute scores [n, S] in float32: the sums over heads of weight * relu(query key)."""

    def attend(self, q_THd: Tensor, cached: LayerCache, chosen: ChosenKeys) -> Tensor:
        """Compute the output [T, H, d] of one layer."""


# see ``LayerCache.write``
Write = Callable[[LayerCache, Tensor, Tensor, Tensor, Tensor | None], None]
Read = Callable[[LayerCache, Tensor], tuple[Tensor, Tensor]]  # of rows [C], see ``LayerCache.read``
# see ``LayerCache.read_back``
ReadBack = Callable[[LayerCache, Tensor, Tensor], tuple[Tensor, Tensor]]
CacheRows = Callable[[PageRings, Tensor, Tensor], Tensor]  # see ``PageRings.rows``
# Rotates queries and keys of single tokens, writes keys and values to cache rows [B], and returns
# the queries [B, Q, d]. Inputs: queries, keys and values [B, Q + 2 G, d], and cosines and sines [B,
# d].
RotateAndWrite = Callable[[LayerCache, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class AttentionKernels:
    """Kernels of a stage: one for chunks of several tokens, one for single tokens."""

    prefill: PrefillKernel
    decode: DecodeKernel
    # whether a token has the same bits with prefill and decode kernel, and in any batch
    is_batch_invariant: bool = False
    sparse: SparseKernels | None = None  # of models with sparse attention; None: PyTorch's
    paged_prefill: PagedPrefillKernel | None = None  # ``prefill``, if it reads pages in place
    # ``prefill``, if it reads an FP8 cache's keys without conversion
    fp8_prefill: Fp8PrefillKernel | None = None
    write: Write = LayerCache.write
    read: Read = LayerCache.read
    read_back: ReadBack = LayerCache.read_back
    cache_rows: CacheRows = PageRings.rows  # of single tokens in a CUDA graph
    rotate_and_write: RotateAndWrite | None = None  # None: layers rotate, and ``write`` writes

    @property
    def needs_page_tables(self) -> bool:
        """Whether decodes in a CUDA graph depend on the width of a page table; not if the kernel
        finds pages itself.
        """
        return not getattr(self.decode, "finds_pages", False)

    @property
    def reads_pages(self) -> bool:
        """Whether chunks' keys are read from their pages, see ``build_attention_metadata``."""
        return self.paged_prefill is not None


class CachedAttention:
    """The ``AttentionFn`` of one micro-batch: it reads and writes the rolling cache around the
    kernels.
    """

    def __init__(
        self, cache: RollingCache, index: AttentionMetadata, kernels: AttentionKernels
    ) -> None:
        self.cache, self.index, self.kernels = cache, index, kernels
        self.prefill_masks = [p and kernels.prefill.build_mask(p) for p in index.prefill]
        self.decode_masks = [d and kernels.decode.build_mask(d) for d in index.decode]
        pairs = zip(index.prefill, index.decode, strict=True)
        self._written = [
            _writes(prefill, decode, index.num_prefill_tokens) for prefill, decode in pairs
        ]

    def __call__(
        self,
        layer: int,
        q_THd: Tensor,
        k_TGd: Tensor | None,
        v_TGd: Tensor | None,
        index: object = None,
        /,
    ) -> Tensor:
        """Attend to the cache and the row's own keys in one layer, and write the keys and values to
        keep; [T, H, d].

        Chunks attend, then all tokens are written at once, then single tokens attend: their own
        keys are in the cache by then. With latent attention the output is in the first elements of
        d; the remaining elements are undefined.
        """
        assert index is None
        assert k_TGd is not None
        assert v_TGd is not None
        outs = self._attend(layer, q_THd, k_TGd, v_TGd)
        if len(outs) == 1:
            return outs[0]
        # with latent attention some kernels return the width of the values only
        width = min(out.shape[2] for out in outs)
        return torch.cat([out[..., :width] for out in outs])

    def into(
        self, out_THc: Tensor, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor
    ) -> None:
        """Write the result of a call to ``out_THc``, truncated to c elements per head."""
        width, start = out_THc.shape[2], 0
        for out in self._attend(layer, q_THd, k_TGd, v_TGd):
            out_THc[start : start + len(out)] = out[..., :width]
            start += len(out)

    def _attend(self, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor) -> list[Tensor]:
        """Return attended values of the chunks and of the single tokens, where there are any."""
        split, window_class, outs = self.index.num_prefill_tokens, self.cache.class_of[layer], []
        if (prefill := self.index.prefill[window_class]) is not None:
            outs.append(self._prefill(layer, prefill, q_THd[:split], k_TGd[:split], v_TGd[:split]))
        rows_W, tokens_W = self._written[window_class]
        self.kernels.write(self.cache.layers[layer], rows_W, k_TGd, v_TGd, tokens_W)
        if self.index.decode[window_class] is not None:
            outs.append(self.attend_cached(layer, q_THd[split:]))
        return outs

    def rotate_and_write(
        self, layer: int, qkv_BHd: Tensor, cos_Bd: Tensor, sin_Bd: Tensor
    ) -> Tensor | None:
        """Write the row's keys and values and return its queries [B, Q, d], rotated, if one kernel
        does all of that.

        None in a micro-batch with chunks of several tokens, whose own keys are needed.
        """
        decode, kernel = (
            self.index.decode[self.cache.class_of[layer]],
            self.kernels.rotate_and_write,
        )
        if kernel is None or self.index.num_prefill_tokens or decode is None:
            return None
        return kernel(self.cache.layers[layer], decode.write_rows, qkv_BHd, cos_Bd, sin_Bd)

    def attend_cached(self, layer: int, q_BQd: Tensor) -> Tensor:
        """Attend to the cache after ``rotate_and_write``; [B, Q, d]."""
        return self.kernels.decode.attend(
            q_BQd, self.cache.layers[layer], self.decode_masks[self.cache.class_of[layer]]
        )

    def _prefill(
        self, layer: int, index: PrefillMetadata, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor
    ) -> Tensor:
        """Attend to cached keys and the chunks' own keys before these are written: a chunk may be
        longer than its window.

        A chunk's own keys are attended to as they will be read from the cache, so that the result
        does not depend on the division of a prompt into chunks.
        """
        cached, mask, kernels = (
            self.cache.layers[layer],
            self.prefill_masks[self.cache.class_of[layer]],
            self.kernels,
        )
        if cached.scales is not None and kernels.fp8_prefill is not None:
            return kernels.fp8_prefill.attend_fp8(
                q_THd, _all_in_fp8(index, cached, cached.quantized(k_TGd, v_TGd)), mask
            )
        own = kernels.read_back(cached, k_TGd, v_TGd)
        if index.pages_CN is not None and kernels.paged_prefill is not None:
            return kernels.paged_prefill.attend_pages(q_THd, *own, cached, mask)
        return kernels.prefill.attend(q_THd, *_all_keys(index, cached, *own, kernels.read), mask)


def _writes(
    prefill: PrefillMetadata | None, decode: DecodeMetadata | None, num_prefill: int
) -> tuple[Tensor, Tensor | None]:
    """Return the cache rows that a micro-batch writes, and the tokens of its row to write; None for
    all tokens in order.

    A chunk of 3 tokens of which the last two stay, in rows 16 and 17, and single tokens for rows 5
    and 40: rows 16, 17, 5 and 40, tokens 1, 2, 3 and 4.
    """
    if prefill is None:
        assert decode is not None
        return decode.write_rows, None
    if decode is None:
        return prefill.write_rows, prefill.written
    ones_B = torch.arange(
        num_prefill, num_prefill + len(decode.write_rows), device=decode.write_rows.device
    )
    return torch.cat([prefill.write_rows, decode.write_rows]), torch.cat([prefill.written, ones_B])


def _all_keys(
    index: PrefillMetadata,
    cached: LayerCache,
    k_TGd: Tensor,
    v_TGd: Tensor,
    read: Read = LayerCache.read,
) -> tuple[Tensor, Tensor]:
    """Return the keys and values [S, G, d] of all chunks: for each chunk the cached keys that it
    sees, then its own.
    """
    if not len(index.cached_rows):
        return k_TGd, v_TGd
    k_CGd, v_CGd = read(cached, index.cached_rows)
    k_SGd = torch.cat((k_CGd, k_TGd))[index.key_order]
    return k_SGd, k_SGd if cached.values_are_keys else torch.cat((v_CGd, v_TGd))[index.key_order]


def _all_in_fp8(index: PrefillMetadata, cached: LayerCache, own: LayerCache) -> LayerCache:
    """Return the keys and values of ``_all_keys``, in FP8."""
    if not len(index.cached_rows):
        return own
    earlier, order = cached.take(index.cached_rows), index.key_order
    assert earlier.scales is not None
    assert own.scales is not None

    def together(earlier: Tensor, own: Tensor) -> Tensor:
        return torch.cat((earlier, own))[order]

    k_SGd, v_SGd = (
        # PyTorch gathers bytes, not FP8
        together(*(each.view(torch.uint8) for each in pair)).view(FP8)
        for pair in ((earlier.k_NGd, own.k_NGd), (earlier.v_NGd, own.v_NGd))
    )
    k_SG, v_SG = (
        together(earlier.scales.k_NG, own.scales.k_NG),
        together(earlier.scales.v_NG, own.scales.v_NG),
    )
    return LayerCache(k_SGd, v_SGd, RowScales(k_SG, v_SG, own.scales.dtype))
