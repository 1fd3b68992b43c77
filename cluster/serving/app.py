"""The Ray Serve application: Ingress (any number) and Batch (one) -> Router (one per pipeline)."""

import time
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig, gRPCOptions

from tramontane.cluster.actors.worker_actor import annotate_node
from tramontane.cluster.common.node_labels import avoid_head_node
from tramontane.cluster.config.engine_config import CLI_ONLY_KEYS, EngineConfig
from tramontane.cluster.config.parsers import has_password
from tramontane.cluster.pipeline.engine import model_fingerprint
from tramontane.cluster.serving.autoscaling import router_scaling_options
from tramontane.cluster.serving.batch_replica import BatchReplica
from tramontane.cluster.serving.ingress import IngressReplica
from tramontane.cluster.serving.least_loaded_router import LeastLoadedRouter
from tramontane.cluster.serving.router_replica import RouterReplica
from tramontane.proto.errors import ConfigError

APPLICATION = "tramontane"
GRPC_FUNCTIONS = tuple(f"tramontane.router.grpc.handlers.{name}" for name in ("add_inference", "add_batch_jobs"))
VISIBLE_SECRET = "api_key"  # a Serve config is on Ray's dashboard, and told by serve status
DRAIN_S = 600.0  # where pipelines are scaled and updated in place; a command that is interrupted waits less
UNBOUNDED = 1_000_000  # our own bounds are reached first, and answer in OpenAI's words
CHECK_EVERY_S = 1.0  # Ray Serve finds with it that a replica is dead, and begins another
CHECK_TIMEOUT_S = 10.0  # of one that lives and does not answer: after three such checks, before doors lose patience
HAND_OVER_S = 15.0  # then doors take what a router still has to another one, and it ends by itself
MAX_SURGE_PERCENT = 100  # percent: of a new version all replicas are started before those of the old one are stopped


def build(args: dict[str, Any]) -> Application:
    """For ``serve deploy`` and ``serve build``: ``args`` are the keys of the configuration."""
    config = validate_config(args)
    return application(config, grace_s=DRAIN_S if config.drain_timeout is None else config.drain_timeout)


def validate_config(args: dict[str, Any]) -> EngineConfig:
    """Of a Serve config's ``args``. Raises ConfigError for what has no place there."""
    if VISIBLE_SECRET in args:
        raise ConfigError("api_key: not for a Serve config, which Ray shows to everybody; give an api_key_file")
    if secret := [key for key, value in args.items() if key.startswith("jobs_") and has_password(str(value))]:
        raise ConfigError(
            f"{secret[0]}: a password is not for a Serve config, which Ray shows to everybody; "
            "leave it out, and have every node know it by ~/.pgpass, or as the storage's library says"
        )
    if others := sorted(CLI_ONLY_KEYS & args.keys()):
        raise ConfigError(f"{', '.join(others)}: not for a Serve config; its http_options and tracing_config have their like")
    return EngineConfig.build(None, args)


def grpc_options(port: int) -> gRPCOptions:
    """For Ray Serve's start; port 0 is none. Reflection is among the functions."""
    return gRPCOptions(port=port, grpc_servicer_functions=list(GRPC_FUNCTIONS) if port else [], enable_reflection=False)


def application(
    config: EngineConfig,
    launched: bool = False,
    owns_serve: bool = False,
    grace_s: float = 20.0,
    grpc_from_here_only: bool = False,
) -> Application:
    """``launched`` and ``owns_serve`` are those of ``pipeline_spec.OwnerApplication``.

    ``grpc_from_here_only``: in a cluster that we have not started, Ray Serve's gRPC port is open to every peer.

    ``patience_s``: how long a replica that is to stop may finish what it has begun.

    The checkpoint as it is here, where the application is built, is what every node must have.
    """
    config = config.with_absolute_paths()
    with annotate_node():
        fingerprint = model_fingerprint(config)
    quiet = config.logs.for_ray_serve()
    router = serve.deployment(
        name="Router",
        **router_scaling_options(config),
        max_constructor_retry_count=1,  # what keeps a pipeline from loading is reported, not tried again
        max_ongoing_requests=UNBOUNDED,
        ray_actor_options={"num_cpus": 0, **avoid_head_node()},
        health_check_period_s=CHECK_EVERY_S,
        health_check_timeout_s=CHECK_TIMEOUT_S,
        request_router_config=RequestRouterConfig(request_router_class=LeastLoadedRouter),  # type: ignore[arg-type]
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=grace_s + HAND_OVER_S,
        max_surge_percent=MAX_SURGE_PERCENT,
        logging_config=quiet,
    )(RouterReplica)
    batch = serve.deployment(
        name="Batch",
        num_replicas=1,
        ray_actor_options={"num_cpus": 0, **avoid_head_node()},
        health_check_period_s=CHECK_EVERY_S,
        health_check_timeout_s=CHECK_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=grace_s,
        logging_config=quiet,
    )(BatchReplica)
    ingress = serve.deployment(
        name="Ingress",
        num_replicas=config.ingress_replicas,
        max_ongoing_requests=UNBOUNDED,
        ray_actor_options={"num_cpus": 0, **avoid_head_node()},
        health_check_period_s=CHECK_EVERY_S,
        health_check_timeout_s=CHECK_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=grace_s,
        max_surge_percent=MAX_SURGE_PERCENT,
        logging_config=quiet,
    )(serve.ingress()(IngressReplica))
    deployed_at = time.time_ns()
    routers = router.bind(config.without_secrets(), fingerprint, launched, owns_serve, deployed_at)
    jobs = batch.bind(config.without_secrets(), fingerprint, routers)
    return ingress.bind(config, fingerprint, routers, jobs, grpc_from_here_only, grace_s, deployed_at)
