"""A small Ray cluster on this machine, for tests of actors without Ray Serve."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from tramontane.cluster.config.ray_settings import ONE_MACHINE_SETTINGS
from tramontane.cluster.ray_internals.local_node import assume_dashboard_packages, patient_start


@contextmanager
def small_cluster(
    num_cpus: int, num_gpus: int | None = None, **system_config: Any
) -> Iterator[None]:
    """Run a cluster without a dashboard while the block runs, with the settings of
    ``local_ray_cluster``.
    """
    with assume_dashboard_packages(), patient_start(dashboard=False):
        ray.init(
            address="local",
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=256 * 2**20,
            _system_config=dict(ONE_MACHINE_SETTINGS) | system_config,
        )
    try:
        yield
    finally:
        ray.shutdown()
