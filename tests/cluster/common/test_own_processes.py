"""A server that cannot stop by itself ends with all that it started, also with what its children
left behind.
"""

import subprocess
import sys
import time

import psutil
import pytest

from tramontane.cluster.serving.draining import stop_time_s

# The child leaves a process behind, as a raylet that is killed leaves its workers.
PROGRAM = """
import logging
import subprocess
import sys
import time

from tramontane.cluster.common.own_processes import marking_started
from tramontane.cluster.serving import draining

logging.basicConfig(format="%(message)s")
draining.MIN_STOP_S = 0.5
ORPHAN = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True)"
with draining.StopLimit(ADDRESS) as limit:
    with marking_started():
        subprocess.run([sys.executable, "-c", ORPHAN], check=True)
    print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
    subprocess.Popen(["sleep", "0"], start_new_session=True)
    if "hangs" in sys.argv:
        limit.begin(0.25)
        limit.begin(600)
        time.sleep(600)
    limit.begin(600)
print("stopped")
"""


def _run(*arguments: str, address: str = "None") -> "subprocess.CompletedProcess[str]":
    program = PROGRAM.replace("ADDRESS", address)
    # a file, as what is left behind would keep a pipe open
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def _wait_until_gone(pid: int) -> None:
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.05)


def test_a_stop_that_hangs_ends_with_all_that_was_started() -> None:
    run = _run("hangs")
    assert (run.returncode, run.stderr) == (
        1,
        "the server has not stopped within 0.75 s, as Ray did not answer: all its processes are"
        " ended\n",
    )
    orphan, child = map(int, run.stdout.split())
    _wait_until_gone(orphan)
    _wait_until_gone(child)


@pytest.mark.parametrize(("drain_s", "after_s"), [(0, 5), (3, 5), (12, 12), (30, 30), (600, 30)])
def test_a_stop_may_take_as_long_as_the_requests_had(drain_s: float, after_s: float) -> None:
    """The image's three seconds leave two seconds of the ten after which Docker kills."""
    assert stop_time_s(drain_s, is_own=True) == after_s
    assert stop_time_s(drain_s, is_own=False) == 120
