"""Detection of actors that make no progress, because their processes hang or never start, and the
replacement of processes that hang.
"""

import logging
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import get_placement_group, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tramontane.cluster.actors.worker_actor import WorkerHealth
from tramontane.cluster.common.process_age import process_age_s
from tramontane.cluster.ray_internals.accessors import actor_state
from tramontane.proto.timing import (
    ACTOR_RESTART_TIMEOUT_S,
    ACTOR_START_TIMEOUT_S,
    KILL_TIMEOUT_S,
    LOAD_STALL_TIMEOUT_S,
    MAX_ACTOR_START_TIMEOUT_S,
    WORKER_START_TIMEOUT_S,
)

ANSWER_TIMEOUT_S = 0.3  # a health check runs concurrently with computing or loading
# for a worker whose process is not stopped: it may only be short of CPU time
LAST_ANSWER_TIMEOUT_S = 3.0
LOADING_ANSWER_TIMEOUT_S = 0.7
MAX_MISSED_CHECKS = 20

logger = logging.getLogger(__name__)


def replace_hung_workers(workers: Mapping[str, "ActorHandle[Any]"], limit_s: float) -> str:
    """Replace every worker that does not answer, or has computed for longer than ``limit_s``
    without a pause.

    Returns the reason to fence the pipeline again; "" if there is none, as a worker still computes
    or loads.
    """
    answers = _check_health(workers, ANSWER_TIMEOUT_S)
    unanswered = {name: worker for name, worker in workers.items() if name not in answers}
    replaced = dict.fromkeys(_kill_processes(unanswered, math.inf), "its process was stopped")
    if late := {
        name: worker
        for name, worker in workers.items()
        if not (name in answers or name in replaced)
    }:
        answers |= _check_health(late, LAST_ANSWER_TIMEOUT_S - ANSWER_TIMEOUT_S)
    busy_s = {
        name: health.busy_for_s
        for name, health in answers.items()
        if health is not None and health.busy_for_s > limit_s
    }
    for name in _kill_processes({name: workers[name] for name in busy_s}, 0.0):
        replaced[name] = (
            f"it computed for {busy_s[name]:.1f} s without a pause, more than {limit_s:g} s"
        )
    silent = {name: worker for name, worker in late.items() if name not in answers}
    replaced |= dict.fromkeys(
        _kill_processes(silent, WORKER_START_TIMEOUT_S),
        f"it did not answer within {LAST_ANSWER_TIMEOUT_S:g} s",
    )
    if replaced:
        reason = "; ".join(f"{name} got a new process: {why}" for name, why in replaced.items())
        logger.warning("%s", reason)
        return reason
    healthy = [health for health in answers.values() if health is not None]
    if silent or any(
        health.busy_for_s > 0 or health.bytes_loaded < health.weight_bytes for health in healthy
    ):
        return ""
    return "a micro-batch was lost"


class LoadWatch:
    """Health checks of loading workers: they may miss some checks, and must make progress."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_missed: Counter[ActorHandle[Any]] = Counter()  # checks in a row
        # what each has loaded, and since when no more
        self._loaded: dict[ActorHandle[Any], tuple[int, float]] = {}

    def kill_hung(self, workers: Iterable["ActorHandle[Any]"]) -> None:
        """Replace the processes that are stopped, have missed MAX_MISSED_CHECKS checks in a row, or
        have loaded nothing for LOAD_STALL_TIMEOUT_S.
        """
        by_name = {str(number): worker for number, worker in enumerate(workers)}
        answers = _check_health(by_name, LOADING_ANSWER_TIMEOUT_S)
        self._kill_silent(by_name, answers)
        self._kill_stalled(by_name, answers)

    def _kill_silent(
        self,
        by_name: Mapping[str, "ActorHandle[Any]"],
        answers: Mapping[str, WorkerHealth | None],
    ) -> None:
        # by the age from which they are killed
        silent: dict[float, dict[str, ActorHandle[Any]]] = {0.0: {}, math.inf: {}}
        for name, worker in by_name.items():
            self._num_missed[worker] = 0 if name in answers else self._num_missed[worker] + 1
            if self._num_missed[worker]:
                silent[0.0 if self._num_missed[worker] >= MAX_MISSED_CHECKS else math.inf][name] = (
                    worker
                )
        for min_age_s, late in silent.items():
            for name in _kill_processes(late, min_age_s):
                missed = self._num_missed.pop(late[name])
                logger.warning(
                    "a loading worker got a new process: it missed %d health checks in a row",
                    missed,
                )

    def _kill_stalled(
        self,
        by_name: Mapping[str, "ActorHandle[Any]"],
        answers: Mapping[str, WorkerHealth | None],
    ) -> None:
        now = self._clock()
        for name, health in answers.items():
            # later phases have no measure of their progress
            if health is None or health.activity or health.bytes_loaded >= health.weight_bytes:
                continue
            worker, loaded = by_name[name], health.bytes_read + health.bytes_loaded
            before, since = self._loaded.get(worker, (-1, now))
            self._loaded[worker] = (loaded, since if loaded == before else now)
            if now - self._loaded[worker][1] > LOAD_STALL_TIMEOUT_S and kill_worker_process(
                worker, 0.0
            ):
                del self._loaded[worker]
                logger.warning(
                    "%s got a new process: it loaded %d of %d bytes of its weights, and then"
                    " nothing for %g s; its checkpoint's storage may not answer",
                    health.label,
                    health.bytes_loaded,
                    health.weight_bytes,
                    LOAD_STALL_TIMEOUT_S,
                )


def _check_health(
    workers: Mapping[str, "ActorHandle[Any]"], timeout_s: float
) -> dict[str, WorkerHealth | None]:
    """Return the health of the workers that answer in time; None for a worker that, according to
    Ray, has no process.

    A worker that restarts does not answer. To a caller that has not called it before, a stopped
    worker looks the same.
    """
    names: dict[Any, str] = {}
    for name, worker in workers.items():
        names[worker.health.options(concurrency_group="control").remote()] = name
    answers: dict[str, WorkerHealth | None] = {}
    for ref in ray.wait(list(names), num_returns=len(names), timeout=timeout_s)[0]:
        try:
            answers[names[ref]] = ray.get(ref)
        except ActorUnavailableError:
            continue
        except RayError:
            answers[names[ref]] = None
    return answers


def _kill_processes(workers: Mapping[str, "ActorHandle[Any]"], min_age_s: float) -> list[str]:
    """Call ``kill_worker_process`` for all workers concurrently: one on a lost node takes seconds.
    Return the names of the killed.
    """
    if not workers:
        return []
    with ThreadPoolExecutor(len(workers), thread_name_prefix="kill") as threads:
        are_killed = threads.map(
            lambda worker: kill_worker_process(worker, min_age_s), workers.values()
        )
        return [name for name, is_killed in zip(workers, are_killed, strict=True) if is_killed]


def kill_worker_process(worker: "ActorHandle[Any]", min_age_s: float) -> bool:
    """Kill a worker's process if it is stopped or at least ``min_age_s`` old, and return True; Ray
    starts another one.

    ``ray.kill`` would wait five seconds for the process. If the node cannot be reached, replacing
    the actor is left to Ray.
    """
    state = actor_state(worker)
    if state.get("State") != "ALIVE":
        return False
    pid, node_id = state["Pid"], state["Address"]["NodeID"]
    if node_id == ray.get_runtime_context().get_node_id():
        return _kill(pid, min_age_s)
    on_node = NodeAffinitySchedulingStrategy(node_id, soft=False)
    kill: Any = ray.remote(num_cpus=0, max_retries=0)(_kill)
    try:
        return bool(
            ray.get(
                kill.options(scheduling_strategy=on_node).remote(pid, min_age_s),
                timeout=KILL_TIMEOUT_S,
            )
        )
    except RayError:
        logger.warning(
            "process %d on node %s could not be killed within %g s", pid, node_id, KILL_TIMEOUT_S
        )
        return False


def _kill(pid: int, min_age_s: float) -> bool:
    """Kill a process of Ray that is stopped or old enough. Others are spared, as the id may have
    been reused.
    """
    try:
        process = psutil.Process(pid)
        is_old = process_age_s(pid) >= min_age_s or process.status() == psutil.STATUS_STOPPED
        if is_old and process.cmdline()[0].startswith("ray::"):
            os.kill(pid, signal.SIGKILL)
            return True
    except (psutil.Error, IndexError, OSError):
        pass
    return False


# Actors that Ray never starts although the resources for them are reserved.
#
# A head node that dies while actors are being created can leave them so: a lease that the previous
# head requested is granted after its death, to a worker process that stays idle and keeps the
# resources of the bundle, and the request of the new head waits for them without end (Ray issue
# 66199). Ray has no time limit for this. Only a new placement group helps: new actors in the old
# one wait for the same resources.

Start = tuple[str, int]  # the name of an actor, and how often Ray has restarted it before
BEING_CREATED = ("DEPENDENCIES_UNREADY", "PENDING_CREATION")  # without a process so far
PENDING = (*BEING_CREATED, "RESTARTING")


class PendingActorTracker:
    """How long each actor of a placement group has been pending since the group got its resources.

    On a busy machine a process may only be slow to start, and all actors are made anew if one is
    stuck. So the limit is ``ACTOR_START_TIMEOUT_S`` where none of them has weights that would be
    lost, ``ACTOR_RESTART_TIMEOUT_S`` else, and doubles each time that actors are stuck, up to
    ``MAX_ACTOR_START_TIMEOUT_S``.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._limit_factor = 1
        self._pending_since: dict[Start, float] = {}

    def find_stuck(self, group: str, actors: Mapping[str, "ActorHandle[Any]"]) -> list[str]:
        """Return the names of the actors that have been pending for longer than the limit.

        ``group``: the name of their placement group. Time in which the head node does not answer,
        or nodes for the group are missing, does not count.
        """
        try:
            states = _states(actors) if _is_placed(group) else {}
        except Exception as error:  # of Ray, whose head node may be unreachable
            logger.debug("pending actors of %s are not known: %s", group, error)
            states = {}
        # An actor whose process dies again and again has another start each time.
        pending = [
            (name, state["NumRestarts"])
            for name, state in states.items()
            if state.get("State") in PENDING
        ]
        now = self._clock()
        self._pending_since = {start: self._pending_since.get(start, now) for start in pending}
        limit_s = self._limit_s(are_all_pending=len(pending) == len(actors))
        stuck = [name for (name, _), since in self._pending_since.items() if now - since > limit_s]
        if stuck:
            self._limit_factor *= 2
            self._pending_since.clear()
        return stuck

    def _limit_s(self, are_all_pending: bool) -> float:
        first_s = ACTOR_START_TIMEOUT_S if are_all_pending else ACTOR_RESTART_TIMEOUT_S
        return min(self._limit_factor * first_s, MAX_ACTOR_START_TIMEOUT_S)


def _states(actors: Mapping[str, "ActorHandle[Any]"]) -> dict[str, dict[str, Any]]:
    return {name: actor_state(actor) for name, actor in actors.items()}


def _is_placed(group: str) -> bool:
    try:
        return bool(placement_group_table(get_placement_group(group))["state"] == "CREATED")
    except ValueError:  # it has been removed
        return False
