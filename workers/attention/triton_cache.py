"""Writes to the cache on GPUs by one Triton kernel, which are two or four in PyTorch, and the cache rows of positions by another.

Shape letters: T tokens, B single tokens, W tokens that are written, N rows of a cache, G key/value heads, d head_dim, S slots,
R pages of a ring; e elements of a program.
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
