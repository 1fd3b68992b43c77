"""What doors do with jobs in the database: look, cancel, read results. Methods block: call them beside the event loop."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import select, update

from tramontane.proto.errors import UnknownJobError
from tramontane.router.batch.database import Database, jobs
from tramontane.router.batch.jobs import JobState
from tramontane.router.batch.store import HIDDEN, RESULTS_AT_ONCE, StoredJob, StoredResult, read_results, stored_jobs


class JobStore:
    """Jobs of one ``queue`` that were accepted. ``clock``: seconds since 1970."""

    def __init__(self, database: Database, queue: str, clock: Callable[[], float] = time.time) -> None:
        self._database, self._queue, self._clock = database, queue, clock

    def get(self, job_id: str) -> StoredJob:
        """Raises UnknownJobError."""
        if self._database.exists and "\0" not in job_id:  # which PostgreSQL would not even compare
            with self._database.reading() as connection:
                found = stored_jobs(connection, connection.execute(select(jobs).where(self._named(job_id))).all())
            if found:
                return found[0]
        raise UnknownJobError(f"there is no batch job {job_id!r:.80}")

    def list(self, limit: int, after: str | None = None) -> Sequence[StoredJob]:
        """The newest first. Raises UnknownJobError."""
        where = (jobs.c.queue == self._queue) & jobs.c.state.not_in(HIDDEN)
        if after is not None:
            where &= jobs.c.number < self.get(after).number
        if not self._database.exists:
            return []
        with self._database.reading() as connection:
            rows = connection.execute(select(jobs).where(where).order_by(jobs.c.number.desc()).limit(limit)).all()
            return stored_jobs(connection, rows)

    def cancel(self, job_id: str) -> StoredJob:
        """A runner ends it. Raises UnknownJobError."""
        number = self.get(job_id).number
        begun = [JobState.QUEUED.value, JobState.RUNNING.value]
        with self._database.writing() as connection:
            where = (jobs.c.number == number) & jobs.c.state.in_(begun)
            values = {"state": JobState.CANCELLING.value, "cancelling_at": self._clock()}
            connection.execute(update(jobs).where(where).values(values))
        return self.get(job_id)

    def results(self, job: StoredJob, offset: int, limit: int, max_chars: int = RESULTS_AT_ONCE) -> Sequence[StoredResult]:
        """From this offset on, without a gap: what comes behind a line that is not done is not told yet."""
        return read_results(self._database, job.number, offset, limit, max_chars)

    def _named(self, job_id: str) -> Any:  # noqa: ANN401 - a condition
        return (jobs.c.job_id == job_id) & (jobs.c.queue == self._queue) & jobs.c.state.not_in(HIDDEN)
