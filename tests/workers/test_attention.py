"""Every way to attend computes the reference, and every mask is the one the definition gives, entry by entry."""

from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch
from torch import Tensor

from tramontane.proto.plan import CachePlan, WindowClass, ring_pages
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import Chunk, MicroBatch
from tramontane.workers.attention import SdpaKernels, reference_attention, visible_keys
from tramontane.workers.rolling_cache import SequenceTable
from tramontane.workers.step_index import DecodeGroup, PrefillIndex, build_step_index

WINDOWS = [None, 1, 3, 16]
TOLERANCES = [pytest.param(torch.float32, 1e-5, id="float32"), pytest.param(torch.bfloat16, 2e-2, id="bfloat16")]
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
]
HEADS, HEAD_DIM = 4, 8


def _indexes(
    chunks: Seq[tuple[int, int]], window: int | None, page_size: int = 4
) -> tuple[PrefillIndex | None, DecodeGroup | None]:
    """What the stage builds for these chunks, each of a sequence of its own with ``start`` tokens behind it."""
    ring = ring_pages(window, page_size, 256)
    cache = CachePlan(page_size, (WindowClass(window, ring, ring * len(chunks)),))
    table = SequenceTable(cache, len(chunks), torch.device("cpu"))
    pages = [(tuple(range(ring * i, ring * (i + 1))),) for i in range(len(chunks))]
    sampling = SamplingParams()
    past = tuple(Chunk(i, 0, (0,) * start, pages[i], sampling, False) for i, (start, _) in enumerate(chunks) if start)
    now = tuple(
        Chunk(i, start, (0,) * n, ((),) if start else pages[i], None if start else sampling, False)
        for i, (start, n) in enumerate(chunks)
    )
    if past:
        table.update(MicroBatch(0, 0, past))
    batch = MicroBatch(0, 1, now)
    table.update(batch)
    index = build_step_index(batch, table, torch.device("cpu"))
    decode = index.decode[0]
    return index.prefill[0], decode and decode.groups[0]


def _prefill_index(chunks: Seq[tuple[int, int]], window: int | None) -> PrefillIndex:
    index, _ = _indexes(chunks, window)
    assert index is not None
    return index


def _decode_index(positions: Seq[int], window: int | None) -> DecodeGroup:
    _, index = _indexes([(position, 1) for position in positions], window)
    assert index is not None
    return index


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# The reference itself, against loops


def _sees(query_position: int, key_position: int, window: int | None) -> bool:
    return key_position <= query_position and (window is None or query_position - key_position < window)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (1, 9), (4, 4), (3, 20), (20, 20), (25, 40)])
def test_visible_keys_by_definition(num_queries: int, num_keys: int, window: int | None) -> None:
    first = num_keys - num_queries
    expected = [[_sees(first + i, j, window) for j in range(num_keys)] for i in range(num_queries)]
    assert visible_keys(num_queries, num_keys, window).tolist() == expected


def test_visible_keys_worked_example() -> None:
    assert visible_keys(2, 4, 3).int().tolist() == [[1, 1, 1, 0], [0, 1, 1, 1]]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_reference_by_definition(kv_heads: int, window: int | None) -> None:
    q, k, v = (
        _random(n, heads, HEAD_DIM, seed=n + i) for i, (n, heads) in enumerate([(6, HEADS), (20, kv_heads), (20, kv_heads)])
    )
    out = reference_attention(q, k, v, window)
    for i in range(6):
        keys = [j for j in range(20) if _sees(14 + i, j, window)]
        for head in range(HEADS):
            shared = head * kv_heads // HEADS
            weights = torch.softmax((k[keys, shared] @ q[i, head]).double() / HEAD_DIM**0.5, 0)
            torch.testing.assert_close(out[i, head].double(), weights @ v[keys, shared].double(), rtol=0, atol=1e-6)


# PyTorch's kernels against the reference


@pytest.mark.parametrize(("dtype", "atol"), TOLERANCES)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("chunks", PREFILLS)
def test_sdpa_prefill(chunks: list[tuple[int, int]], window: int | None, kv_heads: int, dtype: torch.dtype, atol: float) -> None:
    index = _prefill_index(chunks, window)
    q = _random(sum(index.query_lens), HEADS, HEAD_DIM, dtype=dtype, seed=1)
    k, v = (_random(sum(index.key_lens), kv_heads, HEAD_DIM, dtype=dtype, seed=s) for s in (2, 3))
    kernels = SdpaKernels()
    out = kernels.prefill(q, k, v, kernels.prefill_bias(index))
    blocks = zip(q.split(index.query_lens), k.split(index.key_lens), v.split(index.key_lens), strict=True)
    expected = torch.cat([reference_attention(*block, window) for block in blocks])
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected, rtol=0, atol=atol)


@pytest.mark.parametrize(("dtype", "atol"), TOLERANCES)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("positions", DECODES)
def test_sdpa_decode(positions: list[int], window: int | None, kv_heads: int, dtype: torch.dtype, atol: float) -> None:
    index = _decode_index(positions, window)
    batch, longest = index.key_rows.shape
    q = _random(batch, HEADS, HEAD_DIM, dtype=dtype, seed=1)
    k, v = (_random(batch, longest, kv_heads, HEAD_DIM, dtype=dtype, seed=s) for s in (2, 3))
    for row, num_keys in enumerate(index.key_lens.tolist()):  # padding that would be noticed
        k[row, num_keys:] = 50.0 * q[row, 0]
        v[row, num_keys:] = 1e4
    kernels = SdpaKernels()
    out = kernels.decode(q, k, v, kernels.decode_bias(index))
    expected = [
        reference_attention(q[row, None], k[row, :num_keys], v[row, :num_keys], window)
        for row, num_keys in enumerate(index.key_lens.tolist())
    ]
    assert out.dtype == dtype
    torch.testing.assert_close(out, torch.cat(expected), rtol=0, atol=atol)


# xformers: its kernels need CUDA, its masks are built here as there


@pytest.fixture(scope="module")
def xformers_kernels() -> Any:  # noqa: ANN401 - the module is not there on every platform
    pytest.importorskip("xformers", reason="xformers is published for Linux on x86-64 only")
    from tramontane.workers.xformers_kernels import XformersKernels

    return XformersKernels()


def _additive(visible: list[list[bool]]) -> Tensor:
    return torch.zeros(len(visible), len(visible[0])).masked_fill(~torch.tensor(visible), -torch.inf)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("chunks", PREFILLS)
def test_xformers_prefill_mask(xformers_kernels: Any, chunks: list[tuple[int, int]], window: int | None) -> None:  # noqa: ANN401
    index = _prefill_index(chunks, window)
    shape = (sum(index.query_lens), sum(index.key_lens))
    mask = xformers_kernels.prefill_bias(index).materialize(shape)

    blocks = [visible_keys(n, m, window) for n, m in zip(index.query_lens, index.key_lens, strict=True)]
    assert torch.equal(mask, _additive(torch.block_diag(*blocks).bool().tolist()))

    # The same from absolute positions, without anything of the code under test.
    queries = [(i, start + t) for i, (start, n) in enumerate(chunks) for t in range(n)]
    keys = [
        (i, position)
        for i, (start, n) in enumerate(chunks)
        for position in range(0 if window is None else max(0, start - window + 1), start + n)
    ]
    assert shape == (len(queries), len(keys))
    assert torch.equal(mask, _additive([[i == j and _sees(p, s, window) for j, s in keys] for i, p in queries]))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("positions", DECODES)
def test_xformers_decode_mask(xformers_kernels: Any, positions: list[int], window: int | None) -> None:  # noqa: ANN401
    index = _decode_index(positions, window)
    batch, longest = index.key_rows.shape
    mask = xformers_kernels.decode_bias(index).materialize((batch, batch * longest))
    num_visible = [position + 1 if window is None else min(position + 1, window) for position in positions]
    assert index.key_lens.tolist() == num_visible
    assert longest == max(num_visible)
    expected = [[row == j and slot < num_visible[row] for j in range(batch) for slot in range(longest)] for row in range(batch)]
    assert torch.equal(mask, _additive(expected))


@pytest.mark.parametrize("window", WINDOWS)
def test_both_kernels_hide_the_same_decode_keys(xformers_kernels: Any, window: int | None) -> None:  # noqa: ANN401
    index = _decode_index([3, 0, 15, 16, 2, 50, 1], window)
    batch, longest = index.key_rows.shape
    blocks = SdpaKernels().decode_bias(index).reshape(batch, 1, longest)
    mask = xformers_kernels.decode_bias(index).materialize((batch, batch * longest))
    assert torch.equal(mask, _additive(torch.block_diag(*blocks).bool().tolist()))
