"""Stages that share one GPU, each a process, over the direct link and without Ray: their tokens per
second against one stage's.

    python tests/bench/gpu_stages.py [--device cuda] [--small] [--json FILE]

64 sequences of Mistral 7B decode at a context of 1k, all in one micro-batch, as a server does whose
stages share a GPU (see ``PipelinePlan.max_concurrent_stages``). A second figure is of four
micro-batches, one for each stage: then a token of every sequence takes four steps, each of which
reads all weights. A group's next step is sent when its last one's tokens are known.
"""

import json
import multiprocessing
import sys
import time
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parent))

import torch
from bench_parts import gpu_parser
from gpu_speed import PREFILL_BUDGET, Size
from gpu_stage import GIB, MISTRAL_7B, Runner, packed
from targets import at_least, exit_status

from tramontane.cluster.planning.planner import PlanRequest, StageBudget, make_plan
from tramontane.proto.model_folder import RandomWeights
from tramontane.proto.plan import PipelinePlan, StagePlan
from tramontane.proto.step import DecodeColumns, MicroBatch, StepResult
from tramontane.router.scheduling.page_allocator import PageAllocator
from tramontane.workers.stage.stage_link import StageLink
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.stage.step_executor import OverlappedExecutor, SerialExecutor, StepExecutor

STAGES, BATCH, TARGET = 4, 64, 0.8
HOST = "127.0.0.1"
MAX_OPEN = 2  # as ``GPU_PIPELINE_DEPTH``: one step that the device computes, and the next
WARM_STEPS, STEPS = 6, 40
GPU_BYTES = 60 * GIB  # of all stages, weights and caches


def serve(pipe: Connection, plan: StagePlan, device: str) -> None:
    """Run a stage: micro-batches come by the pipe; the last stage answers with results, the others
    with nothing.
    """
    worker = StageWorker.load(plan, RandomWeights(), device)
    executor: StepExecutor = (
        OverlappedExecutor(worker, MAX_OPEN)
        if worker.backend.make_event
        else SerialExecutor(worker, 1)
    )
    executor.fence(0)
    link = StageLink(worker, executor, HOST)
    pipe.send(link.listen())
    link.connect(pipe.recv())
    pipe.send(None)  # linked
    with ThreadPoolExecutor(MAX_OPEN if device == "cuda" else 1) as threads:
        while (batch := pipe.recv()) is not None:
            threads.submit(_step, link, pipe if plan.is_last else None, batch)
    link.close()


def _step(link: StageLink, answer_to: Connection | None, batch: MicroBatch) -> None:
    try:
        result: Any = link.step(batch)
    except Exception as error:
        result = error
    if answer_to is not None:
        answer_to.send(result)


class Pipeline(Runner):
    """Runs sequences through the processes of all stages. The caller keeps as many steps in flight
    as it likes.
    """

    def __init__(self, plan: PipelinePlan, device: str) -> None:
        super().__init__(SimpleNamespace(plan=plan.stages[0], epoch=0), PageAllocator(plan.cache))  # type: ignore[arg-type]
        context = multiprocessing.get_context("spawn")
        pairs = [context.Pipe() for _ in plan.stages]
        self.pipes = [ours for ours, _ in pairs]
        self._processes = [
            context.Process(target=serve, args=(theirs, stage, device), daemon=True)
            for (_, theirs), stage in zip(pairs, plan.stages, strict=True)
        ]
        for process, (_, theirs) in zip(self._processes, pairs, strict=True):
            process.start()
            theirs.close()  # so that reading from a process that has ended is an error
        addresses = [pipe.recv() for pipe in self.pipes]
        for pipe, inlet in zip(self.pipes, [None, *addresses[:-1]], strict=True):
            pipe.send(inlet)
        for pipe in self.pipes:
            pipe.recv()

    def send(self, batch: MicroBatch) -> None:
        for pipe in self.pipes:
            pipe.send(batch)

    def receive(self) -> StepResult:
        """Return the next result. Raises EOFError if a process has ended, and what a step has
        raised.
        """
        wait([self.pipes[-1], *(each.sentinel for each in self._processes)])
        result = self.pipes[-1].recv()
        if isinstance(result, Exception):
            raise result
        assert isinstance(result, StepResult)
        return result

    def start(self, num_sequences: int, length: int) -> None:
        """Compute random prompts, one micro-batch at a time."""
        self.add_sequences(num_sequences, length)
        for chunks in packed(self.sequences, PREFILL_BUDGET):
            self.send(self._batch(tuple(self._chunk(*chunk) for chunk in chunks)))
            self._complete(self.receive())

    def decode_groups(self, num_groups: int, num_steps: int) -> float:
        """Decode so many tokens of every sequence, in groups that follow each other; returns
        seconds.
        """
        size = len(self.sequences) // num_groups
        groups = [range(i * size, (i + 1) * size) for i in range(num_groups)]
        began = time.perf_counter()
        for group in groups:
            self._send_group(group)
        for number in range(num_groups * num_steps):
            group = groups[number % num_groups]
            self.last |= dict(zip(group, self.receive().token_ids, strict=True))
            if number < num_groups * (num_steps - 1):
                self._send_group(group)
        return time.perf_counter() - began

    def _send_group(self, group: Seq[int]) -> None:
        sequences = [self.sequences[i] for i in group]
        starts = [sequence.num_dispatched for sequence in sequences]
        pages = [
            self._grow(sequence, start + 1)
            for sequence, start in zip(sequences, starts, strict=True)
        ]
        new_pages = tuple((i, own) for i, own in enumerate(pages) if any(own))
        ids = tuple(sequence.seq_id for sequence in sequences)
        self.send(
            self._batch(
                (), DecodeColumns(ids, tuple(starts), tuple(self.last[i] for i in ids), new_pages)
            )
        )

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(30)


def tokens_per_s(size: Size, num_stages: int, *groups: int) -> list[float]:
    """Return the tokens per second of so many stages with each of these numbers of groups."""
    args = replace(size.model(MISTRAL_7B), max_seq_len=size.tokens(2304))
    budgets = (StageBudget((GIB if size.small else GPU_BYTES) // num_stages),) * num_stages
    plan = make_plan(args, PlanRequest(budgets, args.dtype, args.max_seq_len, BATCH, 16))
    pipeline = Pipeline(plan, size.device)
    try:
        pipeline.start(BATCH, size.tokens(1024))
        num_steps = min(STEPS, (pipeline.room - 1) // (2 * len(groups)))
        found = []
        for number in groups:
            pipeline.decode_groups(number, min(WARM_STEPS, num_steps))
            found.append(BATCH * num_steps / pipeline.decode_groups(number, num_steps))
        return found
    finally:
        pipeline.close()


def main() -> int:
    options = gpu_parser(__doc__).parse_args()
    torch.set_num_threads(1)
    size = Size(options.device, options.small)
    (alone,) = tokens_per_s(size, 1, 1)
    shared, divided = tokens_per_s(size, STAGES, 1, STAGES)
    target = at_least(
        f"{STAGES} stages on one GPU over the direct link, batch {BATCH}", shared / alone, TARGET
    )
    detail = (
        f"{shared:.0f} tokens/s against {alone:.0f} of one stage, processes without Ray; "
        f"{divided:.0f} with {STAGES} micro-batches of {BATCH // STAGES} in flight"
    )
    row = {
        "name": target.name,
        "figure": target.shown,
        "wanted": target.wanted,
        "holds": target.is_met,
        "detail": detail,
    }
    print(row)
    if options.json:
        options.json.write_text(json.dumps([row]))
    return exit_status([target])


if __name__ == "__main__":
    sys.exit(main())
