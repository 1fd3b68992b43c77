"""Single tokens whose keys are gathered: in groups of similar lengths, since all are padded to the longest.

PyTorch's scaled_dot_product_attention over the rolling cache: runs anywhere.

Shape letters: T tokens, B single tokens, S keys of a packed row, L keys per single token, N pages of a table of P rows,
H query heads, G key/value heads, d head_dim.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tramontane.workers.attention.backend import AttentionKernels, DecodeKernel, causal_window_mask
from tramontane.workers.attention.metadata import DecodeMetadata, PrefillMetadata, num_cached_keys
from tramontane.workers.attention.page_table import page_table
from tramontane.workers.attention.rolling_cache import LayerCache
from tramontane.workers.device.pinned_memory import tensor_on

SHORT = 256
MAX_GROUP_KEYS = 2**15


@dataclass(frozen=True, slots=True)
class LengthBucket:
    """B of the single tokens, with up to L keys each.

    ``tokens`` [B] counts among the single tokens. ``key_rows`` [B, L] in position order;
    entries past ``key_lens`` [B] repeat the token's own row.
    """

    tokens: Tensor
    key_rows: Tensor
    key_lens: Tensor


def bucket_decodes(index: DecodeMetadata) -> list[LengthBucket]:
    """All tokens of a micro-batch, each in one group; in their order if there is one group."""
    ring, device = index.ring, index.positions.device
    key_lens = [1 + num_cached_keys(start, ring.window) for start in index.starts]
    groups = []
    for members in group_by_length(key_lens):
        tokens = tensor_on(members, torch.int64, device)
        own_B, lens_B = index.positions[tokens], tensor_on([key_lens[i] for i in members], torch.int64, device)
        offsets_L = torch.arange(max(key_lens[i] for i in members), device=device)
        oldest_B = own_B - lens_B + 1
        key_positions_BL = torch.minimum(oldest_B[:, None] + offsets_L, own_B[:, None])
        groups.append(LengthBucket(tokens, ring.rows(index.slots[tokens][:, None], key_positions_BL), lens_B))
    return groups


def group_by_length(lens: list[int]) -> list[list[int]]:
    """Members of each group, so that padding to the group's longest at most doubles it (below 256 it does not matter)
    and no group of several gathers more than 32,768 keys. [300, 9000, 7, 310] -> [[2], [0, 3], [1]]
    """
    groups: list[list[int]] = []
    for i in sorted(range(len(lens)), key=lens.__getitem__):
        limit = max(2 * lens[groups[-1][0]], SHORT) if groups else 0
        if groups and lens[i] <= limit and (len(groups[-1]) + 1) * lens[i] <= MAX_GROUP_KEYS:
            groups[-1].append(i)
        else:
            groups.append([i])
    return [list(range(len(lens)))] if len(groups) == 1 else groups


@dataclass(frozen=True, slots=True)
class MaskBlock:
    """One sequence's queries and keys inside packed rows; no mask where plain causal will do."""

    queries: slice
    keys: slice
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class GatheredKeys:
    """``rows_BL`` of the cache, and which of them each token sees, [B, 1, 1, L]."""

    rows_BL: Tensor
    mask: Tensor


class SdpaPrefill:
    """Block by block."""

    def build_mask(self, index: PrefillMetadata) -> list[MaskBlock]:
        blocks, query, key = [], 0, 0
        for num_queries, num_keys in zip(index.query_lens, index.key_lens, strict=True):
            plain = num_queries == num_keys and (index.window is None or num_keys <= index.window)
            mask = None if plain else causal_window_mask(num_queries, num_keys, index.window, index.cached_rows.device)
            blocks.append(MaskBlock(slice(query, query + num_queries), slice(key, key + num_keys), mask))
            query, key = query + num_queries, key + num_keys
        return blocks

    def attend(self, q_THd: Tensor, k_SGd: Tensor, v_SGd: Tensor, mask: list[MaskBlock]) -> Tensor:
        outs = []
        for block in mask:
            q, k, v = (x.transpose(0, 1)[None] for x in (q_THd[block.queries], k_SGd[block.keys], v_SGd[block.keys]))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=block.mask, is_causal=block.mask is None, enable_gqa=True)
            outs.append(out[0].transpose(0, 1))
        return torch.cat(outs)


class GatheredDecode:
    """Single tokens in groups of similar lengths, so that little is gathered for nothing: for CPUs."""

    def build_mask(self, index: DecodeMetadata) -> list[tuple[LengthBucket, GatheredKeys]]:
        return [(group, GatheredKeys(group.key_rows, _first_keys(group))) for group in bucket_decodes(index)]

    def attend(self, q_BHd: Tensor, cached: LayerCache, mask: list[tuple[LengthBucket, GatheredKeys]]) -> Tensor:
        if len(mask) == 1:  # all of them, in their order
            return attend_gathered(q_BHd, cached, mask[0][1])
        out_BHd = torch.empty_like(q_BHd)
        for group, keys in mask:
            out_BHd[group.tokens] = attend_gathered(q_BHd[group.tokens], cached, keys)
        return out_BHd


class PagedDecode:
    """Single tokens by page tables, every row of which is gathered: the plain form of what kernels do that read pages where they
    lie. Shapes are all it depends on.
    """

    def build_mask(self, index: DecodeMetadata) -> GatheredKeys:
        table, page_size = page_table(index.ring, index.slots, index.positions, index.num_pages), index.ring.page_size
        rows_P = torch.arange(page_size, device=index.positions.device)
        rows_BL = (table.pages_BN.long()[:, :, None] * page_size + rows_P).flatten(1)
        keys_L = torch.arange(rows_BL.shape[1], device=index.positions.device)
        seen_BL = (keys_L >= table.first_B[:, None]) & (keys_L < table.end_B[:, None])
        return GatheredKeys(rows_BL, seen_BL[:, None, None, :])

    def attend(self, q_BHd: Tensor, cached: LayerCache, mask: GatheredKeys) -> Tensor:
        return attend_gathered(q_BHd, cached, mask)


@dataclass(frozen=True, slots=True)
class BatchSizeDispatch:
    """One kernel for up to ``max_few`` single tokens, and one for more."""

    few: DecodeKernel
    many: DecodeKernel
    max_few: int

    def build_mask(self, index: DecodeMetadata) -> Any:  # noqa: ANN401
        return self._for(len(index.slots)).build_mask(index)

    def attend(self, q_BHd: Tensor, cached: LayerCache, mask: Any) -> Tensor:  # noqa: ANN401
        return self._for(len(q_BHd)).attend(q_BHd, cached, mask)

    def _for(self, num_tokens: int) -> DecodeKernel:
        return self.few if num_tokens <= self.max_few else self.many


def cpu_kernels() -> AttentionKernels:
    """What CPUs use."""
    return AttentionKernels(SdpaPrefill(), GatheredDecode())


def attend_gathered(q_BHd: Tensor, cached: LayerCache, keys: GatheredKeys) -> Tensor:
    """Query heads that share a key head become that head's queries, so that nothing is repeated."""
    batch, heads, head_dim = q_BHd.shape
    k_BLGd, v_BLGd = cached.read(keys.rows_BL)
    q = q_BHd.view(batch, k_BLGd.shape[2], -1, head_dim)
    out = F.scaled_dot_product_attention(q, k_BLGd.transpose(1, 2), v_BLGd.transpose(1, 2), attn_mask=keys.mask)
    return out.reshape(batch, heads, head_dim)


def _first_keys(group: LengthBucket) -> Tensor:
    keys_L = torch.arange(group.key_rows.shape[1], device=group.key_lens.device)
    return (keys_L[None, :] < group.key_lens[:, None])[:, None, None, :]
