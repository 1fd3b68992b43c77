"""What runners do with jobs in the database: claim them for a time, fetch lines, write what became of them. Methods block."""

import time
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from sqlalchemy import Connection, bindparam, delete, insert, or_, select, update

from tramontane.proto.errors import TramontaneError
from tramontane.proto.jobs import Endpoint, JobState
from tramontane.router.batch.database import DONE, FAILED, PENDING, Database, files, jobs, lines
from tramontane.router.batch.files import FileRecord
from tramontane.router.batch.store import OPEN_STATES, StoredResult, assign_offsets, error_text, read_results
from tramontane.router.openai.errors import HttpErrorSpec

LEASE_S = 15.0


class JobLostError(TramontaneError):
    """Another runner has the job by now; nothing was written."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A job that a runner works on, until its lease lapses and another takes it, with the next ``epoch``."""

    number: int
    job_id: str
    endpoint: Endpoint
    keeps_order: bool
    epoch: int
    is_cancelled: bool  # already


class PendingLine(NamedTuple):
    place: int
    text: str


class Outcome(NamedTuple):
    """``result`` is JSON: an answer, or OpenAI's error object. ``http_status`` is None if the line never ran."""

    place: int
    is_error: bool
    http_status: int | None
    result: str


CANCELLED = error_text(
    "the job was cancelled before this line began", HttpErrorSpec(400, "invalid_request_error", code="batch_cancelled")
)


class JobClaimStore:
    """One runner's side of a queue. ``clock``: seconds since 1970, alike for all runners within a fraction of the lease."""

    def __init__(self, database: Database, queue: str, clock: Callable[[], float] = time.time, lease_s: float = LEASE_S) -> None:
        self.clock, self.lease_s = clock, lease_s
        self.owner = uuid.uuid4().hex
        self._database, self._queue = database, queue

    @property
    def exist(self) -> bool:
        """Whether there can be anything to claim."""
        return self._database.is_created

    def claim(self, limit: int, running: Collection[int] = ()) -> Sequence[Claim]:
        """The oldest jobs that nobody works on, or whose runner has fallen silent.

        None of ``running``, which this runner works on. Others that it holds may be what an earlier claim took whose answer was
        lost, or what it could not release: once their lease has lapsed they are as free as anybody's.
        """
        now = self.clock()
        is_free = or_(jobs.c.owner.is_(None), jobs.c.leased_until < now) & jobs.c.number.not_in(running)
        where = (jobs.c.queue == self._queue) & jobs.c.state.in_(OPEN_STATES) & is_free
        wanted = select(jobs).where(where).order_by(jobs.c.number).limit(limit)
        with self._database.reading() as connection:  # mostly there is nothing, and nothing to write
            if connection.execute(wanted.with_only_columns(jobs.c.number)).first() is None:
                return []
        with self._database.writing() as connection:
            rows = connection.execute(wanted.with_for_update(skip_locked=True)).all()
            for row in rows:
                state = JobState.RUNNING.value if row.state == JobState.QUEUED else row.state
                values = {"owner": self.owner, "epoch": row.epoch + 1, "leased_until": now + self.lease_s, "state": state}
                values["started_at"] = row.started_at or now
                connection.execute(update(jobs).where(jobs.c.number == row.number).values(values))
        return [
            Claim(
                row.number,
                row.job_id,
                cast("Endpoint", row.endpoint),
                row.keeps_order,
                row.epoch + 1,
                row.state == JobState.CANCELLING,
            )
            for row in rows
        ]

    def claimed(self, running: Collection[int], renew: bool) -> dict[int, tuple[int, JobState]]:
        """Epoch and state of those ``running`` that are still this runner's; with ``renew`` for another lease's time."""
        mine = (jobs.c.owner == self.owner) & (jobs.c.queue == self._queue) & jobs.c.number.in_(running)
        if renew:
            with self._database.writing() as connection:
                connection.execute(update(jobs).where(mine).values(leased_until=self.clock() + self.lease_s))
        with self._database.reading() as connection:
            rows = connection.execute(select(jobs.c.number, jobs.c.epoch, jobs.c.state).where(mine)).all()
        return {row.number: (row.epoch, JobState(row.state)) for row in rows}

    def release(self, claim: Claim) -> None:
        """Another runner need not wait for the lease to lapse."""
        with self._database.writing() as connection:
            connection.execute(update(jobs).where(self._held(claim)).values(owner=None, leased_until=None))

    def next_lines(self, claim: Claim, after: int, limit: int, max_bytes: int = 2**22) -> Sequence[PendingLine]:
        """Lines behind the place ``after`` that are not done. One at least, if there is one; else within ``max_bytes``."""
        pending = (lines.c.job == claim.number) & (lines.c.place > after) & (lines.c.state == PENDING)
        wanted = select(lines.c.place, lines.c.text).where(pending).order_by(lines.c.place).limit(limit)
        found: list[PendingLine] = []
        with self._database.stream_rows(wanted) as rows:
            for row in rows:
                max_bytes -= len(row.text)
                if found and max_bytes < 0:
                    break
                found.append(PendingLine(row.place, row.text))
        return found

    def finish(self, claim: Claim, outcomes: Sequence[Outcome]) -> None:
        """Each line ends by the first outcome that is written; a later one changes nothing. Raises JobLostError."""
        with self._database.writing() as connection:
            self._hold(connection, claim)
            _write(connection, claim, outcomes)

    def cancel_some(self, claim: Claim, after: int, limit: int = 5000) -> int | None:
        """End lines behind the place ``after`` that have not begun, and say the last one's; None: there are none left.

        Raises JobLostError.
        """
        pending = (lines.c.job == claim.number) & (lines.c.place > after) & (lines.c.state == PENDING)
        with self._database.writing() as connection:
            self._hold(connection, claim)
            some = select(lines.c.place).where(pending).order_by(lines.c.place).limit(limit)
            places = connection.execute(some).scalars().all()
            _write(connection, claim, [Outcome(place, True, None, CANCELLED) for place in places])
        return places[-1] if places else None

    def results(self, claim: Claim, offset: int, limit: int) -> Sequence[StoredResult]:
        """As ``JobStore.results``."""
        return read_results(self._database, claim.number, offset, limit)

    def announce_file(self, file: FileRecord) -> None:
        """Before it is written, so that what a runner leaves behind that is killed can be found."""
        with self._database.writing() as connection:
            connection.execute(insert(files).values(file.as_row(self._queue, is_whole=False)))

    def withdraw_file(self, file: FileRecord) -> None:
        """After it was announced: it is no more."""
        with self._database.writing() as connection:
            connection.execute(delete(files).where(files.c.file_id == file.file_id))

    def end(self, claim: Claim, state: JobState, output: FileRecord | None, errors: FileRecord | None) -> None:
        """The job's last word, with the files that hold its results. Raises JobLostError."""
        now = self.clock()
        made = [file for file in (output, errors) if file is not None]
        with self._database.writing() as connection:
            self._hold(connection, claim)
            for file in made:
                whole = update(files).where(files.c.file_id == file.file_id).values(is_whole=True, num_bytes=file.num_bytes)
                connection.execute(whole)
            values: dict[str, Any] = {"state": state.value, "ended_at": now, "owner": None, "leased_until": None}
            values |= {"output_file": output and output.file_id, "error_file": errors and errors.file_id}
            connection.execute(update(jobs).where(jobs.c.number == claim.number).values(values))

    def _held(self, claim: Claim) -> Any:  # noqa: ANN401 - a condition
        return (jobs.c.number == claim.number) & (jobs.c.owner == self.owner) & (jobs.c.epoch == claim.epoch)

    def _hold(self, connection: Connection, claim: Claim) -> None:
        """For the rest of the transaction nobody else can take the job, or write one of its lines."""
        written = connection.execute(update(jobs).where(self._held(claim)).values(touched_at=self.clock()))
        if written.rowcount == 0:
            raise JobLostError(f"{claim.job_id} is another runner's")


def _write(connection: Connection, claim: Claim, outcomes: Sequence[Outcome]) -> None:
    by_place = {outcome.place: outcome for outcome in outcomes}
    pending = (lines.c.job == claim.number) & (lines.c.state == PENDING)
    open_places = select(lines.c.place).where(pending, lines.c.place.in_(by_place))
    still_open = set(connection.execute(open_places).scalars())
    places = [place for place in by_place if place in still_open]
    if not places:
        return
    ended = [by_place[place] for place in places]
    num_failed = sum(outcome.is_error for outcome in ended)
    values = {"num_done": jobs.c.num_done + len(ended) - num_failed, "num_failed": jobs.c.num_failed + num_failed}
    connection.execute(update(jobs).where(jobs.c.number == claim.number).values(values))
    this = (lines.c.job == bindparam("of_job")) & (lines.c.place == bindparam("at")) & (lines.c.state == PENDING)
    rows = [
        {
            "of_job": claim.number,
            "at": each.place,
            "state": FAILED if each.is_error else DONE,
            "http_status": each.http_status,
            "result": each.result,
        }
        for each in ended
    ]
    connection.execute(update(lines).where(this), rows)
    if not claim.keeps_order:
        assign_offsets(connection, claim.number, places)
