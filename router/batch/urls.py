"""Reading of URLs that clients submit: only below the allowed prefixes, also after links and
redirects.

A URL is parsed once; the parsed form is compared with the prefixes and opened.
"""

import os
import re
import ssl
import stat
import unicodedata
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from typing import BinaryIO, cast
from urllib.parse import unquote_to_bytes

import httpx
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from tramontane.proto.errors import ConfigError, JobRefusedError, TramontaneError
from tramontane.router.batch.database import KEYLESS
from tramontane.router.batch.files import describe, open_filesystem, read_file, redact
from tramontane.router.batch.storage_threads import Pieces, StorageThreads

LOCAL_SCHEMES, HTTP_SCHEMES = ("file", "local"), ("http", "https")
DEFAULT_PORTS = {"http": 80, "https": 443}
MAX_URL = 8192  # characters
MAX_DECODINGS = 4  # of %252e, which is %2e after the first decoding and a dot after the second
MAX_REDIRECTS = 10
HTTP_TIMEOUT_S = 60.0  # for a connection, and for each next byte
HTTP_HEADERS = {"accept-encoding": "identity"}  # a compressed body could be of any size


@dataclass(frozen=True, slots=True)
class _HttpPrefix:
    """A server, and a path prefix on it, which ends in a slash."""

    origin: tuple[str, bytes, int]
    folder: bytes

    def covers(self, url: httpx.URL) -> bool:
        return _origin(url) == self.origin and _path(url).startswith(self.folder)


@dataclass(frozen=True, slots=True)
class _StorePrefix:
    """A file system, and a path prefix in it. ``text`` is the prefix as configured; both end in a
    slash.
    """

    text: str
    filesystem: AbstractFileSystem
    folder: str

    def covers(self, filesystem: AbstractFileSystem, path: str) -> bool:
        own = self.filesystem  # equals only file systems of the same thread
        is_same = (
            type(filesystem) is type(own) and filesystem.storage_options == own.storage_options
        )
        return is_same and path.startswith(self.folder)


class UrlReader:
    """Reads clients' URLs below any of ``prefixes``: ``file:///data/in``, ``s3://bucket/in``.
    Raises ConfigError for other prefixes.
    """

    def __init__(self, prefixes: Sequence[str], threads: StorageThreads | None = None) -> None:
        self._threads = threads or StorageThreads()
        self._http: list[_HttpPrefix] = []
        self._stores: list[_StorePrefix] = []
        for prefix in prefixes:
            scheme, has_scheme, _ = prefix.partition("://")
            if not (scheme and has_scheme):
                raise ConfigError(
                    f"{redact(prefix)!r} is not a prefix of URLs; start it with a scheme, such as"
                    " file:///data/in"
                )
            if not (prefix.isascii() and prefix.isprintable()):
                raise ConfigError(
                    f"{redact(prefix)!r} is a prefix of no URL: clients' URLs have printable ASCII"
                    " only"
                )
            if scheme.lower() in HTTP_SCHEMES:
                self._http.append(_http_prefix(prefix))
            else:
                self._stores.append(_store_prefix(prefix))

    async def read(self, url: str, tenant: str = KEYLESS) -> AsyncGenerator[bytes, None]:
        """Yield a URL's bytes in pieces. Raises JobRefusedError if it is not allowed, or cannot be
        read in time.
        """
        try:
            async with aclosing(self._threads.read(tenant, self._pieces(url))) as pieces:
                async for piece in pieces:
                    yield piece
        except _OutsideError:
            raise JobRefusedError(
                f"{url!r:.200} is not among the URLs that this server may read"
            ) from None
        except TimeoutError:
            raise JobRefusedError(
                f"{url!r:.200} was not read in the time that one file may take"
            ) from None
        except TramontaneError:
            raise
        except Exception as error:  # file systems raise their own errors
            raise JobRefusedError(f"{url!r:.200} cannot be read: {describe(error)}") from error

    def _pieces(self, url: str) -> Pieces:
        """Yield a URL's bytes; it blocks. Raises _OutsideError if the URL is not allowed."""
        if not _is_plain(url):
            raise _OutsideError
        scheme, _, rest = url.partition("://")
        if scheme.lower() in HTTP_SCHEMES:
            yield from self._http_pieces(_parse_http(url))
        else:
            yield from read_file(
                self._open_local(rest) if scheme in LOCAL_SCHEMES else self._open_in_store(url)
            )

    def _http_pieces(self, url: httpx.URL) -> Pieces:
        """Request the parsed URL, and follow redirects to allowed URLs; no other request is
        sent.
        """
        with httpx.HTTPTransport(verify=ssl.create_default_context(), trust_env=False) as transport:
            for _ in range(1 + MAX_REDIRECTS):
                if not any(prefix.covers(url) for prefix in self._http):
                    raise _OutsideError
                extensions = {"timeout": httpx.Timeout(HTTP_TIMEOUT_S).as_dict()}
                request = httpx.Request("GET", url, headers=HTTP_HEADERS, extensions=extensions)
                with closing(transport.handle_request(request)) as response:
                    if not 300 <= response.status_code < 400:
                        yield from _body(response)
                        return
                    url = _redirect_target(url, response.headers.get("location", ""))
        raise JobRefusedError(f"the URL leads on more than {MAX_REDIRECTS} times")

    def _open_local(self, path: str) -> BinaryIO:
        """Open a local file. The path of the opened file is checked: a link may have replaced a
        part of the path after it was resolved.
        """
        local = [
            prefix.folder
            for prefix in self._stores
            if isinstance(prefix.filesystem, LocalFileSystem)
        ]
        resolved = os.path.realpath(path) if path.startswith("/") else ""
        if not any(resolved.startswith(folder) for folder in local):
            raise _OutsideError
        # a named pipe is not waited for
        descriptor = os.open(resolved, os.O_RDONLY | os.O_NONBLOCK)
        try:
            opened = os.readlink(f"/proc/self/fd/{descriptor}")
            is_inside = any(opened.startswith(folder) for folder in local)
            if not (is_inside and stat.S_ISREG(os.fstat(descriptor).st_mode)):
                raise _OutsideError
            return os.fdopen(descriptor, "rb")
        except BaseException:
            os.close(descriptor)
            raise

    def _open_in_store(self, url: str) -> BinaryIO:
        """Open a URL of object storage. The path parsed by its file system is compared, and
        opened.
        """
        # some file systems connect when they are made
        if not any(url.startswith(prefix.text) for prefix in self._stores):
            raise _OutsideError
        filesystem, path = open_filesystem(url, "the URL")
        if not any(prefix.covers(filesystem, path) for prefix in self._stores):
            raise _OutsideError
        return cast("BinaryIO", filesystem.open(path, "rb"))


class _OutsideError(Exception):
    """A URL, a link or a redirect leads outside the allowed prefixes."""


def _http_prefix(prefix: str) -> _HttpPrefix:
    try:
        url = _parse_http(prefix)
    except _OutsideError:
        raise ConfigError(
            f"{redact(prefix)!r} is a prefix of no URL; it must be like http://HOST/FOLDER"
        ) from None
    return _HttpPrefix(_origin(url), _path(url).rstrip(b"/") + b"/")


def _store_prefix(prefix: str) -> _StorePrefix:
    filesystem, path = open_filesystem(prefix, "a prefix of URLs (jobs_url_prefixes)")
    if (is_local := isinstance(filesystem, LocalFileSystem)) and prefix.partition("://")[
        0
    ] not in LOCAL_SCHEMES:
        raise ConfigError(
            f"{redact(prefix)!r} is a prefix of no URL; those of files begin with file:///"
        )  # fsspec: x://, a drive
    folder = os.path.realpath(path) if is_local else path
    return _StorePrefix(prefix.rstrip("/") + "/", filesystem, folder.rstrip("/") + "/")


def _is_plain(url: str) -> bool:
    """Whether a URL is printable ASCII without parts that its server or file system may interpret
    as another location.

    These are control characters, ``..``, also ``..;`` and after a backslash, and chains
    (``zip::file://``); plain or percent-encoded, also several times. Some servers turn bytes that
    are not UTF-8 into dots.
    """
    if len(url) > MAX_URL or not url.isascii():
        return False
    for _ in range(MAX_DECODINGS):
        if not _is_plain_text(url):
            return False
        try:
            decoded = unquote_to_bytes(url).decode()
        except UnicodeDecodeError:
            return False
        if decoded == url:
            return True
        url = decoded
    return False


def _is_plain_text(text: str) -> bool:
    segments = re.split(r"[/\\?#]", text)
    has_controls = any(unicodedata.category(each) == "Cc" for each in text)
    return (
        not has_controls
        and "::" not in text
        and all(each.partition(";")[0].strip() != ".." for each in segments)
    )


def _parse_http(text: str, base: httpx.URL | None = None) -> httpx.URL:
    """Parse a URL. Raises _OutsideError if it has no host, or a user name, which no prefix has."""
    try:
        url = httpx.URL(text) if base is None else base.join(text)
    except httpx.InvalidURL:
        raise _OutsideError from None
    if not url.host or url.userinfo or url.scheme not in HTTP_SCHEMES:
        raise _OutsideError
    return url


def _redirect_target(url: httpx.URL, location: str) -> httpx.URL:
    """Return the target of a redirect, which must obey the rules of clients' URLs. Raises
    _OutsideError.
    """
    if not location or not _is_plain(location):
        raise _OutsideError
    return _parse_http(location, url)


def _origin(url: httpx.URL) -> tuple[str, bytes, int]:
    return url.scheme, url.raw_host, url.port or DEFAULT_PORTS[url.scheme]


def _path(url: httpx.URL) -> bytes:
    """Return the path that the server receives."""
    return url.raw_path.partition(b"?")[0]


def _body(response: httpx.Response) -> Pieces:
    """Yield the body of a response. Raises JobRefusedError for an error status, without the
    server's message.
    """
    if response.status_code != 200:
        raise JobRefusedError(f"the URL cannot be read: its server answered {response.status_code}")
    if (encoding := response.headers.get("content-encoding", "identity")) != "identity":
        raise JobRefusedError(
            f"the URL cannot be read: its server sends it compressed ({encoding!r:.20})"
        )
    yield from filter(None, response.iter_raw())
