"""The protocol of step executors, which run a stage's steps, and the executors that compute on the
caller's thread.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from tramontane.proto.errors import StaleEpochError
from tramontane.proto.step import MicroBatch
from tramontane.workers.device.cuda import DeviceEvent
from tramontane.workers.stage.hidden_states import StageInput, StageOutput
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.stage.step_record import PendingStep

Receive = Callable[[], StageInput]
Deliver = Callable[[Tensor | None], None]


def discard_output(_hidden_TD: Tensor | None) -> None:
    """Do nothing: the caller of ``step`` gets the hidden states in the outcome."""


class StepExecutor(Protocol):
    """Runs the steps of a ``StageWorker``. The stage's device and experts decide which executor is
    used.

    It checks a step's epoch and order when the step gets its turn, before anything is received for
    it: a step of another epoch must not take hidden states that are meant for this one.

    | executor             | used when                      | steps in progress                   |
    |----------------------|--------------------------------|-------------------------------------|
    | `SerialExecutor`     | CPU, experts inside the stage  | one, on the caller's thread         |
    | `OverlappedExecutor` | GPU, experts inside the stage  | two: the GPU computes one while the |
    |                      |                                | host prepares the next              |
    | `PingPongExecutor`   | experts on actors, CPU or GPU  | several: one computes while the     |
    |                      |                                | others wait for their experts       |
    """

    def step(
        self, batch: MicroBatch, receive: Receive, deliver: Deliver = discard_output
    ) -> StageOutput:
        """Run one micro-batch.

        Hidden states are received and delivered in the order of the steps. On a GPU they are
        delivered before they are computed. The last stage delivers None. Raises StaleEpochError for
        a step of another epoch, which changes nothing, and the errors of ``StageWorker.launch``,
        ``StageWorker.step_coroutine``, ``receive`` and ``deliver``.
        """

    def fence(self, epoch: int) -> None:
        """Fence the worker as ``StageWorker.fence`` does; steps in progress end first or are
        dropped.
        """

    @property
    def busy_for_s(self) -> float:
        """How long the thread that computes has worked without a pause; 0 while it waits. Can be
        read from any thread.
        """

    def interrupt(self) -> None:
        """End steps that wait for experts with a StaleEpochError; no step begins before the next
        fence. Called from any thread.
        """


class Stopwatch:
    """The time since work last began or ended: for threads that work, and other threads that read
    it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last_change, self._num_running = 0.0, 0

    def __enter__(self) -> None:
        self._change(1)

    def __exit__(self, *_: object) -> None:
        self._change(-1)

    @property
    def running_s(self) -> float:
        """The seconds since work last began or ended; 0 while there is none."""
        with self._lock:
            return time.monotonic() - self._last_change if self._num_running else 0.0

    def _change(self, num_more: int) -> None:
        with self._lock:
            self._last_change, self._num_running = time.monotonic(), self._num_running + num_more


class SerialExecutor:
    """The ``StepExecutor`` that computes on the caller's thread, which is always the same one."""

    def __init__(self, worker: StageWorker, num_threads: int) -> None:
        self._worker, self._num_threads = worker, num_threads
        self._stopwatch = Stopwatch()

    def step(
        self, batch: MicroBatch, receive: Receive, deliver: Deliver = discard_output
    ) -> StageOutput:
        """Run one micro-batch on the caller's thread."""
        self._worker.check_epoch(batch)
        self._worker.check_order(batch)
        incoming = receive()
        with self._stopwatch:
            pending = self._worker.launch(batch, incoming)
        deliver(pending.hidden_TD)
        with self._stopwatch:
            return pending.read()

    def fence(self, epoch: int) -> None:
        """Fence the worker. Call it on the thread that computes."""
        torch.set_num_threads(self._num_threads)  # counts per thread
        self._worker.fence(epoch)

    @property
    def busy_for_s(self) -> float:
        """See ``StepExecutor``."""
        return self._stopwatch.running_s

    def interrupt(self) -> None:
        """Do nothing: no step waits for experts."""


class OverlappedExecutor:
    """The ``StepExecutor`` of a stage on a GPU: while it works on one step, the host prepares the
    next.

    A number is a step; the host prepares it, the GPU computes it, its outcome is read:

        host   0 1   2   3
        GPU      0 0 1 1 2 2 3 3
        read        0   1   2

    Any number of threads call ``step``; each runs its own step on its own thread.
    One thread at a time has the turn: it receives from the stage before, launches its step and
    delivers to the next stage. At most ``max_open`` steps have been launched and not read: with
    two, one is computed and one waits for the device.
    """

    def __init__(self, worker: StageWorker, max_open: int) -> None:
        assert worker.backend.make_event is not None, (
            "this executor is for devices that compute asynchronously"
        )
        self.worker, self._max_open, self._make_event = worker, max_open, worker.backend.make_event
        self._condition = threading.Condition()
        self._has_turn = self._is_interrupted = False
        self._num_open = 0
        self._stopwatch = Stopwatch()

    def step(
        self, batch: MicroBatch, receive: Receive, deliver: Deliver = discard_output
    ) -> StageOutput:
        """Run one micro-batch in its turn, and wait for its outcome."""
        with self._admit(batch):
            with self._release_turn():
                incoming = receive()
                with self._stopwatch:
                    pending = self.worker.launch(batch, incoming)
                deliver(pending.hidden_TD)
                delivered = self._make_event()
                if pending.is_stateful:
                    return self._read(pending, delivered)
            return self._read(pending, delivered)

    @property
    def busy_for_s(self) -> float:
        """The seconds since a launch or read last began or ended, while one runs. Waiting for
        neighbors does not count.
        """
        return self._stopwatch.running_s

    def fence(self, epoch: int) -> None:
        """Fence the worker once no step has the turn. Steps that were launched end by themselves,
        before any later one.
        """
        self.worker.check_epoch_increases(epoch)
        self.interrupt()
        with self._condition:
            self._condition.wait_for(lambda: not self._has_turn)
            self.worker.fence(epoch)
            self._is_interrupted = False

    def interrupt(self) -> None:
        """Fail the steps that wait for their turn; no step gets it before the next fence."""
        with self._condition:
            self._is_interrupted = True
            self._condition.notify_all()

    def _read(self, pending: PendingStep, delivered: DeviceEvent) -> StageOutput:
        """Read a step's outcome, and return it only after its hidden states have been sent.

        They would be lost if this GPU died first.
        """
        with self._stopwatch:
            outcome = pending.read()
            delivered.wait()
            return outcome

    @contextmanager
    def _admit(self, batch: MicroBatch) -> Iterator[None]:
        """Wait for the turn and take it. Raises StaleEpochError, also if the epoch ends while it
        waits.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._is_over(batch) or self._is_next(batch))
            self.worker.check_epoch(batch)
            if self._is_interrupted:
                raise StaleEpochError(
                    f"{self.worker.plan.label} was interrupted before the step had begun"
                )
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

    def _is_over(self, batch: MicroBatch) -> bool:
        return self._is_interrupted or batch.epoch != self.worker.epoch

    def _is_next(self, batch: MicroBatch) -> bool:
        return (
            not self._has_turn
            and self._num_open < self._max_open
            and batch.step_id <= self.worker.next_step_id
        )
