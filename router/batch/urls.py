"""Reading of URLs that clients submit: only below the allowed prefixes, wherever links and redirects lead."""

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Sequence
from typing import Any, BinaryIO, cast
from urllib.parse import unquote, urlsplit

from fsspec.implementations.local import LocalFileSystem

from tramontane.proto.errors import ConfigError, JobRefusedError, TramontaneError
from tramontane.router.batch.storage import describe, open_filesystem, read_pieces, redact

LOCAL_SCHEMES = ("file://", "local://")


class UrlReader:
    """Reads clients' URLs below any of ``prefixes``: ``file:///data/in``, ``s3://bucket/in``. Raises ConfigError for others."""

    def __init__(self, prefixes: Sequence[str]) -> None:
        self._local_folders: list[str] = []
        for prefix in prefixes:
            if not urlsplit(prefix).scheme or "://" not in prefix:
                raise ConfigError(f"{redact(prefix)!r} is not a prefix of URLs; start it with a scheme, such as file:///data/in")
            filesystem, path = open_filesystem(prefix, "a prefix of URLs")
            if isinstance(filesystem, LocalFileSystem):
                self._local_folders.append(os.path.realpath(path).rstrip("/") + "/")
        self._prefixes = [_canonicalize(prefix).rstrip("/") + "/" for prefix in prefixes]

    async def read(self, url: str) -> AsyncIterator[bytes]:
        """Yield a URL's bytes in pieces. Raises JobRefusedError if it is not allowed or cannot be read."""
        canonical = await asyncio.to_thread(_canonicalize, url)  # resolving links reads the disk
        if not self._is_allowed(canonical):
            raise _not_allowed(url)
        try:
            async for piece in read_pieces(await asyncio.to_thread(self._open, canonical)):
                yield piece
        except _OutsideError:
            raise _not_allowed(url) from None
        except TramontaneError:
            raise
        except Exception as error:  # file systems have errors of their own
            raise JobRefusedError(f"{url!r:.200} cannot be read: {describe(error)}") from error

    def _is_allowed(self, url: str) -> bool:
        return any(url.startswith(prefix) for prefix in self._prefixes) and not _has_parent_refs(url)

    def _open(self, url: str) -> BinaryIO:
        if urlsplit(url).scheme in ("http", "https"):
            return self._open_http(url)
        filesystem, path = open_filesystem(url, "the URL")
        if isinstance(filesystem, LocalFileSystem):
            return self._open_local(path)
        return cast("BinaryIO", filesystem.open(path, "rb"))

    def _open_local(self, path: str) -> BinaryIO:
        """Open a local file. What was opened decides: a link may have replaced a part of the path after it was resolved."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a named pipe is not waited for
        try:
            opened = os.readlink(f"/proc/self/fd/{descriptor}")
            is_inside = any(opened.startswith(folder) for folder in self._local_folders)
            if not (is_inside and stat.S_ISREG(os.fstat(descriptor).st_mode)):
                raise _OutsideError
            return os.fdopen(descriptor, "rb")
        except BaseException:
            os.close(descriptor)
            raise

    def _open_http(self, url: str) -> BinaryIO:
        """Open a URL. Each of its redirects, also when it is read, must lead to an allowed URL."""
        from aiohttp import TraceConfig, TraceRequestRedirectParams  # fsspec, too, needs it for these URLs only

        refused: list[str] = []

        async def check(_session: object, _context: object, params: TraceRequestRedirectParams) -> None:
            response = params.response
            location = response.headers.get("location", "")
            if not location or not self._is_allowed(str(response.url.join(type(response.url)(location)))):
                refused.append(location)
                response.close()
                raise _OutsideError

        trace = TraceConfig()
        trace.on_request_redirect.append(check)
        session: dict[str, Any] = {"trace_configs": [trace]}
        filesystem, path = open_filesystem(url, "the URL", client_kwargs=session, skip_instance_cache=True)
        try:
            return cast("BinaryIO", filesystem.open(path, "rb"))
        except Exception:
            if refused:  # which fsspec reports as a file that does not exist
                raise _OutsideError from None
            raise


class _OutsideError(Exception):
    """A link or a redirect leads to what is not below an allowed prefix."""


def _not_allowed(url: str) -> JobRefusedError:
    return JobRefusedError(f"{url!r:.200} is not among the URLs that this server may read")


def _canonicalize(url: str) -> str:
    """Resolve links in the URL of a local file, so that no link leads out of the allowed folders."""
    scheme = next((scheme for scheme in LOCAL_SCHEMES if url.startswith(scheme)), "")
    path = url.removeprefix(scheme)
    return f"{scheme}{os.path.realpath(path)}" if scheme and path.startswith("/") and "\0" not in path else url


def _has_parent_refs(url: str) -> bool:
    """Whether a URL may refer to a place outside its prefix: chained URLs (``zip::file://``) and dots do."""
    return "::" in url or "\\" in url or ".." in unquote(url).split("/")
