"""Writes to the cache on GPUs by one Triton kernel, which are two or four in PyTorch, and the cache rows of positions by another.

A third kernel rotates heads, and writes keys and values of single tokens: a token has the same bits with its write and without.

Shape letters: T tokens, B single tokens, W tokens that are written, N rows of a cache, H query heads, G key/value heads, A heads
of queries, keys and values side by side, d head_dim, S slots, R pages of a ring; e elements and a heads of a program.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tramontane.workers.attention.rolling_cache import LayerCache, PageRings

B_BLOCK = 128
A_BLOCK = 4  # with a warp and heads of 128 a thread reads 16 bytes of a half: one token has 12 programs if it has 48 heads


def write_rows(cached: LayerCache, rows_W: Tensor, k_TGd: Tensor, v_TGd: Tensor, tokens_W: Tensor | None = None) -> None:
    """Compute ``AttentionKernels.write``. Keys and values may be rows of wider tensors."""
    num_written, width = len(rows_W), k_TGd.shape[1] * k_TGd.shape[2]
    k_TGd, v_TGd = (x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in (k_TGd, v_TGd))
    has_tokens, writes_values = tokens_W is not None, not cached.values_are_keys
    if num_written:
        with torch.cuda.device_of(rows_W):  # type: ignore[no-untyped-call]  # Triton launches on the current device
            _write[(num_written,)](
                *(k_TGd, v_TGd, cached.k_NGd, cached.v_NGd, rows_W, rows_W if tokens_W is None else tokens_W),
                *(k_TGd.stride(0), v_TGd.stride(0), width, int(triton.next_power_of_2(width)), has_tokens, writes_values),
            )


@triton.jit  # type: ignore[untyped-decorator]
def _write(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    k_TGd,
    v_TGd,
    k_NGd,
    v_NGd,
    rows_W,
    tokens_W,
    k_stride,
    v_stride,
    width: tl.constexpr,
    e_block: tl.constexpr,
    has_tokens: tl.constexpr,
    writes_values: tl.constexpr,
):
    """Write one token. To cache row 70, with 8 heads of 128: elements 71680 to 72703 of the cache."""
    written = tl.program_id(0).to(tl.int64)
    token = written
    if has_tokens:
        token = tl.load(tokens_W + written)
    e = tl.arange(0, e_block)
    to = tl.load(rows_W + written) * width + e
    tl.store(k_NGd + to, tl.load(k_TGd + token * k_stride + e, mask=e < width), mask=e < width)
    if writes_values:
        tl.store(v_NGd + to, tl.load(v_TGd + token * v_stride + e, mask=e < width), mask=e < width)


def rotate_and_write(cached: LayerCache, rows_B: Tensor, qkv_BAd: Tensor, cos_Bd: Tensor, sin_Bd: Tensor) -> Tensor:
    """Compute ``AttentionKernels.rotate_and_write``: rotated queries [B, H, d], once keys and values are in the cache."""
    (num_tokens, num_heads, head_dim), kv_heads = qkv_BAd.shape, cached.k_NGd.shape[1]
    assert qkv_BAd.stride()[1:] == (head_dim, 1)
    assert cos_Bd.is_contiguous()
    assert sin_Bd.is_contiguous()
    q_BHd = qkv_BAd.new_empty(num_tokens, num_heads - 2 * kv_heads, head_dim)
    if num_tokens:
        with torch.cuda.device_of(rows_B):  # type: ignore[no-untyped-call]  # as above
            _rotate_and_write[num_tokens, triton.cdiv(num_heads, A_BLOCK)](
                *(qkv_BAd, cos_Bd, sin_Bd, rows_B, q_BHd, cached.k_NGd, cached.v_NGd),
                *(qkv_BAd.stride(0), num_heads - 2 * kv_heads, kv_heads, head_dim // 2),
                *(int(triton.next_power_of_2(head_dim // 2)), A_BLOCK),
                num_warps=1,
            )
    return q_BHd


def apply_rotary(x_TAd: Tensor, cos_Td: Tensor, sin_Td: Tensor) -> Tensor:
    """Compute ``FusedOps.apply_rotary`` with the arithmetic of ``rotate_and_write``. Heads may be part of wider rows."""
    num_tokens, num_heads, head_dim = x_TAd.shape
    assert x_TAd.stride()[1:] == (head_dim, 1)
    assert cos_Td.is_contiguous()
    assert sin_Td.is_contiguous()
    out_TAd = x_TAd.new_empty(x_TAd.shape)
    if num_tokens:
        with torch.cuda.device_of(out_TAd):  # type: ignore[no-untyped-call]  # as above
            _rotate_and_write[num_tokens, triton.cdiv(num_heads, A_BLOCK)](
                *(x_TAd, cos_Td, sin_Td, out_TAd, out_TAd, out_TAd, out_TAd),  # without keys there are no rows, nor a cache
                *(x_TAd.stride(0), num_heads, 0, head_dim // 2, int(triton.next_power_of_2(head_dim // 2)), A_BLOCK),
                num_warps=1,
            )
    return out_TAd


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_and_write(  # type: ignore[no-untyped-def]
    qkv_BAd,
    cos_Bd,
    sin_Bd,
    rows_B,
    q_BHd,
    k_NGd,
    v_NGd,
    stride,
    num_queries: tl.constexpr,
    kv_heads: tl.constexpr,
    half: tl.constexpr,
    e_block: tl.constexpr,
    a_block: tl.constexpr,
):
    """Compute some heads of one token, in float32: element e of a head is paired with element e + half.

    With 32 query heads and 8 key/value heads, heads 32 to 39 are keys, and 40 to 47 are values, which are not rotated. Without
    key/value heads nothing is written to a cache. What is multiplied and added at once is written out: a compiler might choose
    differently for another number of heads.
    """
    token = tl.program_id(0).to(tl.int64)
    a = tl.program_id(1) * a_block + tl.arange(0, a_block)[:, None]
    e = tl.arange(0, e_block)[None, :]
    is_inside = (a < num_queries + 2 * kv_heads) & (e < half)
    heads = qkv_BAd + token * stride + a * (2 * half) + e
    first = tl.load(heads, mask=is_inside, other=0.0)
    second = tl.load(heads + half, mask=is_inside, other=0.0)
    angles = token * (2 * half) + e
    cos_first, cos_second, sin_first, sin_second = (
        tl.load(cos_Bd + angles, mask=e < half, other=0.0).to(tl.float32),
        tl.load(cos_Bd + angles + half, mask=e < half, other=0.0).to(tl.float32),
        tl.load(sin_Bd + angles, mask=e < half, other=0.0).to(tl.float32),
        tl.load(sin_Bd + angles + half, mask=e < half, other=0.0).to(tl.float32),
    )
    wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
    rotated_first = tl.fma(-wide_second, sin_first, wide_first * cos_first).to(first.dtype)
    rotated_second = tl.fma(wide_first, sin_second, wide_second * cos_second).to(first.dtype)
    to_query = q_BHd + (token * num_queries + a) * (2 * half) + e
    is_query = is_inside & (a < num_queries)
    tl.store(to_query, rotated_first, mask=is_query)
    tl.store(to_query + half, rotated_second, mask=is_query)
    if kv_heads > 0:
        row = tl.load(rows_B + token) * kv_heads
        to_key = k_NGd + (row + a - num_queries) * (2 * half) + e
        is_key = is_inside & (a >= num_queries) & (a < num_queries + kv_heads)
        tl.store(to_key, rotated_first, mask=is_key)
        tl.store(to_key + half, rotated_second, mask=is_key)
        to_value = v_NGd + (row + a - num_queries - kv_heads) * (2 * half) + e
        is_value = is_inside & (a >= num_queries + kv_heads)
        tl.store(to_value, first, mask=is_value)
        tl.store(to_value + half, second, mask=is_value)


def cache_rows(ring: PageRings, slots_B: Tensor, positions_B: Tensor) -> Tensor:
    """Compute ``PageRings.rows`` of single tokens, [B]."""
    rows_B = torch.empty_like(positions_B)
    with torch.cuda.device_of(rows_B):  # type: ignore[no-untyped-call]  # as above
        _rows[(triton.cdiv(len(rows_B), B_BLOCK),)](
            ring.pages_SR, slots_B, positions_B, rows_B, len(rows_B), ring.ring_pages, ring.page_size, B_BLOCK
        )
    return rows_B


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["batch", "ring_pages"], do_not_specialize_on_alignment=["slots_B", "positions_B"]
)
def _rows(  # type: ignore[no-untyped-def]
    pages_SR, slots_B, positions_B, rows_B, batch, ring_pages, page_size: tl.constexpr, b_block: tl.constexpr
):
    """Find the rows of some tokens. Pages of 16, 5 in a ring, position 83: entry 0, row 3 of that page."""
    b = tl.program_id(0) * b_block + tl.arange(0, b_block)
    position_b = tl.load(positions_B + b, mask=b < batch, other=0)
    slot_b = tl.load(slots_B + b, mask=b < batch, other=0)
    page_b = tl.load(pages_SR + slot_b * ring_pages + position_b // page_size % ring_pages, mask=b < batch, other=0)
    tl.store(rows_B + b, page_b * page_size + position_b % page_size, mask=b < batch)
