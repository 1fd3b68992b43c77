"""With ping-pong a step begins while the one before it is in its first layers: what a step reads is
its own.

A chunk of one token beyond the window is followed by one whose pages take the places, in the page
ring, of those that the token still sees.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import pytest
import torch
from tiny_models import experts_together, random_model, tiny_args, tiny_plan
from torch import Tensor

from tramontane.proto.plan import PipelinePlan
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import Chunk, ExpertUsage, MicroBatch, StepResult
from tramontane.router.scheduling.page_allocator import PageAllocator
from tramontane.router.scheduling.sequence import Sequence
from tramontane.workers.attention.backend import AttentionKernels, DecodeKernel
from tramontane.workers.attention.metadata import DecodeMetadata
from tramontane.workers.attention.rolling_cache import LayerCache
from tramontane.workers.attention.sdpa_backend import GatheredDecode, PagedDecode, SdpaPrefill
from tramontane.workers.experts.remote_experts import PendingExpertCall, RemoteExperts
from tramontane.workers.model.moe import ExpertPermutation
from tramontane.workers.model.transformer import StageModel
from tramontane.workers.stage.device_backend import DeviceBackend
from tramontane.workers.stage.stage_worker import StageWorker

ARGS = tiny_args(n_layers=6, window=24, max_seq_len=256)
PLAN: PipelinePlan = tiny_plan(ARGS, 1, 4, 4)
PROMPT = tuple(10 + (i * 7) % 80 for i in range(94))
CUTS = [(61, 1, 32), (60, 2, 32), (90, 1, 3)]


class FindsPages:
    """As Triton's kernel does on GPUs: pages are found in each layer, when the kernel is
    launched.
    """

    def build_mask(self, index: DecodeMetadata) -> DecodeMetadata:
        return index

    def attend(self, q_BHd: Tensor, cached: LayerCache, mask: DecodeMetadata) -> Tensor:
        kernel = PagedDecode()
        return kernel.attend(q_BHd, cached, kernel.build_mask(mask))


@dataclass
class Call:
    """A call that is answered at once."""

    layer: int
    out: Tensor
    usage = ExpertUsage()

    def poll(self) -> bool:
        return True

    def result(self) -> Tensor:
        return self.out


@dataclass
class Experts:
    """The experts of a stage in this process, as ``RemoteExperts`` are called."""

    model: StageModel

    def dispatch(self, layer: int, rows_CD: Tensor, groups: ExpertPermutation) -> PendingExpertCall:
        assert self.model.experts is not None
        return cast(PendingExpertCall, Call(layer, self.model.experts(layer, rows_CD, groups)))


def _batches(cuts: tuple[int, ...]) -> Iterator[MicroBatch]:
    allocator, start = PageAllocator(PLAN.cache), 0
    sequence = Sequence(1, PROMPT, SamplingParams(max_tokens=4, temperature=0, logprobs=3), 120)
    assert allocator.reserve_for_admission(sequence)
    for step, size in enumerate(cuts):
        end, sampling = start + size, None if start else sequence.sampling
        pages = allocator.allocate(sequence, start, end)
        yield MicroBatch(
            1,
            step,
            (Chunk(1, start, PROMPT[start:end], pages, sampling, end == len(PROMPT), len(PROMPT)),),
        )
        start = end


def _run(kernel: DecodeKernel, cuts: tuple[int, ...], *, in_turns: bool) -> StepResult:
    """Return the result of the prompt's last step; ``in_turns``: the last two are open at once, and
    the first a layer ahead.
    """
    worker = StageWorker(
        PLAN.stages[0],
        experts_together(random_model(ARGS)),
        backend=DeviceBackend(AttentionKernels(SdpaPrefill(), kernel)),
    )
    worker.fence(1)
    torch.manual_seed(0)
    for layer in worker.cache.layers.values():  # what other sequences have left
        layer.k_NGd.normal_(0, 3)
        layer.v_NGd.normal_(0, 3)
    experts = cast(RemoteExperts, Experts(worker.model))
    steps = [worker.step_coroutine(batch, None, experts) for batch in _batches(cuts)]
    results: list[StepResult] = []
    with torch.inference_mode():
        for step in [] if in_turns else steps:
            results += _advance(step, ARGS.n_layers + 1)
        if in_turns:
            _advance(steps[0], ARGS.n_layers + 1)
            for _ in range(ARGS.n_layers + 1):
                results += _advance(steps[1], 1) + _advance(steps[2], 1)
    return results[-1]


def _advance(step: Iterator[object], times: int) -> list[StepResult]:
    """Resume a step so many times; return its result if that ends it."""
    for _ in range(times):
        try:
            next(step)
        except StopIteration as end:
            return [end.value.read()]
    return []


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize(
    "kernel",
    [GatheredDecode(), PagedDecode(), FindsPages()],
    ids=["gathered", "by page", "found late"],
)
def test_a_step_owns_the_pages_that_it_reads(kernel: DecodeKernel, cuts: tuple[int, ...]) -> None:
    alone, in_turns = _run(kernel, cuts, in_turns=False), _run(kernel, cuts, in_turns=True)
    assert (in_turns.token_ids, in_turns.logprobs) == (alone.token_ids, alone.logprobs)
