"""Machines with one GPU that clouds rent out, the smallest GPU first, and what the head node runs on."""

from dataclasses import dataclass
from types import MappingProxyType

from tramontane.proto.byte_size import GIB


@dataclass(frozen=True, slots=True)
class Machine:
    """``memory`` is what CUDA shows of the GPU, rounded down: less than the name says."""

    name: str
    memory: int


MACHINES = MappingProxyType(
    {
        "aws": (Machine("g6.2xlarge", 22 * GIB), Machine("g6e.2xlarge", 44 * GIB), Machine("p5.4xlarge", 79 * GIB)),
        "gcp": (Machine("g2-standard-8", 22 * GIB), Machine("a2-highgpu-1g", 39 * GIB), Machine("a2-ultragpu-1g", 79 * GIB)),
        "azure": (
            Machine("Standard_NV36ads_A10_v5", 22 * GIB),
            Machine("Standard_NC24ads_A100_v4", 79 * GIB),
            Machine("Standard_NC40ads_H100_v5", 93 * GIB),
        ),
    }
)
HEADS = MappingProxyType({"aws": "m7i.xlarge", "gcp": "n2-standard-4", "azure": "Standard_D4s_v5"})
