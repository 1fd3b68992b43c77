"""Bodies of requests while they are read: bounded in size, in slowness, and in what all of them take together."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.requests import Request

from tramontane.proto.errors import OverloadedError, RequestError

MAX_HELD = 256 * 2**20
MIN_PROGRESS_BYTES = 64 * 2**10
STEP_WITHIN_S = 30.0
RETRY_AFTER_S = 5


class BodyTooLargeError(RequestError):
    """More bytes than the door reads."""


class BodyTooSlowError(RequestError):
    """It comes so slowly that the door does not wait for the rest."""


class BodyLimiter:
    """What one door reads at once.

    ``max_held``: bytes of all bodies that are not whole yet; one that is whole is parsed at once. ``step_within_s``: so soon the
    next ``MIN_PROGRESS_BYTES`` bytes of a body have to be there, or its end. The time begins anew with each of them, so a
    large body may take
    long, and one that comes byte by byte does not keep its place for ever.
    """

    def __init__(self, max_held: int = MAX_HELD, step_within_s: float = STEP_WITHIN_S) -> None:
        self._max_held, self._step_within_s = max_held, step_within_s
        self.num_held = 0

    async def read(self, request: Request, max_body: int) -> bytes:
        """Raises BodyTooLargeError, BodyTooSlowError, OverloadedError."""
        body = bytearray()
        try:
            async with aclosing(self.stream(request, max_body)) as parts:
                async for part in parts:
                    if self.num_held + len(part) > self._max_held:
                        raise OverloadedError("the server is reading too many large bodies at once", RETRY_AFTER_S)
                    self.num_held += len(part)
                    body += part
            return bytes(body)
        finally:
            self.num_held -= len(body)

    async def stream(self, request: Request, max_body: int) -> AsyncGenerator[bytes, None]:
        """For who does not keep them: they are not held. Raises BodyTooLargeError as soon as it is known, BodyTooSlowError.

        A body that says itself that it is too large is not read at all.
        """
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > max_body:
            raise _too_large(max_body)
        num_bytes = 0
        async with aclosing(self._in_time(request)) as parts:
            async for part in parts:
                num_bytes += len(part)
                if num_bytes > max_body:
                    raise _too_large(max_body)
                yield part

    async def _in_time(self, request: Request) -> AsyncGenerator[bytes, None]:
        """With steps of 64 KiB: of parts of 40 KiB the second is the end of a step (80), and the fourth the next (160)."""
        clock = asyncio.get_running_loop().time
        num_bytes, deadline = 0, clock() + self._step_within_s
        async with aclosing(request.stream()) as parts:
            while True:
                try:
                    async with asyncio.timeout_at(deadline):  # what is there already is taken, however late it is
                        part = await anext(parts, None)
                except TimeoutError:
                    raise BodyTooSlowError(
                        f"the body comes too slowly; send {MIN_PROGRESS_BYTES} bytes, or the rest, "
                        f"within {self._step_within_s:g} s"
                    ) from None
                if part is None:
                    return
                if (num_bytes + len(part)) // MIN_PROGRESS_BYTES > num_bytes // MIN_PROGRESS_BYTES:
                    deadline = clock() + self._step_within_s
                num_bytes += len(part)
                yield part


def _too_large(max_body: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"the body is larger than {max_body} bytes; send less at once")
