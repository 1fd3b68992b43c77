"""A JobService that only stores jobs, and API keys of which one is valid."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import replace

from tramontane.proto.errors import RequestError, UnknownJobError
from tramontane.proto.jobs import Job, JobOptions, JobState, ResultLine
from tramontane.proto.request import Identity, Request, RequestOutput
from tramontane.router.grpc.servicer import GrpcServicer
from tramontane.router.openai.served_model import ServedModel

NEW = Job("job-1", JobState.QUEUED, JobOptions(), 0, 0, 0, 0, created_at=1.5)


def some_lines(count: int) -> list[ResultLine]:
    return [
        ResultLine(number, count - number, f"id {number}", number % 2 == 1, "{}")
        for number in range(count)
    ]


class FakeJobService:
    """A JobService whose jobs are complete at once. With ``breaking`` set, streams of results hang
    after two results.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.uploads: list[bytes] = []
        self.lines: list[ResultLine] = []
        self.requested: list[int] = []
        self.num_open = 0
        self.breaking: asyncio.Event | None = None

    async def submit(
        self, lines: AsyncIterator[bytes], options: JobOptions, request_key: str | None = None
    ) -> Job:
        text = b"".join([piece async for piece in lines])
        if not text:
            raise RequestError("there is no line")
        self.uploads.append(text)
        job = replace(
            NEW,
            options=options,
            num_lines=text.count(b"\n"),
            error="none",
            started_at=2.5,
            ended_at=3.5,
        )
        self.jobs[job.job_id] = job
        return job

    async def submit_url(
        self, url: str, options: JobOptions, request_key: str | None = None
    ) -> Job:
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
        self.requested.append(offset)
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
    def authenticate(self, authorization: str | None) -> Identity | None:
        return Identity() if authorization == "Bearer right" else None


class NoTokens:
    """A TokenSource that must not be called."""

    def check_capacity(self, num_sequences: int, owner: int = 0) -> None:
        pass

    def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        raise AssertionError(request)


class JobsServicer(GrpcServicer):
    """A servicer with 2500 results of jobs, behind an API key."""

    def __init__(self) -> None:
        jobs = FakeJobService()
        jobs.lines = some_lines(2500)
        super().__init__(
            ServedModel("none", None, 1, 1, 1), NoTokens(), lambda _tenant: jobs, OneKey()
        )
