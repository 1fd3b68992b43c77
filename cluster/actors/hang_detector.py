"""Finding actors whose processes live and do nothing, and replacing them."""

import logging
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import psutil
import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tramontane.cluster.actors.worker_actor import WorkerHealth
from tramontane.cluster.ray_internals.core import actor_state

ANSWER_TIMEOUT_S = 0.3  # a health check runs beside whatever computes or loads
LAST_ANSWER_TIMEOUT_S = 3.0  # for a worker that is not stopped: it may only be short of time
START_TIMEOUT_S = 30.0  # torch is imported meanwhile, which keeps a process from answering
KILL_TIMEOUT_S = 10.0
LOADING_ANSWER_TIMEOUT_S = 0.7
MAX_MISSED_CHECKS = 20

logger = logging.getLogger(__name__)


def replace_hung_workers(workers: Mapping[str, "ActorHandle[Any]"], limit_s: float) -> str:
    """Replace every worker that does not answer, or has computed at one thing for longer than ``limit_s``.

    Returns why the pipeline has to be fenced anew; nothing if somebody is computing still, or loading, which may be waited for.
    """
    answers = _answers(workers, ANSWER_TIMEOUT_S)
    stopped = [name for name in workers if name not in answers and kill_worker_process(workers[name], math.inf)]
    if late := {name: worker for name, worker in workers.items() if not (name in answers or name in stopped)}:
        answers |= _answers(late, LAST_ANSWER_TIMEOUT_S - ANSWER_TIMEOUT_S)
    too_slow = [name for name, health in answers.items() if health is not None and health.busy_for_s > limit_s]
    silent = [name for name in late if name not in answers]
    replaced = stopped + [name for name in too_slow if kill_worker_process(workers[name], 0.0)]
    replaced += [name for name in silent if kill_worker_process(workers[name], START_TIMEOUT_S)]
    if replaced:
        logger.warning("%s did nothing for too long, and got a new process", ", ".join(replaced))
        return f"{', '.join(replaced)} did nothing for too long"
    healthy = [health for health in answers.values() if health is not None]
    if silent or any(health.busy_for_s > 0 or health.bytes_loaded < health.weight_bytes for health in healthy):
        return ""
    return "a micro-batch was lost"


class SilenceTracker:
    """Of workers that are waited for while they load. They answer meanwhile, but perhaps not each time at once."""

    def __init__(self) -> None:
        self._num_looks: Counter[ActorHandle[Any]] = Counter()  # in a row that one did not answer

    def kill_silent(self, workers: Iterable["ActorHandle[Any]"]) -> None:
        """Those whose processes are stopped, or have been silent for long, get new ones."""
        by_name = {str(number): worker for number, worker in enumerate(workers)}
        answers = _answers(by_name, LOADING_ANSWER_TIMEOUT_S)
        for name, worker in by_name.items():
            self._num_looks[worker] = 0 if name in answers else self._num_looks[worker] + 1
            if self._num_looks[worker] and kill_worker_process(
                worker, 0.0 if self._num_looks[worker] >= MAX_MISSED_CHECKS else math.inf
            ):
                logger.warning("a worker that was waited for did not answer, and got a new process")
                self._num_looks[worker] = 0


def _answers(workers: Mapping[str, "ActorHandle[Any]"], within_s: float) -> dict[str, WorkerHealth | None]:
    """What those that answer say of themselves; None where Ray says that there is no process.

    One that is born again is unavailable meanwhile. So is one that is stopped, to whoever has not talked to it before.
    """
    asked: dict[Any, str] = {}
    for name, worker in workers.items():
        asked[worker.health.options(concurrency_group="control").remote()] = name
    answers: dict[str, WorkerHealth | None] = {}
    for ref in ray.wait(list(asked), num_returns=len(asked), timeout=within_s)[0]:
        try:
            answers[asked[ref]] = ray.get(ref)
        except ActorUnavailableError:
            continue
        except RayError:
            answers[asked[ref]] = None
    return answers


def kill_worker_process(worker: "ActorHandle[Any]", least_age_s: float) -> bool:
    """Its process is ended, unless it is only starting; Ray starts another one. ``ray.kill`` would wait five seconds for it.

    Where its node cannot be reached the actor is Ray's business.
    """
    told = actor_state(worker)
    if told.get("State") != "ALIVE":
        return False
    pid, node_id = told["Pid"], told["Address"]["NodeID"]
    if node_id == ray.get_runtime_context().get_node_id():
        return _end(pid, least_age_s)
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    end: Any = ray.remote(num_cpus=0, max_retries=0)(_end)
    try:
        return bool(ray.get(end.options(scheduling_strategy=there).remote(pid, least_age_s), timeout=KILL_TIMEOUT_S))
    except RayError:
        logger.warning("process %d on node %s could not be ended", pid, node_id)
        return False


def _end(pid: int, least_age_s: float) -> bool:
    """If it is one of Ray's actors still, and not another that was given its number; and is stopped, or not too young."""
    try:
        process = psutil.Process(pid)
        is_old = time.time() - process.create_time() >= least_age_s or process.status() == psutil.STATUS_STOPPED
        if is_old and process.cmdline()[0].startswith("ray::"):
            os.kill(pid, signal.SIGKILL)
            return True
    except (psutil.Error, IndexError, ProcessLookupError):
        pass
    return False
