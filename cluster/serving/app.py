"""The Ray Serve application: Ingress (any number) and Batch (one) -> Router (one per pipeline)."""

import asyncio
import os
import time
from typing import Any

import psutil
import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig, gRPCOptions
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from tramontane.cluster.actors.worker_actor import EXPORT_EVERY_S, naming_the_node
from tramontane.cluster.common.deployments import is_drained
from tramontane.cluster.common.node_labels import off_head
from tramontane.cluster.common.periodic import repeat_for_ever
from tramontane.cluster.config.api_keys import ApiKeys
from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.config.parsers import has_password
from tramontane.cluster.http.activity_endpoint import ACTIVITY_OPERATIONS, ActivityDoor
from tramontane.cluster.http.app import HttpDoor
from tramontane.cluster.http.batch_endpoints import BATCH_OPERATIONS, BatchDoor
from tramontane.cluster.http.body_limits import MAX_HELD, BodyBudget
from tramontane.cluster.http.slow_clients import note_queues_of_answers
from tramontane.cluster.http.sse import Pacer
from tramontane.cluster.observability.exporters import RequestMetrics
from tramontane.cluster.observability.logging import log_beside_ray_serve, serves_request_id
from tramontane.cluster.observability.metrics import RayMetrics
from tramontane.cluster.pipeline.engine import fingerprint_for
from tramontane.cluster.serve_patches.ports import is_from_here, keep_internal_port_on_node_address
from tramontane.cluster.serving.autoscaling import number_of_routers
from tramontane.cluster.serving.batch_replica import BatchReplica, batch_service
from tramontane.cluster.serving.least_loaded_router import LeastLoaded
from tramontane.cluster.serving.remote_routers import RemoteRouters
from tramontane.cluster.serving.router_replica import RouterReplica
from tramontane.cluster.serving.served_model import chat_format, served_model
from tramontane.proto.errors import ConfigError
from tramontane.router.grpc.servicer import GrpcServicer
from tramontane.router.openai.request_stats import CountingRoom
from tramontane.workers.weights.fingerprint import Fingerprint, check_fingerprint, mark_of

APPLICATION = "tramontane"
WEIGHTS = ".safetensors"  # which a door does not read
GRPC_FUNCTIONS = tuple(f"tramontane.router.grpc.handlers.{name}" for name in ("add_inference", "add_batch_jobs"))
SHOWN_BY_RAY = "api_key"  # a Serve config is on Ray's dashboard, and told by serve status
OF_THE_COMMAND = {  # keys that say nothing to an application
    *("host", "port", "grpc_port", "address", "local", "seed", "json"),
    *("tracing_exporter", "tracing_sampling_ratio"),
}
DRAIN_S = 600.0  # where pipelines are scaled and updated in place; a command that is interrupted waits less
UNBOUNDED = 1_000_000  # our own bounds are reached first, and answer in OpenAI's words
CHECK_EVERY_S = 1.0  # Ray Serve finds with it that a replica is dead, and begins another
CHECK_TIMEOUT_S = 10.0  # of one that lives and does not answer: after three such checks, before doors lose patience
HAND_OVER_S = 15.0  # then doors take what a router still has to another one, and it ends by itself
NEW_FIRST = 100  # percent: of a new version all replicas are started before those of the old one are stopped
WRITES_PER_CORE, MAX_WRITES = 50, 1500  # a second, of one ingress replica; README says why


def build(args: dict[str, Any]) -> Application:
    """For ``serve deploy`` and ``serve build``: ``args`` are the keys of the configuration."""
    config = checked_config(args)
    return application(config, patience_s=DRAIN_S if config.drain_timeout is None else config.drain_timeout)


def checked_config(args: dict[str, Any]) -> EngineConfig:
    """Of a Serve config's ``args``. Raises ConfigError for what has no place there."""
    if SHOWN_BY_RAY in args:
        raise ConfigError("api_key: not for a Serve config, which Ray shows to everybody; give an api_key_file")
    if secret := [key for key, value in args.items() if key.startswith("jobs_") and has_password(str(value))]:
        raise ConfigError(
            f"{secret[0]}: a password is not for a Serve config, which Ray shows to everybody; "
            "leave it out, and have every node know it by ~/.pgpass, or as the storage's library says"
        )
    if others := sorted(OF_THE_COMMAND & args.keys()):
        raise ConfigError(f"{', '.join(others)}: not for a Serve config; its http_options and tracing_config have their like")
    return EngineConfig.build(None, args)


def grpc_options(port: int) -> gRPCOptions:
    """For Ray Serve's start; port 0 is none. Reflection is among the functions."""
    return gRPCOptions(port=port, grpc_servicer_functions=list(GRPC_FUNCTIONS) if port else [], enable_reflection=False)


def application(
    config: EngineConfig,
    launched: bool = False,
    owns_serve: bool = False,
    patience_s: float = 20.0,
    grpc_from_here_only: bool = False,
) -> Application:
    """``launched`` and ``owns_serve`` are those of ``pipeline_spec.Application``.

    ``grpc_from_here_only``: in a cluster that we have not started, Ray Serve's gRPC port is open to every peer.

    ``patience_s``: how long a replica that is to stop may finish what it has begun.

    The checkpoint as it is here, where the application is built, is what every node must have.
    """
    config = config.for_other_directories()
    with naming_the_node():
        fingerprint = fingerprint_for(config)
    quiet = config.logs.for_ray_serve()
    router = serve.deployment(
        name="Router",
        **number_of_routers(config),
        max_constructor_retry_count=1,  # what keeps a pipeline from loading is reported, not tried again
        max_ongoing_requests=UNBOUNDED,
        ray_actor_options={"num_cpus": 0, **off_head()},
        health_check_period_s=CHECK_EVERY_S,
        health_check_timeout_s=CHECK_TIMEOUT_S,
        request_router_config=RequestRouterConfig(request_router_class=LeastLoaded),  # type: ignore[arg-type]
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=patience_s + HAND_OVER_S,
        max_surge_percent=NEW_FIRST,
        logging_config=quiet,
    )(RouterReplica)
    batch = serve.deployment(
        name="Batch",
        num_replicas=1,
        ray_actor_options={"num_cpus": 0, **off_head()},
        health_check_period_s=CHECK_EVERY_S,
        health_check_timeout_s=CHECK_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=patience_s,
        logging_config=quiet,
    )(BatchReplica)
    ingress = serve.deployment(
        name="Ingress",
        num_replicas=config.ingress_replicas,
        max_ongoing_requests=UNBOUNDED,
        ray_actor_options={"num_cpus": 0, **off_head()},
        health_check_period_s=CHECK_EVERY_S,
        health_check_timeout_s=CHECK_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=patience_s,
        max_surge_percent=NEW_FIRST,
        logging_config=quiet,
    )(serve.ingress()(IngressReplica))
    deployed_at = time.time_ns()
    routers = router.bind(config.without_keys(), fingerprint, launched, owns_serve, deployed_at)
    jobs = batch.bind(config.without_keys(), fingerprint, routers)
    return ingress.bind(config, fingerprint, routers, jobs, grpc_from_here_only, patience_s, deployed_at)


class IngressReplica(GrpcServicer):
    """Parses, bounds, tokenizes and streams; keeps nothing between requests. Ray Serve calls its gRPC methods by their names.

    Batch jobs meet ``Batch`` in their store only.
    """

    def __init__(
        self,
        config: EngineConfig,
        fingerprint: Fingerprint,
        router: "DeploymentHandle[Any]",
        _batch: "DeploymentHandle[Any]",  # which is thereby part of the application
        grpc_from_here_only: bool,
        patience_s: float,
        deployed_at: int,
    ) -> None:
        log_beside_ray_serve(config.logs, "door")
        keep_internal_port_on_node_address()
        note_queues_of_answers()
        with naming_the_node():
            check_fingerprint(config.model, tuple(entry for entry in fingerprint if not entry[0].endswith(WEIGHTS)))
            model = served_model(config)
        mark, node = mark_of(fingerprint), ray.get_runtime_context().get_node_id()
        self._routers = RemoteRouters(router, model.max_sequences * config.most_replicas, patience_s, mark, node)
        if is_drained(serve.get_replica_context().app_name, deployed_at):  # and one of its doors has died since
            self._routers.drain()
        source = CountingRoom(self._routers, model.counts)
        repeat_for_ever(EXPORT_EVERY_S, RequestMetrics(RayMetrics(), model.counts, "interactive").tell)
        self._batches = batch_service(config)
        keys = ApiKeys(config.api_key, config.api_key_file)
        writes_per_s = config.stream_writes_per_s or min(WRITES_PER_CORE * (os.cpu_count() or 1), MAX_WRITES)
        super().__init__(
            model,
            source,
            self._batches,
            keys=keys,
            admits=is_from_here if grpc_from_here_only else lambda _: True,
            pace=Pacer(writes_per_s),
            max_message=config.max_body_bytes,
            id_of=serves_request_id,
        )
        bodies = BodyBudget(max(MAX_HELD, config.max_body_bytes))
        self._door = HttpDoor(
            model,
            source,
            self._routers.is_ready,
            self._routers.expert_load,
            config.max_body_bytes,
            writes_per_s,
            self._routers.move_experts if config.move_experts else None,
            chat=chat_format(config, model),
            keys=keys,
            more_routes=[*BatchDoor(self._batches, bodies).routes(), *ActivityDoor(self._routers.activity).routes()],
            more_operations={**BATCH_OPERATIONS, **ACTIVITY_OPERATIONS},
            sends_request_id=False,  # Ray Serve's proxies do
            slow_reader_s=config.slow_reader_timeout,
            bodies=bodies,
            sign=(node, mark),
        )

    def __serve_build_asgi_app__(self) -> Starlette:
        return self._door.app()

    async def __del__(self) -> None:
        self._routers.close()
        self._batches.close()

    async def drain(self) -> int:
        """Take nothing new; returns how many requests have not ended."""
        return self._routers.drain()

    async def resume(self) -> None:
        """Take new requests again."""
        self._routers.resume()

    async def end_all(self) -> None:
        """What runs ends with an error that says why."""
        self._routers.end_all()

    async def stats(self) -> dict[str, Any]:
        """What is held at this moment."""
        return {
            "requests": self._routers.num_requests,
            "tasks": len(asyncio.all_tasks()),
            "rss": psutil.Process().memory_info().rss,
            "pid": os.getpid(),
        }
