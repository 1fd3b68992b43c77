"""Benchmark of the cost of HTTP: the engine alone against the engine behind the ingress, on this
machine.

Rounds alternate between both, so that a slow moment of the machine affects both. Run with ``make
bench-serve``.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from rich.console import Console
from rich.table import Table
from targets import Target, at_least, at_most, conclude

PORT = 8766
BIN = Path(sys.executable).parent
PROMPTS = [f"KING: speak, my lord number {i}, what news?" for i in range(64)]
MAX_READY_S, MAX_ADDED_MS, MIN_RATIO = 25.0, 20.0, 0.85
SEPARATOR = b"\n\n"


@dataclass(frozen=True, slots=True)
class Reply:
    first_s: float  # from sending to the first event
    usage: dict[str, int]
    timings: dict[str, float]
    num_reads: int


async def request(prompt: str, num_tokens: int) -> Reply:
    """Send one streamed completion on a plain socket, so that the client costs little."""
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0.8,
        "seed": 0,
        "ignore_eos": True,
    }
    data = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Length:"
        f" {len(data)}\r\nConnection: close\r\n\r\n"
    )
    sent_at = time.perf_counter()
    writer.write(head.encode() + data)
    received, first_s, num_reads = b"", 0.0, 0
    while part := await reader.read(2**16):
        received += part
        num_reads += 1
        if not first_s and b"data:" in received:
            first_s = time.perf_counter() - sent_at
    writer.close()
    last = next(line for line in reversed(received.split(b"\n")) if b'"timings"' in line)
    event = json.loads(last.removeprefix(b"data: "))
    return Reply(first_s, event["usage"], event["timings"], num_reads)


async def serve_round(num_clients: int, num_tokens: int) -> tuple[float, list[Reply]]:
    """Return the tokens per second of ``num_clients`` clients at once."""
    started = time.perf_counter()
    replies = await asyncio.gather(
        *(request(prompt, num_tokens) for prompt in PROMPTS[:num_clients])
    )
    return sum(r.usage["completion_tokens"] for r in replies) / (
        time.perf_counter() - started
    ), list(replies)


def generate_round(num_tokens: int) -> float:
    """Return the tokens per second that ``tramontane generate`` reports for the same prompts."""
    command = [
        BIN / "tramontane",
        "generate",
        "--json",
        "--max-tokens",
        str(num_tokens),
        "--stages",
        "2",
    ]
    run = subprocess.run([*command, *PROMPTS], capture_output=True, check=True)
    figure: float = json.loads(run.stdout)["tokens_per_s"]
    return figure


def start_server() -> "subprocess.Popen[bytes]":
    command = [BIN / "tramontane", "serve", "--port", str(PORT), "--stages", "2", "--json"]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ
    )


@dataclass(frozen=True, slots=True)
class Figures:
    """``alone_per_s`` and ``behind_per_s`` are tokens per second of each round, by the engine and
    behind HTTP.
    """

    ready_s: float
    first_token_s: float
    added_ms: float  # to the first token, one client
    alone_per_s: list[float]
    behind_per_s: list[float]
    tokens_per_read: float

    @property
    def ratio(self) -> float:
        return statistics.median(
            b / a for a, b in zip(self.alone_per_s, self.behind_per_s, strict=True)
        )


def measure(rounds: int, num_tokens: int, console: Console) -> Figures:
    started = time.perf_counter()
    alone, behind, replies = [], [], []
    with start_server() as server:
        try:
            assert server.stdout is not None
            ready = json.loads(server.stdout.readline())
            asyncio.run(request("ROMEO:", 1))
            first_token_s = time.perf_counter() - started
            singles = [asyncio.run(request("ROMEO: speak", 4)) for _ in range(50)]
        finally:
            server.terminate()
    for number in range(rounds):
        console.print(f"round {number + 1} of {rounds} ...", style="dim")
        alone.append(generate_round(num_tokens))
        with start_server() as server:
            try:
                assert server.stdout is not None
                server.stdout.readline()
                asyncio.run(serve_round(8, 8))
                figure, replies = asyncio.run(serve_round(64, num_tokens))
                behind.append(figure)
            finally:
                server.terminate()
    added_ms = (
        statistics.median(
            r.first_s - r.timings["queue_s"] - r.timings["prefill_s"] for r in singles
        )
        * 1000
    )
    per_read = 64 * num_tokens / sum(r.num_reads for r in replies)
    return Figures(ready["ready_after_s"], first_token_s, added_ms, alone, behind, per_read)


def table_of(figures: Figures) -> Table:
    table = Table("figure", "measured")
    table.add_row("serve to ready", f"{figures.ready_s:.1f} s")
    table.add_row(
        "generate, 64 prompts, tokens/s", " ".join(f"{x:.0f}" for x in figures.alone_per_s)
    )
    table.add_row(
        "64 streaming clients, tokens/s", " ".join(f"{x:.0f}" for x in figures.behind_per_s)
    )
    table.add_row("tokens per read of the socket", f"{figures.tokens_per_read:.1f}")
    return table


def targets(figures: Figures) -> list[Target]:
    return [
        at_most("serve to first token", figures.first_token_s, MAX_READY_S, "s"),
        at_most(
            "added to the first token, 1 client (median of 50)",
            figures.added_ms,
            MAX_ADDED_MS,
            "ms",
        ),
        at_least(
            "64 streaming clients / generate, median of the rounds", figures.ratio, MIN_RATIO, "x"
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = measure(options.rounds, options.tokens, Console(stderr=True))
    conclude(targets(figures), table_of(figures), data=asdict(figures), as_json=options.json)


if __name__ == "__main__":
    main()
