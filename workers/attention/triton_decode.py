"""Attention of single tokens on GPUs by a Triton kernel that reads the cache's pages in place and
splits each token's keys.

Few tokens do not keep a GPU busy unless several programs share the keys of one token: split-K, or
Flash-Decoding (Dao et al., 2023). Each part has its own softmax, and the program that ends last
combines the parts. A program needs only a token's position and the copy of its page ring: it finds
pages itself, so the host prepares nothing and a CUDA graph can capture the kernel.

With an FP8 cache a program converts numbers to the dtype of the queries, which is exact, and
multiplies scores by the scales of the keys and weights by the scales of the values: no tile is
dequantized.

Shape letters: B single tokens, N rows of a cache, H query heads, G key/value heads, d head_dim, R
pages of a ring, P parts; r queries, h query heads, k keys, e elements and p parts of a program.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from tramontane.workers.attention.metadata import DecodeMetadata
from tramontane.workers.attention.rolling_cache import LayerCache

# keys at a time, warps and stages: the fastest of six on an H200
VARIANTS = ((64, 4, 3), (128, 4, 2))
PARTS = (1, 2, 4, 8, 16, 32, 64)
# that are combined: with 4 query heads of 128 numbers these are 64 registers of a thread
PARTS_AT_A_TIME = 16
NO_WINDOW = 2**30
# of a tensor core's product; with 4 query heads for each key/value head 12 of them are empty
MIN_ROWS = 16
LOG2_E = 1.4426950408889634
LOWEST = tl.constexpr(-3.4028235e38)  # a score that no other is below, and finite


@dataclass(frozen=True, slots=True)
class SplitMask:
    """The existing tokens, and the number of finished parts of each token and key/value head, [B,
    G]: 0 between kernels.
    """

    index: DecodeMetadata
    ended_BG: Tensor


@dataclass(frozen=True, slots=True)
class SplitKDecode:
    """Decode kernel. Programs read ``block`` keys at a time, a power of two; ``parts`` programs
    share the keys of a token.
    """

    kv_heads: int
    block: int
    parts: int
    warps: int
    stages: int
    # in page rings, so no page table is needed
    finds_pages: ClassVar[bool] = True

    def build_mask(self, index: DecodeMetadata) -> SplitMask:
        """Return the counters of ended parts, for all layers of a step: each kernel leaves them at
        0.
        """
        shape = (len(index.slots), self.kv_heads)
        return SplitMask(index, torch.zeros(shape, dtype=torch.int32, device=index.slots.device))

    def attend(self, q_BHd: Tensor, cached: LayerCache, mask: SplitMask) -> Tensor:
        """Compute the output [B, H, d]."""
        (batch, num_heads, head_dim), (k_NGd, v_NGd) = q_BHd.shape, (cached.k_NGd, cached.v_NGd)
        if q_BHd.stride()[1:] != (head_dim, 1):  # rows of a wider tensor are read in place
            q_BHd = q_BHd.contiguous()
        out_BHd = q_BHd.new_empty(batch, num_heads, head_dim)
        parts_BHPd = (
            q_BHd.new_empty(batch, num_heads, self.parts, head_dim, dtype=torch.float32)
            if self.parts > 1
            else out_BHd
        )
        sums_2BHP = q_BHd.new_empty(2, batch, num_heads, self.parts, dtype=torch.float32)
        index, ring, group = mask.index, mask.index.ring, num_heads // self.kv_heads
        scales = (None, None) if cached.scales is None else (cached.scales.k_NG, cached.scales.v_NG)
        blocks = [int(triton.next_power_of_2(n)) for n in (head_dim, group)]
        # Triton launches on the current device
        with torch.cuda.device_of(out_BHd):  # type: ignore[no-untyped-call]
            _attend[batch, self.kv_heads, self.parts](
                *(
                    q_BHd,
                    k_NGd,
                    v_NGd,
                    ring.pages_BR,
                    index.positions,
                    parts_BHPd,
                    sums_2BHP[0],
                    sums_2BHP[1],
                ),
                *(mask.ended_BG, out_BHd),
                *(
                    q_BHd.stride(0),
                    ring.ring_pages,
                    ring.window or NO_WINDOW,
                    self.parts,
                    LOG2_E / head_dim**0.5,
                    *scales,
                ),
                *(
                    ring.page_size,
                    group,
                    self.kv_heads,
                    head_dim,
                    max(blocks[0], MIN_ROWS),
                    max(blocks[1], MIN_ROWS),
                    blocks[1],
                ),
                *(self.block, 1 if self.parts == 1 else PARTS_AT_A_TIME),
                num_warps=self.warps,
                num_stages=self.stages,
            )
        return out_BHd


def split_k_kernels(num_tokens: int, kv_heads: int) -> dict[str, SplitKDecode]:
    """Return the candidates for this number of single tokens: parts that make 16 to 128 programs
    for each key/value head.

    16 tokens: 1, 2, 4 and 8 parts.
    """
    return {
        f"split-K of {block} keys in {parts} parts, {warps} warps, {stages} stages": SplitKDecode(
            kv_heads, block, parts, warps, stages
        )
        for block, warps, stages in VARIANTS
        for parts in PARTS
        if 16 <= num_tokens * parts <= 128
    }


# Positions follow the positions of prompts in one tensor: their address is a multiple of 16 only
# after an even number of prompt tokens.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["ring_pages", "window", "num_parts"],
    do_not_specialize_on_alignment=["positions_B"],
)
def _attend(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    q_BHd,
    k_NGd,
    v_NGd,
    pages_BR,
    positions_B,
    parts_BHPd,
    highest_BHP,
    sum_BHP,
    ended_BG,
    out_BHd,
    q_stride,
    ring_pages,
    window,
    num_parts,
    scale,
    k_NG,
    v_NG,
    page_size: tl.constexpr,
    group: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    e_block: tl.constexpr,
    r_block: tl.constexpr,
    h_block: tl.constexpr,
    k_block: tl.constexpr,
    p_block: tl.constexpr,
):
    """Attend with the queries of one token and key/value head to one part of its keys.

    Blocks of 64 keys, a window of 1000, a token at position 1300, 4 parts: it sees keys 301 to
    1300, in blocks 4 to 20; each part has 5 blocks, the last one the blocks 19 and 20. A part
    without keys has a sum of 0. ``k_NG`` and ``v_NG`` are scales of numbers in FP8, or None.
    """
    token, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions_B + token).to(tl.int32)
    pages = pages_BR + token.to(tl.int64) * ring_pages
    oldest = tl.maximum(position - window + 1, 0)
    first_block = oldest // k_block
    # blocks of a part, rounded up
    share = (position // k_block - first_block + num_parts) // num_parts
    begin = (first_block + part * share) * k_block
    end = tl.minimum(begin + share * k_block, position + 1)
    r = tl.arange(0, r_block)
    e = tl.arange(0, e_block)
    query_heads_r = (token.to(tl.int64) * kv_heads + head) * group + r
    is_inside_re = (r < group)[:, None] & (e < head_dim)[None, :]
    queries = q_BHd + token.to(tl.int64) * q_stride + head * group * head_dim
    q_re = tl.load(queries + r[:, None] * head_dim + e[None, :], mask=is_inside_re, other=0.0)
    highest_r = tl.full((r_block,), LOWEST, dtype=tl.float32)
    sum_r = tl.zeros((r_block,), dtype=tl.float32)
    out_re = tl.zeros((r_block, e_block), dtype=tl.float32)
    for start in range(begin, end, k_block):
        key_k = start + tl.arange(0, k_block)
        is_seen_k = (key_k >= oldest) & (key_k <= position)
        if page_size % k_block == 0:
            row_k = tl.load(pages + start // page_size % ring_pages) * page_size + key_k % page_size
        else:
            page_k = tl.load(pages + key_k // page_size % ring_pages, mask=is_seen_k, other=0)
            row_k = page_k * page_size + key_k % page_size
        offset_ke = (row_k[:, None] * kv_heads + head) * head_dim + e[None, :]
        is_read_ke = is_seen_k[:, None] & (e < head_dim)[None, :]
        k_ke = tl.load(k_NGd + offset_ke, mask=is_read_ke, other=0.0)
        v_ke = tl.load(v_NGd + offset_ke, mask=is_read_ke, other=0.0)
        if k_NG is None:
            score_rk = tl.dot(q_re, tl.trans(k_ke), input_precision="ieee") * scale
        else:
            k_scale_k = tl.load(k_NG + row_k * kv_heads + head, mask=is_seen_k, other=0.0) * scale
            v_scale_k = tl.load(v_NG + row_k * kv_heads + head, mask=is_seen_k, other=0.0)
            # By way of float32: Triton generates longer code for fp8 to bfloat16.
            k_ke, v_ke = k_ke.to(tl.float32).to(q_re.dtype), v_ke.to(tl.float32).to(q_re.dtype)
            score_rk = tl.dot(q_re, tl.trans(k_ke), input_precision="ieee") * k_scale_k[None, :]
        score_rk = tl.where(is_seen_k[None, :], score_rk, LOWEST)
        top_r = tl.maximum(highest_r, tl.max(score_rk, axis=1))
        weight_rk = tl.where(is_seen_k[None, :], tl.exp2(score_rk - top_r[:, None]), 0.0)
        factor_r = tl.exp2(highest_r - top_r)
        sum_r = sum_r * factor_r + tl.sum(weight_rk, axis=1)
        if v_NG is not None:
            weight_rk = weight_rk * v_scale_k[None, :]
        out_re = out_re * factor_r[:, None] + tl.dot(
            weight_rk.to(v_ke.dtype), v_ke, input_precision="ieee"
        )
        highest_r = top_r
    if p_block == 1:
        out_re = (out_re / sum_r[:, None]).to(out_BHd.dtype.element_ty)
        tl.store(
            out_BHd + query_heads_r[:, None] * head_dim + e[None, :], out_re, mask=is_inside_re
        )
    else:
        part_r = query_heads_r * num_parts + part
        tl.store(parts_BHPd + part_r[:, None] * head_dim + e[None, :], out_re, mask=is_inside_re)
        tl.store(highest_BHP + part_r, highest_r, mask=r < group)
        tl.store(sum_BHP + part_r, sum_r, mask=r < group)
        tl.debug_barrier()  # all threads have stored before one of them counts
        ended = ended_BG + token * kv_heads + head
        if tl.atomic_add(ended, 1, sem="acq_rel") == num_parts - 1:
            tl.store(ended, 0)
            first_head = (token.to(tl.int64) * kv_heads + head) * group
            combine(
                parts_BHPd,
                highest_BHP,
                sum_BHP,
                out_BHd,
                first_head,
                group,
                head_dim,
                e_block,
                h_block,
                num_parts,
                p_block,
            )


@triton.jit  # type: ignore[untyped-decorator]
def combine(  # type: ignore[no-untyped-def]
    parts_BHPd,
    highest_BHP,
    sum_BHP,
    out_BHd,
    first_head,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    e_block: tl.constexpr,
    h_block: tl.constexpr,
    num_parts,
    p_block: tl.constexpr,
):
    """Add the parts of some query heads, each weighted by exp2(its highest score - the highest of
    all), some at a time.

    The loads bypass the cache of this multiprocessor, because other multiprocessors have written
    the data.
    """
    h = tl.arange(0, h_block)
    e = tl.arange(0, e_block)
    highest_h = tl.full((h_block,), LOWEST, dtype=tl.float32)
    sum_h = tl.zeros((h_block,), dtype=tl.float32)
    out_he = tl.zeros((h_block, e_block), dtype=tl.float32)
    for start in range(0, num_parts, p_block):
        p = start + tl.arange(0, p_block)
        part_hp = (first_head + h)[:, None] * num_parts + p[None, :]
        is_inside_hp = (h < group)[:, None] & (p < num_parts)[None, :]
        sum_hp = tl.load(sum_BHP + part_hp, mask=is_inside_hp, other=0.0, cache_modifier=".cg")
        highest_hp = tl.load(
            highest_BHP + part_hp, mask=is_inside_hp, other=LOWEST, cache_modifier=".cg"
        )
        top_h = tl.maximum(highest_h, tl.max(highest_hp, axis=1))
        factor_hp = tl.where(sum_hp > 0, tl.exp2(highest_hp - top_h[:, None]), 0.0)
        is_inside_hpe = (sum_hp > 0)[:, :, None] & (e < head_dim)[None, None, :]
        elements_hpe = part_hp[:, :, None] * head_dim + e[None, None, :]
        part_hpe = tl.load(
            parts_BHPd + elements_hpe, mask=is_inside_hpe, other=0.0, cache_modifier=".cg"
        )
        earlier_h = tl.exp2(highest_h - top_h)
        out_he = out_he * earlier_h[:, None] + tl.sum(part_hpe * factor_hp[:, :, None], axis=1)
        sum_h = sum_h * earlier_h + tl.sum(sum_hp * factor_hp, axis=1)
        highest_h = top_h
    out_he = (out_he / tl.where(h < group, sum_h, 1.0)[:, None]).to(out_BHd.dtype.element_ty)
    is_inside_he = (h < group)[:, None] & (e < head_dim)[None, :]
    tl.store(out_BHd + (first_head + h)[:, None] * head_dim + e[None, :], out_he, mask=is_inside_he)
