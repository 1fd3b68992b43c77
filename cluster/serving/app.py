"""The Ray Serve application: Ingress (any number) and Batch (one) call Router (one per
pipeline).
"""

import uuid
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig, gRPCOptions

from tramontane.cluster.actors.worker_actor import annotate_node
from tramontane.cluster.common.ray_api import avoid_head_node
from tramontane.cluster.config.engine_config import CLI_ONLY_KEYS, EngineConfig, with_first_names
from tramontane.cluster.config.key import has_password
from tramontane.cluster.pipeline.engine import model_checkpoint_digest
from tramontane.cluster.ray_internals.table import SERVE_SYMBOLS, assert_supported
from tramontane.cluster.serving.autoscaling import router_scaling_options
from tramontane.cluster.serving.batch_replica import BatchReplica
from tramontane.cluster.serving.ingress import IngressReplica
from tramontane.cluster.serving.least_loaded_router import LeastLoadedRouter
from tramontane.cluster.serving.router_replica import RouterReplica
from tramontane.proto.errors import ConfigError
from tramontane.proto.timing import (
    DRAIN_S,
    HAND_OVER_S,
    HEALTH_CHECK_INTERVAL_S,
    HEALTH_CHECK_TIMEOUT_S,
)

APPLICATION = "tramontane"
GRPC_FUNCTIONS = tuple(
    f"tramontane.router.grpc.handlers.{name}" for name in ("add_inference", "add_batch_jobs")
)
SECRET_KEY = "api_key"  # a Serve config is shown by Ray's dashboard and by serve status
UNBOUNDED = 1_000_000  # our own limits are reached first, and their errors have OpenAI's format
MAX_SURGE_PERCENT = 100  # new replicas all start before the replicas of the old version stop


def build(args: dict[str, Any]) -> Application:
    """Build the application for ``serve deploy`` and ``serve build``; ``args`` are the keys of the
    configuration.
    """
    assert_supported(SERVE_SYMBOLS)
    config = validate_config(args)
    return application(
        config, grace_s=DRAIN_S if config.drain_timeout is None else config.drain_timeout
    )


def validate_config(args: dict[str, Any]) -> EngineConfig:
    """Read a Serve config's ``args``. Raises ConfigError for keys that are not allowed there."""
    args = with_first_names(args)
    if SECRET_KEY in args:
        raise ConfigError(
            "api_key: not for a Serve config, which Ray shows to all users of its dashboard; give"
            " an api_key_file"
        )
    if secret := [
        key for key, value in args.items() if key.startswith("jobs_") and has_password(str(value))
    ]:
        raise ConfigError(
            f"{secret[0]}: a password is not for a Serve config, which Ray shows to all users of"
            " its dashboard; leave it out, and have every node know it by ~/.pgpass, or as the"
            " storage's library says"
        )
    if others := sorted(CLI_ONLY_KEYS & args.keys()):
        raise ConfigError(
            f"{', '.join(others)}: not for a Serve config; set http_options and tracing_config of"
            " the Serve config"
        )
    return EngineConfig.build(None, args)


def grpc_options(port: int) -> gRPCOptions:
    """Return the option for Ray Serve's start; port 0 means no gRPC. Reflection is registered by
    our own functions.
    """
    return gRPCOptions(
        port=port,
        grpc_servicer_functions=list(GRPC_FUNCTIONS) if port else [],
        enable_reflection=False,
    )


def application(
    config: EngineConfig,
    launched: bool = False,
    owns_serve: bool = False,
    grace_s: float = 20.0,
    grpc_on_loopback_only: bool = False,
) -> Application:
    """Bind the deployments. Every node must have the checkpoint of the node on which the
    application is built.

    ``launched`` and ``owns_serve``: see ``pipeline_spec.OwnerApplication``. ``grace_s``: how long a
    replica that is to stop may finish its requests. ``grpc_on_loopback_only``: refuse gRPC peers on
    other machines, because Ray Serve's gRPC port is open to all machines in a cluster that we have
    not started.
    """
    config = config.with_absolute_paths()
    with annotate_node():
        checkpoint_digest = model_checkpoint_digest(config)
    common = _replica_options(config)
    many: dict[str, Any] = {
        "max_ongoing_requests": UNBOUNDED,
        "max_surge_percent": MAX_SURGE_PERCENT,
    }
    router = serve.deployment(
        name="Router",
        **router_scaling_options(config),
        max_constructor_retry_count=1,  # a pipeline that cannot load is reported, and not retried
        request_router_config=RequestRouterConfig(request_router_class=LeastLoadedRouter),  # type: ignore[arg-type]
        graceful_shutdown_timeout_s=grace_s + HAND_OVER_S,
        **common,
        **many,
    )(RouterReplica)
    batch = serve.deployment(
        name="Batch", num_replicas=1, graceful_shutdown_timeout_s=grace_s, **common
    )(BatchReplica)
    ingress = serve.deployment(
        name="Ingress",
        num_replicas=config.num_ingresses,
        graceful_shutdown_timeout_s=grace_s,
        **common,
        **many,
    )(serve.ingress()(IngressReplica))
    build_id = uuid.uuid4().hex
    routers = router.bind(
        config.without_secrets(), checkpoint_digest, launched, owns_serve, build_id
    )
    jobs = batch.bind(config.without_secrets(), checkpoint_digest, routers)
    return ingress.bind(
        config, checkpoint_digest, routers, jobs, grpc_on_loopback_only, grace_s, build_id
    )


def _replica_options(config: EngineConfig) -> dict[str, Any]:
    """Return the options that all deployments have."""
    return {
        "ray_actor_options": {"num_cpus": 0, **avoid_head_node()},
        "health_check_period_s": HEALTH_CHECK_INTERVAL_S,
        "health_check_timeout_s": HEALTH_CHECK_TIMEOUT_S,
        "graceful_shutdown_wait_loop_s": 0.5,
        "logging_config": config.logs.for_ray_serve(),
    }
