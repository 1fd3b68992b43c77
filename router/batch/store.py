"""Accepted jobs in the database: read, cancel, return results; and helpers that interpret rows of
jobs and lines.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy import ColumnElement, Connection, Row, select, update

from tramontane.proto.errors import UnknownJobError
from tramontane.proto.jobs import Endpoint, Job, JobOptions, JobState, ResultLine
from tramontane.router.batch.database import FAILED, PENDING, Database, Scope, jobs, lines
from tramontane.router.openai.response_models import Answer

NUM_SHOWN = 3


class BatchError(Answer):
    """An error of an input line. ``message`` starts with its number: ``line 2: it is not JSON``."""

    code: str
    message: str
    line: int | None
    param: str | None


def summarize_line_errors(problems: Sequence[BatchError], num_lines: int) -> str:
    """Summarize in one line why a job without a valid line failed. Equal ``problems`` of the first
    lines are shown once.
    """
    by_text: dict[str, str] = {}
    for problem in problems:
        by_text.setdefault(problem.message.removeprefix(f"line {problem.line}: "), problem.message)
    shown = list(by_text.values())[:NUM_SHOWN]
    more = [f"and {num_lines - len(shown)} more"] if num_lines > len(shown) else []
    which = (
        f"none of the {num_lines} lines is a request"
        if num_lines > 1
        else "the only line is not a request"
    )
    return f"{which}: {'; '.join([*shown, *more])}"


SUBMITTING = "submitting"  # an internal state: its lines are still arriving
DISCARDING = "discarding"  # an internal state: its lines are being deleted, none can be added
HIDDEN = (SUBMITTING, DISCARDING)
OPEN_STATES = [state.value for state in JobState if not state.has_ended]
ENDED_STATES = [state.value for state in JobState if state.has_ended]
MAX_RESULT_CHARS = 2**23  # characters that are read at once
MAX_PROBLEMS = 20  # problems shown with a job; all are in its results


@dataclass(frozen=True, slots=True)
class StoredJob:
    """A job with the fields that only OpenAI's format needs."""

    job: Job
    number: int
    input_file: str | None
    output_file: str | None
    error_file: str | None
    cancelling_at: float | None
    problems: Sequence[BatchError] = ()  # of its first lines, if no line is valid
    input_digest: str | None = None


@dataclass(frozen=True, slots=True)
class StoredResult:
    """A result; ``http_status`` is None if the line never ran."""

    line: ResultLine
    http_status: int | None


def error_text(body: Mapping[str, Any]) -> str:
    """Return OpenAI's error object of a response's body as JSON."""
    return json.dumps(body["error"])


def assign_offsets(connection: Connection, job: int, places: Sequence[int]) -> None:
    """Assign the next free offsets to results of a job that does not keep order. The caller has
    locked the job's row.
    """
    first = connection.execute(select(jobs.c.num_offsets).where(jobs.c.number == job)).scalar_one()
    for offset, place in enumerate(places, first):
        connection.execute(
            update(lines).where(lines.c.job == job, lines.c.place == place).values(offset=offset)
        )
    connection.execute(
        update(jobs).where(jobs.c.number == job).values(num_offsets=first + len(places))
    )


def read_results(
    database: Database, job: int, offset: int, limit: int, max_chars: int = MAX_RESULT_CHARS
) -> Sequence[StoredResult]:
    """Return results from ``offset`` on: at least one, if there is one, and else at most
    ``max_chars``.
    """
    wanted = (
        select(lines)
        .where(lines.c.job == job, lines.c.offset >= offset)
        .order_by(lines.c.offset)
        .limit(limit)
    )
    found: list[StoredResult] = []
    num_left = max_chars
    with database.stream_rows(wanted) as rows:
        for row in rows:
            num_left -= len(row.result or "")
            if (
                row.state == PENDING
                or row.offset != offset + len(found)
                or (found and num_left < 0)
            ):
                break
            line = ResultLine(
                row.offset, row.line, row.custom_id or "", row.state == FAILED, row.result
            )
            found.append(StoredResult(line, row.http_status))
    return found


def stored_jobs(connection: Connection, rows: Sequence[Row[Any]]) -> list[StoredJob]:
    """Convert rows of jobs."""
    problems = first_line_errors(
        connection, [row.number for row in rows if row.state == JobState.FAILED]
    )
    return [_stored_job(row, problems.get(row.number, ())) for row in rows]


def first_line_errors(
    connection: Connection, failed: Sequence[int]
) -> Mapping[int, Sequence[BatchError]]:
    """Return the errors of the first lines of jobs without a valid line, by their numbers."""
    found: dict[int, list[BatchError]] = {}
    if failed:
        wanted = select(lines.c.job, lines.c.line, lines.c.result).where(
            lines.c.job.in_(failed), lines.c.offset < MAX_PROBLEMS
        )
        for row in connection.execute(wanted.order_by(lines.c.job, lines.c.offset)):
            error = json.loads(row.result)
            problem = BatchError(
                code=error["code"], message=error["message"], line=row.line, param=None
            )
            found.setdefault(row.job, []).append(problem)
    return found


def _stored_job(row: Row[Any], problems: Sequence[BatchError]) -> StoredJob:
    options = JobOptions(cast("Endpoint", row.endpoint), row.keeps_order, json.loads(row.metadata))
    state = JobState.QUEUED if row.state == SUBMITTING else JobState(row.state)
    counts = (row.num_lines, row.num_done, row.num_failed, row.num_bad)
    job = Job(
        row.job_id, state, options, *counts, row.created_at, row.started_at, row.ended_at, row.error
    )
    files = (row.input_file, row.output_file, row.error_file)
    return StoredJob(job, row.number, *files, row.cancelling_at, problems, row.input_digest)


class JobStore:
    """The accepted jobs of one scope. Methods block: call them in a thread. ``clock``: seconds
    since 1970.
    """

    def __init__(
        self, database: Database, scope: Scope, clock: Callable[[], float] = time.time
    ) -> None:
        self._database, self._scope, self._clock = database, scope, clock

    def get(self, job_id: str) -> StoredJob:
        """Return a job. Raises UnknownJobError."""
        if self._database.is_created and "\0" not in job_id:  # PostgreSQL cannot compare a NUL
            with self._database.reading() as connection:
                found = stored_jobs(
                    connection, connection.execute(select(jobs).where(self._where_id(job_id))).all()
                )
            if found:
                return found[0]
        raise UnknownJobError(f"there is no batch job {job_id!r:.80}")

    def list(self, limit: int, after: str | None = None) -> Sequence[StoredJob]:
        """Return the newest jobs first, starting behind the job ``after``. Raises
        UnknownJobError.
        """
        where = self._scope.where(jobs) & jobs.c.state.not_in(HIDDEN)
        if after is not None:
            where &= jobs.c.number < self.get(after).number
        if not self._database.is_created:
            return []
        with self._database.reading() as connection:
            rows = connection.execute(
                select(jobs).where(where).order_by(jobs.c.number.desc()).limit(limit)
            ).all()
            return stored_jobs(connection, rows)

    def cancel(self, job_id: str) -> StoredJob:
        """Ask the job's runner to cancel it. Raises UnknownJobError."""
        self.get(job_id)
        cancellable = [JobState.QUEUED.value, JobState.RUNNING.value]
        where = self._where_id(job_id) & jobs.c.state.in_(cancellable)
        values = {"state": JobState.CANCELLING.value, "cancelling_at": self._clock()}
        self._database.write(update(jobs).where(where).values(values))
        return self.get(job_id)

    def results(
        self, job: StoredJob, offset: int, limit: int, max_chars: int = MAX_RESULT_CHARS
    ) -> Sequence[StoredResult]:
        """Return results from ``offset`` on, up to the first line that is not done."""
        return read_results(self._database, job.number, offset, limit, max_chars)

    def _where_id(self, job_id: str) -> ColumnElement[bool]:
        return self._scope.where(jobs) & (jobs.c.job_id == job_id) & jobs.c.state.not_in(HIDDEN)
