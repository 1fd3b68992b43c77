"""The loop: keep the pipeline full, hand tokens out as they come."""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from tramontane.proto.errors import LeaseError, OverloadedError, PipelineError, PoisonRequestError, QueueFullError, RequestError
from tramontane.proto.ports import StageChain
from tramontane.proto.request import RequestOutput, SequenceRequest, TokenEvent
from tramontane.proto.step import MicroBatch, StepResult
from tramontane.router.engine.active_request import ActiveRequest, QueueWaitTracker, Sink, requests_log_fields
from tramontane.router.engine.activity_log import ActivityLog
from tramontane.router.engine.health import HealthTracker
from tramontane.router.engine.in_flight import InFlightBatches
from tramontane.router.engine.pipeline_stats import PipelineStats
from tramontane.router.engine.token_queue import OutputQueue
from tramontane.router.scheduling.scheduler import Scheduler
from tramontane.router.scheduling.sequence import Sequence as LiveSequence

logger = logging.getLogger(__name__)

STEP_TIMEOUT_S = 30.0
STALL_FACTOR = 2.0  # times what a micro-batch may take
MAX_CONSECUTIVE_POISON = 3  # against one request after the other; then it is the pipeline that is broken


class Router:
    """Drives one pipeline. ``run`` must be running for requests to get anywhere."""

    def __init__(
        self,
        scheduler: Scheduler,
        chain: StageChain,
        observe: Callable[[StepResult], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        step_timeout_s: float = STEP_TIMEOUT_S,
        activity: ActivityLog | None = None,
        previous: HealthTracker | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.chain = chain
        self._observe = observe
        self._clock = clock
        self._requests: dict[int, ActiveRequest] = {}  # by seq_id, for every sequence that has not finished
        self._wake = asyncio.Event()
        self.stats = PipelineStats(chain.num_stages)
        self._in_flight = InFlightBatches(chain, step_timeout_s, clock, self._wake.set, self.stats)
        self._seq_ids = itertools.count()
        self._queue_waits = QueueWaitTracker(clock)
        self.failure: PipelineError | None = None
        self.health = HealthTracker(clock, previous)
        self.activity = activity or ActivityLog()
        self._num_poison = 0  # against requests, since the last token of any
        self._reported_loss: PipelineError | None = None  # that somebody else has seen

    async def generate(self, specs: Sequence[SequenceRequest]) -> AsyncGenerator[RequestOutput, None]:
        """See ``TokenSource``."""
        ready = OutputQueue()
        request = self.submit(specs, ready.put)
        try:
            num_unfinished = len(specs)
            while num_unfinished:
                batch = await ready.get()
                num_unfinished -= sum(event.finish is not None for event in batch.events)
                yield batch
        finally:
            self.abort(request)

    def check_capacity(self, num_sequences: int, owner: int = 0) -> None:
        """See ``TokenSource``."""
        if self.scheduler.is_full(0, owner):
            raise QueueFullError("too much is waiting", self._retry_after_s(0))

    def submit(self, specs: Sequence[SequenceRequest], sink: Sink) -> ActiveRequest:
        """Queue a request, all of it or nothing. ``sink`` hears of its tokens, or of its failure.

        Raises RequestError if it could never run, OverloadedError if too much is waiting.
        """
        assert specs
        if self.failure is not None:
            raise PipelineError(str(self.failure)) from self.failure
        sequences = [self._sequence(spec) for spec in specs]
        for sequence in {id(s.prompt_ids): s for s in sequences}.values():  # choices share their prompt
            self.scheduler.validate(sequence)
        had_place = any(spec.already_admitted or spec.output_ids for spec in specs)  # with another router: it must not lose it
        if not had_place and (reason := self.scheduler.overload_reason(sequences)) is not None:
            if self.scheduler.is_idle:  # it will never be otherwise
                raise RequestError(f"the request is too large for this server: {reason}; send less at once")
            kind = QueueFullError if self.scheduler.is_full(specs[0].priority, specs[0].owner) else OverloadedError
            raise kind(f"too much is waiting: {reason}", self._retry_after_s(specs[0].priority))
        request = ActiveRequest(sequences, sink, self._clock())
        if self.scheduler.is_idle and self.health.is_fenced:
            self.health.record_progress()
        for sequence in sequences:
            self.scheduler.add(sequence)
            self._requests[sequence.seq_id] = request
        self._wake.set()
        return request

    def abort(self, request: ActiveRequest) -> None:
        """Give back what the request still holds; harmless if it has finished."""
        for seq_id in request.index_of:
            if self._requests.pop(seq_id, None) is not None:
                self.scheduler.abort(seq_id)
                self._wake.set()

    @property
    def is_ready(self) -> bool:
        """Whether a request that came now would be worked on at once."""
        return self.health.is_fenced and self.failure is None

    @property
    def is_attached(self) -> bool:
        """Whether it drives a pipeline, be it one that is just being fenced anew."""
        return self.health.has_begun and self.failure is None

    @property
    def is_healthy(self) -> bool:
        """Whether it drives a pipeline, and something was done of late, or there was nothing to do."""
        if self.health.is_fenced and self.scheduler.is_idle:
            self.health.record_progress()
        return self.is_attached and self.health.progressed_within(STALL_FACTOR * self.step_limit_s)

    @property
    def step_limit_s(self) -> float:
        """See ``InFlightBatches``."""
        return self._in_flight.step_limit_s

    @property
    def num_requests(self) -> int:
        return len(set(self._requests.values()))

    def _retry_after_s(self, priority: int) -> int:
        return self._queue_waits.retry_after_s(priority, self._requests.values())

    async def run(self) -> None:
        """Submit and collect until cancelled, or until the pipeline is lost for good.

        What else fails makes requests wait only: the stages are fenced anew, and all that was alive is computed again.
        """
        try:
            while True:
                self.scheduler.restart(await self.chain.fence())
                self.health.on_fenced()
                logger.info("the stages obey epoch %d", self.scheduler.epoch, extra=requests_log_fields(self._requests))
                try:
                    await self._drive()
                except LeaseError:
                    raise
                except PipelineError as error:
                    self._handle_step_failure(error)
        except PipelineError as error:
            self._fail(error)
        except Exception as error:  # a defect of ours must not leave clients waiting for ever
            logger.exception("the router failed")
            self._fail(PipelineError(f"the router failed: {error!r}"))
        finally:
            self.health.is_fenced = False
            if self.failure is None:
                self._fail(PipelineError("the router has stopped"))
            self._in_flight.cancel_all()

    async def _drive(self) -> None:
        """Raises PipelineError where a step fails, or the stages are said to have been lost."""
        watching = asyncio.create_task(self._in_flight.watch_for_hang())
        watching.add_done_callback(lambda _: self._wake.set())
        try:
            while True:
                self._submit()
                await self._wake.wait()
                self._wake.clear()
                if watching.done():
                    raise watching.result()  # or its defect, which must not end the watch unheard
                if self._reported_loss is not None:
                    raise self._reported_loss
                self._collect()
        finally:
            watching.cancel()

    def _handle_step_failure(self, error: PipelineError) -> None:
        """Of a pipeline that is about to be fenced anew. A request that has made it fail twice is not tried again."""
        logger.warning(
            "the pipeline failed, and goes on with what was running: %s", error, extra=requests_log_fields(self._requests)
        )
        self.health.on_failure(str(error))
        self._reported_loss = None
        if (batch := self._in_flight.oldest) and (seq_id := self.scheduler.record_failure(batch)) is not None:
            self._num_poison += 1
            if self._num_poison >= MAX_CONSECUTIVE_POISON:
                raise PipelineError(f"the pipeline fails whatever it is given: {error}") from error
            request = self._requests[seq_id]
            logger.warning("request %s has made it fail twice, and ends", request.request_id or "-", extra=request.log_fields)
            self.abort(request)
            request.sink(PoisonRequestError(f"this request has made the pipeline fail twice, and is not tried again: {error}"))
        self._in_flight.cancel_all()

    def _sequence(self, spec: SequenceRequest) -> LiveSequence:
        max_len = min(len(spec.prompt_ids) + spec.sampling.max_tokens, self.scheduler.limits.max_model_len)
        fields = next(self._seq_ids), spec.prompt_ids, spec.sampling, max_len, spec.priority, spec.owner, spec.request_id
        sequence = LiveSequence(*fields, output_ids=list(spec.output_ids))
        sequence.was_scheduled = bool(spec.output_ids)
        return sequence

    def _submit(self) -> None:
        while (batch := self.scheduler.schedule()) is not None:
            self._queue_waits.record_starts(batch, self._requests)
            self._in_flight.submit(batch)

    def _collect(self) -> None:
        while (done := self._in_flight.pop_completed()) is not None:
            self.health.on_batch_done()
            self._deliver(*done)

    def _deliver(self, batch: MicroBatch, result: StepResult) -> None:
        if self._observe is not None:
            self._observe(result)
        self.activity.record(batch, result)
        if result.epoch == self.scheduler.epoch:
            self._buffer_extras(result)
        ready: dict[ActiveRequest, list[TokenEvent]] = {}
        for event in self.scheduler.complete(batch, result):
            take = self._requests.pop if event.finish else self._requests.__getitem__
            ready.setdefault(take(event.seq_id), []).append(event)
        if ready:
            self._num_poison = 0
            self.health.on_tokens()
        now = self._clock()
        self.activity.record_tokens(ready, now)
        for request, events in ready.items():
            request.deliver(events, now)

    def _buffer_extras(self, result: StepResult) -> None:
        """Before the tokens: what ends with one of them is forgotten."""
        for choices in result.expert_choices:
            if (request := self._requests.get(choices.seq_id)) is not None:  # else its client has left
                request.add_experts(choices)
        for logprobs in result.logprobs:
            if (request := self._requests.get(logprobs.seq_id)) is not None:
                request.add_logprobs(logprobs)

    def request_recovery(self, error: PipelineError) -> None:
        """Somebody else has seen that the stages have forgotten what they had: fence them anew."""
        self._reported_loss = error
        self._wake.set()

    def _fail(self, error: PipelineError) -> None:
        """Every request that is alive ends with the reason, and so does every later one."""
        self.failure = error
        for request in dict.fromkeys(self._requests.values()):
            request.sink(PipelineError(str(error)))  # its own: every raise grows an exception's traceback
