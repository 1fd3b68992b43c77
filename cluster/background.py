"""Work that goes on beside what the command waits for."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeated(every_s: float, work: Callable[[], None]) -> Iterator[None]:
    """While the block runs, a thread does the work, for the first time after ``every_s``; what it raises ends it."""
    stopped = threading.Event()
    thread = _repeating(every_s, work, stopped)
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def repeat_for_ever(every_s: float, work: Callable[[], None]) -> None:
    """As ``repeated``, until the process ends."""
    _repeating(every_s, work, threading.Event())


def _repeating(every_s: float, work: Callable[[], None], stopped: threading.Event) -> threading.Thread:
    def repeat() -> None:
        while not stopped.wait(every_s):
            work()

    thread = threading.Thread(target=repeat, name=work.__qualname__, daemon=True)
    thread.start()
    return thread
