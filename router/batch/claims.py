"""A runner's access to jobs in the database: claim them for a time, fetch lines, write their
outcomes. Methods block.
"""

import time
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Select,
    bindparam,
    delete,
    func,
    insert,
    or_,
    select,
    update,
)

from tramontane.proto.errors import TramontaneError
from tramontane.proto.jobs import Endpoint, JobState
from tramontane.proto.timing import JOB_LEASE_S
from tramontane.router.batch.change_watch import ChangeWatch
from tramontane.router.batch.database import (
    DONE,
    FAILED,
    PENDING,
    Database,
    Scope,
    files,
    jobs,
    lines,
)
from tramontane.router.batch.files import FileRecord
from tramontane.router.batch.store import (
    OPEN_STATES,
    StoredResult,
    assign_offsets,
    error_text,
    read_results,
)
from tramontane.router.openai.errors import error_body

Condition = ColumnElement[bool]


class JobLostError(TramontaneError):
    """Another runner holds the job; no change was written."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A job held by one runner. When its lease expires, another runner may claim the job with the
    next ``epoch``.
    """

    number: int
    tenant: str
    job_id: str
    endpoint: Endpoint
    keeps_order: bool
    epoch: int
    is_cancelled: bool  # already


class PendingLine(NamedTuple):
    """A line that has no outcome yet."""

    place: int
    text: str


class Lease(NamedTuple):
    """The lease of a job as stored in the database; every renewal changes it."""

    owner: str
    epoch: int
    leased_until: float


class Outcome(NamedTuple):
    """The end of a line. ``result`` is JSON: an answer, or OpenAI's error object. ``http_status``
    is None if the line never ran.
    """

    place: int
    is_error: bool
    http_status: int | None
    result: str


CANCELLED = error_text(
    error_body(
        "the job was cancelled before this line started",
        "invalid_request_error",
        code="batch_cancelled",
    )
)


class JobClaimStore:
    """One runner's access to a queue.

    ``clock``: seconds since 1970, which decide only about leases that this runner sees for the
    first time (``_expired``). ``steady_clock``: seconds that never go back, for all other
    decisions.
    """

    def __init__(
        self,
        database: Database,
        queue: str,
        clock: Callable[[], float] = time.time,
        lease_s: float = JOB_LEASE_S,
        steady_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock, self.steady_clock, self.lease_s = clock, steady_clock, lease_s
        self.owner = uuid.uuid4().hex
        self._watch = ChangeWatch[int](steady_clock)
        self._database, self._queue = database, queue

    @property
    def exist(self) -> bool:
        """Whether there can be jobs to claim."""
        return self._database.is_created

    def claim(self, limit: int, running: Collection[int] = ()) -> Sequence[Claim]:
        """Claim jobs that have no runner, or whose runner has let its lease expire.

        Tenants share ``limit``, which counts the jobs in ``running``, equally: of 64 each of three
        tenants may have 21, and each tenant has at least one. A tenant's oldest jobs come first.

        Jobs in ``running`` are excluded: this runner works on them. It may hold further jobs,
        because the answer to an earlier claim was lost or because releasing them failed; these are
        free again when their lease has expired.
        """
        now = self.clock()
        is_running = jobs.c.number.in_(running)
        is_open = (jobs.c.queue == self._queue) & jobs.c.state.in_(OPEN_STATES)
        expired = self._expired(is_open, running, now)
        is_free = or_(jobs.c.owner.is_(None), jobs.c.number.in_(expired)) & ~is_running
        wanted = [
            row.number
            for row in self._database.read(_fair_choice(is_open, is_running, is_free, limit))
        ]
        if not wanted:  # usually empty; then no write is needed
            return []
        claimable = (
            select(jobs).where(is_open & is_free, jobs.c.number.in_(wanted)).order_by(jobs.c.number)
        )
        with self._database.writing() as connection:
            found = connection.execute(claimable.with_for_update(skip_locked=True)).all()
            # otherwise it has been renewed since
            rows = [row for row in found if row.owner is None or expired[row.number] == _lease(row)]
            for row in rows:
                state = JobState.RUNNING.value if row.state == JobState.QUEUED else row.state
                values = {
                    "owner": self.owner,
                    "epoch": row.epoch + 1,
                    "leased_until": now + self.lease_s,
                    "state": state,
                }
                values["started_at"] = row.started_at or now
                connection.execute(update(jobs).where(jobs.c.number == row.number).values(values))
        return [
            Claim(
                row.number,
                row.tenant,
                row.job_id,
                cast("Endpoint", row.endpoint),
                row.keeps_order,
                row.epoch + 1,
                row.state == JobState.CANCELLING,
            )
            for row in rows
        ]

    def _expired(
        self, is_open: Condition, running: Collection[int], now: float
    ) -> dict[int, Lease]:
        """Return the expired leases of open jobs that this runner does not work on, by the job's
        number.

        It observes the leases of all open jobs, so that a lease taken over by another runner counts
        as changed, not as seen for the first time.

        A lease has expired if this runner has seen it unchanged for ``lease_s``, whatever its
        stored time; it has not expired if this runner has seen it change. So the runners' clocks
        need not agree, and setting a clock does not end the lease of a living runner. The stored
        time counts only for a lease that was never seen to change, so that a starting runner need
        not wait: the lease has expired if that time has passed, or is more than two leases away,
        which no clock within one lease of this one can have written. The same applies to this
        runner's own leases, as it renews only the leases of ``running``.
        """
        held = self._database.read(
            select(jobs.c.number, jobs.c.owner, jobs.c.epoch, jobs.c.leased_until).where(is_open)
        )
        leases = {row.number: _lease(row) for row in held if row.owner is not None}
        seen = self._watch.look(leases)
        return {
            number: lease
            for number, lease in leases.items()
            if number not in running
            and (
                seen[number].seconds > self.lease_s
                or (
                    (not seen[number].has_changed or lease.owner == self.owner)
                    and not now <= lease.leased_until <= now + 2 * self.lease_s
                )
            )
        }

    def claimed(self, running: Collection[int], renew: bool) -> dict[int, tuple[int, JobState]]:
        """Return epoch and state of the ``running`` jobs that this runner still holds; with
        ``renew``, extend their leases.
        """
        mine = (
            (jobs.c.owner == self.owner)
            & (jobs.c.queue == self._queue)
            & jobs.c.number.in_(running)
        )
        if renew:
            self._database.write(
                update(jobs).where(mine).values(leased_until=self.clock() + self.lease_s)
            )
        rows = self._database.read(select(jobs.c.number, jobs.c.epoch, jobs.c.state).where(mine))
        return {row.number: (row.epoch, JobState(row.state)) for row in rows}

    def release(self, claim: Claim) -> None:
        """End the lease, so that another runner does not have to wait until it expires."""
        self._database.write(
            update(jobs).where(self._where_held(claim)).values(owner=None, leased_until=None)
        )

    def next_lines(
        self, claim: Claim, after: int, limit: int, max_bytes: int = 2**22
    ) -> Sequence[PendingLine]:
        """Return pending lines behind the place ``after``: at least one, if there is one, and else
        at most ``max_bytes``.
        """
        pending = (
            (lines.c.job == claim.number) & (lines.c.place > after) & (lines.c.state == PENDING)
        )
        wanted = (
            select(lines.c.place, lines.c.text).where(pending).order_by(lines.c.place).limit(limit)
        )
        found: list[PendingLine] = []
        with self._database.stream_rows(wanted) as rows:
            for row in rows:
                max_bytes -= len(row.text)
                if found and max_bytes < 0:
                    break
                found.append(PendingLine(row.place, row.text))
        return found

    def finish(self, claim: Claim, outcomes: Sequence[Outcome]) -> None:
        """Write outcomes. Only the first outcome of a line counts; later ones are ignored. Raises
        JobLostError.
        """
        with self._database.writing() as connection:
            self._lock(connection, claim)
            _write(connection, claim, outcomes)

    def cancel_some(self, claim: Claim, after: int, limit: int = 5000) -> int | None:
        """Cancel pending lines behind ``after``; return the place of the last one, None if no lines
        are left. Raises JobLostError.
        """
        pending = (
            (lines.c.job == claim.number) & (lines.c.place > after) & (lines.c.state == PENDING)
        )
        with self._database.writing() as connection:
            self._lock(connection, claim)
            selected = select(lines.c.place).where(pending).order_by(lines.c.place).limit(limit)
            places = connection.execute(selected).scalars().all()
            _write(connection, claim, [Outcome(place, True, None, CANCELLED) for place in places])
        return places[-1] if places else None

    def results(self, claim: Claim, offset: int, limit: int) -> Sequence[StoredResult]:
        """Return results as ``JobStore.results`` does."""
        return read_results(self._database, claim.number, offset, limit)

    def announce_file(self, claim: Claim, file: FileRecord) -> None:
        """Record a file of the job's tenant before it is written, so that the remains of a killed
        runner can be found.
        """
        self._database.write(
            insert(files).values(file.as_row(Scope(self._queue, claim.tenant), is_whole=False))
        )

    def withdraw_file(self, file: FileRecord) -> None:
        """Delete the record of an announced file."""
        self._database.write(delete(files).where(files.c.file_id == file.file_id))

    def end(
        self, claim: Claim, state: JobState, output: FileRecord | None, errors: FileRecord | None
    ) -> None:
        """Write the job's final state and the files that hold its results. Raises JobLostError."""
        now = self.clock()
        written = [file for file in (output, errors) if file is not None]
        with self._database.writing() as connection:
            self._lock(connection, claim)
            for file in written:
                this = files.c.file_id == file.file_id
                connection.execute(
                    update(files).where(this).values(is_whole=True, num_bytes=file.num_bytes)
                )
            values: dict[str, Any] = {
                "state": state.value,
                "ended_at": now,
                "owner": None,
                "leased_until": None,
            }
            values |= {
                "output_file": output and output.file_id,
                "error_file": errors and errors.file_id,
            }
            connection.execute(update(jobs).where(jobs.c.number == claim.number).values(values))

    def _where_held(self, claim: Claim) -> Condition:
        return (
            (jobs.c.number == claim.number)
            & (jobs.c.owner == self.owner)
            & (jobs.c.epoch == claim.epoch)
        )

    def _lock(self, connection: Connection, claim: Claim) -> None:
        """Lock the job's row: until the transaction ends, no other runner can claim the job or
        write its lines.
        """
        updated = connection.execute(
            update(jobs).where(self._where_held(claim)).values(touched_at=self.clock())
        )
        if updated.rowcount == 0:
            raise JobLostError(f"{claim.job_id} is held by another runner")


def _lease(row: Row[Any]) -> Lease:
    return Lease(row.owner, row.epoch, row.leased_until)


def _fair_choice(
    is_open: Condition, is_running: Condition, is_free: Condition, limit: int
) -> Select[tuple[int]]:
    """Select the numbers of free jobs that are within their tenant's share of ``limit``, running
    ones counted first.
    """
    where = is_open & (is_running | is_free)
    num_tenants = select(func.count(jobs.c.tenant.distinct())).where(where).scalar_subquery()
    rank = (
        func.row_number()
        .over(partition_by=jobs.c.tenant, order_by=(is_running.desc(), jobs.c.number))
        .label("rank")
    )
    ranked = select(jobs.c.number, rank, is_free.label("is_free")).where(where).subquery()
    is_within_share = (ranked.c.rank == 1) | (ranked.c.rank * num_tenants <= limit)
    return select(ranked.c.number).where(ranked.c.is_free, is_within_share)


def _write(connection: Connection, claim: Claim, outcomes: Sequence[Outcome]) -> None:
    by_place = {outcome.place: outcome for outcome in outcomes}
    pending = (lines.c.job == claim.number) & (lines.c.state == PENDING)
    selected = select(lines.c.place).where(pending, lines.c.place.in_(by_place))
    pending_places = set(connection.execute(selected).scalars())
    places = [place for place in by_place if place in pending_places]
    if not places:
        return
    ended = [by_place[place] for place in places]
    num_failed = sum(outcome.is_error for outcome in ended)
    values = {
        "num_done": jobs.c.num_done + len(ended) - num_failed,
        "num_failed": jobs.c.num_failed + num_failed,
    }
    values["num_bytes"] = jobs.c.num_bytes + sum(len(each.result.encode()) for each in ended)
    connection.execute(update(jobs).where(jobs.c.number == claim.number).values(values))
    this = (
        (lines.c.job == bindparam("of_job"))
        & (lines.c.place == bindparam("at"))
        & (lines.c.state == PENDING)
    )
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
