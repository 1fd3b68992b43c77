"""Reads bodies of requests: within limits of their size, their speed, and the total memory; and
names the fields that have no effect.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import TypeVar

from starlette.requests import Request

from tramontane.proto.errors import OverloadedError, RequestError
from tramontane.proto.units import format_bytes
from tramontane.router.openai.errors import unknown_parameter
from tramontane.router.openai.json_limits import run_off_loop
from tramontane.router.openai.request_context import RequestStats

T = TypeVar("T")

MAX_HELD_BYTES = 256 * 2**20
MIN_PROGRESS_BYTES = 64 * 2**10
PROGRESS_TIMEOUT_S = 30.0
RETRY_AFTER_S = 5
MAX_WARNING_CHARS = 1024
BYTES_PER_OBJECT = 16


class BodyTooLargeError(RequestError):
    """The body has more bytes than the server reads."""

    http_status = 413
    parameter = None


class BodyTooSlowError(RequestError):
    """The body arrives so slowly that the server does not wait for the rest."""

    http_status = 408
    parameter = None


class BodyLimiter:
    """The limits on the bodies that one API server reads at the same time.

    ``max_held``: bytes of all bodies that are incomplete or wait for the thread that parses large
    ones. ``progress_timeout_s``: the time for the next ``MIN_PROGRESS_BYTES`` of a body, or its
    end, to arrive. The timeout restarts with each such step, so a large body may take long, and a
    body that arrives byte by byte is not waited for forever.
    """

    def __init__(
        self, max_held: int = MAX_HELD_BYTES, progress_timeout_s: float = PROGRESS_TIMEOUT_S
    ) -> None:
        self._max_held, self._progress_timeout_s = max_held, progress_timeout_s
        self.num_held = 0

    async def parse(self, request: Request, max_body: int, parse: Callable[[bytes], T]) -> T:
        """Read a whole body and parse it. A large body is parsed on the thread for large bodies,
        and counts as held until then.

        Raises the errors of ``parse``, BodyTooLargeError, BodyTooSlowError, or OverloadedError if
        too many bytes are held.
        """
        async with self._read(request, max_body) as body:
            # an object takes as long as some bytes more than it has
            cost = len(body) + BYTES_PER_OBJECT * body.count(b"{")
            return await run_off_loop(cost, lambda: parse(body))

    @asynccontextmanager
    async def _read(self, request: Request, max_body: int) -> AsyncIterator[bytes]:
        body = bytearray()
        try:
            async with aclosing(self.stream(request, max_body)) as parts:
                async for part in parts:
                    if self.num_held + len(part) > self._max_held:
                        raise OverloadedError(
                            "the server is reading too many large bodies at once", RETRY_AFTER_S
                        )
                    self.num_held += len(part)
                    body += part
            yield bytes(body)
        finally:
            self.num_held -= len(body)

    async def stream(self, request: Request, max_body: int) -> AsyncGenerator[bytes, None]:
        """Yield a body's parts, for a caller that does not keep them: they do not count as held.

        Raises BodyTooSlowError, and BodyTooLargeError as soon as the size is known, from
        ``content-length`` before reading.
        """
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > max_body:
            raise _too_large(max_body)
        num_bytes = 0
        async with aclosing(self._timely_parts(request)) as parts:
            async for part in parts:
                num_bytes += len(part)
                if num_bytes > max_body:
                    raise _too_large(max_body)
                yield part

    async def _timely_parts(self, request: Request) -> AsyncGenerator[bytes, None]:
        """Yield the parts within the timeout of each step of 64 KiB.

        Of parts of 40 KiB the second completes a step (80 KiB), and the fourth the next one (160
        KiB).
        """
        clock = asyncio.get_running_loop().time
        num_bytes, deadline = 0, clock() + self._progress_timeout_s
        async with aclosing(request.stream()) as parts:
            while True:
                try:
                    # a part that has arrived is taken, however late
                    async with asyncio.timeout_at(deadline):
                        part = await anext(parts, None)
                except TimeoutError:
                    raise BodyTooSlowError(
                        f"the body comes too slowly; send {format_bytes(MIN_PROGRESS_BYTES)}, or"
                        f" the rest, within {self._progress_timeout_s:g} s"
                    ) from None
                if part is None:
                    return
                if (num_bytes + len(part)) // MIN_PROGRESS_BYTES > num_bytes // MIN_PROGRESS_BYTES:
                    deadline = clock() + self._progress_timeout_s
                num_bytes += len(part)
                yield part


def _too_large(max_body: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"the body is larger than {format_bytes(max_body)}; send less at once")


class BodyReader:
    """Reads and parses bodies within the limits of a server, and counts the bodies refused because
    too many are being read.
    """

    def __init__(
        self,
        limiter: BodyLimiter,
        max_bytes: int,
        counts: RequestStats,
        *,
        refuses_unknown: bool = False,
    ) -> None:
        self._limiter, self._max_bytes, self._counts = limiter, max_bytes, counts
        self._refuses_unknown = refuses_unknown

    def stream(self, request: Request, max_body: int) -> AsyncGenerator[bytes, None]:
        """See ``BodyLimiter.stream``."""
        return self._limiter.stream(request, max_body)

    async def parse(self, request: Request, parse: Callable[[bytes], T]) -> T:
        """See ``BodyLimiter.parse``. Raises ParameterError also for an unknown field if the server
        refuses these.
        """
        try:
            parsed = await self._limiter.parse(request, self._max_bytes, parse)
        except OverloadedError as error:
            self._counts.record_refusal(error)
            raise
        # of a ``RequestBody`` or a ``Conversation``; other bodies have no such fields
        self.note(getattr(parsed, "unknown", ""), getattr(parsed, "ignored", ()))
        return parsed

    def note(self, unknown: str, ignored: Sequence[str]) -> None:
        """Count the fields without effect. Raises ParameterError for an unknown one if the server
        refuses these.
        """
        if self._refuses_unknown and unknown:
            raise unknown_parameter(unknown)
        self._counts.ignored_fields += len(ignored)


def warning_header(ignored: Sequence[str]) -> dict[str, str]:
    """Return the header that names the fields of a request that had no effect, at most
    ``MAX_WARNING_CHARS`` of their names; no header if there are none.

    It is as RFC 9111 had it: 299 is a warning that stays with the response.
    """
    if not ignored:
        return {}
    names = ", ".join(ignored)
    written = re.sub(r'[^ -~]|["\\\\]', "?", names[:MAX_WARNING_CHARS])
    more = "" if len(names) <= MAX_WARNING_CHARS else ", ..."
    return {"Warning": f'299 - "ignored: {written}{more}"'}
