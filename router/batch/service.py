"""``JobService`` over the store, for the HTTP and gRPC endpoints. Runners may work in other
processes.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field
from typing import Self

from tramontane.proto.errors import (
    JobRefusedError,
    JobStoreError,
    OverloadedError,
    TramontaneError,
    UnknownJobError,
)
from tramontane.proto.jobs import Endpoint, Job, JobOptions, ResultLine
from tramontane.router.batch.database import KEYLESS, Database, JobThreadPool, Scope
from tramontane.router.batch.files import FileRecord, FileStore, JobStorage, Purpose
from tramontane.router.batch.input_lines import JobLimits
from tramontane.router.batch.quotas import RETRY_AFTER_S, TenantQuota
from tramontane.router.batch.storage_threads import READ_TIMEOUT_S, StorageThreads
from tramontane.router.batch.store import JobStore, StoredJob, StoredResult
from tramontane.router.batch.submissions import (
    JobIngest,
    JobSubmissions,
    digest_of_text,
    digest_of_url,
)
from tramontane.router.batch.urls import UrlReader

MAX_RESULTS, MAX_RESULT_CHARS = 500, 2**18  # of one stream, in memory while its client is slow
POLL_INTERVAL_S = 0.5
THREADS, WRITE_THREADS, TENANT_WRITE_THREADS = 8, 4, 3
MAX_STREAMS = 512  # of results and of states; each queries the database twice a second
MAX_UPLOADS = 16  # each takes up to the maximum file size in the temporary folder
MAX_LIST = 100
MAX_REQUEST_KEY = 256
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512


@dataclass(frozen=True, slots=True)
class JobSettings:
    """The stores of jobs. ``queue``: the served model's name. ``url_prefixes``: prefixes of URLs
    that clients may submit.
    """

    database: str = field(repr=False)  # may contain a password, as may the next field
    storage: str = field(repr=False)
    queue: str
    endpoints: tuple[Endpoint, ...] = ("/v1/completions",)
    url_prefixes: tuple[str, ...] = ()
    limits: JobLimits = field(default_factory=JobLimits)


class BatchService:
    """Jobs and files of one tenant: of the clients without an API key, or of the tenant of
    ``for_tenant``.

    Blocking calls run in threads; if the database fails, methods raise PipelineError. Raises
    ConfigError for unsuitable settings.
    """

    def __init__(
        self,
        settings: JobSettings,
        clock: Callable[[], float] = time.time,
        poll_s: float = POLL_INTERVAL_S,
        steady_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = settings.limits
        self._settings, self._clock, self._steady_clock, self._poll_s = (
            settings,
            clock,
            steady_clock,
            poll_s,
        )
        self._threads = JobThreadPool(THREADS)
        # A file may take long, and calls of the database do not wait for it. Writing threads need
        # the database, too.
        self._reads, self._writes = (
            StorageThreads(),
            StorageThreads(WRITE_THREADS, TENANT_WRITE_THREADS),
        )
        self._urls = UrlReader(settings.url_prefixes, self._reads)
        self._streams, self._uploads = Counter[str](), Counter[str]()  # by tenant
        self._database, self._storage = Database(settings.database), JobStorage(settings.storage)
        self._bind(KEYLESS)

    def _bind(self, tenant: str) -> None:
        self._tenant, scope = tenant, Scope(self._settings.queue, tenant)
        self._quota = TenantQuota(self._database, scope, self.limits)
        self._submissions = JobSubmissions(
            self._database, self._quota, self._clock, self._steady_clock
        )
        self._jobs = JobStore(self._database, scope, self._clock)
        self._files = FileStore(self._database, self._storage, self._quota, self._clock)

    def for_tenant(self, tenant: str) -> Self:
        """Return the service of another tenant, with the same store, threads and streams."""
        other = copy(self)
        other._bind(tenant)
        return other

    def close(self) -> None:
        """Wait for running calls and close the database, for all tenants."""
        self._threads.close()
        self._writes.close()
        self._reads.close()
        self._database.close()

    async def require_accepting(self) -> None:
        """Raise PipelineError if no job and no file can be accepted now."""

    async def submit(
        self, lines: AsyncIterator[bytes], options: JobOptions, request_key: str | None = None
    ) -> Job:
        """Submit a text: see ``JobService``."""
        await self.require_accepting()
        if (known := await self._find_by_request_key(request_key, options, None)) is None:
            return (await self._submit(lines, options, request_key)).job
        _check_digest(known, await digest_of_text(lines, self.limits.max_bytes, self._threads))
        return known.job

    async def submit_url(
        self, url: str, options: JobOptions, request_key: str | None = None
    ) -> Job:
        """Submit the contents of a URL: see ``JobService``."""
        await self.require_accepting()
        digest = digest_of_url(url)
        if (known := await self._find_by_request_key(request_key, options, None)) is None:
            return (
                await self._submit(
                    self._urls.read(url, self._tenant), options, request_key, input_digest=digest
                )
            ).job
        _check_digest(known, digest)
        return known.job

    async def submit_file(
        self, file_id: str, options: JobOptions, request_key: str | None = None
    ) -> StoredJob:
        """Submit an uploaded file, as ``submit`` does. Raises UnknownFileError."""
        await self.require_accepting()
        if (known := await self._find_by_request_key(request_key, options, file_id)) is not None:
            return known
        file = await self.file(file_id)
        if file.purpose != "batch":
            raise JobRefusedError(f"{file_id} was not uploaded with purpose batch")
        return await self._submit(self._read(file), options, request_key, file_id)

    async def _find_by_request_key(
        self, request_key: str | None, options: JobOptions, file_id: str | None
    ) -> StoredJob | None:
        """Return the job that a request with this key has created, if its file and options are the
        same.
        """
        if request_key is None:
            return None
        if not 0 < len(request_key) <= MAX_REQUEST_KEY or "\0" in request_key:
            raise JobRefusedError(f"the request's key must have 1 to {MAX_REQUEST_KEY} characters")
        known = await self._threads.run(self._submissions.find_by_request_key, request_key)
        if known is not None and (known.job.options, known.input_file) != (options, file_id):
            raise JobRefusedError(
                "the request's key belongs to a job with another file or other options; use a"
                " new key"
            )
        return known

    async def _submit(
        self,
        pieces: AsyncIterator[bytes],
        options: JobOptions,
        request_key: str | None,
        file_id: str | None = None,
        input_digest: str | None = None,
    ) -> StoredJob:
        """Submit a job. ``input_digest`` is the digest of a URL, and replaces the digest of the
        text.
        """
        self._validate(options)
        creating = asyncio.ensure_future(
            self._threads.run(self._submissions.create, options, file_id, request_key)
        )
        try:
            # the thread continues regardless, and its job must be deleted then
            job = await asyncio.shield(creating)
            is_sent = input_digest is None  # by the client, who may see all of it
            digest = await JobIngest(
                job, self._submissions, self._threads, self.limits, self._clock, is_sent
            ).run(pieces)
            return await self._threads.run(self._submissions.accept, job, input_digest or digest)
        except BaseException:  # also if the client has disconnected
            await asyncio.shield(self._discard(creating))
            raise

    async def _discard(self, creating: "asyncio.Future[StoredJob]") -> None:
        """Delete a submission, unless a thread that is still running accepts it."""
        # it was not created; or ``collect_garbage`` deletes it later
        with suppress(TramontaneError):
            await self._threads.run(self._submissions.delete, (await creating).number)

    def _validate(self, options: JobOptions) -> None:
        if options.endpoint not in (endpoints := self._settings.endpoints):
            raise JobRefusedError(
                f"endpoint is {options.endpoint!r:.80}; batch jobs are for {', '.join(endpoints)}"
            )
        metadata = options.metadata.items()
        too_long = any(
            len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE
            for key, value in metadata
        )
        if len(metadata) > MAX_METADATA or too_long:
            raise JobRefusedError(
                f"metadata may have {MAX_METADATA} keys of {MAX_METADATA_KEY} characters, with"
                f" texts of {MAX_METADATA_VALUE}"
            )

    async def get(self, job_id: str) -> Job:
        """Return a job: see ``JobService``."""
        return (await self.get_stored(job_id)).job

    async def get_stored(self, job_id: str) -> StoredJob:
        """Return a job in its stored form. Raises UnknownJobError."""
        return await self._threads.run(self._jobs.get, job_id)

    async def list(self, limit: int, after: str | None = None) -> Sequence[Job]:
        """List jobs, at most ``MAX_LIST``: see ``JobService``."""
        return [each.job for each in await self.list_stored(min(limit, MAX_LIST), after)]

    async def list_stored(self, limit: int, after: str | None = None) -> Sequence[StoredJob]:
        """List jobs in their stored form. Raises UnknownJobError."""
        return await self._threads.run(self._jobs.list, limit, after)

    async def cancel(self, job_id: str) -> Job:
        """Cancel a job: see ``JobService``."""
        return (await self.cancel_stored(job_id)).job

    async def cancel_stored(self, job_id: str) -> StoredJob:
        """Cancel a job and return its stored form. Raises UnknownJobError."""
        return await self._threads.run(self._jobs.cancel, job_id)

    async def watch(self, job_id: str) -> AsyncGenerator[Job, None]:
        """Yield a job after every change: see ``JobService``."""
        last: Job | None = None
        with self.streaming():
            while last is None or not last.state.has_ended:
                job = await self.get(job_id)
                if job == last:
                    await asyncio.sleep(self._poll_s)
                else:
                    yield (last := job)

    async def results(self, job_id: str, offset: int = 0) -> AsyncGenerator[ResultLine, None]:
        """Yield results: see ``JobService``."""
        with self.streaming():
            async with aclosing(self.stored_results(job_id, offset)) as results:
                async for result in results:
                    yield result.line

    async def stored_results(self, job_id: str, offset: int) -> AsyncGenerator[StoredResult, None]:
        """Yield results in their stored form; use it within ``streaming``. Raises UnknownJobError,
        also if the job is deleted.
        """
        while True:
            # read before its results: no result is written after the end of a job
            job = await self.get_stored(job_id)
            page = await self._threads.run(
                self._jobs.results, job, offset, MAX_RESULTS, MAX_RESULT_CHARS
            )
            for result in page:
                yield result
            offset += len(page)
            if not page and job.job.state.has_ended:
                if offset < job.job.num_lines:
                    raise UnknownJobError(
                        f"the batch job {job_id} was removed while its results were read"
                    )
                return
            if not page:
                await asyncio.sleep(self._poll_s)

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """Count one stream. Raises OverloadedError if there are too many."""
        with self._counted(self._streams, MAX_STREAMS, "streams of batch jobs are open"):
            yield

    @contextmanager
    def uploading(self) -> Iterator[None]:
        """Count one upload, which has a copy in the temporary folder. Raises OverloadedError if
        there are too many.
        """
        with self._counted(self._uploads, MAX_UPLOADS, "uploads are in progress"):
            yield

    @contextmanager
    def _counted(self, counts: Counter[str], most: int, what: str) -> Iterator[None]:
        """Count one of at most ``most``; one API key may have half of the number that others
        leave.
        """
        own = counts[self._tenant]
        left = most - (counts.total() - own)
        if own >= (left if self._tenant == KEYLESS else (left + 1) // 2):
            raise OverloadedError(
                f"{own} of your {what}, and there is no room for another one (a server process has"
                f" {most} for all keys); try again later",
                RETRY_AFTER_S,
            )
        counts[self._tenant] += 1
        try:
            yield
        finally:
            counts[self._tenant] -= 1

    async def check_upload(self, num_bytes: int) -> None:
        """Raise PipelineError or QuotaExceededError if a file of this size cannot be accepted
        now.
        """
        await self.require_accepting()
        await self._threads.run(self._quota.check_bytes, num_bytes)

    async def upload(self, filename: str, purpose: Purpose, pieces: Iterator[bytes]) -> FileRecord:
        """Store a file. Raises FileTooLargeError or QuotaExceededError."""
        await self.require_accepting()
        return await self._writes.run(self._tenant, self._files.write, filename, purpose, pieces)

    async def file(self, file_id: str) -> FileRecord:
        """Return a file's record. Raises UnknownFileError."""
        return await self._threads.run(self._files.get, file_id)

    async def list_files(
        self,
        limit: int,
        after: str | None = None,
        purpose: str | None = None,
        newest_first: bool = True,
    ) -> Sequence[FileRecord]:
        """List files. Raises UnknownFileError."""
        return await self._threads.run(self._files.list, limit, after, purpose, newest_first)

    async def delete_file(self, file_id: str) -> None:
        """Delete a file. Raises UnknownFileError."""
        await self._writes.run(self._tenant, self._files.delete, file_id)

    async def content(self, file_id: str) -> AsyncIterator[bytes]:
        """Return a file's bytes in pieces. Raises UnknownFileError, or PipelineError if the first
        piece cannot be read.
        """
        pieces = self._read(await self.file(file_id))
        return _with_first(await anext(pieces, b""), pieces)

    async def _read(self, file: FileRecord) -> AsyncGenerator[bytes, None]:
        """Yield a file's bytes in pieces. Raises JobStoreError."""
        try:
            async with aclosing(self._reads.read(self._tenant, self._files.read(file))) as pieces:
                async for piece in pieces:
                    yield piece
        except TimeoutError:
            raise JobStoreError(
                f"the jobs' storage has not delivered a file within {READ_TIMEOUT_S:.0f} s"
            ) from None

    async def collect_garbage(self) -> None:
        """Delete remains of submissions and files of processes that died, and jobs and files older
        than ``limits.keep_s``.

        Applies to all tenants.
        """
        if not self._database.is_created:
            return
        await self._threads.run(self._submissions.delete_abandoned)
        await self._threads.run(self._files.delete_abandoned)
        if self.limits.keep_s is not None:
            before = self._clock() - self.limits.keep_s
            await self._threads.run(self._submissions.discard_ended, before)
            await self._threads.run(self._files.discard_old, before)


def _check_digest(known: StoredJob, digest: str) -> None:
    """Raise JobRefusedError if a job was not made from this input; for jobs of version 0.1 this is
    unknown.
    """
    if known.input_digest not in (None, digest):
        raise JobRefusedError(
            "the request's key belongs to a job with other lines or another URL; use a new key"
        )


async def _with_first(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    async with aclosing(rest):
        yield first
        async for piece in rest:
            yield piece
