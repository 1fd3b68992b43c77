"""Attention on CUDA: xformers' memory-efficient attention, with block-diagonal masks over packed prompts and over pages.

Masks can be built on any machine, and are tested on the CPU; the kernels that use them need CUDA.

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
    BlockDiagonalMask,
    PagedBlockDiagonalGappyKeysMask,
    _GappySeqInfo,
    _SeqLenInfo,
)

from tramontane.workers.attention.metadata import DecodeMetadata, PrefillMetadata
from tramontane.workers.attention.rolling_cache import LayerCache, PageTable, next_power_of_two, page_table

PrefillMask = Any  # BlockDiagonalCausalFromBottomRightMask, or BlockDiagonalCausalLocalAttentionFromBottomRightMask
Operator = Any  # one of xformers' classes that compute attention


def patch_built_with_cuda() -> None:
    """Make xformers accept its operators although its own CUDA extension is not loaded.

    The extension in the wheel of xformers 0.0.35 is for CUDA 12. Next to a torch for CUDA 13 it does not load, and
    xformers then refuses every operator on a GPU. None of the operators below needs it: split-K is a Triton program,
    flash 2 and cutlass are torch's own. The other checks of an operator (dtypes, masks, the GPU's capability, whether
    torch has it) remain in force.
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
        mask = BlockDiagonalMask.from_seqlens(index.query_lens, index.key_lens, device=index.cached_rows.device)
        if index.window is None:
            return mask.make_causal_from_bottomright()
        return mask.make_local_attention_from_bottomright(index.window)

    def attend(self, q_THd: Tensor, k_SGd: Tensor, v_SGd: Tensor, mask: PrefillMask) -> Tensor:
        """Compute the output [T, H, d]."""
        return attend(q_THd, k_SGd, v_SGd, mask, self.operator)


@dataclass(frozen=True, slots=True)
class PagedDecode:
    """Decode kernel that reads pages in place: nothing is gathered."""

    operator: Operator

    def build_mask(self, index: DecodeMetadata) -> PagedBlockDiagonalGappyKeysMask:
        """Build a mask for a power of two of tokens, because kernels are compiled per number. Padding sees the scratch page."""
        missing = next_power_of_two(len(index.slots)) - len(index.slots)
        slots_B = F.pad(index.slots, (0, missing), value=index.ring.scratch_slot)
        table = page_table(index.ring, slots_B, F.pad(index.positions, (0, missing)), index.num_pages)
        return paged_mask(table, index.ring.page_size)

    def attend(self, q_BHd: Tensor, cached: LayerCache, mask: PagedBlockDiagonalGappyKeysMask) -> Tensor:
        """Compute the output [B, H, d]."""
        num_tokens = len(q_BHd)
        padded_BHd = F.pad(q_BHd, (0, 0, 0, 0, 0, len(mask.block_tables) - num_tokens))
        return attend(padded_BHd, cached.k_NGd, cached.v_NGd, mask, self.operator)[:num_tokens]


def paged_mask(table: PageTable, page_size: int) -> PagedBlockDiagonalGappyKeysMask:
    """Build a mask with one query for each row of the table.

    Kernels read only tensors and widths of it: the host does not know where the keys of a token begin and end in its pages.
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
        seqstart=F.pad(table.first_B, (0, 1)),  # the last element is not used
        seqlen=table.end_B,
        max_seqlen=num_pages * page_size,
        min_seqlen=1,
        seqstart_py=[],
        seqlen_py=[],
    )
    return PagedBlockDiagonalGappyKeysMask(q_seqinfo=ones, k_seqinfo=keys, block_tables=table.pages_BN, page_size=page_size)


def attend(q_THd: Tensor, k_SGd: Tensor, v_SGd: Tensor, mask: Any, operator: Operator) -> Tensor:  # noqa: ANN401
    """Call xformers in its grouped-query form: [1, T, G, H/G, d] with keys expanded, not copied, over H/G."""
    tokens, heads, head_dim = q_THd.shape
    kv_heads = k_SGd.shape[1]
    q = q_THd.view(1, tokens, kv_heads, heads // kv_heads, head_dim)
    k, v = (x[None, :, :, None, :].expand(-1, -1, -1, heads // kv_heads, -1) for x in (k_SGd, v_SGd))
    out: Tensor = memory_efficient_attention_forward(q, k, v, attn_bias=mask, op=operator)
    return out.reshape(tokens, heads, head_dim)


def prefill_kernels() -> dict[str, PackedPrefill]:
    """Return all kernels of xformers for packed prompts; ``autotune`` finds out which of them run here."""
    return {"flash 3": PackedPrefill(flash3.FwOp), "flash 2": PackedPrefill(flash.FwOp), "cutlass": PackedPrefill(cutlass.FwOp)}


def decode_kernels(page_size: int, num_tokens: int) -> dict[str, PagedDecode]:
    """Return all kernels of xformers for pages.

    Split-K reads a block of keys at a time that divides a page, and splits each token's keys into parts. It keeps a
    result of each part in float32, padded to 32 queries: with 64 tokens, 8 key heads of 128 and 4 parts 32 MiB. Its own
    choice of parts (None) ignores key heads and can take 16 times as much, so it is used for few tokens only.
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
    """Return the Triton operator with other parameters than xformers would choose."""
    parameters = {"BLOCK_N": num_keys, "SPLIT_K": num_parts, "NUM_STAGES": num_stages}
    return type("SplitK", (triton_splitk.FwOp,), parameters)
