"""Batch jobs in tests: a store, an engine that echoes, and services, claims and runners on both."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tramontane.proto.jobs import ResultLine
from tramontane.router.batch.claims import JobClaimStore
from tramontane.router.batch.database import Database
from tramontane.router.batch.files import JobStorage
from tramontane.router.batch.input_lines import JobLimits
from tramontane.router.batch.runner import Answer, BatchRunner
from tramontane.router.batch.service import BatchService, JobSettings

LIMITS = JobLimits(max_line_bytes=2000, max_lines=5000, max_bytes=2**20, max_open_jobs=20)
POLL_S = 0.005


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def echo(_endpoint: str, body: dict[str, Any], _tenant: str = "") -> dict[str, Any]:
    return {"said": body["prompt"]}


def request(custom_id: str, prompt: object, **more: object) -> bytes:
    line = {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": prompt},
    }
    return json.dumps(line | more).encode() + b"\n"


def requests(count: int) -> bytes:
    return b"".join(request(f"r{i}", i) for i in range(count))


async def pieces(text: bytes, size: int = 7919) -> AsyncIterator[bytes]:
    for start in range(0, len(text), size):
        yield text[start : start + size]


@dataclass
class BatchHarness:
    """A job store at the URL ``database``. Every runner has claims of its own unless it is given
    some.
    """

    database: str
    storage: str
    clock: Clock = field(default_factory=Clock)
    # functions that close what was opened
    opened: list[Callable[[], None]] = field(default_factory=list)

    def service(
        self,
        queue: str = "tiny",
        keep_s: float | None = None,
        limits: JobLimits | None = None,
        **more: Any,
    ) -> BatchService:
        settings = JobSettings(
            self.database,
            self.storage,
            queue,
            limits=replace(limits or LIMITS, keep_s=keep_s),
            **more,
        )
        service = BatchService(settings, self.clock, POLL_S, self.clock)
        self.opened.append(service.close)
        return service

    def claims(self, queue: str = "tiny") -> JobClaimStore:
        database = Database(self.database)
        self.opened.append(database.close)
        return JobClaimStore(database, queue, self.clock, steady_clock=self.clock)

    def close(self) -> None:
        for close in self.opened:
            close()

    def runner(
        self, answer: Answer = echo, concurrency: int = 8, claims: JobClaimStore | None = None
    ) -> BatchRunner:
        async def turn(_seconds: float) -> None:
            await asyncio.sleep(POLL_S)

        return BatchRunner(
            claims or self.claims(), JobStorage(self.storage), answer, concurrency, sleep=turn
        )

    @asynccontextmanager
    async def running(self, runner: BatchRunner) -> AsyncIterator[None]:
        task = asyncio.create_task(runner.run())
        try:
            yield
        finally:
            assert not task.done(), task.result()
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


def new_batch_harness(folder: Path) -> BatchHarness:
    return BatchHarness(f"sqlite:///{folder}/deep/jobs.sqlite", f"{folder}/storage")


async def all_results(service: BatchService, job_id: str) -> Sequence[ResultLine]:
    return [line async for line in service.results(job_id)]


def run_until_killed(database: str, storage: str, now: float, num_answers: int) -> None:
    """A runner that answers at most ``num_answers`` lines, so that however late it is killed,
    others remain.
    """
    harness = BatchHarness(database, storage)
    harness.clock.now = now
    left = asyncio.Semaphore(num_answers)

    async def answer(_endpoint: str, body: dict[str, Any], _tenant: str = "") -> dict[str, Any]:
        await left.acquire()
        await asyncio.sleep(0.01)
        return {"said": body["prompt"]}

    asyncio.run(harness.runner(answer).run())
