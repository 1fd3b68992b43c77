"""The cluster that a command starts on a busy machine."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

# In processes of their own: Ray ends the driver's process with its raylet.
LATE_RAYLET = """
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
START = """
import ray

from tramontane.cluster.pipeline.ray_cluster import local_ray_cluster
from tramontane.proto.errors import PipelineError


@ray.remote
def answer():
    return 42


try:
    with local_ray_cluster(num_cpus=1):
        print(ray.get(answer.remote()), flush=True)
except PipelineError as error:
    print(error, flush=True)
"""
# what each Python process does first, among them Ray's two agents of a node
SLOW_AGENTS = """
import sys, time
if any(name in " ".join(sys.orig_argv) for name in ("dashboard/agent.py", "agent/main.py")):
    time.sleep(40)
"""
NO_RAYLET = """
from ray._private import services

services.RAYLET_EXECUTABLE = "/bin/false"
"""


def _run(program: str, environment: dict[str, str] | None = None) -> str:
    run = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | (environment or {}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.ray
@pytest.mark.nightly
def test_a_raylet_that_is_late_is_not_declared_dead() -> None:
    """With the settings for several nodes it would be, after about five seconds."""
    _run(LATE_RAYLET)


@pytest.mark.ray
def test_agents_that_start_slowly_do_not_end_the_start(tmp_path: Path) -> None:
    """Ray's raylet waits 15 s for each of their ports, and dies."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_AGENTS)
    assert _run(START, {"PYTHONPATH": str(tmp_path)}) == "42\n"


@pytest.mark.ray
def test_a_failed_start_says_which_daemon_died_and_leaves_none(tmp_path: Path) -> None:
    said = _run(NO_RAYLET + START, {"STARTED_FOR": str(tmp_path)})
    assert said.startswith("Ray could not be started: its raylet (process ")
    assert said.endswith(", status 1) died while it started\n")
    assert not _processes_with("STARTED_FOR", str(tmp_path))


def _processes_with(variable: str, value: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(variable) == value:
                found.append(process)
        except psutil.Error:  # of another user, or it has just ended
            continue
    return found
