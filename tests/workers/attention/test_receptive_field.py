"""One changed token is felt k layers later up to k * (W-1) positions away, and not one position
farther: bit for bit.

Every layer is a stage of its own here, so the hidden states between stages are those after 1, 2,
... k layers.
"""

from collections.abc import Sequence as Seq

import pytest
import torch
from stage_driver import keep_hidden
from tiny_models import random_model, split_model, tiny_args, tiny_plan
from torch import Tensor

from tramontane.proto.model_args import ModelArgs
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import Chunk, MicroBatch
from tramontane.router.scheduling.page_allocator import PageAllocator
from tramontane.router.scheduling.sequence import Sequence
from tramontane.workers.stage.hidden_states import HiddenStates
from tramontane.workers.stage.stage_worker import StageWorker

SAMPLING = SamplingParams(temperature=0.0)
CHANGED = 13  # the position whose token differs


def _hidden_by_layer(
    args: ModelArgs, prompt: list[int], cut: list[int], page_size: int
) -> list[Tensor]:
    """[T, D] after each layer, computed chunk by chunk through the caches."""
    plan = tiny_plan(args, args.n_layers, page_size)
    workers = split_model(random_model(args), plan)
    after: list[list[Tensor]] = [[] for _ in workers]
    for worker, states in zip(workers, after, strict=True):
        keep_hidden(worker.model, states)
        worker.fence(0)
    allocator = PageAllocator(plan.cache)
    sequence = Sequence(0, tuple(prompt), SAMPLING, max_len=len(prompt) + 1)
    assert allocator.reserve_for_admission(sequence)
    start = 0
    for step, num_tokens in enumerate(cut):
        end = start + num_tokens
        pages = allocator.allocate(sequence, start, end)
        chunk = Chunk(
            0,
            start,
            tuple(prompt[start:end]),
            pages,
            SAMPLING if start == 0 else None,
            needs_sample=False,
        )
        _step(workers, MicroBatch(0, step, (chunk,)))
        start = end
    assert start == len(prompt)
    return [torch.cat(states) for states in after]


def _step(workers: Seq[StageWorker], batch: MicroBatch) -> None:
    activation: HiddenStates | None = None
    for worker in workers:
        done = worker.step(batch, activation)
        activation = done if isinstance(done, HiddenStates) else None


def _felt(args: ModelArgs, length: int, cut: list[int], page_size: int) -> list[list[int]]:
    """After each layer, the positions whose hidden state differs in any bit when one token is
    changed.
    """
    prompt = torch.randint(
        args.vocab_size, (length,), generator=torch.Generator().manual_seed(length)
    ).tolist()
    changed = list(prompt)
    changed[CHANGED] = (changed[CHANGED] + 1) % args.vocab_size
    pairs = zip(
        *(_hidden_by_layer(args, p, cut, page_size) for p in (prompt, changed)), strict=True
    )
    return [(one != other).any(-1).nonzero()[:, 0].tolist() for one, other in pairs]


def _reach(windows: Seq[int | None], length: int) -> list[list[int]]:
    """[5, 3] -> after one layer 4 positions beyond the changed one, after two 4 + 2; without a
    window to the end.
    """
    last, reach = CHANGED, []
    for window in windows:
        last = length - 1 if window is None else min(last + window - 1, length - 1)
        reach.append(list(range(CHANGED, last + 1)))
    return reach


WINDOWS = [
    pytest.param((1,) * 3, id="W1"),
    pytest.param((2,) * 4, id="W2"),
    pytest.param((5,) * 4, id="W5"),
    pytest.param((16,) * 3, id="W16"),
    pytest.param((17,) * 2, id="W17"),
    pytest.param((4, 9, 2), id="interleaved"),
    pytest.param((6, None), id="then full"),
]
LENGTH = 80
# (page size, chunk lengths)
CUTS = [
    pytest.param(16, [LENGTH], id="whole"),
    pytest.param(4, [5, 1, 10, 1, 1, 16, 17, 3, 1, 25], id="mixed"),
    pytest.param(4, [2] * (LENGTH // 2), id="two by two"),
    pytest.param(1, [1] * LENGTH, id="one by one"),
]


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize(("page_size", "cut"), CUTS)
def test_a_token_is_felt_exactly_as_far_as_the_windows_reach(
    windows: tuple[int | None, ...], page_size: int, cut: list[int]
) -> None:
    args = tiny_args(n_layers=len(windows), windows=windows, moe=False, max_seq_len=128)
    assert _felt(args, LENGTH, cut, page_size) == _reach(windows, LENGTH)


def test_the_far_past_is_felt_through_the_layers_only() -> None:
    """The last position feels a token 3 * (W-1) before it through three layers, and not through
    two.
    """
    window, length = 23, CHANGED + 3 * 22 + 1
    args = tiny_args(n_layers=3, window=window, moe=False, max_seq_len=128)
    felt = _felt(args, length, [30, 1, 30, length - 61], page_size=16)
    assert [length - 1 in positions for positions in felt] == [False, False, True]


@pytest.mark.parametrize("window", [3, 7])
def test_experts_carry_nothing_from_token_to_token(window: int) -> None:
    """A changed token may choose other experts, which changes the shape of their groups and so the
    rounding of all tokens that share them: here every affected token is computed alone, the rest in
    chunks.
    """
    args = tiny_args(n_layers=3, window=window, moe=True, max_seq_len=128)
    touched = 3 * (window - 1) + 1
    cut = [CHANGED - 4, 4, *[1] * touched, 9, 1, 12]
    assert _felt(args, sum(cut), cut, page_size=4) == _reach((window,) * 3, sum(cut))
