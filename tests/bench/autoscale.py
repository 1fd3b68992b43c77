"""Pipelines come and go with the load: how soon, and what failed, was different, or was left behind.

    python tests/bench/autoscale.py [--rounds 1] [--heavy 10] [--light 2] [--by-tokens] [--scarce] [--port 8785] [--json]

The demo model in float32, one stage a pipeline, in a cluster of this machine, scaled by Ray Serve from one pipeline to three.
A few clients ask for long streams all the time; many more come until there are three pipelines, and leave until there is one
again. Every request is run once undisturbed before; each must get the very same tokens. A pipeline that goes has a second to
finish what it has: long streams go on with another one. With ``--by-tokens`` there are places for all, and it is the tokens in
flight that ask for more pipelines; with ``--scarce`` there is no room for a third one.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from chaos_load import Load, bodies, undisturbed
from ray import serve
from ray.exceptions import RayError
from rich.console import Console
from rich.table import Table
from serve_cluster import jobs_in, leftovers, router_stats, start_serve, wait_until_ready

from tramontane.cluster.pipeline.ray_cluster import local_ray_cluster
from tramontane.cluster.serving.app import APPLICATION, build

MOST = 3
OF_A_PIPELINE = 3  # its supervisor, its stage, their placement group
REQUESTS, LONG_STREAMS = 16, 6
POLL_S = 0.2
PATIENCE_S = 300.0  # until the number of pipelines is as it should be; then the run has failed
BEYOND_S = 20.0  # for which a pipeline for which there is no room is wanted
SETTINGS: dict[str, Any] = {"dtype": "float32", "stages": 1, "threads_per_stage": 1, "max_replicas": MOST, "drain_timeout": 1}
SETTINGS |= {"upscale_delay": 2, "downscale_delay": 5, "placement_timeout": 5}
BY_PLACES, BY_TOKENS = {"max_num_seqs": 4}, {"max_num_seqs": 64, "target_tokens": 1500}
console = Console(stderr=True, highlight=False)


@dataclass
class History:
    """Pipelines that run, from the beginning of the load on; of each that went, how many requests it had when last seen."""

    began_at: float = field(default_factory=time.monotonic)
    pipelines: list[tuple[float, int]] = field(default_factory=list)
    requests: dict[str, int] = field(default_factory=dict)
    left_with: list[int] = field(default_factory=list)

    def look(self) -> None:
        try:
            stats = router_stats(stages=False)
        except RayError:  # one of them is just going
            return
        now = {router["pipeline"]: router["requests"] for router in stats}
        self.left_with += [num for name, num in self.requests.items() if name not in now]
        self.requests = now
        if not self.pipelines or self.pipelines[-1][1] != len(now):
            self.pipelines.append((round(time.monotonic() - self.began_at, 1), len(now)))


def long_streams(rng: random.Random) -> list[dict[str, Any]]:
    """Of the same kind as the others, but streams of one choice, and three times as long."""
    return [body | {"max_tokens": rng.randint(300, 500), "stream": True, "n": 1} for body in bodies(LONG_STREAMS, rng)]


def replicas(state: str) -> int:
    """Of the Router deployment, so many are in this state."""
    number: int = serve.status().applications[APPLICATION].deployments["Router"].replica_states.get(state, 0)
    return number


async def until(condition: Callable[[], bool], what: str, ask: "Asking") -> float:
    """Seconds that it took; what happens meanwhile is shown."""
    began = time.monotonic()
    with console.status(what) as status:
        while not await asyncio.to_thread(condition):
            await asyncio.to_thread(ask.history.look)
            status.update(f"{what}: {len(ask.history.requests)} now; {ask.told()}")
            if time.monotonic() - began > PATIENCE_S:
                raise TimeoutError(what)
            await asyncio.sleep(POLL_S)
    seconds = round(time.monotonic() - began, 1)
    console.print(f"{what}: {seconds} s; {ask.told()}", soft_wrap=True)
    return seconds


@dataclass
class Asking:
    """``light`` asks all the time, ``heavy`` now and then."""

    light: Load
    heavy: Load
    num_heavy: int
    most: int
    history: History = field(default_factory=History)

    def told(self) -> str:
        loads = self.light, self.heavy
        done, bad = sum(load.num_done for load in loads), sum(len(load.failed) + len(load.different) for load in loads)
        return f"{done} requests done, {bad} failed or different"

    async def one_round(self) -> dict[str, Any]:
        """From one pipeline to the most and back."""
        self.heavy.is_over = False
        running = asyncio.create_task(self.heavy.run(self.num_heavy))
        up_s = await until(
            lambda: replicas("RUNNING") == self.most, f"{self.num_heavy} more clients; {self.most} pipelines", self
        )
        if self.most < MOST:
            give_up_at = time.monotonic() + BEYOND_S
            await until(lambda: time.monotonic() > give_up_at, "one more is wanted, for which there is no room", self)
        self.heavy.is_over = True
        self.light.watch()
        over_s = await until(running.done, "they ask for nothing more; what they have asked for has ended", self)
        down_s = await until(_is_one_left, "one pipeline", self)
        pause_s = round(max(self.light.pauses.values(), default=0.0), 2)
        return {"up_s": up_s, "over_s": over_s, "down_s": down_s, "worst_pause_s": pause_s}


def _is_one_left() -> bool:
    return replicas("RUNNING") == 1 and len(leftovers()) == OF_A_PIPELINE


async def scaling(url: str, args: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(args.seed)
    requests, streams = bodies(REQUESTS, rng), long_streams(rng)
    console.print(f"{REQUESTS} requests and {LONG_STREAMS} long streams undisturbed ...")
    heavy = Load(url, requests, await undisturbed(url, requests, args.light))
    light = Load(url, streams, await undisturbed(url, streams, args.light))
    ask, rounds = Asking(light, heavy, args.heavy, MOST - args.scarce), []
    await until(_is_one_left, "one pipeline", ask)
    running = asyncio.create_task(light.run(args.light))
    try:
        for _ in range(args.rounds):
            rounds.append(await ask.one_round())
    finally:
        light.is_over = heavy.is_over = True
        await running
    return {
        "requests": light.num_done + heavy.num_done + len(light.failed) + len(heavy.failed),
        "failed": light.failed + heavy.failed,
        "different": light.different + heavy.different,
        "rounds": rounds,
        "pipelines": ask.history.pipelines,
        "left_with": ask.history.left_with,
    }


def show(ledger: dict[str, Any]) -> None:
    table = Table(
        "round", "to the most", "until all had ended", "then to one", "worst pause of a long stream", title="scaling, in seconds"
    )
    for number, row in enumerate(ledger["rounds"], 1):
        table.add_row(str(number), *map(str, row.values()))
    console.print(table)
    console.print("pipelines: " + ", ".join(f"{number} after {at} s" for at, number in ledger["pipelines"]))
    console.print(f"requests that pipelines had when they were told to go: {ledger['left_with']}")
    for title in ("failed", "different"):
        console.print(f"{title}: {len(ledger[title])} of {ledger['requests']} requests", *ledger[title][:5], sep="\n  ")
    console.print(f"left behind: {ledger['left_behind'] or 'nothing'}")


def main() -> None:
    parser = argparse.ArgumentParser()
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
    with local_ray_cluster(num_cpus=MOST - args.scarce), TemporaryDirectory() as folder:
        start_serve(args.port, args.port + 1)
        settings = SETTINGS | (BY_TOKENS if args.by_tokens else BY_PLACES)
        serve.run(build(settings | jobs_in(folder)), name=APPLICATION, route_prefix="/")
        wait_until_ready(url)
        ledger = asyncio.run(scaling(url, args))
        serve.delete(APPLICATION)
        ledger |= {"settings": settings, "left_behind": leftovers()}
        serve.shutdown()
    show(ledger)
    if args.json:
        print(json.dumps(ledger, indent=1))
    sys.exit(bool(ledger["failed"] or ledger["different"] or ledger["left_behind"]))


if __name__ == "__main__":
    main()
