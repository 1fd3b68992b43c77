"""Writes to the cache on GPUs by one Triton kernel, which are two or four in PyTorch, and the cache rows of positions by another.

Of single tokens, one kernel rotates queries and keys and writes keys and values, from the product of all three.

Shape letters: T tokens, B single tokens, W tokens that are written, N rows of a cache, H heads of queries, keys and values,
Q query heads, G key/value heads, d head_dim, S slots, R pages of a ring; e elements of a program.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tramontane.workers.attention.rolling_cache import LayerCache, PageRings

B_BLOCK = 128


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


def rotate_and_write(cached: LayerCache, rows_B: Tensor, qkv_BHd: Tensor, cos_Bd: Tensor, sin_Bd: Tensor) -> Tensor:
    """Compute ``AttentionKernels.rotate_and_write``."""
    (num_tokens, num_heads, head_dim), num_keys = qkv_BHd.shape, cached.k_NGd.shape[1]
    assert qkv_BHd.is_contiguous()
    q_BQd = torch.empty(num_tokens, num_heads - 2 * num_keys, head_dim, dtype=qkv_BHd.dtype, device=qkv_BHd.device)
    pointers = qkv_BHd, cos_Bd.contiguous(), sin_Bd.contiguous(), q_BQd, cached.k_NGd, cached.v_NGd, rows_B
    sizes = num_heads - 2 * num_keys, num_keys, head_dim // 2, int(triton.next_power_of_2(head_dim // 2))
    with torch.cuda.device_of(rows_B):  # type: ignore[no-untyped-call]  # as above
        _rotate_and_write[(num_tokens, num_heads)](*pointers, *sizes, num_warps=1)
    return q_BQd


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_and_write(  # type: ignore[no-untyped-def]
    qkv_BHd,
    cos_Bd,
    sin_Bd,
    q_BQd,
    k_NGd,
    v_NGd,
    rows_B,
    num_queries: tl.constexpr,
    num_keys: tl.constexpr,
    half: tl.constexpr,
    e_block: tl.constexpr,
):
    """Compute one head of one token, of which element i pairs with i + d/2. Of 32 + 8 + 8 heads: 35 is key head 3."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    e = tl.arange(0, e_block)
    source = qkv_BHd + (token * (num_queries + 2 * num_keys) + head) * (2 * half) + e
    first, second = tl.load(source, mask=e < half), tl.load(source + half, mask=e < half)
    row = tl.load(rows_B + token)
    if head < num_queries + num_keys:
        cos, sin = cos_Bd + token * (2 * half) + e, sin_Bd + token * (2 * half) + e
        x, y = first.to(tl.float32), second.to(tl.float32)
        low = x * tl.load(cos, mask=e < half) - y * tl.load(sin, mask=e < half)
        high = y * tl.load(cos + half, mask=e < half) + x * tl.load(sin + half, mask=e < half)
        if head < num_queries:
            to = q_BQd + (token * num_queries + head) * (2 * half) + e
            tl.store(to, low.to(first.dtype), mask=e < half)
            tl.store(to + half, high.to(first.dtype), mask=e < half)
        else:
            to = k_NGd + (row * num_keys + head - num_queries) * (2 * half) + e
            tl.store(to, low.to(first.dtype), mask=e < half)
            tl.store(to + half, high.to(first.dtype), mask=e < half)
    else:
        to = v_NGd + (row * num_keys + head - num_queries - num_keys) * (2 * half) + e
        tl.store(to, first, mask=e < half)
        tl.store(to + half, second, mask=e < half)


def cache_rows(ring: PageRings, slots_B: Tensor, positions_B: Tensor) -> Tensor:
    """Compute ``PageRings.rows`` of single tokens, [B]."""
    rows_B = torch.empty_like(positions_B)
    with torch.cuda.device_of(rows_B):  # type: ignore[no-untyped-call]  # as above
        _rows[(triton.cdiv(len(rows_B), B_BLOCK),)](
            ring.pages_SR, slots_B, positions_B, rows_B, len(rows_B), ring.ring_pages, ring.page_size, B_BLOCK
        )
    return rows_B


@triton.jit(do_not_specialize=["batch", "ring_pages"])  # type: ignore[untyped-decorator]
def _rows(  # type: ignore[no-untyped-def]
    pages_SR, slots_B, positions_B, rows_B, batch, ring_pages, page_size: tl.constexpr, b_block: tl.constexpr
):
    """Find the rows of some tokens. Pages of 16, 5 in a ring, position 83: entry 0, row 3 of that page."""
    b = tl.program_id(0) * b_block + tl.arange(0, b_block)
    position_b = tl.load(positions_B + b, mask=b < batch, other=0)
    slot_b = tl.load(slots_B + b, mask=b < batch, other=0)
    page_b = tl.load(pages_SR + slot_b * ring_pages + position_b // page_size % ring_pages, mask=b < batch, other=0)
    tl.store(rows_B + b, page_b * page_size + position_b % page_size, mask=b < batch)
