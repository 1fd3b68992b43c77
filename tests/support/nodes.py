"""A cluster of several raylets on this machine."""

from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray.cluster_utils import Cluster

from tramontane.cluster.config.ray_settings import ONE_MACHINE_SETTINGS


@contextmanager
def three_nodes() -> Iterator[Cluster]:
    """Start three nodes with room for one stage each, and connect this process. No raylet that is
    late on a busy machine is declared dead.
    """
    head = {"num_cpus": 1, "include_dashboard": False, "_system_config": dict(ONE_MACHINE_SETTINGS)}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        nodes.add_node(num_cpus=1)
    nodes.wait_for_nodes()
    ray.init(address=nodes.address, log_to_driver=False)
    yield nodes
    ray.shutdown()
    nodes.shutdown()
