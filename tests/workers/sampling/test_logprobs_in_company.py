"""Log-probabilities of a row on a CPU depend neither on the other rows and what those ask for, nor on the number of threads."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from tramontane.workers.sampling.logprobs import Top, token_logprobs

NUM_ROWS = 24
# PyTorch divides sums of more than 32768 numbers between threads; the second is that of a small model, no multiple of 64.
VOCABULARIES = (300, 32_003, 49_152, 131_072)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def _logits(vocab: int) -> torch.Tensor:
    """Return logits as of a head in bfloat16, of which many are equal."""
    return (torch.randn(NUM_ROWS, vocab, generator=torch.Generator().manual_seed(0)) * 3).bfloat16().float()


def _of(logits_RV: torch.Tensor, num_top: list[int]) -> list[tuple[float, Top]]:
    return token_logprobs(logits_RV, [5] * len(logits_RV), num_top)


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_row_alone_is_as_among_others(vocab: int, num_threads: int) -> None:
    logits_RV = _logits(vocab)
    together = _of(logits_RV, [4] * NUM_ROWS)
    torch.set_num_threads(num_threads)
    for first, end in (*pairwise(range(NUM_ROWS + 1)), (3, 10), (1, 3)):
        assert _of(logits_RV[first:end].clone(), [4] * (end - first)) == together[first:end], (first, end)


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_equal_logits_are_chosen_whatever_others_ask_for(vocab: int) -> None:
    """Among equal ones PyTorch chooses others if it has to find more of them."""
    logits_RV = _logits(vocab)
    expected = _of(logits_RV, [5] * NUM_ROWS)
    mixed = _of(logits_RV, [5, 20, 0] * (NUM_ROWS // 3))
    assert mixed[::3] == expected[::3]
    assert [len(top) for _, top in mixed[:3]] == [5, 20, 0]
    assert [chosen for chosen, _ in mixed] == [chosen for chosen, _ in expected]
