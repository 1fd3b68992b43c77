"""Benchmark of a hop between two stages, and of the throughput of four stages, over either link.

    python tests/bench/link.py [--steps 200] [--rounds 3] [--json]

Actors and chains are real; only the computation is modelled: every stage sleeps for 5 ms, so that only
the links use the cores. A hop is the time between the end of one stage's computation and the beginning
of the next one's, by this machine's clock, with one micro-batch in flight. An interval is the time per
micro-batch with stages + 1 of them in flight. The links alternate; figures are medians over the rounds.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import ray
from ray.actor import ActorHandle
from rich.table import Table
from targets import Target, at_most, conclude
from tiny_models import tiny_args, tiny_plan

from tramontane.cluster.actors.pipeline_spec import WorkerSettings
from tramontane.cluster.actors.stage_actor import StageActor, remote_stage_class
from tramontane.cluster.actors.stage_control import fence_stages
from tramontane.cluster.pipeline.ray_cluster import local_ray_cluster
from tramontane.cluster.pipeline.stage_chain import DirectStageChain, ObjectStoreStageChain
from tramontane.proto.model_folder import RandomWeights
from tramontane.proto.plan import Link, PipelinePlan
from tramontane.proto.step import Chunk, MicroBatch, StageTiming, StepResult

STAGES = 4
COMPUTE_S = 0.005
DIM = 2048  # of float32: 8 KiB per token
SIZES = {"8 KiB": 1, "128 KiB": 16, "2 MiB": 256}  # tokens
HOP_TARGETS_MS: dict[Link, dict[str, float]] = {
    "direct": {"8 KiB": 0.15, "128 KiB": 0.25, "2 MiB": 1.0},
    "object-store": {"8 KiB": 0.9, "128 KiB": 2.4, "2 MiB": 2.9},
}
INTERVAL_TARGETS_MS = {"8 KiB": 5.8, "128 KiB": 6.5}
CHAINS = {"object-store": ObjectStoreStageChain, "direct": DirectStageChain}


class SleepingStage(StageActor):
    """A stage that sleeps instead of computing."""

    def _load(self) -> Any:  # noqa: ANN401
        import torch

        from tramontane.workers.stage.activation import Activation, PendingOutcome
        from tramontane.workers.stage.stage_worker import StageWorker

        worker = StageWorker.load(self._plan, self._settings.weights, self._settings.device)
        hidden_TD = torch.zeros(max(SIZES.values()), DIM)

        def begin(batch: MicroBatch, incoming: Activation | None) -> PendingOutcome:
            started_at, started = time.time(), time.perf_counter()
            worker.check_epoch(batch)
            worker.check_order(batch)
            worker.next_step_id += 1
            time.sleep(COMPUTE_S)
            timing = StageTiming(worker.plan.stage_id, started_at, time.perf_counter() - started, batch.num_tokens)
            timings = (*(incoming.timings if incoming else ()), timing)
            if worker.plan.is_last:
                result = StepResult(batch.epoch, batch.step_id, (), timings)
                return PendingOutcome(None, False, lambda: result)
            activation = Activation(hidden_TD[: batch.num_tokens], timings)
            return PendingOutcome(activation.hidden_TD, False, lambda: activation)

        worker.launch = begin  # type: ignore[method-assign]
        return worker


@dataclass(frozen=True, slots=True)
class Figures:
    hop_ms: float
    interval_ms: float


def _plan() -> PipelinePlan:
    args = replace(tiny_args(n_layers=STAGES, moe=False), dim=DIM, hidden_dim=8)
    return tiny_plan(args, STAGES)


@contextmanager
def _stages(plan: PipelinePlan) -> Iterator[list["ActorHandle[Any]"]]:
    this_module = sys.modules[__name__]
    ray.cloudpickle.register_pickle_by_value(this_module)  # actors cannot import benchmarks
    kind = remote_stage_class(SleepingStage).options(num_cpus=1)
    yield [kind.remote(stage, WorkerSettings(RandomWeights(), "cpu", threads=1)) for stage in plan.stages]


async def _run(
    chain: ObjectStoreStageChain, epoch: int, num_tokens: int, num_steps: int, in_flight: int
) -> tuple[list[StepResult], float]:
    """Return all results, and the seconds from the first one to the last one."""
    results: list[StepResult] = []
    started = 0.0
    waiting: deque[asyncio.Future[StepResult]] = deque()
    for step_id in range(num_steps + in_flight):
        if len(waiting) >= in_flight or step_id >= num_steps:
            results.append(await waiting.popleft())
            started = started or time.perf_counter()
        if step_id < num_steps:
            chunk = Chunk(0, 0, (1,) * num_tokens, ((),), None, False)
            waiting.append(asyncio.ensure_future(chain.submit(MicroBatch(epoch, step_id, (chunk,)))))
    return results, time.perf_counter() - started


def measure(stages: list["ActorHandle[Any]"], link: Link, num_tokens: int, num_steps: int) -> Figures:
    chain = CHAINS[link](stages, stages[0], "bench")  # the first stage is no supervisor, but ``fence`` is never called

    def run(in_flight: int) -> tuple[list[StepResult], float]:
        epoch = time.time_ns()
        fence_stages(stages, epoch, "bench", link)
        return asyncio.run(_run(chain, epoch, num_tokens, num_steps, in_flight))

    alone, _ = run(1)
    hops = [later.started_at - earlier.ended_at for result in alone for earlier, later in pairwise(result.timings)]
    _, seconds = run(STAGES + 1)
    return Figures(statistics.median(hops) * 1000, seconds / (num_steps - 1) * 1000)


def run(num_steps: int, num_rounds: int) -> dict[tuple[str, Link], Figures]:
    cases = list(product(SIZES, get_args(Link)))
    found: dict[tuple[str, Link], list[Figures]] = defaultdict(list)
    with local_ray_cluster(num_cpus=STAGES), _stages(_plan()) as stages:
        for number in range((num_rounds + 1) * len(cases)):
            size, link = cases[number % len(cases)]
            figures = measure(stages, link, SIZES[size], num_steps)
            if number >= len(cases):  # the first round warms up
                found[size, link].append(figures)
    return {case: _median(figures) for case, figures in found.items()}


def _median(figures: list[Figures]) -> Figures:
    return Figures(statistics.median(f.hop_ms for f in figures), statistics.median(f.interval_ms for f in figures))


def targets(figures: dict[tuple[str, Link], Figures]) -> list[Target]:
    found = []
    for (size, link), f in figures.items():
        found.append(at_most(f"hop, {size}, {link}", f.hop_ms, HOP_TARGETS_MS[link][size], "ms"))
        if size in INTERVAL_TARGETS_MS:
            found.append(at_most(f"interval, {size}, {link}", f.interval_ms, INTERVAL_TARGETS_MS[size], "ms"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = run(options.steps, options.rounds)
    table = Table(title=f"{STAGES} stages of {COMPUTE_S * 1000:.0f} ms; in ms")
    for name in ("hidden states", "link", "hop", "interval"):
        table.add_column(name, justify="right")
    for (size, link), f in figures.items():
        table.add_row(size, link, f"{f.hop_ms:.2f}", f"{f.interval_ms:.2f}")
    rows = [{"size": size, "link": link} | asdict(f) for (size, link), f in figures.items()]
    conclude(targets(figures), table, data={"rows": rows}, as_json=options.json)


if __name__ == "__main__":
    main()
