"""Progress of stages and expert actors that load their weights, polled and shown while a caller waits for them."""

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
    """Bytes of its weights that one stage or expert actor has loaded, and their total."""

    label: str
    num_bytes: int
    total_bytes: int


ShowLoading = Callable[[Sequence[LoadProgress]], None]


def load_progress(plan: PipelinePlan, loaded: Mapping[str, int], num_pipelines: int = 1) -> list[LoadProgress]:
    """Return the progress of every stage and expert actor of pipelines that have the same plan.

    ``loaded``: bytes by the names of those actors that have answered.

    Of two pipelines a-0 and a-1, ``{"a-0-stage-1": 7}`` is the second stage of the first.
    """
    pipelines = sorted({re.sub(WORKER, "", name) for name in loaded})[:num_pipelines]
    pipelines += [""] * (num_pipelines - len(pipelines))  # none of their actors has answered yet
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
    """Yield each worker's plan, after what follows the pipeline's name in its own."""
    for stage in plan.stages:
        yield f"{STAGE_SUFFIX}{stage.stage_id}", stage
    for actor in plan.experts.actors if plan.experts else ():
        yield f"{EXPERTS_SUFFIX}{actor.actor_id}", actor


@contextmanager
def show_progress(pipelines: str, plan: PipelinePlan, show: ShowLoading | None, num_pipelines: int = 1) -> Iterator[None]:
    """Poll the workers of pipelines in a thread and show their progress, while the block runs.

    ``pipelines`` is a regular expression for the pipelines' names.
    """
    if show is None:
        yield
        return
    poller = _ProgressPoller(pipelines + WORKER)

    def update() -> None:
        with suppress(Exception):  # of Ray, which may be ending: the block learns why, this is only the display
            show(load_progress(plan, poller.poll(), num_pipelines))

    with run_periodically(POLL_S, update):
        yield


class _ProgressPoller:
    """Polls workers as they appear: none is called again before it has answered, however long its process takes to start."""

    def __init__(self, names: str) -> None:
        self._names = names
        self._handles: dict[str, ActorHandle[Any]] = {}
        self._pending: dict[str, ObjectRef[WorkerHealth]] = {}
        self._loaded: dict[str, int] = {}

    def poll(self) -> Mapping[str, int]:
        """Return the loaded bytes by name, from the latest answers, without waiting."""
        for name in actor_names(self._names):
            if name not in self._handles:
                self._handles[name] = ray.get_actor(name, NAMESPACE)
            if name not in self._pending:
                self._pending[name] = self._handles[name].health.options(concurrency_group="control").remote()
        for name, ref in list(self._pending.items()):
            if ray.wait([ref], timeout=0)[0]:
                del self._pending[name]
                with suppress(RayError):  # it restarts
                    self._loaded[name] = ray.get(ref).bytes_loaded
        return self._loaded
