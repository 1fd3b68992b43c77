"""Benchmark of a journal of stage inputs: whether it would shorten the pause after a stage has died.

    python tests/bench/journal.py [--stages 8] [--rounds 3] [--json]

Without a journal all stages recompute prompts and partial answers, pipelined. With a journal the stage before the lost one
would have kept its outputs in host memory, and only the new stage would recompute from them; the others would keep their
caches. The product has no journal: this program compares only the computations, from the moment when the new stage has its
weights.

* Modelled: the real scheduler and policy (with a trained cost model) replay all live sequences on a modelled pipeline; with the
  journal only the lost stage computes prompts. Hidden states cross the link in both cases. The cost of the journal in normal
  operation and the synchronization of stages that are ahead are left out, so the journal looks better than it would be.
* Real: four stages of the demo model in this process, one thread each; the inputs of the third are recorded. The threads of
  four stages share this machine's cores, which favours the journal. Therefore the pipelined estimate counts: the measured times
  of each micro-batch, combined as if every stage had its own core.

If layers have windows, a journal needs only the positions that the windows of a stage's layers reach (``reach``); the replay
computes all of them.

The criterion, written before the first measurement: a journal is worth its code if the pause of the median stream, including
process start and loading of weights, is at least 1.3 times as long without it:

1. modelled, in the median of the cases of each model, and
2. on four real stages, by the pipelined estimate, for the demo model as it is and without its window of 64 tokens (no published
   model has so small a one, most have none).

The target is that the decision against a journal (docs/decisions, 35) still holds: the smallest of these gains is below 1.3.
"""

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from journal_pauses import Costs, RealPauses, measure, reach, start_s
from rich.table import Table
from targets import Target, conclude

from tramontane.cluster.cli.simulate import default_cost_model
from tramontane.proto.plan import CachePlan, WindowClass, ring_pages
from tramontane.router.scheduling.admission import SchedulerLimits
from tramontane.router.scheduling.balanced_policy import BalancedPolicy
from tramontane.router.scheduling.policy import BatchWork
from tramontane.router.scheduling.scheduler import Scheduler
from tramontane.router.simulation.simulator import PipelineModel, SimRequest, simulate

MIN_GAIN = 1.3
BUDGET, PAGE_SIZE, NEW_TOKENS = 1024, 16, 32
HOP_S = 5e-4  # a micro-batch of 1024 tokens of 8 KiB over 25 GB/s, and 0.2 ms
GPU_START_S, READ_PER_S = 4.0, 3e9  # a process with torch and CUDA; bytes of weights
LIVE, LENGTHS = (16, 64), (1024, 4096, 16384)

Seconds = Callable[[BatchWork], list[float]]


@dataclass(frozen=True, slots=True)
class Model:
    """``start_s``: until a new process has its weights. ``reach``: positions that determine a stage's caches."""

    name: str
    seconds: Seconds
    start_s: float
    window: int | None
    reach: int
    journal_bytes: int  # per token and channel
    lengths: tuple[int, ...] = LENGTHS


@dataclass(frozen=True, slots=True)
class Case:
    """Seconds from when the new stage is ready until the next token: of the median stream, and of the last one."""

    model: str
    live: int
    tokens: int
    start_s: float
    replay_s: float
    journal_s: float
    replay_last_s: float
    journal_last_s: float
    journal_gib: float  # of one channel

    @property
    def gain(self) -> float:
        """Ratio of the median stream's pauses without and with a journal."""
        return (self.start_s + self.replay_s) / (self.start_s + self.journal_s)

    @property
    def last_gain(self) -> float:
        return (self.start_s + self.replay_last_s) / (self.start_s + self.journal_last_s)


def modelled(num_stages: int, demo: dict[str, Costs], demo_start_s: float) -> Iterator[Case]:
    for model in _models(num_stages, demo, demo_start_s):
        for live in LIVE:
            for tokens in model.lengths:
                yield _case(model, num_stages, live, tokens)


def _models(num_stages: int, demo: dict[str, Costs], demo_start_s: float) -> list[Model]:
    """Return the 7B of ``tramontane simulate`` on large GPUs, Mixtral on small ones, and the demo on this machine's cores."""
    layers = -(-32 // num_stages)
    return [
        Model(
            "7B, large GPUs", default_cost_model(num_stages), _gpu_start_s(14.5e9 / num_stages), 4096, reach(layers, 4096), 8192
        ),
        Model(
            "Mixtral 8x7B, small GPUs", _mixtral(num_stages), _gpu_start_s(93.4e9 / num_stages), None, reach(layers, None), 8192
        ),
        *(
            Model(name, costs.stage_seconds(num_stages), demo_start_s, costs.window, costs.reach(num_stages), 256, LENGTHS[:1])
            for name, costs in demo.items()
        ),
    ]


def _gpu_start_s(weight_bytes: float) -> float:
    return GPU_START_S + weight_bytes / READ_PER_S


def _mixtral(num_stages: int) -> Seconds:
    """Return the cost of Mixtral 8x7B on GPUs with 60 TFLOP/s and 600 GB/s.

    Over eight stages: 52 us per token (12.6e9 parameters, two operations each), 19 ms for the weights, and for each key
    4 * 32 * 128 operations per layer, or 4 KiB for a decode.
    """

    def seconds(work: BatchWork) -> list[float]:
        per_token, per_key = 2 * 12.6e9 / 60e12 * (work.prefill_tokens + work.decodes), 32 * 4 * 4096 / 60e12 * work.prefill_keys
        reading = (93.4e9 + 32 * 4096 * work.decode_keys) / 600e9
        return [(per_token + per_key + reading) / num_stages] * num_stages

    return seconds


def _case(model: Model, num_stages: int, live: int, tokens: int) -> Case:
    """Compute one case, with lengths from half to one and a half times ``tokens``."""
    rng = random.Random(0)
    lengths = [round(tokens * rng.uniform(0.5, 1.5)) for _ in range(live)]
    kept = [min(n, model.reach) for n in lengths]
    replay = _pauses(model.seconds, num_stages, lengths, model.window)
    journal = _pauses(_alone(num_stages // 2, model.seconds), num_stages, kept, model.window)
    medians = statistics.median(replay), statistics.median(journal)
    gib = sum(kept) * model.journal_bytes / 2**30
    return Case(model.name, live, tokens, model.start_s, *medians, max(replay), max(journal), gib)


def _alone(lost: int, seconds: Seconds) -> Seconds:
    """Return costs with which only the lost stage computes prompts, while all stages compute decodes."""

    def stage_seconds(work: BatchWork) -> list[float]:
        others = seconds(replace(work, prefill_tokens=0, prefill_keys=0))
        others = others if work.decodes else [0.0] * len(others)
        return [whole if stage == lost else own for stage, (whole, own) in enumerate(zip(seconds(work), others, strict=True))]

    return stage_seconds


def _pauses(seconds: Seconds, num_stages: int, lengths: Sequence[int], window: int | None) -> list[float]:
    """Return the seconds of each sequence until its next token. A first run trains the policy's cost model."""
    policy = BalancedPolicy(num_stages, BUDGET)
    max_len = max(lengths) + NEW_TOKENS + 1
    ring = ring_pages(window, PAGE_SIZE, max_len)
    cache = CachePlan(PAGE_SIZE, (WindowClass(window, ring, ring * len(lengths)),))
    arrivals = [SimRequest(0.0, n, NEW_TOKENS) for n in lengths]
    for run in (arrivals[:16], arrivals):
        scheduler = Scheduler(cache, SchedulerLimits(len(lengths), BUDGET, max_len, 1000), policy)
        trace = simulate(scheduler, PipelineModel(seconds, HOP_S), run)
    return trace.ttft_s()


def _tables(cases: Sequence[Case], real: Sequence[RealPauses], num_stages: int) -> tuple[Table, Table]:
    columns = ("median:\nreplay", "journal", "gain", "gain w/o\nstart", "last:\nreplay", "journal", "gain", "GiB per\nchannel")
    by_case = _table(f"{num_stages} modelled stages; seconds", "model", "live", "tokens", "start", *columns)
    for c in cases:
        median = (c.start_s, c.replay_s, c.journal_s, c.gain, c.replay_s / c.journal_s)
        last = (c.replay_last_s, c.journal_last_s, c.last_gain, c.journal_gib)
        by_case.add_row(c.model, str(c.live), str(c.tokens), *(f"{value:.2f}" for value in (*median, *last)))
    title = f"{len(real[0].busy_s)} real stages of the demo model, {real[0].live} sequences of {real[0].tokens}; seconds"
    pairs = ("median:\nreplay", "journal", "gain", "on these cores:\nreplay", "journal", "gain")
    measured = _table(title, "model", "start", *pairs, "KiB", "us")
    measured.caption = "KiB: of journal per sequence and channel; us: to write one micro-batch to it; start: minimum of three"
    for r in real:
        times = (r.start_s, r.replay_s, r.journal_s, r.gain, r.wall_replay_s, r.wall_journal_s, r.wall_gain)
        measured.add_row(r.model, *(f"{value:.2f}" for value in times), f"{r.journal_bytes / 1024:.0f}", f"{r.write_s * 1e6:.0f}")
    return by_case, measured


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for name in columns:
        table.add_column(name, justify="right")
    return table


def targets(median_gains: Mapping[str, float], real: Sequence[RealPauses]) -> list[Target]:
    smallest = min(*median_gains.values(), *(r.gain for r in real))
    return [Target("smallest gain of a journal (decision 35)", smallest, "<", MIN_GAIN, "x")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    started_s = start_s()
    real, costs = zip(*(measure(windowed, started_s, options.rounds) for windowed in (True, False)), strict=True)
    cases = list(modelled(options.stages, {r.model: c for r, c in zip(real, costs, strict=True)}, started_s))
    gains = {name: statistics.median(c.gain for c in cases if c.model == name) for name in dict.fromkeys(c.model for c in cases)}
    medians = _table("gain of the median stream, median of the cases", *gains)
    medians.add_row(*(f"{gain:.2f}" for gain in gains.values()))
    rows = [asdict(each) | {"gain": each.gain} for each in (*cases, *real)]
    data = {"rows": rows, "median_gains": gains}
    conclude(targets(gains, real), *_tables(cases, real, options.stages), medians, data=data, as_json=options.json)


if __name__ == "__main__":
    main()
