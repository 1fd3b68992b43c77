"""One tenant's usage of the store, and its limits."""

from typing import NamedTuple

from sqlalchemy import Connection, case, func, select

from tramontane.proto.errors import OverloadedError, QuotaExceededError
from tramontane.proto.units import format_bytes
from tramontane.router.batch.database import Database, Scope, files, jobs
from tramontane.router.batch.input_lines import JobLimits
from tramontane.router.batch.store import OPEN_STATES, SUBMITTING

RETRY_AFTER_S = 30  # jobs end all the time
QUOTA_RETRY_AFTER_S = 3600  # stored data stays until it is deleted or expires
IS_OPEN = jobs.c.state.in_([*OPEN_STATES, SUBMITTING])


class Usage(NamedTuple):
    """Usage of a tenant. Jobs that are being submitted count as open; bytes are the total of files,
    lines and results.
    """

    num_open_lines: int
    num_bytes: int


class TenantQuota:
    """The limits of the tenant of ``scope``. Methods block.

    Results of accepted jobs are always stored. Concurrent requests may exceed a limit by one
    portion each.
    """

    def __init__(self, database: Database, scope: Scope, limits: JobLimits) -> None:
        self.scope, self.limits = scope, limits
        self._database = database

    def usage(self) -> Usage:
        """Return the tenant's usage."""
        of_jobs = select(
            func.coalesce(func.sum(case((IS_OPEN, jobs.c.num_lines), else_=0)), 0).label(
                "num_lines"
            ),
            func.coalesce(func.sum(jobs.c.num_bytes), 0).label("num_bytes"),
        ).where(self.scope.where(jobs))
        of_files = select(func.coalesce(func.sum(files.c.num_bytes), 0).label("num_bytes")).where(
            self.scope.where(files)
        )
        if not self._database.is_created:
            return Usage(0, 0)
        (job_sums,), (file_sums,) = self._database.read(of_jobs), self._database.read(of_files)
        return Usage(int(job_sums.num_lines), int(job_sums.num_bytes + file_sums.num_bytes))

    def check_new_job(self, connection: Connection) -> None:
        """Raise OverloadedError if no further job may be open."""
        where = self.scope.where(jobs) & IS_OPEN
        num_open = connection.execute(
            select(func.count()).select_from(jobs).where(where)
        ).scalar_one()
        if num_open >= (bound := self.limits.max_open_jobs):
            raise OverloadedError(
                f"{num_open} of your batch jobs have not ended, and at most {bound} may be open"
                " (--jobs-max-open); submit this one later",
                RETRY_AFTER_S,
            )

    def check_lines(self, num_lines: int, num_bytes: int) -> None:
        """Raise OverloadedError if the additional lines, or their bytes, exceed a limit."""
        usage, bound = self.usage(), self.limits.max_open_lines
        if usage.num_open_lines + num_lines > bound:
            raise OverloadedError(
                f"your open batch jobs would have {usage.num_open_lines + num_lines} lines with"
                f" this one, and at most {bound} may be open (--jobs-max-lines); submit this one"
                " later",
                RETRY_AFTER_S,
            )
        self._check_bytes(usage.num_bytes + num_bytes)

    def check_bytes(self, num_bytes: int = 0) -> None:
        """Raise QuotaExceededError if the additional bytes exceed the limit."""
        self._check_bytes(self.usage().num_bytes + num_bytes)

    def _check_bytes(self, num_bytes: int) -> None:
        if num_bytes > self.limits.max_stored_bytes:
            raise QuotaExceededError(
                f"your files and batch jobs would hold {format_bytes(num_bytes)} with this one, and"
                f" at most {format_bytes(self.limits.max_stored_bytes)} may be stored"
                " (--jobs-max-bytes); delete files, or wait until jobs expire",
                QUOTA_RETRY_AFTER_S,
            )
