"""Threads that repeat a function."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps

logger = logging.getLogger(__name__)


@contextmanager
def run_periodically(interval_s: float, work: Callable[[], None]) -> Iterator[None]:
    """Call ``work`` in a thread while the block runs, first after ``interval_s``; an exception ends
    the thread.
    """
    stopped = threading.Event()
    thread = _start_thread(interval_s, work, stopped)
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def start_periodic_thread(interval_s: float, work: Callable[[], None]) -> None:
    """Call ``work`` in a thread until the process ends; an exception is logged, and the next call
    follows.
    """

    @wraps(work)
    def guarded() -> None:
        try:
            work()
        except Exception:
            logger.warning(
                "%s failed; the next attempt is in %g s",
                work.__qualname__,
                interval_s,
                exc_info=True,
            )

    _start_thread(interval_s, guarded, threading.Event())


def _start_thread(
    interval_s: float, work: Callable[[], None], stopped: threading.Event
) -> threading.Thread:
    def repeat() -> None:
        while not stopped.wait(interval_s):
            work()

    thread = threading.Thread(target=repeat, name=work.__qualname__, daemon=True)
    thread.start()
    return thread
