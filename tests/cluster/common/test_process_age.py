"""The age of a process, against the program that people ask for it, and whatever the wall clock says."""

import os
import shutil
import subprocess
import sys
import time

import psutil
import pytest

from tramontane.cluster.common.process_age import process_age_s


@pytest.mark.skipif(shutil.which("ps") is None, reason="compares with ps, of Debian's package procps")
def test_it_is_what_ps_shows() -> None:
    """``etimes`` is in whole seconds."""
    parent = os.getppid()
    before = int(process_age_s(parent))
    shown = int(subprocess.run(["ps", "-o", "etimes=", "-p", str(parent)], capture_output=True, text=True, check=True).stdout)
    assert before <= shown <= process_age_s(parent)


def test_of_this_process_and_of_one_with_an_odd_name() -> None:
    assert process_age_s() == pytest.approx(process_age_s(os.getpid()), abs=1)
    rename = "import ctypes, sys; ctypes.CDLL(None).prctl(15, b') R 1 (', 0, 0, 0); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", rename], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert 0 <= process_age_s(child.pid) <= process_age_s() + 1


def test_a_wall_clock_that_is_set_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = process_age_s()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert process_age_s() >= before


def test_a_process_that_has_ended() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    with pytest.raises(psutil.NoSuchProcess):
        process_age_s(child.pid)
