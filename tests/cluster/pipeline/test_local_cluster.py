"""The cluster that a command starts on a busy machine."""

import subprocess
import sys

import pytest

# In a process of its own: Ray ends the driver's process with its raylet.
PROGRAM = """
import time

import psutil
import ray

from tramontane.cluster.pipeline.ray_cluster import local_ray_cluster


@ray.remote
def answer():
    return 42


with local_ray_cluster(num_cpus=1):
    assert ray.get(answer.remote()) == 42
    children = psutil.Process().children(recursive=True)
    (raylet,) = [process for process in children if process.name() == "raylet"]
    raylet.suspend()
    time.sleep(10)
    raylet.resume()
    assert ray.get(answer.remote()) == 42
"""


@pytest.mark.ray
@pytest.mark.nightly
def test_a_raylet_that_is_late_is_not_declared_dead() -> None:
    """With the settings for several nodes it would be, after about five seconds."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
