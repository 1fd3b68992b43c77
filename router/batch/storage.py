"""Bytes on local disk or object storage, by fsspec; and URLs that clients may have read."""

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

PIECE = 2**20


class JobStorage:
    """A folder at any URL that fsspec knows; made at the first write. Methods block, but for ``read``."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError."""
        self._filesystem, self._root = _filesystem_of(url, "the jobs' storage")
        self.folder = Path(self._root) if isinstance(self._filesystem, LocalFileSystem) else None  # on this machine

    def write(self, path: str, pieces: Iterable[bytes]) -> int:
        """Returns how many bytes. Raises JobStoreError, and whatever ``pieces`` raise."""
        num_bytes = 0
        whole = self._whole(path)
        with _storage_errors():
            self._filesystem.makedirs(whole.rpartition("/")[0], exist_ok=True)
            file = self._filesystem.open(whole, "wb")
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
        """Raises JobStoreError."""
        with _storage_errors():  # a file that is gone is one of them
            async for piece in _pieces(self._filesystem, self._whole(path)):
                yield piece

    def delete(self, path: str) -> None:
        """If it is there. Raises JobStoreError."""
        with _storage_errors(), suppress(FileNotFoundError):
            self._filesystem.rm_file(self._whole(path))

    def _whole(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}"


class UrlReader:
    """Reads what clients name by URL, if it is below one of ``prefixes``: ``file:///data/in``, ``s3://bucket/in``."""

    def __init__(self, prefixes: Sequence[str]) -> None:
        """Raises ConfigError."""
        for prefix in prefixes:
            if not urlsplit(prefix).scheme or "://" not in prefix:
                raise ConfigError(f"{_redacted(prefix)!r} is no prefix of URLs; begin it with a scheme, as file:///data/in does")
            _filesystem_of(prefix, "a prefix of URLs")
        self._prefixes = [_canonical(prefix).rstrip("/") + "/" for prefix in prefixes]

    async def read(self, url: str) -> AsyncIterator[bytes]:
        """Raises JobRefusedError if that is not allowed, or cannot be read."""
        canonical = await asyncio.to_thread(_canonical, url)  # following links looks at the disk
        if not any(canonical.startswith(prefix) for prefix in self._prefixes) or _has_parent_refs(canonical):
            raise JobRefusedError(f"{url!r:.200} is not among the URLs that this server may read")
        try:
            filesystem, path = _filesystem_of(canonical, "the URL")
            async for piece in _pieces(filesystem, path):
                yield piece
        except TramontaneError:
            raise
        except Exception as error:  # every file system has its own
            raise JobRefusedError(f"{url!r:.200} cannot be read: {_reason(error)}") from error


def _canonical(url: str) -> str:
    """Of a local file where it really is, so that no link leads out of what is allowed."""
    path = url.removeprefix("file://")
    return f"file://{os.path.realpath(path)}" if path != url and path.startswith("/") and "\0" not in path else url


def _has_parent_refs(url: str) -> bool:
    """Chained URLs (``zip::file://``) read from elsewhere than they seem to; so may dots."""
    return "::" in url or "\\" in url or ".." in unquote(url).split("/")


def _filesystem_of(url: str, what: str) -> tuple[AbstractFileSystem, str]:
    try:
        filesystem, path = url_to_fs(url)
    except (ValueError, ImportError) as error:  # no such scheme, or its library is not installed
        raise ConfigError(f"{what} is {_redacted(url)!r:.200}: {_redacted(str(error))}") from None
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
    except Exception as error:  # every file system has its own
        raise JobStoreError(f"the jobs' storage cannot be used now: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {_redacted(' '.join(str(error).split())):.200}"


def _redacted(text: str) -> str:
    """Without who is named before a host, and the password: ``s3://key:secret@bucket``."""
    return re.sub(r"://\S*@", "://***@", text)
