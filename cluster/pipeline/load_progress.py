"""How far stages and expert actors are with their weights: asked, and shown, while somebody waits for them."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayError

from tramontane.cluster.actors.pipeline_spec import EXPERTS, STAGE
from tramontane.cluster.actors.worker_actor import NAMESPACE, WorkerHealth, actor_names
from tramontane.cluster.common.periodic import repeated
from tramontane.proto.plan import ClusterPlan, ExpertActorPlan, StagePlan

POLL_S = 0.5
WORKER = rf"({STAGE}|{EXPERTS})\d+$"  # what follows a pipeline's name in a worker's


@dataclass(frozen=True, slots=True)
class Loading:
    """One stage, or one expert actor: so many bytes of its weights are there, of so many."""

    label: str
    num_bytes: int
    of_bytes: int


ShowLoading = Callable[[Sequence[Loading]], None]


def loading_of(plan: ClusterPlan, loaded: Mapping[str, int], num_pipelines: int = 1) -> list[Loading]:
    """Every stage and expert actor of pipelines that were all planned alike; ``loaded`` has the bytes by name, of those that
    have answered.

    Of two pipelines a-0 and a-1, ``{"a-0-stage-1": 7}`` is the second stage of the first.
    """
    pipelines = sorted({re.sub(WORKER, "", name) for name in loaded})[:num_pipelines]
    pipelines += [""] * (num_pipelines - len(pipelines))  # of which nothing is known yet
    return [
        Loading(
            f"pipeline {number}: {worker.label}" if num_pipelines > 1 else worker.label,
            loaded.get(pipeline + suffix, 0),
            worker.weight_bytes,
        )
        for number, pipeline in enumerate(pipelines, start=1)
        for suffix, worker in _workers(plan)
    ]


def _workers(plan: ClusterPlan) -> Iterator[tuple[str, StagePlan | ExpertActorPlan]]:
    """What each is called after the pipeline's name, and its plan."""
    for stage in plan.stages:
        yield f"{STAGE}{stage.stage_id}", stage
    for actor in plan.experts.actors if plan.experts else ():
        yield f"{EXPERTS}{actor.actor_id}", actor


@contextmanager
def shown_loading(pipelines: str, plan: ClusterPlan, show: ShowLoading | None, num_pipelines: int = 1) -> Iterator[None]:
    """While the block waits for the stages of these pipelines, a thread asks them how far they are, and shows it.

    ``pipelines`` is a regular expression for their names.
    """
    if show is None:
        yield
        return
    workers = _Asked(pipelines + WORKER)

    def follow() -> None:
        with suppress(Exception):  # of Ray, which may be ending: whoever waits learns why, this is only for the eye
            show(loading_of(plan, workers.ask(), num_pipelines))

    with repeated(POLL_S, follow):
        yield


class _Asked:
    """Workers by name, as they come up: none is asked again before it has answered, however long its process takes to start."""

    def __init__(self, names: str) -> None:
        self._names = names
        self._handles: dict[str, ActorHandle[Any]] = {}
        self._unanswered: dict[str, ObjectRef[WorkerHealth]] = {}
        self._loaded: dict[str, int] = {}

    def ask(self) -> Mapping[str, int]:
        """The newest answers that are there; returns at once."""
        for name in actor_names(self._names):
            if name not in self._handles:
                self._handles[name] = ray.get_actor(name, NAMESPACE)
            if name not in self._unanswered:
                self._unanswered[name] = self._handles[name].health.options(concurrency_group="control").remote()
        for name, asked in list(self._unanswered.items()):
            if ray.wait([asked], timeout=0)[0]:
                del self._unanswered[name]
                with suppress(RayError):  # it is restarting
                    self._loaded[name] = ray.get(asked).bytes_loaded
        return self._loaded
