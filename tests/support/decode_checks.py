"""Checks of Triton's decode kernel and of its writes to the cache: they agree with the reference
and with PyTorch.

Shape letters: B single tokens, N rows of a cache, H query heads, G key/value heads, d head_dim.
"""

from functools import partial

import torch
from interpreted_checks import Check
from reference import reference_attention

from tramontane.proto.plan import WindowClass, ring_pages
from tramontane.workers.attention.metadata import build_decode_metadata
from tramontane.workers.attention.rolling_cache import LayerCache, PageRings
from tramontane.workers.attention.triton_cache import (
    apply_rotary,
    cache_rows,
    rotate_and_write,
    write_rows,
)
from tramontane.workers.attention.triton_decode import SplitKDecode
from tramontane.workers.kernels.fused_ops import EAGER

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # relative, by norms
POSITIONS = (0, 1, 15, 16, 63, 64, 100, 500)
MAX_LEN = 512


def _ring(window: int | None, page_size: int, device: str) -> PageRings:
    """Return the page rings of 8 sequences, with pages in random order."""
    entries = ring_pages(window, page_size, MAX_LEN)
    ring = PageRings(
        WindowClass(window, entries, entries * len(POSITIONS)),
        page_size,
        len(POSITIONS),
        torch.device(device),
    )
    pages = torch.randperm(
        entries * len(POSITIONS), generator=torch.Generator().manual_seed(1)
    ).tolist()
    for slot in range(len(POSITIONS)):
        ring.put_pages(slot, 0, tuple(pages[slot * entries : (slot + 1) * entries]))
    ring.flush()
    return ring


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
    """
    ring, head_dim = _ring(window, page_size, device), 32
    num_heads, kv_heads = heads
    generator = torch.Generator().manual_seed(0)
    slots_B = torch.tensor([(3 * i) % len(POSITIONS) for i in range(len(POSITIONS))], device=device)
    positions_B = torch.tensor(POSITIONS, device=device)
    shape = ((ring.num_pages + 1) * page_size, kv_heads, head_dim)
    k_NGd, v_NGd = (torch.full(shape, torch.nan, dtype=dtype) for _ in range(2))
    qk_BHd = torch.randn(len(POSITIONS), num_heads + kv_heads, head_dim, generator=generator).to(
        dtype
    )
    expected = []
    for token, (slot, position) in enumerate(zip(slots_B.tolist(), POSITIONS, strict=True)):
        seen = torch.arange(ring.first_visible(position), position + 1, device=device)
        rows = ring.rows(torch.full_like(seen, slot), seen).cpu()
        k, v = (
            torch.randn(len(rows), kv_heads, head_dim, generator=generator).to(dtype)
            for _ in range(2)
        )
        k_NGd[rows], v_NGd[rows] = k, v
        expected.append(
            reference_attention(
                qk_BHd[token, None, :num_heads].double(), k.double(), v.double(), window
            )
        )
    index = build_decode_metadata(ring, slots_B, positions_B, 0, [], cache_rows)
    kernel = SplitKDecode(kv_heads, block, parts, warps=4, stages=2)
    q_BHd, cached = qk_BHd.to(device)[:, :num_heads], LayerCache(k_NGd.to(device), v_NGd.to(device))
    mask = kernel.build_mask(index)
    for slot in range(len(POSITIONS)):  # the next step begins while this one is in its first layers
        ring.put_pages(slot, 0, (slot,) * ring.ring_pages)
    ring.flush()
    out_BHd = kernel.attend(q_BHd, cached, mask).cpu()
    assert torch.equal(kernel.attend(q_BHd, cached, mask).cpu(), out_BHd), (
        "what one kernel counts disturbs the next"
    )
    assert out_BHd.dtype == dtype
    difference = float((out_BHd.double() - torch.cat(expected)).norm() / torch.cat(expected).norm())
    assert difference < TOLERANCE[dtype], difference


def check_writes(values_are_keys: bool, device: str) -> None:
    """Compare writes of all tokens and of some with PyTorch's, and the rows of positions."""
    ring = _ring(40, 16, device)
    slots_B, positions_B = (
        torch.tensor([2, 0, 7], device=device),
        torch.tensor([5, 16, 500], device=device),
    )
    rows_B = cache_rows(ring, slots_B, positions_B)
    assert torch.equal(rows_B, ring.rows(slots_B, positions_B))
    wide_TGd = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(0)).to(device)
    for k_TGd, tokens in (
        (wide_TGd[:3, :3], None),
        (wide_TGd[:, :3], torch.tensor([3, 0, 1], device=device)),
    ):
        v_TGd = wide_TGd[: len(k_TGd), 3:]
        ours, theirs = (
            LayerCache.zeros((1000, 3, 5), torch.float32, torch.device(device), values_are_keys)
            for _ in range(2)
        )
        write_rows(ours, rows_B, k_TGd, v_TGd, tokens)
        theirs.write(rows_B, k_TGd, v_TGd, tokens)
        assert torch.equal(ours.k_NGd, theirs.k_NGd)
        assert torch.equal(ours.v_NGd, theirs.v_NGd)
    write_rows(ours, rows_B[:0], k_TGd[:0], v_TGd[:0], None)  # nothing


def check_rotation(head_dim: int, dtype: torch.dtype, device: str) -> None:
    """Compare rotated queries and what is in the cache with PyTorch; other rows stay what they
    were.
    """
    generator, num_queries, num_keys = torch.Generator().manual_seed(0), 6, 2
    qkv_BHd = torch.randn(3, num_queries + 2 * num_keys, head_dim, generator=generator).to(dtype)
    cos_Bd, sin_Bd = (torch.randn(3, head_dim, generator=generator).to(dtype) for _ in range(2))
    k_NGd, v_NGd = (
        torch.randn(9, num_keys, head_dim, generator=generator).to(dtype) for _ in range(2)
    )
    cached, rows_B = (
        LayerCache(k_NGd.clone().to(device), v_NGd.clone().to(device)),
        torch.tensor([7, 0, 4]),
    )
    q_BQd = rotate_and_write(
        cached, rows_B.to(device), qkv_BHd.to(device), cos_Bd.to(device), sin_Bd.to(device)
    )
    rotated_BHd = EAGER.apply_rotary(*(each.double() for each in (qkv_BHd, cos_Bd, sin_Bd)))
    k_NGd[rows_B] = rotated_BHd[:, num_queries : num_queries + num_keys].to(dtype)
    v_NGd[rows_B] = qkv_BHd[:, num_queries + num_keys :]
    assert q_BQd.dtype == dtype
    torch.testing.assert_close(
        q_BQd.cpu().double(),
        rotated_BHd[:, :num_queries],
        rtol=TOLERANCE[dtype],
        atol=TOLERANCE[dtype],
    )
    torch.testing.assert_close(
        cached.k_NGd.cpu(), k_NGd, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )
    assert torch.equal(cached.v_NGd.cpu(), v_NGd)
    others = [row for row in range(9) if row not in rows_B.tolist()]
    assert torch.equal(cached.k_NGd.cpu()[others], k_NGd[others])
    turned_BHd = qkv_BHd[:, : num_queries + num_keys].to(device)  # rows of a wider tensor
    alone_BHd = apply_rotary(turned_BHd, cos_Bd.to(device), sin_Bd.to(device))
    assert torch.equal(alone_BHd, torch.cat([q_BQd, cached.k_NGd[rows_B.to(device)]], dim=1)), (
        "the same bits without a cache"
    )
    assert torch.equal(
        apply_rotary(turned_BHd[1:2, 3:], cos_Bd[1:2].to(device), sin_Bd[1:2].to(device)),
        alone_BHd[1:2, 3:],
    )


BF16, FP32 = torch.bfloat16, torch.float32
CHECKS: dict[str, Check] = {
    **{
        f"decode, window {window}, pages of {page_size}, {block} keys in {parts} parts": partial(
            check_decode, window, page_size, block, parts, (4, 2), FP32
        )
        for window, page_size, block in (
            (None, 16, 64),
            (40, 16, 16),
            (40, 64, 32),
            (40, 64, 64),
            (40, 24, 16),
        )
        for parts in (1, 3)
    },
    "more parts than are combined at a time": partial(check_decode, None, 16, 16, 32, (4, 2), FP32),
    "more parts than there are blocks": partial(check_decode, 40, 16, 16, 20, (4, 2), FP32),
    "decode in bfloat16": partial(check_decode, 40, 16, 64, 4, (6, 2), BF16),
    "decode in float16": partial(check_decode, None, 64, 64, 2, (8, 1), torch.float16),
    "decode with a head of its own for every query": partial(
        check_decode, 40, 16, 64, 4, (3, 3), FP32
    ),
    "writes": partial(check_writes, False),
    "writes of what is both keys and values": partial(check_writes, True),
    **{
        f"rotation of {d} numbers in {dtype}": partial(check_rotation, d, dtype)
        for d in (8, 20, 128)
        for dtype in (FP32, BF16)
    },
}
