"""The age of a process, while the wall clock is set."""

import os
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tramontane.cluster.actors import hang_detector
from tramontane.cluster.common.process_age import process_age_s

HOUR = 3600.0


def test_a_process_is_as_old_as_psutil_says() -> None:
    """Within a minute: nothing is measured, but which field of the kernel's is read, and in which
    unit.
    """
    for pid in (os.getpid(), os.getppid(), 1):
        assert abs(process_age_s(pid) - (time.time() - psutil.Process(pid).create_time())) < 60
    assert 0 <= process_age_s() <= process_age_s(1)


@pytest.mark.skipif(
    shutil.which("ps") is None, reason="compares with ps, of Debian's package procps"
)
def test_it_is_what_ps_shows() -> None:
    """``etimes`` is in whole seconds."""
    parent = os.getppid()
    before = int(process_age_s(parent))
    shown = int(
        subprocess.run(
            ["ps", "-o", "etimes=", "-p", str(parent)], capture_output=True, text=True, check=True
        ).stdout
    )
    assert before <= shown <= process_age_s(parent)


def test_a_name_with_brackets_and_spaces_moves_no_field() -> None:
    name = "import ctypes; ctypes.CDLL(None).prctl(15, b') 1 (2 3'); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert process_age_s(process.pid) <= process_age_s()
        process.kill()


def test_a_process_that_is_gone_has_no_age() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    with pytest.raises(OSError, match="No such"):
        process_age_s(process.pid)
    assert not hang_detector._kill(process.pid, 0.0)


@pytest.mark.parametrize("jump_s", [-HOUR, HOUR])
def test_a_clock_that_is_set_makes_no_worker_older_or_younger(
    monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    """A worker that has just begun is not killed as one that hung before, and one that is old
    enough is.
    """
    real, killed = time.time, list[tuple[int, int]]()
    monkeypatch.setattr(time, "time", lambda: real() + jump_s)
    monkeypatch.setattr(psutil.Process, "cmdline", lambda _self: ["ray::Stage"])
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))
    assert not hang_detector._kill(os.getpid(), process_age_s() + 60)
    assert hang_detector._kill(os.getpid(), 0.0)
    assert killed == [(os.getpid(), signal.SIGKILL)]
