"""Outcomes of lines: written to the database, all that are ready in one transaction, and at the
job's end to result files.

A result file has OpenAI's format, one line per result; answers are in one file and errors in
another. Files are written a page at a time, so that jobs that end together share the thread for it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from tramontane.proto.errors import JobStoreError
from tramontane.router.batch.claims import Claim, JobClaimStore, Outcome
from tramontane.router.batch.database import JobThreadPool
from tramontane.router.batch.files import FileRecord, JobStorage, StorageFile
from tramontane.router.batch.schema import result_line

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_OUTCOMES = 500  # of one transaction, for which other writers wait
RETRY_S = 1.0
RESULTS_AT_ONCE = 1000  # read for the result files
Sleep = Callable[[float], Awaitable[None]]


async def retry_while_store_down(call: Callable[[], Awaitable[T]], sleep: Sleep) -> T:
    """Await a call, and repeat it every ``RETRY_S`` while the database or the storage is
    unavailable.
    """
    while True:
        try:
            return await call()
        except JobStoreError as error:
            logger.warning("batch jobs wait for their store: %s", error)
        await sleep(RETRY_S)


class OutcomeWriter:
    """Writes outcomes while ``run`` runs."""

    def __init__(self, claims: JobClaimStore, sleep: Sleep, threads: JobThreadPool) -> None:
        self._claims, self._sleep, self._threads = claims, sleep, threads
        self._ready: list[tuple[Claim, Outcome, asyncio.Future[None]]] = []
        self._wakeup = asyncio.Event()

    async def write(self, claim: Claim, outcome: Outcome) -> None:
        """Return when the outcome is on disk. Raises JobLostError."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ready.append((claim, outcome, written))
        self._wakeup.set()
        await written

    async def run(self) -> None:
        """Write outcomes until cancelled."""
        while True:
            await self._wakeup.wait()
            batch, self._ready = self._ready[:MAX_OUTCOMES], self._ready[MAX_OUTCOMES:]
            if not self._ready:
                self._wakeup.clear()
            by_claim: dict[Claim, list[tuple[Outcome, asyncio.Future[None]]]] = {}
            for claim, outcome, written in batch:
                by_claim.setdefault(claim, []).append((outcome, written))
            for claim, ready in by_claim.items():
                await self._finish(claim, ready)

    async def _finish(
        self, claim: Claim, ready: list[tuple[Outcome, asyncio.Future[None]]]
    ) -> None:
        outcomes = [outcome for outcome, _ in ready]
        failure: Exception | None = None
        try:
            await retry_while_store_down(
                lambda: self._threads.run(self._claims.finish, claim, outcomes), self._sleep
            )
        # usually JobLostError; a defect must not keep outcomes of other jobs from being written
        except Exception as error:
            failure = error
        for _, written in ready:
            if written.done():  # the waiting task was cancelled
                continue
            if failure is None:
                written.set_result(None)
            else:
                written.set_exception(failure)


async def write_result_files(
    claims: JobClaimStore, storage: JobStorage, claim: Claim, sleep: Sleep, threads: JobThreadPool
) -> tuple[FileRecord | None, FileRecord | None]:
    """Write the answers and the errors of a job whose lines are all done; None stands for an empty
    file, which is not written.

    Clients see the files once the job's end is written. Writing restarts while the store is
    unavailable.
    """

    async def write() -> tuple[FileRecord | None, FileRecord | None]:
        files = _ResultFiles(claims, storage, claim)
        try:
            while await threads.run(files.write_page):
                pass
            return await threads.run(files.close)
        except BaseException:
            await asyncio.shield(threads.run(files.discard))
            raise

    return await retry_while_store_down(write, sleep)


class _ResultFiles:
    """The files of one job while they are written. Methods block, and raise JobStoreError."""

    def __init__(self, claims: JobClaimStore, storage: JobStorage, claim: Claim) -> None:
        self._claims, self._storage, self._claim = claims, storage, claim
        self._offset = 0
        self._records: dict[bool, FileRecord] = {}  # by whether the file has the errors
        self._open: dict[bool, StorageFile] = {}

    def write_page(self) -> bool:
        """Write some results; return False if there were no more."""
        page = self._claims.results(self._claim, self._offset, RESULTS_AT_ONCE)
        for is_error in (False, True):
            lines = [
                result_line(self._claim.job_id, result)
                for result in page
                if result.line.is_error == is_error
            ]
            if lines:
                self._file(is_error).write(b"".join(lines))
        self._offset += len(page)
        return bool(page)

    def _file(self, is_error: bool) -> StorageFile:
        if is_error not in self._open:
            name = f"{self._claim.job_id}_{'error' if is_error else 'output'}.jsonl"
            record = FileRecord.new(name, "batch_output", self._claims.clock())
            self._records[is_error] = record
            self._claims.announce_file(self._claim, record)
            self._open[is_error] = self._storage.create(record.path)
        return self._open[is_error]

    def close(self) -> tuple[FileRecord | None, FileRecord | None]:
        """Complete the files, and return the record of each."""
        written = {
            is_error: replace(self._records[is_error], num_bytes=file.close())
            for is_error, file in self._open.items()
        }
        return written.get(False), written.get(True)

    def discard(self) -> None:
        """Delete the files as far as possible; ``FileStore.delete_abandoned`` deletes announced
        files that remain.
        """
        for file in self._open.values():
            with suppress(JobStoreError):
                file.close()
        for record in self._records.values():
            with suppress(JobStoreError):
                self._storage.delete(record.path)
                self._claims.withdraw_file(record)
