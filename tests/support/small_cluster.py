"""A small Ray cluster on this machine, for tests of actors without Ray Serve."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from tramontane.cluster.ray_internals.local_node import assume_dashboard_packages, patient_start


@contextmanager
def small_cluster(num_cpus: int, **system_config: Any) -> Iterator[None]:
    """Run a cluster without a dashboard while the block runs; a dead actor is reported at once, as
    by ``local_ray_cluster``.
    """
    with assume_dashboard_packages(), patient_start(dashboard=False):
        ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=256 * 2**20,
            _system_config={"timeout_ms_task_wait_for_death_info": 0} | system_config,
        )
    try:
        yield
    finally:
        ray.shutdown()
