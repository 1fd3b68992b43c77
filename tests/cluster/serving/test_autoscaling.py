"""How many pipelines are wanted, without Ray: the policy behind Ray Serve's bounds and delays, and
what it is made of.
"""

from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.autoscaling_state import (
    DeploymentAutoscalingState,
    _resolve_policy_callable,
)
from ray.serve._private.common import DeploymentID, ReplicaID, ReplicaMetricReport, TimeStampedValue
from ray.serve._private.config import DeploymentConfig

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.serving.app import application
from tramontane.cluster.serving.autoscaling import (
    SHARE,
    TOKENS,
    PipelineAutoscalingPolicy,
    router_scaling_options,
    to_metrics,
)
from tramontane.proto.errors import ConfigError
from tramontane.router.scheduling.running_set import PipelineLoad

ID = DeploymentID("Router", "tramontane")


def _wanted(
    reported: dict[str, PipelineLoad],
    running: int | None = None,
    target: int = 1,
    requests: float = 0.0,
    autoscale_tokens: int | None = None,
) -> float:
    """The policy's result for routers that have reported this; ``running`` is their number, if some
    have not reported.
    """
    metrics: dict[str, dict[str, float]] = {SHARE: {}, TOKENS: {}}
    for name, demand in reported.items():
        for key, value in to_metrics(demand).items():
            metrics[key][name] = value
    context: Any = SimpleNamespace(
        current_num_replicas=len(reported) if running is None else running,
        target_num_replicas=target,
        aggregated_metrics=metrics,
        total_num_requests=requests,
        config=SimpleNamespace(get_target_ongoing_requests=lambda: 6.0),
    )
    wanted, remembered = PipelineAutoscalingPolicy(0.75, autoscale_tokens)(context)
    assert remembered == {}
    return wanted


def test_so_many_as_what_all_have_would_fill() -> None:
    assert _wanted({"a": PipelineLoad(0.75, 10)}) == pytest.approx(1.0)
    assert _wanted({"a": PipelineLoad(2.0, 10), "b": PipelineLoad(0.25, 10)}) == pytest.approx(3.0)
    assert _wanted({"a": PipelineLoad(0.0, 0), "b": PipelineLoad(0.0, 0)}) == 0.0, (
        "the least that there are is Ray Serve's to see to"
    )


def test_tokens_in_flight_count_where_they_are_to() -> None:
    """Two sequences of 64 places are little; that they are long is not, if a pipeline is meant for
    1000 tokens.
    """
    long = {"a": PipelineLoad(2 / 64, 2500)}
    assert _wanted(long) < 0.1
    assert _wanted(long, autoscale_tokens=1000) == pytest.approx(2.5)
    assert _wanted({"a": PipelineLoad(3.0, 10)}, autoscale_tokens=1000) == pytest.approx(4.0), (
        "and the places still do"
    )


def test_a_router_without_a_report_counts_by_its_requests() -> None:
    assert _wanted({"a": PipelineLoad(0.0, 0)}, running=2, requests=12.0) == pytest.approx(2.0)
    assert _wanted({"a": PipelineLoad(0.0, 0)}, running=1, requests=12.0) == 0.0, (
        "reports are better, where all routers send them"
    )


def test_without_any_router_nothing_changes() -> None:
    assert _wanted({}, target=3) == 3


def _state(**settings: Any) -> DeploymentAutoscalingState:
    """Ray Serve's own, as its controller has it."""
    scaling = router_scaling_options(EngineConfig(max_replicas=3, **settings))["autoscaling_config"]
    state = DeploymentAutoscalingState(ID)
    info: Any = SimpleNamespace(
        deployment_config=DeploymentConfig(autoscaling_config=scaling),
        config_changed=lambda _: False,
        target_capacity=None,
        target_capacity_direction=None,
    )
    assert state.register(info, 1) == 1
    return state


def _report(state: DeploymentAutoscalingState, at: float, **demands: PipelineLoad) -> None:
    for name, demand in demands.items():
        series = {key: [TimeStampedValue(at, value)] for key, value in to_metrics(demand).items()}
        state.record_request_metrics_for_replica(
            ReplicaMetricReport(ReplicaID(name, ID), series, at)
        )
    state.update_running_replica_ids([ReplicaID(name, ID) for name in demands])


def test_ray_serve_keeps_to_the_bounds_and_to_the_delays() -> None:
    now = _state(upscale_delay=0, downscale_delay=0)
    _report(now, 1.0, a=PipelineLoad(10.0, 0))
    assert now.get_decision_num_replicas(1) == 3
    _report(now, 2.0, a=PipelineLoad(0.0, 0), b=PipelineLoad(0.0, 0), c=PipelineLoad(0.0, 0))
    assert now.get_decision_num_replicas(3) == 1
    later = _state(upscale_delay=1000, downscale_delay=1000)
    _report(later, 1.0, a=PipelineLoad(10.0, 0))
    assert later.get_decision_num_replicas(1) == 1
    _report(later, 2.0, a=PipelineLoad(0.0, 0), b=PipelineLoad(0.0, 0), c=PipelineLoad(0.0, 0))
    assert later.get_decision_num_replicas(3) == 3


def test_the_report_of_a_dead_router_does_not_count() -> None:
    state = _state(upscale_delay=0, downscale_delay=0)
    _report(state, 1.0, a=PipelineLoad(0.3, 0), b=PipelineLoad(2.0, 0))
    assert state.get_decision_num_replicas(2) == 3
    state.on_replica_stopped(ReplicaID("b", ID))
    state.update_running_replica_ids([ReplicaID("a", ID)])
    assert state.get_decision_num_replicas(2) == 1


def test_the_policy_travels_with_its_settings() -> None:
    scaling = router_scaling_options(
        EngineConfig(max_replicas=2, autoscale_load=0.5, autoscale_tokens=7)
    )["autoscaling_config"]
    policy: Any = _resolve_policy_callable(scaling.policy)
    assert (policy._autoscale_load, policy._autoscale_tokens) == (0.5, 7)
    assert (scaling.min_replicas, scaling.max_replicas, scaling.get_target_ongoing_requests()) == (
        1,
        2,
        32,
    )


def test_a_fixed_number_is_not_scaled() -> None:
    assert router_scaling_options(EngineConfig(replicas=2)) == router_scaling_options(
        EngineConfig(replicas=2, max_replicas=2)
    )
    assert router_scaling_options(EngineConfig(replicas=2)) == {"num_replicas": 2}


def test_never_fewer_at_the_most_than_at_the_least() -> None:
    with pytest.raises(
        ConfigError, match="--max-replicas is 2; it must be at least --replicas, which is 3"
    ):
        EngineConfig.build(None, {"replicas": 3, "max_replicas": 2})


def test_the_application_is_scaled_by_its_routers_alone() -> None:
    ingress = application(EngineConfig(max_replicas=3))._bound_deployment
    (routers,) = [
        each._bound_deployment
        for each in ingress.init_args
        if getattr(each, "_bound_deployment", None)
    ][:1]
    scaling = routers._deployment_config.autoscaling_config
    assert (routers.name, scaling.min_replicas, scaling.max_replicas) == ("Router", 1, 3)
    assert ingress._deployment_config.autoscaling_config is None


def test_arguments_of_the_policy_keep_their_former_names(caplog: pytest.LogCaptureFixture) -> None:
    policy = PipelineAutoscalingPolicy(target_load=0.5, target_tokens=7)
    assert (policy._autoscale_load, policy._autoscale_tokens) == (0.5, 7)
    assert not caplog.records


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"autoscale_load": 0}, 4.0),
        ({"autoscale_load": "0.5"}, 4.0),
        ({"autoscale_load": -1}, 4.0),
        ({"autoscale_load": float("nan")}, 4.0),
        ({}, 4.0),
        ({"autoscale_load": 1.5, "target_token": 5}, 2.0),
        ({"autoscale_load": 1.5, "autoscale_tokens": 0}, 2.0),
        ({"autoscale_load": 1.5, "autoscale_tokens": [1]}, 2.0),
    ],
)
def test_settings_that_make_no_sense_are_left_out_and_said(
    settings: dict[str, Any], wanted: float, caplog: pytest.LogCaptureFixture
) -> None:
    """An error in a policy would keep Ray Serve's controller from all applications."""
    context: Any = SimpleNamespace(
        current_num_replicas=1,
        target_num_replicas=1,
        aggregated_metrics={SHARE: {"a": 3.0}, TOKENS: {"a": 10.0}},
        config=None,
    )
    policy = PipelineAutoscalingPolicy(**settings)
    assert policy(context) == (pytest.approx(wanted), {})
    assert ("must be positive numbers" in caplog.text) is bool(settings)
