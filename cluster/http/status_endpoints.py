"""``GET /activity``: the recent micro-batches of every pipeline."""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tramontane.cluster.http.openapi import JsonSchema, Operation, Operations
from tramontane.proto.errors import ParameterError
from tramontane.proto.timing import steady_time
from tramontane.router.engine.activity_log import Activity, PipelineActivity

# the number of the last micro-batch that the client knows, by pipeline
AfterByPipeline = Mapping[str, int]
GetActivity = Callable[[AfterByPipeline], Awaitable[list[PipelineActivity]]]

AFTER = re.compile(r"(.+):([0-9]{1,15})")
MAX_AFTER = 1000  # pipelines
AFTER_SCHEMA: JsonSchema = {
    "type": "array",
    "maxItems": MAX_AFTER,
    "items": {"type": "string", "pattern": f"^{AFTER.pattern}$"},
}

ACTIVITY_OPERATIONS: Operations = MappingProxyType(
    {
        ("GET", "/activity"): Operation(
            "Recent micro-batches of the pipelines; after=NAME:N: only those of pipeline NAME that"
            " follow its number N",
            Activity,
            (400,),
            query={"after": AFTER_SCHEMA},
        )
    }
)


class ActivityEndpoint:
    """The endpoint, whose route is added to an ``HttpApp``. ``get_activity``: see
    ``RouterQueries.activity``.
    """

    def __init__(self, get_activity: GetActivity) -> None:
        self._get_activity = get_activity

    def routes(self) -> list[Route]:
        """Return the route."""
        return [Route("/activity", self.activity, methods=["GET"])]

    async def activity(self, request: Request) -> Response:
        """Answer ``GET /activity``."""
        after = _parse_after(request.query_params.getlist("after"))
        pipelines = await self._get_activity(after)
        activity = Activity(now=steady_time(), pipelines=pipelines)
        return Response(activity.model_dump_json(), media_type="application/json")


def _parse_after(given: Sequence[str]) -> AfterByPipeline:
    """Parse ``NAME:N`` of each pipeline. Raises ParameterError."""
    matches = [AFTER.fullmatch(each) for each in given[: MAX_AFTER + 1]]
    if None in matches or len(matches) > MAX_AFTER:
        raise ParameterError(
            f"after must be NAME:N, for at most {MAX_AFTER} pipelines; GET /activity has names and"
            " last numbers",
            "after",
        )
    return {match[1]: int(match[2]) for match in matches if match}
