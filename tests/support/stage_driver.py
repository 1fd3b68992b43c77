"""Prompts through real stages in chunks that a test chooses, with the logits of every position."""

from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from tramontane.cluster.planning.planner import PlanRequest, StageBudget, make_plan
from tramontane.proto.model_folder import read_model_args
from tramontane.proto.plan import KvCacheDtype, PipelinePlan
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import Chunk, MicroBatch
from tramontane.proto.weight_format import Quantization
from tramontane.router.scheduling.page_allocator import PageAllocator
from tramontane.router.scheduling.sequence import Sequence
from tramontane.workers.model.transformer import StageModel
from tramontane.workers.stage.hidden_states import HiddenStates
from tramontane.workers.stage.stage_worker import StageWorker

SAMPLING = SamplingParams(temperature=0.0)


def teacher_forced(
    folder: Path,
    ids: Seq[int],
    dtype: str,
    quantize: Quantization | None = None,
    kv_cache_dtype: KvCacheDtype = "auto",
) -> Tensor:
    """Return the logits [T, V] after every token of a text, from a checkpoint in one stage and one
    step.
    """
    args, formats = (
        read_model_args(folder),
        {"quantize": quantize, "kv_cache_dtype": kv_cache_dtype},
    )
    plan = make_plan(
        args, replace(PlanRequest((StageBudget(2**30),), dtype, args.max_seq_len, 1, 16), **formats)
    )
    return Driver(plan, [StageWorker.load(plan.stages[0], folder)]).run([list(ids)], [[len(ids)]])[
        0
    ]


def keep_hidden(model: StageModel, into: list[Tensor]) -> None:
    """Keep every step's hidden states of all rows, as they leave the last layer."""
    model.register_forward_hook(lambda _model, _args, hidden: into.append(hidden))


class Driver:
    """Runs prompts through real stages and keeps the hidden states of all rows, not only of the
    sampled ones.
    """

    def __init__(self, plan: PipelinePlan, workers: list[StageWorker]) -> None:
        self.plan, self.workers = plan, workers
        self.last_hidden: list[Tensor] = []
        keep_hidden(workers[-1].model, self.last_hidden)
        for worker in workers:
            worker.fence(0)

    def run(self, prompts: Seq[list[int]], cuts: Seq[list[int]]) -> list[Tensor]:
        """Return the logits [T, V] of every prompt. Step i has the i-th chunk of each."""
        allocator = PageAllocator(self.plan.cache)
        sequences = [
            Sequence(i, tuple(p), SAMPLING, max_len=len(p) + 1) for i, p in enumerate(prompts)
        ]
        assert all(map(allocator.reserve_for_admission, sequences))
        logits: list[list[Tensor]] = [[] for _ in prompts]
        for step in range(max(map(len, cuts))):
            sizes = [
                (s, cut[step]) for s, cut in zip(sequences, cuts, strict=True) if step < len(cut)
            ]
            chunks = [self._chunk(allocator, sequence, n) for sequence, n in sizes]
            chunks.sort(key=lambda chunk: chunk.num_tokens == 1)
            rows = self._step(MicroBatch(0, step, tuple(chunks))).split(
                [chunk.num_tokens for chunk in chunks]
            )
            for chunk, chunk_logits in zip(chunks, rows, strict=True):
                logits[chunk.seq_id].append(chunk_logits)
        return [torch.cat(parts) for parts in logits]

    def _chunk(self, allocator: PageAllocator, sequence: Sequence, num_tokens: int) -> Chunk:
        start, end = sequence.num_dispatched, sequence.num_dispatched + num_tokens
        sequence.num_dispatched = end
        sampling = SAMPLING if start == 0 else None
        return Chunk(
            sequence.seq_id,
            start,
            sequence.known_ids(start, end),
            allocator.allocate(sequence, start, end),
            sampling,
            False,
        )

    def _step(self, batch: MicroBatch) -> Tensor:
        activation: HiddenStates | None = None
        for worker in self.workers:
            done = worker.step(batch, activation)
            activation = done if isinstance(done, HiddenStates) else None
        with torch.inference_mode():
            return self.workers[-1].model.head(self.last_hidden.pop())
