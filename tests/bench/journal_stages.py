"""Four real stages for ``journal.py``: all recompute everything, or one recomputes from recorded inputs."""

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from queue import Queue

import numpy as np
import torch
from numpy.typing import NDArray

from tramontane.cluster.config.engine_config import DEMO_MODEL
from tramontane.cluster.planning.planner import PlanRequest, StageBudget, make_plan
from tramontane.proto.byte_size import GIB
from tramontane.proto.model_folder import read_model_args
from tramontane.proto.plan import PipelinePlan
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import Chunk, MicroBatch, StepResult
from tramontane.workers.stage.activation import Activation
from tramontane.workers.stage.stage_worker import StageWorker

STAGES, LOST = 4, 2
LIVE, TOKENS, CHUNK = 16, 1024, 256
GREEDY = SamplingParams(temperature=0.0)

Carried = Activation | StepResult | None
Seconds = NDArray[np.float64]


def demo_plan(windowed: bool) -> PipelinePlan:
    args = read_model_args(DEMO_MODEL)
    args = args if windowed else replace(args, windows=(None,) * args.n_layers)
    return make_plan(args, PlanRequest((StageBudget(2 * GIB),) * STAGES, args.dtype, args.max_seq_len, LIVE, 16))


def loaded(plan: PipelinePlan, stage: int) -> StageWorker:
    return StageWorker.load(plan.stages[stage], DEMO_MODEL)


class Stages:
    def __init__(self, plan: PipelinePlan) -> None:
        self.plan = plan
        self.workers = [loaded(plan, stage) for stage in range(STAGES)]
        self.ring = plan.cache.classes[0].ring_pages

    def batches(self, num_tokens: int, size: int = CHUNK) -> list[MicroBatch]:
        """Fence the stages, and pack all sequences, one after the other, into micro-batches.

        Two of 5 tokens in sizes of 4: 4, then 1 and 3, then 2.
        """
        epoch = self._fence()
        packed: list[list[Chunk]] = [[]]
        left = size
        for seq_id in range(LIVE):
            start = 0
            while start < num_tokens:
                if not left:
                    packed.append([])
                    left = size
                count = min(num_tokens - start, left)
                packed[-1].append(self._chunk(seq_id, start, count, num_tokens))
                start, left = start + count, left - count
        ordered = (sorted(chunks, key=lambda chunk: chunk.num_tokens == 1) for chunks in packed)
        return [MicroBatch(epoch, step, tuple(chunks)) for step, chunks in enumerate(ordered)]

    def decodes(self, last: MicroBatch, num_tokens: int) -> list[MicroBatch]:
        """Return a micro-batch with one more token of every sequence, after this one."""
        chunks = (Chunk(seq_id, num_tokens, (5,), ((),), None, True) for seq_id in range(LIVE))
        return [MicroBatch(last.epoch, last.step_id + 1, tuple(chunks))]

    def one_by_one(self, batches: Sequence[MicroBatch]) -> tuple[Seconds, list[list[Activation]]]:
        """Run one stage at a time; returns the seconds of each micro-batch per stage, and the outputs of all but the last."""
        seconds, made = [], []
        for batch in batches:
            carried: Carried = None
            row, outputs = [], []
            for worker in self.workers:
                carried, taken = _timed_step(worker, batch, carried)
                row.append(taken)
                outputs += [carried] if isinstance(carried, Activation) else []
            seconds.append(row)
            made.append(outputs)
        return np.array(seconds), made

    def together(self, batches: Sequence[MicroBatch]) -> Seconds:
        """Run each stage in its own thread; returns the seconds from the start until each micro-batch left the pipeline."""
        queues: list[Queue[tuple[MicroBatch, Carried]]] = [Queue() for _ in range(STAGES + 1)]

        def work(stage: int) -> None:
            torch.set_num_threads(1)
            for _ in batches:
                batch, carried = queues[stage].get()
                queues[stage + 1].put((batch, _timed_step(self.workers[stage], batch, carried)[0]))

        for stage in range(STAGES):
            threading.Thread(target=work, args=(stage,), daemon=True).start()
        started = time.perf_counter()
        for batch in batches:
            queues[0].put((batch, None))
        return np.array([(queues[STAGES].get(), time.perf_counter() - started)[1] for _ in batches])

    def alone(self, batches: Sequence[MicroBatch], made: Sequence[Sequence[Activation]]) -> Seconds:
        """Run the lost stage on its recorded inputs and check its outputs; returns the seconds of each micro-batch."""
        seconds = []
        for batch, outputs in zip(batches, made, strict=True):
            again, taken = _timed_step(self.workers[LOST], batch, outputs[LOST - 1])
            assert isinstance(again, Activation)
            assert torch.equal(again.hidden_TD, outputs[LOST].hidden_TD)
            seconds.append(taken)
        return np.array(seconds)

    def _fence(self) -> int:
        epoch = self.workers[0].epoch + 1
        for worker in self.workers:
            worker.fence(epoch)
        return epoch

    def _chunk(self, seq_id: int, start: int, count: int, num_prompt: int) -> Chunk:
        pages = () if start else tuple(range(self.ring * seq_id, self.ring * (seq_id + 1)))
        ids = tuple((seq_id * 7919 + i * 31) % (self.plan.args.vocab_size - 3) + 3 for i in range(start, start + count))
        return Chunk(seq_id, start, ids, (pages,), None if start else GREEDY, start + count == num_prompt, num_prompt)


def _timed_step(worker: StageWorker, batch: MicroBatch, carried: Carried) -> tuple[Carried, float]:
    assert not isinstance(carried, StepResult)
    started = time.perf_counter()
    outcome = worker.step(batch, carried)
    return outcome, time.perf_counter() - started
