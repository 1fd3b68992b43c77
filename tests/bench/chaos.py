"""Faults while streams run: which tokens were lost, repeated or different, and how long streams
paused.

    python tests/bench/chaos.py faults [--dtype bfloat16] [--faults 200] [--seed 0]
    [--kinds "kill a stage,stop a stage"] [--json]
    python tests/bench/chaos.py clocks [--rounds 8] [--window 3] [--kinds "a stage,the router"]
    [--link direct] [--json]

The demo model runs on two stages in a local cluster. Every request is run once without faults
first, and must return the same tokens under faults.

**Faults**: processes, machines and links. The experts are in the stages or, with ``--experts``, on
two expert actors. The model is batch-invariant, so tokens must be the same, bit for bit; with
``--no-batch-invariant`` answers may part where float32's rounding decides (``close_calls``). With
``--nodes`` each stage has its own raylet, which can be killed too; with ``--hosts`` (as root) each
has its own host, whose link can be dropped. A fault is injected when at least ``MIN_STREAMS``
streams are unfinished, and the next one when all of these have continued. One of five follows at
once, during the recovery, and the pauses of the fault before it are not counted. Besides equal
tokens, some kinds of faults have targets for the pause of a stream and for the time until the
router detects them.

**Clocks**: wall clocks that are set by an hour, both ways, while 16 streams run, for each process
of its own (``wall_clock.c``). Of every kind the clocks go an hour ahead and back, and an hour
behind and back, one after the other in a server that was never restarted. The head is the control
store, the raylet and Ray Serve's controller and proxy; the machine is all processes. Before and
after each jump tokens are counted for ``--window`` seconds; a kind's throughput is the geometric
mean over its jumps of after to before. Two such windows differ by some percent whatever is done
between them, so its standard error is given too, and "nothing", where no clock is set, is measured
as the others are. Tokens per second of processor time, of all processes of the server, depend less
on what else the machine does; they would show a process that spins.
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
from statistics import geometric_mean
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import httpx
import psutil
from bench_parts import Part, Report, conclude_part, console, table_of
from chaos_faults import (
    Faults,
    detected_after,
    held_resources,
    raylet_cluster,
    step_limit_s,
)
from chaos_hosts import HostCluster, host_cluster
from chaos_load import (
    WORDS,
    Load,
    baseline_tokens,
    bodies,
    request_lines,
    request_targets,
    requests_of,
    until,
)
from ray.cluster_utils import Cluster
from rich.progress import Progress
from rich.table import Table
from serve_cluster import URL, ingress_stats, router_stats, running_application
from targets import Target, at_least, at_most, none_of
from wall_clocks import LOOKED_AT_AFTER_S, WallClocks, settable_clocks

from tramontane.cluster.pipeline.ray_cluster import OBJECT_STORE_BYTES, local_ray_cluster

MIN_STREAMS = 16  # unfinished streams at each fault
NUM_REQUESTS = 40
SHARE_AT_ONCE = 0.2  # of the faults that are followed at once by the next one
IN_FLIGHT_S = 1.0  # pieces that arrive within this time after a fault may have been sent before it
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
STREAMS, CLOCK_REQUESTS = 16, 48
# of an answer: streams that end at the same time would make the load rise and fall
TOKENS = (100, 700)
HOUR_S = 3600
JUMPS = (HOUR_S, 0, -HOUR_S, 0)  # by which the clock is off, one after the other
WARM_UP_S = 20.0  # until the policy has learned, and streams end at different times
SETTLE_S = 1.0
MIN_RATIO = 0.98
CLOCKS = ("nothing", "a stage", "the router", "the ingress", "the head", "the machine")
HEAD = ("gcs_server", "raylet", "ray::ServeController", "ray::ProxyActor")


# ---- faults


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
    # one spare node
    with (
        raylet_cluster(4 if args.experts else 3) as cluster,
        running_application(**settings),
    ):
        yield cluster


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
            await until(
                lambda: load.unfinished >= MIN_STREAMS,
                f"only {load.unfinished} streams run after {number} faults",
            )
            load.watch()
            limit_s = await asyncio.to_thread(step_limit_s) if kind == "stop a stage" else 0.0
            injected_at = time.monotonic()
            load.min_unfinished = min(load.min_unfinished, load.unfinished)
            await asyncio.to_thread({**faults.rare, **faults.kinds}[kind])
            if rng.random() < SHARE_AT_ONCE:
                continue
            watched = set(load.pauses)
            continued = partial(_have_continued, load, watched, injected_at)
            await until(continued, f"streams do not continue after {kind}")
            now = time.monotonic()
            figures[kind].pauses += [load.pauses[client] for client in watched]
            figures[kind].detected_after += await asyncio.to_thread(
                detected_after, injected_at, limit_s
            )
            line = f"{kind}: {max(load.pauses.values()):.1f} s, {now - injected_at:.1f} s in all"
            progress.update(bar, completed=number + 1, description=line)
            if not console.is_terminal:
                console.print(f"{number + 1}/{len(schedule)} {line}")
            if load.failed or load.different:
                console.print(f"fault {number}, {kind}: {[*load.failed, *load.different][-1]}")
    return dict(figures)


def _have_continued(load: Load, watched: set[int], injected_at: float) -> bool:
    """Return True if each stream has returned something new since the fault or has ended."""
    return all(
        load.last_piece_at.get(client, math.inf) > injected_at + IN_FLIGHT_S for client in watched
    )


async def _chaos(cluster: Cluster | HostCluster | None, args: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(args.seed)
    requests = bodies(NUM_REQUESTS, rng)
    console.print(f"{NUM_REQUESTS} requests without faults ...")
    expected = await baseline_tokens(URL, requests, args.clients)
    before = await asyncio.to_thread(held_resources)
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
    except BaseException:
        running.cancel()  # its streams may wait for a server that cannot recover
        raise
    load.is_over = True
    await running
    await until(
        lambda: httpx.get(f"{URL}/health").status_code == httpx.codes.OK,
        "the server is not healthy again",
    )
    return {
        "seconds": round(time.monotonic() - began, 1),
        **requests_of(load),
        "close_calls": load.close_calls,
        "batch_invariant": args.batch_invariant,
        "least_streams": load.min_unfinished,
        "longest_request_s": round(load.longest_s, 1),
        "stores_filled": getattr(faults, "num_filled", 0),
        "left": (
            {}
            if (after := await asyncio.to_thread(held_resources)) == before
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


def fault_targets(report: dict[str, Any]) -> list[Target]:
    """Return the conditions that a valid run needs, what must not happen, and the pauses."""
    found = [
        at_least("unfinished streams at a fault, the fewest", report["least_streams"], MIN_STREAMS)
    ]
    if any("object store" in kind for kind in report["faults"]):
        found.append(at_least("object stores filled", report["stores_filled"], 1))
    found += request_targets(report)
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


def inject(args: argparse.Namespace) -> Report:
    """processes, machines and links"""
    with _running_cluster(args) as cluster:
        report = asyncio.run(_chaos(cluster, args))
        if isinstance(cluster, HostCluster):
            report["hosts"] = cluster.report()
    columns = ("fault", "times", "running streams", "median pause", "worst")
    rows = [(kind, *row.values()) for kind, row in report["faults"].items()]
    tables = [
        table_of((*columns, "detected after", "worst"), rows, "chaos"),
        *request_lines(report),
        "\n  ".join(("close calls:", *(report["close_calls"] or ["none"]))),
        f"longest request: {report['longest_request_s']} s",
        f"left behind: {report['left'] or 'nothing'}",
    ]
    return Report(fault_targets(report), tables, report)


# ---- clocks


def _processes(kind: str) -> list[int]:
    """Return the ids of the processes whose clocks are set."""
    if kind in ("a stage", "the router"):
        (stats,) = router_stats()
        return [stats["stages"][-1]["pid"]] if kind == "a stage" else [stats["pid"]]
    if kind == "the ingress":
        return [ingress_stats()["pid"]]
    processes = psutil.Process(os.getpid()).children(recursive=True)
    if kind == "the head":
        return [
            each.pid
            for each in processes
            if any(name in " ".join(each.cmdline()[:1]) for name in HEAD)
        ]
    return [each.pid for each in processes] if kind == "the machine" else []


def _requests(rng: random.Random) -> list[dict[str, Any]]:
    common = {"n": 1, "stream": True, "ignore_eos": True, "return_token_ids": True}
    return [
        {
            "prompt": f"{i}. {' '.join(rng.choices(WORDS, k=12))}",
            "temperature": (0.0, 0.8)[i % 2],
            "seed": i,
        }
        | {"max_tokens": rng.randint(*TOKENS)}
        | common
        for i in range(CLOCK_REQUESTS)
    ]


class Rates(NamedTuple):
    """Tokens per second, and per second of processor time."""

    wall: float
    cpu: float


async def _rates(load: Load, window_s: float) -> Rates:
    began, busy_s, before = time.monotonic(), _processor_s(), load.num_tokens
    await asyncio.sleep(window_s)
    tokens = load.num_tokens - before
    return Rates(tokens / (time.monotonic() - began), tokens / max(_processor_s() - busy_s, 1e-3))


def _processor_s() -> float:
    times = [
        each.cpu_times() for each in psutil.Process().children(recursive=True) if each.is_running()
    ]
    return sum(each.user + each.system for each in times)


async def _jump(clocks: WallClocks, load: Load, kind: str, window_s: float) -> list[Rates]:
    """Set the clocks of one kind four times; return the rates after each to those before."""
    ratios = []
    for off_s in JUMPS:
        before = await _rates(load, window_s)
        for pid in await asyncio.to_thread(_processes, kind):
            clocks.set(pid, off_s)
        await asyncio.sleep(LOOKED_AT_AFTER_S + SETTLE_S)
        after = await _rates(load, window_s)
        ratios.append(Rates(after.wall / max(before.wall, 1e-3), after.cpu / max(before.cpu, 1e-3)))
        console.print(
            f"{kind}: the clock is off by {off_s} s, {before.wall:.0f} and then {after.wall:.0f}"
            " tokens/s"
        )
    return ratios


async def _clocks(clocks: WallClocks, args: argparse.Namespace) -> dict[str, Any]:
    requests = _requests(random.Random(args.seed))
    expected = await baseline_tokens(URL, requests, STREAMS)
    load = Load(URL, requests, expected)
    running = asyncio.create_task(load.run(STREAMS))
    ratios: dict[str, list[Rates]] = {kind: [] for kind in args.kinds.split(",")}
    try:
        await asyncio.sleep(WARM_UP_S)
        for _ in range(args.rounds):
            for kind, found in ratios.items():
                found += await _jump(clocks, load, kind, args.window)
    finally:
        load.is_over = True
        await running
    (stats,) = await asyncio.to_thread(router_stats)
    return {
        **requests_of(load),
        "recoveries": stats["recoveries"],
        "ratios": {kind: [round(each.wall, 4) for each in found] for kind, found in ratios.items()},
        "processor_ratios": {
            kind: [round(each.cpu, 4) for each in found] for kind, found in ratios.items()
        },
    }


def clock_targets(report: dict[str, Any]) -> list[Target]:
    """Return what must not happen, and the throughput of each kind."""
    return [
        *request_targets(report),
        none_of("recoveries", range(report["recoveries"])),
        *(
            at_least(f"{kind}: tokens/s after to before", geometric_mean(each), MIN_RATIO)
            for kind, each in report["ratios"].items()
            if kind != "nothing"
        ),
    ]


def _standard_error(ratios: list[float]) -> float:
    """Return the standard error of the geometric mean of ratios that are near 1; of one ratio there
    is none.
    """
    return (
        math.nan
        if len(ratios) < 2
        else statistics.stdev(math.log(each) for each in ratios) / math.sqrt(len(ratios))
    )


def _clock_table(report: dict[str, Any]) -> Table:
    rows = []
    for kind in ("every kind but nothing", *report["ratios"]):
        both = [_ratios_of(kind, report[figure]) for figure in ("ratios", "processor_ratios")]
        figures = [f(found) for found in both for f in (geometric_mean, _standard_error)]
        rows.append((kind, len(both[0]), *(f"{each:.3f}" for each in figures)))
    columns = ("clocks of", "jumps", "after to before, mean", "standard error")
    per_time = ("per processor time, mean", "standard error")
    return table_of((*columns, *per_time), rows, "clocks that are set")


def _ratios_of(kind: str, by_kind: dict[str, list[float]]) -> list[float]:
    """Return the ratios of a kind, or of all that is no kind's name: together their standard error
    is less than half of one's.
    """
    return by_kind.get(kind) or [
        ratio for each, ratios in by_kind.items() if each != "nothing" for ratio in ratios
    ]


def clocks(args: argparse.Namespace) -> Report:
    """wall clocks that are set by an hour"""
    settings = {"stages": 2, "threads_per_stage": 1, "max_num_seqs": 32, "dtype": "float32"}
    with (
        settable_clocks() as wall_clocks,
        local_ray_cluster(num_cpus=8),
        running_application(**settings, link=args.link),
    ):
        report = asyncio.run(_clocks(wall_clocks, args))
    return Report(clock_targets(report), [_clock_table(report), *request_lines(report)], report)


def _kinds_help() -> str:
    kinds = Faults(random.Random(0), 0)
    return (
        f"comma-separated kinds of faults: {', '.join(kinds.kinds)} (default: all of these that the"
        f" cluster permits), {', '.join(kinds.rare)}; with --hosts also: drop a link, drop a link"
        " for a moment"
    )


LINK = {"choices": ("object-store", "direct"), "default": "object-store"}
PARTS = {
    "faults": Part(
        inject,
        {
            "--faults": 200,
            "--seed": 0,
            "--kinds": {"default": "", "help": _kinds_help()},
            "--clients": 32,
            "--experts": False,
            "--nodes": False,
            "--hosts": False,
            "--dtype": {"choices": ("float32", "bfloat16"), "default": "float32"},
            "--batch-invariant": {"action": argparse.BooleanOptionalAction, "default": True},
            "--link": LINK,
        },
    ),
    "clocks": Part(
        clocks,
        {
            "--rounds": 8,
            "--window": {"default": 3.0, "help": "seconds in which tokens are counted"},
            "--seed": 0,
            "--kinds": ",".join(CLOCKS),
            "--link": LINK,
        },
    ),
}


def main() -> None:
    conclude_part(__doc__, PARTS)


if __name__ == "__main__":
    main()
