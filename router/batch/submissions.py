"""Submissions: jobs on their way into the database, invisible until they are accepted; and deletion
of jobs.
"""

import hashlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError

from tramontane.proto.errors import FileTooLargeError, JobRefusedError, OverloadedError
from tramontane.proto.jobs import JobOptions, JobState
from tramontane.proto.timing import ADD_INTERVAL_S, TAKEOVER_TIMEOUT_S
from tramontane.proto.units import format_bytes
from tramontane.router.batch.change_watch import ChangeWatch, is_stale
from tramontane.router.batch.database import FAILED, PENDING, Database, JobThreadPool, jobs, lines
from tramontane.router.batch.input_lines import (
    InputLine,
    JobLimits,
    LineSplitter,
    ParsedLine,
    parse_line,
)
from tramontane.router.batch.quotas import TenantQuota
from tramontane.router.batch.store import (
    DISCARDING,
    ENDED_STATES,
    HIDDEN,
    SUBMITTING,
    StoredJob,
    error_text,
    first_line_errors,
    stored_jobs,
    summarize_line_errors,
)
from tramontane.router.openai.errors import error_body

ABANDONED_TIMEOUT_S = 600.0  # a submission without progress for this time is deleted
MAX_DELETED_LINES = 10_000  # of one transaction; other transactions write in between


class JobSubmissions:
    """Submissions of one tenant, and deletion of jobs of all tenants. Methods block: call them in a
    thread.

    ``clock``: seconds since 1970; ``steady_clock``: seconds that never go back.
    """

    def __init__(
        self,
        database: Database,
        quota: TenantQuota,
        clock: Callable[[], float] = time.time,
        steady_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database, self._quota, self._scope, self._clock = database, quota, quota.scope, clock
        self._watch = ChangeWatch[int](steady_clock)

    def create(
        self, options: JobOptions, input_file: str | None = None, request_key: str | None = None
    ) -> StoredJob:
        """Create a job to add lines to, which is invisible until it is accepted.

        Raises OverloadedError if there are too many, or if a request with this key is being
        submitted. A submission with this key that has made no progress for ``TAKEOVER_TIMEOUT_S``
        is deleted: its process has most likely died.
        """
        now = self._clock()
        if request_key is not None:
            same = (
                self._scope.where(jobs)
                & (jobs.c.request_key == request_key)
                & (jobs.c.state == SUBMITTING)
            )
            # at most one
            for earlier in self._database.read(
                select(jobs.c.number, jobs.c.touched_at).where(same)
            ):
                if is_stale(earlier.touched_at, now, TAKEOVER_TIMEOUT_S):
                    self.delete(earlier.number, earlier.touched_at)
        row = {
            "job_id": f"batch_{uuid.uuid4().hex}",
            **self._scope.as_row(),
            "state": SUBMITTING,
            "endpoint": options.endpoint,
            "keeps_order": options.keeps_order,
            "metadata": json.dumps(dict(options.metadata)),
            "created_at": now,
            "touched_at": now,
            "input_file": input_file,
            "request_key": request_key,
        }
        try:
            with self._database.writing() as connection:
                self._quota.check_new_job(connection)
                connection.execute(insert(jobs).values(row))
                return stored_jobs(
                    connection,
                    connection.execute(select(jobs).where(jobs.c.job_id == row["job_id"])).all(),
                )[0]
        except IntegrityError as error:
            raise OverloadedError("the same request is being submitted already", 1) from error

    def find_by_request_key(self, request_key: str) -> StoredJob | None:
        """Return the accepted job that a request with this key has created."""
        if not self._database.is_created:
            return None
        where = (
            self._scope.where(jobs)
            & (jobs.c.request_key == request_key)
            & jobs.c.state.not_in(HIDDEN)
        )
        with self._database.reading() as connection:
            found = stored_jobs(connection, connection.execute(select(jobs).where(where)).all())
        return found[0] if found else None

    def add_lines(self, job: StoredJob, first_place: int, new: Sequence[ParsedLine]) -> None:
        """Add lines, in input order and in one transaction. Without lines, only record that the
        submission makes progress.

        Raises OverloadedError if the lines exceed the tenant's limit.
        """
        keeps_order = job.job.options.keeps_order
        rows = [_row(job.number, first_place + i, line, keeps_order) for i, line in enumerate(new)]
        num_bytes = sum(len((row["text"] or row["result"]).encode()) for row in rows)
        if rows:
            self._quota.check_lines(len(rows), num_bytes)
        with self._database.writing() as connection:
            here = (jobs.c.number == job.number) & (jobs.c.state == SUBMITTING)
            values = {
                "num_lines": jobs.c.num_lines + len(rows),
                "num_bytes": jobs.c.num_bytes + num_bytes,
            }
            changed = connection.execute(
                update(jobs).where(here).values(values | {"touched_at": self._clock()})
            )
            if changed.rowcount == 0:
                raise JobRefusedError(
                    "the submission made no progress for too long; submit it again"
                )
            if rows:
                self._insert(connection, job, rows)

    def _insert(
        self, connection: Connection, job: StoredJob, rows: Sequence[dict[str, Any]]
    ) -> None:
        """Insert lines. The unique index refuses a valid line whose custom_id the job already has;
        it is inserted as invalid.
        """
        dialect = sqlite if self._database.is_sqlite else postgresql
        valid, accepted = [row for row in rows if row["text"] is not None], set[int]()
        if valid:
            statement = dialect.insert(lines).on_conflict_do_nothing().returning(lines.c.place)
            accepted.update(connection.execute(statement, valid).scalars())
        if invalid := [_as_invalid(row) for row in rows if row["place"] not in accepted]:
            this = jobs.c.number == job.number
            num_offsets = connection.execute(select(jobs.c.num_offsets).where(this)).scalar_one()
            if not job.job.options.keeps_order:
                invalid = [
                    row | {"offset": offset} for offset, row in enumerate(invalid, num_offsets)
                ]
            connection.execute(insert(lines), invalid)
            counts = (
                jobs.c.num_bad,
                jobs.c.num_failed,
                *([] if job.job.options.keeps_order else [jobs.c.num_offsets]),
            )
            connection.execute(
                update(jobs).where(this).values({count: count + len(invalid) for count in counts})
            )

    def accept(self, job: StoredJob, input_digest: str | None = None) -> StoredJob:
        """Accept a job: it is durable then. A job without a valid line fails at once. Raises
        JobRefusedError if it has no lines.
        """
        this = select(jobs).where(jobs.c.number == job.number)
        with self._database.writing() as connection:
            row = connection.execute(
                this.where(jobs.c.state == SUBMITTING).with_for_update()
            ).one_or_none()
            if row is None:
                raise JobRefusedError(
                    "the submission made no progress for too long; submit it again"
                )
            if row.num_lines == 0:
                raise JobRefusedError("the input has no lines")
            values: dict[str, Any] = {"state": JobState.QUEUED.value, "input_digest": input_digest}
            if row.num_bad == row.num_lines:
                reason = summarize_line_errors(
                    first_line_errors(connection, [job.number])[job.number], row.num_lines
                )
                values |= {
                    "state": JobState.FAILED.value,
                    "ended_at": self._clock(),
                    "error": reason,
                }
            connection.execute(update(jobs).where(jobs.c.number == job.number).values(values))
            return stored_jobs(connection, connection.execute(this).all())[0]

    def delete(self, number: int, touched_at: float | None = None) -> None:
        """Delete a submission, unless it was accepted, or has made progress since it was last
        ``touched_at`` this time.
        """
        here = (jobs.c.number == number) & (jobs.c.state == SUBMITTING)
        if touched_at is not None:
            here &= jobs.c.touched_at == touched_at
        # the key becomes free at once
        change = update(jobs).where(here).values(state=DISCARDING, request_key=None)
        if self._database.write(change):
            self._delete(number)

    def _delete(self, number: int) -> None:
        """Delete a job in state DISCARDING; several processes may do so at once."""
        of_job = lines.c.job == number
        selected = select(lines.c.place).where(of_job).limit(MAX_DELETED_LINES).scalar_subquery()
        while True:
            with self._database.writing() as connection:
                if (
                    connection.execute(
                        delete(lines).where(of_job, lines.c.place.in_(selected))
                    ).rowcount
                    == 0
                ):
                    connection.execute(
                        delete(jobs).where(jobs.c.number == number, jobs.c.state == DISCARDING)
                    )
                    return

    def discard_ended(self, before: float) -> None:
        """Delete jobs of all tenants that ended before this time, with their lines. Files are
        deleted separately.
        """
        where = (
            (jobs.c.queue == self._scope.queue)
            & jobs.c.state.in_(ENDED_STATES)
            & (jobs.c.ended_at < before)
        )
        for row in self._database.read(select(jobs.c.number).where(where)):
            this = update(jobs).where(where, jobs.c.number == row.number)
            self._database.write(this.values(state=DISCARDING, request_key=None))
            self._delete(row.number)

    def delete_abandoned(self) -> None:
        """Delete submissions and unfinished deletions of processes that died, of all tenants.

        A submission is kept while it makes progress between two calls, ``TAKEOVER_TIMEOUT_S``
        apart, whatever the clock says. It is deleted if by the clock it is old as well, or if calls
        see no progress for ``ABANDONED_TIMEOUT_S``.
        """
        where = (jobs.c.queue == self._scope.queue) & jobs.c.state.in_((SUBMITTING, DISCARDING))
        rows = self._database.read(
            select(jobs.c.number, jobs.c.state, jobs.c.touched_at).where(where)
        )
        seen = self._watch.look(
            {row.number: row.touched_at for row in rows if row.state == SUBMITTING}
        )
        now = self._clock()
        for row in rows:
            if row.state == DISCARDING:
                self._delete(row.number)
                continue
            timeout_s = (
                TAKEOVER_TIMEOUT_S
                if is_stale(row.touched_at, now, ABANDONED_TIMEOUT_S)
                else ABANDONED_TIMEOUT_S
            )
            if seen[row.number].seconds > timeout_s:
                self.delete(row.number, row.touched_at)


def _row(job: int, place: int, line: ParsedLine, keeps_order: bool) -> dict[str, Any]:
    return {
        "job": job,
        "place": place,
        "line": line.number,
        "custom_id": line.custom_id,
        "text": line.text,
        "state": FAILED if line.problem else PENDING,
        "offset": place if keeps_order else None,
        "result": _line_error(line.problem) if line.problem else None,
    }


def _as_invalid(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row as an invalid line; a line that was valid by itself has the custom_id of an
    earlier line.
    """
    if row["text"] is None:
        return row
    problem = f"line {row['line']}: its custom_id is that of an earlier line"
    return row | {"text": None, "state": FAILED, "result": _line_error(problem)}


def _line_error(problem: str) -> str:
    return error_text(error_body(problem, "invalid_request_error", code="invalid_line"))


# Ingest of a job's input: its lines are split, validated and stored, and its text gets a digest, in
# the threads of jobs.

MAX_LINES, MAX_LINE_BYTES = 1000, 2**20  # of one transaction
# bytes that are split at once: threads are shared, and a mebibyte of line ends takes a second
SPLIT_BYTES = 2**16


class JobIngest:
    """Splits, validates and stores the lines of one job, in the threads of jobs. ``is_quoted``: see
    ``parse_line``.
    """

    def __init__(
        self,
        job: StoredJob,
        submissions: JobSubmissions,
        threads: JobThreadPool,
        limits: JobLimits,
        clock: Callable[[], float],
        is_quoted: bool,
    ) -> None:
        self._is_quoted = is_quoted
        self._job, self._submissions, self._threads, self._limits, self._clock = (
            job,
            submissions,
            threads,
            limits,
            clock,
        )
        self._splitter, self._digest = LineSplitter(limits.max_line_bytes), hashlib.sha256()
        self._ready: list[InputLine] = []
        self._ready_bytes = self._place = 0
        self._added_at = clock()

    async def run(self, pieces: AsyncIterator[bytes]) -> str:
        """Store all lines and return the text's digest.

        Raises FileTooLargeError, or JobRefusedError if there are too many lines.
        """
        buffer, num_bytes = bytearray(), 0
        async for piece in pieces:
            num_bytes = _count_bytes(num_bytes, piece, self._limits.max_bytes)
            buffer += piece
            while len(buffer) >= SPLIT_BYTES:
                part = bytes(buffer[:SPLIT_BYTES])
                del buffer[:SPLIT_BYTES]
                await self._threads.run(self._feed, part)
            if self._clock() - self._added_at > ADD_INTERVAL_S:
                await self._threads.run(self._feed, bytes(buffer))
                buffer.clear()
                await self._threads.run(self._add)
        await self._threads.run(self._finish, bytes(buffer))
        return self._digest.hexdigest()

    def _feed(self, part: bytes) -> None:
        self._digest.update(part)
        for line in self._splitter.feed(part):
            self._append_line(line)

    def _finish(self, part: bytes) -> None:
        self._feed(part)
        for line in self._splitter.finish():
            self._append_line(line)
        if self._ready:
            self._add()

    def _append_line(self, line: InputLine) -> None:
        if line.number > self._limits.max_lines:
            raise JobRefusedError(
                f"the input has more than {self._limits.max_lines} lines; split it"
            )
        if line.text is not None and not line.text.strip():
            return
        self._ready.append(line)
        self._ready_bytes += len(line.text or b"")
        if len(self._ready) == MAX_LINES or self._ready_bytes > MAX_LINE_BYTES:
            self._add()

    def _add(self) -> None:
        """Add the lines that are ready, or record progress if there are no lines."""
        endpoint, max_bytes = self._job.job.options.endpoint, self._limits.max_line_bytes
        parsed = [parse_line(line, endpoint, max_bytes, self._is_quoted) for line in self._ready]
        self._submissions.add_lines(self._job, self._place, parsed)
        self._place, self._added_at = self._place + len(self._ready), self._clock()
        self._ready, self._ready_bytes = [], 0


def digest_of_url(url: str) -> str:
    """Return the digest of a URL, which differs from the digest of any text."""
    return f"url:{hashlib.sha256(url.encode(errors='replace')).hexdigest()}"


async def digest_of_text(
    pieces: AsyncIterator[bytes], max_bytes: int, threads: JobThreadPool
) -> str:
    """Return the digest of a text, in the threads of jobs. Raises FileTooLargeError."""
    digest, num_bytes = hashlib.sha256(), 0
    async for piece in pieces:
        num_bytes = _count_bytes(num_bytes, piece, max_bytes)
        if len(piece) < SPLIT_BYTES:
            digest.update(piece)
        else:
            await threads.run(digest.update, piece)
    return digest.hexdigest()


def _count_bytes(num_bytes: int, piece: bytes, max_bytes: int) -> int:
    if num_bytes + len(piece) > max_bytes:
        raise FileTooLargeError(f"the input is larger than {format_bytes(max_bytes)}; split it")
    return num_bytes + len(piece)
