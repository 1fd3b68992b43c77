"""Benchmark of batch jobs.

    python tests/bench/batch.py lines [--lines 1000000] [--database URL]
    python tests/bench/batch.py kills [--kills 20] [--requests 5000] [--seed 0]
    python tests/bench/batch.py interactive [--requests 40]

All have ``--json``.

**Lines**: a million with an engine that echoes: how many lines per second are accepted and
finished, and the memory over time, which must not grow with the number of lines; then it pages
through the list of jobs.

**Kills**: ``tramontane serve`` with the demo model, and the server, a stage or the Batch replica
are killed with SIGKILL at random moments while lines are unfinished. Then every line is there
exactly once, with the text of the same job without kills.

**Interactive** requests, and their time to first token, while a batch job uses all slots, of which
there are 16. Streams of 8 tokens run one after the other: on the idle server, then during a job
with far more lines than slots, whose prompts are at least as long as those of the streams. The
duration of a micro-batch is the streams' own time between tokens: a sequence gets one token per
round.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import httpx
import psutil
from batch_server import Server
from bench_parts import Part, Report, conclude_part, console, figures_table, say, table_of
from chaos_load import WORDS
from targets import Target, at_most

from tramontane.proto.jobs import Job, JobOptions, JobState
from tramontane.router.batch.claims import JobClaimStore
from tramontane.router.batch.database import Database
from tramontane.router.batch.files import JobStorage
from tramontane.router.batch.runner import BatchRunner
from tramontane.router.batch.service import BatchService, JobSettings

MIB = 2**20
CONCURRENCY = 256
NUM_SAMPLES = 10  # of the memory, in each phase
MAX_GROWTH_MIB = 64.0  # after the first tenth of a phase, however many lines come
SMALL_JOBS, LIST_PAGE = 250, 100
VICTIMS = ("the Batch replica", "a stage", "the server")
JOB_LINES, SLOTS, MAX_TOKENS = 20_000, 16, 8


# ---- lines


def _request(number: int, prompt: str, max_tokens: int = MAX_TOKENS) -> bytes:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return (
        json.dumps(
            {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}
        ).encode()
        + b"\n"
    )


async def _echo(_endpoint: str, body: dict[str, Any], _tenant: str = "") -> dict[str, Any]:
    await asyncio.sleep(0)
    return {"choices": [{"text": body["prompt"]}]}


class Memory:
    """Samples of the resident memory of this process in MiB."""

    def __init__(self) -> None:
        self.samples: list[float] = []

    def sample(self) -> None:
        self.samples.append(round(psutil.Process().memory_info().rss / MIB, 1))


async def _many(num_lines: int, database: str, folder: Path) -> dict[str, Any]:
    settings = JobSettings(database, f"{folder}/storage", f"bench-{time.time_ns()}")
    service = BatchService(settings)
    accepting, finishing, reading = Memory(), Memory(), Memory()

    async def pieces() -> AsyncIterator[bytes]:
        for number in range(num_lines):
            yield _request(number, f"line {number}")
            if number % (num_lines // NUM_SAMPLES) == 0:
                accepting.sample()

    began = time.perf_counter()
    job = await service.submit(pieces(), JobOptions())
    accepted = time.perf_counter()
    runner = BatchRunner(
        JobClaimStore(Database(database), settings.queue),
        JobStorage(settings.storage),
        _echo,
        CONCURRENCY,
    )
    running = asyncio.create_task(runner.run())
    async for now in service.watch(job.job_id):
        if now.num_done >= len(finishing.samples) * num_lines / NUM_SAMPLES:
            finishing.sample()
    finished = time.perf_counter()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    last: Job = await service.get(job.job_id)
    assert (last.state, last.num_done) == (JobState.COMPLETED, num_lines), last
    num_results, num_wrong = 0, 0
    async for line in service.results(job.job_id):
        num_wrong += (
            line.line != num_results + 1
            or json.loads(line.body)["choices"][0]["text"] != f"line {num_results}"
        )
        num_results += 1
        if num_results % (num_lines // NUM_SAMPLES) == 0:
            reading.sample()
    read = time.perf_counter()
    assert (num_results, num_wrong) == (num_lines, 0)
    small = [
        (await service.submit(_one(number), JobOptions())).job_id for number in range(SMALL_JOBS)
    ]
    assert await _listed(service) == [*reversed(small), job.job_id]
    return {
        "lines": num_lines,
        "accepted_per_s": round(num_lines / (accepted - began)),
        "finished_per_s": round(num_lines / (finished - accepted)),
        "read_per_s": round(num_lines / (read - finished)),
        "mib_while_accepting": accepting.samples,
        "mib_while_finishing": finishing.samples,
        "mib_while_reading": reading.samples,
    }


async def _one(number: int) -> AsyncIterator[bytes]:
    yield _request(number, "a job of one line")


async def _listed(service: BatchService) -> list[str]:
    """Return the IDs of all jobs, read page by page."""
    found: list[str] = []
    while page := await service.list(LIST_PAGE, found[-1] if found else None):
        found += [job.job_id for job in page]
    return found


def lines(options: argparse.Namespace) -> Report:
    """a million lines with an engine that echoes"""
    with tempfile.TemporaryDirectory(prefix="batch-") as folder:
        database = options.database or f"sqlite:///{folder}/jobs.sqlite"
        figures = asyncio.run(_many(options.lines, database, Path(folder)))
    return Report(memory_targets(figures), [figures_table(figures)], figures)


def memory_targets(figures: dict[str, Any]) -> list[Target]:
    """Require that memory does not grow with the number of lines."""
    phases = {
        phase: figures[f"mib_while_{phase}"] for phase in ("accepting", "finishing", "reading")
    }
    growth = {phase: max(samples[1:]) - samples[1] for phase, samples in phases.items()}
    return [
        at_most(f"growth of memory while {phase}", mib, MAX_GROWTH_MIB, "MiB")
        for phase, mib in growth.items()
    ]


# ---- kills


def _texts(url: str, job_id: str) -> dict[str, str]:
    """Return the texts by custom_id. Raises AssertionError if one comes twice or has an error."""
    answers = httpx.get(f"{url}/v1/batches/{job_id}/results", timeout=600).text.splitlines()
    parsed = [json.loads(answer) for answer in answers]
    counts = Counter(answer["custom_id"] for answer in parsed)
    assert all(count == 1 for count in counts.values()), counts.most_common(3)
    failed = [
        answer
        for answer in parsed
        if answer["response"] is None or answer["response"]["status_code"] != 200
    ]
    assert not failed, failed[:3]
    return {
        answer["custom_id"]: answer["response"]["body"]["choices"][0]["text"] for answer in parsed
    }


def _killed(num_kills: int, num_requests: int, rng: random.Random, folder: Path) -> dict[str, Any]:
    prompts = [" ".join(rng.choices(WORDS, k=rng.randint(2, 12))) for _ in range(num_requests)]
    lines = b"".join(_request(number, prompt) for number, prompt in enumerate(prompts))
    kills: Counter[str] = Counter()
    with ExitStack() as stack:
        server = Server(folder, stack)
        baseline = server.submit(lines)
        began = time.monotonic()
        server.wait_for(baseline, num_requests)
        baseline_s = time.monotonic() - began
        job = server.submit(lines)
        for number in range(num_kills):
            done = server.num_done(job)
            # between now and an even share of the remaining lines, so that lines are unfinished at
            # every kill
            server.wait_for(
                job,
                done + max(1, int((num_requests - done) / (num_kills - number + 1) * rng.random())),
            )
            victim = rng.choice(VICTIMS)
            done = server.num_done(job)
            assert done < num_requests, "all lines were finished before the last kill"
            console.print(
                f"kill {number + 1} of {num_kills}, with {done} of {num_requests} lines done:"
                f" {victim}"
            )
            server.kill(victim)
            kills[victim] += 1
        server.wait_for(job, num_requests)
        expected, got = _texts(server.url, baseline), _texts(server.url, job)
    assert expected.keys() == got.keys() == {f"r{number}" for number in range(num_requests)}
    different = [name for name in expected if expected[name] != got[name]]
    return {
        "requests": num_requests,
        "kills": dict(kills),
        "once": len(got),
        "different": len(different),
        "which": [(name, expected[name], got[name]) for name in different[:10]],
        "undisturbed_s": round(baseline_s, 1),
    }


def kills(options: argparse.Namespace) -> Report:
    """a server, stages and the Batch replica are killed"""
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="batch-") as folder:
        figures = _killed(options.kills, options.requests, rng, Path(folder))
    targets = [at_most("lines with another text", figures["different"], 0)]
    return Report(targets, [figures_table(figures)], figures)


# ---- interactive requests


@dataclass(frozen=True)
class Waits:
    """Milliseconds: medians and the maximum."""

    ttft: float
    worst_ttft: float
    itl: float


def one_stream(url: str, prompt: str) -> tuple[float, list[float]]:
    """Return the seconds until the first token, and between the others."""
    body = json.loads(_request(0, prompt))["body"] | {"stream": True}
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


def measure_waits(requests: int) -> dict[str, Waits]:
    """Measure on an idle server, and during a job."""
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        say("starting the server")
        server = Server(Path(folder), stack)
        streams(server.url, 10, rng)  # trains the policy's cost model
        say("streams on the idle server")
        idle = streams(server.url, requests, rng)
        prompts = [" ".join(rng.choices(WORDS, k=rng.randint(8, 60))) for _ in range(JOB_LINES)]
        job_id = server.submit(b"".join(_request(i, each, 64) for i, each in enumerate(prompts)))
        server.wait_for(job_id, 2 * SLOTS)
        say("streams during a job")
        loaded = streams(server.url, requests, rng)
        if server.num_done(job_id) > JOB_LINES - 2 * SLOTS:
            raise SystemExit("the job ended before the streams; raise JOB_LINES")
    return {"idle": idle, "during a job": loaded}


def interactive(options: argparse.Namespace) -> Report:
    """time to first token while a batch job uses all slots"""
    waits = measure_waits(options.requests)
    idle, loaded = waits.values()
    # twice the time on the idle server, and one micro-batch
    limit = 2 * idle.ttft + loaded.itl
    rows = [
        (name, *(f"{each:.0f} ms" for each in asdict(wait).values()))
        for name, wait in waits.items()
    ]
    return Report(
        [at_most("TTFT during a job, median", loaded.ttft, limit, "ms")],
        [table_of(("", "TTFT, median", "worst", "between tokens"), rows)],
        {"idle": asdict(idle), "next_to_a_batch": asdict(loaded)},
    )


DATABASE = "URL of the job store (default: a temporary SQLite file)"
PARTS = {
    "lines": Part(lines, {"--lines": 1_000_000, "--database": {"help": DATABASE}}),
    "kills": Part(kills, {"--kills": 20, "--requests": 5000, "--seed": 0}),
    "interactive": Part(interactive, {"--requests": 40}),
}


def main() -> None:
    conclude_part(__doc__, PARTS)


if __name__ == "__main__":
    main()
