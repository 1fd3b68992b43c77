"""Ping-pong: while a micro-batch waits for its experts, its stage computes another one.

Three micro-batches in a stage of two layers; a number is attention of that layer, dots are waiting
for experts:

    a  0 . . 1 . . |
    b    0 . . 1 . . |
    c              0 . . 1 . . |

Here at most two are open at a time, so c begins when a has ended.
"""

import threading
from collections import deque
from concurrent.futures import Future

import torch

from tramontane.proto.errors import StaleEpochError
from tramontane.proto.step import MicroBatch
from tramontane.workers.experts.remote_experts import (
    PendingExpertCall,
    RemoteExperts,
    StepCoroutine,
)
from tramontane.workers.stage.hidden_states import StageOutput
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.stage.step_executor import Deliver, Receive, Stopwatch, discard_output
from tramontane.workers.stage.step_record import PendingStep

BEFORE_ALL_LAYERS = -1


class RunningStep:
    """One micro-batch, from its arrival to its end."""

    def __init__(self, coroutine: StepCoroutine[PendingStep], deliver: Deliver) -> None:
        self.future: Future[StageOutput] = Future()
        self.deliver = deliver
        self._coroutine = coroutine
        self._call: PendingExpertCall | None = None

    @property
    def layer(self) -> int:
        """The last layer whose caches have been written."""
        return BEFORE_ALL_LAYERS if self._call is None else self._call.layer

    def can_resume(self, earlier: "RunningStep | None") -> bool:
        """Whether its experts have answered, and it would not overtake the micro-batch before it.

        The next layer's caches hold earlier positions only once the micro-batch before has passed
        that layer's attention.
        """
        in_order = earlier is None or earlier.layer > self.layer
        return in_order and (self._call is None or self._call.is_ready)

    def resume(self) -> bool:
        """Compute until experts have been called, or to the end. Returns True if the step is over,
        failed or not.
        """
        try:
            if (pending := self._advance()) is None:
                return False
            self.deliver(pending.hidden_TD)
            self.future.set_result(pending.read())
        except Exception as error:
            self.future.set_exception(error.with_traceback(None))  # its frames would keep tensors
        return True

    def cancel(self, reason: Exception) -> None:
        """Fail with ``reason``; it must not be resumed."""
        self._coroutine.close()
        self.future.set_exception(reason)

    def _advance(self) -> PendingStep | None:
        """Compute until experts have been called; returns the outcome if no layer follows."""
        try:
            with torch.inference_mode():
                self._call = next(self._coroutine)
        except StopIteration as end:
            pending: PendingStep = end.value
            return pending
        return None


class PingPongExecutor:
    """The ``StepExecutor`` of a stage that keeps up to ``max_open`` micro-batches open.

    Any number of threads call ``step``, each of which waits for its own result; one thread of the
    executor computes.
    """

    def __init__(
        self, worker: StageWorker, experts: RemoteExperts, max_open: int, num_threads: int
    ) -> None:
        self.worker = worker
        self._max_open, self._num_threads = max_open, num_threads
        # one condition for all events that the computing thread waits for
        self._experts, self._condition = experts, experts.condition
        self._arrived: dict[int, RunningStep] = {}  # by step id, until their turn to begin
        self._open: deque[RunningStep] = deque()
        self._computing: RunningStep | None = None
        self._stopwatch = Stopwatch()
        self._next_received = self._next_opened = 0
        self._is_interrupted = self._is_closed = False
        threading.Thread(target=self._compute, name="stage", daemon=True).start()

    def step(
        self, batch: MicroBatch, receive: Receive, deliver: Deliver = discard_output
    ) -> StageOutput:
        """Run one micro-batch. ``receive`` is called on the caller's thread, ``deliver`` on the
        computing one.
        """
        self._wait_in_order(batch)
        incoming = receive()
        with self._condition:
            self._check(batch)  # again: the epoch may have ended while it was received
            step = RunningStep(self.worker.step_coroutine(batch, incoming, self._experts), deliver)
            self._arrived[batch.step_id] = step
            self._next_received = batch.step_id + 1
            self._condition.notify_all()
        return step.future.result()

    @property
    def busy_for_s(self) -> float:
        """See ``StepExecutor``."""
        return self._stopwatch.running_s

    def fence(self, epoch: int) -> None:
        """Drop the steps in progress and fence the worker. Raises PipelineError if an expert is
        permanently unavailable.
        """
        self.worker.check_epoch_increases(epoch)
        self._experts.check()
        self.interrupt()
        with self._condition:
            self._condition.wait_for(lambda: self._computing is None)
            self.worker.fence(epoch)
            self._next_received = self._next_opened = 0
            self._is_interrupted = False

    def interrupt(self) -> None:
        """Cancel all steps; the step that is being computed is cancelled when it next waits for its
        experts.
        """
        with self._condition:
            self._is_interrupted = True
            for step in (*self._open, *self._arrived.values()):
                if step is not self._computing:
                    step.cancel(self._interruption())
            self._open.clear()
            self._arrived.clear()
            self._condition.notify_all()

    def close(self) -> None:
        """Cancel all steps and end the computing thread."""
        self.interrupt()
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()

    def _wait_in_order(self, batch: MicroBatch) -> None:
        """Wait until all earlier steps have been received. Raises StaleEpochError, also if the
        epoch ends while it waits.
        """
        with self._condition:
            self._condition.wait_for(
                lambda: (
                    self._is_interrupted
                    or batch.epoch != self.worker.epoch
                    or batch.step_id <= self._next_received
                )
            )
            self._check(batch)
            assert batch.step_id == self._next_received, (
                f"step {batch.step_id} came where {self._next_received} was due"
            )

    def _check(self, batch: MicroBatch) -> None:
        self.worker.check_epoch(batch)
        if self._is_interrupted:
            raise self._interruption()

    def _interruption(self) -> StaleEpochError:
        return StaleEpochError(
            f"{self.worker.plan.label} was interrupted before the step had ended"
        )

    def _compute(self) -> None:
        torch.set_num_threads(self._num_threads)  # counts per thread
        while (step := self._wait_runnable()) is not None:
            with self._stopwatch:
                is_over = step.resume()
            with self._condition:
                self._computing = None
                if is_over and step in self._open:
                    self._open.remove(step)
                elif not is_over and self._is_interrupted:
                    step.cancel(self._interruption())
                self._condition.notify_all()  # a fence may wait

    def _wait_runnable(self) -> RunningStep | None:
        """Wait for a step that can be computed, and open it if it is new. Return None when the
        executor is closed.
        """
        with self._condition:
            while (step := self._next()) is None and not self._is_closed:
                self._condition.wait()
            if step is not None and step not in self._open:
                del self._arrived[self._next_opened]
                self._next_opened += 1
                self._open.append(step)
            self._computing = step
            return step

    def _next(self) -> RunningStep | None:
        """Return the oldest open step that can be resumed, or the next one that may begin."""
        earlier = None
        for step in self._open:
            if step.can_resume(earlier):
                return step
            earlier = step
        arrived = self._arrived.get(self._next_opened) if len(self._open) < self._max_open else None
        return arrived if arrived is not None and arrived.can_resume(earlier) else None
