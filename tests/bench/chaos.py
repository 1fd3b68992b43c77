"""Faults on purpose, one after the other, while streams run: what was lost, told twice or different, and how long streams paused.

    python tests/bench/chaos.py [--faults 200] [--seed 0] [--kinds "kill a stage,stop a stage"] [--clients 32] [--json]

The demo model in float32 on two stages with its experts inside, or on two actors with ``--experts``, in a cluster of this
machine. With ``--nodes`` each stage is on a raylet of its own, which can be killed too; with ``--hosts`` (as root) on a host
of its own, whose link can be dropped. Every request is run once without faults first; under faults each must get the very same
tokens. A fault comes when at least ``WANTED`` streams have unfinished tokens, and the next one when all of them go on; one of
five comes at once, in the middle of the recovery, and its pauses are not counted.
"""

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import httpx
import ray
from chaos_faults import Faults
from chaos_hosts import HostCluster, host_cluster
from chaos_load import Load, bodies, undisturbed
from ray.cluster_utils import Cluster
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from serve_cluster import URL, ingress_stats, leftovers, router_stats, served

from tramontane.cluster.config.ray_settings import RAY_SETTINGS, SERVE_SETTINGS
from tramontane.cluster.pipeline.ray_cluster import OBJECT_STORE_BYTES, local_ray_cluster

WANTED = 16  # streams with unfinished tokens, at each fault
REQUESTS = 40
AT_ONCE = 0.2  # of the faults do not wait for the one before
ON_ITS_WAY_S = 1.0
POLL_S = 0.02
PATIENCE_S = 180.0  # until streams go on after a fault; then the run has failed
STEP_TIMEOUT_S = 2.0  # micro-batches of the demo model take milliseconds
SETTINGS = {"dtype": "float32", "stages": 2, "threads_per_stage": 1, "max_num_seqs": 48, "step_timeout": STEP_TIMEOUT_S}
console = Console(stderr=True, highlight=False)


@contextmanager
def _house(args: argparse.Namespace) -> Iterator[Cluster | HostCluster | None]:
    experts: dict[str, Any] = ({"expert_actors": 2} if args.experts else {}) | {"link": args.link}
    if args.hosts:
        with host_cluster(num_workers=4 if args.experts else 3) as hosts, served(**SETTINGS, **experts):
            yield hosts
        return
    if not args.nodes:
        with local_ray_cluster(num_cpus=8), served(**SETTINGS, **experts):
            yield None
        return
    os.environ.update(SERVE_SETTINGS)
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": dict(RAY_SETTINGS)}
    cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)  # which only a main thread could arrange
    for _ in range(4 if args.experts else 3):  # one more than is needed
        cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE_BYTES)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        with served(**SETTINGS, **experts):
            yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


async def _until(condition: Any, what: str) -> None:  # noqa: ANN401 - a function without arguments
    give_up_at = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > give_up_at:
            raise TimeoutError(what)
        await asyncio.sleep(POLL_S)


@dataclass
class Told:
    """Of one kind of fault."""

    pauses: list[float] = field(default_factory=list)  # the longest of each stream that was on its way
    seen_after: list[float] = field(default_factory=list)  # until the router knew, where it had to; or from a deadline on


async def _inflicted(load: Load, faults: Faults, kinds: list[str], args: argparse.Namespace) -> dict[str, Told]:
    told: defaultdict[str, Told] = defaultdict(Told)
    turns, rng = _turns(args, kinds), random.Random(args.seed + 1)
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("faults", total=len(turns))
        for number, kind in enumerate(turns):
            await asyncio.to_thread(faults.prepare)
            await _until(lambda: load.unfinished >= WANTED, f"{load.unfinished} streams run after {number} faults")
            load.watch()
            limit_s = await asyncio.to_thread(_step_limit_s) if kind == "stop a stage" else 0.0
            struck_at = time.monotonic()
            load.least_struck = min(load.least_struck, load.unfinished)
            await asyncio.to_thread({**faults.rare, **faults.kinds}[kind])
            if rng.random() < AT_ONCE:
                continue
            watched = set(load.pauses)
            await _until(lambda: _go_on(load, watched, struck_at), f"streams do not go on after {kind}")  # noqa: B023
            now = time.monotonic()
            told[kind].pauses += [load.pauses[client] for client in watched]
            told[kind].seen_after += await asyncio.to_thread(_seen_after, struck_at, limit_s)
            line = f"{kind}: {max(load.pauses.values()):.1f} s, {now - struck_at:.1f} s in all"
            progress.update(bar, completed=number + 1, description=line)
            if not console.is_terminal:
                console.print(f"{number + 1}/{len(turns)} {line}")
            if load.failed or load.different:
                console.print(f"fault {number}, {kind}: {[*load.failed, *load.different][-1]}")
    return dict(told)


def _routers() -> list[dict[str, Any]]:
    """None while they are being replaced."""
    try:
        return router_stats(stages=False)
    except (RayError, RayServeException):
        return []


def _step_limit_s() -> float:
    """After which what is stopped is seen."""
    return max((stats["step_limit_s"] for stats in _routers()), default=0.0)


def _seen_after(struck_at: float, limit_s: float) -> list[float]:
    """By routers, on this machine: processes have one monotonic clock here."""
    seen = [stats["last_recovery"]["seen_at"] for stats in _routers() if stats["last_recovery"]]
    return [round(at - struck_at - limit_s, 3) for at in seen if at > struck_at]


def _go_on(load: Load, watched: set[int], struck_at: float) -> bool:
    """Each has told something since, beside what was on its way already, or has ended."""
    return all(load.last_piece_at.get(client, math.inf) > struck_at + ON_ITS_WAY_S for client in watched)


def _state() -> dict[str, Any]:
    """Of what must be at the end as it was at the beginning."""
    return {
        "actors and groups": sorted(leftovers()),
        "pages held": [stats["pages_held"] for stats in router_stats()],
        "sequences": [stats["sequences"] + stats["waiting"] for stats in router_stats()],
        "door's requests": ingress_stats()["requests"],
    }


async def _chaos(cluster: Cluster | HostCluster | None, args: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(args.seed)
    requests = bodies(REQUESTS, rng)
    console.print(f"{REQUESTS} requests without faults ...")
    expected = await undisturbed(URL, requests, args.clients)
    before = await asyncio.to_thread(_state)
    load = Load(URL, requests, expected)
    faults = cluster.faults(rng) if isinstance(cluster, HostCluster) else Faults(rng, OBJECT_STORE_BYTES, cluster)
    possible = [kind for kind in faults.kinds if (args.experts or "expert" not in kind) and (cluster or "raylet" not in kind)]
    kinds = args.kinds.split(",") if args.kinds else possible
    running = asyncio.create_task(load.run(args.clients))
    began = time.monotonic()
    try:
        told = await _inflicted(load, faults, kinds, args)
    finally:
        load.is_over = True
        await running
    await _until(lambda: httpx.get(f"{URL}/health").status_code == httpx.codes.OK, "the server is not well again")
    return {
        "seconds": round(time.monotonic() - began, 1),
        "requests": load.num_done + len(load.failed),
        "failed": load.failed,
        "different": load.different,
        "close_calls": load.close_calls,
        "least_streams": load.least_struck,
        "longest_request_s": round(load.longest_s, 1),
        "stores_filled": getattr(faults, "num_filled", 0),
        "left": {} if (after := await asyncio.to_thread(_state)) == before else {"before": before, "after": after},
        "faults": {kind: {"count": Counter(_turns(args, kinds))[kind], **_figures(told[kind])} for kind in kinds if kind in told},
    }


def _figures(told: Told) -> dict[str, Any]:
    """Empty texts where nothing had to be seen."""
    return {
        "streams": len(told.pauses),
        "median_pause_s": round(statistics.median(told.pauses), 2),
        "worst_pause_s": round(max(told.pauses), 2),
        "median_seen_s": round(statistics.median(told.seen_after), 2) if told.seen_after else "",
        "worst_seen_s": round(max(told.seen_after), 2) if told.seen_after else "",
    }


def _turns(args: argparse.Namespace, kinds: list[str]) -> list[str]:
    """Every kind equally often, in random order."""
    rng = random.Random(args.seed)
    return [kind for _ in range(-(-args.faults // len(kinds))) for kind in rng.sample(kinds, len(kinds))][: args.faults]


def _show(ledger: dict[str, Any]) -> None:
    table = Table("fault", "times", "streams on their way", "median pause", "worst", "router knew after", "worst", title="chaos")
    for kind, row in ledger["faults"].items():
        table.add_row(kind, *map(str, row.values()))
    console.print(table)
    for title in ("failed", "different"):
        console.print(f"{title}: {len(ledger[title])} of {ledger['requests']} requests", *ledger[title][:5], sep="\n  ")
    console.print("close calls:", *(ledger["close_calls"] or ["none"]), sep="\n  ")
    console.print(f"unfinished streams at a fault: {ledger['least_streams']} or more")
    console.print(f"longest request: {ledger['longest_request_s']} s")
    console.print(f"object stores filled: {ledger['stores_filled']}")
    console.print(f"left behind: {ledger['left'] or 'nothing'}")
    for what in _not_done(ledger):
        console.print(f"not shown: {what}")


def _not_done(ledger: dict[str, Any]) -> list[str]:
    """What a run must not pass without."""
    unfilled = any("object store" in kind for kind in ledger["faults"]) and not ledger["stores_filled"]
    few = ledger["least_streams"] < WANTED
    return [f"a fault came with fewer than {WANTED} unfinished streams"] * few + ["no object store was filled"] * unfilled


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default="")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--experts", action="store_true")
    parser.add_argument("--nodes", action="store_true")
    parser.add_argument("--hosts", action="store_true")
    parser.add_argument("--link", choices=("object-store", "direct"), default="object-store")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with _house(args) as cluster:
        ledger = asyncio.run(_chaos(cluster, args))
        if isinstance(cluster, HostCluster):
            ledger["hosts"] = cluster.ledger()
    _show(ledger)
    if args.json:
        print(json.dumps(ledger, indent=1))
    sys.exit(bool(ledger["failed"] or ledger["different"] or ledger["left"] or _not_done(ledger)))


if __name__ == "__main__":
    main()
