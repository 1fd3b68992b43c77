"""The direct link between a stage and an expert actor: an edge for calls and one for replies, made anew when either was lost.

Both ends know the sizes of what comes: a head of fixed length says how many rows follow.

Shape letters: E experts of a layer, C rows, D model width.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from tramontane.proto.errors import ExpertRelocatedError, ExpertUnavailableError, LinkError, PipelineError
from tramontane.proto.plan import ExpertPlan
from tramontane.workers.experts.expert_worker import ExpertCall, ExpertReply, ExpertWorker
from tramontane.workers.links.channel import Address, Channel, ChannelFactory

logger = logging.getLogger(__name__)

RETRY_S = 0.05  # until a lost actor is looked for again
FAILED, MOVED = -1, -2  # instead of the time that the experts worked


@dataclass(frozen=True, slots=True)
class ExpertMessageLayout:
    """What the rows of all calls look like."""

    num_experts: int  # of a layer
    dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, plan: ExpertPlan, device: torch.device) -> "ExpertMessageLayout":
        assert plan.args.moe is not None
        return cls(plan.args.moe.num_experts, plan.args.dim, getattr(torch, plan.dtype), device)

    def rows(self, num_rows: int) -> Tensor:
        return torch.empty(num_rows, self.dim, dtype=self.dtype, device=self.device)

    def header(self) -> Tensor:
        return torch.empty(1 + self.num_experts, dtype=torch.int64, device=self.device)

    def encode_header(self, call: ExpertCall) -> Tensor:
        """The layer, and how many rows each of its experts gets: layer 3, experts 1 and 2, sizes 5 and 4: [3, 0, 5, 4, 0]."""
        sizes = [0] * self.num_experts
        for expert, size in zip(call.experts, call.sizes, strict=True):
            sizes[expert] = size
        return torch.tensor([call.layer, *sizes], device=self.device)

    def decode_header(self, head: Tensor) -> ExpertCall:
        layer, *sizes = head.tolist()
        called = {expert: size for expert, size in enumerate(sizes) if size}
        return ExpertCall(layer, tuple(called), tuple(called.values()))

    def reply_head(self, busy_ns: int) -> Tensor:
        return torch.tensor([busy_ns], device=self.device)


class ExpertServer:
    """An expert actor's ends of its links. Each stage has a thread of its own; one computes at a time, within ``around``."""

    def __init__(
        self,
        worker: ExpertWorker,
        plan: ExpertPlan,
        host: str,
        edges: ChannelFactory,
        num_threads: int,
        error_guard: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._worker, self._edges, self._host, self._num_threads = worker, edges, host, num_threads
        self._around = error_guard
        self._format = ExpertMessageLayout.of(plan, worker.device)
        self._turn = threading.Lock()

    def open(self, calls: Address) -> Address:
        """For a stage, whose calls come from there; where its replies will come from."""
        listener = self._edges.listen(self._host)

        def serve() -> None:
            try:
                inlet = self._edges.connect(calls, self._host)
                try:
                    outlet = listener.accept()
                    self._serve(inlet, outlet)
                finally:
                    inlet.close()
            except (LinkError, OSError, RuntimeError) as error:
                logger.info("a stage has gone: %s", error)
            finally:
                listener.close()

        threading.Thread(target=serve, name="stage", daemon=True).start()
        return listener.address

    def _serve(self, inlet: Channel, outlet: Channel) -> None:
        torch.set_num_threads(self._num_threads)  # counts per thread
        try:
            while True:
                head = self._format.header()
                inlet.receive(head)
                call = self._format.decode_header(head)
                rows_CD = self._format.rows(call.num_rows)
                inlet.receive(rows_CD)
                self._answer(call, rows_CD, outlet)
        finally:
            outlet.close()

    def _answer(self, call: ExpertCall, rows_CD: Tensor, outlet: Channel) -> None:
        try:
            with self._turn, self._around():
                reply = self._worker.run(call, rows_CD)
        except ExpertRelocatedError:
            outlet.send(self._format.reply_head(MOVED))
        except Exception:
            logger.exception("experts %s of layer %s failed", call.experts, call.layer)
            outlet.send(self._format.reply_head(FAILED))
        else:
            outlet.send(self._format.reply_head(round(reply.busy_s * 1e9)))
            outlet.send(reply.rows_CD)


class DirectExpertClient:
    """A stage's end: the ``ExpertConnection`` to one expert actor. One thread of its own connects, listens, and connects again.

    ``introduce`` tells the actor where calls come from, and returns where its replies come from. It raises ExpertUnavailableError
    where the actor cannot be reached now, PipelineError where it never will be.
    """

    def __init__(
        self,
        introduce: Callable[[Address], Address],
        notify: Callable[[], None],
        row_format: ExpertMessageLayout,
        host: str,
        edges: ChannelFactory,
        label: str,
    ) -> None:
        self._introduce, self._notify, self._format = introduce, notify, row_format
        self._host, self._edges, self._label = host, edges, label
        self._lock = threading.Lock()
        self._outlet: Channel | None = None  # None: the actor is not up
        self._inlet: Channel | None = None
        self._unanswered: deque[tuple[int, Future[ExpertReply]]] = deque()  # and the number of rows of each
        self._is_closed = False
        self.failure: PipelineError | None = None
        threading.Thread(target=self._maintain, name=label, daemon=True).start()

    @property
    def is_up(self) -> bool:
        return self._outlet is not None

    def call(self, call: ExpertCall, rows_CD: Tensor) -> "Future[ExpertReply]":
        future: Future[ExpertReply] = Future()
        with self._lock:
            outlet = self._outlet
            if outlet is not None:
                self._unanswered.append((call.num_rows, future))
        if outlet is None:
            future.set_exception(ExpertUnavailableError(f"{self._label} is not there"))
            return future
        try:
            outlet.send(self._format.encode_header(call))
            outlet.send(rows_CD)
        except LinkError:
            self._disconnect()  # the thread that listens tells everybody
        return future

    def close(self) -> None:
        self._is_closed = True
        self._disconnect()

    def _disconnect(self) -> None:
        for edge in (self._inlet, self._outlet):
            if edge is not None:
                edge.close()

    def _maintain(self) -> None:
        while not self._is_closed:
            try:
                inlet = self._connect()
                self._notify()
                self._listen(inlet)
            except (ExpertUnavailableError, LinkError, OSError, RuntimeError) as error:
                self._on_disconnect(error)
                time.sleep(RETRY_S)
            except Exception as error:  # whatever it is, who waits for the actor must hear of it
                self.failure = error if isinstance(error, PipelineError) else PipelineError(f"{self._label} failed: {error!r}")
                self._on_disconnect(error)
                return

    def _connect(self) -> Channel:
        listener = self._edges.listen(self._host)
        try:
            replies = self._introduce(listener.address)
            outlet = listener.accept()
        finally:
            listener.close()
        try:
            inlet = self._edges.connect(replies, self._host)
        except BaseException:
            outlet.close()
            raise
        with self._lock:
            self._inlet, self._outlet = inlet, outlet
        if self._is_closed:
            self._disconnect()
        return inlet

    def _listen(self, inlet: Channel) -> None:
        """Until the link is broken, which raises LinkError."""
        head = torch.empty(1, dtype=torch.int64, device=self._format.device)
        while True:
            inlet.receive(head)
            busy_ns = int(head.item())
            num_rows, future = self._unanswered[0]
            if busy_ns < 0:
                self._unanswered.popleft()
                future.set_exception(self._refusal(busy_ns))
                continue
            rows_CD = self._format.rows(num_rows)
            inlet.receive(rows_CD)
            self._unanswered.popleft()
            future.set_result(ExpertReply(rows_CD, busy_ns / 1e9))

    def _refusal(self, code: int) -> PipelineError:
        if code == MOVED:
            return ExpertRelocatedError(f"{self._label} does not hold them any more")
        return PipelineError(f"{self._label} failed; its log says why")

    def _on_disconnect(self, error: Exception) -> None:
        with self._lock:
            if self._outlet is not None and not self._is_closed:
                logger.warning("%s is gone: %s", self._label, error)
            inlet, outlet, unanswered = self._inlet, self._outlet, list(self._unanswered)
            self._inlet = self._outlet = None
            self._unanswered.clear()
        for edge in (inlet, outlet):
            if edge is not None:
                edge.close()
        for _, future in unanswered:
            future.set_exception(ExpertUnavailableError(f"{self._label} is gone: {error}"))
        self._notify()
