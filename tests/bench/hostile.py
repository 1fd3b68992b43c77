"""Benchmark of streams while clients send the largest bodies of the shapes that cost a server the
most.

    python tests/bench/hostile.py [--seconds 20] [--streams 4] [--clients 2] [--only "list of
    lists"] [--json]

``tramontane serve`` with the demo model on two stages. First the streams alone, for ``--seconds``;
then while ``--clients`` processes send every body of ``tests/support/hostile_bodies.py`` once, of 8
MiB over HTTP and 2 MiB over gRPC, one after the other. A gap is the time between two chunks of one
stream. Everything shares this machine's cores; the clients, which take as much CPU time to make a
body as the server to refuse it, have a low priority.

Before that, an API server without Ray (``tests/support/lag_server.py``) gets the same bodies, and
requests with the largest answers of log-probabilities and experts, one at a time. It measures for
how long its event loop does not run.
"""

import argparse
import asyncio
import http.client
import itertools
import json
import multiprocessing
import os
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
from hostile_bodies import TEMPLATES, bodies, messages, uploads
from rich.console import Console
from rich.table import Table
from targets import Target, at_most, conclude, none_of

ENTRY = "from tramontane.cluster.cli.__main__ import main; main()"
STREAM = {"prompt": "ROMEO:", "max_tokens": 200, "ignore_eos": True, "stream": True}
METHODS = ("Generate", "Score")
FORM = "multipart/form-data; boundary=b"
TIMEOUT_S = 120.0
MAX_LONGER_S = 0.5
MAX_LAG_S = 0.05
SHOWN_LAGS = 5
LAG_SERVER = Path(__file__).parents[1] / "support" / "lag_server.py"
START_TIMEOUT_S = 60.0
ANSWERED = range(200, 500)
NICE = 10
CODES = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
console = Console(stderr=True, highlight=False)


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
class Figures:
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
    data = json.dumps(STREAM).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Length:"
        f" {len(data)}\r\nConnection: close\r\n\r\n"
    )
    while not stopping.is_set():
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + data)
        last = None
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                now = time.monotonic()
                if last is not None:
                    gaps.append(Gap(now - last, now))
                last = now
        writer.close()


def hostile_requests() -> Iterator[tuple[str, str, bytes]]:
    """Yield names, paths or methods, and what is sent to them."""
    for path in TEMPLATES:
        yield from ((name, path, body) for name, body in bodies(path))
    yield from ((name, "/v1/files", body) for name, body in uploads())
    for method in METHODS:
        yield from ((name, method, message) for name, message in messages())


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
                    over_http = target.startswith("/")
                    failure = (
                        send_over_http(port, target, content)
                        if over_http
                        else send_over_grpc(channel, target, content)
                    )
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


def send_over_http(port: int, path: str, body: bytes) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request(
            "POST",
            path,
            body,
            {"content-type": FORM if path == "/v1/files" else "application/json"},
        )
        response = connection.getresponse()
        response.read()
        status = response.status
        return "" if status in ANSWERED else f"status {status}"
    except OSError as error:
        return repr(error)
    finally:
        connection.close()


def send_over_grpc(channel: grpc.Channel, method: str, message: bytes) -> str:
    make = channel.unary_stream if method == "Generate" else channel.unary_unary
    call = make(
        f"/tramontane.v1.Inference/{method}", request_serializer=None, response_deserializer=None
    )
    try:
        answer = call(message, timeout=TIMEOUT_S)
        for _ in answer if method == "Generate" else ():
            pass
    except grpc.RpcError as error:
        code = error.code()  # type: ignore[attr-defined]
        return "" if code in CODES else str(code)
    return ""


def send_share(share: slice, only: str, port: int, grpc_port: int) -> list[Attempt]:
    """Send a share of the bodies whose names have ``only`` in them."""
    attempts = []
    chosen = (each for each in hostile_requests() if only in each[0])
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        for name, target, content in itertools.islice(chosen, share.start, None, share.step):
            began = time.monotonic()
            over_http = target.startswith("/")
            outcome = (
                send_over_http(port, target, content)
                if over_http
                else send_over_grpc(channel, target, content)
            )
            attempts.append(Attempt(f"{name} to {target}", began, time.monotonic(), outcome))
    return attempts


async def measure(
    port: int, grpc_port: int, seconds: float, num_streams: int, num_clients: int, only: str
) -> Figures:
    gaps: list[Gap] = []
    stopping = asyncio.Event()
    streams = [asyncio.create_task(stream(port, gaps, stopping)) for _ in range(num_streams)]
    await asyncio.sleep(5)  # trains the policy's cost model
    gaps.clear()
    await asyncio.sleep(seconds)
    alone = max(gap.seconds for gap in gaps)
    console.print(f"longest gap alone {alone:.3f} s; sending bodies ...", style="dim")
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
    return figures_of(alone, attacked, attempts)


def figures_of(alone: float, gaps: Sequence[Gap], attempts: Sequence[Attempt]) -> Figures:
    longest = max(gaps, key=lambda gap: gap.seconds)
    slowest = max(attempts, key=lambda each: each.ended - each.began)
    began = longest.ended - longest.seconds
    during = [each.name for each in attempts if each.began < longest.ended and each.ended > began]
    failed = [f"{each.name}: {each.outcome}" for each in attempts if each.outcome]
    return Figures(
        alone,
        longest.seconds,
        during,
        len(attempts),
        slowest.name,
        slowest.ended - slowest.began,
        failed,
    )


def run(
    port: int, grpc_port: int, seconds: float, num_streams: int, num_clients: int, only: str
) -> Figures:
    console.print("measuring the event loop of an API server without Ray ...", style="dim")
    lags, lag_alone = measure_lags(port, grpc_port, seconds, only)
    with tempfile.TemporaryDirectory() as folder:
        jobs = (
            "--jobs-database",
            f"sqlite:///{folder}/jobs.sqlite",
            "--jobs-storage",
            f"{folder}/jobs",
        )
        ports = ("--port", str(port), "--grpc-port", str(grpc_port))
        more = ("--dtype", "float32", "--stages", "2", "--threads-per-stage", "1")
        command = [sys.executable, "-c", ENTRY, "serve", *more, *ports, *jobs]
        console.print("starting the server ...", style="dim")
        server = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        try:
            assert server.stdout is not None
            if not server.stdout.readline():
                raise SystemExit("the server did not start")
            figures = asyncio.run(measure(port, grpc_port, seconds, num_streams, num_clients, only))
            return replace(figures, lag_alone=lag_alone, lags=lags)
        finally:
            server.terminate()
            server.wait()


def table_of(figures: Figures) -> Table:
    table = Table("figure", "measured")
    table.add_row("longest gap of the streams alone", f"{figures.gap_alone:.3f} s")
    table.add_row("longest gap during hostile bodies", f"{figures.gap_attacked:.3f} s")
    table.add_row("bodies that the server had then", "\n".join(figures.during))
    table.add_row("bodies sent", str(figures.bodies))
    table.add_row("slowest answer", f"{figures.slowest_s:.1f} s: {figures.slowest}")
    table.add_row("failed", "\n".join(figures.failed[:20]))
    table.add_row(
        "event loop: longest time that it did not run, without requests",
        f"{1e3 * figures.lag_alone:.0f} ms",
    )
    worst = sorted(figures.lags.items(), key=lambda lag: lag[1], reverse=True)[:SHOWN_LAGS]
    table.add_row(
        "longest during requests",
        "\n".join(f"{1e3 * seconds:.0f} ms: {name}" for name, seconds in worst),
    )
    return table


def targets(figures: Figures) -> list[Target]:
    longer = figures.gap_attacked - figures.gap_alone
    return [
        at_most("longest gap during hostile bodies, above without", longer, MAX_LONGER_S, "s"),
        none_of("bodies without an answer", figures.failed),
        at_most(
            "longest time that the event loop did not run",
            max(figures.lags.values()),
            MAX_LAG_S,
            "s",
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="only the bodies whose names have this text in them",
    )
    parser.add_argument("--port", type=int, default=8776)
    parser.add_argument("--grpc-port", type=int, default=9776)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = run(
        options.port,
        options.grpc_port,
        options.seconds,
        options.streams,
        options.clients,
        options.only,
    )
    conclude(targets(figures), table_of(figures), data=asdict(figures), as_json=options.json)


if __name__ == "__main__":
    main()
