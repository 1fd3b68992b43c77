"""The data model of batch jobs, and the operations of a job service."""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol

Endpoint = Literal[
    "/v1/completions", "/v1/chat/completions", "/v1/fim/completions", "/v1/responses"
]


class JobState(StrEnum):
    """Where a job is in its life."""

    QUEUED = "queued"  # every line is stored; no line has started
    RUNNING = "running"
    CANCELLING = "cancelling"  # lines that have started may finish, no other line starts
    COMPLETED = "completed"  # every line has a result or an error
    CANCELLED = "cancelled"
    FAILED = "failed"  # the job as a whole cannot run; ``Job.error`` says why

    @property
    def has_ended(self) -> bool:
        """Whether the state is final."""
        return self in (JobState.COMPLETED, JobState.CANCELLED, JobState.FAILED)


@dataclass(frozen=True, slots=True)
class JobOptions:
    """A client's options for its job. ``keeps_order``: results come in input order; otherwise in
    order of completion.
    """

    endpoint: Endpoint = "/v1/completions"
    keeps_order: bool = True
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Job:
    """A snapshot of a job. Times are seconds since 1970; ``num_invalid`` input lines are not
    requests and will not run.
    """

    job_id: str
    state: JobState
    options: JobOptions
    num_lines: int
    num_done: int  # with an answer
    num_failed: int  # with an error, invalid lines included
    num_invalid: int
    created_at: float
    started_at: float | None = None
    ended_at: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ResultLine:
    """The result of one input line."""

    offset: int  # counts the results of a job from 0, in the order in which they are returned
    line: int  # its number, from 1
    custom_id: str
    is_error: bool
    body: str  # a JSON object: the answer, or OpenAI's error object


class JobService(Protocol):
    """The jobs of one tenant: stores them, and guarantees that every accepted line ends exactly
    once.
    """

    async def submit(
        self, lines: AsyncIterator[bytes], options: JobOptions, request_key: str | None = None
    ) -> Job:
        """Store the pieces of a JSONL text, cut anywhere; the job is accepted once this returns.

        A submission that is repeated with its ``request_key`` is the same job; with other lines or
        other options it is refused.

        Raises RequestError if there are too many lines or none, OverloadedError if there are too
        many jobs.
        """
        ...

    async def submit_url(
        self, url: str, options: JobOptions, request_key: str | None = None
    ) -> Job:
        """Submit the contents of a URL, read by fsspec. Raises RequestError if the URL is not
        allowed or cannot be read.
        """
        ...

    async def get(self, job_id: str) -> Job:
        """Return the job as it is now. Raises UnknownJobError."""
        ...

    async def list(self, limit: int, after: str | None = None) -> Sequence[Job]:
        """Return the newest jobs first, starting behind the job ``after``. Raises
        UnknownJobError.
        """
        ...

    async def cancel(self, job_id: str) -> Job:
        """Cancel a job; a job that has ended does not change. Raises UnknownJobError."""
        ...

    def watch(self, job_id: str) -> AsyncGenerator[Job, None]:
        """Yield the job now and after every change, until it has ended. Raises UnknownJobError."""
        ...

    def results(self, job_id: str, offset: int = 0) -> AsyncGenerator[ResultLine, None]:
        """Yield every result from ``offset`` on, until the job has ended. Raises
        UnknownJobError.
        """
        ...
