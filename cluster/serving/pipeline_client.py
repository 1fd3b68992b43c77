"""An ingress's client of the pipelines: it gives each request to a router, and to another one where
the first is lost.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    Callable,
    Collection,
    Iterator,
    Mapping,
)
from contextlib import contextmanager
from typing import Any

from ray.serve.handle import DeploymentHandle

from tramontane.cluster.serving.least_loaded_router import ONLY, prefer
from tramontane.cluster.serving.retry_policy import (
    AdmissionWindow,
    RefusalTracker,
    RouterFailoverBudget,
    RouterSearch,
    WaitingRequest,
)
from tramontane.cluster.serving.router_queries import RouterQueries, cancellable
from tramontane.cluster.serving.router_streams import BackgroundTasks, PendingCall, RouterStreams
from tramontane.cluster.serving.token_stream import DONE, model_key
from tramontane.proto import errors, wire
from tramontane.proto.request import Request, RequestOutput, request_fields
from tramontane.proto.timing import ACCEPT_TIMEOUT_S
from tramontane.router.engine.health import PipelineHealth
from tramontane.router.engine.prefix_aware_routing import Known, PrefixAwareRouting
from tramontane.router.engine.request_output import ResumableRequest

MAX_STREAM_ATTEMPTS = 5  # to open the stream from one router for one request
MAX_GRPC_BYTES = 2**20  # larger arguments use the object store; Ray Serve's gRPC takes 4 MiB
LAST_TOKENS_TIMEOUT_S = 10.0
DRAINING = (
    "the server is draining: it finishes what it has begun and takes nothing new; ask another one,"
    " or come back later"
)
ENDED = "the server has stopped before this request ended; send it again"

logger = logging.getLogger(__name__)


class PipelineClient:
    """The pipelines behind a Ray Serve handle of their routers, as one ``TokenSource``.

    ``max_unaccepted``: see ``AdmissionWindow``. ``handover_grace_s`` and ``node``: see
    ``RouterStreams``. ``model``: ``short_digest`` of the model whose token ids we send.
    ``write_interval_s``: the interval of writes to each client stream under full load; routers send
    tokens a little more often. ``routing``: None where prefixes are not cached. ``application``:
    its name in Ray Serve.
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
        application: str = "",
    ) -> None:
        self.queries = RouterQueries(handle, application)
        self._tasks = BackgroundTasks()
        self._streams = RouterStreams(self.queries, self._tasks, node, handover_grace_s)
        self._routing = routing
        self._following: asyncio.Task[None] | None = None  # the digests of the routers
        self._window, self._refusals = AdmissionWindow(max_unaccepted), RefusalTracker()
        self._model_key, self._write_interval_s = model_key(model), write_interval_s
        self._is_draining = self._is_ending = False
        self._num_requests = 0

    @property
    def num_requests(self) -> int:
        """How many requests have not ended."""
        return self._num_requests

    @property
    def known_digests(self) -> Mapping[str, Known]:
        """The known cache versions of the pipelines; see ``PrefixAwareRouting``."""
        return self._routing.known if self._routing is not None else {}

    def check_capacity(self, num_sequences: int, owner: int = 0) -> None:
        """Raise DrainingError or OverloadedError if such a request would be refused; see
        ``TokenSource``.
        """
        if self._is_draining:
            raise errors.DrainingError(DRAINING)
        self._window.check(num_sequences, owner)

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Generate tokens, on one router after the other where they are lost, until the request is
        complete or its ``RouterFailoverBudget`` is used up; see ``TokenSource``.
        """
        progress = ResumableRequest(request)
        if not progress.was_accepted:  # through another ingress
            self.check_capacity(len(request.sequences), request.owner)
        self._follow_digests()
        budget = RouterFailoverBudget(was_accepted=progress.was_accepted)
        self._num_requests += 1
        try:
            while not progress.is_complete:
                try:
                    with self._call(progress, budget) as call:
                        while not call.is_complete:
                            output = await call.next_output()
                            budget.reset()
                            yield progress.record(output)
                except (errors.PipelineError, errors.OverloadedError) as error:
                    await self._prepare_retry(progress, budget, error)
        finally:
            self._num_requests -= 1

    def _follow_digests(self) -> None:
        if self._routing is not None and (self._following is None or self._following.done()):
            self._following = self._tasks.start(self.queries.follow_digests(self._routing))

    @contextmanager
    def _call(
        self, progress: ResumableRequest, budget: RouterFailoverBudget
    ) -> Iterator[PendingCall]:
        """Send the rest of a request to one router while the block runs."""
        request = progress.remaining()
        encoded = wire.encode_request(request)
        call = self._streams.begin_call(request, budget.without_router_since, self._window)
        running = self._tasks.start(self._run(call, encoded), request.request_id)
        call.fail_after(ACCEPT_TIMEOUT_S, errors.PipelineError("no router has answered in time"))
        try:
            yield call
        finally:
            self._streams.end_call(call)
            if call.stream is not None:
                self._refusals.forget_full(call.stream.replica)
            if not call.is_complete:
                running.cancel()

    async def _prepare_retry(
        self,
        progress: ResumableRequest,
        budget: RouterFailoverBudget,
        error: errors.TramontaneError,
    ) -> None:
        """Wait until the request may be sent to another router.

        Raises ``error``, or a more specific one, if the request is not to be retried.
        """
        if isinstance(error, errors.QueueFullError):
            self._window.mark_full(progress.request.owner, error)
        progress.was_accepted |= isinstance(error, errors.RouterLostError)
        budget.on_error(error)
        with self._window.waiting(
            WaitingRequest(progress.num_unfinished, budget.without_router_since)
        ):
            await budget.backoff()
        if self._is_ending:
            raise errors.DrainingError(ENDED) from error
        name = progress.request.request_id
        logger.warning(
            "request %s is given to another router: %s",
            name or "-",
            error,
            extra=request_fields(name),
        )

    async def _run(self, call: PendingCall, encoded: bytes) -> None:
        """Find a router for a call, and wait until the router has done it, which may be before the
        last tokens arrive.
        """
        try:
            refusal = await self._submit(call, encoded)
        except Exception as error:  # of any kind: the client must get an answer
            name = call.request.request_id
            text, fields = "the call of request %s failed: %s", request_fields(name)
            logger.warning(text, name or "-", error, extra=fields)
            refusal = errors.PipelineError("the router is gone")
        if refusal is not None:
            call.put(refusal)
        elif call.number in self._streams.calls:
            if not call.is_accepted:
                call.accept()
            # the last tokens are on their way, unless the router has died since
            call.fail_after(LAST_TOKENS_TIMEOUT_S, errors.PipelineError("the router is gone"))

    async def _submit(self, call: PendingCall, encoded: bytes) -> errors.TramontaneError | None:
        """Ask one router after the other, and wait until the router that accepts the call is done;
        return the reason if all of them refuse it.
        """
        search = RouterSearch(self._refusals, call.request)
        num_unopened, only = Counter[str](), ""
        while True:
            outcome = await self._ask_router(call, encoded, search, only)
            if outcome == DONE:
                return None
            refusal, replica = wire.decode_error(outcome)
            is_unopened = isinstance(refusal, errors.StreamNotOpenError)
            if is_unopened and num_unopened[replica] < MAX_STREAM_ATTEMPTS:
                num_unopened[replica] += 1
                await self._streams.ensure(replica)
                only = replica
            elif is_unopened or isinstance(
                refusal, errors.PipelineUnavailableError | errors.OverloadedError
            ):
                if (reason := search.add(replica, refusal, had_choice=not only)) is not None:
                    return reason
                only = ""
            else:
                return refusal

    async def _ask_router(
        self, call: PendingCall, encoded: bytes, search: RouterSearch, only: str
    ) -> bytes:
        """Return the result of a router's ``generate``. ``only``: the router, if it is fixed."""
        refusing = self._streams.silent | search.refused.keys()
        with self._route(call.request, refusing, only) as constraint:
            method = self.queries.method(
                "generate", constraint, by_reference=len(encoded) > MAX_GRPC_BYTES
            )
            arguments = (
                self._streams.name,
                call.number,
                encoded,
                self._model_key,
                search.may_wait,
                self._write_interval_s(),
            )
            outcome: bytes = await cancellable(method.remote(*arguments))
            return outcome

    @contextmanager
    def _route(self, request: Request, refusing: Collection[str], only: str) -> Iterator[str]:
        """Choose a router for one call, unless it is given; yield the constraint, and release the
        choice at the call's end.
        """
        choice = self._routing.choose(request, refusing, only) if self._routing else None
        try:  # the chosen router may have stopped since its last digest
            yield ONLY + only if only else prefer(choice and choice.replica, refusing)
        finally:
            if self._routing and choice:
                self._routing.release(choice)

    async def health(self) -> PipelineHealth:
        """Return the best health of any pipeline. Raises DrainingError while this server is
        draining.
        """
        if self._is_draining:
            raise errors.DrainingError(DRAINING)
        return await self.queries.health()

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
        for call in self._streams.calls.values():
            call.put(errors.DrainingError(ENDED))

    def close(self) -> None:
        """Cancel all calls and streams."""
        self._tasks.cancel()
        self.queries.close()
