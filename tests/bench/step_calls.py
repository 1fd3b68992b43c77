"""Benchmark of what the calls of a micro-batch cost the router's event loop, with 4, 16 and 64
stages that do nothing.

    python tests/bench/step_calls.py [--stages 4,16,64] [--steps 300] [--rounds 3] [--json]

The chain of the direct link calls actors that answer at once; a few processes play all stages, as
only the caller is measured. It makes its calls in a thread. For comparison the same calls are made
on the event loop, as before; both take turns. Figures are the loop's CPU time per micro-batch, how
long other work of the loop waits for its turn (95th percentile), and micro-batches per second with
5 in flight; medians over the rounds.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import ray
from rich.table import Table
from targets import Target, at_most, conclude

from tramontane.cluster.pipeline.ray_cluster import local_ray_cluster
from tramontane.cluster.pipeline.stage_chain import DirectStageChain
from tramontane.proto import wire
from tramontane.proto.step import MicroBatch, StageTiming, StepResult

PROCESSES, IN_FLIGHT = 2, 5
IN_THREAD, ON_LOOP = "in a thread", "on the loop"
MAX_GROWTH = 4.0  # of the loop's CPU time, from the fewest stages to the most
MAX_SHARE = 0.25  # of the CPU time with calls on the loop, with the most stages


@dataclass(frozen=True)
class Figures:
    loop_ms: float
    wait_ms: float
    per_s: float


class IdleStage:
    """A stage that does nothing; ``message`` is its answer to every step."""

    def __init__(self, message: bytes) -> None:
        self._message = message

    def linked_step(self, _batch: bytes) -> bytes:
        return self._message


class AtOnce:
    """In place of a thread: runs what is submitted."""

    def submit(self, call: Callable[..., None], *arguments: object) -> None:
        call(*arguments)


class OnLoop(DirectStageChain):
    """Makes its calls on the event loop."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._calling = AtOnce()  # type: ignore[assignment]


async def run_steps(chain: DirectStageChain, num_steps: int) -> None:
    room = asyncio.Semaphore(IN_FLIGHT)

    async def step(number: int) -> None:
        async with room:
            await chain.submit(MicroBatch(1, number, ()))

    await asyncio.gather(*map(step, range(num_steps)))


async def measure(chain: DirectStageChain, num_steps: int) -> Figures:
    cpu, began = time.thread_time(), time.perf_counter()
    await run_steps(chain, num_steps)
    spent, elapsed = time.thread_time() - cpu, time.perf_counter() - began
    stepping, waits = asyncio.create_task(run_steps(chain, num_steps // 4)), [0.0]
    while not stepping.done():
        last = time.perf_counter()
        await asyncio.sleep(0.001)
        waits.append(time.perf_counter() - last - 0.001)
    return Figures(
        spent / num_steps * 1000, statistics.quantiles(waits, n=20)[-1] * 1000, num_steps / elapsed
    )


def run(options: argparse.Namespace) -> dict[tuple[int, str], Figures]:
    found: dict[tuple[int, str], list[Figures]] = defaultdict(list)
    message = wire.encode_result(StepResult(1, 0, (), (StageTiming(0, 0.0, 0.0, 0),)))
    with local_ray_cluster(num_cpus=PROCESSES):
        # actors cannot import benchmarks
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        actors: list[Any] = [
            ray.remote(num_cpus=1)(IdleStage).remote(message) for _ in range(PROCESSES)
        ]
        for number in range(options.rounds + 1):
            for stages in options.stages:
                for way, kind in ((IN_THREAD, DirectStageChain), (ON_LOOP, OnLoop)):
                    chain = kind(
                        [actors[stage % PROCESSES] for stage in range(stages)], actors[0], "bench"
                    )
                    figures = asyncio.run(measure(chain, options.steps))
                    if number:  # the first round warms up
                        found[stages, way].append(figures)
    return {case: _median(figures) for case, figures in found.items()}


def _median(figures: list[Figures]) -> Figures:
    columns = zip(*(asdict(each).values() for each in figures), strict=True)
    return Figures(*(statistics.median(column) for column in columns))


def targets(figures: dict[tuple[int, str], Figures]) -> list[Target]:
    fewest, most = min(stages for stages, _ in figures), max(stages for stages, _ in figures)
    last = figures[most, IN_THREAD].loop_ms
    growth, share = last / figures[fewest, IN_THREAD].loop_ms, last / figures[most, ON_LOOP].loop_ms
    return [
        at_most(
            f"CPU time of the loop, {most} stages against {fewest}", growth, MAX_GROWTH, "times"
        ),
        at_most(f"the same against calls on the loop, {most} stages", share, MAX_SHARE, "times"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--stages", type=lambda text: [int(each) for each in text.split(",")], default=[4, 16, 64]
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = run(options)
    table = Table(
        "stages",
        "calls",
        "CPU ms of the loop",
        "ms that other work waits",
        "micro-batches/s",
        title="per micro-batch",
    )
    for (stages, way), each in figures.items():
        table.add_row(
            str(stages), way, f"{each.loop_ms:.2f}", f"{each.wait_ms:.1f}", f"{each.per_s:.0f}"
        )
    rows = [
        {"stages": stages, "calls": way} | asdict(each) for (stages, way), each in figures.items()
    ]
    conclude(targets(figures), table, data={"rows": rows}, as_json=options.json)


if __name__ == "__main__":
    main()
