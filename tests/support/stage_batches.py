"""A model in one stage, and micro-batches for it, without Ray and router."""

import statistics
import time
from dataclasses import dataclass

from tramontane.cluster.planning.planner import PlanRequest, StageBudget, make_plan
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.model_folder import RandomWeights
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import Chunk, MicroBatch
from tramontane.proto.units import GIB
from tramontane.workers.stage.stage_worker import StageWorker

CONTEXT, STEPS = 156, 8  # decode steps have contexts of 156 to 163 tokens
PROMPT = 128
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Phase:
    name: str
    num_seqs: int
    num_tokens: int  # of each sequence in a step
    context_len: int  # tokens of each sequence before the first step
    num_steps: int

    @property
    def tokens_per_step(self) -> int:
        return self.num_seqs * self.num_tokens


def decode(num_seqs: int, context_len: int = CONTEXT, num_steps: int = STEPS) -> Phase:
    """Return decode steps of so many sequences."""
    at = "" if context_len == CONTEXT else f" at {context_len}"
    return Phase(f"decode {num_seqs}{at}", num_seqs, 1, context_len, num_steps)


class OneStage:
    """One model in one stage, with sequences whose cached keys are all zero; their values do not
    affect the time.

    The caches are written once: memory that never was is one page of zeros, which a processor keeps
    in its own caches.
    """

    def __init__(self, args: ModelArgs, dtype: str, *, experts_inside: bool = True) -> None:
        request = PlanRequest(
            (StageBudget(64 * GIB),), dtype, args.max_seq_len, 64, 16, experts_inside=experts_inside
        )
        self.plan = make_plan(args, request)
        self.worker = StageWorker.load(self.plan.stages[0], RandomWeights())
        for cached in self.worker.cache.layers.values():
            cached.k_NGd.zero_()
            cached.v_NGd.zero_()

    def step_s(self, phase: Phase) -> float:
        """Return the median seconds of the phase's steps."""
        batches = self.batches(phase)
        return statistics.median([self._seconds(batch) for batch in batches])

    def batches(self, phase: Phase) -> list[MicroBatch]:
        """Return the phase's steps, after the sequences' contexts have been entered into the
        stage's page table.
        """
        epoch, ring = self.worker.epoch + 1, self.plan.cache.classes[0].ring_pages
        self.worker.fence(epoch)
        pages = [(tuple(range(ring * s, ring * (s + 1))),) for s in range(phase.num_seqs)]
        if phase.context_len:
            contexts = (
                Chunk(s, 0, (0,) * phase.context_len, pages[s], GREEDY, False)
                for s in range(phase.num_seqs)
            )
            self.worker.table.update(MicroBatch(epoch, 0, tuple(contexts)))
        batches = []
        for step in range(phase.num_steps):
            start = phase.context_len + step * phase.num_tokens
            new = [(((),), None) if start else (pages[s], GREEDY) for s in range(phase.num_seqs)]
            chunks = (
                Chunk(s, start, tuple(range(s, s + phase.num_tokens)), *new[s], needs_sample=True)
                for s in range(phase.num_seqs)
            )
            batches.append(MicroBatch(epoch, step, tuple(chunks)))
        return batches

    def _seconds(self, batch: MicroBatch) -> float:
        started = time.perf_counter()
        self.worker.step(batch, None)
        return time.perf_counter() - started
