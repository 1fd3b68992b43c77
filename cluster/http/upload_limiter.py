"""Limits on request bodies while they are read: their size, their speed, and the total memory."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import TypeVar

from starlette.requests import Request

from tramontane.proto.errors import OverloadedError, RequestError
from tramontane.proto.units import format_bytes
from tramontane.router.openai.json_limits import run_off_loop

T = TypeVar("T")

MAX_HELD_BYTES = 256 * 2**20
MIN_PROGRESS_BYTES = 64 * 2**10
PROGRESS_TIMEOUT_S = 30.0
RETRY_AFTER_S = 5


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
            return await run_off_loop(len(body), lambda: parse(body))

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
