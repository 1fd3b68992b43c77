"""``JobService`` over the store, for the HTTP and gRPC endpoints. Runners may work in other processes."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field

from tramontane.proto.errors import JobRefusedError, OverloadedError, TramontaneError, UnknownJobError
from tramontane.proto.jobs import Endpoint, Job, JobOptions, ResultLine
from tramontane.router.batch.database import Database
from tramontane.router.batch.files import FileRecord, FileStore, Purpose
from tramontane.router.batch.input_lines import JobLimits
from tramontane.router.batch.outcome_writer import JobThreadPool
from tramontane.router.batch.storage import JobStorage, UrlReader
from tramontane.router.batch.store import JobStore, StoredJob, StoredResult
from tramontane.router.batch.submissions import RETRY_AFTER_S, JobIngest, JobSubmissions

MAX_RESULTS, MAX_RESULT_CHARS = 500, 2**18  # of one stream, in memory while its client is slow
POLL_INTERVAL_S = 0.5
THREADS = 8
MAX_STREAMS = 512  # of results and of states, each of which queries the database twice a second
MAX_LIST = 100
MAX_REQUEST_KEY = 256
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512


@dataclass(frozen=True, slots=True)
class JobSettings:
    """Where jobs are stored. ``queue``: the served model's name. ``url_prefixes``: prefixes of URLs that clients may submit."""

    database: str = field(repr=False)  # may hold a password, as may the next
    storage: str = field(repr=False)
    queue: str
    endpoints: tuple[Endpoint, ...] = ("/v1/completions",)
    url_prefixes: tuple[str, ...] = ()
    limits: JobLimits = field(default_factory=JobLimits)


class BatchService:
    """Jobs and files. Blocking calls run in threads; if the database fails, methods raise PipelineError.

    Raises ConfigError for unsuitable settings.
    """

    def __init__(self, settings: JobSettings, clock: Callable[[], float] = time.time, poll_s: float = POLL_INTERVAL_S) -> None:
        self.limits = settings.limits
        self._endpoints, self._clock, self._poll_s = settings.endpoints, clock, poll_s
        self._urls = UrlReader(settings.url_prefixes)
        self._threads = JobThreadPool(THREADS)
        self._num_streams = 0
        self._database = Database(settings.database)
        self._submissions = JobSubmissions(self._database, settings.queue, settings.limits, clock)
        self._jobs = JobStore(self._database, settings.queue, clock)
        storage = JobStorage(settings.storage)
        self._files = FileStore(self._database, storage, settings.queue, settings.limits.max_bytes, clock)

    def close(self) -> None:
        """Wait for running calls and close the database."""
        self._threads.close()
        self._database.close()

    async def submit(self, lines: AsyncIterator[bytes], options: JobOptions, request_key: str | None = None) -> Job:
        """Submit a text: see ``JobService``."""
        known = await self._find_by_request_key(request_key, options, None)
        return (known or await self._submit(lines, options, None, request_key)).job

    async def submit_url(self, url: str, options: JobOptions, request_key: str | None = None) -> Job:
        """Submit what a URL holds: see ``JobService``."""
        known = await self._find_by_request_key(request_key, options, None)
        return (known or await self._submit(self._urls.read(url), options, None, request_key)).job

    async def submit_file(self, file_id: str, options: JobOptions, request_key: str | None = None) -> StoredJob:
        """Submit an uploaded file, as ``submit`` does. Raises UnknownFileError."""
        if (known := await self._find_by_request_key(request_key, options, file_id)) is not None:
            return known
        file = await self.file(file_id)
        if file.purpose != "batch":
            raise JobRefusedError(f"{file_id} was not uploaded with purpose batch")
        return await self._submit(self._files.open(file), options, file_id, request_key)

    async def _find_by_request_key(self, request_key: str | None, options: JobOptions, file_id: str | None) -> StoredJob | None:
        """Return the job that the same request has created. Options and source are compared, lines are not."""
        if request_key is None:
            return None
        if not 0 < len(request_key) <= MAX_REQUEST_KEY or "\0" in request_key:
            raise JobRefusedError(f"the request's key must have 1 to {MAX_REQUEST_KEY} characters")
        known = await self._threads.run(self._submissions.find_by_request_key, request_key)
        if known is not None and (known.job.options, known.input_file) != (options, file_id):
            raise JobRefusedError("the request's key belongs to a job with another file or other options; use a new key")
        return known

    async def _submit(
        self, pieces: AsyncIterator[bytes], options: JobOptions, file_id: str | None, request_key: str | None
    ) -> StoredJob:
        self._validate(options)
        creating = asyncio.ensure_future(self._threads.run(self._submissions.create, options, file_id, request_key))
        try:
            job = await asyncio.shield(creating)  # the thread continues in any case, and its job must be deleted then
            await JobIngest(job, self._submissions, self._threads, self.limits, self._clock).run(pieces)
            return await self._threads.run(self._submissions.accept, job)
        except BaseException:  # also if the client has left
            await asyncio.shield(self._discard(creating))
            raise

    async def _discard(self, creating: "asyncio.Future[StoredJob]") -> None:
        """Delete a submission, unless a thread that is still running accepts it."""
        with suppress(TramontaneError):  # it was not created; or ``collect_garbage`` deletes it later
            await self._threads.run(self._submissions.delete, (await creating).number)

    def _validate(self, options: JobOptions) -> None:
        if options.endpoint not in self._endpoints:
            raise JobRefusedError(f"endpoint is {options.endpoint!r:.80}; batch jobs are for {', '.join(self._endpoints)}")
        metadata = options.metadata.items()
        too_long = any(len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE for key, value in metadata)
        if len(metadata) > MAX_METADATA or too_long:
            raise JobRefusedError(
                f"metadata may have {MAX_METADATA} keys of {MAX_METADATA_KEY} characters, with texts of {MAX_METADATA_VALUE}"
            )

    async def get(self, job_id: str) -> Job:
        """Return a job: see ``JobService``."""
        return (await self.get_stored(job_id)).job

    async def get_stored(self, job_id: str) -> StoredJob:
        """Return a job as it is stored. Raises UnknownJobError."""
        return await self._threads.run(self._jobs.get, job_id)

    async def list(self, limit: int, after: str | None = None) -> Sequence[Job]:
        """List jobs, at most ``MAX_LIST``: see ``JobService``."""
        return [each.job for each in await self.list_stored(min(limit, MAX_LIST), after)]

    async def list_stored(self, limit: int, after: str | None = None) -> Sequence[StoredJob]:
        """List jobs as they are stored. Raises UnknownJobError."""
        return await self._threads.run(self._jobs.list, limit, after)

    async def cancel(self, job_id: str) -> Job:
        """Cancel a job: see ``JobService``."""
        return (await self.cancel_stored(job_id)).job

    async def cancel_stored(self, job_id: str) -> StoredJob:
        """Cancel a job and return it as it is stored. Raises UnknownJobError."""
        return await self._threads.run(self._jobs.cancel, job_id)

    async def watch(self, job_id: str) -> AsyncIterator[Job]:
        """Yield a job after every change: see ``JobService``."""
        last: Job | None = None
        with self.streaming():
            while last is None or not last.state.has_ended:
                job = await self.get(job_id)
                if job == last:
                    await asyncio.sleep(self._poll_s)
                else:
                    yield (last := job)

    async def results(self, job_id: str, offset: int = 0) -> AsyncIterator[ResultLine]:
        """Yield results: see ``JobService``."""
        with self.streaming():
            async with aclosing(self.stored_results(job_id, offset)) as results:
                async for result in results:
                    yield result.line

    async def stored_results(self, job_id: str, offset: int = 0) -> AsyncGenerator[StoredResult, None]:
        """Yield results as they are stored; use it within ``streaming``. Raises UnknownJobError, also if the job is deleted."""
        while True:
            job = await self.get_stored(job_id)  # read before its results: none is written after the end of a job
            page = await self._threads.run(self._jobs.results, job, offset, MAX_RESULTS, MAX_RESULT_CHARS)
            for result in page:
                yield result
            offset += len(page)
            if not page and job.job.state.has_ended:
                if offset < job.job.num_lines:
                    raise UnknownJobError(f"the batch job {job_id} was removed while its results were read")
                return
            if not page:
                await asyncio.sleep(self._poll_s)

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """Count one stream. Raises OverloadedError if there are too many."""
        if self._num_streams == MAX_STREAMS:
            raise OverloadedError(f"{MAX_STREAMS} streams of batch jobs are open; try again later", RETRY_AFTER_S)
        self._num_streams += 1
        try:
            yield
        finally:
            self._num_streams -= 1

    async def upload(self, filename: str, purpose: Purpose, pieces: Iterator[bytes]) -> FileRecord:
        """Store a file. Raises FileTooLargeError."""
        return await self._threads.run(self._files.write, filename, purpose, pieces)

    async def file(self, file_id: str) -> FileRecord:
        """Return a file's record. Raises UnknownFileError."""
        return await self._threads.run(self._files.get, file_id)

    async def list_files(
        self, limit: int, after: str | None = None, purpose: str | None = None, newest_first: bool = True
    ) -> Sequence[FileRecord]:
        """List files. Raises UnknownFileError."""
        return await self._threads.run(self._files.list, limit, after, purpose, newest_first)

    async def delete_file(self, file_id: str) -> None:
        """Delete a file. Raises UnknownFileError."""
        await self._threads.run(self._files.delete, file_id)

    async def content(self, file_id: str) -> AsyncIterator[bytes]:
        """Return a file's bytes in pieces. Raises UnknownFileError, or PipelineError if the first piece cannot be read."""
        pieces = self._files.open(await self.file(file_id))
        return _with_first(await anext(pieces, b""), pieces)

    async def collect_garbage(self) -> None:
        """Delete what died processes have left of submissions and files, and what is older than ``limits.keep_s``."""
        if not self._database.is_created:
            return
        await self._threads.run(self._submissions.delete_abandoned)
        await self._threads.run(self._files.delete_abandoned)
        if self.limits.keep_s is not None:
            before = self._clock() - self.limits.keep_s
            await self._threads.run(self._submissions.discard_ended, before)
            await self._threads.run(self._files.discard_old, before)


async def _with_first(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    async with aclosing(rest):
        yield first
        async for piece in rest:
            yield piece
