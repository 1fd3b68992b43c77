"""Files that clients give and get: a row of each in the database, the bytes in a storage that fsspec reaches."""

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
MAX_NAME = 255
ABANDONED_AFTER_S = 86_400.0  # a file that is not whole by then never will be


@dataclass(frozen=True, slots=True)
class FileRecord:
    """``path`` is where its bytes are in the storage."""

    file_id: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: float
    path: str
    number: int = 0

    @classmethod
    def new(cls, filename: str, purpose: Purpose, now: float, num_bytes: int = 0) -> "FileRecord":
        file_id = f"file-{uuid.uuid4().hex}"
        return cls(file_id, filename[:MAX_NAME], purpose, num_bytes, now, f"{purpose}/{file_id}.jsonl")

    def of_size(self, num_bytes: int) -> "FileRecord":
        return replace(self, num_bytes=num_bytes)

    def as_row(self, queue: str, is_whole: bool) -> dict[str, Any]:
        names = ("file_id", "filename", "purpose", "num_bytes", "created_at", "path")
        return {name: getattr(self, name) for name in names} | {
            "queue": queue,
            "is_whole": is_whole,
            "touched_at": self.created_at,
        }


class FileStore:
    """Files of one queue. Methods block: call them beside the event loop."""

    def __init__(
        self, database: Database, storage: JobStorage, queue: str, max_bytes: int, clock: Callable[[], float] = time.time
    ) -> None:
        self.max_bytes = max_bytes
        self._database, self._storage, self._queue, self._clock = database, storage, queue, clock

    def write(self, filename: str, purpose: Purpose, pieces: Iterator[bytes]) -> FileRecord:
        """Raises FileTooLargeError, and then nothing is kept."""
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
        """Raises UnknownFileError."""
        if self._database.is_created and "\0" not in file_id:  # which PostgreSQL would not even compare
            where = (files.c.file_id == file_id) & (files.c.queue == self._queue) & files.c.is_whole
            with self._database.reading() as connection:
                row = connection.execute(select(files).where(where)).one_or_none()
            if row is not None:
                return _record(row)
        raise UnknownFileError(f"there is no file {file_id!r:.80}")

    def list(
        self, limit: int, after: str | None = None, purpose: str | None = None, newest_first: bool = True
    ) -> Sequence[FileRecord]:
        """Raises UnknownFileError."""
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
        """Of a job that was made of it nothing changes. Raises UnknownFileError."""
        self._forget(self.get(file_id))

    def open(self, record: FileRecord) -> AsyncGenerator[bytes, None]:
        return self._storage.read(record.path)

    def discard_old(self, before: float) -> None:
        """Whatever was whole by then, whoever needs it: jobs do not, once they are submitted."""
        self._discard(files.c.is_whole & (files.c.created_at < before))

    def delete_abandoned(self) -> None:
        """What processes that died had begun to write."""
        self._discard(~files.c.is_whole & (files.c.touched_at < self._clock() - ABANDONED_AFTER_S))

    def _discard(self, which: ColumnElement[bool]) -> None:
        with self._database.reading() as connection:
            rows = connection.execute(select(files).where(which, files.c.queue == self._queue)).all()
        for row in rows:
            self._forget(_record(row))

    def _forget(self, record: FileRecord) -> None:
        with suppress(JobStoreError):  # the row says where what is left can be found
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
