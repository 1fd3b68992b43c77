"""Benchmark of changes of a running application while streams run: which requests fail or change,
how long streams pause, and how soon pipelines are added and removed.

    python tests/bench/deployments.py rolling [--deployments 6] [--seed 0] [--clients 24] [--scarce]
    [--port 8775] [--json]
    python tests/bench/deployments.py autoscale [--rounds 1] [--heavy 10] [--light 2] [--by-tokens]
    [--scarce] [--port 8785] [--json]

The demo model in float32 in a local cluster. Every request is first run once without changes, and
must return the same tokens during them.

**Rolling updates** of one pipeline of two stages. Versions alternate between a change of settings
of routers and ingress (the stages stay) and a change of settings of the stages (new ones are
loaded). With ``--scarce`` the cluster has capacity for one pipeline only.

**Autoscaling** by Ray Serve from one pipeline of one stage to three. A few clients request long
streams all the time. Many more clients start until there are three pipelines, and stop until there
is one again. A pipeline that is removed has one second to finish its requests; long streams
continue on another one. With ``--by-tokens`` there are slots for all requests, and the tokens in
flight cause the scaling; with ``--scarce`` the cluster has no capacity for a third pipeline.
"""

import argparse
import asyncio
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from bench_parts import Part, Report, conclude_part, console, table_of
from chaos_load import (
    Load,
    baseline_tokens,
    bodies,
    request_lines,
    request_targets,
    requests_of,
    until,
)
from ray import serve
from ray.exceptions import RayError
from serve_cluster import (
    deploy,
    is_rollout_complete,
    jobs_in,
    leftovers,
    router_stats,
    start_serve,
    wait_until_ready,
)
from targets import none_of

from tramontane.cluster.pipeline.ray_cluster import local_ray_cluster
from tramontane.cluster.serving.app import APPLICATION, build

POLL_S = 0.05  # between two queries of the routers over Ray
# for a version to be deployed and for streams to continue, or for the expected number of pipelines;
# then the run has failed
TIMEOUT_S = 300.0
MIN_STREAMS = 12  # unfinished streams at each deployment
NUM_REQUESTS = 40
ROLLING = {
    "dtype": "float32",
    "stages": 2,
    "threads_per_stage": 1,
    "max_num_seqs": 48,
    "max_queued_requests": 256,
}
CHANGES = {"the routers' settings": "max_queued_requests", "the stages' settings": "max_num_seqs"}
MAX_PIPELINES = 3
NAMES_PER_PIPELINE = 3  # its supervisor, its stage, their placement group
SCALED_REQUESTS, LONG_STREAMS = 16, 6
POLL_S = 0.2
UNMET_DEMAND_S = 20.0  # how long a pipeline without capacity is requested
SCALING: dict[str, Any] = {
    "dtype": "float32",
    "stages": 1,
    "threads_per_stage": 1,
    "max_replicas": MAX_PIPELINES,
    "drain_timeout": 1,
    "upscale_delay": 2,
    "downscale_delay": 5,
    "placement_timeout": 5,
}
BY_SLOTS, BY_TOKENS = {"max_num_seqs": 4}, {"max_num_seqs": 64, "autoscale_tokens": 1500}


@contextmanager
def serving(num_cpus: int, port: int) -> Iterator[tuple[str, dict[str, str]]]:
    """Run Ray Serve in a local cluster; yields its URL, and the settings of batch jobs."""
    with local_ray_cluster(num_cpus=num_cpus), TemporaryDirectory() as folder:
        start_serve(port, port + 1)
        yield f"http://127.0.0.1:{port}", jobs_in(folder)
        serve.shutdown()


# ---- rolling updates


def _stages(stats: list[dict[str, Any]]) -> dict[int, int]:
    """Return the bytes that each stage has read, by PID."""
    return {stage["pid"]: stage["bytes_read"] for router in stats for stage in router["stages"]}


async def _roll_out(load: Load, settings: dict[str, Any], change: str) -> dict[str, Any]:
    await until(
        lambda: load.unfinished >= MIN_STREAMS, f"only {load.unfinished} streams run", TIMEOUT_S
    )
    before = await asyncio.to_thread(router_stats)
    load.watch()
    began = time.monotonic()
    await asyncio.to_thread(deploy, settings)
    await until(
        lambda: asyncio.to_thread(is_rollout_complete, before),
        f"the version that changes {change} is not deployed",
        TIMEOUT_S,
        poll_s=POLL_S,
    )
    deployed_at = time.monotonic()
    watched = set(load.pauses)
    await until(
        lambda: all(load.last_piece_at.get(c, math.inf) > deployed_at for c in watched),
        "streams do not continue",
        TIMEOUT_S,
        poll_s=POLL_S,
    )
    after = _stages(await asyncio.to_thread(router_stats))
    return {
        "change": change,
        "seconds": round(deployed_at - began, 1),
        "streams": len(watched),
        "median_pause_s": round(statistics.median(load.pauses.values()), 2),
        "worst_pause_s": round(max(load.pauses.values()), 2),
        "worst_first_token_s": round(max(load.waits, default=0.0), 2),
        "bytes_read": sum(
            num_bytes - _stages(before).get(pid, 0) for pid, num_bytes in after.items()
        ),
    }


async def _rolling(url: str, settings: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    requests = bodies(NUM_REQUESTS, random.Random(args.seed))
    console.print(f"{NUM_REQUESTS} requests without updates ...")
    load = Load(url, requests, await baseline_tokens(url, requests, args.clients))
    running = asyncio.create_task(load.run(args.clients))
    deployments = []
    try:
        for number in range(args.deployments):
            change = list(CHANGES)[number % len(CHANGES)]
            settings = {**settings, CHANGES[change]: settings[CHANGES[change]] + 1}
            row = await _roll_out(load, settings, change)
            deployments.append(row)
            console.print(
                f"{number + 1}. {change}: {row['seconds']} s, worst pause {row['worst_pause_s']} s,"
                f" worst first token {row['worst_first_token_s']} s; {load.num_done} requests done,"
                f" {len(load.failed)} failed, {len(load.different)} different",
                soft_wrap=True,
            )
    finally:
        load.is_over = True
        await running
    return {**requests_of(load), "deployments": deployments}


def rolling(args: argparse.Namespace) -> Report:
    """rolling updates"""
    with serving(2 if args.scarce else 8, args.port) as (url, jobs):
        deploy(ROLLING | jobs)
        wait_until_ready(url)
        report = asyncio.run(_rolling(url, ROLLING | jobs, args))
    columns = ("changed", "seconds", "running streams", "median pause", "worst")
    rows = [row.values() for row in report["deployments"]]
    table = table_of((*columns, "worst first token", "bytes read"), rows, "rolling updates")
    return Report(request_targets(report), [table, *request_lines(report)], report)


# ---- autoscaling


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
    requests, streams = bodies(SCALED_REQUESTS, rng), long_streams(rng)
    console.print(
        f"{SCALED_REQUESTS} requests and {LONG_STREAMS} long streams at constant load ..."
    )
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
        **requests_of(light, heavy),
        "rounds": rounds,
        "pipelines": scaling_load.history.pipelines,
        "left_with": scaling_load.history.left_with,
    }


def autoscale(args: argparse.Namespace) -> Report:
    """autoscaling of pipelines"""
    settings = SCALING | (BY_TOKENS if args.by_tokens else BY_SLOTS)
    with serving(MAX_PIPELINES - args.scarce, args.port) as (url, jobs):
        serve.run(build(settings | jobs), name=APPLICATION, route_prefix="/")
        wait_until_ready(url)
        report = asyncio.run(scaling(url, args))
        serve.delete(APPLICATION)
        report |= {"settings": settings | jobs, "left_behind": leftovers()}
    columns = ("round", "to the maximum", "until all had ended", "then to one")
    rows = [(number, *row.values()) for number, row in enumerate(report["rounds"], 1)]
    pipelines = ", ".join(f"{number} after {at} s" for at, number in report["pipelines"])
    tables = [
        table_of((*columns, "worst pause of a long stream"), rows, "scaling, in seconds"),
        f"pipelines: {pipelines}",
        f"requests of pipelines at their removal: {report['left_with']}",
        *request_lines(report),
        f"left behind: {report['left_behind'] or 'nothing'}",
    ]
    targets = [*request_targets(report), none_of("resources left behind", report["left_behind"])]
    return Report(targets, tables, report)


PARTS = {
    "rolling": Part(
        rolling,
        {"--deployments": 6, "--seed": 0, "--clients": 24, "--scarce": False, "--port": 8775},
    ),
    "autoscale": Part(
        autoscale,
        {
            "--rounds": 1,
            "--seed": 0,
            "--heavy": 10,
            "--light": 2,
            "--by-tokens": False,
            "--scarce": False,
            "--port": 8785,
        },
    ),
}


def main() -> None:
    conclude_part(__doc__, PARTS)


if __name__ == "__main__":
    main()
