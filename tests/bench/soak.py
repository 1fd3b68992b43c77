"""Soak test: half an hour of mostly faulty clients; afterwards all resources must be released.

    python tests/bench/soak.py [--minutes 30] [--seed 0] [--clients 24] [--port 8790] [--dtype
    bfloat16] [--json]

The demo model on two batch-invariant stages, in a local cluster, with HTTP at the port and gRPC at
the next one. Clients stream and disconnect early (in an orderly way or with a reset), send half a
request, hardly read, send invalid requests, or exceed deadlines; see ``soak_load``. Three actions
of ten are a request with known tokens. Every 30 s a sample is taken of the application's processes
and of the resources that it reports. After a tenth of the time, half way and at the end the clients
pause until no request is running, and for ``SETTLE_S`` more: these idle samples are compared.

The last idle sample must equal the first one in named actors and placement groups, epochs, pages,
sequences, requests in routers and ingress, objects in the store, and the processes themselves;
descriptors, threads and tasks may grow slightly (``soak_watch``). Memory is limited to a growth of
5 MiB per process in the second half. This bound was chosen after a run in which heaps grew to the
size of the busiest moments (the proxy's by 20 MiB in the first 14 minutes, by 3 in the next): a
bound from the first sample on would have to permit this, while a leak continues in the second half.
A leak of less than about 20 MiB per hour is not detected in half an hour; the table has the
figures.
"""

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import ray
from bench_parts import Part, Report, conclude_part, console, table_of
from chaos_load import baseline_tokens
from rich.console import RenderableType
from rich.progress import Progress
from rich.text import Text
from serve_cluster import running_application
from soak_load import MAX_BODY, SoakLoad, requests
from soak_watch import Sample, is_idle, list_leaks, quietest, slope_per_hour, take_sample
from targets import Target, none_of

from tramontane.cluster.pipeline.ray_cluster import local_ray_cluster

SAMPLE_INTERVAL_S = 30.0
SHARES = (0.1, 0.45, 0.45)  # of the time, before each idle sample
SETTLE_S = 20.0  # longer than an abandoned stream between replicas stays open
IDLE_TIMEOUT_S = 120.0
NUM_IDLE_SAMPLES = 3
SETTINGS: dict[str, Any] = {
    "stages": 2,
    "threads_per_stage": 1,
    "max_num_seqs": 48,
    "batch_invariant": True,
}
SETTINGS |= {"slow_client_timeout": 3.0, "max_body_bytes": MAX_BODY}


async def _take_idle_sample() -> Sample:
    """Wait until no request is running, and take a sample. Raises TimeoutError if requests
    remain.
    """
    give_up_at = time.monotonic() + IDLE_TIMEOUT_S
    while not is_idle(held := (await asyncio.to_thread(take_sample)).held):
        if time.monotonic() > give_up_at:
            raise TimeoutError(
                f"the application is not idle {IDLE_TIMEOUT_S:.0f} s after the last client: {held}"
            )
        await asyncio.sleep(1)
    await asyncio.sleep(SETTLE_S)
    return quietest([await asyncio.to_thread(take_sample) for _ in range(NUM_IDLE_SAMPLES)])


async def _run_load(
    load: SoakLoad, rngs: list[random.Random], seconds: float, progress: Progress
) -> list[Sample]:
    """Run the clients and take samples."""
    samples: list[Sample] = []
    load.is_over = False
    running = asyncio.create_task(load.run(rngs))
    (bar,) = progress.task_ids
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        await asyncio.wait([running], timeout=min(SAMPLE_INTERVAL_S, left))
        if running.done():
            break
        samples.append(await asyncio.to_thread(take_sample))
        line = _line(samples[-1], load)
        progress.update(bar, advance=SAMPLE_INTERVAL_S, description=line)
        if not console.is_terminal:
            console.print(f"{time.strftime('%H:%M:%S')} {line}", soft_wrap=True)
    load.is_over = True
    await running
    return samples


def _line(sample: Sample, load: SoakLoad) -> str:
    held = sample.held
    return (
        f"{load.outcomes.total()} actions, {len(load.failed)} failed, {len(load.different)}"
        f" different; {sample.total('memory'):.0f} MiB, {sample.total('descriptors'):.0f} files,"
        f" {sample.total('threads'):.0f} threads, {held['pages']} pages, {held['sequences']}"
        " sequences"
    )


async def _soak(args: argparse.Namespace) -> dict[str, Any]:
    known = requests(random.Random(args.seed))
    url = f"http://127.0.0.1:{args.port}"
    console.print(f"{len(known)} requests without faulty clients ...")
    expected = await baseline_tokens(url, known, args.clients)
    metrics = f"http://127.0.0.1:{ray.nodes()[0]['MetricsExportPort']}/metrics"
    load = SoakLoad(args.port, args.port + 1, metrics, known, expected)
    rngs = [random.Random(f"{args.seed}, client {number}") for number in range(args.clients)]
    began, seconds = time.monotonic(), 60 * args.minutes
    idle: list[Sample] = []
    busy: list[list[Sample]] = []  # before each idle sample
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task("starting", total=seconds)
        for share in SHARES:
            busy.append(await _run_load(load, rngs, share * seconds, progress))
            idle.append(await _take_idle_sample())
            console.print(f"idle: {idle[-1].held}", soft_wrap=True)
    return _report(load, idle, busy, time.monotonic() - began)


def _report(
    load: SoakLoad, idle: list[Sample], busy: list[list[Sample]], seconds: float
) -> dict[str, Any]:
    return {
        "seconds": round(seconds),
        "acts": load.outcomes.total() + len(load.failed),
        "outcomes": {
            f"{kind}: {outcome}": count for (kind, outcome), count in sorted(load.outcomes.items())
        },
        "failed": load.failed,
        "different": load.different,
        "close_calls": load.close_calls,
        "held": [sample.held for sample in idle],
        "processes": [_process(pid, idle, busy) for pid in idle[-1].processes],
        "not_back": list_leaks(*idle),
    }


def _process(pid: int, idle: list[Sample], busy: list[list[Sample]]) -> dict[str, Any]:
    found = [sample.processes[pid] for sample in idle if pid in sample.processes]
    return {
        "process": found[-1].role,
        "mib": [round(process.memory, 1) for process in found],
        "mib_per_hour": round(slope_per_hour(busy[-1], pid), 1),
        "descriptors": [process.descriptors for process in found],
        "threads": [process.threads for process in found],
        "mib_busy": [
            round(sample.processes[pid].memory, 1)
            for part in busy
            for sample in part
            if pid in sample.processes
        ],
    }


def _tables(report: dict[str, Any]) -> list[RenderableType]:
    title = f"{report['acts']} actions in {report['seconds']} s"
    outcomes = [(*name.split(": ", 1), count) for name, count in report["outcomes"].items()]
    columns = ("process", "MiB when idle", "MiB/h when busy", "descriptors", "threads")
    processes = [
        [", ".join(map(str, row)) if isinstance(row, list) else row for row in each.values()]
        for each in sorted(report["processes"], key=lambda row: str(row["process"]))
    ]
    kinds = Counter(text.split(":")[0] for text in report["failed"])
    return [
        table_of(("action", "outcome", "times"), outcomes, title),
        table_of(
            columns,
            [cells[: len(columns)] for cells in processes],
            "after a tenth of the time, half way, at the end",
        ),
        *(
            Text("\n  ".join((f"{title}: {len(report[title])}", *report[title][:10])))
            for title in ("failed", "different", "close_calls")
        ),
        Text(f"by kind: {dict(kinds)}" if kinds else ""),
        Text("\n  ".join(("not released:", *(report["not_back"] or ["nothing"])))),
    ]


def targets(report: dict[str, Any]) -> list[Target]:
    names = {
        "failed": "failed actions",
        "different": "different answers",
        "close_calls": "close calls",
    }
    names |= {"not_back": "resources that were not released"}
    return [none_of(name, report[key]) for key, name in names.items()]


def soak(args: argparse.Namespace) -> Report:
    settings = SETTINGS | {"port": args.port, "grpc_port": args.port + 1, "dtype": args.dtype}
    with local_ray_cluster(num_cpus=8), running_application(**settings):
        report = asyncio.run(_soak(args))
    return Report(targets(report), _tables(report), report)


PARTS = {
    "soak": Part(
        soak,
        {
            "--minutes": 30.0,
            "--seed": 0,
            "--clients": 24,
            "--port": 8790,
            "--dtype": {"choices": ("float32", "bfloat16"), "default": "float32"},
        },
    )
}


def main() -> None:
    conclude_part(__doc__, PARTS)


if __name__ == "__main__":
    main()
