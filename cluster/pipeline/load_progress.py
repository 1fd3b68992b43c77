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

from tramontane.cluster.actors.pipeline_spec import EXPERTS_SUFFIX, STAGE_SUFFIX
from tramontane.cluster.actors.worker_actor import NAMESPACE, WorkerHealth, actor_names
from tramontane.cluster.common.periodic import run_periodically
from tramontane.proto.plan import ExpertActorPlan, PipelinePlan, StagePlan

POLL_S = 0.5
WORKER = rf"({STAGE_SUFFIX}|{EXPERTS_SUFFIX})\d+$"  # what follows a pipeline's name in a worker's


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """One stage, or one expert actor: so many bytes of its weights are there, of so many."""

    label: str
    num_bytes: int
    total_bytes: int


ShowLoading = Callable[[Sequence[LoadProgress]], None]


def load_progress(plan: PipelinePlan, loaded: Mapping[str, int], num_pipelines: int = 1) -> list[LoadProgress]:
    """Every stage and expert actor of pipelines that were all planned alike; ``loaded`` has the bytes by name, of those that
    have answered.

    Of two pipelines a-0 and a-1, ``{"a-0-stage-1": 7}`` is the second stage of the first.
    """
    pipelines = sorted({re.sub(WORKER, "", name) for name in loaded})[:num_pipelines]
    pipelines += [""] * (num_pipelines - len(pipelines))  # of which nothing is known yet
    return [
        LoadProgress(
            f"pipeline {number}: {worker.label}" if num_pipelines > 1 else worker.label,
            loaded.get(pipeline + suffix, 0),
            worker.weight_bytes,
        )
        for number, pipeline in enumerate(pipelines, start=1)
        for suffix, worker in _workers(plan)
    ]


def _workers(plan: PipelinePlan) -> Iterator[tuple[str, StagePlan | ExpertActorPlan]]:
    """What each is called after the pipeline's name, and its plan."""
    for stage in plan.stages:
        yield f"{STAGE_SUFFIX}{stage.stage_id}", stage
    for actor in plan.experts.actors if plan.experts else ():
        yield f"{EXPERTS_SUFFIX}{actor.actor_id}", actor


@contextmanager
def show_progress(pipelines: str, plan: PipelinePlan, show: ShowLoading | None, num_pipelines: int = 1) -> Iterator[None]:
    """While the block waits for the stages of these pipelines, a thread asks them how far they are, and shows it.

    ``pipelines`` is a regular expression for their names.
    """
    if show is None:
        yield
        return
    workers = _ProgressPoller(pipelines + WORKER)

    def follow() -> None:
        with suppress(Exception):  # of Ray, which may be ending: whoever waits learns why, this is only for the eye
            show(load_progress(plan, workers.ask(), num_pipelines))

    with run_periodically(POLL_S, follow):
        yield


class _ProgressPoller:
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
