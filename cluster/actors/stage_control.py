"""Giving stages a new epoch, and with it new edges.

What a supervisor finds again: the actors of its pipeline, by their names, and the lease that stages remember.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from tramontane.cluster.actors.lease import Lease
from tramontane.cluster.actors.pipeline_spec import PipelineSpec
from tramontane.cluster.actors.stage_actor import StageHealth
from tramontane.cluster.actors.worker_actor import NAMESPACE
from tramontane.proto.errors import LinkError
from tramontane.proto.plan import Link

INTERRUPT_TIMEOUT_S = 5.0  # it is answered at once, unless a process is only starting, or does nothing any more
LOOK_EVERY_S = 2.0
FENCE_TIMEOUT_S = 60.0  # a stage that is loading again may take longer: the router asks again


def fence_stages(stages: list[ActorHandle[Any]], epoch: int, holder: str, link: Link) -> None:
    """Make the stages obey ``epoch``; where the link is direct, with new edges between all of them."""
    # A step that waits, for a neighbour or for experts, must not keep the fence waiting.
    interrupted = [stage.interrupt.options(concurrency_group="control").remote(epoch) for stage in stages]
    ray.get(interrupted, timeout=INTERRUPT_TIMEOUT_S)
    _wait_for([stage.fence.remote(epoch, holder) for stage in stages], stages)
    if link == "direct":
        _connect_links(stages, epoch)


def _wait_for(asked: "list[ray.ObjectRef[None]]", stages: list[ActorHandle[Any]]) -> None:
    """A stage that stops meanwhile is not waited for: one that is loading says how it is."""
    give_up_at = time.monotonic() + FENCE_TIMEOUT_S
    while ray.wait(asked, num_returns=len(asked), timeout=LOOK_EVERY_S)[1] and time.monotonic() < give_up_at:
        ray.get([stage.health.options(concurrency_group="control").remote() for stage in stages], timeout=INTERRUPT_TIMEOUT_S)
    ray.get(asked, timeout=0)


def _connect_links(stages: list[ActorHandle[Any]], epoch: int) -> None:
    """If a stage dies meanwhile that is raised, rather than what its neighbours suffer from it."""
    outlets: list[Any] = ray.get([stage.listen.remote(epoch) for stage in stages], timeout=FENCE_TIMEOUT_S)
    inlets = [None, *outlets[:-1]]
    asked: list[ray.ObjectRef[None]] = [stage.connect.remote(epoch, inlet) for stage, inlet in zip(stages, inlets, strict=True)]
    for ref in ray.wait(asked, num_returns=len(asked), timeout=FENCE_TIMEOUT_S)[0]:
        with contextlib.suppress(LinkError):
            ray.get(ref)
    ray.get(asked, timeout=0)


HEALTH_TIMEOUT_S = 1.0  # of all stages together, where one is stopped; while none can tell the lease, for a few times as long
HEALTH_LOOKS = 5


def find_stage_actors(spec: PipelineSpec) -> list[ActorHandle[Any]]:
    stages = []
    for stage in spec.plan.stages:
        with contextlib.suppress(ValueError):
            stages.append(ray.get_actor(spec.stage_name(stage.stage_id), NAMESPACE))
    return stages


def find_worker_actors(spec: PipelineSpec) -> dict[str, ActorHandle[Any]]:
    """Stages and experts, by the names of their actors."""
    workers = {}
    for name in (*map(spec.stage_name, range(len(spec.plan.stages))), *(spec.expert_actors.names if spec.expert_actors else ())):
        with contextlib.suppress(ValueError):
            workers[name] = ray.get_actor(name, NAMESPACE)
    return workers


def recover_lease(spec: PipelineSpec) -> Lease | None:
    """The newest lease that any stage has been fenced for."""
    asked: list[ray.ObjectRef[StageHealth]] = [
        stage.health.options(concurrency_group="control").remote() for stage in find_stage_actors(spec)
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
