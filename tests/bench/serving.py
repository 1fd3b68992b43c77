"""Benchmark of the cost of HTTP: the engine alone against the engine behind the ingress, on this machine.

Rounds alternate between both, so that a slow moment of the machine affects both. Run with ``make bench-serve``.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PORT = 8766
BIN = Path(sys.executable).parent
PROMPTS = [f"KING: speak, my lord number {i}, what news?" for i in range(64)]
TARGETS = {"ready": 25.0, "ttft": 20.0, "throughput": 0.85}
SEPARATOR = b"\n\n"


@dataclass(frozen=True, slots=True)
class Reply:
    first_s: float  # from sending to the first event
    usage: dict[str, int]
    timings: dict[str, float]
    num_reads: int


async def ask(prompt: str, num_tokens: int) -> Reply:
    """Send one streamed completion on a plain socket, so that the client costs little."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0.8, "seed": 0, "ignore_eos": True}
    data = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
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
    replies = await asyncio.gather(*(ask(prompt, num_tokens) for prompt in PROMPTS[:num_clients]))
    return sum(r.usage["completion_tokens"] for r in replies) / (time.perf_counter() - started), list(replies)


def generate_round(num_tokens: int) -> float:
    """Return the tokens per second that ``tramontane generate`` reports for the same prompts."""
    command = [BIN / "tramontane", "generate", "--json", "--max-tokens", str(num_tokens), "--stages", "2"]
    run = subprocess.run([*command, *PROMPTS], capture_output=True, check=True)
    figure: float = json.loads(run.stdout)["tokens_per_s"]
    return figure


def start_server() -> "subprocess.Popen[bytes]":
    command = [BIN / "tramontane", "serve", "--port", str(PORT), "--stages", "2", "--json"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ)


def measure(rounds: int, num_tokens: int, console: Console) -> bool:
    started = time.perf_counter()
    alone, behind, replies = [], [], []
    with start_server() as server:
        try:
            assert server.stdout is not None
            ready = json.loads(server.stdout.readline())
            asyncio.run(ask("ROMEO:", 1))
            first_token_s = time.perf_counter() - started
            singles = [asyncio.run(ask("ROMEO: speak", 4)) for _ in range(50)]
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
    added_ms = statistics.median(r.first_s - r.timings["queue_s"] - r.timings["prefill_s"] for r in singles) * 1000
    ratios = [b / a for a, b in zip(alone, behind, strict=True)]
    table = Table("figure", "measured", "target")
    table.add_row("serve to ready, to first token", f"{ready['ready_after_s']:.1f} s, {first_token_s:.1f} s", "25 s")
    table.add_row("added to the first token, 1 client (median of 50)", f"{added_ms:.1f} ms", "20 ms")
    table.add_row("generate, 64 prompts, tokens/s", " ".join(f"{x:.0f}" for x in alone), "")
    table.add_row("64 streaming clients, tokens/s", " ".join(f"{x:.0f}" for x in behind), "")
    table.add_row("ratio, median of the rounds", f"{statistics.median(ratios):.2f}", "0.85")
    table.add_row("tokens per read of the socket", f"{64 * num_tokens / sum(r.num_reads for r in replies):.1f}", "")
    console.print(table)
    met = (first_token_s <= TARGETS["ready"], added_ms <= TARGETS["ttft"], statistics.median(ratios) >= TARGETS["throughput"])
    return all(met)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    met = measure(options.rounds, options.tokens, Console())
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
