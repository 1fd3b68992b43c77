"""Bytes on local disk or object storage, by fsspec."""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from tramontane.proto.errors import ConfigError, JobStoreError
from tramontane.router.batch.storage_threads import Pieces

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
        """Write a file and return its size. Raises JobStoreError, and what ``pieces`` raises."""
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
        """Complete the file, which then survives a loss of power; return its size."""
        with _storage_errors(), self._file:
            if self._is_local:
                self._file.flush()
                os.fsync(self._file.fileno())
        return self._num_bytes


# of its scheme
def open_filesystem(url: str, what: str, **options: Any) -> tuple[AbstractFileSystem, str]:
    """Return a URL's file system and path. Raises ConfigError, which calls the URL ``what``, if it
    cannot be used.
    """
    try:
        filesystem, path = url_to_fs(url, **options)
    except (ValueError, ImportError) as error:  # no such scheme, or its library is not installed
        raise ConfigError(f"{what} is {redact(url)!r:.200}: {redact(str(error))}") from None
    except Exception as error:  # some connect, or open a file, and have errors of their own
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
    except Exception as error:  # file systems have errors of their own
        raise JobStoreError(f"the jobs' storage cannot be used now: {describe(error)}") from error


def describe(error: Exception) -> str:
    """Return an error of a file system as one line without credentials."""
    return f"{type(error).__name__}: {redact(' '.join(str(error).split())):.200}"


def redact(text: str) -> str:
    """Remove credentials from URLs: ``s3://key:secret@bucket`` becomes ``s3://***@bucket``."""
    return re.sub(r"://\S*@", "://***@", text)
