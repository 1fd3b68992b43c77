"""Bytes on local disk or object storage, by fsspec; and reading of URLs that clients submit."""

import asyncio
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from tramontane.proto.errors import ConfigError, JobRefusedError, JobStoreError, TramontaneError

PIECE = 2**20  # bytes


class JobStorage:
    """A folder at any URL that fsspec knows, created by the first write. Methods block, except ``read``.

    Raises ConfigError for an unknown URL.
    """

    def __init__(self, url: str) -> None:
        self._filesystem, self._root = _open_filesystem(url, "the jobs' storage")
        self.folder = Path(self._root) if isinstance(self._filesystem, LocalFileSystem) else None  # on this machine

    def write(self, path: str, pieces: Iterable[bytes]) -> int:
        """Write a file and return its size. Raises JobStoreError, and what ``pieces`` raises."""
        num_bytes = 0
        full_path = self._full_path(path)
        with _storage_errors():
            self._filesystem.makedirs(full_path.rpartition("/")[0], exist_ok=True)
            file = self._filesystem.open(full_path, "wb")
        try:
            for piece in pieces:
                with _storage_errors():
                    file.write(piece)
                num_bytes += len(piece)
            if self.folder is not None:
                with _storage_errors():
                    file.flush()
                    os.fsync(file.fileno())
        finally:
            with _storage_errors():
                file.close()
        return num_bytes

    async def read(self, path: str) -> AsyncGenerator[bytes, None]:
        """Yield a file's bytes in pieces. Raises JobStoreError, also if the file does not exist."""
        with _storage_errors():
            async for piece in _pieces(self._filesystem, self._full_path(path)):
                yield piece

    def delete(self, path: str) -> None:
        """Delete a file if it exists. Raises JobStoreError."""
        with _storage_errors(), suppress(FileNotFoundError):
            self._filesystem.rm_file(self._full_path(path))

    def _full_path(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}"


class UrlReader:
    """Reads URLs that clients submit, if they are below one of ``prefixes``: ``file:///data/in``, ``s3://bucket/in``.

    Raises ConfigError for an unsuitable prefix.
    """

    def __init__(self, prefixes: Sequence[str]) -> None:
        for prefix in prefixes:
            if not urlsplit(prefix).scheme or "://" not in prefix:
                raise ConfigError(f"{_redact(prefix)!r} is not a prefix of URLs; start it with a scheme, such as file:///data/in")
            _open_filesystem(prefix, "a prefix of URLs")
        self._prefixes = [_canonicalize(prefix).rstrip("/") + "/" for prefix in prefixes]

    async def read(self, url: str) -> AsyncIterator[bytes]:
        """Yield a URL's bytes in pieces. Raises JobRefusedError if it is not allowed or cannot be read."""
        canonical = await asyncio.to_thread(_canonicalize, url)  # resolving links reads the disk
        if not any(canonical.startswith(prefix) for prefix in self._prefixes) or _has_parent_refs(canonical):
            raise JobRefusedError(f"{url!r:.200} is not among the URLs that this server may read")
        try:
            filesystem, path = _open_filesystem(canonical, "the URL")
            async for piece in _pieces(filesystem, path):
                yield piece
        except TramontaneError:
            raise
        except Exception as error:  # file systems have errors of their own
            raise JobRefusedError(f"{url!r:.200} cannot be read: {_reason(error)}") from error


def _canonicalize(url: str) -> str:
    """Resolve links in the URL of a local file, so that no link leads out of the allowed folders."""
    path = url.removeprefix("file://")
    return f"file://{os.path.realpath(path)}" if path != url and path.startswith("/") and "\0" not in path else url


def _has_parent_refs(url: str) -> bool:
    """Whether a URL may refer to a place outside its prefix: chained URLs (``zip::file://``) and dots do."""
    return "::" in url or "\\" in url or ".." in unquote(url).split("/")


def _open_filesystem(url: str, what: str) -> tuple[AbstractFileSystem, str]:
    try:
        filesystem, path = url_to_fs(url)
    except (ValueError, ImportError) as error:  # no such scheme, or its library is not installed
        raise ConfigError(f"{what} is {_redact(url)!r:.200}: {_redact(str(error))}") from None
    return filesystem, str(path)


async def _pieces(filesystem: AbstractFileSystem, path: str) -> AsyncIterator[bytes]:
    file = await asyncio.to_thread(filesystem.open, path, "rb")
    try:
        while piece := await asyncio.to_thread(file.read, PIECE):
            yield piece
    finally:
        file.close()


@contextmanager
def _storage_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # file systems have errors of their own
        raise JobStoreError(f"the jobs' storage cannot be used now: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {_redact(' '.join(str(error).split())):.200}"


def _redact(text: str) -> str:
    """Remove credentials from URLs: ``s3://key:secret@bucket`` becomes ``s3://***@bucket``."""
    return re.sub(r"://\S*@", "://***@", text)
