"""The age of a process, independent of changes to the wall clock."""

import os
import time
from pathlib import Path


def process_age_s(pid: int | None = None) -> float:
    """Return the seconds since a process began, by default this one. Raises OSError if it does not
    exist.

    The kernel has the start in ticks since boot (``man proc_pid_stat``, field 22), and a clock that
    counts them: psutil's ``create_time`` follows the wall clock, so that a process would age by an
    hour with it, or never become old. It is also in whole seconds of the time of the boot.
    """
    stat = Path(f"/proc/{os.getpid() if pid is None else pid}/stat").read_text(
        encoding="utf-8", errors="replace"
    )
    # the name, in brackets, may have spaces; field 3 follows it
    started_ticks = int(stat.rpartition(")")[2].split()[19])
    return max(
        time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK"), 0.0
    )
