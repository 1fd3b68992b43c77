"""The kernel in C for single tokens computes what PyTorch's attention does, for each token on its
own.
"""

from dataclasses import replace

import pytest
import torch
from native_attention import GEOMETRIES, TOLERANCE, threads
from torch import Tensor

from tramontane.proto.plan import WindowClass, ring_pages
from tramontane.workers.attention.metadata import DecodeMetadata, build_decode_metadata
from tramontane.workers.attention.native_backend import NativeDecode
from tramontane.workers.attention.rolling_cache import LayerCache, PageRings, padded_width
from tramontane.workers.attention.sdpa_backend import PagedDecode

pytestmark = pytest.mark.usefixtures("compiler")
CPU = torch.device("cpu")
MAX_LEN = 320
# Positions at the borders of pages and windows, and in any order.
STARTS = [0, 1, 15, 16, 17, 63, 64, 299, 31, 128, 5]


def _case(
    window: int | None,
    page_size: int,
    heads: tuple[int, int],
    head_dim: int,
    dtype: str,
    starts: list[int],
) -> tuple[Tensor, LayerCache, DecodeMetadata]:
    """Queries, a cache in which the rows that no token sees are NaN, and the index of single tokens
    at these positions.
    """
    entries = ring_pages(window, page_size, MAX_LEN)
    ring = PageRings(
        WindowClass(window, entries, entries * len(starts)), page_size, len(starts), CPU
    )
    pages = torch.randperm(
        entries * len(starts), generator=torch.Generator().manual_seed(1)
    ).tolist()
    for slot in range(len(starts)):
        ring.put_pages(slot, 0, tuple(pages[slot * entries : (slot + 1) * entries]))
    ring.flush()
    slots, positions = torch.arange(len(starts)), torch.tensor(starts)
    index = build_decode_metadata(ring, slots, positions, padded_width(starts, ring), starts)
    torch.manual_seed(0)
    cache = LayerCache(
        *(
            torch.full(((ring.num_pages + 1) * page_size, heads[1], head_dim), torch.nan)
            for _ in range(2)
        )
    )
    for slot, start in enumerate(starts):
        seen = torch.arange(ring.first_visible(start), start + 1)
        rows = ring.rows(torch.full_like(seen, slot), seen)
        cache.write(rows, *(torch.randn(len(seen), heads[1], head_dim) for _ in range(2)))
    kind = getattr(torch, dtype)
    return (
        torch.randn(len(starts), heads[0], head_dim).to(kind),
        LayerCache(cache.k_NGd.to(kind), cache.v_NGd.to(kind)),
        index,
    )


def _expected(q: Tensor, cache: LayerCache, index: DecodeMetadata) -> Tensor:
    """In float64; PyTorch multiplies also what a mask hides, so that is zero there."""
    reference = PagedDecode()
    exact = LayerCache(*(x.double().nan_to_num() for x in (cache.k_NGd, cache.v_NGd)))
    return reference.attend(q.double(), exact, reference.build_mask(index))


def _native(q: Tensor, cache: LayerCache, index: DecodeMetadata) -> Tensor:
    group, dtype = q.shape[1] // cache.k_NGd.shape[1], str(q.dtype).removeprefix("torch.")
    kernel = NativeDecode(q.shape[2], group, index.ring.page_size, dtype)
    return kernel.attend(q, cache, kernel.build_mask(index))


@pytest.mark.parametrize("window", [None, 64, 3, 20])
@pytest.mark.parametrize(
    ("page_size", "heads", "head_dim"),
    [(16, *each) for each in GEOMETRIES] + [(page, (6, 2), 34) for page in (1, 4)],
)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_it_agrees_with_pytorch_and_reads_only_what_a_token_sees(
    window: int | None, page_size: int, heads: tuple[int, int], head_dim: int, dtype: str
) -> None:
    q, cache, index = _case(window, page_size, heads, head_dim, dtype, STARTS)
    out, expected = _native(q, cache, index), _expected(q, cache, index)
    assert out.dtype == q.dtype
    differences = (out.double() - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    assert differences.max() < TOLERANCE[dtype], differences


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_what_it_computes_depends_on_no_other_token_and_on_no_number_of_threads(dtype: str) -> None:
    q, cache, index = _case(64, 16, (6, 2), 34, dtype, STARTS)
    together = _native(q, cache, index)
    # with the last, heads of a token are computed by several
    for number in (1, 2, len(STARTS) + 1):
        with threads(number):
            assert torch.equal(_native(q, cache, index), together)
            for i, start in enumerate(STARTS):
                own = slice(i, i + 1)
                alone = DecodeMetadata(
                    replace(index.ring, pages_BR=index.ring.pages_BR[own]),
                    *(each[own] for each in (index.slots, index.positions, index.write_rows)),
                    *(index.num_pages, [start]),
                )
                assert torch.equal(_native(q[own], cache, alone), together[own])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_scores_of_any_size_have_weights(dtype: str) -> None:
    q, cache, index = _case(None, 16, (4, 2), 8, dtype, STARTS)
    for factor in (0.0, 1e-3, 300.0, -300.0):
        out, expected = _native(q * factor, cache, index), _expected(q * factor, cache, index)
        assert (out.double() - expected).norm() / expected.norm() < 4 * TOLERANCE[dtype], factor


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_key_or_value_that_is_nan_is_not_hidden(dtype: str) -> None:
    for name in ("k_NGd", "v_NGd"):
        q, cache, index = _case(None, 16, (4, 2), 8, dtype, STARTS)
        getattr(cache, name)[index.write_rows[3], 1] = torch.nan
        is_nan = _native(q, cache, index).isnan().flatten(2).any(dim=2)
        expected = torch.zeros_like(is_nan)
        expected[3, 2:] = True  # the query heads of key/value head 1
        assert torch.equal(is_nan, expected)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_results_are_rounded_as_pytorch_rounds(dtype: str) -> None:
    """The mean of two values, such as 1 and 1 + 2^-7 in bfloat16, lies in the middle between two
    numbers.
    """
    _, cache, index = _case(None, 16, (4, 4), 8, dtype, [1] * 64)
    values = (
        1 + torch.finfo(cache.v_NGd.dtype).eps * torch.randint(0, 8, cache.v_NGd.shape).double()
    )
    cache = LayerCache(cache.k_NGd, values.to(cache.v_NGd.dtype))
    q = torch.zeros(64, 4, 8, dtype=cache.v_NGd.dtype)
    first, second = (
        values[index.ring.rows(index.slots, torch.full_like(index.slots, n))] for n in (0, 1)
    )
    assert torch.equal(_native(q, cache, index), ((first + second) / 2).to(q.dtype))


def test_queries_may_be_a_part_of_a_wider_tensor() -> None:
    q, cache, index = _case(None, 16, (4, 2), 8, "float32", STARTS)
    expected = _native(q, cache, index)
    assert torch.equal(_native(torch.cat([q * 2, q], dim=1)[:, 4:], cache, index), expected)
    assert torch.equal(_native(torch.cat([q, q * 2], dim=2)[..., :8], cache, index), expected)
