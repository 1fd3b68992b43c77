"""Attention on GPUs by one Triton kernel, for prompts and single tokens, which reads the cache's
pages in place.

A tile is some consecutive tokens of one sequence for one key/value head, or one single token. Keys
are in blocks that begin at multiples of ``KEYS`` positions of the sequence. Each block has its own
softmax, and blocks are accumulated one after the other in order, as in FlashAttention (Dao et al.,
2022); a block without visible keys leaves the sums of a query unchanged. So the result of a query
depends, bit for bit, only on the keys that it sees: not on other queries, on where the keys are
stored, nor on whether its token is decoded or part of a prompt. Prefill and decode use the same
compiled kernel: keys of a prompt are in pages too, one after the other.

Where there are few single tokens, several programs share the blocks of each, as in Flash-Decoding
(Dao et al., 2023), and a second kernel accumulates them in the same way and order. The number of
programs changes only the speed.

Shape letters: T tokens, B single tokens, S keys of a packed row, N rows of a cache, H query heads,
G key/value heads, d head_dim, I tiles, R pages of a ring, P blocks of a token's keys; r queries (or
query heads), k keys and e elements of a tile.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from tramontane.proto.plan import StagePlan
from tramontane.workers.attention.backend import AttentionKernels
from tramontane.workers.attention.metadata import DecodeMetadata, PrefillMetadata
from tramontane.workers.attention.rolling_cache import LayerCache
from tramontane.workers.device.alignment import aligned
from tramontane.workers.device.cuda import tensor_on

ROWS = 64  # queries of a tile, at least; with 4 query heads for each key/value head 16 tokens
KEYS = {2: 64, 4: 32}  # of a block, by the bytes of an element
WARPS, STAGES = 8, 3
COMBINE_WARPS = 4
# nearly one for each of an H100's multiprocessors: with fewer, several programs share the keys of a
# token
MIN_PROGRAMS = 128
MAX_KEPT_BYTES = 2**26  # of blocks that a second kernel adds, for all tokens
NO_WINDOW = 2**30
LOG2_E = 1.4426950408889634
LOWEST = tl.constexpr(-3.4028235e38)  # a score that no other is below, and finite


@dataclass(frozen=True, slots=True)
class TileMask:
    """Tiles [I, 4]: first row of q, tokens, position of the first token, ``shift``.

    The key of position p of tile i is in the row
    pages[i, p // page_size % R] * page_size + p % page_size + shift. Tiles of chunks have one row
    of pages: 0, 1, 2, ...

    A prompt's chunk from position 40 on, whose keys begin with position 30 in row 100 of all keys:
    shift 70, the key of position 45 is in row 115. A single token: shift 0.
    """

    window: int
    page_size: int
    tiles_I4: Tensor
    pages_IR: Tensor


def triton_kernels(plan: StagePlan) -> AttentionKernels:
    """Return the kernels of a stage."""
    group, page_size = plan.args.n_heads // plan.args.n_kv_heads, plan.cache.page_size
    prefill = TritonPrefill(group, page_size)
    return AttentionKernels(prefill, TritonDecode(), is_batch_invariant=True, fp8_prefill=prefill)


@dataclass(frozen=True, slots=True)
class TritonPrefill:
    """Prefill kernel; ``group`` query heads share their keys. ``page_size``: of the cache of single
    tokens.
    """

    group: int
    page_size: int = field(repr=False)  # changes no bits: not part of the kernel's name

    def build_mask(self, index: PrefillMetadata) -> TileMask:
        """Build the tiles of all chunks."""
        device, step = index.cached_rows.device, _rows_of_tile(self.group) // self.group
        tiles: list[list[int]] = []
        first_query = first_key = 0
        for num_queries, num_keys, start in zip(
            index.query_lens, index.key_lens, index.starts, strict=True
        ):
            shift = first_key - (start + num_queries - num_keys)
            offsets = range(0, num_queries, step)
            tiles += [
                [first_query + i, min(step, num_queries - i), start + i, shift] for i in offsets
            ]
            first_query, first_key = first_query + num_queries, first_key + num_keys
        ends = (
            start + num_queries
            for start, num_queries in zip(index.starts, index.query_lens, strict=True)
        )
        pages_1R = torch.arange(-(-max(ends, default=0) // self.page_size), device=device)[None]
        return TileMask(
            index.window or NO_WINDOW,
            self.page_size,
            tensor_on(tiles, torch.int32, device),
            pages_1R,
        )

    def attend(self, q_THd: Tensor, k_SGd: Tensor, v_SGd: Tensor, mask: TileMask) -> Tensor:
        """Compute the output [T, H, d]."""
        return self.attend_fp8(q_THd, LayerCache(k_SGd, v_SGd), mask)

    def attend_fp8(self, q_THd: Tensor, keys: LayerCache, mask: TileMask) -> Tensor:
        """Compute the output [T, H, d], also of keys and values in FP8, as ``TritonDecode``
        does.
        """
        return _launch(q_THd, keys, mask, num_blocks=0, shares=1)


@dataclass(frozen=True, slots=True)
class TritonDecode:
    """Decode kernel. Everything that it needs is computed on the device."""

    # in page rings, so no page table is needed
    finds_pages: ClassVar[bool] = True

    def build_mask(self, index: DecodeMetadata) -> TileMask:
        """Build a tile of each token."""
        ones_B, rows_B = (
            torch.ones_like(index.positions),
            torch.arange(len(index.positions), device=index.positions.device),
        )
        tiles_B4 = torch.stack(
            (rows_B, ones_B, index.positions, torch.zeros_like(ones_B)), dim=1
        ).int()
        return TileMask(
            index.ring.window or NO_WINDOW, index.ring.page_size, tiles_B4, index.ring.pages_BR
        )

    def attend(self, q_BHd: Tensor, cached: LayerCache, mask: TileMask) -> Tensor:
        """Compute the output [B, H, d]."""
        num_blocks = max_blocks(mask, KEYS[q_BHd.element_size()])
        num_tokens, num_heads, head_dim = q_BHd.shape
        shares = num_programs(num_tokens, num_heads, head_dim, cached.k_NGd.shape[1], num_blocks)
        return _launch(q_BHd, cached, mask, num_blocks, shares)


def max_blocks(mask: TileMask, k_block: int) -> int:
    """Return how many blocks the keys of a single token may be in.

    A ring of 8 pages of 16 has 128 positions, which are in 3 blocks of 64 if the oldest is within
    one.
    """
    return -(-mask.pages_IR.shape[1] * mask.page_size // k_block) + 1


def num_programs(
    num_tokens: int, num_heads: int, head_dim: int, kv_heads: int, num_blocks: int
) -> int:
    """Return how many programs share the keys of a single token and key/value head, a power of two.

    32 heads of 128, 8 of them with keys, and 17 blocks: 16 programs for one token, 2 for 8 tokens,
    and one for more. With 2,000 blocks, which take 31 MiB per token, one program for 3 tokens.
    """
    kept_bytes = 4 * num_tokens * num_heads * head_dim * num_blocks
    if kept_bytes > MAX_KEPT_BYTES:
        return 1
    wanted = MIN_PROGRAMS // max(num_tokens * kv_heads, 1)
    return 1 << (max(min(wanted, num_blocks), 1).bit_length() - 1)


def _rows_of_tile(group: int) -> int:
    """Return the queries of a tile: 64 for 4 query heads of a key/value head, 128 for 71."""
    return max(ROWS, int(triton.next_power_of_2(group)))


def _launch(
    q_THd: Tensor, cached: LayerCache, mask: TileMask, num_blocks: int, shares: int
) -> Tensor:
    """Attend with ``shares`` programs for each tile and key/value head: several only if tiles are
    tokens of ``num_blocks``.
    """
    q_THd, k_NGd, v_NGd = (aligned(x) for x in (q_THd, cached.k_NGd, cached.v_NGd))
    scales = (
        (None, None)
        if cached.scales is None
        else (aligned(cached.scales.k_NG), aligned(cached.scales.v_NG))
    )
    (num_tokens, num_heads, head_dim), kv_heads = q_THd.shape, k_NGd.shape[1]
    group, out_THd, ring_pages = (
        num_heads // kv_heads,
        torch.empty_like(q_THd),
        mask.pages_IR.shape[1],
    )
    kept = (num_tokens, num_heads, num_blocks) if shares > 1 else (0, 0, 0)
    blocks_THPd = q_THd.new_empty(*kept, head_dim, dtype=torch.float32)
    sums_2THP = q_THd.new_empty(2, *kept, dtype=torch.float32)
    # chunks have one row of pages
    sizes = ring_pages if num_blocks else 0, ring_pages, mask.window, num_blocks
    constants = group, kv_heads, head_dim, max(int(triton.next_power_of_2(head_dim)), 16)
    k_block = KEYS[q_THd.element_size()]
    if len(mask.tiles_I4):
        # Triton launches on the current device
        with torch.cuda.device_of(out_THd):  # type: ignore[no-untyped-call]
            _kernel[len(mask.tiles_I4), kv_heads, shares](
                *(
                    q_THd,
                    k_NGd,
                    v_NGd,
                    mask.tiles_I4,
                    mask.pages_IR,
                    out_THd,
                    blocks_THPd,
                    sums_2THP,
                ),
                *(
                    *sizes,
                    LOG2_E / head_dim**0.5,
                    *scales,
                    *constants,
                    _rows_of_tile(group),
                    k_block,
                    mask.page_size,
                ),
                num_warps=WARPS,
                num_stages=STAGES,
            )
            if shares > 1:
                _combine[num_tokens, kv_heads](
                    *(mask.tiles_I4, blocks_THPd, sums_2THP, out_THd, mask.window, num_blocks),
                    *(*constants, int(triton.next_power_of_2(group)), k_block),
                    num_warps=COMBINE_WARPS,
                )
    return out_THd


@triton.jit(do_not_specialize=["table_stride", "ring_pages", "window", "num_blocks"])  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    q_THd,
    k_NGd,
    v_NGd,
    tiles_I4,
    pages_IR,
    out_THd,
    blocks_THPd,
    sums_2THP,
    table_stride,
    ring_pages,
    window,
    num_blocks,
    scale,
    k_NG,
    v_NG,
    group: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    e_block: tl.constexpr,
    r_block: tl.constexpr,
    k_block: tl.constexpr,
    page_size: tl.constexpr,
):
    """Attend with the queries of one tile to all of its keys, or to some blocks of keys, whose
    partial sums are kept.

    Row r is query head r % group of token r // group. Window 100, 16 tokens from position 130 on:
    keys 31 to 145 are read, in blocks of 64 from positions 0, 64 and 128 on; the token at position
    131 does not see key 31. Two programs for the last token alone, which sees keys 46 to 145: the
    first has two blocks, the other the third.

    ``k_NG`` and ``v_NG`` are scales of FP8 numbers, or None. A row that sees a value that is not
    finite becomes NaN. Such values are replaced by 0, because rows that do not see them would
    multiply them by 0.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    share, shares = tl.program_id(2), tl.num_programs(2)
    first_token = tl.load(tiles_I4 + tile * 4)
    num_tokens = tl.load(tiles_I4 + tile * 4 + 1)
    position = tl.load(tiles_I4 + tile * 4 + 2)
    shift = tl.load(tiles_I4 + tile * 4 + 3)
    r = tl.arange(0, r_block)
    e = tl.arange(0, e_block)
    query_r = position + r // group
    is_query_r = r < num_tokens * group
    # offsets added to it for a row fit into 32 bits
    first_head = (first_token.to(tl.int64) * kv_heads + head) * group
    rows_re = (r // group * kv_heads * group + r % group)[:, None] * head_dim + e[None, :]
    is_inside_re = is_query_r[:, None] & (e < head_dim)[None, :]
    q_re = tl.load(q_THd + first_head * head_dim + rows_re, mask=is_inside_re, other=0.0)
    highest_r = tl.full((r_block,), LOWEST, dtype=tl.float32)
    sum_r = tl.zeros((r_block,), dtype=tl.float32)
    out_re = tl.zeros((r_block, e_block), dtype=tl.float32)
    oldest = tl.maximum(position - window + 1, 0)
    first_block, blocks = _blocks(oldest, position + num_tokens, k_block)
    blocks_of_share = (blocks + shares - 1) // shares
    share_begin = (first_block + share * blocks_of_share) * k_block
    end = tl.minimum(share_begin + blocks_of_share * k_block, position + num_tokens)
    pages = pages_IR + tile.to(tl.int64) * table_stride
    # of the ring's round in which the oldest key is
    first_page = oldest // page_size // ring_pages * ring_pages
    for begin in range(share_begin, end, k_block):
        key_k = begin + tl.arange(0, k_block)
        is_read_k = (key_k >= oldest) & (key_k < end)
        if page_size % k_block == 0:
            page = tl.load(pages + _entry(begin // page_size - first_page, ring_pages))
            row_k = page * page_size + key_k % page_size
        else:
            page_k = tl.load(
                pages + _entry(key_k // page_size - first_page, ring_pages), mask=is_read_k, other=0
            )
            row_k = page_k * page_size + key_k % page_size
        row_k = (row_k + shift) * kv_heads + head
        if k_NG is not None:
            k_scale_k = tl.load(k_NG + row_k, mask=is_read_k, other=0.0) * scale
            v_scale_k = tl.load(v_NG + row_k, mask=is_read_k, other=0.0)
        is_read_ek = is_read_k[None, :] & (e < head_dim)[:, None]
        k_ek = tl.load(k_NGd + row_k[None, :] * head_dim + e[:, None], mask=is_read_ek, other=0.0)
        is_read_ke = is_read_k[:, None] & (e < head_dim)[None, :]
        v_ke = tl.load(v_NGd + row_k[:, None] * head_dim + e[None, :], mask=is_read_ke, other=0.0)
        if k_NG is not None:  # exact, and by way of float32, as in ``triton_decode.py``
            k_ek, v_ke = k_ek.to(tl.float32).to(q_re.dtype), v_ke.to(tl.float32).to(q_re.dtype)
        is_finite_ke = tl.abs(v_ke.to(tl.float32)) < float("inf")
        is_bad_k = tl.min(is_finite_ke.to(tl.int32), axis=1) == 0
        v_ke = tl.where(is_finite_ke, v_ke, 0.0).to(v_ke.dtype)
        is_seen_rk = (key_k[None, :] <= query_r[:, None]) & (
            key_k[None, :] > query_r[:, None] - window
        )
        is_seen_rk = is_seen_rk & is_query_r[:, None]
        is_lost_r = tl.max((is_seen_rk & is_bad_k[None, :]).to(tl.int32), axis=1) > 0
        if k_NG is None:
            score_rk = tl.dot(q_re, k_ek, input_precision="ieee") * scale
        else:
            score_rk = tl.dot(q_re, k_ek, input_precision="ieee") * k_scale_k[None, :]
        score_rk = tl.where(is_seen_rk, score_rk, LOWEST)
        block_highest_r = tl.maximum(
            tl.max(score_rk, axis=1), tl.full((r_block,), LOWEST, dtype=tl.float32)
        )
        weight_rk = tl.where(is_seen_rk, tl.exp2(score_rk - block_highest_r[:, None]), 0.0)
        block_sum_r = tl.where(is_lost_r, float("nan"), tl.sum(weight_rk, axis=1))
        if v_NG is not None:
            weight_rk = weight_rk * tl.where(is_bad_k, 0.0, v_scale_k)[None, :]
        block_re = tl.dot(weight_rk.to(v_ke.dtype), v_ke, input_precision="ieee")
        if shares > 1:
            # of the first of several query heads of one token
            kept = first_head * num_blocks + begin // k_block - first_block
            sums = sums_2THP + kept + r * num_blocks
            tl.store(sums, block_highest_r, mask=is_query_r)
            tl.store(
                sums + tl.num_programs(0).to(tl.int64) * kv_heads * group * num_blocks,
                block_sum_r,
                mask=is_query_r,
            )
            kept_re = (r * num_blocks * head_dim)[:, None] + e[None, :]
            tl.store(blocks_THPd + kept * head_dim + kept_re, block_re, mask=is_inside_re)
        highest_r, sum_r, out_re = _add_block(
            highest_r, sum_r, out_re, block_highest_r, block_sum_r, block_re
        )
    if shares == 1:
        out_re = out_re / tl.where(is_query_r, sum_r, 1.0)[:, None]
        tl.store(
            out_THd + first_head * head_dim + rows_re,
            out_re.to(out_THd.dtype.element_ty),
            mask=is_inside_re,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _blocks(oldest, end, k_block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the first block of keys that are read, and how many there are: of keys 31 to 145 and
    blocks of 64, 0 and 3.
    """
    return oldest // k_block, (end + k_block - 1) // k_block - oldest // k_block


@triton.jit
def _entry(page, ring_pages):  # type: ignore[no-untyped-def]
    """Return the entry in the ring of a page that is counted from the beginning of a round. Of 8
    entries page 11 has number 3.
    """
    return tl.where(page >= ring_pages, page - ring_pages, page)


@triton.jit
def _add_block(  # type: ignore[no-untyped-def]
    highest_r, sum_r, out_re, block_highest_r, block_sum_r, block_re
):
    """Return the sums with one more block. A block without visible keys for a row has zeros, and
    leaves the row's sums unchanged.

    Fused multiply-adds are explicit, as they must be the same wherever blocks are accumulated.
    """
    top_r = tl.maximum(highest_r, block_highest_r)
    earlier_r = tl.where(top_r == highest_r, 1.0, tl.exp2(highest_r - top_r))
    factor_r = tl.where(top_r == block_highest_r, 1.0, tl.exp2(block_highest_r - top_r))
    sum_r = tl.fma(sum_r, earlier_r, block_sum_r * factor_r)
    out_re = tl.fma(out_re, earlier_r[:, None], block_re * factor_r[:, None])
    return top_r, sum_r, out_re


@triton.jit(do_not_specialize=["window", "num_blocks"])  # type: ignore[untyped-decorator]
def _combine(  # type: ignore[no-untyped-def]
    tiles_I4,
    blocks_THPd,
    sums_2THP,
    out_THd,
    window,
    num_blocks,
    group: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    e_block: tl.constexpr,
    r_block: tl.constexpr,
    k_block: tl.constexpr,
):
    """Accumulate the blocks of one single token and key/value head, in their order, for its
    ``group`` query heads.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(tiles_I4 + token * 4 + 2)
    _, blocks = _blocks(tl.maximum(position - window + 1, 0), position + 1, k_block)
    r = tl.arange(0, r_block)
    e = tl.arange(0, e_block)
    heads_r = (token * kv_heads + head) * group + r
    is_inside_re = (r < group)[:, None] & (e < head_dim)[None, :]
    highest_r = tl.full((r_block,), LOWEST, dtype=tl.float32)
    sum_r = tl.zeros((r_block,), dtype=tl.float32)
    out_re = tl.zeros((r_block, e_block), dtype=tl.float32)
    sums = sums_2THP + tl.num_programs(0).to(tl.int64) * kv_heads * group * num_blocks
    for block in tl.range(0, blocks, num_stages=4):
        kept_r = heads_r * num_blocks + block
        block_highest_r = tl.load(sums_2THP + kept_r, mask=r < group, other=LOWEST)
        block_sum_r = tl.load(sums + kept_r, mask=r < group, other=0.0)
        block_re = tl.load(
            blocks_THPd + kept_r[:, None] * head_dim + e[None, :], mask=is_inside_re, other=0.0
        )
        highest_r, sum_r, out_re = _add_block(
            highest_r, sum_r, out_re, block_highest_r, block_sum_r, block_re
        )
    out_re = out_re / tl.where(r < group, sum_r, 1.0)[:, None]
    tl.store(
        out_THd + heads_r[:, None] * head_dim + e[None, :],
        out_re.to(out_THd.dtype.element_ty),
        mask=is_inside_re,
    )
