"""Attention on GPUs by one Triton kernel, for prompts and single tokens, which reads the cache's pages in place.

A tile is some consecutive tokens of one sequence for one key/value head, or one single token. Softmax goes over blocks of keys
as in FlashAttention (Dao et al., 2022). Blocks begin at multiples of ``KEYS`` positions of the sequence, and what a query does
not see leaves its sums as they are. So the result of a query depends on the keys that it sees alone, bit for bit: not on other
queries, on where the keys are stored, nor on whether its token is decoded or part of a prompt. For these it is not only the same
program but the same compiled kernel: keys of a prompt are one page of ``ONE_PAGE`` rows.

Shape letters: T tokens, B single tokens, S keys of a packed row, N rows of a cache, H query heads, G key/value heads,
d head_dim, I tiles, W width of a page table; r queries, k keys and e elements of a tile.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tramontane.proto.plan import StagePlan
from tramontane.workers.attention.backend import AttentionKernels
from tramontane.workers.attention.metadata import DecodeMetadata, PrefillMetadata
from tramontane.workers.attention.rolling_cache import LayerCache, page_table
from tramontane.workers.device.alignment import aligned
from tramontane.workers.device.pinned_memory import tensor_on

ROWS = 64  # queries of a tile, at least; with 4 query heads for each key/value head 16 tokens
KEYS = {2: 64, 4: 32}  # of a block, by the bytes of an element
WARPS, STAGES = 4, 2
ONE_PAGE = 2**30  # more than any position
NO_WINDOW = 2**30
LOG2_E = 1.4426950408889634
LOWEST = tl.constexpr(-3.4028235e38)  # a score that no other is below, and finite


@dataclass(frozen=True, slots=True)
class TileMask:
    """Tiles [I, 4]: first row of q, tokens, position of the first token, ``shift``. The key of position p is in the row
    pages[p // page_size - oldest // page_size] * page_size + p % page_size + shift, if the tile's first token sees ``oldest``.

    A prompt's chunk from position 40 on, whose keys begin with position 30 in row 100 of all keys: shift 70, the key of
    position 45 is in row 115. A single token: shift 0.
    """  # noqa: D205 - the first sentence needs two lines

    window: int
    page_size: int
    tiles_I4: Tensor
    pages_IW: Tensor


def triton_kernels(plan: StagePlan) -> AttentionKernels:
    """Return the kernels of a stage."""
    group = plan.args.n_heads // plan.args.n_kv_heads
    prefill = TritonPrefill(group)
    return AttentionKernels(prefill, TritonDecode(), is_batch_invariant=True, fp8_prefill=prefill)


@dataclass(frozen=True, slots=True)
class TritonPrefill:
    """Prefill kernel for heads of which ``group`` share their keys."""

    group: int

    def build_mask(self, index: PrefillMetadata) -> TileMask:
        """Build the tiles of all chunks."""
        device, step = index.cached_rows.device, _rows_of_tile(self.group) // self.group
        tiles: list[list[int]] = []
        first_query = first_key = 0
        for num_queries, num_keys, start in zip(index.query_lens, index.key_lens, index.starts, strict=True):
            shift = first_key - (start + num_queries - num_keys)
            offsets = range(0, num_queries, step)
            tiles += [[first_query + i, min(step, num_queries - i), start + i, shift] for i in offsets]
            first_query, first_key = first_query + num_queries, first_key + num_keys
        no_pages = torch.zeros(1, 1, dtype=torch.int32, device=device)
        return TileMask(index.window or NO_WINDOW, ONE_PAGE, tensor_on(tiles, torch.int32, device), no_pages)

    def attend(self, q_THd: Tensor, k_SGd: Tensor, v_SGd: Tensor, mask: TileMask) -> Tensor:
        """Compute the output [T, H, d]."""
        return self.attend_fp8(q_THd, LayerCache(k_SGd, v_SGd), mask)

    def attend_fp8(self, q_THd: Tensor, keys: LayerCache, mask: TileMask) -> Tensor:
        """Compute the output [T, H, d], also of keys and values in FP8, as ``TritonDecode`` does."""
        return _launch(q_THd, keys, mask, table_width=0)


@dataclass(frozen=True, slots=True)
class TritonDecode:
    """Decode kernel. Everything that it needs is computed on the device."""

    def build_mask(self, index: DecodeMetadata) -> TileMask:
        """Build a tile and the page table of each token."""
        pages_BN = page_table(index.ring, index.positions, index.num_pages).pages_BN
        ones_B, rows_B = torch.ones_like(index.positions), torch.arange(len(index.positions), device=index.positions.device)
        tiles_B4 = torch.stack((rows_B, ones_B, index.positions, torch.zeros_like(ones_B)), dim=1).int()
        return TileMask(index.ring.window or NO_WINDOW, index.ring.page_size, tiles_B4, pages_BN)

    def attend(self, q_BHd: Tensor, cached: LayerCache, mask: TileMask) -> Tensor:
        """Compute the output [B, H, d]."""
        return _launch(q_BHd, cached, mask, table_width=mask.pages_IW.shape[1])


def _rows_of_tile(group: int) -> int:
    """Return the queries of a tile: 64 for 4 query heads of a key/value head, 128 for 71."""
    return max(ROWS, int(triton.next_power_of_2(group)))


def _launch(q_THd: Tensor, cached: LayerCache, mask: TileMask, table_width: int) -> Tensor:
    q_THd, k_NGd, v_NGd = (aligned(x) for x in (q_THd, cached.k_NGd, cached.v_NGd))
    scales = (None, None) if cached.scales is None else (aligned(cached.scales.k_NG), aligned(cached.scales.v_NG))
    (_, num_heads, head_dim), kv_heads = q_THd.shape, k_NGd.shape[1]
    group, out_THd = num_heads // kv_heads, torch.empty_like(q_THd)
    sizes = mask.page_size, table_width, mask.window, LOG2_E / head_dim**0.5
    constants = group, kv_heads, head_dim, max(int(triton.next_power_of_2(head_dim)), 16), _rows_of_tile(group)
    if len(mask.tiles_I4):
        with torch.cuda.device_of(out_THd):  # type: ignore[no-untyped-call]  # Triton launches on the current device
            _kernel[len(mask.tiles_I4), kv_heads](
                *(q_THd, k_NGd, v_NGd, mask.tiles_I4, mask.pages_IW, out_THd),
                *(*sizes, *scales, *constants, KEYS[q_THd.element_size()]),
                num_warps=WARPS,
                num_stages=STAGES,
            )
    return out_THd


@triton.jit(do_not_specialize=["page_size", "table_width", "window"])  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    q_THd,
    k_NGd,
    v_NGd,
    tiles_I4,
    pages_IW,
    out_THd,
    page_size,
    table_width,
    window,
    scale,
    k_NG,
    v_NG,
    group: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    e_block: tl.constexpr,
    r_block: tl.constexpr,
    k_block: tl.constexpr,
):
    """Attend with the queries of one tile.

    Row r is query head r % group of token r // group. Window 100, 16 tokens from position 130 on: keys 31 to 145 are read, in
    blocks of 64 from positions 0, 64 and 128 on; the token at position 131 does not see key 31.

    ``k_NG`` and ``v_NG`` are scales of numbers in FP8, or None. A row that sees a value that is not finite becomes NaN. Such
    values are taken out, because rows that do not see them would multiply them by 0.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    first_token = tl.load(tiles_I4 + tile * 4)
    num_tokens = tl.load(tiles_I4 + tile * 4 + 1)
    position = tl.load(tiles_I4 + tile * 4 + 2)
    shift = tl.load(tiles_I4 + tile * 4 + 3)
    r = tl.arange(0, r_block)
    e = tl.arange(0, e_block)
    query_r = position + r // group
    is_query_r = r < num_tokens * group
    heads_r = ((first_token + r // group).to(tl.int64) * kv_heads + head) * group + r % group
    is_inside_re = is_query_r[:, None] & (e < head_dim)[None, :]
    q_re = tl.load(q_THd + heads_r[:, None] * head_dim + e[None, :], mask=is_inside_re, other=0.0)
    highest_r = tl.full((r_block,), LOWEST, dtype=tl.float32)
    sum_r = tl.zeros((r_block,), dtype=tl.float32)
    is_lost_r = tl.zeros((r_block,), dtype=tl.int32)
    out_re = tl.zeros((r_block, e_block), dtype=tl.float32)
    oldest = tl.maximum(position - window + 1, 0)
    end = position + num_tokens
    pages = pages_IW + tile.to(tl.int64) * table_width - oldest // page_size
    for begin in range(oldest // k_block * k_block, end, k_block):
        key_k = begin + tl.arange(0, k_block)
        is_read_k = (key_k >= oldest) & (key_k < end)
        page_k = tl.load(pages + key_k // page_size, mask=is_read_k, other=0).to(tl.int64)
        row_k = (page_k * page_size + key_k % page_size + shift) * kv_heads + head
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
        is_seen_rk = (key_k[None, :] <= query_r[:, None]) & (key_k[None, :] > query_r[:, None] - window)
        is_seen_rk = is_seen_rk & is_query_r[:, None]
        sees_r = tl.max(is_seen_rk.to(tl.int32), axis=1) > 0
        is_lost_r = tl.maximum(is_lost_r, tl.max((is_seen_rk & is_bad_k[None, :]).to(tl.int32), axis=1))
        if k_NG is None:
            score_rk = tl.dot(q_re, k_ek, input_precision="ieee") * scale
        else:
            score_rk = tl.dot(q_re, k_ek, input_precision="ieee") * k_scale_k[None, :]
        score_rk = tl.where(is_seen_rk, score_rk, LOWEST)
        top_r = tl.maximum(highest_r, tl.max(score_rk, axis=1))
        weight_rk = tl.where(is_seen_rk, tl.exp2(score_rk - top_r[:, None]), 0.0)
        factor_r = tl.where(top_r == highest_r, 1.0, tl.exp2(highest_r - top_r))
        sum_of_weights_r = tl.sum(weight_rk, axis=1)
        if v_NG is not None:
            weight_rk = weight_rk * tl.where(is_bad_k, 0.0, v_scale_k)[None, :]
        more_re = tl.dot(weight_rk.to(v_ke.dtype), v_ke, input_precision="ieee")
        sum_r = tl.where(sees_r, sum_r * factor_r + sum_of_weights_r, sum_r)
        out_re = tl.where(sees_r[:, None], out_re * factor_r[:, None] + more_re, out_re)
        highest_r = top_r
    out_re = tl.where(is_lost_r[:, None] > 0, float("nan"), out_re / tl.where(is_query_r, sum_r, 1.0)[:, None])
    tl.store(out_THd + heads_r[:, None] * head_dim + e[None, :], out_re.to(out_THd.dtype.element_ty), mask=is_inside_re)
