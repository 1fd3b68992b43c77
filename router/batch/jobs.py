"""The vocabulary of batch jobs: what a job is, and what doors may ask of whoever keeps and runs them."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol

Endpoint = Literal["/v1/completions", "/v1/chat/completions"]


class JobState(StrEnum):
    QUEUED = "queued"  # every line is stored; none has begun
    RUNNING = "running"
    CANCELLING = "cancelling"  # lines that have begun may end, no other begins
    COMPLETED = "completed"  # every line has a result or an error
    CANCELLED = "cancelled"
    FAILED = "failed"  # the job as a whole cannot go on; ``Job.error`` says why

    @property
    def has_ended(self) -> bool:
        return self in (JobState.COMPLETED, JobState.CANCELLED, JobState.FAILED)


@dataclass(frozen=True, slots=True)
class JobOptions:
    """``keeps_order``: results come in the order of the input; else as they are ready."""

    endpoint: Endpoint = "/v1/completions"
    keeps_order: bool = True
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Job:
    """A job as it is now. Times are seconds since 1970; ``num_bad`` lines of the input are no requests and will not run."""

    job_id: str
    state: JobState
    options: JobOptions
    num_lines: int
    num_done: int  # with an answer
    num_failed: int  # with an error, bad lines included
    num_invalid: int
    created_at: float
    started_at: float | None = None
    ended_at: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ResultLine:
    """What became of one line of the input. ``offset`` counts the results of a job from 0 in the order they are told.

    ``line`` is the number of the line, from 1. ``body`` is a JSON object: the answer, or OpenAI's error object if ``is_error``.
    """

    offset: int
    line: int
    custom_id: str
    is_error: bool
    body: str


class JobService(Protocol):
    """Keeps jobs, and sees to it that every accepted line ends exactly once."""

    async def submit(self, lines: AsyncIterator[bytes], options: JobOptions, request_key: str | None = None) -> Job:
        """Store the pieces of a JSONL text, cut anywhere; the job is accepted once this returns.

        A submission that comes again with its ``request_key`` is the same job, and its lines are not read; with other options it
        is refused.

        Raises RequestError if there are too many lines or none, OverloadedError if there is no room for it.
        """
        ...

    async def submit_url(self, url: str, options: JobOptions, request_key: str | None = None) -> Job:
        """As ``submit``, read from where fsspec finds it. Raises RequestError if that is not allowed or cannot be read."""
        ...

    async def get(self, job_id: str) -> Job:
        """Raises UnknownJobError."""
        ...

    async def list(self, limit: int, after: str | None = None) -> Sequence[Job]:
        """The newest first, beginning behind the job ``after``. Raises UnknownJobError."""
        ...

    async def cancel(self, job_id: str) -> Job:
        """Of a job that has ended nothing changes. Raises UnknownJobError."""
        ...

    def watch(self, job_id: str) -> AsyncIterator[Job]:
        """The job now, and again whenever it has changed, until it has ended. Raises UnknownJobError."""
        ...

    def results(self, job_id: str, offset: int = 0) -> AsyncIterator[ResultLine]:
        """From this result on, until the job has ended and all have been told. Raises UnknownJobError."""
        ...
