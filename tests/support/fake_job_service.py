"""A JobService that does nothing but remember, and keys of which one is right."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import replace

from tramontane.proto.errors import RequestError, UnknownJobError
from tramontane.proto.jobs import Job, JobOptions, JobState, ResultLine
from tramontane.proto.request import RequestOutput, SequenceRequest
from tramontane.router.grpc.servicer import GrpcServicer
from tramontane.router.openai.served_model import ServedModel

NEW = Job("job-1", JobState.QUEUED, JobOptions(), 0, 0, 0, 0, created_at=1.5)


def some_lines(count: int) -> list[ResultLine]:
    return [ResultLine(number, count - number, f"id {number}", number % 2 == 1, "{}") for number in range(count)]


class ListedJobs:
    """A JobService whose job is done as soon as it is there; ``breaks`` streams end with the connection after two results."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.uploads: list[bytes] = []
        self.lines: list[ResultLine] = []
        self.asked: list[int] = []
        self.num_open = 0
        self.breaking: asyncio.Event | None = None

    async def submit(self, lines: AsyncIterator[bytes], options: JobOptions, request_key: str | None = None) -> Job:
        text = b"".join([piece async for piece in lines])
        if not text:
            raise RequestError("there is no line")
        self.uploads.append(text)
        job = replace(NEW, options=options, num_lines=text.count(b"\n"), error="none", started_at=2.5, ended_at=3.5)
        self.jobs[job.job_id] = job
        return job

    async def submit_url(self, url: str, options: JobOptions, request_key: str | None = None) -> Job:
        raise RequestError(f"{url} is not allowed")

    async def get(self, job_id: str) -> Job:
        if job_id not in self.jobs:
            raise UnknownJobError(f"there is no job {job_id!r:.60}")
        return self.jobs[job_id]

    async def list(self, limit: int, after: str | None = None) -> Sequence[Job]:
        if after is not None:
            await self.get(after)
        return [job for job in self.jobs.values() if job.job_id != after][:limit]

    async def cancel(self, job_id: str) -> Job:
        self.jobs[job_id] = replace(await self.get(job_id), state=JobState.CANCELLED)
        return self.jobs[job_id]

    async def watch(self, job_id: str) -> AsyncGenerator[Job, None]:
        job = await self.get(job_id)
        for state in (JobState.QUEUED, JobState.RUNNING):
            yield replace(job, state=state)
        await self._break()
        yield replace(job, state=JobState.COMPLETED)

    async def results(self, job_id: str, offset: int = 0) -> AsyncGenerator[ResultLine, None]:
        await self.get(job_id)
        self.asked.append(offset)
        self.num_open += 1
        try:
            for line in self.lines[offset:]:
                if line.offset == offset + 2:
                    await self._break()
                yield line
        finally:
            self.num_open -= 1

    async def _break(self) -> None:
        if self.breaking is not None:
            self.breaking.set()
            await asyncio.Event().wait()


class OneKey:
    def authenticate(self, authorization: str | None) -> int | None:
        return 0 if authorization == "Bearer right" else None


class NoTokens:
    """A TokenSource that is never asked."""

    def check_capacity(self, num_sequences: int, owner: int = 0) -> None:
        pass

    def generate(self, specs: Sequence[SequenceRequest]) -> AsyncGenerator[RequestOutput, None]:
        raise AssertionError(specs)


class JobsOnly(GrpcServicer):
    """A door in front of 2500 results, with a key."""

    def __init__(self) -> None:
        jobs = ListedJobs()
        jobs.lines = some_lines(2500)
        super().__init__(ServedModel("none", None, 1, 1, 1), NoTokens(), jobs, OneKey())
