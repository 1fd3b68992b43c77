"""A source of tokens as one client may have it: by whose key it asks, and until when."""

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from tramontane.proto.errors import DeadlineExceededError, ParameterError
from tramontane.proto.ports import TokenSource
from tramontane.proto.request import RequestOutput, SequenceRequest

TIMEOUT_HEADER = "x-request-timeout"
MAX_TIMEOUT_S = 10_000_000.0


class RequestTokenSource:
    """A ``TokenSource`` for one request. At ``deadline``, of the event loop's clock, its work ends, also where it only waits.

    ``request_id``: what logs call it.
    """

    def __init__(self, source: TokenSource, owner: int, deadline: float = math.inf, request_id: str = "") -> None:
        self._source, self._owner, self._deadline, self._request_id = source, owner, deadline, request_id

    def check_capacity(self, num_sequences: int, owner: int = 0) -> None:
        self._source.check_capacity(num_sequences, owner or self._owner)

    async def generate(self, specs: Sequence[SequenceRequest]) -> AsyncGenerator[RequestOutput, None]:
        """Raises DeadlineExceededError, with nothing begun where it has passed already."""
        if asyncio.get_running_loop().time() >= self._deadline:
            raise _deadline_error()
        asked = [replace(spec, owner=self._owner, request_id=self._request_id) for spec in specs]
        async with aclosing(self._source.generate(asked)) as batches:
            while (batch := await self._next(batches)) is not None:
                yield batch

    async def _next(self, batches: AsyncGenerator[RequestOutput, None]) -> RequestOutput | None:
        if self._deadline == math.inf:
            return await anext(batches, None)
        try:
            async with asyncio.timeout_at(self._deadline):
                return await anext(batches, None)
        except TimeoutError:
            raise _deadline_error() from None


def _deadline_error() -> DeadlineExceededError:
    return DeadlineExceededError(f"the time that {TIMEOUT_HEADER} gave is over")


def parse_timeout(values: Sequence[str]) -> float:
    """Of the header, as often as it was sent. Raises ParameterError."""
    if not values:
        return math.inf
    try:
        (text,) = values
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT_S:  # also what is no number
        raise ParameterError(
            f"the header must be given once, with seconds from 0 to {MAX_TIMEOUT_S:.0f}, such as 30 or 0.5", TIMEOUT_HEADER
        )
    return seconds
