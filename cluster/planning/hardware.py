"""What there is to run on: this machine, or the Ray cluster that was joined."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tramontane.cluster.common.ray_errors import ray_error_message
from tramontane.cluster.ray_internals.core import kv_get, kv_put
from tramontane.proto.errors import PlanError
from tramontane.workers.device.probe import memory_bandwidth, visible_gpus

GPU_PROBE_TIMEOUT_S = 60.0
CORES = "tramontane_cores"  # Ray's name for what a node really has, where it was told of more CPUs than that
T = TypeVar("T")


class TooFewNodesError(PlanError):
    """The cluster is too small for any plan, as long as no more nodes join."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """``index`` is CUDA's on its node, ``node`` Ray's id of that ("" without Ray), ``speed`` relative to the others'."""

    name: str
    memory: int
    node: str = ""
    index: int = 0
    speed: int = 1


@dataclass(frozen=True, slots=True)
class Hardware:
    """``node_cpus`` and ``node_memory`` (bytes) have one entry per node, ``gpus`` one per GPU of all nodes."""

    node_cpus: tuple[int, ...]
    node_memory: tuple[int, ...]
    gpus: tuple[Gpu, ...] = ()

    def stages_per_slot(self, stages_per_gpu: int) -> int:
        """How many stages have one place: a GPU, or, where there is none, what a stage has to itself."""
        return stages_per_gpu if self.gpus else 1

    def default_stage_count(self, num_pipelines: int = 1) -> int:
        """Of one pipeline: GPUs, shared out evenly; 2 where there is none."""
        return max(len(self.gpus) // num_pipelines, 1) if self.gpus else 2

    def stage_memory(self, num_stages: int) -> int:
        """Bytes one stage may use, or those of one place: the smallest GPU (shared so only in one process), or an even share of
        the smallest node.
        """
        if self.gpus:
            return min(gpu.memory for gpu in self.gpus) // -(-num_stages // len(self.gpus))
        return min(self.node_memory) // self._stages_per_node(num_stages)

    def threads_per_stage(self, num_stages: int, together: int = 1) -> int:
        """Cores of the smallest node, shared by the stages that it would hold."""
        return max(1, min(self.node_cpus) // self._stages_per_node(num_stages, together))

    def stages_at_once(self, num_stages: int, threads: int, num_pipelines: int = 1, together: int = 1) -> int:
        """How many of a pipeline's stages can compute at the same time; the others wait for their turn.

        Threads of a stage wait for each other at every product: where two stages' threads share cores, all wait for
        those that were put aside, ten times as long as for the product. A single thread waits for nobody.
        2 stages of 2 threads: 1 on a node of 2 cores, or of 3, 2 on two such nodes. Pipelines do not wait for each other.
        Stages that share a GPU share its memory's bandwidth: 5 stages, 2 together, are 3 at once.
        """
        if self.gpus:
            return -(-num_stages // together)
        if threads == 1:
            return num_stages
        return max(min(sum(cpus // threads for cpus in self.node_cpus) // num_pipelines, num_stages), 1)

    def check_threads(self, threads_per_stage: int | None) -> None:
        """Raises PlanError if no node has as many cores. Several stages may share them: they rarely all compute at once."""
        most = max(self.node_cpus)
        if threads_per_stage is not None and threads_per_stage > most:
            raise PlanError(
                f"--threads-per-stage is {threads_per_stage}, but no machine here has more cores than {most}; "
                f"use at most {most}, or leave it out"
            )

    def _stages_per_node(self, num_stages: int, together: int = 1) -> int:
        """Those of one GPU stay on one node: of 6 stages, 4 together, one of two nodes has 4."""
        groups = -(-num_stages // together)
        return min(-(-groups // len(self.node_cpus)) * together, num_stages)


def by_node(gpus: Iterable[Gpu]) -> list[list[Gpu]]:
    nodes: dict[str, list[Gpu]] = {}
    for gpu in gpus:
        nodes.setdefault(gpu.node, []).append(gpu)
    return list(nodes.values())


def probe_local() -> Hardware:
    seen = visible_gpus() if _num_visible_gpus() else []
    gpus = tuple(Gpu(name, memory, index=index) for index, (name, memory) in enumerate(seen))
    return Hardware(node_cpus=(usable_cpus(),), node_memory=(_usable_memory(),), gpus=gpus)


def probe_cluster(
    measured: bool = True,
    look: Callable[[], list[tuple[str, int]]] = visible_gpus,
    measure: Callable[[str], int] = memory_bandwidth,
) -> Hardware:
    """The Ray cluster this process is connected to. ``measured``: GPUs are compared, if nodes differ in them."""
    alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    resources = {node["NodeID"]: node["Resources"] for node in alive if node["Resources"].get("CPU", 0) >= 1}
    if not resources:
        raise TooFewNodesError("the Ray cluster has no node with a CPU to give; start nodes with at least --num-cpus=1")
    gpus = _probe_gpus({node: int(has["GPU"]) for node, has in resources.items() if has.get("GPU", 0) >= 1}, look)
    return Hardware(
        node_cpus=tuple(int(has.get(CORES, has["CPU"])) for has in resources.values()),
        node_memory=tuple(int(has["memory"]) for has in resources.values()),
        gpus=_measure_speeds(gpus, measure) if measured else gpus,
    )


def usable_cpus() -> int:
    """What this process may use, where the system can tell: its affinity and its container's quota."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, period = _cgroup_numbers("cpu.max", 2)
    return min(cpus, max(1, quota // period)) if quota and period else cpus


def _usable_memory() -> int:
    """What is free on the machine, and in the container if it has a limit."""
    free = psutil.virtual_memory().available
    (limit,), (used,) = _cgroup_numbers("memory.max", 1), _cgroup_numbers("memory.current", 1)
    return min(free, max(limit - used, 0)) if limit else free


def _cgroup_numbers(file: str, count: int) -> list[int]:
    """The numbers in a control-group file (version 2); zeros where there is no limit or no such file."""
    try:
        words = Path("/sys/fs/cgroup", file).read_text().split()
    except OSError:
        words = []
    return [int(word) if word.isdigit() else 0 for word in (words + [""] * count)[:count]]


def _num_visible_gpus() -> int:
    """GPUs of this machine that CUDA would show; asking CUDA itself would need torch."""
    present = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return present
    names = [name.strip() for name in chosen.split(",")]
    return min(present, len([name for name in names if name and name != "-1"]))


def _probe_gpus(num_gpus: Mapping[str, int], look: Callable[[], list[tuple[str, int]]]) -> tuple[Gpu, ...]:
    """Ask every node that offers GPUs to Ray; those that it offers are the first that CUDA shows there."""
    seen = _gather({node: _on_node(node, look) for node in num_gpus})
    for node, count in num_gpus.items():
        if len(seen[node]) < count:
            raise PlanError(f"node {_address(node)} offers {count} GPUs to Ray, but CUDA shows {len(seen[node])} there")
    return tuple(
        Gpu(name, memory, node, index)
        for node, count in sorted(num_gpus.items())
        for index, (name, memory) in enumerate(seen[node][:count])
    )


def _measure_speeds(gpus: tuple[Gpu, ...], measure: Callable[[str], int]) -> tuple[Gpu, ...]:
    """With their speeds, if some nodes have other GPUs than others: in GB/s, of one GPU of each name.

    The cluster remembers what was measured: later pipelines are planned like the first, and nothing is measured
    that works already.
    """
    if len({frozenset(gpu.name for gpu in here) for here in by_node(gpus)}) <= 1:
        return gpus
    one_of = {gpu.name: gpu for gpu in reversed(gpus)}
    marks = {name: f"tramontane-gpu-speed-{name}" for name in one_of}
    unknown = {name: gpu for name, gpu in one_of.items() if not kv_get(marks[name])}
    measured = _gather({name: _on_node(gpu.node, measure, f"cuda:{gpu.index}") for name, gpu in unknown.items()})
    for name, speed in measured.items():
        kv_put(marks[name], str(max(speed // 10**9, 1)).encode(), overwrite=False)
    speeds = {name: int(kv_get(mark) or 1) for name, mark in marks.items()}
    return tuple(replace(gpu, speed=speeds[gpu.name]) for gpu in gpus)


def _on_node(node: str, function: Callable[..., T], *arguments: str) -> "ray.ObjectRef[T]":
    """Run something tiny on a node, where it sees all GPUs: also those that are in use, or that Ray would hide from it."""
    options: dict[str, Any] = {
        "num_cpus": 0,
        "num_gpus": 0,
        "max_calls": 1,  # the process ends, and takes nothing of a GPU's memory with it into the plan
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        "runtime_env": {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}},
    }
    ref: ray.ObjectRef[T] = ray.remote(**options)(function).remote(*arguments)
    return ref


def _gather(asked: "Mapping[str, ray.ObjectRef[T]]") -> dict[str, T]:
    try:
        answers: list[T] = ray.get(list(asked.values()), timeout=GPU_PROBE_TIMEOUT_S)
    except (GetTimeoutError, RayError) as error:
        raise PlanError(f"the GPUs of the cluster cannot be looked at: {ray_error_message(error)}") from error
    return dict(zip(asked, answers, strict=True))


def _address(node: str) -> str:
    return next(str(known["NodeManagerAddress"]) for known in ray.nodes() if known["NodeID"] == node)  # type: ignore[no-untyped-call]
