"""The kernel in C for chunks of prompts computes what the definition of attention gives, from what
each token sees alone.
"""

from itertools import product

import pytest
import torch
from native_attention import FEW_GEOMETRIES, GEOMETRIES, TOLERANCE, inputs, prefill, prefill_index
from torch import Tensor

from tramontane.workers.attention.backend import causal_window_mask
from tramontane.workers.attention.metadata import PrefillMetadata

pytestmark = pytest.mark.usefixtures("compiler")
WINDOWS = [None, 1, 3, 20, 64]
# (start, tokens): first and later ones, shorter and longer than windows, blocks of keys and the 128
# queries of a unit of work
CHUNKS = [(0, 5), (0, 150), (7, 2), (40, 25), (100, 129), (300, 33)]


def _inputs(
    index: PrefillMetadata, heads: tuple[int, int], head_dim: int, dtype: str
) -> tuple[Tensor, Tensor, Tensor]:
    return inputs(sum(index.query_lens), sum(index.key_lens), heads, head_dim, dtype)


def _expected(q_THd: Tensor, k_SGd: Tensor, v_SGd: Tensor, index: PrefillMetadata) -> Tensor:
    """In float64, by definition."""
    outs = []
    parts = zip(
        q_THd.double().split(index.query_lens),
        *(x.double().split(index.key_lens) for x in (k_SGd, v_SGd)),
        strict=True,
    )
    for q, k, v in parts:
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("thd,shd->hts", q, k.repeat_interleave(group, 1)) / q.shape[2] ** 0.5
        seen = causal_window_mask(len(q), len(k), index.window)
        weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1)
        outs.append(torch.einsum("hts,shd->thd", weights, v.repeat_interleave(group, 1)))
    return torch.cat(outs)


def _assert_close(out: Tensor, expected: Tensor, tolerance: float) -> None:
    differences = (out.double() - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    assert differences.max() < tolerance, differences


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("heads", "head_dim"), GEOMETRIES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_it_agrees_with_the_definition_in_float64(
    window: int | None, heads: tuple[int, int], head_dim: int, dtype: str
) -> None:
    index = prefill_index(CHUNKS, window)
    q, k, v = _inputs(index, heads, head_dim, dtype)
    out = prefill(q, k, v, index)
    assert out.dtype == q.dtype
    _assert_close(out, _expected(q, k, v, index), TOLERANCE[dtype])


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(("heads", "head_dim"), FEW_GEOMETRIES)
def test_vectors_of_other_processors_agree_with_it_too(
    other_processor: str, window: int | None, heads: tuple[int, int], head_dim: int
) -> None:
    index = prefill_index(CHUNKS, window)
    q, k, v = _inputs(index, heads, head_dim, other_processor)
    _assert_close(prefill(q, k, v, index), _expected(q, k, v, index), TOLERANCE[other_processor])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_scores_of_any_size_have_weights(dtype: str) -> None:
    index = prefill_index(CHUNKS, None)
    q, k, v = _inputs(index, (4, 2), 8, dtype)
    for factor in (0.0, 1e-3, 300.0, -300.0):
        out, expected = prefill(q * factor, k, v, index), _expected(q * factor, k, v, index)
        assert (out.double() - expected).norm() / expected.norm() < 4 * TOLERANCE[dtype], factor


def test_scores_below_any_that_a_model_has_are_still_compared() -> None:
    index = prefill_index([(0, 2)], None)
    q, k, v = torch.full((2, 1, 8), 1e17), torch.full((2, 1, 8), -1e17), torch.eye(8)[:2, None]
    k[0] *= 2
    assert prefill(q, k, v, index)[1, 0].tolist() == pytest.approx(v[1, 0].tolist())


def test_queries_keys_and_values_may_be_parts_of_wider_tensors() -> None:
    index = prefill_index(CHUNKS, 20)
    q, k, v = _inputs(index, (4, 2), 8, "float32")
    expected = prefill(q, k, v, index)
    wide_q, wide_k, wide_v = (
        torch.cat((q * 2, q), dim=1),
        torch.cat((k, v, v), dim=1),
        torch.cat((k, k, k, v), dim=1),
    )
    assert torch.equal(prefill(wide_q[:, 4:], wide_k[:, :2], wide_v[:, 6:], index), expected)
    wide_q, wide_k = torch.cat((q, q * 2), dim=2), torch.cat((v, k), dim=2)  # heads apart
    assert torch.equal(prefill(wide_q[..., :8], wide_k[..., 8:], v, index), expected)


@pytest.mark.parametrize("broken", [0, 15, 16, 70, 149])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_key_or_value_that_is_nan_changes_what_sees_it_and_nothing_else(
    dtype: str, window: int | None, broken: int
) -> None:
    _assert_broken_where_seen(dtype, window, broken)


@pytest.mark.parametrize("window", [None, 20])
def test_nor_does_it_with_vectors_of_other_processors(
    other_processor: str, window: int | None
) -> None:
    _assert_broken_where_seen(other_processor, window, 70)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("element", [3, 19, 33])
def test_nor_does_it_in_a_chunk_of_two_tokens(dtype: str, element: int) -> None:
    index = prefill_index([(148, 2)], None)
    q, k, v = _inputs(index, (6, 2), 34, dtype)
    right = prefill(q, k, v, index)
    v[149, 1, element] = torch.inf  # which only the second sees
    out = prefill(q, k, v, index)
    assert torch.equal(out[0], right[0])
    assert torch.equal(out[1, :3], right[1, :3])
    assert not out[1, 3:].isfinite().all(dim=1).any()


def _assert_broken_where_seen(dtype: str, window: int | None, broken: int) -> None:
    """Put NaN or an infinity into the key or value of one position, of one of two heads, in any
    panel of 16 or 32 elements.
    """
    index = prefill_index([(0, 150)], window)
    q, k, v = _inputs(index, (6, 2), 34, dtype)
    right, sees = prefill(q, k, v, index), causal_window_mask(150, 150, window)[:, broken]
    for (where, number), element in product(
        ((k, torch.nan), (v, torch.nan), (v, torch.inf), (v, -torch.inf)), (3, 19, 33)
    ):
        before = where[broken, 1, element].clone()
        where[broken, 1, element] = number
        out = prefill(q, k, v, index)
        is_broken = ~out.isfinite().all(dim=2)
        assert is_broken[sees, 3:].all()
        assert torch.equal(out[:, :3], right[:, :3])  # the heads of the other key
        assert torch.equal(out[~sees], right[~sees])
        where[broken, 1, element] = before
