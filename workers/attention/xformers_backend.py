"""The CUDA branch: xformers' memory-efficient attention with block-diagonal masks over packed prompts, and over pages.

The masks are built on any machine (and tested on CPU against the reference's); the
kernels behind them need CUDA.

Shape letters: T tokens, B single tokens, S keys of a packed row, C rows of a cache, N pages of a table, H query heads,
G key/value heads, d head_dim.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from xformers.ops import memory_efficient_attention_forward
from xformers.ops.fmha import common, cutlass, flash, flash3, triton_splitk
from xformers.ops.fmha.attn_bias import (
    BlockDiagonalCausalFromBottomRightMask,
    BlockDiagonalCausalLocalAttentionFromBottomRightMask,
    PagedBlockDiagonalGappyKeysMask,
    _GappySeqInfo,
    _SeqLenInfo,
)

from tramontane.workers.attention.metadata import DecodeMetadata, PrefillMetadata
from tramontane.workers.attention.page_table import PageTable, next_power_of_two, page_table
from tramontane.workers.attention.rolling_cache import LayerCache

# BlockDiagonalCausal[LocalAttention]FromBottomRightMask, as the layer has a window or not
PrefillMask = Any
Operator = Any  # one of xformers' classes that compute attention


def patch_built_with_cuda() -> None:
    """The extension of xformers 0.0.35's wheel is for CUDA 12: beside a torch for CUDA 13 it does not load, and xformers then
    refuses every operator on a GPU. Of those below none needs it: split-K is a program of Triton, flash 2 and cutlass are torch's
    own. What else xformers asks of an operator (dtypes, masks, the GPU's capability, whether torch has it) it goes on asking.
    """
    if torch.version.cuda is not None and getattr(common, "_built_with_cuda", True) is False:
        common._built_with_cuda = True


patch_built_with_cuda()


@dataclass(frozen=True, slots=True)
class PackedPrefill:
    """All chunks of a micro-batch at once."""

    operator: Operator

    def build_mask(self, index: PrefillMetadata) -> PrefillMask:
        device = index.cached_rows.device
        queries, keys = (_SeqLenInfo.from_seqlens(lens, device=device) for lens in (index.query_lens, index.key_lens))
        if index.window is None:
            return BlockDiagonalCausalFromBottomRightMask(q_seqinfo=queries, k_seqinfo=keys)
        return BlockDiagonalCausalLocalAttentionFromBottomRightMask(q_seqinfo=queries, k_seqinfo=keys, _window_size=index.window)

    def attend(self, q_THd: Tensor, k_SGd: Tensor, v_SGd: Tensor, mask: PrefillMask) -> Tensor:
        return attend(q_THd, k_SGd, v_SGd, mask, self.operator)


@dataclass(frozen=True, slots=True)
class PagedDecode:
    """Single tokens against pages where they lie: nothing is gathered."""

    operator: Operator

    def build_mask(self, index: DecodeMetadata) -> PagedBlockDiagonalGappyKeysMask:
        """For a power of two of tokens: the kernels are compiled for each number of them. Padding sees the scratch page."""
        missing = next_power_of_two(len(index.slots)) - len(index.slots)
        slots_B = F.pad(index.slots, (0, missing), value=index.ring.scratch_slot)
        table = page_table(index.ring, slots_B, F.pad(index.positions, (0, missing)), index.num_pages)
        return paged_mask(table, index.ring.page_size)

    def attend(self, q_BHd: Tensor, cached: LayerCache, mask: PagedBlockDiagonalGappyKeysMask) -> Tensor:
        num_tokens = len(q_BHd)
        padded_BHd = F.pad(q_BHd, (0, 0, 0, 0, 0, len(mask.block_tables) - num_tokens))
        return attend(padded_BHd, cached.k_NGd, cached.v_NGd, mask, self.operator)[:num_tokens]


def paged_mask(table: PageTable, page_size: int) -> PagedBlockDiagonalGappyKeysMask:
    """One query for each row of the table. What kernels read of it are tensors, and widths: where the keys of a token begin and
    end within its pages is not known to the host.
    """
    batch, num_pages = table.pages_BN.shape
    device = table.pages_BN.device
    ones = _SeqLenInfo(
        seqstart=torch.arange(batch + 1, dtype=torch.int32, device=device),
        max_seqlen=1,
        min_seqlen=1,
        seqstart_py=list(range(batch + 1)),
    )
    keys = _GappySeqInfo(
        seqstart=F.pad(table.first_B, (0, 1)),  # of the last number nothing is made
        seqlen=table.end_B,
        max_seqlen=num_pages * page_size,
        min_seqlen=1,
        seqstart_py=[],
        seqlen_py=[],
    )
    return PagedBlockDiagonalGappyKeysMask(q_seqinfo=ones, k_seqinfo=keys, block_tables=table.pages_BN, page_size=page_size)


def attend(q_THd: Tensor, k_SGd: Tensor, v_SGd: Tensor, mask: Any, operator: Operator) -> Tensor:  # noqa: ANN401
    """xformers' grouped-query form: [1, T, G, H/G, d] against keys expanded, not copied, over H/G."""
    tokens, heads, head_dim = q_THd.shape
    kv_heads = k_SGd.shape[1]
    q = q_THd.view(1, tokens, kv_heads, heads // kv_heads, head_dim)
    k, v = (x[None, :, :, None, :].expand(-1, -1, -1, heads // kv_heads, -1) for x in (k_SGd, v_SGd))
    out: Tensor = memory_efficient_attention_forward(q, k, v, attn_bias=mask, op=operator)
    return out.reshape(tokens, heads, head_dim)


def prefill_kernels() -> dict[str, PackedPrefill]:
    """All that xformers has for packed prompts; which of them run here is seen by trying."""
    return {"flash 3": PackedPrefill(flash3.FwOp), "flash 2": PackedPrefill(flash.FwOp), "cutlass": PackedPrefill(cutlass.FwOp)}


def decode_kernels(page_size: int, num_tokens: int) -> dict[str, PagedDecode]:
    """What it has for pages. Split-K reads so many keys at a time as divide a page, and cuts each token's keys in so many parts.

    It keeps a result of each part in float32, padded to 32 queries: with 64 tokens, 8 key heads of 128 and 4 parts 32 MiB. Its
    own choice of parts (None) does not know of key heads, and can take 16 times that; so only few tokens are given to it.
    """
    block = max(keys for keys in (1, 16, 32, 64) if page_size % keys == 0)
    parts = (None, 8, 16) if num_tokens <= 4 else (1, 2, 4)
    split_k = {
        f"split-K of {block}, {count or 'its own'} parts, {stages} stages": PagedDecode(choose_split_k(block, count, stages))
        for count in parts
        for stages in (1, 3)
        if block > 1
    }
    return {"flash 3": PagedDecode(flash3.FwOp), "flash 2": PagedDecode(flash.FwOp), **split_k}


def choose_split_k(num_keys: int, num_parts: int | None, num_stages: int) -> Operator:
    """Triton's kernel with other numbers than xformers'."""
    numbers = {"BLOCK_N": num_keys, "SPLIT_K": num_parts, "NUM_STAGES": num_stages}
    return type("SplitK", (triton_splitk.FwOp,), numbers)
