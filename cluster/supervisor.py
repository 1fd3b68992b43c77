"""Creates a pipeline's actors and removes them; it is on no step's path."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup, get_placement_group, placement_group, remove_placement_group

from tramontane.cluster.actors import NAMESPACE, create_stage
from tramontane.proto.plan import ClusterPlan


@dataclass(frozen=True, slots=True)
class PipelineSpec:
    """A named pipeline: what to run and what each stage gets."""

    name: str
    plan: ClusterPlan
    folder: Path
    threads_per_stage: int
    use_gpus: bool

    @property
    def bundles(self) -> list[dict[str, float]]:
        bundle: dict[str, float] = {"CPU": self.threads_per_stage}
        return [bundle | ({"GPU": 1} if self.use_gpus else {}) for _ in self.plan.stages]

    @property
    def supervisor_name(self) -> str:
        return f"{self.name}-supervisor"

    def stage_name(self, stage_id: int) -> str:
        return f"{self.name}-stage-{stage_id}"


class Supervisor:
    """Owner of one pipeline's placement group and stage actors, all detached and named.

    It keeps nothing that it could not find again by name, so Ray may restart it at any
    time; steps go on meanwhile.
    """

    def __init__(self, spec: PipelineSpec) -> None:
        self.spec = spec

    def __repr__(self) -> str:
        return f"Supervisor {self.spec.name}"

    def start(self, timeout_s: float) -> list[ActorHandle[Any]] | None:
        """Place and load every stage; None if the cluster had no room within ``timeout_s``."""
        group = self._group()
        if not group.wait(timeout_s):
            return None
        stages = [
            create_stage(
                self.spec.stage_name(stage.stage_id),
                stage,
                self.spec.folder,
                group,
                self.spec.threads_per_stage,
                self.spec.use_gpus,
            )
            for stage in self.spec.plan.stages
        ]
        loading: list[ray.ObjectRef[str]] = [stage.ready.remote() for stage in stages]
        for stage, ready in zip(stages, loading, strict=True):
            wait_until_ready(stage, ready)
        return stages

    def stop(self) -> None:
        """Remove the actors first: a stage whose bundle goes first stays "restarting" for ever."""
        for stage in self.spec.plan.stages:
            try:
                ray.kill(ray.get_actor(self.spec.stage_name(stage.stage_id), NAMESPACE))
            except ValueError:  # no such actor: it was never made, or is gone
                continue
        try:
            remove_placement_group(get_placement_group(self.spec.name))
        except ValueError:
            return

    def _group(self) -> PlacementGroup:
        try:
            group: PlacementGroup = get_placement_group(self.spec.name)
        except ValueError:
            group = placement_group(self.spec.bundles, strategy="PACK", name=self.spec.name, lifetime="detached")
        return group


def wait_until_ready(stage: ActorHandle[Any], ready: "ray.ObjectRef[str]") -> None:
    """Raises what kept the stage from loading. If its process died, its next life knows more than Ray."""
    try:
        ray.get(ready)
    except RayActorError:
        ray.get(stage.ready.remote())


def create_supervisor(spec: PipelineSpec) -> ActorHandle[Any]:
    options = {
        "name": spec.supervisor_name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "max_restarts": -1,
    }
    return cast("ActorHandle[Any]", ray.remote(Supervisor).options(**options).remote(spec))
