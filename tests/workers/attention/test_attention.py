"""Every way to attend computes the reference, and every mask is the one the definition gives, entry
by entry.
"""

from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch
from reference import reference_attention
from torch import Tensor

from tramontane.proto.plan import CachePlan, WindowClass, ring_pages
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import Chunk, MicroBatch
from tramontane.workers.attention.backend import DecodeKernel, causal_window_mask
from tramontane.workers.attention.metadata import (
    DecodeMetadata,
    PrefillMetadata,
    build_attention_metadata,
)
from tramontane.workers.attention.rolling_cache import LayerCache, StageSequences
from tramontane.workers.attention.sdpa_backend import (
    GatheredDecode,
    PagedDecode,
    SdpaPrefill,
    split_by_window,
)

WINDOWS = [None, 1, 3, 16]
TOLERANCES = [
    pytest.param(torch.float32, 1e-5, id="float32"),
    pytest.param(torch.bfloat16, 2e-2, id="bfloat16"),
]
# (start, tokens) of every chunk: first and later ones, shorter and longer than the windows
PREFILLS = [
    pytest.param([(0, 5)], id="one first chunk"),
    pytest.param([(0, 20), (0, 2), (0, 33)], id="first chunks"),
    pytest.param([(7, 2), (40, 25), (2, 16), (100, 3)], id="later chunks"),
    pytest.param([(16, 9), (0, 17), (15, 2), (0, 3), (1, 4)], id="mixed"),
]
# positions of single tokens
DECODES = [
    pytest.param([0], id="one first token"),
    pytest.param([25], id="one token"),
    pytest.param([3, 0, 15, 16, 2, 50, 1], id="mixed"),
    pytest.param([1030, 2500, 1023], id="long"),
]
HEADS, HEAD_DIM = 4, 8
MAX_LEN = 8192


def _indexes(
    chunks: Seq[tuple[int, int]], window: int | None, page_size: int = 4
) -> tuple[PrefillMetadata | None, DecodeMetadata | None]:
    """What the stage builds for these chunks, each of a sequence of its own with ``start`` tokens
    behind it.
    """
    ring = ring_pages(window, page_size, MAX_LEN)
    cache = CachePlan(page_size, (WindowClass(window, ring, ring * len(chunks)),))
    table = StageSequences(cache, len(chunks), torch.device("cpu"))
    mixed = torch.randperm(ring * len(chunks), generator=torch.Generator().manual_seed(3)).tolist()
    pages = [(tuple(mixed[ring * i : ring * (i + 1)]),) for i in range(len(chunks))]
    sampling = SamplingParams()
    past = tuple(
        Chunk(i, 0, (0,) * start, pages[i], sampling, False)
        for i, (start, _) in enumerate(chunks)
        if start
    )
    now = tuple(
        Chunk(i, start, (0,) * n, ((),) if start else pages[i], None if start else sampling, False)
        for i, (start, n) in enumerate(chunks)
    )
    if past:
        table.update(MicroBatch(0, 0, past))
    batch = MicroBatch(0, 1, now)
    table.update(batch)
    index = build_attention_metadata(batch, table, torch.device("cpu"))
    return index.prefill[0], index.decode[0]


def _prefill_index(chunks: Seq[tuple[int, int]], window: int | None) -> PrefillMetadata:
    index, _ = _indexes(chunks, window)
    assert index is not None
    return index


def _decode_index(positions: Seq[int], window: int | None, page_size: int = 4) -> DecodeMetadata:
    _, index = _indexes([(position, 1) for position in positions], window, page_size)
    assert index is not None
    return index


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# The reference itself, against loops


def _sees(query_position: int, key_position: int, window: int | None) -> bool:
    return key_position <= query_position and (
        window is None or query_position - key_position < window
    )


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(
    ("num_queries", "num_keys"), [(1, 1), (1, 9), (4, 4), (3, 20), (20, 20), (25, 40)]
)
def test_visible_keys_by_definition(num_queries: int, num_keys: int, window: int | None) -> None:
    first = num_keys - num_queries
    expected = [[_sees(first + i, j, window) for j in range(num_keys)] for i in range(num_queries)]
    assert causal_window_mask(num_queries, num_keys, window).tolist() == expected


def test_visible_keys_worked_example() -> None:
    assert causal_window_mask(2, 4, 3).int().tolist() == [[1, 1, 1, 0], [0, 1, 1, 1]]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_reference_by_definition(kv_heads: int, window: int | None) -> None:
    q, k, v = (
        _random(n, heads, HEAD_DIM, seed=n + i)
        for i, (n, heads) in enumerate([(6, HEADS), (20, kv_heads), (20, kv_heads)])
    )
    out = reference_attention(q, k, v, window)
    for i in range(6):
        keys = [j for j in range(20) if _sees(14 + i, j, window)]
        for head in range(HEADS):
            shared = head * kv_heads // HEADS
            weights = torch.softmax((k[keys, shared] @ q[i, head]).double() / HEAD_DIM**0.5, 0)
            torch.testing.assert_close(
                out[i, head].double(), weights @ v[keys, shared].double(), rtol=0, atol=1e-6
            )


# PyTorch's kernels against the reference


@pytest.mark.pairwise
@pytest.mark.parametrize(("dtype", "atol"), TOLERANCES)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("chunks", PREFILLS)
def test_sdpa_prefill(
    chunks: list[tuple[int, int]],
    window: int | None,
    kv_heads: int,
    dtype: torch.dtype,
    atol: float,
) -> None:
    index = _prefill_index(chunks, window)
    q = _random(sum(index.query_lens), HEADS, HEAD_DIM, dtype=dtype, seed=1)
    k, v = (_random(sum(index.key_lens), kv_heads, HEAD_DIM, dtype=dtype, seed=s) for s in (2, 3))
    kernel = SdpaPrefill()
    out = kernel.attend(q, k, v, kernel.build_mask(index))
    blocks = zip(
        q.split(index.query_lens), k.split(index.key_lens), v.split(index.key_lens), strict=True
    )
    expected = torch.cat([reference_attention(*block, window) for block in blocks])
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected, rtol=0, atol=atol)


def test_a_chunk_longer_than_its_window_is_split_into_blocks_of_queries() -> None:
    assert split_by_window(200, 250, 100) == [
        (slice(0, 100), slice(0, 150)),
        (slice(100, 200), slice(51, 250)),
    ]
    assert split_by_window(100, 199, 100) == [(slice(0, 100), slice(0, 199))]
    assert split_by_window(200, 200, None) == [(slice(0, 200), slice(0, 200))]


@pytest.mark.parametrize("window", [1, 3, 63, 64, 100, 511])
@pytest.mark.parametrize(
    ("num_queries", "cached"), [(1, 0), (64, 0), (65, 70), (130, 62), (513, 510), (1000, 0)]
)
def test_blocks_of_a_window_see_what_the_window_sees_and_few_other_keys(
    num_queries: int, cached: int, window: int
) -> None:
    cached = min(cached, window - 1)
    whole = causal_window_mask(num_queries, num_queries + cached, window)
    blocks = split_by_window(num_queries, num_queries + cached, window)
    seen = torch.zeros_like(whole)
    for queries, keys in blocks:
        seen[queries, keys] = causal_window_mask(
            queries.stop - queries.start, keys.stop - keys.start, window
        )
    assert torch.equal(seen, whole)
    scores = sum(
        (queries.stop - queries.start) * (keys.stop - keys.start) for queries, keys in blocks
    )
    assert scores <= num_queries * (max(window, 64) + window - 1)


def _filled(
    index: DecodeMetadata, kv_heads: int, dtype: torch.dtype, head_dim: int = HEAD_DIM
) -> LayerCache:
    """A cache with a scratch page. What no token sees would be noticed."""
    num_rows = (int(index.ring.pages_BR.max()) + 2) * index.ring.page_size
    cached = LayerCache.zeros((num_rows, kv_heads, head_dim), dtype, torch.device("cpu"))
    cached.k_NGd.fill_(50.0)
    cached.v_NGd.fill_(1e4)
    for token, rows in enumerate(_seen_rows(index)):
        cached.k_NGd[rows], cached.v_NGd[rows] = (
            _random(len(rows), kv_heads, head_dim, dtype=dtype, seed=seed + 9 * token)
            for seed in (2, 3)
        )
    return cached


def _seen_rows(index: DecodeMetadata) -> list[Tensor]:
    """Of each token, in position order, from the rows of positions alone."""
    window = index.ring.window
    seen = []
    for token, position in enumerate(index.starts):
        positions = torch.arange(
            0 if window is None else max(0, position - window + 1), position + 1
        )
        seen.append(index.ring.rows(torch.full_like(positions, token), positions))
    return seen


def _expected(index: DecodeMetadata, q: Tensor, cached: LayerCache) -> Tensor:
    return torch.cat(
        [
            reference_attention(
                q[token, None], cached.k_NGd[rows], cached.v_NGd[rows], index.ring.window
            )
            for token, rows in enumerate(_seen_rows(index))
        ]
    )


@pytest.mark.pairwise
@pytest.mark.parametrize(("dtype", "atol"), TOLERANCES)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("positions", DECODES)
@pytest.mark.parametrize("kernel", [GatheredDecode(), PagedDecode()], ids=["gathered", "paged"])
def test_sdpa_decode(
    kernel: DecodeKernel,
    positions: list[int],
    window: int | None,
    kv_heads: int,
    dtype: torch.dtype,
    atol: float,
) -> None:
    index = _decode_index(positions, window)
    q, cached = (
        _random(len(positions), HEADS, HEAD_DIM, dtype=dtype, seed=1),
        _filled(index, kv_heads, dtype),
    )
    out = kernel.attend(q, cached, kernel.build_mask(index))
    assert out.dtype == dtype
    torch.testing.assert_close(out, _expected(index, q, cached), rtol=0, atol=atol)


# xformers: its kernels need CUDA, its masks are built here as there


@pytest.fixture(scope="module")
def xformers_kernels() -> Any:  # the module is not there on every platform
    pytest.importorskip("xformers", reason="xformers is published for Linux on x86-64 only")
    from tramontane.workers.attention import xformers_backend as xformers_kernels

    return xformers_kernels


def _additive(visible: list[list[bool]]) -> Tensor:
    return torch.zeros(len(visible), len(visible[0])).masked_fill(
        ~torch.tensor(visible), -torch.inf
    )


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("chunks", PREFILLS)
def test_xformers_prefill_mask(
    xformers_kernels: Any, chunks: list[tuple[int, int]], window: int | None
) -> None:
    index = _prefill_index(chunks, window)
    shape = (sum(index.query_lens), sum(index.key_lens))
    mask = xformers_kernels.PackedPrefill(None).build_mask(index).materialize(shape)

    blocks = [
        causal_window_mask(n, m, window)
        for n, m in zip(index.query_lens, index.key_lens, strict=True)
    ]
    assert torch.equal(mask, _additive(torch.block_diag(*blocks).bool().tolist()))

    # The same from absolute positions, without anything of the code under test.
    queries = [(i, start + t) for i, (start, n) in enumerate(chunks) for t in range(n)]
    keys = [
        (i, position)
        for i, (start, n) in enumerate(chunks)
        for position in range(0 if window is None else max(0, start - window + 1), start + n)
    ]
    assert shape == (len(queries), len(keys))
    assert torch.equal(
        mask, _additive([[i == j and _sees(p, s, window) for j, s in keys] for i, p in queries])
    )
