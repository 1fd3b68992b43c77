"""Checks of Triton's kernels on a cache in FP8: they quantize as PyTorch does, bit for bit, and
read what they have written.

Shape letters: B single tokens, T tokens, N rows of a cache, H query heads, G key/value heads, d
head_dim.
"""

from functools import partial

import torch
from decode_checks import POSITIONS, TOLERANCE, _ring
from interpreted_checks import Check
from reference import reference_attention
from torch import Tensor

from tramontane.workers.attention.metadata import PrefillMetadata, build_decode_metadata
from tramontane.workers.attention.rolling_cache import LayerCache
from tramontane.workers.attention.triton_attention import TritonDecode, TritonPrefill
from tramontane.workers.attention.triton_cache import (
    cache_rows,
    read_back,
    read_rows,
    rotate_and_write,
    write_rows,
)
from tramontane.workers.attention.triton_decode import SplitKDecode

BF16, FP32 = torch.bfloat16, torch.float32


def _hard_rows(num_rows: int, heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Return vectors of many sizes, [N, heads, d]: zeros, subnormals, some that are not finite, and
    one with an outlier.
    """
    x = torch.randn(num_rows, heads, head_dim, generator=torch.Generator().manual_seed(3))
    x *= torch.logspace(-36, 30, num_rows)[:, None, None]
    x[0] = 0
    x[1] = 1e-39
    x[2, 0, 1] = torch.nan
    x[3, -1, -1] = torch.inf
    x[4, 0, 0] = -torch.inf
    x[5, :, 0] = 1e6
    return x.to(dtype)


def _assert_same(ours: LayerCache, theirs: LayerCache) -> None:
    assert ours.scales is not None
    assert theirs.scales is not None
    for one, other in ((ours.k_NGd, theirs.k_NGd), (ours.v_NGd, theirs.v_NGd)):
        assert one.dtype == other.dtype
        # a NaN may have either sign
        bits = [
            torch.where(x.float().isnan(), 0x7F, x.view(torch.uint8))
            for x in (one.cpu(), other.cpu())
        ]
        assert torch.equal(*bits), (bits[0] != bits[1]).nonzero()
    for one, other in (
        (ours.scales.k_NG, theirs.scales.k_NG),
        (ours.scales.v_NG, theirs.scales.v_NG),
    ):
        torch.testing.assert_close(one.cpu(), other.cpu(), rtol=0, atol=0, equal_nan=True)


def _empty(
    num_rows: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str
) -> LayerCache:
    return LayerCache.zeros(
        (num_rows, kv_heads, head_dim), dtype, torch.device(device), is_fp8=True
    )


def check_writes(kv_heads: int, head_dim: int, dtype: torch.dtype, device: str) -> None:
    """Compare writes of all tokens and of some with PyTorch's, and what is read back, of rows of a
    wider tensor.
    """
    wide_TGd = _hard_rows(12, 2 * kv_heads, head_dim, dtype).to(device)
    k_TGd, v_TGd = wide_TGd.chunk(2, dim=1)
    rows_W, tokens_W = torch.randperm(40)[:12], torch.tensor([11, 0, 2, 5])
    for rows, tokens in ((rows_W, None), (rows_W[:4], tokens_W)):
        ours, theirs = (_empty(40, kv_heads, head_dim, dtype, device) for _ in range(2))
        write_rows(
            ours, rows.to(device), k_TGd, v_TGd, None if tokens is None else tokens.to(device)
        )
        theirs.write(rows.to(device), k_TGd, v_TGd, None if tokens is None else tokens.to(device))
        _assert_same(ours, theirs)
    for one, other in zip(
        read_rows(ours, rows_W.to(device)), ours.read(rows_W.to(device)), strict=True
    ):
        assert one.dtype == dtype
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    write_rows(ours, rows.to(device)[:0], k_TGd[:0], v_TGd[:0], None)  # nothing
    for one, other in zip(read_back(ours, k_TGd, v_TGd), ours.read_back(k_TGd, v_TGd), strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def check_rotation(head_dim: int, dtype: torch.dtype, device: str) -> None:
    """What is in the cache are the numbers of the keys and values that a cache in their own dtype
    gets.
    """
    generator, num_queries, num_keys = torch.Generator().manual_seed(0), 6, 2
    qkv_BHd = (
        torch.randn(5, num_queries + 2 * num_keys, head_dim, generator=generator)
        .to(dtype)
        .to(device)
    )
    qkv_BHd[1, num_queries] = 0
    qkv_BHd[2, num_queries + 1, head_dim // 2 + 1] = torch.nan
    qkv_BHd[3, num_queries + num_keys, 1] = torch.inf
    cos_Bd, sin_Bd = (
        torch.randn(5, head_dim, generator=generator).to(dtype).to(device) for _ in range(2)
    )
    rows_B = torch.tensor([7, 0, 4, 8, 2], device=device)
    plain = LayerCache.zeros((9, num_keys, head_dim), dtype, torch.device(device))
    fp8 = _empty(9, num_keys, head_dim, dtype, device)
    q_BQd = rotate_and_write(fp8, rows_B, qkv_BHd, cos_Bd, sin_Bd)
    expected_BQd = rotate_and_write(plain, rows_B, qkv_BHd, cos_Bd, sin_Bd)
    torch.testing.assert_close(q_BQd, expected_BQd, rtol=0, atol=0, equal_nan=True)
    written = _empty(9, num_keys, head_dim, dtype, device)
    written.write(rows_B, plain.k_NGd[rows_B], plain.v_NGd[rows_B])
    _assert_same(fp8, written)


def check_decode(
    window: int | None,
    page_size: int,
    block: int,
    parts: int,
    heads: tuple[int, int],
    dtype: torch.dtype,
    device: str,
) -> None:
    """Compare tokens at several positions with the reference, in float64; rows that none of them
    sees are NaN.

    One sequence has a key that is NaN: its tokens that see it become NaN, and no others.
    """
    ring, head_dim = _ring(window, page_size, device), 32
    num_heads, kv_heads = heads
    generator = torch.Generator().manual_seed(0)
    positions_B = torch.tensor(POSITIONS, device=device)
    slots_B = torch.arange(len(POSITIONS), device=device)
    cached = _empty((ring.num_pages + 1) * page_size, kv_heads, head_dim, dtype, device)
    assert cached.scales is not None
    for scale in (cached.scales.k_NG, cached.scales.v_NG):
        scale.fill_(torch.nan)
    q_BHd = torch.randn(len(POSITIONS), num_heads, head_dim, generator=generator).to(dtype)
    lost, expected = 4, []
    for token, position in enumerate(POSITIONS):
        seen = torch.arange(ring.first_visible(position), position + 1, device=device)
        rows = ring.rows(torch.full_like(seen, token), seen)
        k, v = (torch.randn(len(rows), kv_heads, head_dim, generator=generator) for _ in range(2))
        sizes = torch.logspace(-2, 1, len(rows))[:, None, None]
        k[:, :, 3] *= 8  # an outlier
        k, v = k.to(dtype), (v * sizes).to(dtype)
        if token == lost:
            k[0] = torch.nan
        write_rows(cached, rows, k.to(device), v.to(device), None)
        k, v = (each.cpu().double() for each in cached.read(rows))
        expected.append(reference_attention(q_BHd[token, None].double(), k, v, window))
    index = build_decode_metadata(ring, slots_B, positions_B, 0, [], cache_rows)
    kernel = SplitKDecode(kv_heads, block, parts, warps=4, stages=2)
    out_BHd = kernel.attend(q_BHd.to(device), cached, kernel.build_mask(index)).cpu()
    assert out_BHd.dtype == dtype
    assert out_BHd[lost].isnan().all()
    others = [token for token in range(len(POSITIONS)) if token != lost]
    wanted = torch.cat(expected)[others]
    difference = float((out_BHd[others].double() - wanted).norm() / wanted.norm())
    assert difference < 2 * TOLERANCE[dtype], difference


def check_one_kernel(window: int | None, dtype: torch.dtype, device: str) -> None:
    """A prompt has the same bits in one piece and as single tokens; a value that is not finite
    reaches only those that see it.
    """
    (num_heads, kv_heads), head_dim, length = (4, 2), 32, 70
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(length, count, head_dim, generator=generator).to(dtype).to(device)
        for count in (num_heads, kv_heads, kv_heads)
    )
    v[50, 1, 0] = torch.inf
    ring = _ring(window, 16, device)
    positions = torch.arange(length, device=device)
    slots = torch.full_like(positions, 2)
    cached = _empty((ring.num_pages + 1) * 16, kv_heads, head_dim, dtype, device)
    assert cached.scales is not None
    for scale in (cached.scales.k_NG, cached.scales.v_NG):
        scale.fill_(torch.nan)
    none = torch.empty(0, dtype=torch.int64, device=device)
    prefill, decode = TritonPrefill(num_heads // kv_heads, 16), TritonDecode()
    index = PrefillMetadata(window, (length,), (length,), (0,), none, none, none, none)
    whole = prefill.attend_fp8(q, cached.quantized(k, v), prefill.build_mask(index))
    for position in range(length):  # a ring keeps the last positions only
        one = slice(position, position + 1)
        write_rows(cached, ring.rows(slots[one], positions[one]), k[one], v[one], None)
        if position % 9 and position not in (49, 50, 51):
            continue
        width = ring.ring_pages
        step = build_decode_metadata(ring, slots[one], positions[one], width, [position])
        out = decode.attend(q[one], cached, decode.build_mask(step))
        torch.testing.assert_close(out, whole[one], rtol=0, atol=0, equal_nan=True)
    assert whole[:50].isfinite().all()
    assert whole[50:, 2:].isnan().all() if window is None else whole[50:60, 2:].isnan().all()
    assert whole[:, :2].isfinite().all()


CHECKS: dict[str, Check] = {
    **{
        f"writes of {heads} heads of {d} in {dtype}": partial(check_writes, heads, d, dtype)
        for heads, d in ((3, 5), (2, 32), (8, 128))
        for dtype in (FP32, BF16)
    },
    **{
        f"rotation of {d} numbers in {dtype}": partial(check_rotation, d, dtype)
        for d in (8, 20, 128)
        for dtype in (FP32, BF16)
    },
    **{
        f"decode, window {window}, pages of {page_size}, {block} keys in {parts} parts, {dtype}": (
            partial(check_decode, window, page_size, block, parts, (4, 2), dtype)
        )
        for window, page_size, block, parts, dtype in (
            (None, 16, 64, 3, BF16),
            (40, 64, 64, 1, FP32),
            (40, 24, 16, 20, FP32),
        )
    },
    "decode with a head of its own for every query": partial(
        check_decode, 40, 16, 64, 4, (3, 3), FP32
    ),
    **{
        f"one kernel, window {window}, {dtype}": partial(check_one_kernel, window, dtype)
        for window in (None, 20)
        for dtype in (FP32, BF16)
    },
}
