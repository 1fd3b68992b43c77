"""Benchmark of batch jobs: a million lines with an engine that echoes, or a real server that is
killed repeatedly.

    python tests/bench/batch.py [--lines 1000000] [--database URL]
    python tests/bench/batch.py --kills 20 [--requests 5000] [--seed 0]

The first form reports how many lines per second are accepted and finished, and the memory over
time, which must not grow with the number of lines; then it pages through the list of jobs. The
second form runs ``tramontane serve`` with the demo model and kills the server, a stage or the Batch
replica with SIGKILL at random moments while lines are unfinished. It then requires every line
exactly once, with the text of the same job without kills. Both print JSON.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import httpx
import psutil
from batch_server import Server
from rich.console import Console
from targets import Target, at_most, conclude

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
SPEECH = "ROMEO speak my lord what news from Rome and the tribunes good morrow neighbour "
WORDS = f"{SPEECH} who is there".split()
console = Console(stderr=True, highlight=False)


def _request(number: int, prompt: str) -> bytes:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument(
        "--database", help="URL of the job store (default: a temporary SQLite file)"
    )
    parser.add_argument(
        "--kills", type=int, help="number of kills of a real server; without it the engine echoes"
    )
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="batch-") as name:
        folder = Path(name)
        if options.kills is None:
            database = options.database or f"sqlite:///{folder}/jobs.sqlite"
            figures = asyncio.run(_many(options.lines, database, folder))
            targets = memory_targets(figures)
        else:
            figures = _killed(options.kills, options.requests, random.Random(options.seed), folder)
            targets = [at_most("lines with another text", figures["different"], 0)]
    conclude(targets, data=figures, as_json=True)


if __name__ == "__main__":
    main()
