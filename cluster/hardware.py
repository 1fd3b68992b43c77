"""What there is to run on: this machine, or the Ray cluster that was joined."""

import os
from dataclasses import dataclass
from pathlib import Path

import psutil
import ray
from ray.exceptions import GetTimeoutError

from tramontane.proto.errors import PlanError

GPU_PROBE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Hardware:
    """``node_cpus`` and ``node_memory`` (bytes) have one entry per node; ``gpu_memory`` is the smallest GPU's."""

    node_cpus: tuple[int, ...]
    node_memory: tuple[int, ...]
    num_gpus: int = 0
    gpu_memory: int = 0

    def default_stages(self, num_pipelines: int = 1) -> int:
        """One per GPU, shared evenly; 2 where there is none."""
        return max(self.num_gpus // num_pipelines, 1) if self.num_gpus else 2

    def stage_memory(self, num_stages: int) -> int:
        """Bytes one stage may use: its GPU (shared only in one process), or an even share of the smallest node."""
        if self.num_gpus:
            return self.gpu_memory // -(-num_stages // self.num_gpus)
        return min(self.node_memory) // self._stages_per_node(num_stages)

    def threads_per_stage(self, num_stages: int) -> int:
        """Cores of the smallest node, shared by the stages that it would hold."""
        return max(1, min(self.node_cpus) // self._stages_per_node(num_stages))

    def check_threads(self, threads_per_stage: int | None) -> None:
        """Raises PlanError if no node has as many cores. Several stages may share them: they rarely all compute at once."""
        most = max(self.node_cpus)
        if threads_per_stage is not None and threads_per_stage > most:
            raise PlanError(
                f"--threads-per-stage is {threads_per_stage}, but no machine here has more cores than {most}; "
                f"use at most {most}, or leave it out"
            )

    def _stages_per_node(self, num_stages: int) -> int:
        return -(-num_stages // len(self.node_cpus))


def this_machine() -> Hardware:
    num_gpus = _visible_gpus()
    return Hardware(
        node_cpus=(_usable_cpus(),),
        node_memory=(_usable_memory(),),
        num_gpus=num_gpus,
        gpu_memory=_smallest_gpu() if num_gpus else 0,
    )


def joined_cluster() -> Hardware:
    """The Ray cluster this process is connected to."""
    resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
    num_gpus = int(resources.get("GPU", 0))
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    nodes = [node for node in alive if node.get("CPU", 0) >= 1]
    if not nodes:
        raise PlanError("the Ray cluster has no node with a CPU to give; start nodes with at least --num-cpus=1")
    return Hardware(
        node_cpus=tuple(int(node["CPU"]) for node in nodes),
        node_memory=tuple(int(node["memory"]) for node in nodes),
        num_gpus=num_gpus,
        gpu_memory=_ask_for_gpu_memory() if num_gpus else 0,
    )


def _usable_cpus() -> int:
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


def _visible_gpus() -> int:
    """GPUs of this machine that CUDA would show; asking CUDA itself would need torch."""
    present = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return present
    names = [name.strip() for name in chosen.split(",")]
    return min(present, len([name for name in names if name and name != "-1"]))


def _ask_for_gpu_memory() -> int:
    try:
        size: int = ray.get(ray.remote(num_gpus=1)(_smallest_gpu).remote(), timeout=GPU_PROBE_TIMEOUT_S)
    except GetTimeoutError:
        raise PlanError("no GPU of the cluster became free to be asked for its memory; are they all in use?") from None
    return size


def _smallest_gpu() -> int:
    import torch  # only where there is a GPU to ask

    return min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
