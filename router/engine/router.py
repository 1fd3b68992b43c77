"""The router: drives one pipeline.

``Router.run`` keeps the pipeline full: it has the scheduler make the next micro-batch, submits it
to the stages, and gives the sampled tokens of a result to the sinks of their requests.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from tramontane.proto.errors import (
    LeaseError,
    OverloadedError,
    PipelineError,
    PoisonRequestError,
    QueueFullError,
    RequestError,
)
from tramontane.proto.ports import DraftPort, StageChain
from tramontane.proto.request import (
    Request,
    RequestOutput,
    SequenceRequest,
    TokenEvent,
    fingerprint_output,
    request_fields,
    requests_fields,
)
from tramontane.proto.step import STEP_TIMEOUT_S, MicroBatch, StepResult
from tramontane.router.engine.active_request import ActiveRequest, QueueWaitTracker, Sink
from tramontane.router.engine.activity_log import ActivityLog
from tramontane.router.engine.health import HealthTracker, PipelineHealth
from tramontane.router.engine.in_flight import InFlightBatches
from tramontane.router.engine.request_output import OutputQueue
from tramontane.router.engine.stats import PageCounts, PipelineSnapshot, PipelineStats
from tramontane.router.scheduling.model_drafter import DraftQueue
from tramontane.router.scheduling.poison_detector import FailedBatch
from tramontane.router.scheduling.scheduler import Scheduler
from tramontane.router.scheduling.sequence import Sequence as LiveSequence

logger = logging.getLogger(__name__)

STALL_FACTOR = 2.0  # multiple of the time that a micro-batch may take
# after this number of poison requests in a row the pipeline itself counts as broken
MAX_CONSECUTIVE_POISON = 3


class Router:
    """Drives one pipeline. Requests make progress only while ``run`` is running."""

    def __init__(
        self,
        scheduler: Scheduler,
        chain: StageChain,
        observe: Callable[[StepResult], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        step_timeout_s: float = STEP_TIMEOUT_S,
        activity: ActivityLog | None = None,
        previous: HealthTracker | None = None,
        read_fingerprint: Callable[[], Awaitable[str]] | None = None,
    ) -> None:
        self.scheduler, self.chain = scheduler, chain
        self._observe = observe or (lambda _: None)
        self._clock = clock
        self._seq_ids = itertools.count()
        # by seq_id, for every sequence that has not finished
        self._requests: dict[int, ActiveRequest] = {}
        self._queue_waits = QueueWaitTracker(clock)
        self.wake = asyncio.Event()  # set where there may be something to submit
        self.stats = PipelineStats(chain.num_stages)
        self._in_flight = InFlightBatches(chain, step_timeout_s, clock, self.wake.set, self.stats)
        self.activity = activity or ActivityLog()
        self.health = HealthTracker(clock, previous)
        self.failure: PipelineError | None = None
        self._reported_loss: PipelineError | None = None  # see ``request_recovery``
        # the failure for which the stages are fenced again, and its micro-batch
        self._failed: tuple[PipelineError, FailedBatch] | None = None
        self._num_poison = 0  # poison requests since the last token of any request
        # fingerprint of the pipeline; "" while it is not known
        self._read_fingerprint, self.fingerprint = read_fingerprint, ""

    async def run(self) -> None:
        """Drive the pipeline until cancelled, or until it is lost permanently.

        After any other failure, requests wait: the stages are fenced again, and all live sequences
        are recomputed.
        """
        try:
            while True:
                epoch = await self.chain.fence()
                await self.refresh_fingerprint()  # a stage may have come back on another node
                self._blame_failure()
                self.scheduler.restart(epoch)
                self.health.on_fenced()
                logger.info(
                    "the stages accept epoch %d", self.scheduler.epoch, extra=self._log_fields()
                )
                try:
                    await self._run_steps()
                except LeaseError:
                    raise
                except PipelineError as error:
                    self._handle_step_failure(error)
        except PipelineError as error:
            self._fail(error)
        except Exception as error:  # a defect of the router must not leave clients waiting forever
            logger.exception("the router failed")
            self._fail(PipelineError(f"the router failed: {error!r}"))
        finally:
            self.health.is_fenced = False
            if self.failure is None:
                self._fail(PipelineError("the router has stopped"))
            self._in_flight.cancel_all()

    async def _run_steps(self) -> None:
        """Submit micro-batches and deliver their tokens. Raises PipelineError if a step fails or
        stages are lost.
        """
        hang_watch = asyncio.create_task(self._in_flight.watch_for_hang())
        hang_watch.add_done_callback(lambda _: self.wake.set())
        try:
            while True:
                while (batch := self.scheduler.schedule()) is not None:
                    self._queue_waits.record_starts(batch, self._requests)
                    self._in_flight.submit(batch)
                await self.wake.wait()
                self.wake.clear()
                if hang_watch.done():
                    raise hang_watch.result()  # raises the defect if one has ended the watch
                if self._reported_loss is not None:
                    raise self._reported_loss
                while (completed := self._in_flight.pop_completed()) is not None:
                    self._deliver(*completed)
        finally:
            hang_watch.cancel()

    def _deliver(self, batch: MicroBatch, result: StepResult) -> None:
        self.health.on_batch_done()
        if result.epoch == self.scheduler.epoch:
            self._buffer_extras(result)
        events = self.scheduler.complete(batch, result)
        result = result.with_tokens([event.token_id for event in events])
        self._observe(result)
        self.activity.record(batch, result)
        ready: dict[ActiveRequest, list[TokenEvent]] = {}
        for event in events:
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
        """Pass expert choices and log-probabilities to their requests; before the tokens, which may
        end a request.
        """
        for choices in result.expert_choices:
            if (request := self._requests.get(choices.seq_id)) is not None:  # else it was aborted
                request.add_experts(choices)
        for logprobs in result.logprobs:
            if (request := self._requests.get(logprobs.seq_id)) is not None:
                request.add_logprobs(logprobs)

    def _handle_step_failure(self, error: PipelineError) -> None:
        """Prepare for fencing the stages again."""
        logger.warning(
            "the pipeline failed, and its requests are computed again: %s",
            error,
            extra=self._log_fields(),
        )
        self.health.on_failure(str(error))
        self._reported_loss = None
        batch = self._in_flight.oldest
        self._failed = (error, self.scheduler.failed_batch(batch)) if batch else None
        self._in_flight.cancel_all()

    def _blame_failure(self) -> None:
        """Once the stages are fenced again, end the request that is certain to have caused the
        failure, if there is one.

        Whether a node has died is known only after the fence; if one has, no request is blamed.
        Raises PipelineError if several requests in a row seem to be the cause: the pipeline itself
        is broken.
        """
        last, self._failed = self._failed, None
        if (
            last is None
            or self.chain.has_lost_node
            or (seq_id := self.scheduler.record_failure(last[1])) is None
        ):
            return
        error = last[0]
        self._num_poison += 1
        if self._num_poison >= MAX_CONSECUTIVE_POISON:
            raise PipelineError(
                f"the pipeline failed with {self._num_poison} requests in a row: {error}"
            ) from error
        request = self._requests[seq_id]
        name, fields = request.request_id or "-", request_fields(request.request_id)
        logger.warning(
            "request %s has made the pipeline fail three times and is aborted", name, extra=fields
        )
        self.abort(request)
        request.sink(
            PoisonRequestError(
                f"this request has made the pipeline fail three times and is not retried: {error}"
            )
        )

    def _fail(self, error: PipelineError) -> None:
        """End every request with this error; later requests are refused with it."""
        self.failure = error
        for request in dict.fromkeys(self._requests.values()):
            # a new exception for each request: every raise extends an exception's traceback
            request.sink(PipelineError(str(error)))

    def request_recovery(self, error: PipelineError) -> None:
        """Fence the stages again: the caller has noticed that they have lost their sequences."""
        self._reported_loss = error
        self.wake.set()

    async def refresh_fingerprint(self) -> None:
        """Read the pipeline's fingerprint; if it has changed, requests get it before their next
        tokens.
        """
        if self._read_fingerprint is None:
            return
        before, self.fingerprint = self.fingerprint, await self._read_fingerprint()
        for request in (
            dict.fromkeys(self._requests.values()) if self.fingerprint not in ("", before) else ()
        ):
            request.sink(fingerprint_output(self.fingerprint))

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """See ``TokenSource``."""
        ready = OutputQueue()
        ready.put(fingerprint_output(self.fingerprint))
        active = self.submit(request, ready.put)
        try:
            num_unfinished = len(request.sequences)
            while num_unfinished:
                batch = await ready.get()
                num_unfinished -= sum(event.finish is not None for event in batch.events)
                yield batch
        finally:
            self.abort(active)

    def submit(self, request: Request, sink: Sink) -> ActiveRequest:
        """Queue a request, all of it or nothing. ``sink`` receives its tokens, or its failure.

        Raises RequestError if it could never run, OverloadedError if too much is waiting,
        PipelineError after a failure.
        """
        if self.failure is not None:
            raise PipelineError(str(self.failure)) from self.failure
        sequences = [self._new_sequence(request, each) for each in request.sequences]
        for sequence in sequences:
            sequence.request_number = sequences[0].seq_id
        # choices share their prompt
        for sequence in {id(s.prompt_ids): s for s in sequences}.values():
            self.scheduler.validate(sequence)
        if not request.was_accepted:
            self._check_overload(request, sequences)
        active = ActiveRequest(
            sequences,
            sink,
            self._clock(),
            counts_drafts=self.scheduler.limits.speculative is not None,
        )
        if self.scheduler.is_idle and self.health.is_fenced:
            self.health.record_progress()
        for sequence in sequences:
            self.scheduler.add(sequence)
            self._requests[sequence.seq_id] = active
        self.wake.set()
        return active

    def abort(self, request: ActiveRequest) -> None:
        """Release the slots and pages that the request still holds, if it has not finished."""
        for seq_id in request.index_of:
            if self._requests.pop(seq_id, None) is not None:
                self.scheduler.abort(seq_id)
                self.wake.set()

    def check_capacity(self, num_sequences: int, owner: int = 0) -> None:
        """See ``TokenSource``."""
        if self.scheduler.is_full(0, owner):
            raise QueueFullError("too much is waiting", self._retry_after_s(0))

    @property
    def is_ready(self) -> bool:
        """Whether a request that arrives now would be worked on at once."""
        return self.health.is_fenced and self.failure is None

    @property
    def is_attached(self) -> bool:
        """Whether the router drives a pipeline, even if it is being fenced again."""
        return self.health.has_begun and self.failure is None

    @property
    def is_healthy(self) -> bool:
        """Whether the router drives a pipeline, and has made progress recently or has no work."""
        if self.health.is_fenced and self.scheduler.is_idle:
            self.health.record_progress()
        return self.is_attached and self.health.progressed_within(STALL_FACTOR * self.step_limit_s)

    def pipeline_health(self) -> PipelineHealth:
        """Return whether a request that arrives now is worked on, and if not, why.

        ``GET /health`` needs no API key, so the reason has no text of an error, which may name
        folders and addresses; the log has it.
        """
        recovery = self.health.last_recovery if self.is_attached else None
        is_replacing = recovery is not None and not self.health.is_fenced
        since_s = self.health.now - recovery.seen_at if recovery and is_replacing else 0.0
        if not self.is_healthy:
            reason = (
                f"no micro-batch has come back within {STALL_FACTOR * self.step_limit_s:.0f} s"
                if self.is_attached
                else "the pipeline is being started"
            )
            return PipelineHealth("unavailable", reason, since_s)
        if self.is_ready:
            return PipelineHealth("ready")
        assert is_replacing  # it was fenced once, and is not now
        return PipelineHealth("degraded", "a stage is being replaced", since_s)

    @property
    def step_limit_s(self) -> float:
        """The time that a micro-batch may take now; see ``StepDeadline``."""
        return self._in_flight.step_limit_s

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(set(self._requests.values()))

    def snapshot(self) -> PipelineSnapshot:
        """Return the current state of this router and its scheduler. If it is read in another
        thread than the event loop's, the numbers may be of slightly different moments.
        """
        scheduler, allocator = self.scheduler, self.scheduler.allocator
        drafts, kinds = scheduler.draft_counts, allocator.cache.classes
        counts = zip(kinds, allocator.num_free, allocator.num_cached, strict=True)
        return PipelineSnapshot(
            epoch=scheduler.epoch,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            pages=tuple(PageCounts(each.window, each.num_pages, *rest) for each, *rest in counts),
            num_steps=scheduler.num_steps,
            num_preempted=scheduler.num_preempted,
            num_prefix_queries=allocator.num_queried,
            num_prefix_hits=allocator.num_hit,
            num_drafts=drafts.num_drafts,
            num_draft_tokens=drafts.num_draft_tokens,
            num_accepted_draft_tokens=drafts.num_accepted_tokens,
            num_recoveries=self.health.num_recoveries,
            paused_s=self.health.paused_s,
            policy_failure=scheduler.policy.failure,
        )

    def _new_sequence(self, request: Request, sequence: SequenceRequest) -> LiveSequence:
        limits, prompt_ids = self.scheduler.limits, sequence.prompt_ids
        return LiveSequence(
            next(self._seq_ids),
            prompt_ids,
            sequence.sampling,
            min(len(prompt_ids) + sequence.sampling.max_tokens, limits.max_model_len),
            request.priority,
            request.owner,
            request.request_id,
            cache_salt=limits.cache_salt(request.cache_salt),
            output_ids=list(sequence.output_ids),
            goes_first=bool(sequence.output_ids),
        )

    def _check_overload(self, request: Request, sequences: Sequence[LiveSequence]) -> None:
        if (reason := self.scheduler.overload_reason(sequences)) is None:
            return
        if self.scheduler.is_idle:  # waiting would not help
            raise RequestError(
                f"the request is too large for this server: {reason}; send less at once"
            )
        is_full = self.scheduler.is_full(request.priority, request.owner)
        kind = QueueFullError if is_full else OverloadedError
        raise kind(f"too much is waiting: {reason}", self._retry_after_s(request.priority))

    def _log_fields(self) -> dict[str, list[str]]:
        return requests_fields(request.request_id for request in self._requests.values())

    def _retry_after_s(self, priority: int) -> int:
        return self._queue_waits.retry_after_s(priority, self._requests.values())


# The calls to a draft model, one after the other, next to the micro-batches.

RETRY_S = 1.0  # wait after a call that has failed


async def run_draft_model(
    model: DraftPort, queue: DraftQueue, on_drafts: Callable[[], None]
) -> None:
    """Get drafts for the sequences of the queue until cancelled; ``on_drafts`` is called whenever
    drafts have come.

    Sequences do not need drafts, so an error is logged, and the model is called again. The model
    then counts as having lost all sequences.
    """
    requested = asyncio.Event()
    queue.on_request = requested.set
    while True:
        await requested.wait()
        requested.clear()
        drafters, ended = queue.take()
        try:
            answers = await model.draft([drafter.request() for drafter in drafters], ended)
            if len(answers) != len(drafters):
                raise PipelineError(
                    f"the draft model has answered {len(answers)} of {len(drafters)} requests"
                )
        except Exception as error:  # also a defect: requests are answered without drafts
            is_expected = isinstance(error, PipelineError)
            logger.warning(
                "The draft model failed, and is called again in %g s: %s",
                RETRY_S,
                error,
                exc_info=not is_expected,
            )
            await asyncio.sleep(RETRY_S)
            answers = [None] * len(drafters)
        for drafter, drafts in zip(drafters, answers, strict=True):
            drafter.receive(drafts)
        on_drafts()


async def run_with_drafts(router: Router, model: DraftPort | None) -> None:
    """Run a router, and next to it the calls to its draft model, if it has one."""
    if model is None:
        await router.run()
        return
    drafting = asyncio.create_task(
        run_draft_model(model, router.scheduler.draft_queue, router.wake.set)
    )
    try:
        await router.run()
    finally:
        drafting.cancel()
