"""The exit of a process in which Ray ran: like Python's own, but without the destructors of native
libraries.
"""

import atexit
import os
import sys
import threading
from contextlib import suppress


def exit_process(status: int) -> None:
    """End this process. Returns only if output cannot be flushed; Python's ordinary exit follows
    then.

    If a process starts Ray several times, the thread with which Ray's library exports metrics
    outlives the last ray.shutdown. At an ordinary exit the main thread destroys the library's
    global objects while that thread still runs. Every few seconds it fails to export its metrics
    and logs this; if the log has been destroyed by then, the process dies of a segmentation fault
    although all its work is done. Therefore Python's exit steps are performed here, and those
    destructors, which only free memory, are skipped. A command of Tramontane starts Ray at most
    once, and that shutdown ends the thread.
    """
    with suppress(KeyboardInterrupt):
        # waits for the threads that are not daemons
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    # disk full or reader gone: Python tries again, reports it and exits with 120
    with suppress(OSError, ValueError):
        print(end="", flush=True)  # unlike sys.stdout.flush() this also works if sys.stdout is None
        print(end="", flush=True, file=sys.stderr)
        os._exit(status)
