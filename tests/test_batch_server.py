"""Who is killed by the benchmark of batch jobs."""

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
from batch_server import Server

SPAWNS = """
import subprocess, sys
child = subprocess.Popen(["bash", "-c", "exec -a 'ray::StageActor.step' sleep 600"])
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture
def parent() -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [sys.executable, "-c", SPAWNS], stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def test_a_stage_at_work_is_killed(parent: "subprocess.Popen[str]") -> None:
    assert parent.stdout is not None
    stage = psutil.Process(int(parent.stdout.readline()))
    server = Server.__new__(Server)
    server._process = parent  # type: ignore[assignment]
    server.kill("a stage")
    assert parent.wait(60) == 0
    assert not stage.is_running()
