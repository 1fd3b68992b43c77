"""Cache writes on GPUs by one Triton kernel (PyTorch needs two or four), and the cache rows of
positions by another.

A third kernel rotates heads, and writes keys and values of single tokens: a token has the same bits
with the write and without. FP8 caches are quantized during the write, with the bits of
``quantized_rows.py``. Two more kernels read its rows, and return keys as they will be read.

Shape letters: T tokens, B single tokens, W written tokens, N rows of a cache, H query heads, G
key/value heads, A heads of queries, keys and values side by side, d head_dim, S slots, R pages of a
ring; e elements and a heads of a program.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tramontane.workers.attention.quantized_rows import PER_LARGEST, SMALLEST_SCALE, RowScales
from tramontane.workers.attention.rolling_cache import LayerCache, PageRings

B_BLOCK = 128
FACTOR, SMALLEST = tl.constexpr(PER_LARGEST), tl.constexpr(SMALLEST_SCALE)
READ_WARPS = 2  # with 8 heads of 128 a thread reads 16 bytes of FP8
# with a warp and heads of 128 a thread reads 16 bytes of a half: one token has 12 programs if it
# has 48 heads
A_BLOCK = 4


def write_rows(
    cached: LayerCache, rows_W: Tensor, k_TGd: Tensor, v_TGd: Tensor, tokens_W: Tensor | None = None
) -> None:
    """Compute ``AttentionKernels.write``. Keys and values may be rows of wider tensors."""
    num_written, width = len(rows_W), k_TGd.shape[1] * k_TGd.shape[2]
    k_TGd, v_TGd = (
        x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in (k_TGd, v_TGd)
    )
    has_tokens, writes_values = tokens_W is not None, not cached.values_are_keys
    if cached.scales is not None:
        _write_fp8(cached, cached.scales, rows_W, k_TGd, v_TGd, tokens_W)
    elif num_written:
        # Triton launches on the current device
        with torch.cuda.device_of(rows_W):  # type: ignore[no-untyped-call]
            _write[(num_written,)](
                *(
                    k_TGd,
                    v_TGd,
                    cached.k_NGd,
                    cached.v_NGd,
                    rows_W,
                    rows_W if tokens_W is None else tokens_W,
                ),
                *(
                    k_TGd.stride(0),
                    v_TGd.stride(0),
                    width,
                    int(triton.next_power_of_2(width)),
                    has_tokens,
                    writes_values,
                ),
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
    """Write one token. To cache row 70, with 8 heads of 128: elements 71680 to 72703 of the
    cache.
    """
    written = tl.program_id(0).to(tl.int64)
    token = written
    if has_tokens:
        token = tl.load(tokens_W + written)
    e = tl.arange(0, e_block)
    to = tl.load(rows_W + written) * width + e
    tl.store(k_NGd + to, tl.load(k_TGd + token * k_stride + e, mask=e < width), mask=e < width)
    if writes_values:
        tl.store(v_NGd + to, tl.load(v_TGd + token * v_stride + e, mask=e < width), mask=e < width)


def read_back(cached: LayerCache, k_TGd: Tensor, v_TGd: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``AttentionKernels.read_back``. Keys and values may be rows of wider tensors."""
    if cached.scales is None:
        return k_TGd, v_TGd
    k_TGd, v_TGd = (
        x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in (k_TGd, v_TGd)
    )
    (num_tokens, kv_heads, head_dim), out = (
        k_TGd.shape,
        [x.new_empty(x.shape) for x in (k_TGd, v_TGd)],
    )
    blocks = int(triton.next_power_of_2(kv_heads)), int(triton.next_power_of_2(head_dim))
    if num_tokens:
        with torch.cuda.device_of(k_TGd):  # type: ignore[no-untyped-call]  # as above
            _read_back[(num_tokens,)](
                k_TGd, v_TGd, *out, k_TGd.stride(0), v_TGd.stride(0), kv_heads, head_dim, *blocks
            )
    return out[0], out[1]


def read_rows(cached: LayerCache, rows_C: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``AttentionKernels.read``."""
    if (scales := cached.scales) is None:
        return cached.read(rows_C)
    num_rows, kv_heads, head_dim = len(rows_C), *cached.k_NGd.shape[1:]
    out = [
        torch.empty(num_rows, kv_heads, head_dim, dtype=scales.dtype, device=rows_C.device)
        for _ in range(2)
    ]
    blocks = int(triton.next_power_of_2(kv_heads)), int(triton.next_power_of_2(head_dim))
    if num_rows:
        with torch.cuda.device_of(rows_C):  # type: ignore[no-untyped-call]  # as above
            _read_quantized[(num_rows,)](
                *(
                    cached.k_NGd,
                    cached.v_NGd,
                    scales.k_NG,
                    scales.v_NG,
                    rows_C,
                    *out,
                    kv_heads,
                    head_dim,
                    *blocks,
                ),
                num_warps=READ_WARPS,
            )
    return out[0], out[1]


def _write_fp8(
    cached: LayerCache,
    scales: RowScales,
    rows_W: Tensor,
    k_TGd: Tensor,
    v_TGd: Tensor,
    tokens_W: Tensor | None,
) -> None:
    kv_heads, head_dim = k_TGd.shape[1:]
    blocks = int(triton.next_power_of_2(kv_heads)), int(triton.next_power_of_2(head_dim))
    if len(rows_W):
        with torch.cuda.device_of(rows_W):  # type: ignore[no-untyped-call]  # as above
            _write_quantized[(len(rows_W),)](
                *(k_TGd, v_TGd, cached.k_NGd, cached.v_NGd, scales.k_NG, scales.v_NG),
                *(
                    rows_W,
                    rows_W if tokens_W is None else tokens_W,
                    k_TGd.stride(0),
                    v_TGd.stride(0),
                ),
                *(kv_heads, head_dim, *blocks, tokens_W is not None),
            )


@triton.jit
def _scale(magnitude_ae, is_finite_ae):  # type: ignore[no-untyped-def]
    """Return the scales of some vectors from the magnitudes of their elements; elements past a
    vector's end are 0.
    """
    scale_a = tl.maximum(tl.max(magnitude_ae, axis=1) * FACTOR, SMALLEST)
    return tl.where(tl.min(is_finite_ae.to(tl.int32), axis=1) > 0, scale_a, float("nan"))


@triton.jit  # type: ignore[untyped-decorator]
def _quantize_heads(  # type: ignore[no-untyped-def]
    heads, g_stride, kv_heads, head_dim, g_block: tl.constexpr, e_block: tl.constexpr
):
    """Return the quotients of a token's heads by their scales, which are to be rounded to FP8, and
    the scales.
    """
    g = tl.arange(0, g_block)[:, None]
    e = tl.arange(0, e_block)[None, :]
    x_ge = tl.load(heads + g * g_stride + e, mask=(g < kv_heads) & (e < head_dim), other=0.0).to(
        tl.float32
    )
    magnitude_ge = tl.abs(x_ge)
    scale_g = _scale(magnitude_ge, magnitude_ge < float("inf"))
    return tl.div_rn(x_ge, tl.broadcast_to(scale_g[:, None], (g_block, e_block))), scale_g


@triton.jit  # type: ignore[untyped-decorator]
def _write_quantized(  # type: ignore[no-untyped-def]
    k_TGd,
    v_TGd,
    k_NGd,
    v_NGd,
    k_NG,
    v_NG,
    rows_W,
    tokens_W,
    k_stride,
    v_stride,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    g_block: tl.constexpr,
    e_block: tl.constexpr,
    has_tokens: tl.constexpr,
):
    """Write one token. To cache row 70, with 8 heads of 128: numbers 71680 to 72703 and scales 560
    to 567.
    """
    written = tl.program_id(0).to(tl.int64)
    token = written
    if has_tokens:
        token = tl.load(tokens_W + written)
    g = tl.arange(0, g_block)
    e = tl.arange(0, e_block)
    to_g = tl.load(rows_W + written) * kv_heads + g
    to_ge = to_g[:, None] * head_dim + e[None, :]
    is_inside_ge = (g < kv_heads)[:, None] & (e < head_dim)[None, :]
    k_ge, k_scale_g = _quantize_heads(
        k_TGd + token * k_stride, head_dim, kv_heads, head_dim, g_block, e_block
    )
    tl.store(k_NGd + to_ge, k_ge.to(k_NGd.dtype.element_ty), mask=is_inside_ge)
    tl.store(k_NG + to_g, k_scale_g, mask=g < kv_heads)
    v_ge, v_scale_g = _quantize_heads(
        v_TGd + token * v_stride, head_dim, kv_heads, head_dim, g_block, e_block
    )
    tl.store(v_NGd + to_ge, v_ge.to(v_NGd.dtype.element_ty), mask=is_inside_ge)
    tl.store(v_NG + to_g, v_scale_g, mask=g < kv_heads)


@triton.jit  # type: ignore[untyped-decorator]
def _read_quantized(  # type: ignore[no-untyped-def]
    k_NGd,
    v_NGd,
    k_NG,
    v_NG,
    rows_C,
    k_CGd,
    v_CGd,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    g_block: tl.constexpr,
    e_block: tl.constexpr,
):
    """Read one row. Of cache row 70, with 8 heads of 128: numbers 71680 to 72703 and scales 560 to
    567.
    """
    number = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, g_block)
    e = tl.arange(0, e_block)
    from_g, to_g = tl.load(rows_C + number) * kv_heads + g, number * kv_heads + g
    from_ge, to_ge = from_g[:, None] * head_dim + e[None, :], to_g[:, None] * head_dim + e[None, :]
    is_inside_ge = (g < kv_heads)[:, None] & (e < head_dim)[None, :]
    k_ge = tl.load(k_NGd + from_ge, mask=is_inside_ge, other=0.0).to(tl.float32)
    k_ge = k_ge * tl.load(k_NG + from_g, mask=g < kv_heads, other=0.0)[:, None]
    tl.store(k_CGd + to_ge, k_ge.to(k_CGd.dtype.element_ty), mask=is_inside_ge)
    v_ge = tl.load(v_NGd + from_ge, mask=is_inside_ge, other=0.0).to(tl.float32)
    v_ge = v_ge * tl.load(v_NG + from_g, mask=g < kv_heads, other=0.0)[:, None]
    tl.store(v_CGd + to_ge, v_ge.to(v_CGd.dtype.element_ty), mask=is_inside_ge)


@triton.jit  # type: ignore[untyped-decorator]
def _read_back(  # type: ignore[no-untyped-def]
    k_TGd,
    v_TGd,
    k_out_TGd,
    v_out_TGd,
    k_stride,
    v_stride,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    g_block: tl.constexpr,
    e_block: tl.constexpr,
):
    """Round one token's keys and values to numbers in FP8, and back."""
    token = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, g_block)
    e = tl.arange(0, e_block)
    to_ge = (token * kv_heads + g)[:, None] * head_dim + e[None, :]
    is_inside_ge = (g < kv_heads)[:, None] & (e < head_dim)[None, :]
    k_ge, k_scale_g = _quantize_heads(
        k_TGd + token * k_stride, head_dim, kv_heads, head_dim, g_block, e_block
    )
    k_ge = k_ge.to(tl.float8e4nv).to(tl.float32) * k_scale_g[:, None]
    tl.store(k_out_TGd + to_ge, k_ge.to(k_out_TGd.dtype.element_ty), mask=is_inside_ge)
    v_ge, v_scale_g = _quantize_heads(
        v_TGd + token * v_stride, head_dim, kv_heads, head_dim, g_block, e_block
    )
    v_ge = v_ge.to(tl.float8e4nv).to(tl.float32) * v_scale_g[:, None]
    tl.store(v_out_TGd + to_ge, v_ge.to(v_out_TGd.dtype.element_ty), mask=is_inside_ge)


def rotate_and_write(
    cached: LayerCache, rows_B: Tensor, qkv_BAd: Tensor, cos_Bd: Tensor, sin_Bd: Tensor
) -> Tensor:
    """Compute ``AttentionKernels.rotate_and_write``: rotated queries [B, H, d], once keys and
    values are in the cache.
    """
    (num_tokens, num_heads, head_dim), kv_heads = qkv_BAd.shape, cached.k_NGd.shape[1]
    assert qkv_BAd.stride()[1:] == (head_dim, 1)
    assert cos_Bd.is_contiguous()
    assert sin_Bd.is_contiguous()
    scales = (None, None) if cached.scales is None else (cached.scales.k_NG, cached.scales.v_NG)
    q_BHd = qkv_BAd.new_empty(num_tokens, num_heads - 2 * kv_heads, head_dim)
    if num_tokens:
        with torch.cuda.device_of(rows_B):  # type: ignore[no-untyped-call]  # as above
            _rotate_and_write[num_tokens, triton.cdiv(num_heads, A_BLOCK)](
                *(qkv_BAd, cos_Bd, sin_Bd, rows_B, q_BHd, cached.k_NGd, cached.v_NGd),
                *(qkv_BAd.stride(0), *scales, num_heads - 2 * kv_heads, kv_heads, head_dim // 2),
                *(int(triton.next_power_of_2(head_dim // 2)), A_BLOCK),
                num_warps=1,
            )
    return q_BHd


def apply_rotary(x_TAd: Tensor, cos_Td: Tensor, sin_Td: Tensor) -> Tensor:
    """Compute ``FusedOps.apply_rotary`` with the arithmetic of ``rotate_and_write``. Heads may be
    part of wider rows.
    """
    num_tokens, num_heads, head_dim = x_TAd.shape
    assert x_TAd.stride()[1:] == (head_dim, 1)
    assert cos_Td.is_contiguous()
    assert sin_Td.is_contiguous()
    out_TAd = x_TAd.new_empty(x_TAd.shape)
    if num_tokens:
        with torch.cuda.device_of(out_TAd):  # type: ignore[no-untyped-call]  # as above
            _rotate_and_write[num_tokens, triton.cdiv(num_heads, A_BLOCK)](
                # without keys, rows and cache are unused
                *(x_TAd, cos_Td, sin_Td, out_TAd, out_TAd, out_TAd, out_TAd),
                *(
                    x_TAd.stride(0),
                    None,
                    None,
                    num_heads,
                    0,
                    head_dim // 2,
                    int(triton.next_power_of_2(head_dim // 2)),
                    A_BLOCK,
                ),
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
    k_NG,
    v_NG,
    num_queries: tl.constexpr,
    kv_heads: tl.constexpr,
    half: tl.constexpr,
    e_block: tl.constexpr,
    a_block: tl.constexpr,
):
    """Compute some heads of one token, in float32: element e of a head is paired with element e +
    half.

    With 32 query heads and 8 key/value heads, heads 32 to 39 are keys, and 40 to 47 are values,
    which are not rotated. Without key/value heads nothing is written to a cache. Fused
    multiply-adds are explicit: a compiler might choose differently for another number of heads.
    ``k_NG`` and ``v_NG`` are scales of FP8 numbers, or None.
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
        key, value = row + a - num_queries, row + a - num_queries - kv_heads
        is_key = is_inside & (a >= num_queries) & (a < num_queries + kv_heads)
        is_value = is_inside & (a >= num_queries + kv_heads)
        to_key, to_value = k_NGd + key * (2 * half) + e, v_NGd + value * (2 * half) + e
        if k_NG is None:
            tl.store(to_key, rotated_first, mask=is_key)
            tl.store(to_key + half, rotated_second, mask=is_key)
            tl.store(to_value, first, mask=is_value)
            tl.store(to_value + half, second, mask=is_value)
        else:  # of keys and values alike
            first = tl.where(is_key, rotated_first, first).to(tl.float32)
            second = tl.where(is_key, rotated_second, second).to(tl.float32)
            is_finite = (tl.abs(first) < float("inf")) & (tl.abs(second) < float("inf"))
            scale = _scale(tl.maximum(tl.abs(first), tl.abs(second)), is_finite)[:, None]
            tl.store(k_NG + key, scale, mask=(a >= num_queries) & (a < num_queries + kv_heads))
            tl.store(
                v_NG + value,
                scale,
                mask=(a >= num_queries + kv_heads) & (a < num_queries + 2 * kv_heads),
            )
            scale_ae = tl.broadcast_to(scale, (a_block, e_block))
            first = tl.div_rn(first, scale_ae).to(k_NGd.dtype.element_ty)
            second = tl.div_rn(second, scale_ae).to(k_NGd.dtype.element_ty)
            tl.store(to_key, first, mask=is_key)
            tl.store(to_key + half, second, mask=is_key)
            tl.store(to_value, first, mask=is_value)
            tl.store(to_value + half, second, mask=is_value)


def cache_rows(ring: PageRings, slots_B: Tensor, positions_B: Tensor) -> Tensor:
    """Compute ``PageRings.rows`` of single tokens, [B]."""
    rows_B = torch.empty_like(positions_B)
    with torch.cuda.device_of(rows_B):  # type: ignore[no-untyped-call]  # as above
        _rows[(triton.cdiv(len(rows_B), B_BLOCK),)](
            ring.pages_SR,
            slots_B,
            positions_B,
            rows_B,
            len(rows_B),
            ring.ring_pages,
            ring.page_size,
            B_BLOCK,
        )
    return rows_B


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["batch", "ring_pages"],
    do_not_specialize_on_alignment=["slots_B", "positions_B"],
)
def _rows(  # type: ignore[no-untyped-def]
    pages_SR,
    slots_B,
    positions_B,
    rows_B,
    batch,
    ring_pages,
    page_size: tl.constexpr,
    b_block: tl.constexpr,
):
    """Find the rows of some tokens. Pages of 16, 5 in a ring, position 83: entry 0, row 3 of that
    page.
    """
    b = tl.program_id(0) * b_block + tl.arange(0, b_block)
    position_b = tl.load(positions_B + b, mask=b < batch, other=0)
    slot_b = tl.load(slots_B + b, mask=b < batch, other=0)
    page_b = tl.load(
        pages_SR + slot_b * ring_pages + position_b // page_size % ring_pages,
        mask=b < batch,
        other=0,
    )
    tl.store(rows_B + b, page_b * page_size + position_b % page_size, mask=b < batch)
