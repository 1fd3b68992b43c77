"""How many pipelines there are to be: what routers tell Ray Serve, and what it makes of that."""

import logging
import math
import warnings
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.router.scheduling.running_set import PipelineLoad

SHARE, TOKENS = "pipeline_share", "tokens_in_flight"  # what a router tells, by Ray Serve's way for custom metrics
POLICY = "tramontane.cluster.serving.autoscaling:PipelineAutoscalingPolicy"
TARGET_LOAD = 0.75  # where nobody says
TELL_EVERY_S, LOOK_BACK_S = 1.0, 5.0  # the mean of so long counts; how long it must last is the delays' to say

logger = logging.getLogger(__name__)


class PipelineAutoscalingPolicy:
    """Ray Serve's policy for the Router deployment: so many pipelines as what they have, queue included, would fill.

    ``target_load``: how full each is to be, by its places or by its cache's pages, whichever is scarcer.
    ``target_tokens``: how many tokens it is to have in flight, if that is to count as well.

    Ray Serve rounds up, keeps to the bounds, and waits for the delays. A router that is gone does not count, and what it had is
    counted where it goes on.
    """

    def __init__(self, target_load: object = None, target_tokens: object = None, **unknown: object) -> None:
        """Whoever writes a Serve config may write anything: what cannot be meant is said and left out, since an error
        would keep Ray Serve's controller from all of its applications."""
        self._target_load, self._target_tokens = _positive(target_load) or TARGET_LOAD, _positive(target_tokens)
        told = {"target_load": target_load, "target_tokens": target_tokens}
        wrong = unknown | {key: value for key, value in told.items() if value is not None and _positive(value) is None}
        if wrong:
            logger.warning("%s of %s make no sense: positive numbers for target_load and target_tokens do", wrong, POLICY)

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """How many are wanted, and what to remember, which is nothing."""
        if not context.current_num_replicas:  # all routers are dead, and what they had waits at the doors
            return context.target_num_replicas, {}
        told = context.aggregated_metrics or {}
        shares, tokens = told.get(SHARE, {}), told.get(TOKENS, {})
        wanted = sum(shares.values()) / self._target_load
        if self._target_tokens is not None:
            wanted = max(wanted, sum(tokens.values()) / self._target_tokens)
        if len(shares) < context.current_num_replicas and context.config is not None:  # one has not told anything yet
            wanted = max(wanted, context.total_num_requests / context.config.get_target_ongoing_requests())
        return wanted, {}


def _positive(value: object) -> float | None:
    return value if isinstance(value, int | float) and 0 < value < math.inf else None


def to_metrics(demand: PipelineLoad) -> dict[str, float]:
    """What a router tells."""
    return {SHARE: demand.share, TOKENS: float(demand.tokens)}


def policy_for(target_load: float, target_tokens: int | None) -> dict[str, Any]:
    """As it is written in a Serve config."""
    return {"policy_function": POLICY, "policy_kwargs": {"target_load": target_load, "target_tokens": target_tokens}}


def router_scaling_options(config: EngineConfig) -> dict[str, Any]:
    """Options of the Router deployment: a fixed number, or how it is scaled."""
    if config.max_pipelines == config.replicas:
        return {"num_replicas": config.replicas}
    policy: Any = AutoscalingPolicy(**policy_for(config.target_load, config.target_tokens))  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():  # of the interval, for whose successor no replica asks yet
        warnings.simplefilter("ignore", DeprecationWarning)
        scaling = AutoscalingConfig(
            min_replicas=config.replicas,
            max_replicas=config.max_pipelines,
            target_ongoing_requests=max(int(config.max_num_seqs * config.target_load), 1),  # of those that have not told yet
            upscale_delay_s=config.upscale_delay,
            downscale_delay_s=config.downscale_delay,
            metrics_interval_s=TELL_EVERY_S,
            look_back_period_s=LOOK_BACK_S,
            policy=policy,
        )
    return {"autoscaling_config": scaling}
