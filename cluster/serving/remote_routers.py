"""An ingress's client of the routers: the calls that submit requests, and the streams that carry
their tokens.
"""

import asyncio
import itertools
import logging
import math
import uuid
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Callable,
    Collection,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, contextmanager
from typing import Any, cast

from ray.serve.handle import DeploymentHandle

from tramontane.cluster.observability.logging import request_context
from tramontane.cluster.serving.least_loaded_router import ONLY, prefer
from tramontane.cluster.serving.retry_policy import (
    AdmissionWindow,
    FailoverBudget,
    RecentRefusals,
    RouterSearch,
    WaitingRequest,
)
from tramontane.cluster.serving.router_queries import RouterQueries, cancellable
from tramontane.cluster.serving.token_channel import (
    DONE,
    KEEPALIVE,
    model_key,
    with_idle_timeout,
)
from tramontane.proto import errors, wire
from tramontane.proto.request import RequestOutput, SequenceRequest, request_fields
from tramontane.proto.timing import ACCEPT_TIMEOUT_S, SILENCE_TIMEOUT_S, SILENT_ROUTER_TTL_S
from tramontane.router.engine.prefix_aware_routing import Known, PrefixAwareRouting
from tramontane.router.engine.request_output import OutputQueue, ResumableRequest

MAX_STREAM_ATTEMPTS = 5  # to open the stream from one router for one request
MAX_GRPC_BYTES = 2**20  # what is larger goes through the object store; Ray Serve's gRPC takes 4 MiB
LAST_TOKENS_TIMEOUT_S = 10.0
DRAINING = (
    "the server is draining: it finishes what it has begun and takes nothing new; ask another one,"
    " or come back later"
)
ENDED = "the server has stopped before this request ended; send it again"

logger = logging.getLogger(__name__)


class RouterClient(RouterQueries):
    """The routers behind a Ray Serve handle, as one ``TokenSource``.

    ``max_unaccepted``: see ``AdmissionWindow``.
    ``handover_grace_s``: how long a router that is to stop may finish its requests; longer ones
    move to another router. ``model``: ``short_digest`` of the model whose token ids we send.
    ``node``: Ray's id of our node. ``write_interval_s``: how often each stream to a client is
    written to under full load; routers send tokens a little more often.
    ``routing``: None where prefixes are not cached.
    """

    def __init__(
        self,
        handle: "DeploymentHandle[Any]",
        max_unaccepted: int,
        handover_grace_s: float = math.inf,
        model: str = "",
        node: str = "",
        write_interval_s: Callable[[], float] = lambda: 0.0,
        routing: PrefixAwareRouting | None = None,
    ) -> None:
        super().__init__(handle)
        self._routing = routing
        self._window, self._model_key = AdmissionWindow(max_unaccepted), model_key(model)
        self._handover_grace_s = handover_grace_s
        self._node, self._write_interval_s = node, write_interval_s
        self._name = self._new_name()
        self._numbers = itertools.count()
        self._outputs: dict[int, OutputQueue] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._is_draining = self._is_ending = False
        self._num_requests = 0
        self._silent: set[str] = set()  # replicas
        self._refusals = RecentRefusals()
        self._tasks: set[asyncio.Task[None]] = set()  # calls and streams
        self._following: asyncio.Task[None] | None = None  # the digests of the routers
        # the stream that carries its tokens, by request
        self._streams_of: dict[int, tuple[str, str]] = {}
        # set once open; by our name and the replica's
        self._streams: dict[tuple[str, str], asyncio.Event] = {}

    @property
    def num_requests(self) -> int:
        """How many requests have not ended."""
        return self._num_requests

    @property
    def known_digests(self) -> Mapping[str, Known]:
        """What is known of the caches of pipelines; see ``PrefixAwareRouting``."""
        return self._routing.known if self._routing is not None else {}

    def check_capacity(self, num_sequences: int, owner: int = 0) -> None:
        """Raise DrainingError or OverloadedError if such a request would be refused; see
        ``TokenSource``.
        """
        if self._is_draining:
            raise errors.DrainingError(DRAINING)
        self._window.check(num_sequences, owner)

    async def generate(
        self, specs: Sequence[SequenceRequest]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate tokens, on one router after the other where they are lost; see
        ``TokenSource``.
        """
        progress = ResumableRequest(specs)
        if not progress.was_accepted:  # through another ingress
            self.check_capacity(len(specs), specs[0].owner)
        self._num_requests += 1
        if self._routing is not None and (self._following is None or self._following.done()):
            self._following = self._start(self.follow_digests(self._routing))
        try:
            async with aclosing(self._generate_with_failover(progress, specs[0])) as batches:
                async for batch in batches:
                    yield batch
        finally:
            self._num_requests -= 1

    async def _generate_with_failover(
        self, progress: ResumableRequest, first: SequenceRequest
    ) -> AsyncGenerator[RequestOutput, None]:
        """Retry on other routers until the request is complete or its budget is used up."""
        budget = FailoverBudget(was_accepted=progress.was_accepted)
        while not progress.is_complete:
            try:
                async with aclosing(
                    self._generate_on_one(progress.remaining_specs(), budget.without_router_since)
                ) as batches:
                    async for batch in batches:
                        budget.reset()
                        yield progress.record(batch)
            except (errors.PipelineError, errors.OverloadedError) as error:
                if isinstance(error, errors.QueueFullError):
                    self._window.mark_full(first.owner, error)
                progress.was_accepted |= isinstance(error, errors.RouterLostError)
                budget.on_error(error)
                with self._window.waiting(
                    WaitingRequest(progress.num_unfinished, budget.without_router_since)
                ):
                    await budget.backoff()
                if self._is_ending:
                    raise errors.DrainingError(ENDED) from error
                request_id = first.request_id
                logger.warning(
                    "request %s is given to another router: %s",
                    request_id or "-",
                    error,
                    extra=request_fields(request_id),
                )

    async def _generate_on_one(
        self, specs: Sequence[SequenceRequest], since: float
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate on one router. Raises RouterLostError if a router that has accepted the request
        fails.

        ``since``: when the request lost its router, by the event loop's clock.
        """
        number, encoded = next(self._numbers), wire.encode_specs(specs)
        outputs = self._outputs[number] = OutputQueue()
        self._window.unaccepted[number] = WaitingRequest(len(specs), since)
        request_id = specs[0].request_id
        call = self._start(self._call(number, encoded, outputs, specs), request_id)
        self._arm_timeout(
            ACCEPT_TIMEOUT_S, number, errors.PipelineError("no router has answered in time")
        )
        num_unfinished = len(specs)
        try:
            while num_unfinished:
                batch = await outputs.get()
                num_unfinished -= sum(event.finish is not None for event in batch.events)
                yield batch
        except errors.PipelineError as error:
            raise (
                error if number in self._window.unaccepted else errors.RouterLostError(str(error))
            ) from None
        finally:
            self._timers.pop(number).cancel()
            del self._outputs[number]
            if (stream := self._streams_of.pop(number, None)) is not None:
                self._refusals.forget_full(stream[1])
            self._window.on_request_end(number)
            if num_unfinished:
                call.cancel()

    def _arm_timeout(self, seconds: float, number: int, error: errors.TramontaneError) -> None:
        """End the request with ``error`` after some seconds, in place of the timeout that was armed
        before.
        """
        if number in self._timers:
            self._timers[number].cancel()
        self._timers[number] = asyncio.get_running_loop().call_later(
            seconds, self._outputs[number].put, error
        )

    async def is_ready(self) -> bool:
        """Return whether any router can make tokens now. Raises DrainingError while this server is
        draining.
        """
        if self._is_draining:
            raise errors.DrainingError(DRAINING)
        return await super().is_ready()

    def drain(self) -> int:
        """Refuse new requests; return how many have not ended."""
        self._is_draining = True
        return self.num_requests

    def resume(self) -> None:
        """Accept new requests again."""
        self._is_draining = False

    def end_all(self) -> None:
        """End all requests with an error."""
        self._is_ending = True
        for outputs in self._outputs.values():
            outputs.put(errors.DrainingError(ENDED))

    def close(self) -> None:
        """Cancel all calls and streams."""
        for task in (*self._tasks, *filter(None, [self._readiness])):
            task.cancel()

    async def _call(
        self, number: int, encoded: bytes, outputs: OutputQueue, specs: Sequence[SequenceRequest]
    ) -> None:
        """Run the call that lasts as long as a router works on the request. It may end before the
        last tokens arrive.
        """
        try:
            refusal = await self._submit(number, encoded, specs)
        except Exception as error:  # of any kind: the client must get an answer
            name, fields = specs[0].request_id or "-", request_fields(specs[0].request_id)
            logger.warning("the call of request %s failed: %s", name, error, extra=fields)
            refusal = errors.PipelineError("the router is gone")
        if refusal is not None:
            outputs.put(refusal)
        # the last tokens are on their way, unless the router has died since
        elif number in self._timers:
            self._window.unaccepted.pop(number, None)
            self._arm_timeout(
                LAST_TOKENS_TIMEOUT_S, number, errors.PipelineError("the router is gone")
            )

    async def _submit(
        self, number: int, encoded: bytes, specs: Sequence[SequenceRequest]
    ) -> errors.TramontaneError | None:
        """Find a router that accepts the request and wait until it is done; return the reason if
        all routers refuse it.
        """
        search, num_unopened, only = RouterSearch(self._refusals, specs[0]), Counter[str](), ""
        while True:
            refusing = self._silent | search.refused.keys()
            with self._route(specs, refusing, only) as constraint:
                method = self._method(
                    "generate", constraint, by_reference=len(encoded) > MAX_GRPC_BYTES
                )
                arguments = (
                    self._name,
                    number,
                    encoded,
                    self._model_key,
                    search.may_wait,
                    self._write_interval_s(),
                )
                outcome: bytes = await cancellable(method.remote(*arguments))
            if outcome == DONE:
                return None
            refusal, replica = wire.decode_error(outcome)
            is_unopened = isinstance(refusal, errors.StreamNotOpenError)
            if is_unopened and num_unopened[replica] < MAX_STREAM_ATTEMPTS:
                num_unopened[replica] += 1
                await self._ensure_stream(replica)
                only = replica
            elif is_unopened or isinstance(
                refusal, errors.PipelineUnavailableError | errors.OverloadedError
            ):
                if (reason := search.add(replica, refusal, had_choice=not only)) is not None:
                    return reason
                only = ""
            else:
                return refusal

    @contextmanager
    def _route(
        self, specs: Sequence[SequenceRequest], refusing: Collection[str], only: str
    ) -> Iterator[str]:
        """Choose a router for one call, unless it is given; yield the constraint, and release the
        choice at the call's end.
        """
        choice = self._routing.choose(specs, refusing, only) if self._routing else None
        try:  # the chosen one may have gone since its last digest
            yield ONLY + only if only else prefer(choice and choice.replica, refusing)
        finally:
            if self._routing and choice:
                self._routing.release(choice)

    async def _ensure_stream(self, replica: str) -> None:
        """Open the stream from a router to this ingress; without one the router refuses requests.

        The stream belongs to no request: the client whose request opens it may leave.
        """
        stream = self._name, replica
        if stream not in self._streams:
            self._streams[stream] = asyncio.Event()
            self._start(self._listen(*stream))
        await self._streams[stream].wait()

    async def _listen(self, name: str, replica: str) -> None:
        """Deliver what a router sends until its stream ends. ``name``: ours when the stream was
        opened.
        """
        opened, handover = (
            self._streams[name, replica],
            self._start(self._hand_over((name, replica))),
        )
        call = self._method("subscribe", ONLY + replica, stream=True)
        received = with_idle_timeout(
            cast("AsyncIterable[bytes]", call.remote(name, replica)), SILENCE_TIMEOUT_S
        )
        try:
            async with aclosing(received) as messages:
                async for message in messages:
                    opened.set()
                    for number, output in (
                        wire.decode_outputs(message) if message != KEEPALIVE else ()
                    ):
                        self._deliver(number, output, (name, replica))
        except Exception as error:  # of Ray, Ray Serve or gRPC
            logger.warning(
                "the stream from router %s broke: %s", replica, error or "nothing came any more"
            )
            if isinstance(error, TimeoutError):
                self._silent.add(replica)
                asyncio.get_running_loop().call_later(
                    SILENT_ROUTER_TTL_S, self._silent.discard, replica
                )
            lost = [
                number for number, stream in self._streams_of.items() if stream == (name, replica)
            ]
            # any of the latter may have been accepted, too
            for number in (*lost, *self._window.unaccepted):
                self._outputs[number].put(errors.PipelineError("the stream from the router broke"))
            if self._name == name:  # under this name the router may still consider the stream open
                self._name = self._new_name()
        finally:
            handover.cancel()
            del self._streams[name, replica]
            opened.set()

    def _new_name(self) -> str:
        return f"{self._node}/{uuid.uuid4().hex}"

    async def _hand_over(self, stream: tuple[str, str]) -> None:
        """Move the requests that a router still has to another one when it is about to be
        stopped.
        """
        await self._wait_until_retiring(stream[1], self._handover_grace_s)
        for number, source in self._streams_of.items():
            if source == stream:
                self._outputs[number].put(errors.PipelineError("the router is about to be stopped"))

    def _deliver(
        self, number: int, output: RequestOutput | errors.TramontaneError, stream: tuple[str, str]
    ) -> None:
        queue = self._outputs.get(number)
        if self._window.unaccepted.pop(number, None) is not None:
            self._timers[number].cancel()
            self._streams_of[number] = stream
        if queue is not None:  # else the client has left
            queue.put(output)

    def _start(self, work: Coroutine[Any, Any, None], request_id: str = "") -> asyncio.Task[None]:
        """Start a task outside of Ray Serve's current request, with which it would be cancelled;
        its calls have this id.
        """
        task = asyncio.create_task(work, context=request_context(request_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
