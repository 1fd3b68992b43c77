"""An ingress's side of the routers: the calls that hand requests over, and the streams by which they answer."""

import asyncio
import itertools
import logging
import math
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, cast

from ray.serve.handle import DeploymentHandle

from tramontane.cluster.observability.logging import request_context
from tramontane.cluster.serving.least_loaded_router import ONLY, exclude
from tramontane.cluster.serving.retry_policy import AdmissionWindow, FailoverBudget, WaitingRequest, most_useful_error
from tramontane.cluster.serving.router_queries import RouterQueries, cancellable
from tramontane.cluster.serving.token_channel import ACCEPTED, DONE, KEEPALIVE, SILENT_S, model_key, with_idle_timeout
from tramontane.proto import wire
from tramontane.proto.errors import (
    DrainingError,
    OverloadedError,
    PipelineError,
    PipelineUnavailableError,
    QueueFullError,
    RouterLostError,
    StreamNotOpenError,
    TramontaneError,
)
from tramontane.proto.log_fields import request_fields
from tramontane.proto.request import RequestOutput, SequenceRequest
from tramontane.router.engine.resumable_request import ResumableRequest
from tramontane.router.engine.token_queue import OutputQueue

MAX_ATTEMPTS = 10
MAX_GRPC_BYTES = 2**20  # what is larger goes through the object store; Ray Serve's gRPC takes 4 MiB
ANSWERED_WITHIN_S = 10.0  # a router that was given a request says at once whether it takes it, unless its machine is gone
AVOIDED_FOR_S = 30.0  # a router that has fallen silent, if there are others: it would seem to have least to do
LAST_TOKENS_S = 10.0
DRAINING = "the server is draining: it finishes what it has begun and takes nothing new; ask another one, or come back later"
ENDED = "the server has stopped before this request ended; send it again"

logger = logging.getLogger(__name__)


class RouterClient(RouterQueries):
    """The routers behind a Ray Serve handle, as one ``TokenSource``.

    ``max_unaccepted``: see ``AdmissionWindow``.
    ``stays_s``: how long a router that is to stop may finish what it has; what is longer goes on with another one.
    ``model``: what token ids are of, as ``short_digest`` has it. ``node``: ours, by Ray's id.
    """

    def __init__(
        self,
        handle: "DeploymentHandle[Any]",
        max_unaccepted: int,
        handover_grace_s: float = math.inf,
        model: str = "",
        node: str = "",
    ) -> None:
        super().__init__(handle)
        self._room, self._stays_s, self._meant_for = AdmissionWindow(max_unaccepted), handover_grace_s, model_key(model)
        self._node = node
        self._name = self._new_name()
        self._numbers = itertools.count()
        self._mailboxes: dict[int, OutputQueue] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._is_draining = self._is_ending = False
        self._num_requests = 0
        self._silent: set[str] = set()  # replicas
        self._tasks: set[asyncio.Task[None]] = set()  # calls and streams
        self._streams_of: dict[int, tuple[str, str]] = {}  # which of them answers, by request
        self._streams: dict[tuple[str, str], asyncio.Event] = {}  # set once open; by our name and the replica's

    @property
    def num_requests(self) -> int:
        return self._num_requests

    def check_capacity(self, num_sequences: int, owner: int = 0) -> None:
        """See ``TokenSource``."""
        if self._is_draining:
            raise DrainingError(DRAINING)
        self._room.check(num_sequences, owner)

    async def generate(self, specs: Sequence[SequenceRequest]) -> AsyncGenerator[RequestOutput, None]:
        """See ``TokenSource``."""
        so_far = ResumableRequest(specs)
        if not so_far.was_accepted:  # by way of another door
            self.check_capacity(len(specs), specs[0].owner)
        self._num_requests += 1
        try:
            async with aclosing(self._generate_with_failover(so_far, specs[0])) as batches:
                async for batch in batches:
                    yield batch
        finally:
            self._num_requests -= 1

    async def _generate_with_failover(
        self, so_far: ResumableRequest, first: SequenceRequest
    ) -> AsyncGenerator[RequestOutput, None]:
        """Of one router after the other, where one is lost."""
        patience = FailoverBudget(was_accepted=so_far.was_accepted)
        while not so_far.is_complete:
            try:
                async with aclosing(self._generate_on_one(so_far.remaining_specs(), patience.since)) as batches:
                    async for batch in batches:
                        patience.reset()
                        yield so_far.record(batch)
            except (PipelineError, OverloadedError) as error:
                if isinstance(error, QueueFullError):
                    self._room.mark_full(first.owner, error)
                so_far.was_accepted |= isinstance(error, RouterLostError)
                patience.on_error(error)
                with self._room.waiting(WaitingRequest(so_far.num_unfinished, patience.since)):
                    await patience.backoff()
                if self._is_ending:
                    raise DrainingError(ENDED) from error
                own_id = first.request_id
                logger.warning("request %s is given to another router: %s", own_id or "-", error, extra=request_fields(own_id))

    async def _generate_on_one(self, specs: Sequence[SequenceRequest], since: float) -> AsyncGenerator[RequestOutput, None]:
        """As ``generate``, but of one router. Raises RouterLostError if that had accepted the request, and fails.

        ``since``: when the request was left without a router, by the event loop's clock.
        """
        number, encoded = next(self._numbers), wire.encode_specs(specs)
        mailbox = self._mailboxes[number] = OutputQueue()
        self._room.unaccepted[number] = WaitingRequest(len(specs), since)
        own_id = specs[0].request_id
        call = self._start(self._call(number, encoded, mailbox, own_id), own_id)
        self._arm_timeout(ANSWERED_WITHIN_S, number, PipelineError("no router has answered in time"))
        num_unfinished = len(specs)
        try:
            while num_unfinished:
                batch = await mailbox.get()
                num_unfinished -= sum(event.finish is not None for event in batch.events)
                yield batch
        except PipelineError as error:
            raise error if number in self._room.unaccepted else RouterLostError(str(error)) from None
        finally:
            self._timers.pop(number).cancel()
            del self._mailboxes[number]
            self._streams_of.pop(number, None)
            self._room.on_request_end(number)
            if num_unfinished:
                call.cancel()

    def _arm_timeout(self, seconds: float, number: int, error: TramontaneError) -> None:
        """What ends the request if nothing else happens until then. There is one such thing at a time."""
        if number in self._timers:
            self._timers[number].cancel()
        self._timers[number] = asyncio.get_running_loop().call_later(seconds, self._mailboxes[number].put, error)

    async def is_ready(self) -> bool:
        """Whether any router can make tokens now. Raises DrainingError where none is to be asked for."""
        if self._is_draining:
            raise DrainingError(DRAINING)
        return await super().is_ready()

    def drain(self) -> int:
        """Take no more requests; returns how many have not ended."""
        self._is_draining = True
        return self.num_requests

    def resume(self) -> None:
        """Take requests again."""
        self._is_draining = False

    def end_all(self) -> None:
        """What has not ended ends with the reason."""
        self._is_ending = True
        for mailbox in self._mailboxes.values():
            mailbox.put(DrainingError(ENDED))

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _call(self, number: int, specs: bytes, mailbox: OutputQueue, own_id: str) -> None:
        """Lasts as long as a router works on the request. Its end and the last tokens come in any order."""
        try:
            refusal = await self._submit(number, specs)
        except Exception as error:  # whatever it is, the client must hear of it
            logger.warning("the call of request %s failed: %s", own_id or "-", error, extra=request_fields(own_id))
            refusal = PipelineError("the router is gone")
        if refusal is not None:
            mailbox.put(refusal)
        elif number in self._timers:  # the last tokens are on their way, unless the router has died since
            self._room.unaccepted.pop(number, None)
            self._arm_timeout(LAST_TOKENS_S, number, PipelineError("the router is gone"))

    async def _submit(self, number: int, specs: bytes) -> TramontaneError | None:
        """Find a router that takes the request, and wait until it is done; or else the reason why none did."""
        wish = exclude(self._silent)
        refused: dict[str, TramontaneError] = {}  # by replica
        refusal: TramontaneError | None = None
        for _ in range(MAX_ATTEMPTS):
            method = self._method("generate", wish, by_reference=len(specs) > MAX_GRPC_BYTES)
            outcome: bytes = await cancellable(method.remote(self._name, number, specs, self._meant_for))
            if outcome == DONE:
                return None
            refusal, replica = wire.decode_error(outcome)
            match refusal:
                case StreamNotOpenError():
                    await self._ensure_stream(replica)
                    wish = ONLY + replica
                case PipelineUnavailableError() | OverloadedError() if replica not in refused:
                    refused[replica] = refusal
                    wish = exclude(refused)
                case (
                    PipelineUnavailableError() | OverloadedError()
                ):  # there is no other; one that is only full says when to come back
                    return most_useful_error(refused.values())
                case _:
                    return refusal
        return refusal

    async def _ensure_stream(self, replica: str) -> None:
        """A router takes requests once it has a stream to answer by.

        The stream is nobody's but this object's: the client for whom it is opened may leave.
        """
        ends = self._name, replica
        if ends not in self._streams:
            self._streams[ends] = asyncio.Event()
            self._start(self._listen(*ends))
        await self._streams[ends].wait()

    async def _listen(self, name: str, replica: str) -> None:
        """``name`` is the one under which the stream was opened."""
        opened, moving = self._streams[name, replica], self._start(self._hand_over((name, replica)))
        call = self._method("subscribe", ONLY + replica, stream=True)
        try:
            async for message in with_idle_timeout(cast("AsyncIterable[bytes]", call.remote(name, replica)), SILENT_S):
                opened.set()
                for number, what in wire.decode_outputs(message) if message != KEEPALIVE else ():
                    self._deliver(number, what, (name, replica))
        except Exception as error:  # of Ray, Ray Serve or gRPC
            logger.warning("the stream from router %s broke: %s", replica, error or "nothing came any more")
            if isinstance(error, TimeoutError):
                self._silent.add(replica)
                asyncio.get_running_loop().call_later(AVOIDED_FOR_S, self._silent.discard, replica)
            lost = [number for number, ends in self._streams_of.items() if ends == (name, replica)]
            for number in (*lost, *self._room.unaccepted):  # of these, any may have been accepted without our hearing of it
                self._mailboxes[number].put(PipelineError("the stream from the router broke"))
            if self._name == name:  # if it is not, it believes in this stream; under another name it will ask for a new one
                self._name = self._new_name()
        finally:
            moving.cancel()
            del self._streams[name, replica]
            opened.set()

    def _new_name(self) -> str:
        return f"{self._node}/{uuid.uuid4().hex}"

    async def _hand_over(self, stream: tuple[str, str]) -> None:
        """A router that is about to be stopped loses what it still has to another one."""
        await self._wait_until_retiring(stream[1], self._stays_s)
        for number, ends in self._streams_of.items():
            if ends == stream:
                self._mailboxes[number].put(PipelineError("the router is about to be stopped"))

    def _deliver(self, number: int, what: RequestOutput | TramontaneError, stream: tuple[str, str]) -> None:
        mailbox = self._mailboxes.get(number)
        if self._room.unaccepted.pop(number, None) is not None:
            self._timers[number].cancel()
            self._streams_of[number] = stream
        if mailbox is not None and what != ACCEPTED:  # else its client has left, or only knows now that it may wait
            mailbox.put(what)

    def _start(self, work: Coroutine[Any, Any, None], request_id: str = "") -> asyncio.Task[None]:
        """Of no request of Ray Serve's, which it would cancel with that; but what it calls has this name."""
        task = asyncio.create_task(work, context=request_context(request_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
