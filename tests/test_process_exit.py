"""A run of tests ends with its own status, and with all that it writes, also where native code
would crash at its end.

Threads that a test takes are not those of the next.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

SUPPORT = Path(__file__).parent / "support"
CRASH = """
import ctypes

libc = ctypes.CDLL(None)
# as the destructor of a global object, after all that Python does
libc.__cxa_atexit(libc.abort, None, None)
"""
LAST_WORDS = """
import atexit
import threading

atexit.register(print, "last word")
threading.Thread(target=lambda: (threading.main_thread().join(), print("a thread's word"))).start()
"""
A_RUN = f"""
{CRASH}
{LAST_WORDS}

import torch

def test_passes_and_takes_threads(): torch.set_num_threads(3)

def test_passes_with_one_thread(): assert torch.get_num_threads() == 1

def test_fails(): assert False
"""


def _run(
    *arguments: str, folder: Path, stdout: int = subprocess.PIPE
) -> "subprocess.CompletedProcess[str]":
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment = buffered | {
        "PYTHONPATH": os.pathsep.join(
            [str(SUPPORT), str(SUPPORT.parent), os.environ.get("PYTHONPATH", "")]
        )
    }
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(("chosen", "status"), [("passes", 0), ("fails", 1)])
def test_a_run_of_tests_ends_with_its_own_status(tmp_path: Path, chosen: str, status: int) -> None:
    (tmp_path / "test_small.py").write_text(A_RUN)
    run = _run(
        "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "-k", chosen, folder=tmp_path
    )
    assert run.returncode == status, run.stderr
    assert {"passes": "2 passed", "fails": "1 failed"}[chosen] in run.stdout
    assert run.stdout.endswith("a thread's word\nlast word\n")


@pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="only Linux has a disk that is always full"
)
def test_what_cannot_be_written_is_no_success(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        script = "from process_exit import exit_process\nprint('word')\nexit_process(0)"
        run = _run("-c", script, folder=tmp_path, stdout=full.fileno())
    assert run.returncode == 120, "Python's own status for it"
    assert "No space left on device" in run.stderr
