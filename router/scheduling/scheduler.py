"""The scheduler: which tokens go into the next micro-batch. Pure: no torch, Ray, clock or I/O."""

import logging
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from itertools import repeat
from typing import NamedTuple

from tramontane.proto.plan import CachePlan
from tramontane.proto.request import (
    NOT_FINITE_TOKEN,
    NUM_PRIORITIES,
    FinishReason,
    TokenEvent,
    request_fields,
)
from tramontane.proto.step import Chunk, MicroBatch, StepResult
from tramontane.router.scheduling.decode_queue import DecodeQueue, DecodeRows, DraftLimits
from tramontane.router.scheduling.fair_shares import FairShares
from tramontane.router.scheduling.poison_detector import FailedBatch, PoisonDetector, position_spans
from tramontane.router.scheduling.policy import (
    NO_BUDGET,
    BatchBudget,
    BatchWork,
    GuardedPolicy,
    Policy,
    SchedulerState,
    WorkEstimator,
)
from tramontane.router.scheduling.prefill_queue import PrefillQueue, urgent_tokens
from tramontane.router.scheduling.running_set import PipelineLoad, RunningSet, measure_load
from tramontane.router.scheduling.sequence import Accepted, Sequence, SequenceStatus, end_ids
from tramontane.router.scheduling.speculation_state import DraftCounts
from tramontane.router.scheduling.waiting_queue import (
    SchedulerLimits,
    WaitingQueue,
    age_starved,
    is_full,
    overload_reason,
    validate_sequence,
)

logger = logging.getLogger(__name__)

# Looked up hundreds of times in a step: an attribute access on the class takes four times as long.
WAITING, RUNNING, PREEMPTED, FINISHED = SequenceStatus
Finished = Mapping[int, FinishReason]  # why the stage ends sequences, by their ids


class InFlight(NamedTuple):
    """A micro-batch in flight."""

    budget: BatchBudget
    work: BatchWork
    rows: DecodeRows


class Scheduler:
    """Chunked prefill and decode in one micro-batch, with several micro-batches in flight.

    The policy decides how much of each. A decode token waits for its predecessor; the next chunk of
    a prompt need not. Sequences are admitted by priority and fair queueing (``waiting_queue.py``),
    and prefilled by priority and fair shares (``PrefillQueue``); both charge the same accounts, one
    per key, or per request without keys. A preempted sequence waits again; its prompt and its
    output so far are then computed as one prompt.

    * Where no slot or too few pages are free for a sequence, less urgent ones are preempted.
    * Where pages run out, which happens only in layers without a window, the least urgent, youngest
      sequence is preempted.
    * A sequence that is passed over too often becomes as urgent as any (``age_starved``).
    * With speculation, a decode token brings drafts of the next tokens where the policy finds them
      worth their rows. Further drafts follow in micro-batches of their own, before the results are
      known, while stages are idle.
    """

    def __init__(
        self, cache: CachePlan, limits: SchedulerLimits, policy: Policy, epoch: int = 0
    ) -> None:
        self.limits = limits
        self.policy = GuardedPolicy(policy, limits.max_num_batched_tokens)
        self.epoch = epoch
        self._work_estimator = WorkEstimator(
            [limits.max_model_len if c.window is None else c.window for c in cache.classes]
        )
        self._shares = [FairShares() for _ in range(NUM_PRIORITIES)]
        self._waiting = WaitingQueue(self._shares)
        self._running = RunningSet(cache, limits.max_num_seqs, limits.enable_prefix_caching)
        self.allocator = self._running.allocator
        self._prefills = PrefillQueue(self.allocator, self._shares, policy.overlaps_chunks)
        self._decodes = DecodeQueue(self.allocator, self._work_estimator, limits.speculative)
        self._poison_detector = PoisonDetector()
        # sequences that ended since the last micro-batch; stages drop them with the next
        self._freed: list[int] = []
        self._next_step = 0
        self._in_flight: deque[InFlight] = deque()
        self._num_lookahead = 0  # micro-batches in flight with drafts only
        self.num_preempted = 0  # preemptions so far
        self.draft_counts = DraftCounts()
        self.draft_queue = self._decodes.draft_queue  # of sequences that wait for a draft model

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, and admit it if possible. Raises RequestError if it could never run."""
        self.validate(sequence)
        sequence.end_ids = end_ids(sequence.sampling, self.limits.eos_token_ids)
        if sequence.owner:
            self._prefills.charge_decodes(self._running.by_id.values())
        self._waiting.push(sequence)
        self._admit()

    def schedule(self) -> MicroBatch | None:
        """Return the next micro-batch, or None if nothing can be submitted now."""
        self.allocator.register_written()
        has_turn = not self._prefills.is_sorted or (
            self._waiting and len(self._running) < self.limits.max_num_seqs
        )
        if has_turn and any(shares.is_contended for shares in self._shares):
            self._prefills.charge_decodes(self._running.by_id.values())
        self._admit()
        state = self._state()
        budget = self.policy.choose_budget(state)
        return (budget and self._next_batch(budget, state)) or self._lookahead_batch(state)

    def _next_batch(self, budget: BatchBudget, state: SchedulerState) -> MicroBatch | None:
        """Return a micro-batch of this budget, or None if nothing can be submitted now."""
        limits = None
        if self.limits.speculative:
            limits = self._draft_limits(self.policy.draft_break_even(state))
        with_lookahead = self.limits.async_scheduling and not self._prefills.must_yield
        rows = self._decodes.take_batch(
            budget.decodes, self._preempt_last, limits, with_lookahead=with_lookahead
        )
        chunks = self._prefills.take_chunks(
            min(budget.prefill_tokens, self.limits.max_num_batched_tokens - rows.num_rows)
        )
        if not rows.sequences and not chunks:
            return None
        if chunks:
            # single tokens last, next to the decodes
            chunks.sort(key=lambda chunk: chunk.num_tokens == 1)
            begun = [self._running.by_id[c.seq_id] for c in chunks]
            age_starved(begun, self._waiting, self._prefills, self._running)
        batch = self._make_batch(budget, chunks, rows)
        if with_lookahead:
            sampled = [self._running.by_id[c.seq_id] for c in chunks if c.needs_sample]
            self._decodes.add_placeholders([*rows.sequences, *sampled])
        return batch

    def _lookahead_batch(self, state: SchedulerState) -> MicroBatch | None:
        """Return a micro-batch of drafts only if any are worth it and stages would otherwise
        wait.
        """
        if self.limits.speculative is None or self._decodes.ready:
            return None
        if (break_even := self.policy.lookahead_break_even(state)) >= 1:
            return None
        limits = self._draft_limits(break_even)
        rows = self._decodes.take_lookahead(self._running.by_id.values(), limits)
        if not rows.sequences:
            return None
        self._num_lookahead += 1
        return self._make_batch(NO_BUDGET, [], rows)

    def _make_batch(self, budget: BatchBudget, chunks: list[Chunk], rows: DecodeRows) -> MicroBatch:
        batch = MicroBatch(
            self.epoch, self._next_step, tuple(chunks), tuple(self._freed), rows.columns()
        )
        self._freed.clear()
        self._next_step += 1
        self._in_flight.append(InFlight(budget, self.measure_work(batch), rows))
        return batch

    def complete(self, batch: MicroBatch, result: StepResult) -> list[TokenEvent]:
        """Apply a result unless its epoch is over; return one event per token of a sequence that
        has not ended.
        """
        if result.epoch != self.epoch:
            return []
        assert result.step_id == batch.step_id
        budget, work, rows = self._in_flight.popleft()
        self.policy.observe(budget, work, result.timings)
        token_ids, finished = iter(result.token_ids), dict(result.finished)
        accepted: list[Accepted] = []
        for chunk in batch.chunks:
            sampled = (next(token_ids),) if chunk.needs_sample else ()
            sequence = self._running.by_id[chunk.seq_id]
            accepted += self._apply(sequence, sampled, finished.get(chunk.seq_id))
        # drafts of these rows, or in flight in another micro-batch
        if rows.num_drafts or self._num_lookahead:
            accepted += self._apply_drafted(rows, token_ids, finished)
        else:
            accepted += self._apply_decodes(rows.sequences, token_ids, finished)
        self._num_lookahead -= rows.is_lookahead
        # half the time of calling TokenEvent
        return list(map(tuple.__new__, repeat(TokenEvent), accepted))

    def _apply_decodes(
        self, decoding: list[Sequence], token_ids: Iterator[int], finished: Finished
    ) -> list[Accepted]:
        """Apply one token per decoding sequence; the most frequent branch is inlined."""
        accepted: list[Accepted] = []
        lengths = []  # of sequences that continue
        ready = self._decodes.ready
        for sequence, token_id in zip(decoding, token_ids, strict=True):
            num_known = sequence.num_known + 1
            continues = (
                num_known < sequence.max_len
                and token_id not in sequence.end_ids
                and sequence.seq_id not in finished
            )
            if continues and sequence.status is RUNNING:
                sequence.num_in_flight -= 1
                sequence.output_ids.append(token_id)
                sequence.num_known = num_known
                lengths.append(num_known)
                if sequence.num_placeholders:  # it became ready when this step was submitted
                    sequence.num_placeholders -= 1
                else:
                    ready.append(sequence)
                accepted.append((sequence.seq_id, token_id, None))
            else:
                accepted += self._apply(sequence, (token_id,), finished.get(sequence.seq_id))
        self._decodes.record_growth(lengths)
        return accepted

    def _apply_drafted(
        self, rows: DecodeRows, token_ids: Iterator[int], finished: Finished
    ) -> list[Accepted]:
        """Apply the tokens of sequences with several rows: the later rows are drafts, or all
        (``is_lookahead``).
        """
        accepted: list[Accepted] = []
        num_known = 0 if rows.is_lookahead else 1  # rows of each sequence that are not drafts
        for sequence, num_drafts, tokens in rows.split(token_ids):
            self.draft_counts.add(num_drafts, len(tokens) - num_known)
            own = self._apply(sequence, tokens, finished.get(sequence.seq_id))
            sequence.num_draft_tokens += num_drafts
            if own:  # drafts after the end are rejected
                sequence.num_accepted_draft_tokens += min(len(tokens), len(own) + 1) - num_known
            accepted += own
        return accepted

    def _apply(
        self, sequence: Sequence, token_ids: tuple[int, ...], finish: FinishReason | None
    ) -> list[Accepted]:
        """Apply a sequence's part of a result: its sampled tokens, and the stage's reason to end it
        after them, if any.

        A sequence ends without a token where log-probabilities of its prompt are not finite.
        """
        sequence.num_in_flight -= 1
        if finish is FinishReason.ERROR and not token_ids:
            token_ids = (NOT_FINITE_TOKEN,)
        accepted: list[Accepted] = []
        if token_ids and sequence.status is not FINISHED:
            accepted = self._accept(sequence, token_ids, finish)
        if sequence.status is not RUNNING:
            self._release_if_drained(sequence)
        return accepted

    def _accept(
        self, sequence: Sequence, token_ids: tuple[int, ...], finish: FinishReason | None
    ) -> list[Accepted]:
        """Accept tokens up to the first that ends the sequence, and queue it for its next one."""
        num_known = sequence.num_known
        accepted = sequence.accept_tokens(token_ids, finish)
        if sequence.is_decoding:
            self._decodes.record_growth(range(num_known + 1, sequence.num_known + 1))
        _, last_id, reason = accepted[-1]
        if last_id == NOT_FINITE_TOKEN:
            self._end_with_error(sequence)
            return accepted
        if reason is not None:
            self._deschedule(sequence, FINISHED)
        state = sequence.speculation  # None once it is descheduled
        is_submitted = state is not None and state.update(sequence.output_ids)
        # right drafts have been computed, or will be
        sequence.num_dispatched += len(accepted) if is_submitted else len(accepted) - 1
        if sequence.num_placeholders:
            sequence.num_placeholders -= 1
        elif sequence.status is RUNNING and not is_submitted:
            self._decodes.add(sequence)
        if self._poison_detector.clear(sequence):
            self._deschedule(sequence, PREEMPTED)
        return accepted

    def _end_with_error(self, sequence: Sequence) -> None:
        """End a sequence whose next token's logits are not finite, and remove its pages from the
        prefix cache.
        """
        name, fields = sequence.request_id or "-", request_fields(sequence.request_id)
        why = (
            "a sequence of request %s ends with an error: the logits of its token at position %d"
            " are not finite"
        )
        logger.warning(why, name, sequence.num_known, extra=fields)
        self.allocator.forget(sequence)
        self._deschedule(sequence, FINISHED)

    def abort(self, seq_id: int) -> None:
        """End a sequence; its slot and pages are free as soon as no micro-batch in flight accesses
        the pages.
        """
        if (running := self._running.by_id.get(seq_id)) is not None:
            self._deschedule(running, FINISHED)
            self._release_if_drained(running)
        for sequence in [s for s in self._waiting if s.seq_id == seq_id]:
            self._waiting.remove(sequence)
            self._poison_detector.discard(sequence)
            sequence.status = FINISHED

    def restart(self, epoch: int) -> None:
        """Requeue all running sequences: the stages have lost them, and micro-batches in flight
        will not return.

        They wait in order of progress, the most advanced first; prompt and output so far are
        computed again as one prompt.
        """
        self.epoch, self._next_step = epoch, 0
        self._in_flight.clear()
        self._num_lookahead = 0
        self.policy.restart()
        for sequence in list(self._running.by_id.values()):
            sequence.num_in_flight = 0
            if sequence.status is RUNNING:
                self._deschedule(sequence, PREEMPTED)
            self._release_if_drained(sequence)
        self._freed.clear()
        self.allocator.forget_contents()

    def failed_batch(self, batch: MicroBatch) -> FailedBatch:
        """Return the arguments of ``record_failure`` for the oldest micro-batch in flight, which
        has failed.
        """
        by_id = self._running.by_id
        return FailedBatch(
            {by_id[seq_id]: span for seq_id, span in position_spans(batch).items()},
            is_alone=len(by_id) == 1,
        )

    def record_failure(self, failed: FailedBatch) -> int | None:
        """Count a failed micro-batch against its sequences; return the sequence that has caused it,
        if that is certain.
        """
        cause = self._poison_detector.record_failure(failed)
        return None if cause is None else cause.seq_id

    def validate(self, sequence: Sequence) -> None:
        """Raise RequestError if this sequence could never run, however long it waited."""
        validate_sequence(sequence, self.limits, self.allocator)

    def overload_reason(self, arriving: Collection[Sequence]) -> str | None:
        """Return why these sequences must not be added now, or None."""
        return overload_reason(arriving, self._waiting, self._running, self.limits)

    def is_full(self, priority: int, owner: int) -> bool:
        """Return whether even the smallest sequence of this priority and owner must not be added
        now.
        """
        return is_full(priority, owner, self._waiting, self.limits)

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot, including ended ones that are still in flight."""
        return len(self._running)

    @property
    def num_steps(self) -> int:
        """Micro-batches made so far in this epoch."""
        return self._next_step

    @property
    def is_idle(self) -> bool:
        """Whether no sequence waits or runs."""
        return not (self._waiting or self._running)

    def measure_load(self) -> PipelineLoad:
        """Return the load of all sequences that were added and have not ended."""
        return measure_load(self._running, self._waiting, self._work_estimator)

    def measure_work(self, batch: MicroBatch) -> BatchWork:
        """Return the work of this micro-batch in one stage."""
        return self._work_estimator.work_of(batch)

    def check_integrity(self) -> None:
        """Recount everything; raise AssertionError if a count is wrong."""
        self._running.check_integrity()
        self._waiting.check_integrity()
        self._prefills.check_integrity()
        self._decodes.check_integrity(self._running.by_id.values())
        assert self._num_lookahead == sum(each.rows.is_lookahead for each in self._in_flight)
        if self.is_idle:
            assert self.allocator.num_free == [c.num_pages for c in self.allocator.cache.classes]

    def _admit(self) -> None:
        """Admit waiting sequences in queue order until no slot or page is left; a suspected
        sequence only into an empty pipeline.
        """
        self._prefills.priority_limit = NUM_PRIORITIES
        if self._poison_detector:
            suspect = self._poison_detector.first
            if suspect.status is WAITING and not self._running and self._running.admit(suspect):
                self._start_prefill(suspect)
            return
        while (sequence := self._waiting.first) is not None and self._try_admit(sequence):
            self._start_prefill(sequence)

    def _start_prefill(self, sequence: Sequence) -> None:
        self._prefills.add(sequence)
        self._waiting.pop_admitted(sequence)

    def _try_admit(self, sequence: Sequence) -> bool:
        """Give the sequence a slot and pages; less urgent sequences are preempted if necessary.

        A sequence is preempted only while none of its tokens is in flight, which frees its slot and
        pages at once. Decodes soon return from the pipeline; so that prompts do too, no less urgent
        prompt is scheduled until then.
        """
        while not self._running.admit(sequence):
            if not self._running.can_preempt_for(sequence):
                return False
            if (victim := self._running.preemption_victim(sequence)) is None:
                self._prefills.priority_limit = sequence.effective_priority
                return False
            self._preempt(victim)
        return True

    def _state(self) -> SchedulerState:
        prefills = self._prefills.prepared()
        are_urgent = bool(prefills) and self._running.has_any_below(prefills[0].effective_priority)
        return SchedulerState(
            num_in_flight=len(self._in_flight) - self._num_lookahead,
            num_lookahead=self._num_lookahead,
            num_decoding=self._decodes.num_sequences,
            decoding_keys=self._decodes.num_keys,
            num_ready=len(self._decodes.ready),
            ready_keys=(
                self._work_estimator.visible_keys(s.num_known) for s in self._decodes.ready
            ),
            pending_tokens=sum(s.num_pending for s in prefills),
            urgent_tokens=urgent_tokens(prefills) if are_urgent else 0,
            prefill_start=self._work_estimator.visible_keys(prefills[0].num_dispatched)
            if prefills
            else 0,
            waiting_tokens=self._waiting.num_tokens,
            free_share=self.allocator.free_share,
        )

    def _draft_limits(self, break_even: float) -> DraftLimits:
        """Return the limits of a micro-batch's drafts. Stages never see more decodes than
        ``max_num_seqs``.
        """
        max_rows = min(self.limits.max_num_seqs, self.limits.max_num_batched_tokens)
        return DraftLimits(break_even, max_rows, len(self._running))

    def _preempt_last(self) -> bool:
        """Preempt the least urgent, youngest sequence; return whether its pages are free now.

        One at a time: the first in rank is the last one only if it is alone, and alone it has
        enough pages.
        """
        # a stopped sequence is about to release its pages
        if (last := self._running.lowest_priority()) is None:
            return False
        self._preempt(last)
        return not last.num_in_flight

    def _preempt(self, sequence: Sequence) -> None:
        self._deschedule(sequence, PREEMPTED)
        self.num_preempted += 1
        self._release_if_drained(sequence)

    def _deschedule(self, sequence: Sequence, status: SequenceStatus) -> None:
        """Take the sequence out of the queues; its micro-batches in flight still return."""
        self._prefills.discard(sequence)
        self._prefills.charge_decodes([sequence])
        self._decodes.discard(sequence)
        if status is FINISHED:
            self._poison_detector.discard(sequence)
        if sequence.speculation is not None:
            sequence.speculation.close()
        sequence.status, sequence.speculation = status, None

    def _release_if_drained(self, sequence: Sequence) -> None:
        if sequence.num_in_flight:
            return
        self._running.release(sequence)
        if sequence.is_started:
            self._freed.append(sequence.seq_id)
        if sequence.status is PREEMPTED:
            sequence.status, sequence.is_started = WAITING, False
            sequence.num_dispatched = sequence.num_placeholders = sequence.num_charged = 0
            self._waiting.push(sequence)
