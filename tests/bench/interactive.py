"""Benchmark of the time to first token of interactive requests while a batch job uses all slots.

    python tests/bench/interactive.py [--requests 40] [--json]

``tramontane serve`` with the demo model on two stages and 16 slots. Streams of 8 tokens run one
after the other: on the idle server, then during a job with far more lines than slots, whose prompts
are at least as long as those of the streams. The duration of a micro-batch is the streams' own time
between tokens: a sequence gets one token per round.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import httpx
from batch_server import Server
from rich.console import Console
from rich.table import Table
from targets import Target, at_most, conclude

LINES, SLOTS, MAX_TOKENS = 20_000, 16, 8
SPEECH = "ROMEO speak my lord what news from Rome and the tribunes good morrow neighbour "
WORDS = f"{SPEECH} who is there".split()
console = Console(stderr=True, highlight=False)


@dataclass(frozen=True)
class Waits:
    """Milliseconds: medians and the maximum."""

    ttft: float
    worst_ttft: float
    itl: float


def one_stream(url: str, prompt: str) -> tuple[float, list[float]]:
    """Return the seconds until the first token, and between the others."""
    body = {
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    began = time.perf_counter()
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as response:
        times = [
            time.perf_counter() for line in response.iter_lines() if line.startswith("data: {")
        ]
    # tokens may travel together
    return times[0] - began, [(times[-1] - times[0]) / (MAX_TOKENS - 1)]


def streams(url: str, count: int, rng: random.Random) -> Waits:
    ttfts, itls = [], []
    for _ in range(count):
        ttft, gaps = one_stream(url, " ".join(rng.choices(WORDS, k=8)))
        ttfts.append(1000 * ttft)
        itls += [1000 * gap for gap in gaps]
    return Waits(statistics.median(ttfts), max(ttfts), statistics.median(itls))


def job(rng: random.Random) -> bytes:
    lines = []
    for number in range(LINES):
        body = {
            "prompt": " ".join(rng.choices(WORDS, k=rng.randint(8, 60))),
            "max_tokens": 64,
            "temperature": 0,
            "ignore_eos": True,
        }
        lines.append(
            json.dumps(
                {
                    "custom_id": f"r{number}",
                    "method": "POST",
                    "url": "/v1/completions",
                    "body": body,
                }
            )
        )
    return "\n".join(lines).encode()


def measure(requests: int) -> tuple[Waits, Waits]:
    """Measure on an idle server, and during a job."""
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        console.print("starting the server ...", style="dim")
        server = Server(Path(folder), stack)
        streams(server.url, 10, rng)  # trains the policy's cost model
        console.print("streams on the idle server ...", style="dim")
        idle = streams(server.url, requests, rng)
        job_id = server.submit(job(rng))
        server.wait_for(job_id, 2 * SLOTS)
        console.print("streams during a job ...", style="dim")
        loaded = streams(server.url, requests, rng)
        if server.num_done(job_id) > LINES - 2 * SLOTS:
            raise SystemExit("the job ended before the streams; raise LINES")
    return idle, loaded


def targets(idle: Waits, loaded: Waits) -> list[Target]:
    """Permit twice the time on the idle server, and one micro-batch."""
    return [at_most("TTFT during a job, median", loaded.ttft, 2 * idle.ttft + loaded.itl, "ms")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    idle, loaded = measure(options.requests)
    table = Table("", "TTFT, median", "worst", "between tokens")
    for name, waits in (("idle", idle), ("during a job", loaded)):
        table.add_row(
            name, f"{waits.ttft:.0f} ms", f"{waits.worst_ttft:.0f} ms", f"{waits.itl:.0f} ms"
        )
    data = {"idle": asdict(idle), "next_to_a_batch": asdict(loaded)}
    conclude(targets(idle, loaded), table, data=data, as_json=options.json)


if __name__ == "__main__":
    main()
