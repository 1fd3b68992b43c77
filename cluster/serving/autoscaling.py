"""Autoscaling of pipelines: the metrics that routers report to Ray Serve, and the policy that it
applies to them.
"""

import logging
import math
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.config.engine_keys import SEQS_ON_CPUS
from tramontane.router.scheduling.running_set import PipelineLoad

# names of a router's custom metrics in Ray Serve
SHARE, TOKENS = "pipeline_share", "tokens_in_flight"
POLICY = "tramontane.cluster.serving.autoscaling:PipelineAutoscalingPolicy"
# The mean of the look-back period counts; the delays say how long it has to last. A Serve config
# has Ray Serve's own intervals, because Ray Serve warns of the first one there.
INTERVALS: Mapping[str, Any] = MappingProxyType(
    {"metrics_interval_s": 1.0, "look_back_period_s": 5.0}
)
# ScalingKeys' own, which Ray Serve's controller may not be able to import: it gets this class by
# value, also from a driver of another version
DEFAULT_LOAD = 0.75

logger = logging.getLogger(__name__)


class PipelineAutoscalingPolicy:
    """Ray Serve's policy for the Router deployment: the number of pipelines that their load,
    including waiting queues, would fill.

    ``autoscale_load``: the target utilization of a pipeline's slots or of its cache's pages,
    whichever is scarcer. ``autoscale_tokens``: the target number of tokens in flight per pipeline,
    if that is to count as well.

    Ray Serve rounds up, applies the bounds and the delays. A lost router does not count; its
    requests count where they continue.

    A Serve config may contain anything, and an exception here would stop Ray Serve's controller for
    all of its applications. So arguments that make no sense are logged and ignored.
    """

    def __init__(
        self, autoscale_load: object = None, autoscale_tokens: object = None, **unknown: object
    ) -> None:
        # their names in 0.2, which 0.4 will not accept
        autoscale_load = unknown.pop("target_load", autoscale_load)
        autoscale_tokens = unknown.pop("target_tokens", autoscale_tokens)
        self._autoscale_load, self._autoscale_tokens = (
            _positive(autoscale_load) or DEFAULT_LOAD,
            _positive(autoscale_tokens),
        )
        targets = {"autoscale_load": autoscale_load, "autoscale_tokens": autoscale_tokens}
        ignored = unknown | {
            key: value
            for key, value in targets.items()
            if value is not None and _positive(value) is None
        }
        if ignored:
            logger.warning(
                "%s ignores %s: autoscale_load and autoscale_tokens must be positive numbers",
                POLICY,
                ignored,
            )

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """Return the desired number of pipelines, and the state to keep between calls, which is
        empty.
        """
        # all routers are dead, and their requests wait at the ingresses
        if not context.current_num_replicas:
            return context.target_num_replicas, {}
        metrics = context.aggregated_metrics or {}
        shares, tokens = metrics.get(SHARE, {}), metrics.get(TOKENS, {})
        wanted = sum(shares.values()) / self._autoscale_load
        if self._autoscale_tokens is not None:
            wanted = max(wanted, sum(tokens.values()) / self._autoscale_tokens)
        # one has not reported yet
        if len(shares) < context.current_num_replicas and context.config is not None:
            wanted = max(
                wanted, context.total_num_requests / context.config.get_target_ongoing_requests()
            )
        return wanted, {}


def _positive(value: object) -> float | None:
    return value if isinstance(value, int | float) and 0 < value < math.inf else None


def to_metrics(demand: PipelineLoad) -> dict[str, float]:
    """Return a router's custom metrics."""
    return {SHARE: demand.share, TOKENS: float(demand.tokens)}


def autoscaling_fields(config: EngineConfig, slots: int) -> dict[str, Any]:
    """Return the scaling options of the Router deployment, as in a Serve config. ``slots``: of one
    pipeline.
    """
    targets = {"autoscale_load": config.autoscale_load, "autoscale_tokens": config.autoscale_tokens}
    return {
        "min_replicas": config.replicas,
        "max_replicas": config.max_pipelines,
        # for routers that have not reported yet
        "target_ongoing_requests": max(int(slots * config.autoscale_load), 1),
        "upscale_delay_s": config.upscale_delay,
        "downscale_delay_s": config.downscale_delay,
        "policy": {"policy_function": POLICY, "policy_kwargs": targets},
    }


def router_scaling_options(config: EngineConfig) -> dict[str, Any]:
    """Return the options of the Router deployment: a fixed number of replicas, or how it is
    scaled.
    """
    if config.max_pipelines == config.replicas:
        return {"num_replicas": config.replicas}
    fields = autoscaling_fields(config, config.max_num_seqs or SEQS_ON_CPUS)
    policy: Any = AutoscalingPolicy(**fields.pop("policy"))  # type: ignore[no-untyped-call]
    # metrics_interval_s is deprecated, but replicas do not read its successor yet
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return {"autoscaling_config": AutoscalingConfig(**fields, policy=policy, **INTERVALS)}
