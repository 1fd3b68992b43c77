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
    """The ``StepExecutor`` of a stage on a GPU. Any number of threads call ``step``; each runs its own step on its own thread.

    One thread at a time has the turn: it receives from the stage before, launches its step and delivers to the next stage. At
    most ``max_open`` steps have been launched and not read: with two, one is computed and one waits for the device.
    """

    def __init__(self, worker: StageWorker, max_open: int) -> None:
        assert worker.backend.make_event is not None, "this executor is for devices that compute asynchronously"
        self.worker, self._max_open, self._make_event = worker, max_open, worker.backend.make_event
        self._condition = threading.Condition()
        self._has_turn = self._is_interrupted = False
        self._num_open = self._num_working = 0
        self._last_change = 0.0

    def step(self, batch: MicroBatch, receive: Receive, deliver: Deliver = discard_output) -> Outcome:
        """Run one micro-batch in its turn, and wait for its outcome."""
        with self._admit(batch):
            with self._release_turn():
                incoming = receive()
                with self._timed():
                    pending = self.worker.launch(batch, incoming)
                deliver(pending.hidden_TD)
                delivered = self._make_event()
                if pending.is_stateful:
                    return self._read(pending, delivered)
            return self._read(pending, delivered)

    @property
    def busy_for_s(self) -> float:
        """The seconds since a launch or read last began or ended, while one runs. Waiting for neighbors does not count."""
        last_change = self._last_change  # read once: another thread may change it
        return time.monotonic() - last_change if self._num_working else 0.0

    def fence(self, epoch: int) -> None:
        """Fence the worker once no step has the turn. Steps that were launched end by themselves, before any later one."""
        self.worker.check_epoch_increases(epoch)
        self.interrupt()
        with self._condition:
            self._condition.wait_for(lambda: not self._has_turn)
            self.worker.fence(epoch)
            self._is_interrupted = False

    def interrupt(self) -> None:
        """Fail the steps that wait for their turn; none gets it before the next fence."""
        with self._condition:
            self._is_interrupted = True
            self._condition.notify_all()

    def _read(self, pending: PendingOutcome, delivered: DeviceEvent) -> Outcome:
        """Read a step's outcome, and return it only after its hidden states have been sent.

        They would be lost if this GPU died first.
        """
        with self._timed():
            outcome = pending.read()
            delivered.wait()
            return outcome

    @contextmanager
    def _admit(self, batch: MicroBatch) -> Iterator[None]:
        """Wait for the turn and take it. Raises StaleEpochError, also if the epoch ends while it waits."""
        with self._condition:
            self.worker.check_epoch(batch)
            self._condition.wait_for(lambda: self._is_over(batch) or self._is_next(batch))
            self.worker.check_epoch(batch)
            if self._is_interrupted:
                raise StaleEpochError(f"{self.worker.plan.label} was interrupted before the step had begun")
            self.worker.check_order(batch)
            self._has_turn, self._num_open = True, self._num_open + 1
        try:
            yield
        finally:
            with self._condition:
                self._num_open -= 1
                self._condition.notify_all()

    @contextmanager
    def _release_turn(self) -> Iterator[None]:
        """Pass the turn to the next step at the end of the block."""
        try:
            yield
        finally:
            with self._condition:
                self._has_turn = False
                self._condition.notify_all()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        with self._condition:
            self._last_change, self._num_working = time.monotonic(), self._num_working + 1
        try:
            yield
        finally:
            with self._condition:
                self._last_change, self._num_working = time.monotonic(), self._num_working - 1

    def _is_over(self, batch: MicroBatch) -> bool:
        return self._is_interrupted or batch.epoch != self.worker.epoch

    def _is_next(self, batch: MicroBatch) -> bool:
        return not self._has_turn and self._num_open < self._max_open and batch.step_id <= self.worker.next_step_id
