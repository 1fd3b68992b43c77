"""The hardware to plan for: this machine, or the Ray cluster that this process has joined."""

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tramontane.cluster.common.ray_api import ray_error_message
from tramontane.cluster.ray_internals.accessors import kv_get, kv_put
from tramontane.proto.errors import PlanError
from tramontane.proto.units import format_bytes
from tramontane.workers.device.probe import (
    MAX_PANEL_ROWS,
    VisibleGpu,
    memory_bandwidth,
    num_visible_gpus,
    panel_rows,
    visible_gpus,
)

GPU_PROBE_TIMEOUT_S = 60.0
# memory of a GPU that other processes hold counts from this size on; the driver itself has some MB
MIN_HELD_BYTES = 2**28
# Ray resource with the number of a node's real cores, where Ray is given more CPUs
CORES_RESOURCE = "tramontane_cores"
CGROUPS = Path("/sys/fs/cgroup")
T = TypeVar("T")

logger = logging.getLogger(__name__)


class TooFewNodesError(PlanError):
    """Error of a cluster that is too small for any plan until more nodes join."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU: CUDA's index on its node, Ray's id of the node ("" without Ray), and a speed in GB/s
    if it was measured.

    ``memory``: bytes to plan with. ``held``: further bytes, which other processes hold.
    """

    name: str
    memory: int
    node: str = ""
    index: int = 0
    speed: int | None = None
    held: int = 0


@dataclass(frozen=True, slots=True)
class Hardware:
    """Nodes and GPUs: ``node_cpus`` and ``node_memory`` (bytes) have one entry per node, ``gpus``
    one per GPU of all nodes.

    ``panel_rows``: the most rows that a panel of packed matrices has on any of the processors.
    """

    node_cpus: tuple[int, ...]
    node_memory: tuple[int, ...]
    gpus: tuple[Gpu, ...] = ()
    panel_rows: int = MAX_PANEL_ROWS

    def stages_per_slot(self, stages_per_gpu: int) -> int:
        """Return how many stages share one slot, which is a GPU; without GPUs every stage has its
        own slot.
        """
        return stages_per_gpu if self.gpus else 1

    def default_stage_count(self, num_pipelines: int = 1) -> int:
        """Return the slots of one pipeline: an even share of the GPUs; 2 without GPUs."""
        return max(len(self.gpus) // num_pipelines, 1) if self.gpus else 2

    def stage_memory(self, num_stages: int) -> int:
        """Return the bytes of one stage or slot: the smallest GPU's, or an even share of the
        smallest node's.

        A GPU is shared here only by stages of one process.
        """
        if self.gpus:
            return min(gpu.memory for gpu in self.gpus) // -(-num_stages // len(self.gpus))
        return min(self.node_memory) // self._stages_per_node(num_stages)

    def threads_per_stage(self, num_stages: int, stages_per_slot: int = 1) -> int:
        """Return an even share of the smallest node's cores for each stage that it would hold."""
        return max(1, min(self.node_cpus) // self._stages_per_node(num_stages, stages_per_slot))

    def stages_at_once(
        self, num_stages: int, threads: int, num_pipelines: int = 1, stages_per_slot: int = 1
    ) -> int:
        """Return how many of a pipeline's stages can compute at the same time; the others wait for
        their turn.

        Threads of a stage wait for each other at every product: if two stages' threads share cores,
        all threads wait for the preempted ones, ten times as long as the product takes. A
        single thread waits for no other. 2 stages of 2 threads: 1 on a node of 2 or 3 cores, 2 on
        two such nodes. Pipelines do not wait for each other. Stages that share a GPU share its
        memory bandwidth: 5 stages, 2 per GPU, are 3 at once.
        """
        if self.gpus:
            return -(-num_stages // stages_per_slot)
        if threads == 1:
            return num_stages
        return max(
            min(sum(cpus // threads for cpus in self.node_cpus) // num_pipelines, num_stages), 1
        )

    def check_threads(self, threads_per_stage: int | None) -> None:
        """Raise PlanError if no node has this number of cores. Stages may share cores: they rarely
        all compute at once.
        """
        max_cpus = max(self.node_cpus)
        if threads_per_stage is not None and threads_per_stage > max_cpus:
            raise PlanError(
                f"--threads-per-stage is {threads_per_stage}, but no machine here has more cores"
                f" than {max_cpus}; use at most {max_cpus}, or leave it out"
            )

    def _stages_per_node(self, num_stages: int, stages_per_slot: int = 1) -> int:
        """Return the most stages of any node: of 6 stages, 4 per GPU, one of two nodes has 4, as a
        GPU is on one node.
        """
        groups = -(-num_stages // stages_per_slot)
        return min(-(-groups // len(self.node_cpus)) * stages_per_slot, num_stages)


def by_node(gpus: Iterable[Gpu]) -> list[list[Gpu]]:
    """Group GPUs by their node."""
    nodes: dict[str, list[Gpu]] = {}
    for gpu in gpus:
        nodes.setdefault(gpu.node, []).append(gpu)
    return list(nodes.values())


def probe_local() -> Hardware:
    """Return this machine's free hardware, as far as this process may use it.

    Raises PlanError if PyTorch shows fewer GPUs than there are: a server would silently use the
    CPU, or leave GPUs idle.
    """
    num_gpus = num_visible_gpus()
    visible = visible_gpus() if num_gpus else []
    if len(visible) < num_gpus:
        import torch

        raise PlanError(
            f"this machine has {_count_gpus(num_gpus)}, but PyTorch {torch.__version__} shows"
            f" {len(visible)}; install a PyTorch for CUDA that the driver can run, or choose GPUs"
            " by CUDA_VISIBLE_DEVICES (empty: none, the server uses the CPUs)"
        )
    gpus = tuple(_gpu_to_plan(gpu, "", index) for index, gpu in enumerate(visible))
    return Hardware(
        node_cpus=(usable_cpus(),),
        node_memory=(usable_memory(),),
        gpus=gpus,
        panel_rows=panel_rows(),
    )


def check_ray_gpus(hardware: Hardware) -> None:
    """Raise PlanError if Ray has found GPUs on this machine that the plan is not for.

    Ray must have been started here. It also finds GPUs of other makers. A user who has set
    CUDA_VISIBLE_DEVICES has chosen.
    """
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return
    num_found = int(ray.cluster_resources().get("GPU", 0))  # type: ignore[no-untyped-call]
    if num_found > len(hardware.gpus):
        raise PlanError(
            f"Ray has found {_count_gpus(num_found)} on this machine, but the plan is for"
            f" {len(hardware.gpus)}; check that nvidia-smi lists them here and that PyTorch is one"
            " for CUDA, or hide them with an empty CUDA_VISIBLE_DEVICES"
        )


def _count_gpus(number: int) -> str:
    return "1 GPU" if number == 1 else f"{number} GPUs"


def probe_cluster(
    compare_gpus: bool = True,
    list_gpus: Callable[[], list[VisibleGpu]] = visible_gpus,
    measure: Callable[[str], int] = memory_bandwidth,
) -> Hardware:
    """Return the hardware of the Ray cluster that this process is connected to.

    ``compare_gpus``: measure the GPUs' speeds if nodes have different GPUs. ``list_gpus`` and
    ``measure`` run on the nodes. Raises PlanError if a node's GPUs cannot be probed,
    TooFewNodesError if no node offers a CPU.
    """
    alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    resources = {
        node["NodeID"]: node["Resources"] for node in alive if node["Resources"].get("CPU", 0) >= 1
    }
    if not resources:
        raise TooFewNodesError(
            "the Ray cluster has no node with a CPU to give; start nodes with at least --num-cpus=1"
        )
    gpus = _probe_gpus(
        {node: int(has["GPU"]) for node, has in resources.items() if has.get("GPU", 0) >= 1},
        list_gpus,
    )
    return Hardware(
        node_cpus=tuple(int(has.get(CORES_RESOURCE, has["CPU"])) for has in resources.values()),
        node_memory=tuple(int(has["memory"]) for has in resources.values()),
        gpus=_measure_speeds(gpus, measure) if compare_gpus else gpus,
    )


def usable_cpus() -> int:
    """Return the number of cores that this process may use: the cores of its affinity mask, bounded
    by its container's quota.
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, period = _cgroup_numbers("cpu.max", count=2)
    if not quota:
        (quota,), (period,) = (
            _cgroup_numbers(f"cpu/cpu.cfs_{name}_us") for name in ("quota", "period")
        )
    return min(cpus, max(1, quota // period)) if quota and period else cpus


def usable_memory() -> int:
    """Return the free bytes of the machine, or of the container if that has a limit and fewer.

    Pages of files that a container has read count as used, but for those that the kernel takes back
    first.
    """
    free = psutil.virtual_memory().available
    (limit,) = _cgroup_numbers("memory.max", "memory/memory.limit_in_bytes")
    if not limit:
        return free
    (used,) = _cgroup_numbers("memory.current", "memory/memory.usage_in_bytes")
    return min(free, max(limit - used + _unused_file_pages(), 0))


def num_memory_kills() -> int:
    """Return how many processes of this container the kernel has killed for their memory since the
    container started; 0 where that is not known.
    """
    text = _read_cgroup("memory.events") or _read_cgroup("memory/memory.oom_control")
    counts = dict(line.split(maxsplit=1) for line in text.splitlines() if " " in line)
    return int(counts.get("oom_kill", 0))


def _unused_file_pages() -> int:
    """Return the bytes of file pages that the kernel takes back first from the container."""
    text = _read_cgroup("memory.stat") or _read_cgroup("memory/memory.stat")
    rows = dict(line.split(maxsplit=1) for line in text.splitlines() if " " in line)
    # version 1 has this sum with that of nested groups, version 2 always
    return int(rows.get("total_inactive_file") or rows.get("inactive_file") or 0)


def _cgroup_numbers(*files: str, count: int = 1) -> list[int]:
    """Return the numbers in the first of these control-group files that has one: version 2's name,
    version 1's. Zeros where there is no limit or no such file.
    """
    found = [_read_cgroup(file).split() for file in files]
    words = next(filter(None, found), [])
    return [int(word) if word.isdigit() else 0 for word in (words + [""] * count)[:count]]


def _read_cgroup(file: str) -> str:
    """Return the text of a control-group file of this container; "" if there is none."""
    try:
        return (CGROUPS / file).read_text()
    except OSError:
        return ""


def _probe_gpus(
    num_gpus: Mapping[str, int], list_gpus: Callable[[], list[VisibleGpu]]
) -> tuple[Gpu, ...]:
    """List the GPUs of every node that offers GPUs to Ray: the first GPUs that CUDA shows there.

    As long as actors have GPUs, memory that is not free may belong to these actors, and be free
    when their GPUs are given to new actors.
    """
    is_idle = ray.available_resources().get("GPU", 0) >= sum(num_gpus.values())  # type: ignore[no-untyped-call]
    visible = _gather({node: _run_on(node, list_gpus) for node in num_gpus})
    for node, count in num_gpus.items():
        if len(visible[node]) < count:
            raise PlanError(
                f"node {_address(node)} offers {count} GPUs to Ray, but CUDA shows"
                f" {len(visible[node])} there"
            )
    return tuple(
        _gpu_to_plan(gpu if is_idle else gpu._replace(free=None), node, index)
        for node, count in sorted(num_gpus.items())
        for index, gpu in enumerate(visible[node][:count])
    )


def _gpu_to_plan(gpu: VisibleGpu, node: str, index: int) -> Gpu:
    """Return the GPU with the memory that is free now, and log how much other processes hold, if
    that matters.
    """
    free = gpu.memory if gpu.free is None else gpu.free
    if (held := gpu.memory - free) < MIN_HELD_BYTES:
        return Gpu(gpu.name, gpu.memory, node, index)
    where = f" of node {_address(node)}" if node else ""
    logger.warning(
        "GPU %d%s (%s) has %s of %s free, because other processes hold the rest; the plan is for"
        " what is free",
        *(index, where, gpu.name, format_bytes(free), format_bytes(gpu.memory)),
    )
    return Gpu(gpu.name, free, node, index, held=held)


def _measure_speeds(gpus: tuple[Gpu, ...], measure: Callable[[str], int]) -> tuple[Gpu, ...]:
    """Return the GPUs with their speeds, in GB/s of one GPU of each name, if nodes have different
    GPUs.

    Speeds are stored in the cluster: later pipelines are planned like the first, and no GPU is
    measured while it works.
    """
    if len({frozenset(gpu.name for gpu in here) for here in by_node(gpus)}) <= 1:
        return gpus
    example = {gpu.name: gpu for gpu in reversed(gpus)}
    keys = {name: f"tramontane-gpu-speed-{name}" for name in example}
    unknown = {name: gpu for name, gpu in example.items() if not kv_get(keys[name])}
    measured = _gather(
        {name: _run_on(gpu.node, measure, f"cuda:{gpu.index}") for name, gpu in unknown.items()}
    )
    for name, speed in measured.items():
        kv_put(keys[name], str(max(speed // 10**9, 1)).encode(), overwrite=False)
    speeds = {name: int(kv_get(key) or 1) for name, key in keys.items()}
    return tuple(replace(gpu, speed=speeds[gpu.name]) for gpu in gpus)


def _run_on(node: str, function: Callable[..., T], *arguments: str) -> "ray.ObjectRef[T]":
    """Run a short function on a node, where it sees all GPUs, even GPUs that are in use or that Ray
    would hide.
    """
    options: dict[str, Any] = {
        "num_cpus": 0,
        "num_gpus": 0,
        "max_calls": 1,  # the process ends afterwards and keeps none of a GPU's memory
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        "runtime_env": {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}},
    }
    ref: ray.ObjectRef[T] = ray.remote(**options)(function).remote(*arguments)
    return ref


def _gather(refs: "Mapping[str, ray.ObjectRef[T]]") -> dict[str, T]:
    try:
        answers: list[T] = ray.get(list(refs.values()), timeout=GPU_PROBE_TIMEOUT_S)
    except (GetTimeoutError, RayError) as error:
        raise PlanError(
            f"the GPUs of the cluster cannot be listed: {ray_error_message(error)}"
        ) from error
    return dict(zip(refs, answers, strict=True))


def _address(node: str) -> str:
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return next(str(known["NodeManagerAddress"]) for known in nodes if known["NodeID"] == node)
