"""All processes that come from this one, found by a mark in their environment.

Ray's workers are children of its raylet, and of no process of ours once that has died.
"""

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

VARIABLE = "TRAMONTANE_STARTED_BY"
MAX_ROUNDS, ROUND_S = 40, 0.05
_marks: list[str] = []  # a mark that was inherited is that of a process which started this one


@contextmanager
def marking_started() -> Iterator[None]:
    """Mark every process that this one starts while the block runs, and all that these start."""
    before = os.environ.get(VARIABLE)
    _marks.append(f"{os.getpid()}-{secrets.token_hex(8)}")
    os.environ[VARIABLE] = _marks[-1]
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before


def kill_started() -> None:
    """Kill all marked processes and all descendants, and wait two seconds at most for their end.

    What a process starts before it is killed is found in the next round.
    """
    for _ in range(MAX_ROUNDS):
        if not (found := list(_started())):
            return
        for process in found:
            with suppress(psutil.Error):
                process.kill()
        time.sleep(ROUND_S)


def _started() -> Iterator[psutil.Process]:
    """Yield the processes that run. A zombie has ended: its parent, which may hang, reaps it."""
    ours = psutil.Process()
    children = set(ours.children(recursive=True))
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # of another user, or it has just ended
            is_started = process in children or process.environ().get(VARIABLE) in _marks
            if is_started and process != ours and process.status() != psutil.STATUS_ZOMBIE:
                yield process
