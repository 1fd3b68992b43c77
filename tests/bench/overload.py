"""Benchmark of a server under more than it can answer: ten times the requests, or the largest
bodies of the shapes that cost a server the most.

    python tests/bench/overload.py requests [--seconds 60] [--times 10] [--places 8]
    [--options "--itl-target-ms 20"]
    python tests/bench/overload.py bodies [--seconds 20] [--streams 4] [--clients 2]
    [--only "list of lists"]

Both have ``--json``. ``tramontane serve`` with the demo model on two stages; everything shares this
machine's cores.

**Requests**: ``--places`` slots and 16 places in the waiting queue. First one stream alone; then as
many clients as slots, each with the next request after its answer, which gives the capacity; then
``--times`` as many requests per second as this capacity, at a fixed rate.

**Bodies**: first the streams alone, for ``--seconds``; then while ``--clients`` processes send
every body of ``tests/support/hostile_bodies.py`` once, of 8 MiB over HTTP and 2 MiB over gRPC, one
after the other. A gap is the time between two chunks of one stream. The clients, which take as much
CPU time to make a body as the server to refuse it, have a low priority. Before that, an API server
without Ray (``tests/support/lag_server.py``) gets the same bodies, and requests with the largest
answers of log-probabilities and experts, one at a time. It measures for how long its event loop
does not run.
"""

import argparse
import asyncio
import http.client
import itertools
import json
import multiprocessing
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import grpc
import large_answers
import psutil
from bench_parts import Part, Report, conclude_part, figures_table, say
from hostile_bodies import TIMEOUT_S, hostile_requests, send
from serve_process import TITLES, by_title, running_server, send_completion
from targets import at_most, none_of

TWO_STAGES = ("--dtype", "float32", "--stages", "2", "--threads-per-stage", "1")
QUEUED, MAX_TOKENS = 16, 32
BODY = {
    "prompt": "ROMEO: speak, my lord, what news from Rome?",
    "max_tokens": MAX_TOKENS,
    "ignore_eos": True,
    "stream": True,
}
MAX_REFUSAL_S, MAX_ITL_RATIO, MAX_GROWTH = 0.05, 1.5, 1.1
STREAM = {"prompt": "ROMEO:", "max_tokens": 200, "ignore_eos": True, "stream": True}
MAX_LONGER_S = 0.5
MAX_LAG_S = 0.05
SHOWN_LAGS = 5
LAG_SERVER = Path(__file__).parents[1] / "support" / "lag_server.py"
START_TIMEOUT_S = 60.0
NICE = 10


# ---- requests


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
class Overload:
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
    began = time.perf_counter()
    times: list[float] = []
    status, retry_after = 0, 0
    with suppress(OSError):
        reader, writer = await send_completion(port, BODY)
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


async def sample_memory(server: psutil.Process, samples: list[dict[str, float]]) -> None:
    """Sample the MiB of each kind of process every second."""
    while True:
        samples.append(
            await asyncio.to_thread(by_title, server, lambda each: each.memory_info().rss / 2**20)
        )
        await asyncio.sleep(1)


def median_itl(answers: Sequence[Answer]) -> float:
    return statistics.median(a.itl for a in answers if a.status == 200) * 1000


async def measure_overload(
    port: int, server: psutil.Process, seconds: float, times: float, slots: int
) -> Overload:
    await closed_loop(port, slots, 5)  # trains the policy's cost model
    alone = await closed_loop(port, 1, seconds / 4)
    say("as many clients as slots")
    full = await closed_loop(port, slots, seconds / 4)
    capacity = len(full) / (seconds / 4)
    say(f"{times:g} times {capacity:.1f} requests per second, for {seconds:g} s")
    samples: list[dict[str, float]] = []
    watching = asyncio.create_task(sample_memory(server, samples))
    answers = await open_loop(port, times * capacity, seconds)
    watching.cancel()
    refused = [a for a in answers if a.status == 429]
    waits = sorted(a.seconds * 1000 for a in refused)
    early = samples[min(5, len(samples) - 1)]
    return Overload(
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


def run_overload(args: argparse.Namespace) -> Overload:
    bounds = ("--max-num-seqs", str(args.places), "--max-queued-requests", str(QUEUED))
    say("starting the server")
    with running_server(args.port, *TWO_STAGES, *bounds, *shlex.split(args.options)) as server:
        process = psutil.Process(server.pid)
        return asyncio.run(
            measure_overload(args.port, process, args.seconds, args.times, args.places)
        )


def overload(args: argparse.Namespace) -> Report:
    """ten times the requests that the server can answer"""
    found = run_overload(args)
    refusals = (found.refusal_median, found.refusal_p99, found.refusal_worst)
    itls = (found.itl_alone, found.itl_full, found.itl_overload)
    counts = (found.requested, found.answered, found.refused, found.other)
    rows: dict[str, object] = {
        "answers per second at capacity": f"{found.capacity_per_s:.1f}",
        "requests: sent, answered, refused, other": ", ".join(map(str, counts)),
        "refusal: median, 99th percentile, worst, ms": _listed(refusals),
        "Retry-After": "{} to {} s".format(*found.retry_after),
        "ITL: alone, at capacity, overloaded, ms": _listed(itls),
        "ITL overloaded / at capacity": f"{found.itl_overload / found.itl_full:.2f}",
    }
    for name, figures in found.memory.items():
        rows[f"memory of {name}: after 5 s, at the end, peak, MiB"] = _listed(figures)
    longer = found.itl_overload / found.itl_alone
    targets = [
        at_most("requests neither answered nor refused", found.other, 0),
        at_most("refusal, median", found.refusal_median, 1000 * MAX_REFUSAL_S, "ms"),
        at_most("ITL overloaded / alone", longer, MAX_ITL_RATIO, "x"),
        *(
            at_most(f"memory of {name}, at the end / after 5 s", late / early, MAX_GROWTH, "x")
            for name, (early, late, _) in found.memory.items()
        ),
    ]
    return Report(targets, [figures_table(rows)], asdict(found))


def _listed(figures: Sequence[float]) -> str:
    return ", ".join(f"{each:.0f}" for each in figures)


# ---- bodies


@dataclass(frozen=True)
class Attempt:
    """One hostile body; times by the monotonic clock, which processes share. ``outcome`` is empty
    if it was answered.
    """

    name: str
    began: float
    ended: float
    outcome: str


@dataclass(frozen=True)
class Gap:
    """Time between two chunks of a stream, and when it ended."""

    seconds: float
    ended: float


@dataclass(frozen=True)
class Attack:
    """Seconds; ``during`` names the bodies that the server had in the longest gap, ``slowest`` the
    one that took longest.
    """

    gap_alone: float
    gap_attacked: float
    during: list[str]
    bodies: int
    slowest: str
    slowest_s: float
    failed: list[str]
    lag_alone: float = 0.0
    lags: dict[str, float] = field(default_factory=dict)  # by request


async def stream(port: int, gaps: list[Gap], stopping: asyncio.Event) -> None:
    """Stream one answer after the other."""
    while not stopping.is_set():
        reader, writer = await send_completion(port, STREAM)
        last = None
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                now = time.monotonic()
                if last is not None:
                    gaps.append(Gap(now - last, now))
                last = now
        writer.close()


def lag_requests() -> Iterator[tuple[str, str, bytes]]:
    """Yield the hostile requests, then those with large answers, for which the server makes its
    tokens at the first one.
    """
    yield from hostile_requests()
    answers = [
        (name, path, json.dumps(body).encode()) for name, path, body in large_answers.requests()
    ]
    for each in [*answers, *large_answers.messages()]:
        yield from (each, each)


def measure_lags(
    port: int, grpc_port: int, seconds: float, only: str
) -> tuple[dict[str, float], float]:
    """Return for how many seconds the event loop did not run, by request, and the longest without
    requests.
    """
    options = [("grpc.max_receive_message_length", -1)]
    with (
        tempfile.TemporaryDirectory() as folder,
        grpc.insecure_channel(f"127.0.0.1:{grpc_port}", options) as channel,
    ):
        server = subprocess.Popen(
            [sys.executable, str(LAG_SERVER), str(port), str(grpc_port), folder]
        )
        try:
            wait_until_started(port)
            take_lag(port)
            time.sleep(seconds)
            alone, lags = take_lag(port), dict[str, float]()
            for name, target, content in lag_requests():
                if only in name:
                    failure = send(port, channel, target, content)
                    assert not failure, (name, failure)
                    lags[f"{name} to {target}"] = take_lag(port)
            return lags, alone
        finally:
            server.terminate()
            server.wait()


def take_lag(port: int) -> float:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/lag")
        return float(json.load(connection.getresponse())["worst_s"])
    finally:
        connection.close()


def wait_until_started(port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            take_lag(port)
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def send_share(share: slice, only: str, port: int, grpc_port: int) -> list[Attempt]:
    """Send a share of the bodies whose names have ``only`` in them."""
    attempts = []
    chosen = (each for each in hostile_requests() if only in each[0])
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        for name, target, content in itertools.islice(chosen, share.start, None, share.step):
            began = time.monotonic()
            outcome = send(port, channel, target, content)
            attempts.append(Attempt(f"{name} to {target}", began, time.monotonic(), outcome))
    return attempts


async def measure_attack(
    port: int, grpc_port: int, seconds: float, num_streams: int, num_clients: int, only: str
) -> Attack:
    gaps: list[Gap] = []
    stopping = asyncio.Event()
    streams = [asyncio.create_task(stream(port, gaps, stopping)) for _ in range(num_streams)]
    await asyncio.sleep(5)  # trains the policy's cost model
    gaps.clear()
    await asyncio.sleep(seconds)
    alone = max(gap.seconds for gap in gaps)
    say(f"longest gap alone {alone:.3f} s; sending bodies")
    context, loop = multiprocessing.get_context("spawn"), asyncio.get_running_loop()
    clients = [ProcessPoolExecutor(1, context) for _ in range(num_clients)]
    # once they have started
    await asyncio.gather(*(loop.run_in_executor(client, os.nice, NICE) for client in clients))
    gaps.clear()
    shares = [slice(number, None, num_clients) for number in range(num_clients)]
    sending = zip(clients, shares, strict=True)
    sent = [
        loop.run_in_executor(client, send_share, share, only, port, grpc_port)
        for client, share in sending
    ]
    attempts = list(itertools.chain.from_iterable(await asyncio.gather(*sent)))
    stopping.set()
    ended = max(each.ended for each in attempts)
    attacked = [gap for gap in gaps if gap.ended - gap.seconds < ended]
    for task in streams:
        with suppress(asyncio.CancelledError):
            await task
    for client in clients:
        client.shutdown()
    return attack_of(alone, attacked, attempts)


def attack_of(alone: float, gaps: Sequence[Gap], attempts: Sequence[Attempt]) -> Attack:
    longest = max(gaps, key=lambda gap: gap.seconds)
    slowest = max(attempts, key=lambda each: each.ended - each.began)
    began = longest.ended - longest.seconds
    during = [each.name for each in attempts if each.began < longest.ended and each.ended > began]
    failed = [f"{each.name}: {each.outcome}" for each in attempts if each.outcome]
    return Attack(
        alone,
        longest.seconds,
        during,
        len(attempts),
        slowest.name,
        slowest.ended - slowest.began,
        failed,
    )


def run_attack(args: argparse.Namespace) -> Attack:
    ports = (args.port, args.grpc_port)
    say("measuring the event loop of an API server without Ray")
    lags, lag_alone = measure_lags(*ports, args.seconds, args.only)
    say("starting the server")
    with running_server(args.port, *TWO_STAGES, grpc_port=args.grpc_port):
        found = asyncio.run(
            measure_attack(*ports, args.seconds, args.streams, args.clients, args.only)
        )
    return replace(found, lag_alone=lag_alone, lags=lags)


def hostile(args: argparse.Namespace) -> Report:
    """streams while clients send the largest bodies of the worst shapes"""
    found = run_attack(args)
    worst = sorted(found.lags.items(), key=lambda lag: lag[1], reverse=True)[:SHOWN_LAGS]
    rows = {
        "longest gap of the streams alone": f"{found.gap_alone:.3f} s",
        "longest gap during hostile bodies": f"{found.gap_attacked:.3f} s",
        "bodies that the server had then": "\n".join(found.during),
        "bodies sent": found.bodies,
        "slowest answer": f"{found.slowest_s:.1f} s: {found.slowest}",
        "failed": "\n".join(found.failed[:20]),
        "event loop: longest time that it did not run, without requests": (
            f"{1e3 * found.lag_alone:.0f} ms"
        ),
        "longest during requests": "\n".join(
            f"{1e3 * seconds:.0f} ms: {name}" for name, seconds in worst
        ),
    }
    longer, lag = found.gap_attacked - found.gap_alone, max(found.lags.values())
    targets = [
        at_most("longest gap during hostile bodies, above without", longer, MAX_LONGER_S, "s"),
        none_of("bodies without an answer", found.failed),
        at_most("longest time that the event loop did not run", lag, MAX_LAG_S, "s"),
    ]
    return Report(targets, [figures_table(rows)], asdict(found))


ONLY = "only the bodies whose names have this text in them"
PARTS = {
    "requests": Part(
        overload,
        {
            "--seconds": 60.0,
            "--times": 10.0,
            "--places": {
                "default": 8,
                "help": "number of slots (--max-num-seqs of tramontane serve)",
            },
            "--options": {"default": "", "help": "further options of tramontane serve"},
            "--port": 8774,
        },
    ),
    "bodies": Part(
        hostile,
        {
            "--seconds": 20.0,
            "--streams": 4,
            "--clients": 2,
            "--only": {"default": "", "metavar": "TEXT", "help": ONLY},
            "--port": 8776,
            "--grpc-port": 9776,
        },
    ),
}


def main() -> None:
    conclude_part(__doc__, PARTS)


if __name__ == "__main__":
    main()
