"""What drives a stage's steps: the protocol of step executors, and the one that runs one step at a time."""

import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from tramontane.proto.step import MicroBatch
from tramontane.workers.stage.activation import Activation
from tramontane.workers.stage.pending_outcome import Outcome
from tramontane.workers.stage.stage_worker import StageWorker

Receive = Callable[[], Activation | None]
Deliver = Callable[[Tensor | None], None]


def discard_output(_hidden_TD: Tensor | None) -> None:
    """Deliver nothing: the caller of ``step`` gets the hidden states in the outcome."""


class StepExecutor(Protocol):
    """What drives a ``StageWorker``. The stage's device and experts decide which executor is used.

    | executor             | used when                      | steps in progress                                            |
    |----------------------|--------------------------------|--------------------------------------------------------------|
    | `SerialExecutor`     | CPU, experts inside the stage  | one, on the caller's thread                                  |
    | `OverlappedExecutor` | GPU, experts inside the stage  | the GPU computes one while the host prepares the next        |
    | `PingPongExecutor`   | experts on actors, CPU or GPU  | several: one computes while the others wait for their experts |
    """

    def step(self, batch: MicroBatch, receive: Receive, deliver: Deliver = discard_output) -> Outcome:
        """Run one micro-batch.

        Hidden states are received and delivered in the order of the steps. On a GPU they are delivered before they are
        computed. The last stage delivers None. Raises as ``StageWorker.step`` and ``StageWorker.step_coroutine`` do, and what
        ``receive`` and ``deliver`` raise.
        """

    def fence(self, epoch: int) -> None:
        """Fence the worker as ``StageWorker.fence`` does; steps in progress end first or are dropped."""

    @property
    def busy_for_s(self) -> float:
        """How long the thread that computes has worked without a pause; 0 while it waits. Can be read from any thread."""

    def interrupt(self) -> None:
        """End what waits for experts with a StaleEpochError; nothing begins before the next fence. From any thread."""


class Stopwatch:
    """The time for which the work in progress has run: written by one thread, read by others."""

    def __init__(self) -> None:
        self._began_at = 0.0

    def __enter__(self) -> None:
        self._began_at = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._began_at = 0.0

    @property
    def running_s(self) -> float:
        """The seconds since the work began; 0 while there is none."""
        began_at = self._began_at  # read once: another thread may reset it
        return time.monotonic() - began_at if began_at else 0.0


class SerialExecutor:
    """The ``StepExecutor`` that computes on the caller's thread, which is always the same one."""

    def __init__(self, worker: StageWorker, num_threads: int) -> None:
        self._worker, self._num_threads = worker, num_threads
        self._stopwatch = Stopwatch()

    def step(self, batch: MicroBatch, receive: Receive, deliver: Deliver = discard_output) -> Outcome:
        """Run one micro-batch on the caller's thread."""
        self._worker.check_epoch(batch)
        self._worker.check_order(batch)  # before anything is received from the stage before
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
