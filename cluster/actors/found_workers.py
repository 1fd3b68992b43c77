"""What a supervisor finds again: the actors of its pipeline, by their names, and the lease that stages remember."""

import contextlib
from collections.abc import Iterator
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from tramontane.cluster.actors.lease import Lease
from tramontane.cluster.actors.pipeline_spec import PipelineSpec
from tramontane.cluster.actors.stage_actor import StageHealth
from tramontane.cluster.actors.worker_actor import NAMESPACE

HEALTH_TIMEOUT_S = 1.0  # of all stages together, where one is stopped; while none can tell the lease, for a few times as long
HEALTH_LOOKS = 5


def existing_stages(spec: PipelineSpec) -> list[ActorHandle[Any]]:
    stages = []
    for stage in spec.plan.stages:
        with contextlib.suppress(ValueError):
            stages.append(ray.get_actor(spec.stage_name(stage.stage_id), NAMESPACE))
    return stages


def existing_workers(spec: PipelineSpec) -> dict[str, ActorHandle[Any]]:
    """Stages and experts, by the names of their actors."""
    workers = {}
    for name in (*map(spec.stage_name, range(len(spec.plan.stages))), *(spec.expert_actors.names if spec.expert_actors else ())):
        with contextlib.suppress(ValueError):
            workers[name] = ray.get_actor(name, NAMESPACE)
    return workers


def lease_in_stages(spec: PipelineSpec) -> Lease | None:
    """The newest lease that any stage has been fenced for."""
    asked: list[ray.ObjectRef[StageHealth]] = [
        stage.health.options(concurrency_group="control").remote() for stage in existing_stages(spec)
    ]
    for _ in range(HEALTH_LOOKS if asked else 0):
        answers, silent = ray.wait(asked, num_returns=len(asked), timeout=HEALTH_TIMEOUT_S)
        leases = list(_leases(answers))
        if leases or not silent:
            return max(leases, key=lambda lease: lease.epoch, default=None)
    return None


def _leases(answers: list["ray.ObjectRef[StageHealth]"]) -> Iterator[Lease]:
    for answer in answers:
        with contextlib.suppress(RayError):
            health = ray.get(answer)
            if health.holder:
                yield Lease(health.holder, health.epoch)
