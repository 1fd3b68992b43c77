"""What there is to run on: this machine, or the Ray cluster that was joined."""

from dataclasses import dataclass
from pathlib import Path

import psutil
import ray


@dataclass(frozen=True, slots=True)
class Hardware:
    """``gpu_memory`` is the smallest GPU's, in bytes; ``node_memory`` has one entry per node."""

    num_cpus: int
    num_gpus: int
    node_memory: tuple[int, ...]
    gpu_memory: int = 0

    @property
    def default_stages(self) -> int:
        return self.num_gpus or 2

    def stage_memory(self, num_stages: int) -> int:
        """Bytes one stage may use: its GPU, or an even share of the smallest node."""
        if self.num_gpus:
            return self.gpu_memory
        stages_per_node = -(-num_stages // len(self.node_memory))
        return min(self.node_memory) // stages_per_node

    def threads_per_stage(self, num_stages: int) -> int:
        return max(1, self.num_cpus // num_stages)


def this_machine() -> Hardware:
    num_gpus = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    return Hardware(
        num_cpus=len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else psutil.cpu_count() or 1,
        num_gpus=num_gpus,
        node_memory=(psutil.virtual_memory().available,),
        gpu_memory=_smallest_gpu() if num_gpus else 0,
    )


def joined_cluster() -> Hardware:
    """The Ray cluster this process is connected to."""
    resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
    num_gpus = int(resources.get("GPU", 0))
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    return Hardware(
        num_cpus=int(resources.get("CPU", 0)),
        num_gpus=num_gpus,
        node_memory=tuple(int(node["memory"]) for node in nodes if node.get("CPU")),
        gpu_memory=ray.get(ray.remote(num_gpus=1)(_smallest_gpu).remote()) if num_gpus else 0,
    )


def _smallest_gpu() -> int:
    import torch  # only where there is a GPU to ask

    return min(torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count()))
