"""Files of clients: a row in the database for each, the bytes in a storage that fsspec supports."""

import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from sqlalchemy import ColumnElement, Row, delete, insert, select, update

from tramontane.proto.errors import ConfigError, FileTooLargeError, JobStoreError, UnknownFileError
from tramontane.proto.units import format_bytes
from tramontane.router.batch.database import Database, Scope, files
from tramontane.router.batch.quotas import TenantQuota
from tramontane.router.batch.storage_threads import Pieces

# Bytes on local disk or object storage, by fsspec.

PIECE = 2**20  # bytes


class JobStorage:
    """A folder at a URL, created by the first write. Methods block. Raises ConfigError for unknown
    URLs.
    """

    def __init__(self, url: str) -> None:
        self._filesystem, self._root = open_filesystem(url, "the jobs' storage (jobs_storage)")
        # on this machine
        self.folder = Path(self._root) if isinstance(self._filesystem, LocalFileSystem) else None

    def write(self, path: str, pieces: Iterable[bytes]) -> int:
        """Write a file and return its size. Raises JobStoreError, and the errors of ``pieces``."""
        file = self.create(path)
        try:
            for piece in pieces:
                file.write(piece)
        finally:
            num_bytes = file.close()
        return num_bytes

    def create(self, path: str) -> "StorageFile":
        """Open a new file for writing. Raises JobStoreError."""
        full_path = self._full_path(path)
        with _storage_errors():
            self._filesystem.makedirs(full_path.rpartition("/")[0], exist_ok=True)
            return StorageFile(
                self._filesystem.open(full_path, "wb"), is_local=self.folder is not None
            )

    def read(self, path: str) -> Pieces:
        """Yield a file's bytes in pieces. Raises JobStoreError, also if the file does not exist."""
        with _storage_errors():
            yield from read_file(self._filesystem.open(self._full_path(path), "rb"))

    def delete(self, path: str) -> None:
        """Delete a file if it exists. Raises JobStoreError."""
        with _storage_errors(), suppress(FileNotFoundError):
            self._filesystem.rm_file(self._full_path(path))

    def _full_path(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}"


class StorageFile:
    """A file that is being written. Methods block, and raise JobStoreError."""

    def __init__(self, file: BinaryIO, is_local: bool) -> None:
        self._file, self._is_local = file, is_local
        self._num_bytes = 0

    def write(self, piece: bytes) -> None:
        """Append a piece."""
        with _storage_errors():
            self._file.write(piece)
        self._num_bytes += len(piece)

    def close(self) -> int:
        """Complete the file, which then survives a power failure; return its size."""
        with _storage_errors(), self._file:
            if self._is_local:
                self._file.flush()
                os.fsync(self._file.fileno())
        return self._num_bytes


# of its scheme
def open_filesystem(url: str, what: str, **options: Any) -> tuple[AbstractFileSystem, str]:
    """Return a URL's file system and path. Raises ConfigError if it cannot be used; ``what`` names
    the URL in the message.
    """
    try:
        filesystem, path = url_to_fs(url, **options)
    except (ValueError, ImportError) as error:  # unknown scheme, or its library is not installed
        raise ConfigError(f"{what} is {redact(url)!r:.200}: {redact(str(error))}") from None
    except Exception as error:  # some connect, or open a file, and raise their own errors
        raise ConfigError(
            f"{what} is {redact(url)!r:.200}, which cannot be used: {describe(error)}"
        ) from None
    return filesystem, str(path)


def read_file(file: BinaryIO) -> Pieces:
    """Yield an open file's bytes in pieces, and close it. It blocks."""
    with file:
        while piece := file.read(PIECE):
            yield piece


@contextmanager
def _storage_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # file systems raise their own errors
        raise JobStoreError(f"the jobs' storage cannot be used now: {describe(error)}") from error


def describe(error: Exception) -> str:
    """Return an error of a file system as one line without credentials."""
    return f"{type(error).__name__}: {redact(' '.join(str(error).split())):.200}"


def redact(text: str) -> str:
    """Remove credentials from URLs: ``s3://key:secret@bucket`` becomes ``s3://***@bucket``."""
    return re.sub(r"://\S*@", "://***@", text)


Purpose = Literal["batch", "batch_output"]
MAX_NAME = 255  # characters
INCOMPLETE_TIMEOUT_S = 86_400.0  # a file that has not grown for this time will never be complete
# of a file that is being written, after which its size is recorded and checked
RECORD_BYTES = 2**26


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file. ``path`` is where its bytes are in the storage."""

    file_id: str
    filename: str
    purpose: Purpose
    num_bytes: int
    created_at: float
    path: str
    number: int = 0

    @classmethod
    def new(cls, filename: str, purpose: Purpose, now: float, num_bytes: int = 0) -> "FileRecord":
        """Create a record with a new id."""
        file_id = f"file-{uuid.uuid4().hex}"
        return cls(
            file_id, filename[:MAX_NAME], purpose, num_bytes, now, f"{purpose}/{file_id}.jsonl"
        )

    def as_row(self, scope: Scope, is_whole: bool) -> dict[str, Any]:
        """Return the column values of its row."""
        row = asdict(self) | scope.as_row() | {"is_whole": is_whole, "touched_at": self.created_at}
        del row["number"]
        return row


class FileStore:
    """The files of one tenant, and deletion of old files of all tenants. Methods block: call them
    in a thread.
    """

    def __init__(
        self,
        database: Database,
        storage: JobStorage,
        quota: TenantQuota,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database, self._storage, self._quota, self._clock = database, storage, quota, clock
        self._scope, self._max_bytes = quota.scope, quota.limits.max_bytes

    def write(self, filename: str, purpose: Purpose, pieces: Iterator[bytes]) -> FileRecord:
        """Store a file. Raises FileTooLargeError or QuotaExceededError; then the file is
        deleted.
        """
        record = FileRecord.new(filename, purpose, self._clock())
        self._database.write(insert(files).values(record.as_row(self._scope, is_whole=False)))
        try:
            self._record_size(
                record, self._storage.write(record.path, self._bounded(record, pieces))
            )
            self._database.write(
                update(files).where(files.c.file_id == record.file_id).values(is_whole=True)
            )
        except BaseException:
            self._forget(record)
            raise
        return self.get(record.file_id)

    def get(self, file_id: str) -> FileRecord:
        """Return a file's record. Raises UnknownFileError."""
        where = self._scope.where(files) & (files.c.file_id == file_id) & files.c.is_whole
        # PostgreSQL cannot compare a NUL
        rows = self._database.read(select(files).where(where)) if "\0" not in file_id else []
        if not rows:
            raise UnknownFileError(f"there is no file {file_id!r:.80}")
        return _record(rows[0])

    def list(
        self, limit: int, after: str | None, purpose: str | None, newest_first: bool
    ) -> Sequence[FileRecord]:
        """Return records of files, starting behind the file ``after``. Raises UnknownFileError."""
        where = self._scope.where(files) & files.c.is_whole
        if purpose is not None:
            where &= files.c.purpose == purpose
        if after is not None:
            number = self.get(after).number
            where &= files.c.number < number if newest_first else files.c.number > number
        order = files.c.number.desc() if newest_first else files.c.number
        return [
            _record(row)
            for row in self._database.read(select(files).where(where).order_by(order).limit(limit))
        ]

    def delete(self, file_id: str) -> None:
        """Delete a file; jobs made from it are not affected. Raises UnknownFileError."""
        self._forget(self.get(file_id))

    def read(self, record: FileRecord) -> Pieces:
        """Yield a file's bytes in pieces. Raises JobStoreError."""
        return self._storage.read(record.path)

    def discard_old(self, before: float) -> None:
        """Delete files of all tenants that were created before this time. Jobs do not need their
        input after submission.
        """
        self._discard(files.c.is_whole & (files.c.created_at < before))

    def delete_abandoned(self) -> None:
        """Delete incomplete files of processes that died, of all tenants."""
        self._discard(
            ~files.c.is_whole & (files.c.touched_at < self._clock() - INCOMPLETE_TIMEOUT_S)
        )

    def _discard(self, which: ColumnElement[bool]) -> None:
        for row in self._database.read(
            select(files).where(which, files.c.queue == self._scope.queue)
        ):
            self._forget(_record(row))

    def _forget(self, record: FileRecord) -> None:
        with suppress(JobStoreError):  # the row remains, so that it can be deleted later
            self._storage.delete(record.path)
            self._database.write(delete(files).where(files.c.file_id == record.file_id))

    def _bounded(self, record: FileRecord, pieces: Iterator[bytes]) -> Iterator[bytes]:
        num_bytes = num_recorded = 0
        for piece in pieces:
            num_bytes += len(piece)
            if num_bytes > self._max_bytes:
                raise FileTooLargeError(
                    f"the file is larger than {format_bytes(self._max_bytes)}; split it"
                )
            if num_bytes - num_recorded >= RECORD_BYTES:
                self._record_size(record, num_bytes)
                num_recorded = num_bytes
            yield piece

    def _record_size(self, record: FileRecord, num_bytes: int) -> None:
        """Record that the file has grown. Raises QuotaExceededError."""
        values = {"num_bytes": num_bytes, "touched_at": self._clock()}
        self._database.write(update(files).where(files.c.file_id == record.file_id).values(values))
        self._quota.check_bytes()


def _record(row: Row[Any]) -> FileRecord:
    return FileRecord(
        row.file_id, row.filename, row.purpose, row.num_bytes, row.created_at, row.path, row.number
    )
