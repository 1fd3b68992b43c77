"""The token source of one request: with its client's API key and its deadline."""

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from tramontane.proto.errors import DeadlineExceededError, ParameterError
from tramontane.proto.ports import TokenSource
from tramontane.proto.request import Identity, RequestOutput, SequenceRequest

TIMEOUT_HEADER = "x-request-timeout"
MAX_TIMEOUT_S = 10_000_000.0


class RequestTokenSource:
    """A ``TokenSource`` for one request. ``deadline`` (of the event loop's clock) ends its work,
    also while it waits.

    ``identity``: of the client, by its API key. ``request_id``: the id in the logs.
    """

    def __init__(
        self,
        source: TokenSource,
        identity: Identity,
        deadline: float = math.inf,
        request_id: str = "",
    ) -> None:
        self._source, self._identity, self._deadline, self._request_id = (
            source,
            identity,
            deadline,
            request_id,
        )

    def check_capacity(self, num_sequences: int, owner: int = 0) -> None:
        """Raise if the source has no capacity for these sequences."""
        self._source.check_capacity(num_sequences, owner or self._identity.owner)

    async def generate(
        self, specs: Sequence[SequenceRequest]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the source's tokens. Raises DeadlineExceededError, before the source is called if
        the deadline has passed.
        """
        if asyncio.get_running_loop().time() >= self._deadline:
            raise _deadline_error()
        owner, tenant = self._identity
        owned_specs = [
            replace(spec, owner=owner, request_id=self._request_id, cache_salt=tenant)
            for spec in specs
        ]
        async with aclosing(self._source.generate(owned_specs)) as batches:
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
    return DeadlineExceededError(f"the request took longer than its {TIMEOUT_HEADER} allows")


def parse_timeout(values: Sequence[str]) -> float:
    """Return the seconds that the header's values allow, infinity without one. Raises
    ParameterError.
    """
    if not values:
        return math.inf
    try:
        (text,) = values
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT_S:  # NaN fails, too
        raise ParameterError(
            f"the header must be given once, with seconds above 0, up to {MAX_TIMEOUT_S:.0f}, such"
            " as 30 or 0.5",
            TIMEOUT_HEADER,
        )
    return seconds
