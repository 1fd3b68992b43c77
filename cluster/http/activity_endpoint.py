"""``GET /activity``: what every pipeline has done of late."""

import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tramontane.cluster.http.openapi import JsonSchema, Operation, Operations
from tramontane.proto.errors import ParameterError
from tramontane.router.batch.schema import check_query
from tramontane.router.engine.activity_log import Activity

AfterEach = Mapping[str, int]  # by pipeline, the number of the last micro-batch that is known already
AskActivity = Callable[[AfterEach], Awaitable[list[dict[str, Any]]]]

AFTER = re.compile(r"(.+):([0-9]{1,15})")
MAX_AFTER = 1000  # pipelines
AFTER_SCHEMA: JsonSchema = {"type": "array", "maxItems": MAX_AFTER, "items": {"type": "string", "pattern": f"^{AFTER.pattern}$"}}

ACTIVITY_OPERATIONS: Operations = MappingProxyType(
    {
        ("GET", "/activity"): Operation(
            "What the pipelines have done of late; after=NAME:N: micro-batches of this pipeline that follow its number N",
            Activity,
            (400,),
            query={"after": AFTER_SCHEMA},
        )
    }
)


class ActivityEndpoint:
    """Its route is for another application to take in. ``ask``: see ``RouterQueries.activity``."""

    def __init__(self, ask: AskActivity) -> None:
        self._ask = ask

    def routes(self) -> list[Route]:
        return [Route("/activity", self.activity, methods=["GET"])]

    async def activity(self, request: Request) -> Response:
        check_query(request.query_params, "after")
        after = _parse_after(request.query_params.getlist("after"))
        pipelines = await self._ask(after)
        return JSONResponse({"now": time.time(), "pipelines": pipelines})


def _parse_after(given: Sequence[str]) -> AfterEach:
    """Raises ParameterError."""
    found = [AFTER.fullmatch(each) for each in given[: MAX_AFTER + 1]]
    if None in found or len(found) > MAX_AFTER:
        raise ParameterError(
            f"after must be NAME:N, for at most {MAX_AFTER} pipelines; GET /activity tells names and last numbers", "after"
        )
    return {match[1]: int(match[2]) for match in found if match}
