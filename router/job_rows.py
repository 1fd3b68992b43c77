"""What the rows of jobs and lines mean, for all who read and write them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy import Connection, Row, select, update

from tramontane.router.job_tables import FAILED, PENDING, Database, jobs, lines
from tramontane.router.jobs import Endpoint, Job, JobOptions, JobState, ResultLine

SUBMITTING = "submitting"  # a state that nobody is told of: its lines are still coming in
DISCARDING = "discarding"  # nobody is told of this one either: its lines are being deleted, and none can be added
HIDDEN = (SUBMITTING, DISCARDING)
OPEN_STATES = [state.value for state in JobState if not state.has_ended]
ENDED_STATES = [state.value for state in JobState if state.has_ended]
RESULTS_AT_ONCE = 2**23  # characters


@dataclass(frozen=True, slots=True)
class StoredJob:
    """A job with what only OpenAI's shape of it needs."""

    job: Job
    number: int
    input_file: str | None
    output_file: str | None
    error_file: str | None
    cancelling_at: float | None


@dataclass(frozen=True, slots=True)
class StoredResult:
    """``http_status`` is None of a line that never ran."""

    line: ResultLine
    http_status: int | None


def error_text(message: str, kind: str, code: str | None) -> str:
    """OpenAI's error object as JSON."""
    return json.dumps({"message": message, "type": kind, "param": None, "code": code})


def tell(connection: Connection, job: int, places: Sequence[int]) -> None:
    """Give results of a job in free order their offsets, the next that there are. The job's row must be ours to write."""
    told = connection.execute(select(jobs.c.num_told).where(jobs.c.number == job)).scalar_one()
    for offset, place in enumerate(places, told):
        connection.execute(update(lines).where(lines.c.job == job, lines.c.place == place).values(told=offset))
    connection.execute(update(jobs).where(jobs.c.number == job).values(num_told=told + len(places)))


def read_results(
    database: Database, job: int, offset: int, limit: int, max_chars: int = RESULTS_AT_ONCE
) -> Sequence[StoredResult]:
    """One at least, if there is one; else within ``max_chars``."""
    wanted = select(lines).where(lines.c.job == job, lines.c.told >= offset).order_by(lines.c.told).limit(limit)
    found: list[StoredResult] = []
    room = max_chars
    with database.reading_in_pieces(wanted) as rows:
        for row in rows:
            room -= len(row.result or "")
            if row.state == PENDING or row.told != offset + len(found) or (found and room < 0):
                break
            line = ResultLine(row.told, row.line, row.custom_id or "", row.state == FAILED, row.result)
            found.append(StoredResult(line, row.http_status))
    return found


def stored_job(row: Row[Any]) -> StoredJob:
    options = JobOptions(cast("Endpoint", row.endpoint), row.keeps_order, json.loads(row.metadata))
    state = JobState.QUEUED if row.state == SUBMITTING else JobState(row.state)
    counts = (row.num_lines, row.num_done, row.num_failed, row.num_bad)
    job = Job(row.job_id, state, options, *counts, row.created_at, row.started_at, row.ended_at, row.error)
    return StoredJob(job, row.number, row.input_file, row.output_file, row.error_file, row.cancelling_at)
