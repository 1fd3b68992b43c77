"""For how long a process has been running, by a clock that nobody sets.

psutil's ``create_time`` is in whole seconds of the machine's start, and moves when the wall clock is set.
"""

import os
import time
from pathlib import Path

import psutil


def process_age_s(pid: int | None = None) -> float:
    """Return for how many seconds a process, or this one, has been running. Raises psutil.NoSuchProcess.

    Field 22 of proc_pid_stat(5) is the start in ticks since the machine's start: 123,456 of 100 per second are 1,234.56 s. The
    second field, the command in parentheses, may contain spaces and parentheses.
    """
    try:
        stat = Path(f"/proc/{'self' if pid is None else pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError) as error:
        raise psutil.NoSuchProcess(os.getpid() if pid is None else pid) from error
    fields_from_3 = stat.rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields_from_3[22 - 3]) / os.sysconf("SC_CLK_TCK")
