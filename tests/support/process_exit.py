"""How a process in which Ray ran ends: as Python would end it, but without the destructors of native libraries."""

import atexit
import os
import sys
import threading
from contextlib import suppress


def exit_process(status: int) -> None:
    """End this process; returns, for the ordinary end, only if what was written cannot be flushed.

    After several Rays in one process the thread with which Ray's library sends metrics outlives the last ray.shutdown.
    At an ordinary end the main thread destroys the library's global objects beside it. Every few seconds that thread
    finds nobody who takes its metrics, and says so to a log: if that is destroyed by then, a process that has done all
    its work dies of a segmentation fault. So what Python does at its end is done here, and those destructors, which
    only give memory back, are left out. A command of ours has one Ray at most, whose shutdown ends that thread.
    """
    with suppress(KeyboardInterrupt):
        threading._shutdown()  # type: ignore[attr-defined]  # waits for the threads that are not daemons
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):  # a full disk, a reader who is gone: Python tries again, says so and ends with 120
        print(end="", flush=True)  # unlike a stream's own method also where there is no such stream
        print(end="", flush=True, file=sys.stderr)
        os._exit(status)
