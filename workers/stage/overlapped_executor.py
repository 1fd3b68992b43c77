"""Steps on a GPU: while it works on one, the host prepares the next.

A number is a step; the host prepares it, the GPU computes it, its outcome is read:

    host   0 1   2   3
    GPU      0 0 1 1 2 2 3 3
    read        0   1   2
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tramontane.proto.errors import StaleEpochError
from tramontane.proto.step import MicroBatch
from tramontane.workers.device.events import DeviceEvent
from tramontane.workers.stage.pending_outcome import Outcome, PendingOutcome
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.stage.step_executor import Deliver, Receive, discard_output


class OverlappedExecutor:
    """``StepExecutor`` of a stage on a GPU. Any number of threads call ``step``, each of which begins its own and waits for it.

    One at a time has the turn: it takes from the stage before, prepares its step and gives to the next stage. At most
    ``max_open`` have begun and are not read: with two, one is computed and one waits for the device.
    """

    def __init__(self, worker: StageWorker, max_open: int) -> None:
        assert worker.backend.make_event is not None, "this is for devices that do later what they are asked for"
        self.worker, self._max_open, self._make_mark = worker, max_open, worker.backend.make_event
        self._news = threading.Condition()
        self._has_turn = self._is_interrupted = False
        self._num_open = self._num_working = 0
        self._since = 0.0

    def step(self, batch: MicroBatch, receive: Receive, deliver: Deliver = discard_output) -> Outcome:
        with self._admit(batch):
            with self._exclusive():
                incoming = receive()
                with self._timed():
                    unread = self.worker.launch(batch, incoming)
                deliver(unread.hidden_TD)
                delivered = self._make_mark()
                if unread.is_stateful:
                    return self._read(unread, delivered)
            return self._read(unread, delivered)

    @property
    def busy_for_s(self) -> float:
        """Since anything was last prepared or read, while something is. Waiting for neighbours does not count."""
        since = self._since  # which may change meanwhile
        return time.monotonic() - since if self._num_working else 0.0

    def fence(self, epoch: int) -> None:
        """What is under way ends by itself: the device does everything in order."""
        self.worker.check_epoch_increases(epoch)
        self.interrupt()
        with self._news:
            self._news.wait_for(lambda: not self._has_turn)
            self.worker.fence(epoch)
            self._is_interrupted = False

    def interrupt(self) -> None:
        with self._news:
            self._is_interrupted = True
            self._news.notify_all()

    def _read(self, unread: PendingOutcome, delivered: DeviceEvent) -> Outcome:
        """Nobody is told of a step before its hidden states have left: what a neighbour has of a GPU that dies is nothing."""
        with self._timed():
            outcome = unread.read()
            delivered.wait()
            return outcome

    @contextmanager
    def _admit(self, batch: MicroBatch) -> Iterator[None]:
        """Waits for the turn, and has it. Raises StaleEpochError, also if it comes to that while waiting."""
        with self._news:
            self.worker.check_epoch(batch)
            self._news.wait_for(lambda: self._is_over(batch) or self._is_next(batch))
            self.worker.check_epoch(batch)
            if self._is_interrupted:
                raise StaleEpochError(f"{self.worker.plan.label} was interrupted before it could go on")
            self.worker.check_order(batch)
            self._has_turn, self._num_open = True, self._num_open + 1
        try:
            yield
        finally:
            with self._news:
                self._num_open -= 1
                self._news.notify_all()

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Gives it to the next one."""
        try:
            yield
        finally:
            with self._news:
                self._has_turn = False
                self._news.notify_all()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        with self._news:
            self._since, self._num_working = time.monotonic(), self._num_working + 1
        try:
            yield
        finally:
            with self._news:
                self._since, self._num_working = time.monotonic(), self._num_working - 1

    def _is_over(self, batch: MicroBatch) -> bool:
        return self._is_interrupted or batch.epoch != self.worker.epoch

    def _is_next(self, batch: MicroBatch) -> bool:
        return not self._has_turn and self._num_open < self._max_open and batch.step_id <= self.worker.next_step_id
