"""What Ctrl-C, SIGTERM and a closed terminal end."""

import asyncio
import queue
import signal
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar

INTERRUPTED = 130

Result = TypeVar("Result")
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Made inside the work that they end. Everything is removed first then, also if one presses again."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._work = task
        self._part: asyncio.Task[Any] | None = None
        self._stopping = False
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self.stop)

    def stop(self) -> None:
        """End the work."""
        if not self._stopping:
            self._stopping = True
            self._work.cancel()

    @contextmanager
    def cancelling_only(self, part: "asyncio.Task[Any]") -> Iterator[None]:
        """Meanwhile Ctrl-C ends this part of the work, and the rest goes on."""
        self._part = part
        try:
            yield
        finally:
            self._part = None

    def _interrupt(self) -> None:
        if self._part is None:
            self.stop()
        else:
            self._part.cancel()


class SignalCounter:
    """Ctrl-C, SIGTERM and a closed terminal break nothing off while this is entered: they are counted."""

    def __init__(self) -> None:
        self._heard: queue.SimpleQueue[int] = queue.SimpleQueue()  # which a handler may use, whatever it interrupts

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, lambda heard, _: self._heard.put(heard)) for number in ENDING}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait_next(self, within_s: float | None = None) -> bool:
        """Waits for the next one; whether it came in time."""
        try:
            self._heard.get(timeout=within_s)
        except queue.Empty:
            return False
        return True


@contextmanager
def defer_signals() -> Iterator[None]:
    """What the first Ctrl-C meets here is finished before it counts; a second one breaks it off.

    So for all signals that Python answers with KeyboardInterrupt. An event loop has its own way to hear of them.
    """
    heard: list[int] = []

    def hold(number: int, _frame: object) -> None:
        if heard:
            raise KeyboardInterrupt
        heard.append(number)

    in_main = threading.current_thread() is threading.main_thread()  # others may not, and are not interrupted
    held = [number for number in ENDING if in_main and signal.getsignal(number) is signal.default_int_handler]
    for number in held:
        signal.signal(number, hold)
    try:
        yield
    finally:
        for number in held:
            signal.signal(number, signal.default_int_handler)
    if heard:
        raise KeyboardInterrupt


async def cancel_on_signal(work: Coroutine[Any, Any, Result]) -> Result:
    """The work, ended by any of them."""
    Interrupts()
    return await work
