"""Benchmark of autoscaling: how soon pipelines are added and removed, and which requests fail or
change.

    python tests/bench/autoscale.py [--rounds 1] [--heavy 10] [--light 2] [--by-tokens] [--scarce]
    [--port 8785] [--json]

The demo model in float32, one stage per pipeline, in a local cluster, scaled by Ray Serve from one
pipeline to three. A few clients request long streams all the time. Many more clients start until
there are three pipelines, and stop until there is one again. Every request is first run once at
constant load, and must return the same tokens during scaling. A pipeline that is removed has one
second to finish its requests; long streams continue on another one. With ``--by-tokens`` there are
slots for all requests, and the tokens in flight cause the scaling; with ``--scarce`` the cluster
has no capacity for a third pipeline.
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from chaos_load import Load, baseline_tokens, bodies
from ray import serve
from ray.exceptions import RayError
from rich.console import Console
from rich.table import Table
from serve_cluster import jobs_in, leftovers, router_stats, start_serve, wait_until_ready
from targets import Target, conclude, none_of

from tramontane.cluster.pipeline.ray_cluster import local_ray_cluster
from tramontane.cluster.serving.app import APPLICATION, build

MAX_PIPELINES = 3
NAMES_PER_PIPELINE = 3  # its supervisor, its stage, their placement group
REQUESTS, LONG_STREAMS = 16, 6
POLL_S = 0.2
TIMEOUT_S = 300.0  # for the expected number of pipelines; then the run has failed
UNMET_DEMAND_S = 20.0  # how long a pipeline without capacity is requested
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "stages": 1,
    "threads_per_stage": 1,
    "max_replicas": MAX_PIPELINES,
}
SETTINGS |= {"drain_timeout": 1}
SETTINGS |= {"upscale_delay": 2, "downscale_delay": 5, "placement_timeout": 5}
BY_SLOTS, BY_TOKENS = {"max_num_seqs": 4}, {"max_num_seqs": 64, "autoscale_tokens": 1500}
console = Console(stderr=True, highlight=False)


@dataclass
class History:
    """Running pipelines over time, and for each removed one how many requests it had when last
    sampled.
    """

    began_at: float = field(default_factory=time.monotonic)
    pipelines: list[tuple[float, int]] = field(default_factory=list)
    requests: dict[str, int] = field(default_factory=dict)
    left_with: list[int] = field(default_factory=list)

    def sample(self) -> None:
        try:
            stats = router_stats(stages=False)
        except RayError:  # one of them is being removed
            return
        now = {router["pipeline"]: router["requests"] for router in stats}
        self.left_with += [num for name, num in self.requests.items() if name not in now]
        self.requests = now
        if not self.pipelines or self.pipelines[-1][1] != len(now):
            self.pipelines.append((round(time.monotonic() - self.began_at, 1), len(now)))


def long_streams(rng: random.Random) -> list[dict[str, Any]]:
    """Return requests like the others, but all streams of one choice, and three times as long."""
    return [
        body | {"max_tokens": rng.randint(300, 500), "stream": True, "n": 1}
        for body in bodies(LONG_STREAMS, rng)
    ]


def replicas(state: str) -> int:
    """Return how many replicas of the Router deployment are in this state."""
    number: int = (
        serve.status().applications[APPLICATION].deployments["Router"].replica_states.get(state, 0)
    )
    return number


async def wait_until(condition: Callable[[], bool], what: str, load: "ScalingLoad") -> float:
    """Wait until the condition holds, with a status line; returns the seconds that it took. Raises
    TimeoutError.
    """
    began = time.monotonic()
    with console.status(what) as status:
        while not await asyncio.to_thread(condition):
            await asyncio.to_thread(load.history.sample)
            status.update(f"{what}: {len(load.history.requests)} now; {load.describe()}")
            if time.monotonic() - began > TIMEOUT_S:
                raise TimeoutError(what)
            await asyncio.sleep(POLL_S)
    seconds = round(time.monotonic() - began, 1)
    console.print(f"{what}: {seconds} s; {load.describe()}", soft_wrap=True)
    return seconds


@dataclass
class ScalingLoad:
    """``light`` runs all the time, ``heavy`` once per round. ``max_pipelines`` is what the cluster
    has capacity for.
    """

    light: Load
    heavy: Load
    num_heavy: int
    max_pipelines: int
    history: History = field(default_factory=History)

    def describe(self) -> str:
        loads = self.light, self.heavy
        done, bad = (
            sum(load.num_done for load in loads),
            sum(len(load.failed) + len(load.different) for load in loads),
        )
        return f"{done} requests done, {bad} failed or different"

    async def one_round(self) -> dict[str, Any]:
        """Scale from one pipeline to the maximum and back."""
        self.heavy.is_over = False
        running = asyncio.create_task(self.heavy.run(self.num_heavy))
        what = f"{self.num_heavy} more clients, until there are {self.max_pipelines} pipelines"
        up_s = await wait_until(lambda: replicas("RUNNING") == self.max_pipelines, what, self)
        if self.max_pipelines < MAX_PIPELINES:
            end_at = time.monotonic() + UNMET_DEMAND_S
            await wait_until(
                lambda: time.monotonic() > end_at,
                "one more pipeline requested, without capacity for it",
                self,
            )
        self.heavy.is_over = True
        self.light.watch()
        over_s = await wait_until(
            running.done, "these clients stop; their last requests have ended", self
        )
        down_s = await wait_until(_has_one_pipeline, "one pipeline", self)
        pause_s = round(max(self.light.pauses.values(), default=0.0), 2)
        return {"up_s": up_s, "over_s": over_s, "down_s": down_s, "worst_pause_s": pause_s}


def _has_one_pipeline() -> bool:
    return replicas("RUNNING") == 1 and len(leftovers()) == NAMES_PER_PIPELINE


async def scaling(url: str, args: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(args.seed)
    requests, streams = bodies(REQUESTS, rng), long_streams(rng)
    console.print(f"{REQUESTS} requests and {LONG_STREAMS} long streams at constant load ...")
    heavy = Load(url, requests, await baseline_tokens(url, requests, args.light))
    light = Load(url, streams, await baseline_tokens(url, streams, args.light))
    scaling_load, rounds = ScalingLoad(light, heavy, args.heavy, MAX_PIPELINES - args.scarce), []
    await wait_until(_has_one_pipeline, "one pipeline", scaling_load)
    running = asyncio.create_task(light.run(args.light))
    try:
        for _ in range(args.rounds):
            rounds.append(await scaling_load.one_round())
    finally:
        light.is_over = heavy.is_over = True
        await running
    return {
        "requests": light.num_done + heavy.num_done + len(light.failed) + len(heavy.failed),
        "failed": light.failed + heavy.failed,
        "different": light.different + heavy.different,
        "rounds": rounds,
        "pipelines": scaling_load.history.pipelines,
        "left_with": scaling_load.history.left_with,
    }


def show(report: dict[str, Any]) -> None:
    columns = (
        "round",
        "to the maximum",
        "until all had ended",
        "then to one",
        "worst pause of a long stream",
    )
    table = Table(*columns, title="scaling, in seconds")
    for number, row in enumerate(report["rounds"], 1):
        table.add_row(str(number), *map(str, row.values()))
    console.print(table)
    console.print(
        "pipelines: " + ", ".join(f"{number} after {at} s" for at, number in report["pipelines"])
    )
    console.print(f"requests of pipelines at their removal: {report['left_with']}")
    for title in ("failed", "different"):
        console.print(
            f"{title}: {len(report[title])} of {report['requests']} requests",
            *report[title][:5],
            sep="\n  ",
        )
    console.print(f"left behind: {report['left_behind'] or 'nothing'}")


def targets(report: dict[str, Any]) -> list[Target]:
    requests = [none_of(f"{title} requests", report[title]) for title in ("failed", "different")]
    return [*requests, none_of("resources left behind", report["left_behind"])]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--heavy", type=int, default=10)
    parser.add_argument("--light", type=int, default=2)
    parser.add_argument("--by-tokens", action="store_true")
    parser.add_argument("--scarce", action="store_true")
    parser.add_argument("--port", type=int, default=8785)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    url = f"http://127.0.0.1:{args.port}"
    with local_ray_cluster(num_cpus=MAX_PIPELINES - args.scarce), TemporaryDirectory() as folder:
        start_serve(args.port, args.port + 1)
        settings = SETTINGS | (BY_TOKENS if args.by_tokens else BY_SLOTS)
        serve.run(build(settings | jobs_in(folder)), name=APPLICATION, route_prefix="/")
        wait_until_ready(url)
        report = asyncio.run(scaling(url, args))
        serve.delete(APPLICATION)
        report |= {"settings": settings, "left_behind": leftovers()}
        serve.shutdown()
    show(report)
    conclude(targets(report), data=report, as_json=args.json)


if __name__ == "__main__":
    main()
