"""The streams from routers to one ingress, and the calls whose tokens the streams carry.

A call lasts as long as a router works on its request, and returns only how the request ended. The
tokens of all calls to one router arrive on one stream, see ``token_stream``.
"""

import asyncio
import itertools
import logging
import uuid
from collections.abc import AsyncIterable, Coroutine
from contextlib import aclosing
from typing import Any, NamedTuple, cast

from tramontane.cluster.observability.logging import request_context
from tramontane.cluster.serving.least_loaded_router import ONLY
from tramontane.cluster.serving.retry_policy import AdmissionWindow, WaitingRequest
from tramontane.cluster.serving.router_queries import RouterQueries
from tramontane.cluster.serving.token_stream import KEEPALIVE, with_idle_timeout
from tramontane.proto import wire
from tramontane.proto.errors import PipelineError, RouterLostError, TramontaneError
from tramontane.proto.request import Request, RequestOutput
from tramontane.proto.timing import SILENCE_TIMEOUT_S, SILENT_ROUTER_TTL_S
from tramontane.router.engine.request_output import OutputQueue

logger = logging.getLogger(__name__)


class Stream(NamedTuple):
    """A stream by its two ends. ``ingress``: our name when it was opened; ``replica``: the
    router's.
    """

    ingress: str
    replica: str


class PendingCall:
    """One attempt of a request on one router. Its number identifies its tokens.

    ``stream``: the stream that delivered its first output; None before that.
    """

    def __init__(
        self, number: int, request: Request, since: float, window: AdmissionWindow
    ) -> None:
        self.number, self.request = number, request
        self.stream: Stream | None = None
        self.is_accepted = False
        self._num_unfinished = len(request.sequences)
        self._outputs = OutputQueue()
        self._timer: asyncio.TimerHandle | None = None
        self._waiting, self._window = WaitingRequest(len(request.sequences), since), window
        window.add(self._waiting)

    @property
    def is_complete(self) -> bool:
        """Whether all sequences have ended."""
        return not self._num_unfinished

    async def next_output(self) -> RequestOutput:
        """Wait for tokens, and return all that have come.

        Raises the error that ends the call; RouterLostError if a router that had accepted it
        fails.
        """
        try:
            output = await self._outputs.get()
        except PipelineError as error:
            raise (RouterLostError(str(error)) if self.is_accepted else error) from None
        self._num_unfinished -= sum(event.finish is not None for event in output.events)
        return output

    def put(self, output: RequestOutput | TramontaneError) -> None:
        """Add tokens, or the error that ends the call."""
        self._outputs.put(output)

    def accept(self) -> None:
        """Note that a router has accepted the request."""
        self.is_accepted = True
        self._window.remove(self._waiting)

    def deliver(self, output: RequestOutput | TramontaneError, stream: Stream) -> None:
        """Add an output from a stream. The first output shows that the router has accepted the
        request.
        """
        if not self.is_accepted:
            self.accept()
            self._cancel_timer()
            self.stream = stream
        self.put(output)

    def fail_after(self, seconds: float, error: TramontaneError) -> None:
        """End the call with ``error`` after some seconds, replacing an earlier timeout."""
        self._cancel_timer()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.put, error)

    def close(self) -> None:
        """Note that the request takes no more tokens from this call."""
        self._cancel_timer()
        if self.is_accepted:
            self._window.forget_full()  # the router has a free slot or queue entry now
        else:
            self._window.remove(self._waiting)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class BackgroundTasks:
    """Tasks outside of Ray Serve's current request, whose cancellation would cancel them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], request_id: str = "") -> asyncio.Task[None]:
        """Start a task; its calls have this id."""
        task = asyncio.create_task(work, context=request_context(request_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def cancel(self) -> None:
        """Cancel all tasks."""
        for task in self._tasks:
            task.cancel()


class RouterStreams:
    """The streams from all routers to this ingress, at most one from each, and its pending calls.

    ``node``: Ray's id of our node. ``handover_grace_s``: how long a router that is to stop may
    finish its requests; longer ones move to another router.
    """

    def __init__(
        self, queries: RouterQueries, tasks: BackgroundTasks, node: str, handover_grace_s: float
    ) -> None:
        self._queries, self._tasks = queries, tasks
        self._node, self._handover_grace_s = node, handover_grace_s
        self.name = self._new_name()
        self.silent: set[str] = set()  # replicas
        self.calls: dict[int, PendingCall] = {}  # by number
        self._numbers = itertools.count()
        self._opened: dict[Stream, asyncio.Event] = {}  # set once open

    def begin_call(self, request: Request, since: float, window: AdmissionWindow) -> PendingCall:
        """Return a new call, whose tokens are delivered until it is ended. ``since``: when its
        request lost its router, by the event loop's clock.
        """
        call = PendingCall(next(self._numbers), request, since, window)
        self.calls[call.number] = call
        return call

    def end_call(self, call: PendingCall) -> None:
        """End the delivery to this call."""
        del self.calls[call.number]
        call.close()

    async def ensure(self, replica: str) -> None:
        """Open the stream from a router to this ingress; without a stream the router refuses
        requests.

        The stream is independent of requests: the client whose request opens it may disconnect.
        """
        stream = Stream(self.name, replica)
        if stream not in self._opened:
            self._opened[stream] = asyncio.Event()
            self._tasks.start(self._listen(stream))
        await self._opened[stream].wait()

    async def _listen(self, stream: Stream) -> None:
        """Deliver a router's messages until its stream ends."""
        opened = self._opened[stream]
        handover = self._tasks.start(self._hand_over(stream))
        subscription = self._queries.method("subscribe", ONLY + stream.replica, stream=True)
        received = with_idle_timeout(
            cast("AsyncIterable[bytes]", subscription.remote(*stream)), SILENCE_TIMEOUT_S
        )
        try:
            async with aclosing(received) as messages:
                async for message in messages:
                    opened.set()
                    if message != KEEPALIVE:
                        self._deliver(message, stream)
        except Exception as error:  # of Ray, Ray Serve or gRPC
            self._on_break(stream, error)
        finally:
            handover.cancel()
            del self._opened[stream]
            opened.set()

    def _deliver(self, message: bytes, stream: Stream) -> None:
        for number, output in wire.decode_outputs(message):
            if (call := self.calls.get(number)) is not None:  # else the client has left
                call.deliver(output, stream)

    def _on_break(self, stream: Stream, error: Exception) -> None:
        """End the calls whose tokens this stream carried."""
        logger.warning(
            "the stream from router %s broke: %s",
            stream.replica,
            error or "nothing came any more",
        )
        if isinstance(error, TimeoutError):
            self.silent.add(stream.replica)
            asyncio.get_running_loop().call_later(
                SILENT_ROUTER_TTL_S, self.silent.discard, stream.replica
            )
        for call in self.calls.values():
            # calls not known to be accepted may have been accepted, too
            if call.stream == stream or not call.is_accepted:
                call.put(PipelineError("the stream from the router broke"))
        if self.name == stream.ingress:  # under this name the router may take it to be open
            self.name = self._new_name()

    def _new_name(self) -> str:
        return f"{self._node}/{uuid.uuid4().hex}"

    async def _hand_over(self, stream: Stream) -> None:
        """Move the requests that a router still has to another one when it is about to be
        stopped.
        """
        await self._queries.wait_until_retiring(stream.replica, self._handover_grace_s)
        for call in self.calls.values():
            if call.stream == stream:
                call.put(PipelineError("the router is about to be stopped"))
