"""``tramontane serve`` as a process, its streams over plain sockets, and what its processes use."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

Process = subprocess.Popen[Any]
# the command, also where no script is installed
TRAMONTANE = [sys.executable, "-c", "from tramontane.cluster.cli.__main__ import main; main()"]
TITLES = {
    "proxy": "ray::ProxyActor",
    "ingress": "ray::ServeReplica:tramontane:Ingress",
    "router": "ray::ServeReplica:tramontane:Router",
}


def jobs_flags(folder: Path | str) -> list[str]:
    """Return the flags that keep batch jobs in a folder."""
    return [
        "--jobs-database",
        f"sqlite:///{folder}/jobs.sqlite",
        "--jobs-storage",
        f"{folder}/jobs",
    ]


@contextmanager
def starting_server(port: int, *flags: str, grpc_port: int = 0) -> Iterator[Process]:
    """Start a server, which ends with the block; see ``when_ready``. Its stderr is ours."""
    ports = ["--port", str(port), "--grpc-port", str(grpc_port)]
    with TemporaryDirectory() as folder:
        server = subprocess.Popen(
            [*TRAMONTANE, "serve", "--json", *ports, *jobs_flags(folder), *flags],
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            yield server
        finally:
            server.terminate()
            server.wait()


def when_ready(server: Process) -> dict[str, Any]:
    """Wait until a server is ready; return what it says then. Raises SystemExit if it ended."""
    assert server.stdout is not None
    if not (line := server.stdout.readline()):
        raise SystemExit("the server did not start")
    said: dict[str, Any] = json.loads(line)
    return said


@contextmanager
def running_server(port: int, *flags: str, grpc_port: int = 0) -> Iterator[Process]:
    """Run a server, which is ready, while the block runs."""
    with starting_server(port, *flags, grpc_port=grpc_port) as server:
        when_ready(server)
        yield server


async def send_completion(
    port: int, body: Mapping[str, Any]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send one completion over a plain socket, so that the client costs little. Raises OSError."""
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Length:"
        f" {len(data)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + data)
    return reader, writer


def by_title(parent: psutil.Process, value: Callable[[psutil.Process], float]) -> dict[str, float]:
    """Return the sums of a value over the processes of each kind that a process has started."""
    found = dict.fromkeys(TITLES, 0.0)
    for process in parent.children(recursive=True):
        with suppress(psutil.Error):
            title, number = " ".join(process.cmdline()), value(process)
            for name, start in TITLES.items():
                found[name] += number * title.startswith(start)
    return found
