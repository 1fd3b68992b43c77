"""``GET /metrics`` and ``GET /load``: the load of the server, and its requests by vLLM's names.

Gateways route by the gauges, which are those of the model server protocol of Kubernetes' Gateway
API Inference Extension; dashboards and autoscalers that were made for vLLM read the other names.
The format is Prometheus' text. All other metrics are exported by Ray, on every node.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextvars import Context
from itertools import accumulate
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tramontane.cluster.http.openapi import Operation, Operations
from tramontane.cluster.http.status_endpoints import GetActivity
from tramontane.router.engine.activity_log import PipelineActivity
from tramontane.router.openai.request_context import Histogram, RequestStats
from tramontane.router.openai.response_models import ServerLoad

TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"
MAX_AGE_S = 0.2  # of an answer that is sent again; gateways may ask twenty times a second

RUNNING = "Sequences that hold a slot, in all pipelines."
WAITING = "Sequences in the waiting queues of all routers."
USAGE = "Share of the pages of the key/value caches that sequences hold, from 0 to 1."
GAUGES = MappingProxyType(
    {
        "tramontane_num_requests_running": RUNNING,
        "tramontane_num_requests_waiting": WAITING,
        "tramontane_kv_cache_usage_perc": USAGE,
        "vllm:num_requests_running": RUNNING,
        "vllm:num_requests_waiting": WAITING,
        "vllm:kv_cache_usage_perc": USAGE,
        "vllm:gpu_cache_usage_perc": f"{USAGE} vLLM's former name.",
    }
)
# Of the requests of one ingress replica, over HTTP and gRPC; lines of batch jobs are not among them
OWN = "Of the requests that this ingress replica answers:"
COUNTERS = MappingProxyType(
    {
        "vllm:prompt_tokens_total": f"{OWN} prompt tokens, when the first new token comes.",
        "vllm:generation_tokens_total": f"{OWN} tokens that were generated.",
        "vllm:request_success_total": f"{OWN} choices that ended, by reason.",
    }
)
HISTOGRAMS = MappingProxyType(
    {
        "vllm:time_to_first_token_seconds": f"{OWN} time from arrival to the first token.",
        "vllm:inter_token_latency_seconds": f"{OWN} time between two tokens.",
        "vllm:e2e_request_latency_seconds": f"{OWN} time from arrival to the end.",
        "vllm:request_queue_time_seconds": f"{OWN} time in the router's waiting queue.",
        "vllm:request_prompt_tokens": f"{OWN} prompt tokens of one that has ended.",
        "vllm:request_generation_tokens": f"{OWN} new tokens of one that has ended.",
    }
)
METRICS_OPERATIONS: Operations = MappingProxyType(
    {
        ("GET", "/metrics"): Operation(
            "Load of the server, for gateways that route by it, and its requests by vLLM's names",
            answer_type="text/plain",
        ),
        ("GET", "/load"): Operation("Number of sequences that run or wait", ServerLoad),
    }
)

Labels = Mapping[str, str]
Samples = Sequence[tuple[str, Labels, float]]  # suffix of the name, labels and value of each


class MetricsEndpoint:
    """The endpoints, whose routes are added to an ``HttpApp``. ``model``: the label
    ``model_name``. ``counts``: of the requests of this ingress replica.
    """

    def __init__(self, get_activity: GetActivity, model: str, counts: RequestStats) -> None:
        self._get_activity, self._model, self._counts = get_activity, model, counts
        # number of the last micro-batch by pipeline: older ones need not be sent
        self._last: dict[str, int] = {}
        self._query: asyncio.Task[list[PipelineActivity]] | None = None
        self._asked_at = 0.0

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/load", self.load, methods=["GET"]),
        ]

    async def metrics(self, _request: Request) -> Response:
        """Answer ``GET /metrics``."""
        text = render(await self._pipelines(), self._model, self._counts)
        return Response(text, headers={"content-type": TEXT_FORMAT})

    async def load(self, _request: Request) -> Response:
        """Answer ``GET /load``."""
        pipelines = await self._pipelines()
        number = sum(pipeline.running + pipeline.waiting for pipeline in pipelines)
        return JSONResponse(ServerLoad(server_load=number).as_json())

    async def _pipelines(self) -> list[PipelineActivity]:
        now = asyncio.get_running_loop().time()
        if self._query is None or (self._query.done() and now >= self._asked_at + MAX_AGE_S):
            self._asked_at = now
            # Not in the context of the first request, whose client may disconnect.
            self._query = asyncio.create_task(self._ask(), context=Context())
        return await asyncio.shield(self._query)

    async def _ask(self) -> list[PipelineActivity]:
        pipelines = await self._get_activity(self._last)
        self._last = {pipeline.name: pipeline.last for pipeline in pipelines}
        return pipelines


def render(pipelines: Sequence[PipelineActivity], model: str, counts: RequestStats) -> str:
    """Render all metrics. Without a pipeline all pages count as used, so that a gateway chooses
    another server.
    """
    lines: list[str] = []
    for name, samples in _samples(pipelines, counts).items():
        kind, meaning = _described(name)
        lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
        for suffix, labels, value in samples:
            shown = ",".join(
                f'{label}="{_escaped(text)}"'
                for label, text in ({"model_name": model} | dict(labels)).items()
            )
            lines.append(f"{name}{suffix}{{{shown}}} {value!r}")
    return "\n".join([*lines, ""])


def _described(name: str) -> tuple[str, str]:
    """Return the kind and the meaning of a metric."""
    kinds = {"gauge": GAUGES, "counter": COUNTERS, "histogram": HISTOGRAMS}
    return next((kind, table[name]) for kind, table in kinds.items() if name in table)


def _samples(pipelines: Sequence[PipelineActivity], counts: RequestStats) -> dict[str, Samples]:
    """Return the samples of each metric, in the order of the tables."""
    held, pages = (
        sum(pipeline.pages_held for pipeline in pipelines),
        sum(pipeline.pages for pipeline in pipelines),
    )
    load = {
        RUNNING: sum(pipeline.running for pipeline in pipelines),
        WAITING: sum(pipeline.waiting for pipeline in pipelines),
    }
    usage = held / pages if pages else 1.0
    ended = [
        ("", {"finished_reason": reason.value}, number)
        for reason, number in counts.finished.items()
    ]
    tokens = (counts.prompt_tokens, counts.generation_tokens)
    histograms = (
        counts.first_token,
        counts.inter_token,
        counts.whole,
        counts.queue,
        counts.request_prompt_tokens,
        counts.request_generation_tokens,
    )
    counters: tuple[Samples, ...] = (*([("", {}, number)] for number in tokens), ended)
    return {
        **{name: [("", {}, load.get(meaning, usage))] for name, meaning in GAUGES.items()},
        **dict(zip(COUNTERS, counters, strict=True)),
        **{
            name: list(_buckets(values))
            for name, values in zip(HISTOGRAMS, histograms, strict=True)
        },
    }


def _buckets(values: Histogram) -> Iterator[tuple[str, Labels, float]]:
    """Yield the samples of a histogram: how many values are at most each bound."""
    totals = list(accumulate(values.counts))
    bounds = [*map(repr, values.bounds), "+Inf"]
    for bound, total in zip(bounds, totals, strict=True):
        yield "_bucket", {"le": bound}, total
    yield "_sum", {}, values.sum
    yield "_count", {}, totals[-1]


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
