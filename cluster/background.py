"""Work that goes on beside what the command waits for."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeated(every_s: float, work: Callable[[], None]) -> Iterator[None]:
    """While the block runs, a thread does the work, for the first time after ``every_s``; what it raises ends it."""
    stopped = threading.Event()

    def repeat() -> None:
        while not stopped.wait(every_s):
            work()

    thread = threading.Thread(target=repeat, name=work.__qualname__, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
