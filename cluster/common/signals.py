"""Handling of Ctrl-C, SIGTERM and a closed terminal (SIGHUP)."""

import asyncio
import os
import queue
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, Self, TypeVar

from tramontane.cluster.common.own_processes import kill_started

INTERRUPTED = 130  # the exit status of a command that was interrupted
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Result = TypeVar("Result")
_undo_at_end: list[Callable[[], None]] = []


class Interrupts:
    """Signal handlers that cancel the asyncio task which creates them.

    Only the first signal cancels it, so that a second one does not interrupt the clean-up.
    """

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._work = task
        self._part: asyncio.Task[Any] | None = None
        self._is_stopping = False
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self.stop)

    def stop(self) -> None:
        """Cancel the task, once."""
        if not self._is_stopping:
            self._is_stopping = True
            self._work.cancel()

    @contextmanager
    def cancelling_only(self, part: "asyncio.Task[Any]") -> Iterator[None]:
        """Make Ctrl-C cancel only ``part`` while the block runs; other signals cancel
        everything.
        """
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


@contextmanager
def until_interrupted() -> Iterator[None]:
    """End the block at the first signal, without an error, and ignore later signals, so that they
    do not interrupt the clean-up.

    The default action would leave a terminal without a cursor. ``timeout`` sends two signals: to
    its command and to the group.
    """

    def interrupt(_number: int, _frame: object) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    for each in SIGNALS:
        if signal.getsignal(each) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(each, interrupt)
    with suppress(KeyboardInterrupt):
        yield


class SignalCounter:
    """A context in which signals are queued and do not interrupt."""

    def __init__(self) -> None:
        # reentrant, so that a handler may use it
        self._received: queue.SimpleQueue[int] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        self._previous = {
            number: signal.signal(number, lambda number, _: self._received.put(number))
            for number in SIGNALS
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def wait_next(self, timeout_s: float | None = None) -> bool:
        """Wait for the next signal; return False at the timeout."""
        try:
            self._received.get(timeout=timeout_s)
        except queue.Empty:
            return False
        return True


@contextmanager
def defer_signals(note: str) -> Iterator[None]:
    """Finish the block before the first signal takes effect, and print ``note`` at once; a second
    signal ends the process.

    It is for blocks that block the event loop, and applies to signals that Python answers with
    KeyboardInterrupt or that a loop handles, which sees them after the block. Other signal handlers
    are not changed. After a first signal a second one ends the process in the clean-up, too.
    """
    received: list[int] = []

    def defer(number: int, _frame: object) -> None:
        if received:
            end_at_once()
        received.append(number)
        with suppress(OSError):  # standard error is closed
            os.write(2, f"{note}\n".encode())  # the signal may have interrupted print

    # other threads may not set handlers, and are not interrupted
    in_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in SIGNALS if in_main}
    deferred = {number: handler for number, handler in handlers.items() if _is_default(handler)}
    for number in deferred:
        signal.signal(number, defer)
    try:
        yield
    finally:
        for number, handler in deferred.items():
            signal.signal(number, defer if received else handler)
    if received and deferred[signal.Signals(received[0])] is signal.default_int_handler:
        raise KeyboardInterrupt


def _is_default(handler: object) -> bool:
    """Return True for Python's handler of Ctrl-C, and for the substitute handlers of a running
    event loop.
    """
    return (
        handler is signal.default_int_handler
        or getattr(handler, "__module__", "") == "asyncio.unix_events"
    )


@contextmanager
def undone_at_end(undo: Callable[[], None]) -> Iterator[None]:
    """Call ``undo`` after the block, and also if a second signal ends the process in it."""
    _undo_at_end.append(undo)
    try:
        yield
    finally:
        _undo_at_end.remove(undo)
        undo()


def end_at_once(status: int = INTERRUPTED) -> NoReturn:
    """End this process and all that it has started, without any clean-up but ``undone_at_end``."""
    for undo in _undo_at_end:
        undo()
    kill_started()
    os._exit(status)


@contextmanager
def keep_handler(number: int) -> Iterator[None]:
    """Install the handler of a signal again after the block, in which native code may have replaced
    it.

    Ray's library does that with SIGTERM as it starts: it prints its stack, calls the handler that
    it found, and aborts the process three seconds later, in the middle of a clean-up that takes
    longer. Only the main thread can install handlers.
    """
    try:
        yield
    finally:
        if (
            threading.current_thread() is threading.main_thread()
            and (handler := signal.getsignal(number)) is not None
        ):
            signal.signal(number, handler)


async def cancel_on_signal(work: Coroutine[Any, Any, Result]) -> Result:
    """Await ``work``; any of the signals cancels it."""
    Interrupts()
    return await work
