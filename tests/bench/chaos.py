"""Fault injection while streams run: which tokens were lost, repeated or different, and how long
streams paused.

    python tests/bench/chaos.py [--dtype bfloat16] [--faults 200] [--seed 0] [--kinds "kill a
    stage,stop a stage"] [--json]

The demo model runs on two stages in a local cluster, with its experts in the stages or, with
``--experts``, on two expert actors. It is batch-invariant, so tokens must be the same, bit for bit;
with ``--no-batch-invariant`` answers may part where float32's rounding decides (``close_calls``).
With ``--nodes`` each stage has its own raylet, which can be killed too; with ``--hosts`` (as root)
each has its own host, whose link can be dropped. Every request is run once without faults first,
and must return the same tokens under faults. A fault is injected when at least ``MIN_STREAMS``
streams are unfinished, and the next one when all of these have continued. One of five follows at
once, during the recovery, and the pauses of the fault before it are not counted. Besides equal
tokens, some kinds of faults have targets for the pause of a stream and for the time until the
router detects them.
"""

import argparse
import asyncio
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
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import httpx
import ray
from chaos_faults import Faults
from chaos_hosts import HostCluster, host_cluster
from chaos_load import Load, baseline_tokens, bodies
from ray.cluster_utils import Cluster
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from serve_cluster import URL, ingress_stats, leftovers, router_stats, running_application
from targets import Target, at_least, at_most, conclude, none_of

from tramontane.cluster.config.ray_settings import RAY_SETTINGS, SERVE_SETTINGS
from tramontane.cluster.pipeline.ray_cluster import OBJECT_STORE_BYTES, local_ray_cluster

MIN_STREAMS = 16  # unfinished streams at each fault
REQUESTS = 40
SHARE_AT_ONCE = 0.2  # of the faults that are followed at once by the next one
IN_FLIGHT_S = 1.0  # pieces that arrive within this time after a fault may have been sent before it
POLL_S = 0.02
TIMEOUT_S = 180.0  # for streams to continue after a fault; then the run has failed
STEP_TIMEOUT_S = 2.0  # micro-batches of the demo model take milliseconds
SETTINGS: dict[str, Any] = {
    "stages": 2,
    "threads_per_stage": 1,
    "max_num_seqs": 48,
    "step_timeout": STEP_TIMEOUT_S,
}
MAX_PAUSE_S = {"kill the router": 6.0}
# a stop: after the step timeout
MAX_DETECTED_AFTER_S = {"kill a stage": 0.5, "stop a stage": 1.0, "kill a raylet": 6.0}
console = Console(stderr=True, highlight=False)


@contextmanager
def _running_cluster(args: argparse.Namespace) -> Iterator[Cluster | HostCluster | None]:
    settings = SETTINGS | {
        "link": args.link,
        "dtype": args.dtype,
        "batch_invariant": args.batch_invariant,
    }
    settings |= {"expert_actors": 2} if args.experts else {}
    if args.hosts:
        with (
            host_cluster(num_workers=4 if args.experts else 3) as hosts,
            running_application(**settings),
        ):
            yield hosts
        return
    if not args.nodes:
        with local_ray_cluster(num_cpus=8), running_application(**settings):
            yield None
        return
    os.environ.update(SERVE_SETTINGS)
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": dict(RAY_SETTINGS)}
    # an exit hook needs the main thread
    cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
    for _ in range(4 if args.experts else 3):  # one spare node
        cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE_BYTES)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        with running_application(**settings):
            yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


async def _until(condition: Any, what: str) -> None:  # a function without arguments
    give_up_at = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > give_up_at:
            raise TimeoutError(what)
        await asyncio.sleep(POLL_S)


@dataclass
class FaultFigures:
    """Seconds of one kind of fault."""

    pauses: list[float] = field(default_factory=list)  # the longest of each stream that was running
    # until the router detected it; for a stop after the step timeout
    detected_after: list[float] = field(default_factory=list)


async def _inject(
    load: Load, faults: Faults, kinds: list[str], args: argparse.Namespace
) -> dict[str, FaultFigures]:
    figures: defaultdict[str, FaultFigures] = defaultdict(FaultFigures)
    schedule, rng = _schedule(args, kinds), random.Random(args.seed + 1)
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("faults", total=len(schedule))
        for number, kind in enumerate(schedule):
            await asyncio.to_thread(faults.prepare)
            await _until(
                lambda: load.unfinished >= MIN_STREAMS,
                f"only {load.unfinished} streams run after {number} faults",
            )
            load.watch()
            limit_s = await asyncio.to_thread(_step_limit_s) if kind == "stop a stage" else 0.0
            injected_at = time.monotonic()
            load.min_unfinished = min(load.min_unfinished, load.unfinished)
            await asyncio.to_thread({**faults.rare, **faults.kinds}[kind])
            if rng.random() < SHARE_AT_ONCE:
                continue
            watched = set(load.pauses)
            continued = partial(_have_continued, load, watched, injected_at)
            await _until(continued, f"streams do not continue after {kind}")
            now = time.monotonic()
            figures[kind].pauses += [load.pauses[client] for client in watched]
            figures[kind].detected_after += await asyncio.to_thread(
                _detected_after, injected_at, limit_s
            )
            line = f"{kind}: {max(load.pauses.values()):.1f} s, {now - injected_at:.1f} s in all"
            progress.update(bar, completed=number + 1, description=line)
            if not console.is_terminal:
                console.print(f"{number + 1}/{len(schedule)} {line}")
            if load.failed or load.different:
                console.print(f"fault {number}, {kind}: {[*load.failed, *load.different][-1]}")
    return dict(figures)


def _routers() -> list[dict[str, Any]]:
    """Return the statistics of all routers; empty while they are being replaced."""
    try:
        return router_stats(stages=False)
    except (RayError, RayServeException):
        return []


def _step_limit_s() -> float:
    """Return the time after which a stopped stage is detected."""
    return max((stats["step_limit_s"] for stats in _routers()), default=0.0)


def _detected_after(injected_at: float, limit_s: float) -> list[float]:
    """Return the seconds until routers detected the fault. All processes of a machine share one
    monotonic clock.
    """
    detected = [stats["last_recovery"]["seen_at"] for stats in _routers() if stats["last_recovery"]]
    return [round(at - injected_at - limit_s, 3) for at in detected if at > injected_at]


def _have_continued(load: Load, watched: set[int], injected_at: float) -> bool:
    """Return True if each stream has returned something new since the fault or has ended."""
    return all(
        load.last_piece_at.get(client, math.inf) > injected_at + IN_FLIGHT_S for client in watched
    )


def _state() -> dict[str, Any]:
    """Return the resources that must be the same at the beginning and at the end."""
    return {
        "actors and groups": sorted(leftovers()),
        "pages held": [stats["pages_held"] for stats in router_stats()],
        "sequences": [stats["sequences"] + stats["waiting"] for stats in router_stats()],
        "ingress requests": ingress_stats()["requests"],
    }


async def _chaos(cluster: Cluster | HostCluster | None, args: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(args.seed)
    requests = bodies(REQUESTS, rng)
    console.print(f"{REQUESTS} requests without faults ...")
    expected = await baseline_tokens(URL, requests, args.clients)
    before = await asyncio.to_thread(_state)
    load = Load(URL, requests, expected)
    faults = (
        cluster.faults(rng)
        if isinstance(cluster, HostCluster)
        else Faults(rng, OBJECT_STORE_BYTES, cluster)
    )
    possible = [
        kind
        for kind in faults.kinds
        if (args.experts or "expert" not in kind) and (cluster or "raylet" not in kind)
    ]
    kinds = args.kinds.split(",") if args.kinds else possible
    running = asyncio.create_task(load.run(args.clients))
    began = time.monotonic()
    try:
        figures = await _inject(load, faults, kinds, args)
    finally:
        load.is_over = True
        await running
    await _until(
        lambda: httpx.get(f"{URL}/health").status_code == httpx.codes.OK,
        "the server is not healthy again",
    )
    return {
        "seconds": round(time.monotonic() - began, 1),
        "requests": load.num_done + len(load.failed),
        "failed": load.failed,
        "different": load.different,
        "close_calls": load.close_calls,
        "batch_invariant": args.batch_invariant,
        "least_streams": load.min_unfinished,
        "longest_request_s": round(load.longest_s, 1),
        "stores_filled": getattr(faults, "num_filled", 0),
        "left": (
            {}
            if (after := await asyncio.to_thread(_state)) == before
            else {"before": before, "after": after}
        ),
        "faults": {
            kind: {"count": Counter(_schedule(args, kinds))[kind], **_summary(figures[kind])}
            for kind in kinds
            if kind in figures
        },
    }


def _summary(figures: FaultFigures) -> dict[str, Any]:
    """Summarize one kind of fault; times of detection are empty if the router did not have to
    detect it.
    """
    detected = figures.detected_after
    return {
        "streams": len(figures.pauses),
        "median_pause_s": round(statistics.median(figures.pauses), 2),
        "worst_pause_s": round(max(figures.pauses), 2),
        "median_seen_s": round(statistics.median(detected), 2) if detected else "",
        "worst_seen_s": round(max(detected), 2) if detected else "",
    }


def _schedule(args: argparse.Namespace, kinds: list[str]) -> list[str]:
    """Return the faults in order: every kind equally often, shuffled."""
    rng = random.Random(args.seed)
    return [
        kind for _ in range(-(-args.faults // len(kinds))) for kind in rng.sample(kinds, len(kinds))
    ][: args.faults]


def _show(report: dict[str, Any]) -> None:
    table = Table(
        "fault",
        "times",
        "running streams",
        "median pause",
        "worst",
        "detected after",
        "worst",
        title="chaos",
    )
    for kind, row in report["faults"].items():
        table.add_row(kind, *map(str, row.values()))
    console.print(table)
    for title in ("failed", "different"):
        console.print(
            f"{title}: {len(report[title])} of {report['requests']} requests",
            *report[title][:5],
            sep="\n  ",
        )
    console.print("close calls:", *(report["close_calls"] or ["none"]), sep="\n  ")
    console.print(f"longest request: {report['longest_request_s']} s")
    console.print(f"left behind: {report['left'] or 'nothing'}")


def targets(report: dict[str, Any]) -> list[Target]:
    """Return the conditions that a valid run needs, what must not happen, and the pauses."""
    found = [
        at_least("unfinished streams at a fault, the fewest", report["least_streams"], MIN_STREAMS)
    ]
    if any("object store" in kind for kind in report["faults"]):
        found.append(at_least("object stores filled", report["stores_filled"], 1))
    found += [none_of(f"{title} requests", report[title]) for title in ("failed", "different")]
    if report["batch_invariant"]:
        found.append(none_of("close calls", report["close_calls"]))
    found.append(none_of("resources left behind", report["left"]))
    for kind, row in report["faults"].items():
        for what, column, limits in (
            ("pause", "pause", MAX_PAUSE_S),
            ("detected after", "seen", MAX_DETECTED_AFTER_S),
        ):
            for which in ("median", "worst"):
                if kind in limits and (figure := row[f"{which}_{column}_s"]) != "":
                    found.append(at_most(f"{kind}: {what}, {which}", figure, limits[kind], "s"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    kinds = Faults(random.Random(0), 0)
    text = (
        f"comma-separated kinds of faults: {', '.join(kinds.kinds)} (default: all of these that the"
        " cluster permits), "
    )
    text += f"{', '.join(kinds.rare)}; with --hosts also: drop a link, drop a link for a moment"
    parser.add_argument("--kinds", default="", help=text)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--experts", action="store_true")
    parser.add_argument("--nodes", action="store_true")
    parser.add_argument("--hosts", action="store_true")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--batch-invariant", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--link", choices=("object-store", "direct"), default="object-store")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with _running_cluster(args) as cluster:
        report = asyncio.run(_chaos(cluster, args))
        if isinstance(cluster, HostCluster):
            report["hosts"] = cluster.report()
    _show(report)
    conclude(targets(report), data=report, as_json=args.json)


if __name__ == "__main__":
    main()
