"""Benchmark of a server under ten times the requests that it can answer.

    python tests/bench/overload.py [--seconds 60] [--times 10] [--places 8] [--options
    "--itl-target-ms 20"] [--json]

``tramontane serve`` with the demo model on two stages, ``--places`` slots and 16 places in the
waiting queue. First one stream alone; then as many clients as slots, each with the next request
after its answer, which gives the capacity; then ``--times`` as many requests per second as this
capacity, at a fixed rate. Everything shares this machine's cores.
"""

import argparse
import asyncio
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import psutil
from rich.console import Console
from rich.table import Table
from targets import Target, at_most, conclude

ENTRY = "from tramontane.cluster.cli.__main__ import main; main()"
TITLES = {
    "proxy": "ray::ProxyActor",
    "ingress": "ray::ServeReplica:tramontane:Ingress",
    "router": "ray::ServeReplica:tramontane:Router",
}
QUEUED, MAX_TOKENS = 16, 32
BODY = {
    "prompt": "ROMEO: speak, my lord, what news from Rome?",
    "max_tokens": MAX_TOKENS,
    "ignore_eos": True,
    "stream": True,
}
MAX_REFUSAL_S, MAX_ITL_RATIO, MAX_GROWTH = 0.05, 1.5, 1.1
console = Console(stderr=True, highlight=False)


@dataclass(frozen=True)
class Answer:
    """``seconds`` until its end; ``itl`` is the mean time between tokens, of which several may
    arrive together.
    """

    status: int
    seconds: float
    itl: float
    retry_after: int


@dataclass(frozen=True)
class Figures:
    """Times in milliseconds; memory in MiB: early in the overload, at its end and at its peak."""

    capacity_per_s: float
    requested: int
    answered: int
    refused: int
    other: int
    refusal_median: float
    refusal_p99: float
    refusal_worst: float
    retry_after: tuple[int, int]
    itl_alone: float
    itl_full: float
    itl_overload: float
    memory: dict[str, tuple[float, float, float]]


async def request(port: int) -> Answer:
    data = json.dumps(BODY).encode()
    began = time.perf_counter()
    times: list[float] = []
    status, retry_after = 0, 0
    with suppress(OSError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Length:"
            f" {len(data)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + data)
        while line := await reader.readline():
            if line.startswith(b"HTTP/"):
                status = int(line.split()[1])
            elif line.lower().startswith(b"retry-after:"):
                retry_after = int(line.split(b":")[1])
            elif line.startswith(b"data: {"):
                times.append(time.perf_counter())
        writer.close()
    itl = (times[-1] - times[0]) / (MAX_TOKENS - 1) if times else 0.0
    return Answer(status, time.perf_counter() - began, itl, retry_after)


async def closed_loop(port: int, clients: int, seconds: float) -> list[Answer]:
    until = time.perf_counter() + seconds
    answers: list[Answer] = []

    async def client() -> None:
        while time.perf_counter() < until:
            answers.append(await request(port))

    await asyncio.gather(*(client() for _ in range(clients)))
    return answers


async def open_loop(port: int, per_s: float, seconds: float) -> list[Answer]:
    """Send requests at a fixed rate, independent of the answers."""
    began = time.perf_counter()
    requests: list[asyncio.Task[Answer]] = []
    while (now := time.perf_counter() - began) < seconds:
        requests += [
            asyncio.create_task(request(port)) for _ in range(int(now * per_s) + 1 - len(requests))
        ]
        await asyncio.sleep(max(0.0, began + len(requests) / per_s - time.perf_counter()))
    return list(await asyncio.gather(*requests))


def rss(server: psutil.Process) -> dict[str, float]:
    found = {}
    for process in server.children(recursive=True):
        with suppress(psutil.Error):
            title = " ".join(process.cmdline())
            found |= {
                name: process.memory_info().rss / 2**20
                for name, start in TITLES.items()
                if title.startswith(start)
            }
    return found


async def sample_memory(server: psutil.Process, samples: list[dict[str, float]]) -> None:
    while True:
        samples.append(await asyncio.to_thread(rss, server))
        await asyncio.sleep(1)


def median_itl(answers: Sequence[Answer]) -> float:
    return statistics.median(a.itl for a in answers if a.status == 200) * 1000


async def measure(
    port: int, server: psutil.Process, seconds: float, times: float, slots: int
) -> Figures:
    await closed_loop(port, slots, 5)  # trains the policy's cost model
    alone = await closed_loop(port, 1, seconds / 4)
    console.print("as many clients as slots ...", style="dim")
    full = await closed_loop(port, slots, seconds / 4)
    capacity = len(full) / (seconds / 4)
    console.print(
        f"{times:g} times {capacity:.1f} requests per second, for {seconds:g} s ...", style="dim"
    )
    samples: list[dict[str, float]] = []
    watching = asyncio.create_task(sample_memory(server, samples))
    answers = await open_loop(port, times * capacity, seconds)
    watching.cancel()
    refused = [a for a in answers if a.status == 429]
    waits = sorted(a.seconds * 1000 for a in refused)
    early = samples[min(5, len(samples) - 1)]
    return Figures(
        capacity,
        len(answers),
        sum(a.status == 200 for a in answers),
        len(refused),
        sum(a.status not in (200, 429) for a in answers),
        statistics.median(waits),
        waits[int(0.99 * len(waits))],
        waits[-1],
        (min(a.retry_after for a in refused), max(a.retry_after for a in refused)),
        median_itl(alone),
        median_itl(full),
        median_itl(answers),
        {
            name: (early[name], samples[-1][name], max(sample[name] for sample in samples))
            for name in TITLES
        },
    )


def run(port: int, seconds: float, times: float, slots: int, options: str) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        jobs = (
            "--jobs-database",
            f"sqlite:///{folder}/jobs.sqlite",
            "--jobs-storage",
            f"{folder}/jobs",
        )
        bounds = ("--max-num-seqs", str(slots), "--max-queued-requests", str(QUEUED))
        more = (
            "--dtype",
            "float32",
            "--stages",
            "2",
            "--threads-per-stage",
            "1",
            "--port",
            str(port),
            "--grpc-port",
            "0",
        )
        command = [
            sys.executable,
            "-c",
            ENTRY,
            "serve",
            *more,
            *bounds,
            *jobs,
            *shlex.split(options),
        ]
        console.print("starting the server ...", style="dim")
        server = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        try:
            assert server.stdout is not None
            if not server.stdout.readline():
                raise SystemExit("the server did not start")
            return asyncio.run(measure(port, psutil.Process(server.pid), seconds, times, slots))
        finally:
            server.terminate()
            server.wait()


def table_of(figures: Figures) -> Table:
    table = Table("figure", "measured")
    table.add_row("answers per second at capacity", f"{figures.capacity_per_s:.1f}")
    counts = f"{figures.requested}, {figures.answered}, {figures.refused}, {figures.other}"
    table.add_row("requests: sent, answered, refused, other", counts)
    refusals = (
        f"{figures.refusal_median:.0f}, {figures.refusal_p99:.0f}, {figures.refusal_worst:.0f} ms"
    )
    table.add_row("refusal: median, 99th percentile, worst", refusals)
    table.add_row("Retry-After", "{} to {} s".format(*figures.retry_after))
    itls = f"{figures.itl_alone:.0f}, {figures.itl_full:.0f}, {figures.itl_overload:.0f} ms"
    table.add_row("ITL: alone, at capacity, overloaded", itls)
    table.add_row("ITL overloaded / at capacity", f"{figures.itl_overload / figures.itl_full:.2f}")
    for name, (early, late, peak) in figures.memory.items():
        memory = f"{early:.0f}, {late:.0f}, {peak:.0f} MiB"
        table.add_row(f"memory of {name}: after 5 s, at the end, peak", memory)
    return table


def targets(figures: Figures) -> list[Target]:
    return [
        at_most("requests neither answered nor refused", figures.other, 0),
        at_most("refusal, median", figures.refusal_median, 1000 * MAX_REFUSAL_S, "ms"),
        at_most(
            "ITL overloaded / alone", figures.itl_overload / figures.itl_alone, MAX_ITL_RATIO, "x"
        ),
        *(
            at_most(f"memory of {name}, at the end / after 5 s", late / early, MAX_GROWTH, "x")
            for name, (early, late, _) in figures.memory.items()
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--times", type=float, default=10.0)
    parser.add_argument(
        "--places", type=int, default=8, help="number of slots (--max-num-seqs of tramontane serve)"
    )
    parser.add_argument("--options", default="", help="further options of tramontane serve")
    parser.add_argument("--port", type=int, default=8774)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = run(options.port, options.seconds, options.times, options.places, options.options)
    conclude(targets(figures), table_of(figures), data=asdict(figures), as_json=options.json)


if __name__ == "__main__":
    main()
