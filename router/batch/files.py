"""Files of clients: a row in the database for each, the bytes in a storage that fsspec supports."""

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from sqlalchemy import ColumnElement, Row, delete, insert, select, update

from tramontane.proto.errors import FileTooLargeError, JobStoreError, UnknownFileError
from tramontane.router.batch.database import Database, files
from tramontane.router.batch.storage import JobStorage

Purpose = Literal["batch", "batch_output"]
MAX_NAME = 255  # characters
INCOMPLETE_TIMEOUT_S = 86_400.0  # a file that is not complete by then never will be


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file. ``path`` is where its bytes are in the storage."""

    file_id: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: float
    path: str
    number: int = 0

    @classmethod
    def new(cls, filename: str, purpose: Purpose, now: float, num_bytes: int = 0) -> "FileRecord":
        """Create a record with a new id."""
        file_id = f"file-{uuid.uuid4().hex}"
        return cls(file_id, filename[:MAX_NAME], purpose, num_bytes, now, f"{purpose}/{file_id}.jsonl")

    def with_size(self, num_bytes: int) -> "FileRecord":
        """Return a copy of this size."""
        return replace(self, num_bytes=num_bytes)

    def as_row(self, queue: str, is_whole: bool) -> dict[str, Any]:
        """Return the columns of its row."""
        names = ("file_id", "filename", "purpose", "num_bytes", "created_at", "path")
        return {name: getattr(self, name) for name in names} | {
            "queue": queue,
            "is_whole": is_whole,
            "touched_at": self.created_at,
        }


class FileStore:
    """The files of one queue. Methods block: call them in a thread."""

    def __init__(
        self, database: Database, storage: JobStorage, queue: str, max_bytes: int, clock: Callable[[], float] = time.time
    ) -> None:
        self.max_bytes = max_bytes
        self._database, self._storage, self._queue, self._clock = database, storage, queue, clock

    def write(self, filename: str, purpose: Purpose, pieces: Iterator[bytes]) -> FileRecord:
        """Store a file. Raises FileTooLargeError; then nothing is kept."""
        record = FileRecord.new(filename, purpose, self._clock())
        with self._database.writing() as connection:
            connection.execute(insert(files).values(record.as_row(self._queue, is_whole=False)))
        this = files.c.file_id == record.file_id
        try:
            num_bytes = self._storage.write(record.path, self._bounded(pieces))
            with self._database.writing() as connection:
                connection.execute(update(files).where(this).values(is_whole=True, num_bytes=num_bytes))
        except BaseException:
            self._forget(record)
            raise
        return self.get(record.file_id)

    def get(self, file_id: str) -> FileRecord:
        """Return a file's record. Raises UnknownFileError."""
        if self._database.is_created and "\0" not in file_id:  # PostgreSQL cannot compare a NUL
            where = (files.c.file_id == file_id) & (files.c.queue == self._queue) & files.c.is_whole
            with self._database.reading() as connection:
                row = connection.execute(select(files).where(where)).one_or_none()
            if row is not None:
                return _record(row)
        raise UnknownFileError(f"there is no file {file_id!r:.80}")

    def list(
        self, limit: int, after: str | None = None, purpose: str | None = None, newest_first: bool = True
    ) -> Sequence[FileRecord]:
        """Return records of files, starting behind the file ``after``. Raises UnknownFileError."""
        where = (files.c.queue == self._queue) & files.c.is_whole
        if purpose is not None:
            where &= files.c.purpose == purpose
        if after is not None:
            number = self.get(after).number
            where &= files.c.number < number if newest_first else files.c.number > number
        if not self._database.is_created:
            return []
        order = files.c.number.desc() if newest_first else files.c.number
        with self._database.reading() as connection:
            rows = connection.execute(select(files).where(where).order_by(order).limit(limit)).all()
        return [_record(row) for row in rows]

    def delete(self, file_id: str) -> None:
        """Delete a file; jobs that were made from it do not change. Raises UnknownFileError."""
        self._forget(self.get(file_id))

    def open(self, record: FileRecord) -> AsyncGenerator[bytes, None]:
        """Yield a file's bytes in pieces. Raises JobStoreError."""
        return self._storage.read(record.path)

    def discard_old(self, before: float) -> None:
        """Delete files that were created before this time. Jobs do not need their input after submission."""
        self._discard(files.c.is_whole & (files.c.created_at < before))

    def delete_abandoned(self) -> None:
        """Delete incomplete files of processes that died."""
        self._discard(~files.c.is_whole & (files.c.touched_at < self._clock() - INCOMPLETE_TIMEOUT_S))

    def _discard(self, which: ColumnElement[bool]) -> None:
        with self._database.reading() as connection:
            rows = connection.execute(select(files).where(which, files.c.queue == self._queue)).all()
        for row in rows:
            self._forget(_record(row))

    def _forget(self, record: FileRecord) -> None:
        with suppress(JobStoreError):  # the row remains, so that it can be deleted later
            self._storage.delete(record.path)
            with self._database.writing() as connection:
                connection.execute(delete(files).where(files.c.file_id == record.file_id))

    def _bounded(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        num_bytes = 0
        for piece in pieces:
            num_bytes += len(piece)
            if num_bytes > self.max_bytes:
                raise FileTooLargeError(f"the file is larger than {self.max_bytes} bytes; split it")
            yield piece


def _record(row: Row[Any]) -> FileRecord:
    return FileRecord(row.file_id, row.filename, row.purpose, row.num_bytes, row.created_at, row.path, row.number)
