"""Control of a pipeline's existing actors: find them by name, fence stages with a new epoch,
recover the lease from them.
"""

import contextlib
import time
from collections.abc import Iterable, Iterator
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
from tramontane.proto.timing import FENCE_TIMEOUT_S, INTERRUPT_TIMEOUT_S, STAGE_LEASE_TIMEOUT_S

FENCE_CHECK_INTERVAL_S = 2.0
MAX_LEASE_ATTEMPTS = 5  # while no stage knows a lease and one has not answered


def fence_stages(stages: list[ActorHandle[Any]], epoch: int, holder: str, link: Link) -> None:
    """Make the stages accept ``epoch`` only; a direct link gets new channels between all of them.

    Raises Ray's errors, GetTimeoutError among them, and LinkError.
    """
    # A step that waits, for a neighbor or for experts, must not keep the fence waiting.
    interrupted = [
        stage.interrupt.options(concurrency_group="control").remote(epoch) for stage in stages
    ]
    ray.get(interrupted, timeout=INTERRUPT_TIMEOUT_S)
    _wait_for([stage.fence.remote(epoch, holder) for stage in stages], stages)
    if link == "direct":
        _connect_links(stages, epoch)


def newest_epoch(stages: list[ActorHandle[Any]]) -> int:
    """Return the newest epoch that any stage accepts, -1 if no stage was fenced. Raises Ray's
    errors, GetTimeoutError among them.
    """
    asked = [stage.health.options(concurrency_group="control").remote() for stage in stages]
    healths: list[StageHealth] = ray.get(asked, timeout=INTERRUPT_TIMEOUT_S)
    return max(health.epoch for health in healths)


def _wait_for(refs: "list[ray.ObjectRef[None]]", stages: list[ActorHandle[Any]]) -> None:
    """Wait for calls while all stages answer health checks, as loading stages do; raise if a stage
    does not answer.
    """
    deadline = time.monotonic() + FENCE_TIMEOUT_S
    while (
        ray.wait(refs, num_returns=len(refs), timeout=FENCE_CHECK_INTERVAL_S)[1]
        and time.monotonic() < deadline
    ):
        ray.get(
            [stage.health.options(concurrency_group="control").remote() for stage in stages],
            timeout=INTERRUPT_TIMEOUT_S,
        )
    ray.get(refs, timeout=0)


def _connect_links(stages: list[ActorHandle[Any]], epoch: int) -> None:
    """Connect each stage to the next; the death of a stage is raised rather than the LinkError of
    its neighbor.
    """
    outlets: list[Any] = ray.get(
        [stage.listen.remote(epoch) for stage in stages], timeout=FENCE_TIMEOUT_S
    )
    inlets = [None, *outlets[:-1]]
    refs: list[ray.ObjectRef[None]] = [
        stage.connect.remote(epoch, inlet) for stage, inlet in zip(stages, inlets, strict=True)
    ]
    for ref in ray.wait(refs, num_returns=len(refs), timeout=FENCE_TIMEOUT_S)[0]:
        with contextlib.suppress(LinkError):
            ray.get(ref)
    ray.get(refs, timeout=0)


def find_stage_actors(spec: PipelineSpec) -> list[ActorHandle[Any]]:
    """Return the pipeline's stages that exist, in order."""
    return list(_find(map(spec.stage_name, range(len(spec.plan.stages)))).values())


def find_expert_actors(spec: PipelineSpec) -> dict[str, ActorHandle[Any]]:
    """Return the expert actors that exist, by their names, in order."""
    return _find(spec.expert_actors.names if spec.expert_actors else ())


def find_worker_actors(spec: PipelineSpec) -> dict[str, ActorHandle[Any]]:
    """Return the stages and expert actors that exist, by the names of their actors."""
    experts = spec.expert_actors
    return _find(
        (*map(spec.stage_name, range(len(spec.plan.stages))), *(experts.names if experts else ()))
    )


def _find(names: Iterable[str]) -> dict[str, ActorHandle[Any]]:
    actors = {}
    for name in names:
        with contextlib.suppress(ValueError):
            actors[name] = ray.get_actor(name, NAMESPACE)
    return actors


def recover_lease(spec: PipelineSpec) -> Lease | None:
    """Return the newest lease that any stage was fenced for; None if no stage knows one."""
    refs: list[ray.ObjectRef[StageHealth]] = [
        stage.health.options(concurrency_group="control").remote()
        for stage in find_stage_actors(spec)
    ]
    for _ in range(MAX_LEASE_ATTEMPTS if refs else 0):
        answered, silent = ray.wait(refs, num_returns=len(refs), timeout=STAGE_LEASE_TIMEOUT_S)
        leases = list(_leases(answered))
        if leases or not silent:
            return max(leases, key=lambda lease: lease.epoch, default=None)
    return None


def _leases(refs: list["ray.ObjectRef[StageHealth]"]) -> Iterator[Lease]:
    for ref in refs:
        with contextlib.suppress(RayError):
            health = ray.get(ref)
            if health.holder:
                yield Lease(health.holder, health.epoch)
