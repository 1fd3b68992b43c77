"""Choose the channel factory of a device."""

import torch

from tramontane.workers.links.channel import Edges
from tramontane.workers.links.gpu_channel import GpuEdges, Ways
from tramontane.workers.links.tcp_channel import SocketEdges


def edges_for(device: torch.device) -> Edges:
    """The fastest that there are between stages on such devices."""
    return GpuEdges(Ways.of(device)) if device.type == "cuda" else SocketEdges()
