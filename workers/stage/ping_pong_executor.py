"""Ping-pong: while a micro-batch waits for its experts, its stage computes another one.

Three micro-batches in a stage of two layers; a number is attention of that layer, dots are waiting for experts:

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
from tramontane.proto.ports import PendingExperts
from tramontane.proto.step import MicroBatch
from tramontane.workers.experts.remote_experts import RemoteExperts
from tramontane.workers.model.transformer import StepCoroutine
from tramontane.workers.stage.pending_outcome import Outcome, PendingOutcome
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.stage.step_executor import Deliver, Receive, Stopwatch, discard_output

BEFORE_ALL_LAYERS = -1


class RunningStep:
    """One micro-batch, from its arrival to its end."""

    def __init__(self, waiting: StepCoroutine[PendingOutcome], deliver: Deliver) -> None:
        self.future: Future[Outcome] = Future()
        self.deliver = deliver
        self._waiting = waiting
        self._asked: PendingExperts | None = None

    @property
    def layer(self) -> int:
        """The last one of which the caches have been written."""
        return BEFORE_ALL_LAYERS if self._asked is None else self._asked.layer

    def can_resume(self, earlier: "RunningStep | None") -> bool:
        """Whether going on has a purpose, and nothing is overtaken: what the next layer's caches need of earlier positions is
        there only when the micro-batch before has been through its attention.
        """
        in_order = earlier is None or earlier.layer > self.layer
        return in_order and (self._asked is None or self._asked.is_ready)

    def resume(self) -> bool:
        """Compute until experts are asked, or to the end: then it is over, for better or worse."""
        try:
            with torch.inference_mode():
                self._asked = next(self._waiting)
        except StopIteration as end:
            self._end(end.value)
        except Exception as error:
            self.future.set_exception(error.with_traceback(None))  # whose frames would keep tensors
        else:
            return False
        return True

    def cancel(self, reason: Exception) -> None:
        """It will not be resumed."""
        self._waiting.close()
        self.future.set_exception(reason)

    def _end(self, unread: PendingOutcome) -> None:
        try:
            self.deliver(unread.hidden_TD)
            outcome = unread.read()
        except Exception as error:
            self.future.set_exception(error.with_traceback(None))
        else:
            self.future.set_result(outcome)


class PingPongExecutor:
    """``StepExecutor`` of a stage that keeps up to ``max_open`` micro-batches open.

    Any number of threads call ``step``, each of which waits for its own; one thread of this object's own computes.
    """

    def __init__(self, worker: StageWorker, experts: RemoteExperts, max_open: int, num_threads: int) -> None:
        self.worker = worker
        self._max_open, self._num_threads = max_open, num_threads
        self._experts, self._news = experts, experts.condition  # one condition for all that the computing thread may wait for
        self._arrived: dict[int, RunningStep] = {}  # by number, until their turn to begin
        self._open: deque[RunningStep] = deque()
        self._computed: RunningStep | None = None  # at this moment
        self._watch = Stopwatch()
        self._next_received = self._next_opened = 0
        self._is_interrupted = self._is_closed = False
        worker.model.experts = experts
        threading.Thread(target=self._compute, name="stage", daemon=True).start()

    @property
    def num_open(self) -> int:
        """Micro-batches that have begun and not ended."""
        return len(self._open)

    def step(self, batch: MicroBatch, receive: Receive, deliver: Deliver = discard_output) -> Outcome:
        """``receive`` is called on the caller's thread, ``deliver`` on the computing one."""
        self._wait_in_order(batch)
        incoming = receive()
        with self._news:
            self._check(batch)
            step = self._arrived[batch.step_id] = RunningStep(self.worker.step_coroutine(batch, incoming), deliver)
            self._next_received = batch.step_id + 1
            self._news.notify_all()
        return step.future.result()

    @property
    def busy_for_s(self) -> float:
        return self._watch.running_s

    def fence(self, epoch: int) -> None:
        """What is under way is dropped, whatever it waits for. Raises PipelineError where experts are out of reach for good."""
        self.worker.check_epoch_increases(epoch)
        self._experts.check()
        self.interrupt()
        with self._news:
            self._news.wait_for(lambda: self._computed is None)
            self.worker.fence(epoch)
            self._next_received = self._next_opened = 0
            self._is_interrupted = False

    def interrupt(self) -> None:
        with self._news:
            self._is_interrupted = True
            for step in (*self._open, *self._arrived.values()):
                if step is not self._computed:
                    step.cancel(self._interruption())
            self._open.clear()
            self._arrived.clear()
            self._news.notify_all()

    def close(self) -> None:
        """Everything ends, also the thread."""
        self.interrupt()
        with self._news:
            self._is_closed = True
            self._news.notify_all()

    def _wait_in_order(self, batch: MicroBatch) -> None:
        """Raises StaleEpochError, also if it comes to that while waiting."""
        with self._news:
            self._check(batch)
            self._news.wait_for(
                lambda: self._is_interrupted or batch.epoch != self.worker.epoch or batch.step_id <= self._next_received
            )
            self._check(batch)
            assert batch.step_id == self._next_received, f"step {batch.step_id} came where {self._next_received} was due"

    def _check(self, batch: MicroBatch) -> None:
        self.worker.check_epoch(batch)
        if self._is_interrupted:
            raise self._interruption()

    def _interruption(self) -> StaleEpochError:
        return StaleEpochError(f"{self.worker.plan.label} was interrupted before it could go on")

    def _compute(self) -> None:
        torch.set_num_threads(self._num_threads)  # counts per thread
        while (step := self._next_runnable()) is not None:
            with self._watch:
                is_over = step.resume()
            with self._news:
                self._computed = None
                if is_over and step in self._open:
                    self._open.remove(step)
                elif not is_over and self._is_interrupted:
                    step.cancel(self._interruption())
                self._news.notify_all()  # a fence may wait

    def _next_runnable(self) -> RunningStep | None:
        """What is to be computed next; waits for it. None at the end."""
        with self._news:
            while (step := self._next()) is None and not self._is_closed:
                self._news.wait()
            if step is not None and step not in self._open:
                del self._arrived[self._next_opened]
                self._next_opened += 1
                self._open.append(step)
            self._computed = step
            return step

    def _next(self) -> RunningStep | None:
        """The oldest that can go on, or another one that may begin."""
        earlier = None
        for step in self._open:
            if step.can_resume(earlier):
                return step
            earlier = step
        arrived = self._arrived.get(self._next_opened) if len(self._open) < self._max_open else None
        return arrived if arrived is not None and arrived.can_resume(earlier) else None
