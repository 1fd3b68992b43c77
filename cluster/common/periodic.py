"""Work that goes on beside what the command waits for."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps

logger = logging.getLogger(__name__)


@contextmanager
def run_periodically(every_s: float, work: Callable[[], None]) -> Iterator[None]:
    """While the block runs, a thread does the work, for the first time after ``every_s``; what it raises ends it."""
    stopped = threading.Event()
    thread = _repeating(every_s, work, stopped)
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def start_periodic_thread(every_s: float, work: Callable[[], None]) -> None:
    """As ``run_periodically``, until the process ends; what the work raises is logged, and it goes on."""

    @wraps(work)
    def tried() -> None:
        try:
            work()
        except Exception:
            logger.warning("%s failed", work.__qualname__, exc_info=True)

    _repeating(every_s, tried, threading.Event())


def _repeating(every_s: float, work: Callable[[], None], stopped: threading.Event) -> threading.Thread:
    def repeat() -> None:
        while not stopped.wait(every_s):
            work()

    thread = threading.Thread(target=repeat, name=work.__qualname__, daemon=True)
    thread.start()
    return thread
