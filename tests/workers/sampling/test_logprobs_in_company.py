"""Log-probabilities of a row on a CPU depend neither on the other rows and what those ask for, nor
on the number of threads.
"""

import math
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from tramontane.workers.sampling.logprobs import Top, token_logprobs

NUM_ROWS = 24
# PyTorch divides sums of more than 32768 numbers between threads; the second is that of a small
# model, no multiple of 64.
VOCABULARIES = (300, 32_003, 49_152, 131_072)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def _logits(vocab: int) -> torch.Tensor:
    """Return logits as of a head in bfloat16, of which many are equal."""
    return (
        (torch.randn(NUM_ROWS, vocab, generator=torch.Generator().manual_seed(0)) * 3)
        .bfloat16()
        .float()
    )


def _of(logits_RV: torch.Tensor, num_top: list[int]) -> list[tuple[float, Top]]:
    return token_logprobs(logits_RV, [5] * len(logits_RV), num_top)


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_row_alone_is_as_among_others(vocab: int, num_threads: int) -> None:
    logits_RV = _logits(vocab)
    together = _of(logits_RV, [4] * NUM_ROWS)
    torch.set_num_threads(num_threads)
    for first, end in (*pairwise(range(NUM_ROWS + 1)), (3, 10), (1, 3)):
        assert _of(logits_RV[first:end].clone(), [4] * (end - first)) == together[first:end], (
            first,
            end,
        )


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_equal_logits_are_chosen_whatever_others_ask_for(vocab: int) -> None:
    """Among equal ones PyTorch chooses others if it has to find more of them."""
    logits_RV = _logits(vocab)
    expected = _of(logits_RV, [5] * NUM_ROWS)
    mixed = _of(logits_RV, [5, 20, 0] * (NUM_ROWS // 3))
    assert mixed[::3] == expected[::3]
    assert [len(top) for _, top in mixed[:3]] == [5, 20, 0]
    assert [chosen for chosen, _ in mixed] == [chosen for chosen, _ in expected]


@pytest.mark.parametrize("has_exact_sums", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_that_is_not_finite_has_none_and_changes_no_other(
    value: float, has_exact_sums: bool
) -> None:
    """Whichever of its tokens is asked for; minus infinity is the logit of a token of probability
    zero.
    """
    logits_RV = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    expected = token_logprobs(logits_RV, [3, 4, 5, 6], [2, 2, 2, 2], has_exact_sums)
    logits_RV[1, 7] = value
    logits_RV[2] = -math.inf
    found = token_logprobs(logits_RV, [3, 4, 5, 6], [2, 2, 2, 2], has_exact_sums)
    assert found == [expected[0], None, None, expected[3]]
    logits_RV[3, 40:] = -math.inf
    assert token_logprobs(logits_RV, [3, 4, 5, 45], [2, 2, 2, 2], has_exact_sums)[3] is not None
