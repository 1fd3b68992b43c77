"""Times of the four stages of ``journal_stages.py``, as pauses and as costs of a layer."""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
from journal_stages import CHUNK, LIVE, LOST, STAGES, TOKENS, Seconds, Stages, demo_plan

from tramontane.proto.step import MicroBatch
from tramontane.router.scheduling.policy import BatchWork
from tramontane.workers.stage.activation import Activation

FEW = 16  # tokens
HOP_S = 2.8e-3  # 128 KiB through the object store, by make bench-link; a micro-batch here has 64
STARTING = "from journal_stages import demo_plan, loaded; loaded(demo_plan(True), 2)"


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured seconds of one layer: per micro-batch, per token of a prompt, and per decode."""

    window: int | None
    num_layers: int
    base_s: float
    token_s: float
    decode_s: float

    def stage_seconds(self, num_stages: int) -> Callable[[BatchWork], list[float]]:
        layers = self.num_layers / num_stages

        def seconds(work: BatchWork) -> list[float]:
            one = self.base_s + self.token_s * work.prefill_tokens + self.decode_s * work.decodes
            return [layers * one] * num_stages

        return seconds

    def reach(self, num_stages: int) -> int:
        return reach(-(-self.num_layers // num_stages), self.window)


@dataclass(frozen=True, slots=True)
class RealPauses:
    """Seconds until the median stream's next token, as if every stage had its own core, and on this machine's cores."""

    model: str
    live: int
    tokens: int
    start_s: float
    replay_s: float
    journal_s: float
    wall_replay_s: float
    wall_journal_s: float
    journal_bytes: int  # of one sequence, on one channel
    write_s: float  # of one micro-batch
    busy_s: tuple[float, ...]  # of each stage in a replay

    @property
    def gain(self) -> float:
        return (self.start_s + self.replay_s) / (self.start_s + self.journal_s)

    @property
    def wall_gain(self) -> float:
        return (self.start_s + self.wall_replay_s) / (self.start_s + self.wall_journal_s)


def reach(layers: int, window: int | None) -> int:
    """Return how many last positions determine a stage's caches.

    Two layers of window 64: the second needs the last 64 outputs of the first, which depend on 63 more positions: 127.
    """
    return 2**62 if window is None else (layers - 1) * (window - 1) + window


def start_s() -> float:
    """Return the seconds until a new process has a stage's weights. An actor takes longer, and has to be detected as lost."""
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", STARTING], check=True, cwd=Path(__file__).parent)
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def measure(windowed: bool, process_start_s: float, rounds: int) -> tuple[RealPauses, Costs]:
    """Measure with the minimum of each time over the rounds, to exclude other load of the machine. The first round warms up."""
    torch.set_num_threads(1)
    stages = Stages(demo_plan(windowed))
    args = stages.plan.args
    kept = min(TOKENS, reach(args.n_layers // STAGES, args.windows[0]))
    seen = zip(*[_round(stages, kept) for _ in range(rounds + 1)][1:], strict=True)
    replay_MS, decode_MS, few_MS, together_M, journal_MS, alone_M, write = (np.min(each, axis=0) for each in seen)
    ends, journal_ends = _ends(stages.batches(TOKENS)), _ends(stages.batches(kept))
    on_cores = decode_MS.sum()
    through = on_cores + STAGES * HOP_S  # of the next token, once the lost stage has its caches
    real = RealPauses(
        model=f"demo, window {args.windows[0]}" if windowed else "demo, no window",
        live=LIVE,
        tokens=TOKENS,
        start_s=process_start_s,
        replay_s=median(_pipelined(replay_MS)[ends]),
        journal_s=median(journal_MS[:, LOST].cumsum()[journal_ends]) + HOP_S + through,
        wall_replay_s=median(together_M[ends]),
        wall_journal_s=median(alone_M.cumsum()[journal_ends]) + on_cores,
        journal_bytes=kept * args.dim * stages.workers[0].dtype.itemsize,
        write_s=float(write),
        busy_s=tuple(replay_MS.sum(axis=0).tolist()),
    )
    return real, Costs(args.windows[0], args.n_layers, *_layer_costs(replay_MS, few_MS, decode_MS, args.n_layers / STAGES))


def _round(stages: Stages, kept: int) -> tuple[Seconds | float, ...]:
    """Return the times in the order that ``measure`` unpacks: [micro-batches, stages] or [micro-batches]."""
    batches = stages.batches(TOKENS)
    replay_MS, _ = stages.one_by_one(batches)
    decode_MS, _ = stages.one_by_one(stages.decodes(batches[-1], TOKENS))
    few_MS, _ = stages.one_by_one(stages.batches(FEW, FEW))
    together_M = stages.together(stages.batches(TOKENS))
    journal_MS, made = stages.one_by_one(stages.batches(kept))
    alone_M = stages.alone(stages.batches(kept), made)
    return replay_MS, decode_MS, few_MS, together_M, journal_MS, alone_M, _write_s([outputs[LOST - 1] for outputs in made])


def _ends(batches: Sequence[MicroBatch]) -> list[int]:
    """Return for each sequence the micro-batch with its last token."""
    return [batch.step_id for batch in batches for chunk in batch.chunks if chunk.needs_sample]


def _pipelined(seconds_MS: Seconds) -> Seconds:
    """Return when each micro-batch leaves the pipeline.
    Two that take 2 s in the first and 3 s in the second of two stages, without hops: 5 and 8.
    """
    free_at, ends = [0.0] * STAGES, []
    for row in seconds_MS.tolist():
        now = 0.0
        for stage, taken in enumerate(row):
            now = free_at[stage] = max(now + HOP_S, free_at[stage]) + taken
        ends.append(now + HOP_S)
    return np.array(ends)


def _write_s(inputs: Sequence[Activation]) -> float:
    """Return the seconds to copy one micro-batch's hidden states to allocated memory."""
    taken = []
    for activation in inputs:
        kept_TD = torch.zeros_like(activation.hidden_TD)
        started = time.perf_counter()
        kept_TD.copy_(activation.hidden_TD)
        taken.append(time.perf_counter() - started)
    return median(taken)


def _layer_costs(many_MS: Seconds, few_MS: Seconds, decode_MS: Seconds, layers: float) -> tuple[float, float, float]:
    """Fit costs to micro-batches of 256 and 16 prompt tokens and one of 16 decodes, in the lost stage."""
    many, few, decodes = (median(seconds_MS[:, LOST].tolist()) / layers for seconds_MS in (many_MS, few_MS, decode_MS))
    token_s = (many - few) / (CHUNK - FEW)
    base_s = max(few - FEW * token_s, 0.0)
    return base_s, token_s, max(decodes - base_s, 0.0) / LIVE
