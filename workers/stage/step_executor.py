"""How a stage's steps follow each other: one at a time, or as ``ping_pong`` has it."""

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
    """Whoever called for the step gets its outcome; nobody else."""


class StepExecutor(Protocol):
    """What drives a ``StageWorker``."""

    def step(self, batch: MicroBatch, receive: Receive, deliver: Deliver = discard_output) -> Outcome:
        """Run one micro-batch. Hidden states are received in the order of the steps, and delivered in that order: on a GPU before
        they are computed. The last stage delivers None.

        Raises as ``StageWorker.step`` does, and whatever ``receive`` and ``deliver`` raise.
        """

    def fence(self, epoch: int) -> None:
        """As ``StageWorker.fence``."""

    @property
    def busy_for_s(self) -> float:
        """How long the thread that computes has been at it without giving way; 0 while it waits. From any thread."""

    def interrupt(self) -> None:
        """From any thread: what waits for experts ends with a StaleEpochError, and nothing begins before the next fence."""


class Stopwatch:
    """How long what is going on has been going on; one thread's work, to be read by others."""

    def __init__(self) -> None:
        self._began_at = 0.0

    def __enter__(self) -> None:
        self._began_at = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._began_at = 0.0

    @property
    def running_s(self) -> float:
        """0 while nothing is."""
        began_at = self._began_at  # which may change meanwhile
        return time.monotonic() - began_at if began_at else 0.0


class SerialExecutor:
    """The caller's thread computes, and it is always the same one."""

    def __init__(self, worker: StageWorker, num_threads: int) -> None:
        self._worker, self._num_threads = worker, num_threads
        self._watch = Stopwatch()

    def step(self, batch: MicroBatch, receive: Receive, deliver: Deliver = discard_output) -> Outcome:
        self._worker.check_epoch(batch)
        self._worker.check_order(batch)  # before anything is taken from the stage before
        incoming = receive()
        with self._watch:
            unread = self._worker.launch(batch, incoming)
        deliver(unread.hidden_TD)
        with self._watch:
            return unread.read()

    def fence(self, epoch: int) -> None:
        torch.set_num_threads(self._num_threads)  # counts per thread: here, on the thread that computes
        self._worker.fence(epoch)

    @property
    def busy_for_s(self) -> float:
        return self._watch.running_s

    def interrupt(self) -> None:
        """Nothing here waits for experts."""
