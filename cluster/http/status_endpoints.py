"""``GET /activity``: the recent micro-batches of every pipeline."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import Context
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tramontane.cluster.http.openapi import JsonSchema, Operation, Operations
from tramontane.proto.errors import ParameterError
from tramontane.proto.timing import steady_time
from tramontane.router.batch.schema import check_query
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
        check_query(request.query_params, "after")
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


# ``GET /metrics``: the load of the server, for gateways that route by load.
#
# These are the gauges of the model server protocol of Kubernetes' Gateway API Inference Extension,
# in Prometheus' text format. All other metrics are exported by Ray, on every node.

TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"
MAX_AGE_S = 0.2  # of an answer that is sent again; gateways may ask twenty times a second
GAUGES = MappingProxyType(
    {
        "tramontane_num_requests_running": "Sequences that hold a slot, in all pipelines.",
        "tramontane_num_requests_waiting": "Sequences in the waiting queues of all routers.",
        "tramontane_kv_cache_usage_perc": (
            "Share of the pages of the key/value caches that sequences hold, from 0 to 1."
        ),
    }
)
METRICS_OPERATIONS: Operations = MappingProxyType(
    {
        ("GET", "/metrics"): Operation(
            "Load of the server, for gateways that route by it", answer_type="text/plain"
        )
    }
)


class MetricsEndpoint:
    """The endpoint, whose route is added to an ``HttpApp``. ``model``: the label ``model_name``."""

    def __init__(self, get_activity: GetActivity, model: str) -> None:
        self._get_activity, self._model = get_activity, model
        # number of the last micro-batch by pipeline: older ones need not be sent
        self._last: dict[str, int] = {}
        self._query: asyncio.Task[str] | None = None
        self._asked_at = 0.0

    def routes(self) -> list[Route]:
        """Return the route."""
        return [Route("/metrics", self.metrics, methods=["GET"])]

    async def metrics(self, _request: Request) -> Response:
        """Answer ``GET /metrics``."""
        now = asyncio.get_running_loop().time()
        if self._query is None or (self._query.done() and now >= self._asked_at + MAX_AGE_S):
            self._asked_at = now
            # Not in the context of the first request, whose client may disconnect.
            self._query = asyncio.create_task(self._ask(), context=Context())
        return Response(await asyncio.shield(self._query), headers={"content-type": TEXT_FORMAT})

    async def _ask(self) -> str:
        pipelines = await self._get_activity(self._last)
        self._last = {pipeline.name: pipeline.last for pipeline in pipelines}
        return render(pipelines, self._model)


def render(pipelines: Sequence[PipelineActivity], model: str) -> str:
    """Render the gauges. Without a pipeline all pages count as used, so that a gateway chooses
    another server.
    """
    held, pages = (
        sum(pipeline.pages_held for pipeline in pipelines),
        sum(pipeline.pages for pipeline in pipelines),
    )
    values = (
        sum(pipeline.running for pipeline in pipelines),
        sum(pipeline.waiting for pipeline in pipelines),
        held / pages if pages else 1.0,
    )
    label = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    lines: list[str] = []
    for (name, meaning), value in zip(GAUGES.items(), values, strict=True):
        lines += [
            f"# HELP {name} {meaning}",
            f"# TYPE {name} gauge",
            f'{name}{{model_name="{label}"}} {value:g}',
        ]
    return "\n".join([*lines, ""])
