"""Reads bodies of requests, and names the fields that have no effect."""

import re
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from starlette.requests import Request

from tramontane.cluster.http.upload_limiter import BodyLimiter
from tramontane.proto.errors import OverloadedError
from tramontane.router.openai.errors import unknown_parameter
from tramontane.router.openai.request_context import RequestStats

MAX_WARNING_CHARS = 1024
T = TypeVar("T")


@runtime_checkable
class ParsedBody(Protocol):
    """A body that may have fields without effect."""

    @property
    def ignored(self) -> tuple[str, ...]:
        """Paths of these fields."""
        ...

    @property
    def unknown(self) -> str:
        """Path of the first unknown one, "" if there is none."""
        ...


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

    async def parse(self, request: Request, parse: Callable[[bytes], T]) -> T:
        """See ``BodyLimiter.parse``. Raises ParameterError also for an unknown field if the server
        refuses these.
        """
        try:
            parsed = await self._limiter.parse(request, self._max_bytes, parse)
        except OverloadedError as error:
            self._counts.record_refusal(error)
            raise
        if isinstance(parsed, ParsedBody):
            if self._refuses_unknown and parsed.unknown:
                raise unknown_parameter(parsed.unknown)
            self._counts.ignored_fields += len(parsed.ignored)
        return parsed


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
