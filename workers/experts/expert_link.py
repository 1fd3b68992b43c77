"""The direct link between a stage and an expert actor: a channel for calls and one for replies.

Both are reconnected when either is lost. A header of fixed length gives the number of rows that
follow.

Shape letters: E experts of a layer, C rows, D model width.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from tramontane.proto.errors import (
    ExpertRelocatedError,
    ExpertUnavailableError,
    LinkError,
    PipelineError,
)
from tramontane.proto.plan import ExpertPlan
from tramontane.workers.experts.expert_worker import ExpertCall, ExpertReply, ExpertWorker
from tramontane.workers.links.channel import Address, Channel, ChannelFactory

logger = logging.getLogger(__name__)

RETRY_S = 0.05  # until the next attempt to reconnect to a lost actor
FAILED, MOVED = -1, -2  # sent instead of the time that the experts worked


@dataclass(frozen=True, slots=True)
class ExpertMessageLayout:
    """The layout of messages: header, rows, and header of the reply."""

    num_experts: int  # per layer
    dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, plan: ExpertPlan, device: torch.device) -> "ExpertMessageLayout":
        """Return the layout for a model, on the device of one end."""
        assert plan.args.moe is not None
        return cls(plan.args.moe.num_experts, plan.args.dim, getattr(torch, plan.dtype), device)

    def rows(self, num_rows: int) -> Tensor:
        """Allocate rows, [C, D]."""
        return torch.empty(num_rows, self.dim, dtype=self.dtype, device=self.device)

    def header(self) -> Tensor:
        """Allocate the header of a call, [1 + E]."""
        return torch.empty(1 + self.num_experts, dtype=torch.int64, device=self.device)

    def encode_header(self, call: ExpertCall) -> Tensor:
        """Encode the layer and the number of rows of each expert.

        Layer 3, experts 1 and 2 with sizes 5 and 4 of 4 experts: [3, 0, 5, 4, 0].
        """
        sizes = [0] * self.num_experts
        for expert, size in zip(call.experts, call.sizes, strict=True):
            sizes[expert] = size
        return torch.tensor([call.layer, *sizes], device=self.device)

    def decode_header(self, header: Tensor) -> ExpertCall:
        """Decode the header of a call."""
        layer, *sizes = header.tolist()
        groups = {expert: size for expert, size in enumerate(sizes) if size}
        return ExpertCall(layer, tuple(groups), tuple(groups.values()))

    def reply_header(self, busy_ns: int) -> Tensor:
        """Encode the header of a reply: the nanoseconds of work, or ``FAILED`` or ``MOVED``."""
        return torch.tensor([busy_ns], device=self.device)


class ExpertServer:
    """An expert actor's ends of its links. Each stage has its own thread; one thread computes at a
    time, within ``error_guard``.
    """

    def __init__(
        self,
        worker: ExpertWorker,
        plan: ExpertPlan,
        host: str,
        channels: ChannelFactory,
        num_threads: int,
        error_guard: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._worker, self._channels, self._host, self._num_threads = (
            worker,
            channels,
            host,
            num_threads,
        )
        self._error_guard = error_guard
        self._layout = ExpertMessageLayout.of(plan, worker.device)
        self._compute_lock = threading.Lock()

    def open(self, calls: Address) -> Address:
        """Serve a stage that sends its calls from this address; returns the address that its
        replies come from.
        """
        listener = self._channels.listen(self._host)

        def serve() -> None:
            with closing(listener):
                try:
                    with (
                        closing(self._channels.connect(calls, self._host)) as inlet,
                        closing(listener.accept()) as outlet,
                    ):
                        self._serve(inlet, outlet)
                except (LinkError, OSError, RuntimeError) as error:
                    logger.info("The link to a stage has ended: %s", error)

        threading.Thread(target=serve, name="stage", daemon=True).start()
        return listener.address

    def _serve(self, inlet: Channel, outlet: Channel) -> None:
        """Answer calls until the link is broken, which raises LinkError."""
        torch.set_num_threads(self._num_threads)  # counts per thread
        while True:
            header = self._layout.header()
            inlet.receive(header)
            call = self._layout.decode_header(header)
            rows_CD = self._layout.rows(call.num_rows)
            inlet.receive(rows_CD)
            self._reply(call, rows_CD, outlet)

    def _reply(self, call: ExpertCall, rows_CD: Tensor, outlet: Channel) -> None:
        try:
            with self._compute_lock, self._error_guard():
                reply = self._worker.run(call, rows_CD)
        except ExpertRelocatedError:
            outlet.send(self._layout.reply_header(MOVED))
        except Exception:
            logger.exception("Experts %s of layer %s failed", call.experts, call.layer)
            outlet.send(self._layout.reply_header(FAILED))
        else:
            outlet.send(self._layout.reply_header(round(reply.busy_s * 1e9)))
            outlet.send(reply.rows_CD)


class DirectExpertClient:
    """A stage's ``ExpertConnection`` to one expert actor. A thread connects, receives replies, and
    reconnects.

    ``exchange_addresses`` sends the actor the address of the calls and returns the address of its
    replies. It raises ExpertUnavailableError if the actor cannot be reached now, PipelineError if
    it never will be.
    """

    def __init__(
        self,
        exchange_addresses: Callable[[Address], Address],
        notify: Callable[[], None],
        layout: ExpertMessageLayout,
        host: str,
        channels: ChannelFactory,
        label: str,
    ) -> None:
        self._exchange_addresses, self._notify, self._layout = exchange_addresses, notify, layout
        self._host, self._channels, self._label = host, channels, label
        self._lock = threading.Lock()
        self._outlet: Channel | None = None  # None: the actor is not up
        self._inlet: Channel | None = None
        # (number of rows, reply) of each call
        self._unanswered: deque[tuple[int, Future[ExpertReply]]] = deque()
        self._is_closed = False
        self.failure: PipelineError | None = None
        threading.Thread(target=self._maintain, name=label, daemon=True).start()

    @property
    def is_up(self) -> bool:
        """See ``ExpertConnection``."""
        return self._outlet is not None

    def call(self, call: ExpertCall, rows_CD: Tensor) -> "Future[ExpertReply]":
        """See ``ExpertConnection``."""
        future: Future[ExpertReply] = Future()
        with self._lock:
            outlet = self._outlet
            if outlet is not None:
                self._unanswered.append((call.num_rows, future))
        if outlet is None:
            future.set_exception(ExpertUnavailableError(f"{self._label} is not connected"))
            return future
        try:
            outlet.send(self._layout.encode_header(call))
            outlet.send(rows_CD)
        except LinkError:
            self._disconnect()  # the thread that receives replies fails all calls
        return future

    def close(self) -> None:
        """See ``ExpertConnection``."""
        self._is_closed = True
        self._disconnect()

    def _disconnect(self) -> None:
        for channel in (self._inlet, self._outlet):
            if channel is not None:
                channel.close()

    def _maintain(self) -> None:
        while not self._is_closed:
            try:
                inlet = self._connect()
                self._notify()
                self._receive_replies(inlet)
            except (ExpertUnavailableError, LinkError, OSError, RuntimeError) as error:
                self._on_disconnect(error)
                time.sleep(RETRY_S)
            except Exception as error:  # calls that wait for the actor must fail
                self.failure = (
                    error
                    if isinstance(error, PipelineError)
                    else PipelineError(f"{self._label} failed: {error!r}")
                )
                self._on_disconnect(error)
                return

    def _connect(self) -> Channel:
        with closing(self._channels.listen(self._host)) as listener:
            replies = self._exchange_addresses(listener.address)
            outlet = listener.accept()
        try:
            inlet = self._channels.connect(replies, self._host)
        except BaseException:
            outlet.close()
            raise
        with self._lock:
            self._inlet, self._outlet = inlet, outlet
        if self._is_closed:
            self._disconnect()
        return inlet

    def _receive_replies(self, inlet: Channel) -> None:
        """Receive replies until the link is broken, which raises LinkError."""
        header = torch.empty(1, dtype=torch.int64, device=self._layout.device)
        while True:
            inlet.receive(header)
            busy_ns = int(header.item())
            num_rows, future = self._unanswered[0]
            if busy_ns < 0:
                self._unanswered.popleft()
                future.set_exception(self._call_error(busy_ns))
                continue
            rows_CD = self._layout.rows(num_rows)
            inlet.receive(rows_CD)
            self._unanswered.popleft()
            future.set_result(ExpertReply(rows_CD, busy_ns / 1e9))

    def _call_error(self, code: int) -> PipelineError:
        if code == MOVED:
            return ExpertRelocatedError(f"{self._label} no longer holds these experts")
        return PipelineError(f"{self._label} failed; see its log")

    def _on_disconnect(self, error: Exception) -> None:
        with self._lock:
            if self._outlet is not None and not self._is_closed:
                logger.warning("The connection to %s was lost: %s", self._label, error)
            inlet, outlet, unanswered = self._inlet, self._outlet, list(self._unanswered)
            self._inlet = self._outlet = None
            self._unanswered.clear()
        for channel in (inlet, outlet):
            if channel is not None:
                channel.close()
        for _, future in unanswered:
            future.set_exception(
                ExpertUnavailableError(f"the connection to {self._label} was lost: {error}")
            )
        self._notify()
