"""Submissions: storing the lines of a new job until it is accepted; and deletion of jobs."""

import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from sqlalchemy import Connection, delete, exists, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from tramontane.proto.errors import FileTooLargeError, JobRefusedError, OverloadedError
from tramontane.proto.jobs import JobOptions, JobState
from tramontane.router.batch.database import FAILED, PENDING, Database, jobs, lines
from tramontane.router.batch.input_lines import InputLine, JobLimits, LineSplitter, ParsedLine, parse_line
from tramontane.router.batch.outcome_writer import JobThreadPool
from tramontane.router.batch.store import (
    DISCARDING,
    ENDED_STATES,
    HIDDEN,
    OPEN_STATES,
    SUBMITTING,
    StoredJob,
    assign_offsets,
    error_text,
    first_line_errors,
    stored_jobs,
    summarize_line_errors,
)
from tramontane.router.openai.errors import HttpErrorSpec

ABANDONED_TIMEOUT_S = 600.0  # a submission without progress for this time is deleted
TAKEOVER_TIMEOUT_S = 30.0  # a submission without progress for this time is replaced if its request is repeated
MAX_DELETED_LINES = 10_000  # of one transaction; others write in between
RETRY_AFTER_S = 30
BAD_LINE = HttpErrorSpec(400, "invalid_request_error", code="invalid_line")


class JobSubmissions:
    """Submissions to one ``queue``. Methods block: call them in a thread. ``clock``: seconds since 1970."""

    def __init__(self, database: Database, queue: str, limits: JobLimits, clock: Callable[[], float] = time.time) -> None:
        self._database, self._queue, self._limits, self._clock = database, queue, limits, clock

    def create(self, options: JobOptions, input_file: str | None = None, request_key: str | None = None) -> StoredJob:
        """Create a job to add lines to, which is invisible until it is accepted.

        Raises OverloadedError if there are too many, or if a request with this key is being submitted. A submission with this
        key that has made no progress for ``TAKEOVER_TIMEOUT_S`` is deleted: its process has most likely died.
        """
        now = self._clock()
        if request_key is not None and (number := self._still_submitting(request_key)) is not None:
            self.delete(number, now - TAKEOVER_TIMEOUT_S)
        row = {
            "job_id": f"batch_{uuid.uuid4().hex}",
            "queue": self._queue,
            "state": SUBMITTING,
            "endpoint": options.endpoint,
            "keeps_order": options.keeps_order,
            "metadata": json.dumps(dict(options.metadata)),
            "created_at": now,
            "touched_at": now,
            "input_file": input_file,
            "request_key": request_key,
        }
        is_open = jobs.c.state.in_([*OPEN_STATES, SUBMITTING])
        try:
            with self._database.writing() as connection:
                where = (jobs.c.queue == self._queue) & is_open
                num_open = connection.execute(select(func.count()).select_from(jobs).where(where)).scalar_one()
                if num_open >= self._limits.max_open_jobs:
                    raise OverloadedError(f"{num_open} batch jobs have not ended; submit this one later", RETRY_AFTER_S)
                connection.execute(insert(jobs).values(row))
                return stored_jobs(connection, connection.execute(select(jobs).where(jobs.c.job_id == row["job_id"])).all())[0]
        except IntegrityError as error:
            raise OverloadedError("the same request is being submitted already", 1) from error

    def _still_submitting(self, request_key: str) -> int | None:
        if not self._database.is_created:
            return None
        where = (jobs.c.queue == self._queue) & (jobs.c.request_key == request_key) & (jobs.c.state == SUBMITTING)
        with self._database.reading() as connection:
            return connection.execute(select(jobs.c.number).where(where)).scalar_one_or_none()

    def find_by_request_key(self, request_key: str) -> StoredJob | None:
        """Return the accepted job that a request with this key has created."""
        if not self._database.is_created:
            return None
        where = (jobs.c.queue == self._queue) & (jobs.c.request_key == request_key) & jobs.c.state.not_in(HIDDEN)
        with self._database.reading() as connection:
            found = stored_jobs(connection, connection.execute(select(jobs).where(where)).all())
        return found[0] if found else None

    def add_lines(self, job: StoredJob, first_place: int, new: Sequence[ParsedLine]) -> None:
        """Add lines, in input order and in one transaction. Without lines, only record that the submission makes progress."""
        keeps_order = job.job.options.keeps_order
        rows = [_row(job.number, first_place + i, line, keeps_order) for i, line in enumerate(new)]
        with self._database.writing() as connection:
            here = (jobs.c.number == job.number) & (jobs.c.state == SUBMITTING)
            values = {"num_lines": jobs.c.num_lines + len(rows), "touched_at": self._clock()}
            if connection.execute(update(jobs).where(here).values(values)).rowcount == 0:
                raise JobRefusedError("the submission made no progress for too long; submit it again")
            if rows:
                connection.execute(insert(lines), rows)
                _mark_repeated(connection, job.number, first_place)
                _count_bad(connection, job, first_place)

    def accept(self, job: StoredJob) -> StoredJob:
        """Accept a job: from now on it is durable. A job without a valid line fails at once.

        Raises JobRefusedError if it has no lines.
        """
        this = select(jobs).where(jobs.c.number == job.number)
        with self._database.writing() as connection:
            row = connection.execute(this.where(jobs.c.state == SUBMITTING).with_for_update()).one_or_none()
            if row is None:
                raise JobRefusedError("the submission made no progress for too long; submit it again")
            if row.num_lines == 0:
                raise JobRefusedError("the input has no lines")
            values: dict[str, Any] = {"state": JobState.QUEUED.value}
            if row.num_bad == row.num_lines:
                reason = summarize_line_errors(first_line_errors(connection, [job.number])[job.number], row.num_lines)
                values = {"state": JobState.FAILED.value, "ended_at": self._clock(), "error": reason}
            connection.execute(update(jobs).where(jobs.c.number == job.number).values(values))
            return stored_jobs(connection, connection.execute(this).all())[0]

    def delete(self, number: int, touched_before: float | None = None) -> None:
        """Delete a submission, unless it was accepted, or has made progress since ``touched_before``."""
        here = (jobs.c.number == number) & (jobs.c.state == SUBMITTING)
        if touched_before is not None:
            here &= jobs.c.touched_at < touched_before
        with self._database.writing() as connection:  # its request key becomes free at once
            if connection.execute(update(jobs).where(here).values(state=DISCARDING, request_key=None)).rowcount == 0:
                return
        self._delete(number)

    def _delete(self, number: int) -> None:
        """Delete a job in state DISCARDING; several processes may do so at once."""
        of_job = lines.c.job == number
        selected = select(lines.c.place).where(of_job).limit(MAX_DELETED_LINES).scalar_subquery()
        while True:
            with self._database.writing() as connection:
                if connection.execute(delete(lines).where(of_job, lines.c.place.in_(selected))).rowcount == 0:
                    connection.execute(delete(jobs).where(jobs.c.number == number, jobs.c.state == DISCARDING))
                    return

    def discard_ended(self, before: float) -> None:
        """Delete jobs that ended before this time, with their lines. Files are deleted separately."""
        where = (jobs.c.queue == self._queue) & jobs.c.state.in_(ENDED_STATES) & (jobs.c.ended_at < before)
        with self._database.reading() as connection:
            numbers = connection.execute(select(jobs.c.number).where(where)).scalars().all()
        for number in numbers:
            with self._database.writing() as connection:
                values = {"state": DISCARDING, "request_key": None}
                connection.execute(update(jobs).where(where, jobs.c.number == number).values(values))
            self._delete(number)

    def delete_abandoned(self) -> None:
        """Delete submissions and unfinished deletions of processes that died."""
        touched_before = self._clock() - ABANDONED_TIMEOUT_S
        is_old = (jobs.c.state == SUBMITTING) & (jobs.c.touched_at < touched_before)
        where = (jobs.c.queue == self._queue) & (is_old | (jobs.c.state == DISCARDING))
        with self._database.reading() as connection:
            rows = connection.execute(select(jobs.c.number, jobs.c.state).where(where)).all()
        for row in rows:
            if row.state == SUBMITTING:
                self.delete(row.number, touched_before)
            else:
                self._delete(row.number)


def _row(job: int, place: int, line: ParsedLine, keeps_order: bool) -> dict[str, Any]:
    return {
        "job": job,
        "place": place,
        "line": line.number,
        "custom_id": line.custom_id,
        "text": line.text,
        "state": FAILED if line.problem else PENDING,
        "told": place if keeps_order else None,
        "result": error_text(line.problem, BAD_LINE) if line.problem else None,
    }


def _mark_repeated(connection: Connection, job: int, first_place: int) -> None:
    """Mark new lines whose custom_id is that of an earlier valid line as failed.

    ``+ 0`` makes the database use the index of custom_ids, which has few matches, and not that of places.
    """
    earlier = lines.alias("earlier")
    same = (earlier.c.job == lines.c.job) & (earlier.c.custom_id == lines.c.custom_id) & (earlier.c.place + 0 < lines.c.place)
    new = (lines.c.job == job) & (lines.c.place >= first_place) & (lines.c.state == PENDING)
    repeated = select(lines.c.place, lines.c.line).where(new, exists().where(same, earlier.c.text.is_not(None)))
    for place, line in connection.execute(repeated).all():
        problem = error_text(f"line {line}: its custom_id is that of an earlier line", BAD_LINE)
        this = (lines.c.job == job) & (lines.c.place == place)
        connection.execute(update(lines).where(this).values(state=FAILED, result=problem))


def _count_bad(connection: Connection, job: StoredJob, first_place: int) -> None:
    bad = select(lines.c.place).where(lines.c.job == job.number, lines.c.place >= first_place, lines.c.state == FAILED)
    places = connection.execute(bad.order_by(lines.c.place)).scalars().all()
    if places and not job.job.options.keeps_order:
        assign_offsets(connection, job.number, places)
    values = {"num_bad": jobs.c.num_bad + len(places), "num_failed": jobs.c.num_failed + len(places)}
    connection.execute(update(jobs).where(jobs.c.number == job.number).values(values))


MAX_LINES, MAX_LINE_BYTES = 1000, 2**20  # of one transaction
SPLIT_BYTES = 2**16  # that are split at once: threads are shared, and a mebibyte of line ends takes a second
ADD_INTERVAL_S = 10.0  # of a slow submission; well below TAKEOVER_TIMEOUT_S


class JobIngest:
    """Splits, validates and stores the lines of one job, in the threads of jobs."""

    def __init__(
        self, job: StoredJob, submissions: JobSubmissions, threads: JobThreadPool, limits: JobLimits, clock: Callable[[], float]
    ) -> None:
        self._job, self._submissions, self._threads, self._limits, self._clock = job, submissions, threads, limits, clock
        self._splitter = LineSplitter(limits.max_line_bytes)
        self._ready: list[InputLine] = []
        self._ready_bytes = self._place = 0
        self._added_at = clock()

    async def run(self, pieces: AsyncIterator[bytes]) -> None:
        """Store all lines. Raises FileTooLargeError, or JobRefusedError if there are too many lines."""
        buffer, num_bytes = bytearray(), 0
        async for piece in pieces:
            num_bytes += len(piece)
            if num_bytes > self._limits.max_bytes:
                raise FileTooLargeError(f"the input is larger than {self._limits.max_bytes} bytes; split it")
            buffer += piece
            while len(buffer) >= SPLIT_BYTES:
                part = bytes(buffer[:SPLIT_BYTES])
                del buffer[:SPLIT_BYTES]
                await self._threads.run(self._feed, part)
            if self._clock() - self._added_at > ADD_INTERVAL_S:
                await self._threads.run(self._feed_and_add, bytes(buffer))
                buffer.clear()
        await self._threads.run(self._finish, bytes(buffer))

    def _feed(self, part: bytes) -> None:
        for line in self._splitter.feed(part):
            self._append_line(line)

    def _feed_and_add(self, part: bytes) -> None:
        self._feed(part)
        self._add()

    def _finish(self, part: bytes) -> None:
        self._feed(part)
        for line in self._splitter.finish():
            self._append_line(line)
        if self._ready:
            self._add()

    def _append_line(self, line: InputLine) -> None:
        if line.number > self._limits.max_lines:
            raise JobRefusedError(f"the input has more than {self._limits.max_lines} lines; split it")
        if line.text is not None and not line.text.strip():
            return
        self._ready.append(line)
        self._ready_bytes += len(line.text or b"")
        if len(self._ready) == MAX_LINES or self._ready_bytes > MAX_LINE_BYTES:
            self._add()

    def _add(self) -> None:
        """Add the lines that are ready, or record progress if there are none."""
        endpoint, max_bytes = self._job.job.options.endpoint, self._limits.max_line_bytes
        self._submissions.add_lines(self._job, self._place, [parse_line(line, endpoint, max_bytes) for line in self._ready])
        self._place, self._added_at = self._place + len(self._ready), self._clock()
        self._ready, self._ready_bytes = [], 0
