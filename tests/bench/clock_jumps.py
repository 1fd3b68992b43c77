"""Wall clocks that are set by an hour, both ways, while 16 streams run: failed requests, other
tokens, throughput.

    python tests/bench/clock_jumps.py [--rounds 8] [--window 3] [--kinds "a stage,the router"]
    [--link direct] [--json]

The demo model runs on two stages in a local cluster whose processes have a wall clock that can be
set for each of them (``wall_clock.c``). Of every kind the clocks go an hour ahead and back, and an
hour behind and back, one after the other in a server that was never restarted. The head is the
control store, the raylet and Ray Serve's controller and proxy; the machine is all processes. Before
and after each jump tokens are counted for ``--window`` seconds; a kind's throughput is the
geometric mean over its jumps of after to before. Two such windows differ by some percent whatever
is done between them, so its standard error is given too, and "nothing", where no clock is set, is
measured as the others are. Tokens per second of processor time, of all processes of the server,
depend less on what else the machine does; they would show a process that spins.
"""

import argparse
import asyncio
import math
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import psutil
from chaos_load import WORDS, Load, baseline_tokens
from rich.console import Console
from rich.table import Table
from serve_cluster import URL, ingress_stats, router_stats, running_application
from targets import Target, at_least, conclude, none_of
from wall_clocks import LOOKED_AT_AFTER_S, WallClocks, settable_clocks

from tramontane.cluster.pipeline.ray_cluster import local_ray_cluster

STREAMS, REQUESTS = 16, 48
# of an answer: streams that end at the same time would make the load rise and fall
TOKENS = (100, 700)
HOUR_S = 3600
JUMPS = (HOUR_S, 0, -HOUR_S, 0)  # by which the clock is off, one after the other
WARM_UP_S = 20.0  # until the policy has learned, and streams end at different times
SETTLE_S = 1.0
MIN_RATIO = 0.98
KINDS = ("nothing", "a stage", "the router", "the ingress", "the head", "the machine")
HEAD = ("gcs_server", "raylet", "ray::ServeController", "ray::ProxyActor")
SETTINGS: dict[str, Any] = {
    "stages": 2,
    "threads_per_stage": 1,
    "max_num_seqs": 32,
    "dtype": "float32",
}
console = Console(stderr=True, highlight=False)


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
        for i in range(REQUESTS)
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


async def _run(clocks: WallClocks, args: argparse.Namespace) -> dict[str, Any]:
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
        "requests": load.num_done + len(load.failed),
        "failed": load.failed,
        "different": load.different,
        "recoveries": stats["recoveries"],
        "ratios": {kind: [round(each.wall, 4) for each in found] for kind, found in ratios.items()},
        "processor_ratios": {
            kind: [round(each.cpu, 4) for each in found] for kind, found in ratios.items()
        },
    }


def targets(report: dict[str, Any]) -> list[Target]:
    """Return what must not happen, and the throughput of each kind."""
    found = [none_of(f"{title} requests", report[title]) for title in ("failed", "different")]
    found.append(none_of("recoveries", range(report["recoveries"])))
    return found + [
        at_least(f"{kind}: tokens/s after to before", statistics.geometric_mean(ratios), MIN_RATIO)
        for kind, ratios in report["ratios"].items()
        if kind != "nothing"
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


def _table(report: dict[str, Any]) -> Table:
    columns = (
        "after to before, mean",
        "standard error",
        "per processor time, mean",
        "standard error",
    )
    table = Table("clocks of", "jumps", *columns, title="clocks that are set")
    for kind in ("every kind but nothing", *report["ratios"]):
        both = [_ratios_of(kind, report[figure]) for figure in ("ratios", "processor_ratios")]
        figures = [f(found) for found in both for f in (statistics.geometric_mean, _standard_error)]
        table.add_row(kind, str(len(both[0])), *(f"{each:.3f}" for each in figures))
    return table


def _ratios_of(kind: str, by_kind: dict[str, list[float]]) -> list[float]:
    """Return the ratios of a kind, or of all that is no kind's name: together their standard error
    is less than half of one's.
    """
    return by_kind.get(kind) or [
        ratio for each, ratios in by_kind.items() if each != "nothing" for ratio in ratios
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument(
        "--window", type=float, default=3.0, help="seconds in which tokens are counted"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--link", choices=("object-store", "direct"), default="object-store")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with (
        settable_clocks() as clocks,
        local_ray_cluster(num_cpus=8),
        running_application(**SETTINGS, link=args.link),
    ):
        report = asyncio.run(_run(clocks, args))
    conclude(targets(report), _table(report), *report["failed"][:5], data=report, as_json=args.json)


if __name__ == "__main__":
    main()
