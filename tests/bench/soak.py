"""Half an hour of clients of whom few behave; afterwards everything must be back where it was.

    python tests/bench/soak.py [--minutes 30] [--seed 0] [--clients 24] [--port 8790] [--json]

The demo model in float32 on two stages, in a cluster of this machine, with HTTP at the port and gRPC at the next one. Clients
stream and leave in the middle (politely, or by a reset), say half a request, hardly read, ask for nonsense, run out of time; see
``soak_load``. Three acts of ten are a request whose tokens are known. Every 30 s it is looked at what the application's
processes have, and what it says that it holds. After a tenth of the time, half way and at the end the clients pause until nothing
is on its way, and ``SETTLE_S`` more: these quiet looks are compared.

What must be at the end as at the first quiet look: named actors and placement groups, epochs, pages, sequences, requests in
routers and doors, objects in the store, and the processes themselves; descriptors, threads and tasks but for a few
(``soak_watch``). Of memory it is judged what a process has gained in the second half: 5 MiB at most. The bound was chosen after
a run in which heaps grew to what the liveliest moments take (the proxy's by 20 MiB in the first 14 minutes, by 3 in the next),
which a bound from the first look on would have to let pass; a leak goes on. One of less than about 20 MiB an hour is not seen
in half an hour: the table has the figures.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import ray
from chaos_load import undisturbed
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from serve_cluster import served
from soak_load import MAX_BODY, Crowd, requests
from soak_watch import Sample, is_quiet, not_back, quietest, slope_per_hour, take

from tramontane.cluster.pipeline.ray_cluster import local_ray_cluster

EVERY_S = 30.0
SHARES = (0.1, 0.45, 0.45)  # of the time, before each quiet look
SETTLE_S = 20.0  # longer than any stream between replicas stays open that nobody needs
QUIET_WITHIN_S = 120.0
QUIET_LOOKS = 3
SETTINGS = {"dtype": "float32", "stages": 2, "threads_per_stage": 1, "max_num_seqs": 48}
SETTINGS |= {"slow_reader_timeout": 3.0, "max_body_bytes": MAX_BODY}
console = Console(stderr=True, highlight=False)


async def _quiet() -> Sample:
    """Once nothing is on its way. Raises TimeoutError where that does not come about."""
    give_up_at = time.monotonic() + QUIET_WITHIN_S
    while not is_quiet(held := (await asyncio.to_thread(take)).held):
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"without clients it is not quiet after {QUIET_WITHIN_S:.0f} s: {held}")
        await asyncio.sleep(1)
    await asyncio.sleep(SETTLE_S)
    return quietest([await asyncio.to_thread(take) for _ in range(QUIET_LOOKS)])


async def _soaked(crowd: Crowd, rngs: list[random.Random], seconds: float, progress: Progress) -> list[Sample]:
    """Samples while the clients are at it."""
    samples: list[Sample] = []
    crowd.is_over = False
    running = asyncio.create_task(crowd.run(rngs))
    (bar,) = progress.task_ids
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        await asyncio.wait([running], timeout=min(EVERY_S, left))
        if running.done():
            break
        samples.append(await asyncio.to_thread(take))
        line = _line(samples[-1], crowd)
        progress.update(bar, advance=EVERY_S, description=line)
        if not console.is_terminal:
            console.print(f"{time.strftime('%H:%M:%S')} {line}", soft_wrap=True)
    crowd.is_over = True
    await running
    return samples


def _line(sample: Sample, crowd: Crowd) -> str:
    held = sample.held
    return (
        f"{crowd.outcomes.total()} acts, {len(crowd.failed)} failed, {len(crowd.different)} different; "
        f"{sample.total('memory'):.0f} MiB, {sample.total('descriptors'):.0f} files, {sample.total('threads'):.0f} threads, "
        f"{held['pages']} pages, {held['sequences']} sequences"
    )


async def _soak(args: argparse.Namespace) -> dict[str, Any]:
    known = requests(random.Random(args.seed))
    url = f"http://127.0.0.1:{args.port}"
    console.print(f"{len(known)} requests undisturbed ...")
    expected = await undisturbed(url, known, args.clients)
    metrics = f"http://127.0.0.1:{ray.nodes()[0]['MetricsExportPort']}/metrics"
    crowd = Crowd(args.port, args.port + 1, metrics, known, expected)
    rngs = [random.Random(f"{args.seed}, client {number}") for number in range(args.clients)]
    began, seconds = time.monotonic(), 60 * args.minutes
    quiet: list[Sample] = []
    busy: list[list[Sample]] = []  # before each quiet look
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task("begins", total=seconds)
        for share in SHARES:
            busy.append(await _soaked(crowd, rngs, share * seconds, progress))
            quiet.append(await _quiet())
            console.print(f"quiet: {quiet[-1].held}", soft_wrap=True)
    return _ledger(crowd, quiet, busy, time.monotonic() - began)


def _ledger(crowd: Crowd, quiet: list[Sample], busy: list[list[Sample]], seconds: float) -> dict[str, Any]:
    return {
        "seconds": round(seconds),
        "acts": crowd.outcomes.total() + len(crowd.failed),
        "outcomes": {f"{kind}: {outcome}": count for (kind, outcome), count in sorted(crowd.outcomes.items())},
        "failed": crowd.failed,
        "different": crowd.different,
        "close_calls": crowd.close_calls,
        "held": [sample.held for sample in quiet],
        "processes": [_process(pid, quiet, busy) for pid in quiet[-1].processes],
        "not_back": not_back(*quiet),
    }


def _process(pid: int, quiet: list[Sample], busy: list[list[Sample]]) -> dict[str, Any]:
    looks = [sample.processes[pid] for sample in quiet if pid in sample.processes]
    return {
        "process": looks[-1].role,
        "mib": [round(look.memory, 1) for look in looks],
        "mib_per_hour": round(slope_per_hour(busy[-1], pid), 1),
        "descriptors": [look.descriptors for look in looks],
        "threads": [look.threads for look in looks],
        "mib_busy": [round(sample.processes[pid].memory, 1) for part in busy for sample in part if pid in sample.processes],
    }


def _show(ledger: dict[str, Any]) -> None:
    acts = Table("what clients did", "how it ended", "times", title=f"{ledger['acts']} acts in {ledger['seconds']} s")
    for name, count in ledger["outcomes"].items():
        acts.add_row(*name.split(": ", 1), str(count))
    console.print(acts)
    columns = ("process", "MiB when quiet", "MiB/h when busy", "descriptors", "threads")
    processes = Table(*columns, title="after a tenth of the time, half way, at the end")
    for row in sorted(ledger["processes"], key=lambda row: str(row["process"])):
        cells = [", ".join(map(str, cell)) if isinstance(cell, list) else str(cell) for cell in row.values()]
        processes.add_row(*cells[: len(columns)])
    console.print(processes)
    for title in ("failed", "different", "close_calls"):
        console.print(f"{title}: {len(ledger[title])}", *(f"  {text}" for text in ledger[title][:10]), sep="\n", markup=False)
    kinds = Counter(text.split(":")[0] for text in ledger["failed"])
    console.print(f"by kind: {dict(kinds)}" if kinds else "", markup=False)
    console.print("not back:", *(ledger["not_back"] or ["nothing"]), sep="\n  ", markup=False)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--port", type=int, default=8790)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with local_ray_cluster(num_cpus=8), served(port=args.port, grpc_port=args.port + 1, **SETTINGS):
        ledger = asyncio.run(_soak(args))
    _show(ledger)
    if args.json:
        print(json.dumps(ledger, indent=1))
    sys.exit(bool(ledger["failed"] or ledger["different"] or ledger["not_back"]))


if __name__ == "__main__":
    main()
