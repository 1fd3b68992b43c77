"""Finding actors whose processes live and do nothing, and replacing them."""

import logging
import os
import signal
from collections.abc import Mapping
from typing import Any

import psutil
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tramontane.cluster.worker_actor import WorkerHealth

ANSWER_WITHIN_S = 1.0  # a health check runs beside whatever computes or loads
KILL_WITHIN_S = 10.0

logger = logging.getLogger(__name__)


class WorkerProcesses:
    """Where the processes of a pipeline's actors are: one that does not answer cannot tell."""

    def __init__(self) -> None:
        self._known: dict[str, WorkerHealth] = {}

    def note(self, workers: Mapping[str, "ActorHandle[Any]"]) -> dict[str, WorkerHealth | None]:
        """What each says of itself: None if nothing in time. Those that Ray knows to be dead, or to be starting, are left out."""
        asked: dict[Any, str] = {
            worker.health.options(concurrency_group="control").remote(): name for name, worker in workers.items()
        }
        answered, silent = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_WITHIN_S)
        told: dict[str, WorkerHealth | None] = {}
        for ref in answered:
            try:
                self._known[asked[ref]] = told[asked[ref]] = ray.get(ref)
            except RayError:
                self._known.pop(asked[ref], None)
        return told | {asked[ref]: None for ref in silent if self._is_there(asked[ref])}

    def _is_there(self, name: str) -> bool:
        """A process that was replaced since is not: its successor is only starting."""
        health = self._known.get(name)
        return health is not None and _on_node(health.node_id, _is_worker, health.pid)

    def replace(self, name: str) -> None:
        """Ray starts another process in its place. ``ray.kill`` would wait five seconds for one that does not answer."""
        health = self._known.pop(name)
        logger.warning("%s is stuck, and its process %d is ended", health.label, health.pid)
        _on_node(health.node_id, _end, health.pid)


def replace_stuck(workers: Mapping[str, "ActorHandle[Any]"], processes: WorkerProcesses, limit_s: float) -> str:
    """Replace every worker that does not answer, or has computed at one thing for longer than ``limit_s``.

    Returns why the pipeline has to be fenced anew; nothing if somebody is computing still, or loading, which may be waited for.
    """
    told = processes.note(workers)
    stuck = [name for name, health in told.items() if health is None or health.computing_s > limit_s]
    for name in stuck:
        processes.replace(name)
    if stuck:
        return f"{', '.join(stuck)} did nothing for too long"
    healthy = [health for health in told.values() if health is not None]
    if any(health.computing_s > 0 or health.bytes_loaded < health.weight_bytes for health in healthy):
        return ""
    return "a micro-batch was lost"


def _on_node(node_id: str, work: Any, pid: int) -> bool:  # noqa: ANN401 - a function of a process id
    """Raises nothing: where a node cannot be reached its actors are Ray's business."""
    if node_id == ray.get_runtime_context().get_node_id():
        return bool(work(pid))
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task: Any = ray.remote(num_cpus=0, max_retries=0)(work)
    try:
        return bool(ray.get(task.options(scheduling_strategy=there).remote(pid), timeout=KILL_WITHIN_S))
    except RayError:
        return False


def _is_worker(pid: int) -> bool:
    """Whether the process is one of Ray's actors still, and not another that was given its number."""
    try:
        return psutil.Process(pid).cmdline()[0].startswith("ray::")
    except (psutil.Error, IndexError):
        return False


def _end(pid: int) -> bool:
    if _is_worker(pid):
        os.kill(pid, signal.SIGKILL)
        return True
    return False
