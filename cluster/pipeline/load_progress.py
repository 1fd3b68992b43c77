"""Progress and losses of stages and expert actors, for the command that started them, which polls
them.

During loading their progress is shown; later, the loss of each worker is reported, and the recovery
of its pipeline.
"""

import logging
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayError

from tramontane.cluster.actors.pipeline_spec import EXPERTS_SUFFIX, STAGE_SUFFIX
from tramontane.cluster.actors.stage_actor import StageHealth
from tramontane.cluster.actors.worker_actor import NAMESPACE, WorkerHealth, actor_names
from tramontane.cluster.common.ray_api import run_periodically
from tramontane.proto.plan import ExpertActorPlan, PipelinePlan, StagePlan

POLL_S, WATCH_POLL_S = 0.5, 1.0
FIRST_ANSWER_TIMEOUT_S = 5.0
WORKER = rf"({STAGE_SUFFIX}|{EXPERTS_SUFFIX})\d+$"  # suffix of a worker's name after its pipeline's


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Bytes of its weights that one stage or expert actor has loaded, and their total; then its
    activity until it is ready.
    """

    label: str
    num_bytes: int
    total_bytes: int
    activity: str = ""


NO_ACTIVITIES: Mapping[str, str] = MappingProxyType({})
WorkerAnswer = WorkerHealth | RayError
ShowLoading = Callable[[Sequence[LoadProgress]], None]
logger = logging.getLogger(__name__)


def load_progress(
    plan: PipelinePlan,
    loaded: Mapping[str, int],
    num_pipelines: int = 1,
    activities: Mapping[str, str] = NO_ACTIVITIES,
) -> list[LoadProgress]:
    """Return the progress of every stage and expert actor of pipelines that have the same plan.

    ``loaded`` and ``activities``: bytes, and later activities, by the names of the actors that have
    answered.

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
    """Yield each worker's plan, with the suffix of its name after its pipeline's."""
    for stage in plan.stages:
        yield f"{STAGE_SUFFIX}{stage.stage_id}", stage
    for actor in plan.experts.actors if plan.experts else ():
        yield f"{EXPERTS_SUFFIX}{actor.actor_id}", actor


@contextmanager
def show_progress(
    pipelines: str, plan: PipelinePlan, show: ShowLoading | None, num_pipelines: int = 1
) -> Iterator[None]:
    """Poll the workers of pipelines in a thread and show their progress, while the block runs.

    ``pipelines`` is a regular expression for the pipelines' names.
    """
    if show is None:
        yield
        return
    poller, known = _WorkerPoller(pipelines + WORKER), dict[str, WorkerHealth]()

    def update() -> None:
        # of Ray, which may be shutting down: the block raises the error, this is only the display
        with suppress(Exception):
            names, answers = poller.poll()
            if not names:  # they are not placed yet
                return
            known.update(
                {
                    name: answer
                    for name, answer in answers.items()
                    if isinstance(answer, WorkerHealth)
                }
            )
            loaded = {name: health.bytes_loaded for name, health in known.items()}
            show(
                load_progress(
                    plan,
                    loaded,
                    num_pipelines,
                    {name: health.activity for name, health in known.items()},
                )
            )

    with run_periodically(POLL_S, update):
        yield


@contextmanager
def report_losses(pipelines: str, report: Callable[[str], None]) -> Iterator[None]:
    """Poll the workers of pipelines in a thread, and report losses, while the block runs."""
    poller, losses = _WorkerPoller(pipelines + WORKER), LossReporter(report)

    def update(wait_s: float = 0.0) -> None:
        try:
            losses.observe(*poller.poll(wait_s))
        # the head node is unreachable, or an actor was removed between its listing and its look-up
        except Exception:
            logger.debug(
                "the workers of %s could not be polled; the next attempt follows",
                pipelines,
                exc_info=True,
            )

    update(FIRST_ANSWER_TIMEOUT_S)  # a worker is lost only if it has answered before
    with run_periodically(WATCH_POLL_S, update):
        yield


@dataclass(slots=True)
class _Loss:
    """The lost workers of a pipeline, and the time of the loss.

    ``before``: process and epoch of each worker at that time, by name. ``missing``: the workers
    without a loaded process.
    """

    since: float
    before: Mapping[str, tuple[int, int]]
    missing: set[str] = field(default_factory=set)
    replaced_s: float | None = None  # seconds until all of them had processes again


class LossReporter:
    """Reports lost workers, their replacement, and the first token after it.

    A pipeline without work samples that token for the next request. Workers that are removed with
    their pipeline are not lost. Times are as precise as the polling interval.
    """

    def __init__(
        self, report: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._report, self._clock = report, clock
        self._known: dict[str, WorkerHealth] = {}  # the last answers, by name
        self._lost: dict[str, _Loss] = {}  # by pipeline

    def observe(self, names: Collection[str], answers: Mapping[str, WorkerAnswer]) -> None:
        """Take the names of all workers, and new answers of some of them."""
        self._known = {name: health for name, health in self._known.items() if name in names}
        before = {name: (health.pid, _epoch(health)) for name, health in self._known.items()}
        pipelines = {re.sub(WORKER, "", name) for name in names}
        self._lost = {
            pipeline: lost for pipeline, lost in self._lost.items() if pipeline in pipelines
        }
        for name, answer in answers.items():
            known = self._known.get(name)
            if isinstance(answer, RayError):
                if known is not None:
                    # many lines, mostly the same for each loss
                    logger.debug("%s was lost: %s", name, answer)
                    self._lose(name, known, before, _has_ended(answer))
                continue
            if known is not None and known.pid != answer.pid:
                self._lose(name, known, before)
            self._known[name] = answer
            if (
                _is_loaded(answer)
                and (lost := self._lost.get(re.sub(WORKER, "", name))) is not None
            ):
                lost.missing.discard(name)
        for pipeline, loss in [*self._lost.items()]:
            self._follow(pipeline, loss)

    def _lose(
        self,
        name: str,
        known: WorkerHealth,
        before: Mapping[str, tuple[int, int]],
        has_ended: bool = True,
    ) -> None:
        pipeline = re.sub(WORKER, "", name)
        loss = self._lost.get(pipeline)
        # a loss that was replaced may still wait for a token
        if loss is None or loss.replaced_s is not None:
            loss = self._lost[pipeline] = _Loss(self._clock(), before)
        if name not in loss.missing:
            loss.missing.add(name)
            cause = (
                f"process {known.pid} on node {known.node_id[:8]}"
                f" {'has ended' if has_ended else 'cannot be reached'}"
            )
            self._report(
                f"pipeline {pipeline} has lost {known.label}, which gets a new process: {cause}"
            )

    def _follow(self, pipeline: str, loss: _Loss) -> None:
        """Report the replacement of the lost workers, or the first token since."""
        if loss.missing:
            return
        now_s, was_replaced = self._clock() - loss.since, loss.replaced_s is not None
        loss.replaced_s = now_s if loss.replaced_s is None else loss.replaced_s
        workers = {
            name: health
            for name, health in self._known.items()
            if re.sub(WORKER, "", name) == pipeline
        }
        if all(
            health.pid == loss.before.get(name, (health.pid,))[0]
            for name, health in workers.items()
        ):
            del self._lost[pipeline]
            self._report(
                f"all processes of pipeline {pipeline} can be reached again, {now_s:.1f} s after"
                " the loss"
            )
        elif any(_has_sampled(health, loss.before.get(name)) for name, health in workers.items()):
            del self._lost[pipeline]
            times = f"replaced after {loss.replaced_s:.1f} s, first token after {now_s:.1f} s"
            self._report(f"pipeline {pipeline} runs again: {times}")
        elif not was_replaced:
            self._report(
                f"pipeline {pipeline} has new processes for all that it lost, {now_s:.1f} s after"
                " the loss"
            )


def _has_ended(error: RayError) -> bool:
    """Return whether the process of an actor is known to have ended. Ray does not report by which
    signal.
    """
    return isinstance(error, ActorDiedError) or "is restarting" in str(error)


def _is_loaded(health: WorkerHealth) -> bool:
    """Return True for a worker that has its weights and kernels. Only such a worker can be
    fenced.
    """
    return health.numerics is not None or _epoch(health) >= 0


def _epoch(health: WorkerHealth) -> int:
    """Return the epoch of a stage; -1 before the first fence, and of an expert actor."""
    return health.epoch if isinstance(health, StageHealth) else -1


def _has_sampled(health: WorkerHealth, before: tuple[int, int] | None) -> bool:
    """Return whether a stage has sampled a token since its pipeline was fenced after a loss.

    ``before``: its process and epoch at the loss. A token of the same process in the same epoch may
    be older than the loss.
    """
    return (
        isinstance(health, StageHealth)
        and health.sampled_epoch == health.epoch >= 0
        and before != (health.pid, health.epoch)
    )


class _WorkerPoller:
    """Polls workers as they appear: a worker is not called again before it has answered, however
    long its process takes to start.
    """

    def __init__(self, names: str) -> None:
        self._names = names
        self._handles: dict[str, ActorHandle[Any]] = {}
        self._pending: dict[str, ObjectRef[WorkerHealth]] = {}

    def poll(self, wait_s: float = 0.0) -> tuple[list[str], dict[str, WorkerAnswer]]:
        """Return the names of all workers and the new answers by name, after a total wait of up to
        ``wait_s``.
        """
        answers: dict[str, WorkerAnswer] = {}
        names = actor_names(self._names)
        for name in names:
            if name not in self._handles:
                self._handles[name] = ray.get_actor(name, NAMESPACE)
            if name not in self._pending:
                self._pending[name] = (
                    self._handles[name].health.options(concurrency_group="control").remote()
                )
        refs = [*self._pending.values()]
        done, _ = ray.wait(refs, num_returns=max(len(refs), 1), timeout=wait_s)
        for name, ref in list(self._pending.items()):
            if ref in done:
                del self._pending[name]
                try:
                    answers[name] = ray.get(ref)
                # it restarts, or was removed; another actor may get its name
                except RayError as error:
                    answers[name] = error
                    del self._handles[name]
        return names, {name: answer for name, answer in answers.items() if name in names}
