"""Benchmark of a hop between two stages, and of the throughput of four stages, by each way of
hidden states.

    python tests/bench/link.py [--steps 200] [--rounds 3] [--json]

Every stage has a raylet with an object store of its own, as on four machines. Actors and chains are
real; only the computation is modelled: every stage sleeps for 5 ms, so that only the links use the
cores. The ways are inline (a limit above all sizes), plasma (a limit below all sizes) and direct. A
hop is the time between the end of one stage's computation and the beginning of the next one's, by
this machine's clock, with one micro-batch in flight. An interval is the time per micro-batch with
stages + 1 of them in flight. Rounds alternate between two clusters; figures are medians over the
rounds.
"""

import argparse
import asyncio
import logging
import os
import statistics
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

# before ray is imported: of a cluster that is gone at the end
os.environ["RAY_AUTH_MODE"] = "disabled"

import ray
from bench_parts import Part, Report, conclude_part, medians, table_of
from ray.actor import ActorHandle
from ray.cluster_utils import Cluster
from targets import Target, at_most
from tiny_models import tiny_args, tiny_plan

from tramontane.cluster.actors.pipeline_spec import WorkerSettings
from tramontane.cluster.actors.stage_actor import StageActor, remote_stage_class
from tramontane.cluster.actors.stage_control import fence_stages
from tramontane.cluster.config.ray_settings import INLINE_LIMIT, RAY_SETTINGS
from tramontane.cluster.pipeline.stage_chain import DirectStageChain, ObjectStoreStageChain
from tramontane.proto.model_folder import RandomWeights
from tramontane.proto.plan import Link, PipelinePlan
from tramontane.proto.step import Chunk, MicroBatch, StageTiming, StepResult

STAGES = 4
COMPUTE_S = 0.005
DIM = 2048  # of float32: 8 KiB per token
# tokens
SIZES = {"8 KiB": 1, "128 KiB": 16, "512 KiB": 64, "1 MiB": 128, "2 MiB": 256, "4 MiB": 512}
# of the object store by the way that the shipped limit chooses
HOP_TARGETS_MS: dict[str, dict[str, float]] = {
    "direct": {"8 KiB": 0.15, "128 KiB": 0.25, "2 MiB": 1.0},
    "inline": {"8 KiB": 0.9, "128 KiB": 2.4},
    "plasma": {"2 MiB": 2.9},
}
INTERVAL_TARGETS_MS = {"8 KiB": 5.8, "128 KiB": 6.5}
CHAINS = {"object-store": ObjectStoreStageChain, "direct": DirectStageChain}
# Of a cluster with each limit, in bytes: the ways that it measures, with their links.
CLUSTERS: dict[int, dict[str, Link]] = {
    2**23: {"inline": "object-store", "direct": "direct"},
    2**12: {"plasma": "object-store"},
}


@dataclass(frozen=True)
class SleptStep:
    """What a ``SleepingStage`` has in place of a ``PendingStep``."""

    outcome: Any
    hidden_TD: Any
    is_stateful = False

    def read(self) -> Any:
        return self.outcome


class SleepingStage(StageActor):
    """A stage that sleeps instead of computing."""

    def _load(self) -> Any:
        import torch

        from tramontane.workers.stage.hidden_states import HiddenStates
        from tramontane.workers.stage.stage_worker import StageWorker

        worker = StageWorker.load(self._plan, self._settings.weights, self._settings.device)
        hidden_TD = torch.zeros(max(SIZES.values()), DIM)

        def begin(batch: MicroBatch, incoming: HiddenStates | None) -> SleptStep:
            started_at, started = time.time(), time.perf_counter()
            worker.next_step_id += 1
            time.sleep(COMPUTE_S)
            timing = StageTiming(
                worker.plan.stage_id, started_at, time.perf_counter() - started, batch.num_tokens
            )
            timings = (*(incoming.timings if incoming else ()), timing)
            if worker.plan.is_last:
                return SleptStep(StepResult(batch.epoch, batch.step_id, (), timings), None)
            activation = HiddenStates(hidden_TD[: batch.num_tokens], timings)
            return SleptStep(activation, activation.hidden_TD)

        worker.launch = begin  # type: ignore
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
    yield [
        kind.remote(stage, WorkerSettings(RandomWeights(), "cpu", threads=1))
        for stage in plan.stages
    ]


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
            waiting.append(
                asyncio.ensure_future(chain.submit(MicroBatch(epoch, step_id, (chunk,))))
            )
    return results, time.perf_counter() - started


def measure(
    stages: list["ActorHandle[Any]"], link: Link, num_tokens: int, num_steps: int
) -> Figures:
    # the first stage is no supervisor, but ``fence`` is never called
    chain = CHAINS[link](stages, stages[0], "bench")

    def run(in_flight: int) -> tuple[list[StepResult], float]:
        epoch = time.time_ns()
        fence_stages(stages, epoch, "bench", link)
        return asyncio.run(_run(chain, epoch, num_tokens, num_steps, in_flight))

    alone, _ = run(1)
    hops = [
        later.started_at - earlier.ended_at
        for result in alone
        for earlier, later in pairwise(result.timings)
    ]
    _, seconds = run(STAGES + 1)
    return Figures(statistics.median(hops) * 1000, seconds / (num_steps - 1) * 1000)


@contextmanager
def _raylets(limit: int) -> Iterator[None]:
    """Start a raylet for each stage, in a cluster whose results of ``limit`` bytes go through
    plasma.
    """
    head = {
        "num_cpus": 1,
        "include_dashboard": False,
        "_system_config": {**RAY_SETTINGS, INLINE_LIMIT: limit},
    }
    nodes = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(STAGES - 1):
        nodes.add_node(num_cpus=1)
    nodes.wait_for_nodes()
    ray.init(address=nodes.address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()
        nodes.shutdown()


def run(num_steps: int, num_rounds: int) -> dict[tuple[str, str], Figures]:
    found: dict[tuple[str, str], list[Figures]] = defaultdict(list)
    for limit in (limit for _ in range(num_rounds) for limit in CLUSTERS):
        with _raylets(limit), _stages(_plan()) as stages:
            for is_warm, size, (way, link) in product(
                (False, True), SIZES, CLUSTERS[limit].items()
            ):
                figures = measure(stages, link, SIZES[size], num_steps if is_warm else 2 * STAGES)
                if is_warm:
                    found[size, way].append(figures)
            _check_ways(stages, set(CLUSTERS[limit]))
    return {
        (size, way): medians(found[size, way])
        for size in SIZES
        for way in ("inline", "plasma", "direct")
    }


def _check_ways(stages: list["ActorHandle[Any]"], ways: set[str]) -> None:
    health = ray.get([stage.health.remote() for stage in stages])
    assert health[0].sent.keys() == ways, health[0].sent
    assert len({each.node_id for each in health}) == STAGES, "each has an object store of its own"


def targets(figures: dict[tuple[str, str], Figures]) -> list[Target]:
    found = []
    for way, limits in HOP_TARGETS_MS.items():
        found += [
            at_most(f"hop, {size}, {way}", figures[size, way].hop_ms, limit, "ms")
            for size, limit in limits.items()
        ]
        in_time = {size: limit for size, limit in INTERVAL_TARGETS_MS.items() if size in limits}
        found += [
            at_most(f"interval, {size}, {way}", figures[size, way].interval_ms, ms, "ms")
            for size, ms in in_time.items()
        ]
    return found


def link(options: argparse.Namespace) -> Report:
    figures = run(options.steps, options.rounds)
    title = f"{STAGES} stages of {COMPUTE_S * 1000:.0f} ms; in ms"
    rows = [(*case, f"{f.hop_ms:.2f}", f"{f.interval_ms:.2f}") for case, f in figures.items()]
    table = table_of(("hidden states", "way", "hop", "interval"), rows, title)
    data = [{"size": size, "way": way} | asdict(f) for (size, way), f in figures.items()]
    return Report(targets(figures), [table], {"rows": data})


PARTS = {"link": Part(link, {"--steps": 200, "--rounds": 3})}


def main() -> None:
    conclude_part(__doc__, PARTS)


if __name__ == "__main__":
    main()
