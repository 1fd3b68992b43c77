"""Benchmark of rolling updates while streams run: which requests fail or change, and how long
streams pause.

    python tests/bench/rolling.py [--deployments 6] [--seed 0] [--clients 24] [--scarce] [--port
    8775] [--json]

The demo model in float32 on two stages, in a local cluster. Every request is first run once without
updates, and must return the same tokens during updates. Versions alternate between a change of
settings of routers and ingress (the stages stay) and a change of settings of the stages (new ones
are loaded). With ``--scarce`` the cluster has capacity for one pipeline only.
"""

import argparse
import asyncio
import math
import random
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from chaos_load import Load, baseline_tokens, bodies
from ray import serve
from rich.console import Console
from rich.table import Table
from serve_cluster import (
    deploy,
    is_rollout_complete,
    jobs_in,
    router_stats,
    start_serve,
    wait_until_ready,
)
from targets import Target, conclude, none_of

from tramontane.cluster.pipeline.ray_cluster import local_ray_cluster

MIN_STREAMS = 12  # unfinished streams at each deployment
REQUESTS = 40
POLL_S = 0.05
# for a version to be deployed and for streams to continue; then the run has failed
TIMEOUT_S = 300.0
SETTINGS = {
    "dtype": "float32",
    "stages": 2,
    "threads_per_stage": 1,
    "max_num_seqs": 48,
    "max_queued_requests": 256,
}
CHANGES = {"the routers' settings": "max_queued_requests", "the stages' settings": "max_num_seqs"}
console = Console(stderr=True, highlight=False)


async def _until(condition: Any, what: str) -> None:  # a function without arguments
    give_up_at = time.monotonic() + TIMEOUT_S
    while not await asyncio.to_thread(condition):
        if time.monotonic() > give_up_at:
            raise TimeoutError(what)
        await asyncio.sleep(POLL_S)


def _stages(stats: list[dict[str, Any]]) -> dict[int, int]:
    """Return the bytes that each stage has read, by PID."""
    return {stage["pid"]: stage["bytes_read"] for router in stats for stage in router["stages"]}


async def _roll_out(load: Load, settings: dict[str, Any], change: str) -> dict[str, Any]:
    await _until(lambda: load.unfinished >= MIN_STREAMS, f"only {load.unfinished} streams run")
    before = await asyncio.to_thread(router_stats)
    load.watch()
    began = time.monotonic()
    await asyncio.to_thread(deploy, settings)
    await _until(
        lambda: is_rollout_complete(before), f"the version that changes {change} is not deployed"
    )
    deployed_at = time.monotonic()
    watched = set(load.pauses)
    await _until(
        lambda: all(load.last_piece_at.get(c, math.inf) > deployed_at for c in watched),
        "streams do not continue",
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
    requests = bodies(REQUESTS, random.Random(args.seed))
    console.print(f"{REQUESTS} requests without updates ...")
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
    return {
        "requests": load.num_done + len(load.failed),
        "failed": load.failed,
        "different": load.different,
        "deployments": deployments,
    }


def _show(report: dict[str, Any]) -> None:
    columns = (
        "changed",
        "seconds",
        "running streams",
        "median pause",
        "worst",
        "worst first token",
        "bytes read",
    )
    table = Table(*columns, title="rolling updates")
    for row in report["deployments"]:
        table.add_row(*map(str, row.values()))
    console.print(table)
    for title in ("failed", "different"):
        console.print(
            f"{title}: {len(report[title])} of {report['requests']} requests",
            *report[title][:5],
            sep="\n  ",
        )


def targets(report: dict[str, Any]) -> list[Target]:
    return [none_of(f"{title} requests", report[title]) for title in ("failed", "different")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--deployments", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--scarce", action="store_true")
    parser.add_argument("--port", type=int, default=8775)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    url = f"http://127.0.0.1:{args.port}"
    with local_ray_cluster(num_cpus=2 if args.scarce else 8), TemporaryDirectory() as folder:
        start_serve(args.port, args.port + 1)
        settings = SETTINGS | jobs_in(folder)
        deploy(settings)
        wait_until_ready(url)
        report = asyncio.run(_rolling(url, settings, args))
        serve.shutdown()
    _show(report)
    conclude(targets(report), data=report, as_json=args.json)


if __name__ == "__main__":
    main()
