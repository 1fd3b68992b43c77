"""The Ingress deployment: parses, tokenizes and streams requests over HTTP and gRPC."""

import asyncio
import gc
import os
from typing import Any

import psutil
import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from tramontane.cluster.actors.worker_actor import EXPORT_EVERY_S
from tramontane.cluster.common.load_meter import LoadMeter
from tramontane.cluster.common.ray_api import is_drained, number_deployment, start_periodic_thread
from tramontane.cluster.config.api_keys import ApiKeys
from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.http.app import HttpApp, HttpAppConfig
from tramontane.cluster.http.batch_endpoints import (
    BATCH_OPERATIONS,
    MAX_BATCH_BODY,
    BatchEndpoints,
)
from tramontane.cluster.http.body_reader import MAX_HELD_BYTES, BodyLimiter, BodyReader
from tramontane.cluster.http.metrics_endpoint import METRICS_OPERATIONS, MetricsEndpoint
from tramontane.cluster.http.request_middleware import PUBLIC_PATHS
from tramontane.cluster.http.sse import Pacer
from tramontane.cluster.http.status_endpoints import ACTIVITY_OPERATIONS, ActivityEndpoint
from tramontane.cluster.observability.exporters import RequestMetrics
from tramontane.cluster.observability.logging import serve_request_id, use_serve_log
from tramontane.cluster.observability.metrics import MetricFactory
from tramontane.cluster.serve_patches.proxy import (
    bind_internal_port_to_node,
    is_loopback,
    track_response_queues,
)
from tramontane.cluster.serving.batch_replica import batch_service
from tramontane.cluster.serving.pipeline_client import PipelineClient
from tramontane.cluster.serving.router_queries import prefix_aware_routing
from tramontane.cluster.serving.served_model import load_chat_format, load_checked_model
from tramontane.router.grpc.servicer import GrpcServicer
from tramontane.router.openai.served_model import ServedModel
from tramontane.workers.weights.checkpoint import CheckpointDigest, short_digest

WRITES_PER_CORE = 50  # a second, by all ingress replicas of a machine together
# per second, of one ingress replica: it is one process, whatever the number of cores
MAX_WRITES = 400


class IngressReplica(GrpcServicer):
    """Parses, bounds, tokenizes and streams requests; keeps no state between them. Ray Serve calls
    its gRPC methods by name.

    It shares the store of batch jobs with ``Batch``, and does not call it.
    """

    def __init__(
        self,
        config: EngineConfig,
        checkpoint_digest: CheckpointDigest,
        router: "DeploymentHandle[Any]",
        _batch: "DeploymentHandle[Any]",  # bound only so that Batch is part of the application
        grpc_on_loopback_only: bool,
        grace_s: float,
        build_id: str,
    ) -> None:
        use_serve_log(config.logs, "ingress")
        bind_internal_port_to_node()
        track_response_queues()
        model, digest = (
            load_checked_model(config, checkpoint_digest),
            short_digest(checkpoint_digest),
        )
        node = ray.get_runtime_context().get_node_id()
        pacer = _pacer(config)  # of streams over HTTP and gRPC together
        max_unaccepted = model.max_sequences * config.max_pipelines
        routing = prefix_aware_routing(config, digest)
        application = serve.get_replica_context().app_name
        self._routers = PipelineClient(
            router,
            max_unaccepted,
            grace_s,
            digest,
            node,
            lambda: pacer.longest_interval_s,
            routing,
            application,
        )
        # this replica replaces one that died while the application was draining
        if is_drained(application, number_deployment(application, build_id)):
            self._routers.drain()
        start_periodic_thread(
            EXPORT_EVERY_S, RequestMetrics(MetricFactory(), model.counts, "interactive").export
        )
        self._batches = batch_service(config)
        keys = ApiKeys(config.api_key, config.api_key_file)
        super().__init__(
            model,
            self._routers,
            self._batches.for_tenant,
            keys=keys,
            allow_peer=is_loopback if grpc_on_loopback_only else lambda _: True,
            pace=pacer,
            max_message=config.max_body_bytes,
            id_of=serve_request_id,
        )
        self._http_app = HttpApp(self._http_config(config, model, keys, pacer, node, digest))
        # Objects loaded so far are permanent. A body of many lists triggers full collections, of
        # 0.1 s each if they had to visit these objects.
        gc.collect()
        gc.freeze()

    def _http_config(
        self,
        config: EngineConfig,
        model: ServedModel,
        keys: ApiKeys,
        pacer: Pacer,
        node: str,
        digest: str,
    ) -> HttpAppConfig:
        bodies = BodyLimiter(max(MAX_HELD_BYTES, config.max_body_bytes))
        batch_bodies = BodyReader(
            bodies, MAX_BATCH_BODY, model.counts, refuses_unknown=config.strict_requests
        )
        extra_routes = [
            *BatchEndpoints(self._batches, batch_bodies).routes(),
            *ActivityEndpoint(self._routers.queries.activity).routes(),
            *MetricsEndpoint(self._routers.queries.activity, model.name, model.counts).routes(),
        ]
        return HttpAppConfig(
            model=model,
            source=self._source,
            health=self._routers.health,
            expert_load=self._routers.queries.expert_load,
            max_body_bytes=config.max_body_bytes,
            strict_requests=config.strict_requests,
            pacer=pacer,
            move_experts=self._routers.queries.move_experts if config.move_experts else None,
            chat=load_chat_format(config, model),
            keys=keys,
            extra_routes=extra_routes,
            extra_operations={**BATCH_OPERATIONS, **ACTIVITY_OPERATIONS, **METRICS_OPERATIONS},
            sends_request_id=False,  # Ray Serve's proxies do
            public_paths=PUBLIC_PATHS | ({"/metrics"} if config.public_metrics else set()),
            allowed_origins=config.allowed_origins,
            slow_client_timeout_s=config.slow_client_timeout,
            body_limiter=bodies,
            node=node,
            model_digest=digest,
        )

    def __serve_build_asgi_app__(self) -> Starlette:
        return self._http_app.app()

    async def __del__(self) -> None:
        self._routers.close()
        await asyncio.to_thread(self._batches.close)  # it waits for running calls

    async def drain(self) -> int:
        """Refuse new requests; return how many have not ended."""
        return self._routers.drain()

    async def resume(self) -> None:
        """Accept new requests again."""
        self._routers.resume()

    async def end_all(self) -> None:
        """End all requests with an error that explains it."""
        self._routers.end_all()

    async def stats(self) -> dict[str, Any]:
        """Return this replica's current state, for tests."""
        return {
            "requests": self._routers.num_requests,
            "digests": self._routers.known_digests,
            "tasks": len(asyncio.all_tasks()),
            "rss": psutil.Process().memory_info().rss,
            "pid": os.getpid(),
        }


def _pacer(config: EngineConfig) -> Pacer:
    if config.stream_writes_per_s is not None:
        return Pacer(config.stream_writes_per_s)
    return Pacer(write_budget(os.cpu_count() or 1, config.num_ingresses), LoadMeter())


def write_budget(num_cores: int, num_ingresses: int) -> int:
    """Return the writes to streams per second of one of ``num_ingresses`` ingress replicas under
    full load: they share the cores.

    2 cores, 1 ingress: 100 writes. 2 cores, 2 ingresses: 50. 64 cores: 400 with up to 8 ingresses,
    the maximum of one process.
    """
    return max(1, min(WRITES_PER_CORE * num_cores // num_ingresses, MAX_WRITES))
