"""What stages and expert actors report to the command that started them, which polls them.

While they load their progress is shown; later each loss of one is reported, and when its pipeline runs again.
"""

import logging
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayError

from tramontane.cluster.actors.pipeline_spec import EXPERTS_SUFFIX, STAGE_SUFFIX
from tramontane.cluster.actors.stage_actor import StageHealth
from tramontane.cluster.actors.worker_actor import NAMESPACE, WorkerHealth, actor_names
from tramontane.cluster.common.periodic import run_periodically
from tramontane.proto.plan import ExpertActorPlan, PipelinePlan, StagePlan

POLL_S, WATCH_POLL_S = 0.5, 1.0
FIRST_ANSWER_TIMEOUT_S = 5.0
WORKER = rf"({STAGE_SUFFIX}|{EXPERTS_SUFFIX})\d+$"  # what follows a pipeline's name in a worker's


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Bytes of its weights that one stage or expert actor has loaded, and their total; then what it does until it is ready."""

    label: str
    num_bytes: int
    total_bytes: int
    activity: str = ""


NO_ACTIVITIES: Mapping[str, str] = MappingProxyType({})
WorkerAnswer = WorkerHealth | RayError
ShowLoading = Callable[[Sequence[LoadProgress]], None]
logger = logging.getLogger(__name__)


def load_progress(
    plan: PipelinePlan, loaded: Mapping[str, int], num_pipelines: int = 1, activities: Mapping[str, str] = NO_ACTIVITIES
) -> list[LoadProgress]:
    """Return the progress of every stage and expert actor of pipelines that have the same plan.

    ``loaded`` and ``activities``: bytes, and what is done after them, by the names of those actors that have answered.

    Of two pipelines a-0 and a-1, ``{"a-0-stage-1": 7}`` is the second stage of the first.
    """
    pipelines = sorted({re.sub(WORKER, "", name) for name in loaded})[:num_pipelines]
    pipelines += [""] * (num_pipelines - len(pipelines))  # none of their actors has answered yet
    return [
        LoadProgress(
            f"pipeline {number}: {worker.label}" if num_pipelines > 1 else worker.label,
            loaded.get(pipeline + suffix, 0),
            worker.weight_bytes,
            activities.get(pipeline + suffix, ""),
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
    poller, known = _WorkerPoller(pipelines + WORKER), dict[str, WorkerHealth]()

    def update() -> None:
        with suppress(Exception):  # of Ray, which may be ending: the block learns why, this is only the display
            names, answers = poller.poll()
            if not names:  # they are not placed yet
                return
            known.update({name: answer for name, answer in answers.items() if isinstance(answer, WorkerHealth)})
            loaded = {name: health.bytes_loaded for name, health in known.items()}
            show(load_progress(plan, loaded, num_pipelines, {name: health.activity for name, health in known.items()}))

    with run_periodically(POLL_S, update):
        yield


@contextmanager
def report_losses(pipelines: str, report: Callable[[str], None]) -> Iterator[None]:
    """Poll the workers of pipelines in a thread, and report losses, while the block runs."""
    poller, losses = _WorkerPoller(pipelines + WORKER), LossReporter(report)

    def update(wait_s: float = 0.0) -> None:
        try:
            losses.observe(*poller.poll(wait_s))
        except Exception:  # the head node is away, or an actor was removed between its listing and its look-up
            logger.debug("the workers of %s could not be polled; the next attempt follows", pipelines, exc_info=True)

    update(FIRST_ANSWER_TIMEOUT_S)  # a worker is lost only if it was known
    with run_periodically(WATCH_POLL_S, update):
        yield


class LossReporter:
    """Reports workers that were lost, and pipelines that run again. Workers that are removed with their pipeline are not lost."""

    def __init__(self, report: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._report, self._clock = report, clock
        self._known: dict[str, WorkerHealth] = {}  # the last answers, by name
        self._lost: dict[str, tuple[float, set[str]]] = {}  # since when and which workers, by pipeline

    def observe(self, names: Collection[str], answers: Mapping[str, WorkerAnswer]) -> None:
        """Take the names of all workers, and new answers of some of them."""
        self._known = {name: health for name, health in self._known.items() if name in names}
        pipelines = {re.sub(WORKER, "", name) for name in names}
        self._lost = {pipeline: lost for pipeline, lost in self._lost.items() if pipeline in pipelines}
        for name, answer in answers.items():
            known = self._known.get(name)
            if isinstance(answer, RayError):
                if known is not None:
                    logger.debug("%s was lost: %s", name, answer)  # many lines, of which most are the same for each loss
                    self._lose(name, known, _has_ended(answer))
                continue
            if known is not None and known.pid != answer.pid:
                self._lose(name, known)
            self._known[name] = answer
            if _is_at_work(answer):
                self._find(name)

    def _lose(self, name: str, known: WorkerHealth, has_ended: bool = True) -> None:
        pipeline = re.sub(WORKER, "", name)
        _, names = self._lost.setdefault(pipeline, (self._clock(), set()))
        if name not in names:
            names.add(name)
            cause = f"process {known.pid} on node {known.node_id[:8]} {'has ended' if has_ended else 'cannot be reached'}"
            self._report(f"pipeline {pipeline} has lost {known.label}, which gets a new process: {cause}")

    def _find(self, name: str) -> None:
        pipeline = re.sub(WORKER, "", name)
        since, names = self._lost.get(pipeline, (0.0, set[str]()))
        names.discard(name)
        if pipeline in self._lost and not names:
            del self._lost[pipeline]
            self._report(f"pipeline {pipeline} runs again, {self._clock() - since:.1f} s after the loss")


def _has_ended(error: RayError) -> bool:
    """Return whether the process of an actor is known to have ended. Ray does not say by which signal."""
    return isinstance(error, ActorDiedError) or "is restarting" in str(error)


def _is_at_work(health: WorkerHealth) -> bool:
    """Return True for a worker that is loaded, or that a router has fenced. An idle pipeline is fenced with the next request."""
    return health.bytes_loaded >= health.weight_bytes or (isinstance(health, StageHealth) and health.epoch >= 0)


class _WorkerPoller:
    """Polls workers as they appear: none is called again before it has answered, however long its process takes to start."""

    def __init__(self, names: str) -> None:
        self._names = names
        self._handles: dict[str, ActorHandle[Any]] = {}
        self._pending: dict[str, ObjectRef[WorkerHealth]] = {}

    def poll(self, wait_s: float = 0.0) -> tuple[list[str], dict[str, WorkerAnswer]]:
        """Return the names of all workers and the new answers by name; wait so long for all of those together."""
        answers: dict[str, WorkerAnswer] = {}
        names = actor_names(self._names)
        for name in names:
            if name not in self._handles:
                self._handles[name] = ray.get_actor(name, NAMESPACE)
            if name not in self._pending:
                self._pending[name] = self._handles[name].health.options(concurrency_group="control").remote()
        refs = [*self._pending.values()]
        done, _ = ray.wait(refs, num_returns=max(len(refs), 1), timeout=wait_s)
        for name, ref in list(self._pending.items()):
            if ref in done:
                del self._pending[name]
                try:
                    answers[name] = ray.get(ref)
                except RayError as error:  # it restarts, or was removed; another actor may get its name
                    answers[name] = error
                    del self._handles[name]
        return names, {name: answer for name, answer in answers.items() if name in names}
