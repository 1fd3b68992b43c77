"""OpenAI's format of batch jobs and files: models of requests and responses, and their
construction.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Generic, Literal, Self, TypeVar

from pydantic import Field

from tramontane.proto.errors import ParameterError
from tramontane.proto.jobs import Endpoint, JobOptions, JobState
from tramontane.router.batch.files import FileRecord
from tramontane.router.batch.store import BatchError, StoredJob, StoredResult
from tramontane.router.openai.completion_request import parse_body
from tramontane.router.openai.errors import printable_name
from tramontane.router.openai.response_models import Answer
from tramontane.router.structured.request_model import (
    NoEffect,
    RequestBody,
    default_if_null,
    intended_name,
)

MAX_LIST = 100
MAX_FILE_LIST = 10_000
Status = Literal["validating", "in_progress", "cancelling", "completed", "cancelled", "failed"]
STATUS: Mapping[JobState, Status] = {
    JobState.QUEUED: "validating",
    JobState.RUNNING: "in_progress",
    JobState.CANCELLING: "cancelling",
    JobState.COMPLETED: "completed",
    JobState.CANCELLED: "cancelled",
    JobState.FAILED: "failed",
}


class BatchRequest(RequestBody):
    """Body of ``POST /v1/batches``. ``keeps_order`` is our extension."""

    input_file_id: Annotated[str, Field(max_length=256)]
    endpoint: Endpoint
    completion_window: Annotated[Literal["24h"], default_if_null("24h")] = "24h"
    metadata: Annotated[dict[str, str], default_if_null({})] = Field(default_factory=dict)
    keeps_order: Annotated[bool, default_if_null(True)] = True
    output_expires_after: NoEffect = None

    @property
    def options(self) -> JobOptions:
        """The job's options."""
        return JobOptions(self.endpoint, self.keeps_order, self.metadata)


def parse_batch(body: bytes) -> BatchRequest:
    """Parse a body. Raises ParameterError."""
    return parse_body(BatchRequest, body)


class BatchErrors(Answer):
    """Errors of a job without a valid line."""

    object: Literal["list"]
    data: list[BatchError]


class RequestCounts(Answer):
    """Progress of a job."""

    total: int
    completed: int
    failed: int


class Batch(Answer):
    """A job. Times are seconds since 1970."""

    id: str
    object: Literal["batch"]
    endpoint: Endpoint
    errors: BatchErrors | None
    input_file_id: str
    completion_window: Literal["24h"]  # the only value that OpenAI has; our jobs run until they end
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int | None
    finalizing_at: None
    expired_at: None
    cancelling_at: int | None
    completed_at: int | None
    cancelled_at: int | None
    failed_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


def batch_answer(stored: StoredJob, keep_s: float | None) -> Batch:
    """Format a job. Times are whole seconds since 1970, as in OpenAI's API; the job expires
    ``keep_s`` after its end.
    """
    job, errors = stored.job, list(stored.problems)
    ended_at = {job.state: _to_seconds(job.ended_at)}
    return Batch(
        id=job.job_id,
        object="batch",
        endpoint=job.options.endpoint,
        errors=BatchErrors(object="list", data=errors) if errors else None,
        input_file_id=stored.input_file or "",
        completion_window="24h",
        status=STATUS[job.state],
        output_file_id=stored.output_file,
        error_file_id=stored.error_file,
        created_at=int(job.created_at),
        in_progress_at=_to_seconds(job.started_at),
        expires_at=_expires_at(job.ended_at, keep_s),
        finalizing_at=None,
        expired_at=None,
        cancelling_at=_to_seconds(stored.cancelling_at),
        completed_at=ended_at.get(JobState.COMPLETED),
        cancelled_at=ended_at.get(JobState.CANCELLED),
        failed_at=ended_at.get(JobState.FAILED),
        request_counts=RequestCounts(
            total=job.num_lines, completed=job.num_done, failed=job.num_failed
        ),
        metadata=dict(job.options.metadata) or None,
    )


def result_line(job_id: str, result: StoredResult) -> bytes:
    """Format a result. A line that never ran has an error and no response; a line that failed has a
    response with the error.
    """
    line = result.line
    answered = result.http_status is not None
    name = f"{job_id.removeprefix('batch_')}_{line.line}"  # the same each time it is written
    head = json.dumps({"id": f"batch_req_{name}", "custom_id": line.custom_id or None})[:-1]
    body = f'{{"error": {line.body}}}' if line.is_error else line.body
    response = (
        f'{{"status_code": {result.http_status}, "request_id": "req_{name}", "body": {body}}}'
        if answered
        else "null"
    )
    error = "null" if answered else _short_error(line.body, line.line)
    return f'{head}, "response": {response}, "error": {error}}}\n'.encode()


def _short_error(body: str, line: int) -> str:
    error = json.loads(body)
    return json.dumps({"code": error["code"], "message": error["message"], "line": line})


def _to_seconds(time_s: float | None) -> int | None:
    return None if time_s is None else int(time_s)


def _expires_at(time_s: float | None, keep_s: float | None) -> int | None:
    return None if time_s is None or keep_s is None else int(time_s + keep_s)


class StoredFile(Answer):
    """A file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"]
    expires_at: int | None


def file_answer(file: FileRecord, keep_s: float | None) -> StoredFile:
    """Format a file, which expires ``keep_s`` after its creation."""
    return StoredFile(
        id=file.file_id,
        object="file",
        bytes=file.num_bytes,
        created_at=int(file.created_at),
        filename=file.filename,
        purpose=file.purpose,
        status="processed",
        expires_at=_expires_at(file.created_at, keep_s),
    )


Item = TypeVar("Item", StoredFile, Batch)


class Page(Answer, Generic[Item]):
    """A page of a list."""

    object: Literal["list"]
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def of(cls, items: Sequence[Item], limit: int) -> Self:
        """Return the page. ``items`` has one more than ``limit`` if there are more."""
        data = list(items[:limit])
        first_id, last_id = (data[0].id, data[-1].id) if data else (None, None)
        return cls(
            object="list",
            data=data,
            first_id=first_id,
            last_id=last_id,
            has_more=len(items) > limit,
        )


class FileList(Page[StoredFile]):
    """A page of files."""


class BatchList(Page[Batch]):
    """A page of jobs."""


def parse_limit(query: Mapping[str, str], default: int, maximum: int) -> int:
    """Return the parameter ``limit``. Raises ParameterError."""
    given = query.get("limit", str(default))
    if not (
        given.isascii() and given.isdecimal() and len(given) < 10 and 1 <= int(given) <= maximum
    ):
        raise ParameterError(
            f"limit is {given!r:.60}; it must be a whole number from 1 to {maximum}", "limit"
        )
    return int(given)


def parse_choice(query: Mapping[str, str], name: str, *allowed: str) -> str | None:
    """Return a parameter that is one of ``allowed``, or None if it is not given. Raises
    ParameterError.
    """
    given = query.get(name)
    if given is not None and given not in allowed:
        raise ParameterError(f"{name} is {given!r:.60}; it must be {' or '.join(allowed)}", name)
    return given


def unused_names(
    given: Iterable[str], known: Sequence[str], neutral: Sequence[str] = ()
) -> tuple[str, list[str]]:
    """Return the first name of a query or a form that is not known, "" if there is none, and all
    that have no effect. Raises ParameterError for a misspelling.

    ``neutral``: names that are known to have no effect.
    """
    unused = sorted(set(given).difference(known))
    unknown = [name for name in unused if name not in neutral]
    for name in unknown:
        if meant := intended_name(name, (*known, *neutral)):
            shown = printable_name(name)
            raise ParameterError(
                f"{shown} is not a parameter of this endpoint; did you mean {meant}?", shown
            )
    return (printable_name(unknown[0]) if unknown else ""), unused
