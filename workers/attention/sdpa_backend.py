"""Attention by PyTorch's scaled_dot_product_attention, on any device. The keys of single tokens are
gathered first.

Shape letters: T tokens, B single tokens, S keys of a packed row, L keys per single token, N pages
of a table of P rows, H query heads, G key/value heads, d head_dim.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tramontane.workers.attention.backend import AttentionKernels, DecodeKernel, causal_window_mask
from tramontane.workers.attention.metadata import DecodeMetadata, PrefillMetadata, num_cached_keys
from tramontane.workers.attention.rolling_cache import LayerCache, page_table
from tramontane.workers.device.cuda import tensor_on

SHORT_KEYS = 256  # padding up to this number of keys does not matter
MAX_BUCKET_KEYS = 2**15
MIN_BLOCK_QUERIES = 64  # of a chunk that is longer than its window


# ---- prefill


@dataclass(frozen=True, slots=True)
class MaskBlock:
    """Queries and keys of one sequence inside packed rows; ``mask`` is None where plain causal
    attention suffices.
    """

    queries: slice
    keys: slice
    mask: Tensor | None


class SdpaPrefill:
    """Prefill kernel that attends sequence by sequence, and in a chunk that is longer than its
    window block by block.

    Equals ``BlockDiagonalMask.make_causal_from_bottomright`` of xformers, with a window
    ``make_local_attention_from_bottomright``.
    """

    def build_mask(self, index: PrefillMetadata) -> list[MaskBlock]:
        """Build one block per chunk, or several that skip keys which no query of the block sees."""
        blocks, query, key = [], 0, 0
        for num_queries, num_keys in zip(index.query_lens, index.key_lens, strict=True):
            for queries, keys in split_by_window(num_queries, num_keys, index.window):
                num_rows, num_columns = queries.stop - queries.start, keys.stop - keys.start
                is_causal = num_rows == num_columns and (
                    index.window is None or num_columns <= index.window
                )
                mask = (
                    None
                    if is_causal
                    else causal_window_mask(
                        num_rows, num_columns, index.window, index.cached_rows.device
                    )
                )
                blocks.append(MaskBlock(_shifted(queries, query), _shifted(keys, key), mask))
            query, key = query + num_queries, key + num_keys
        return blocks

    def attend(self, q_THd: Tensor, k_SGd: Tensor, v_SGd: Tensor, mask: list[MaskBlock]) -> Tensor:
        """Compute the output [T, H, d]."""
        outs = []
        for block in mask:
            q, k, v = (
                x.transpose(0, 1)[None]
                for x in (q_THd[block.queries], k_SGd[block.keys], v_SGd[block.keys])
            )
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=block.mask, is_causal=block.mask is None, enable_gqa=True
            )
            outs.append(out[0].transpose(0, 1))
        return torch.cat(outs)


def split_by_window(
    num_queries: int, num_keys: int, window: int | None
) -> list[tuple[slice, slice]]:
    """Return blocks of queries and the keys that they see: a block has as many queries as the
    window, and at most twice as many keys.

    200 queries after 50 earlier keys, W = 100. The first 100 queries are at keys 50 to 149 and see
    keys 0 to 149, the others at 150 to 249 see 51 to 249: [(0:100, 0:150), (100:200, 51:250)].
    """
    if window is None or num_queries <= window:
        return [(slice(0, num_queries), slice(0, num_keys))]
    size, shift = max(window, MIN_BLOCK_QUERIES), num_keys - num_queries
    ends = [min(begin + size, num_queries) for begin in range(0, num_queries, size)]
    return [
        (slice(begin, end), slice(max(0, shift + begin - window + 1), shift + end))
        for begin, end in zip([0, *ends[:-1]], ends, strict=True)
    ]


def _shifted(positions: slice, by: int) -> slice:
    return slice(positions.start + by, positions.stop + by)


# ---- single tokens


@dataclass(frozen=True, slots=True)
class GatheredKeys:
    """Cache rows [B, L] to gather, and the mask [B, 1, 1, L] of the rows that each token sees."""

    rows_BL: Tensor
    mask: Tensor


def attend_gathered(q_BHd: Tensor, cached: LayerCache, keys: GatheredKeys) -> Tensor:
    """Gather keys and values and attend to them. The query heads of a group become its queries, so
    that no keys are repeated.
    """
    batch, heads, head_dim = q_BHd.shape
    k_BLGd, v_BLGd = cached.read(keys.rows_BL)
    q = q_BHd.view(batch, k_BLGd.shape[2], -1, head_dim)
    out = F.scaled_dot_product_attention(
        q, k_BLGd.transpose(1, 2), v_BLGd.transpose(1, 2), attn_mask=keys.mask
    )
    return out.reshape(batch, heads, head_dim)


@dataclass(frozen=True, slots=True)
class LengthBucket:
    """B single tokens with similar numbers of keys, up to L each: their indices [B] among the
    micro-batch's single tokens.

    The rows of ``keys`` are in position order. Rows past a token's last key repeat the token's own
    row.
    """

    tokens: Tensor
    keys: GatheredKeys


class GatheredDecode:
    """Decode kernel for CPUs: tokens are padded to the longest of their bucket, so buckets have
    similar lengths.
    """

    def build_mask(self, index: DecodeMetadata) -> list[LengthBucket]:
        """Build the buckets."""
        return bucket_decodes(index)

    def attend(self, q_BHd: Tensor, cached: LayerCache, mask: list[LengthBucket]) -> Tensor:
        """Compute the output [B, H, d]."""
        if len(mask) == 1:  # the bucket has all tokens in their order
            return attend_gathered(q_BHd, cached, mask[0].keys)
        out_BHd = torch.empty_like(q_BHd)
        for bucket in mask:
            out_BHd[bucket.tokens] = attend_gathered(q_BHd[bucket.tokens], cached, bucket.keys)
        return out_BHd


def bucket_decodes(index: DecodeMetadata) -> list[LengthBucket]:
    """Put every single token of a micro-batch into one bucket. A single bucket keeps their
    order.
    """
    ring, device = index.ring, index.positions.device
    key_lens = [1 + num_cached_keys(start, ring.window) for start in index.starts]
    buckets = []
    for members in group_by_length(key_lens):
        tokens = tensor_on(members, torch.int64, device)
        own_B, lens_B = (
            index.positions[tokens],
            tensor_on([key_lens[i] for i in members], torch.int64, device),
        )
        offsets_L = torch.arange(max(key_lens[i] for i in members), device=device)
        oldest_B = own_B - lens_B + 1
        key_positions_BL = torch.minimum(oldest_B[:, None] + offsets_L, own_B[:, None])
        rows_BL = ring.rows(tokens[:, None], key_positions_BL)
        buckets.append(
            LengthBucket(
                tokens, GatheredKeys(rows_BL, (offsets_L < lens_B[:, None])[:, None, None, :])
            )
        )
    return buckets


def group_by_length(lens: list[int]) -> list[list[int]]:
    """Return the members of each bucket: [300, 9000, 7, 310] -> [[2], [0, 3], [1]].

    Padding to the longest of a bucket at most doubles a length above 256, and no bucket of several
    gathers more than 32,768 keys.
    """
    groups: list[list[int]] = []
    for i in sorted(range(len(lens)), key=lens.__getitem__):
        limit = max(2 * lens[groups[-1][0]], SHORT_KEYS) if groups else 0
        if groups and lens[i] <= limit and (len(groups[-1]) + 1) * lens[i] <= MAX_BUCKET_KEYS:
            groups[-1].append(i)
        else:
            groups.append([i])
    return [list(range(len(lens)))] if len(groups) == 1 else groups


class PagedDecode:
    """Decode kernel that gathers as many rows as the page tables have: the reference for kernels
    that read pages in place.

    Its operations depend on shapes only, so a CUDA graph can capture it.
    """

    def build_mask(self, index: DecodeMetadata) -> GatheredKeys:
        """Build the rows of the page tables, and the mask of the rows that each token sees.

        Unseen rows are replaced by the token's own row. Other rows of its pages, and entries past
        them, may hold data of another sequence; masked values are multiplied by 0, which leaves NaN
        and infinity as NaN.
        """
        table, page_size = (
            page_table(index.ring, index.positions, index.num_pages),
            index.ring.page_size,
        )
        rows_P = torch.arange(page_size, device=index.positions.device)
        rows_BL = (table.pages_BN.long()[:, :, None] * page_size + rows_P).flatten(1)
        keys_L = torch.arange(rows_BL.shape[1], device=index.positions.device)
        seen_BL = (keys_L >= table.first_B[:, None]) & (keys_L < table.end_B[:, None])
        rows_BL = torch.where(seen_BL, rows_BL, index.write_rows[:, None])
        return GatheredKeys(rows_BL, seen_BL[:, None, None, :])

    def attend(self, q_BHd: Tensor, cached: LayerCache, mask: GatheredKeys) -> Tensor:
        """Compute the output [B, H, d]."""
        return attend_gathered(q_BHd, cached, mask)


@dataclass(frozen=True, slots=True)
class BatchSizeDispatch:
    """Decode kernel that chooses a kernel by the number of single tokens: the first kernel for up
    to ``limits[0]`` tokens, and so on; the last kernel for all larger numbers.

    Limits 2 and 8: the first kernel computes 1 or 2 tokens, the second 3 to 8, the third 9 or more.
    """

    kernels: tuple[DecodeKernel, ...]
    limits: tuple[int, ...]

    @property
    def finds_pages(self) -> bool:
        """Whether all kernels find pages themselves, without a page table."""
        return all(getattr(kernel, "finds_pages", False) for kernel in self.kernels)

    def build_mask(self, index: DecodeMetadata) -> Any:
        """Build the mask of the kernel for this number of tokens."""
        return self._for(len(index.slots)).build_mask(index)

    def attend(self, q_BHd: Tensor, cached: LayerCache, mask: Any) -> Tensor:
        """Compute the output [B, H, d]."""
        return self._for(len(q_BHd)).attend(q_BHd, cached, mask)

    def _for(self, num_tokens: int) -> DecodeKernel:
        return self.kernels[bisect_left(self.limits, num_tokens)]


def cpu_kernels() -> AttentionKernels:
    """Return the kernels for CPUs."""
    return AttentionKernels(SdpaPrefill(), GatheredDecode())
