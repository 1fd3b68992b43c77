"""The policy: which tokens travel together next. Pure: no torch, no Ray, no clock, no I/O."""

from collections import deque
from collections.abc import Collection
from itertools import repeat

from tramontane.proto.plan import CachePlan
from tramontane.proto.request import NUM_PRIORITIES, FinishReason, TokenEvent
from tramontane.proto.step import MicroBatch, StepResult
from tramontane.router.scheduling.admission import SchedulerLimits, is_full, overload_reason, validate_sequence
from tramontane.router.scheduling.decode_queue import DecodeQueue
from tramontane.router.scheduling.poison_detector import PoisonDetector
from tramontane.router.scheduling.policy import BatchBudget, BatchWork, Policy, SchedulerState
from tramontane.router.scheduling.prefill_queue import PrefillQueue, urgent_tokens
from tramontane.router.scheduling.priority_aging import age_starved
from tramontane.router.scheduling.running_set import PipelineLoad, RunningSet, measure_load
from tramontane.router.scheduling.sequence import Sequence, SequenceStatus, priority_key
from tramontane.router.scheduling.waiting_queue import WaitingQueue
from tramontane.router.scheduling.work_estimator import WorkEstimator

# Looked up hundreds of times in a step, which through the class takes Python 3.11 four times as long.
RUNNING, PREEMPTED, FINISHED = SequenceStatus.RUNNING, SequenceStatus.PREEMPTED, SequenceStatus.FINISHED
Accepted = tuple[int, int, FinishReason | None]  # the fields of a TokenEvent


class Scheduler:
    """Chunked prefill and decode in one micro-batch, several micro-batches in flight.

    How much of either is the policy's to say. A decode token waits for its predecessor; a prompt's next chunk need not.
    Sequences are admitted the most urgent first, of equals whoever's turn it is (``turns.py``), and their prompts computed in
    the order of arrival. A sequence may have to give its pages back; then it waits, and is computed again: prompt and answer
    so far, as one prompt.

    * Where no place or too few pages are free for a sequence, less urgent ones give theirs back.
    * Where pages run out, which happens only in layers without a window, the least urgent that came last does.
    * Whoever is left behind too often becomes as urgent as any (``ageing.py``).
    """

    def __init__(self, cache: CachePlan, limits: SchedulerLimits, policy: Policy, epoch: int = 0) -> None:
        self.limits = limits
        self.policy = policy
        self.epoch = epoch
        self._running = RunningSet(cache, limits.max_num_seqs)
        self.allocator = self._running.allocator
        self._eos = frozenset(limits.eos_token_ids)
        self._waiting = WaitingQueue()
        self._prefills = PrefillQueue(self.allocator, policy.overlaps_chunks)
        self._work_estimator = WorkEstimator([limits.max_model_len if c.window is None else c.window for c in cache.classes])
        self._decodes = DecodeQueue(self.allocator, self._work_estimator)
        self._released: list[int] = []  # ended since the last micro-batch; stages forget them with the next
        self._poison_detector = PoisonDetector()
        self._next_step = 0
        self._in_flight: deque[tuple[BatchBudget, BatchWork, list[Sequence]]] = (
            deque()
        )  # and whose decodes, in the order of columns
        self.num_preempted = 0  # times that a sequence gave its pages back

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, and admit it if there is room. Raises RequestError if it could never run."""
        self.validate(sequence)
        self._waiting.push(sequence)
        self._admit()

    def validate(self, sequence: Sequence) -> None:
        """Raises RequestError if this sequence could never run, however long it waited."""
        validate_sequence(sequence, self.limits, self.allocator)

    def overload_reason(self, arriving: Collection[Sequence]) -> str | None:
        """Why these sequences must not be added now, or None."""
        return overload_reason(arriving, self._waiting, self._running, self.limits)

    def is_full(self, priority: int, owner: int) -> bool:
        """Whether even the smallest sequence of these must not be added now."""
        return is_full(priority, owner, self._waiting, self.limits)

    def abort(self, seq_id: int) -> None:
        """The client left: give its place back now, its pages as soon as nothing in flight touches them."""
        if (admitted := self._running.by_id.get(seq_id)) is not None:
            self._deschedule(admitted, FINISHED)
            self._release_if_drained(admitted)
        for sequence in [s for s in self._waiting if s.seq_id == seq_id]:
            self._waiting.remove(sequence)
            self._poison_detector.discard(sequence)
            sequence.status = FINISHED

    def restart(self, epoch: int) -> None:
        """The stages have forgotten everything, and nothing that is in flight comes back.

        Whoever ran waits again where it stood in line, which is the most advanced first, and is computed again: prompt and
        answer so far as one prompt.
        """
        self.epoch, self._next_step = epoch, 0
        self._in_flight.clear()
        for sequence in list(self._running.by_id.values()):
            sequence.num_in_flight = 0
            if sequence.status is RUNNING:
                self._deschedule(sequence, PREEMPTED)
            self._release_if_drained(sequence)
        self._released.clear()

    def record_failure(self, batch: MicroBatch) -> int | None:
        """This micro-batch, the oldest in flight, has failed. Returns the sequence that is to blame, where that is certain."""
        spans = [(chunk.seq_id, chunk.start, chunk.num_tokens) for chunk in batch.chunks]
        spans += [(seq_id, start, 1) for seq_id, start in zip(batch.decodes.seq_ids, batch.decodes.starts, strict=True)]
        going = {self._running.by_id[seq_id]: (start, start + num_tokens) for seq_id, start, num_tokens in spans}
        alive = {sequence: span for sequence, span in going.items() if sequence.status is not FINISHED}
        guilty = self._poison_detector.record_failure(alive, alone=len(self._running) == 1)
        return None if guilty is None else guilty.seq_id

    def schedule(self) -> MicroBatch | None:
        """The next micro-batch, or None when nothing can be submitted now."""
        self._admit()
        share = self.policy.choose_budget(self._load(self._prefills.schedulable()))
        if share is None:
            return None
        decoding, decodes = self._decodes.take_batch(share.decodes, self._preempt_last)
        prefills = self._prefills.take_chunks(min(share.prefill_tokens, self.limits.max_num_batched_tokens - len(decoding)))
        if not decoding and not prefills:
            return None
        if prefills:
            going = [self._running.by_id[c.seq_id] for c in prefills]
            age_starved(going, self._waiting, self._prefills, self._running)
        chunks = [c for c in prefills if c.num_tokens > 1] + [c for c in prefills if c.num_tokens == 1]
        batch = MicroBatch(self.epoch, self._next_step, tuple(chunks), tuple(self._released), decodes)
        self._released.clear()
        self._next_step += 1
        self._in_flight.append((share, self.measure_work(batch), decoding))
        return batch

    def complete(self, batch: MicroBatch, result: StepResult) -> list[TokenEvent]:
        """Take in a result; returns one event per token of a sequence that has not ended."""
        if result.epoch != self.epoch:
            return []
        assert result.step_id == batch.step_id
        share, work, decoding = self._in_flight.popleft()
        self.policy.observe(share, work, result.timings)
        token_ids, ended, ready = iter(result.token_ids), dict(result.finished), self._decodes.ready
        accepted: list[Accepted] = []
        lengths = []  # of sequences that go on decoding
        for chunk in batch.chunks:
            sequence = self._running.by_id[chunk.seq_id]
            sequence.num_in_flight -= 1
            accepted += self._apply_result(sequence, next(token_ids) if chunk.needs_sample else None, ended.get(chunk.seq_id))
        for sequence, token_id in zip(decoding, token_ids, strict=True):
            sequence.num_in_flight -= 1
            num_known = sequence.num_known + 1
            goes_on = num_known < sequence.max_len and token_id not in self._eos and sequence.seq_id not in ended
            if goes_on and sequence.status is RUNNING:  # nearly always
                sequence.output_ids.append(token_id)
                sequence.num_known = num_known
                lengths.append(num_known)
                ready.append(sequence)
                accepted.append((sequence.seq_id, token_id, None))
            else:
                accepted += self._apply_result(sequence, token_id, ended.get(sequence.seq_id))
        self._decodes.record_growth(lengths)
        return list(map(tuple.__new__, repeat(TokenEvent), accepted))  # half of what calling TokenEvent takes

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold a place, those included that have ended and are still in flight."""
        return len(self._running)

    @property
    def num_steps(self) -> int:
        """Micro-batches made so far in this epoch."""
        return self._next_step

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self._running)

    def measure_load(self) -> PipelineLoad:
        """Of all that was added and has not ended."""
        return measure_load([*self._running.by_id.values(), *self._waiting], self.allocator, self.limits.max_num_seqs)

    def check_integrity(self) -> None:
        """Recount everything; raises AssertionError if the books do not balance."""
        self._running.check_integrity()
        self._waiting.check_integrity()
        assert self._prefills.sequences == sorted(self._prefills.sequences, key=priority_key)
        self._decodes.check_integrity(self._running.by_id.values())
        if self.is_idle:
            assert self.allocator.num_free == [c.num_pages for c in self.allocator.cache.classes]

    def _admit(self) -> None:
        """Whoever is first, as long as there is room."""
        self._prefills.priority_limit = NUM_PRIORITIES
        if self._poison_detector:
            self._admit_suspect(self._poison_detector.first)
            return
        while (sequence := self._waiting.first) is not None and self._try_admit(sequence):
            self._waiting.pop_admitted(sequence)
            self._prefills.add(sequence)

    def _admit_suspect(self, suspect: Sequence) -> None:
        if suspect.status is SequenceStatus.WAITING and not self._running and self._running.admit(suspect):
            self._waiting.pop_admitted(suspect)
            self._prefills.add(suspect)

    def _try_admit(self, sequence: Sequence) -> bool:
        """A place and pages are its own now, if need be those of less urgent ones.

        Only whoever has nothing in flight gives way, so that there is room at once. Decodes soon come back; so that prompts
        do, none of them goes on meanwhile.
        """
        while not self._running.admit(sequence):
            if not self._running.can_preempt_for(sequence):
                return False
            if (giving_way := self._running.preemption_victim(sequence)) is None:
                self._prefills.priority_limit = sequence.effective_priority
                return False
            self._preempt(giving_way)
        return True

    def _load(self, prompts: list[Sequence]) -> SchedulerState:
        are_urgent = bool(prompts) and self._running.has_any_below(prompts[0].effective_priority)
        return SchedulerState(
            num_in_flight=len(self._in_flight),
            num_decoding=self._decodes.num_sequences,
            decoding_keys=self._decodes.num_keys,
            num_ready=len(self._decodes.ready),
            ready_keys=(self._work_estimator.visible_keys(s.num_known) for s in self._decodes.ready),
            pending_tokens=sum(s.num_pending for s in prompts),
            urgent_tokens=urgent_tokens(prompts) if are_urgent else 0,
            prefill_start=self._work_estimator.visible_keys(prompts[0].num_dispatched) if prompts else 0,
            waiting_tokens=self._waiting.num_tokens,
            free_share=min(n / c.num_pages for n, c in zip(self.allocator.num_free, self.allocator.cache.classes, strict=True)),
        )

    def measure_work(self, batch: MicroBatch) -> BatchWork:
        """What it gives a stage to do."""
        return self._work_estimator.work_of(batch)

    def _preempt_last(self) -> bool:
        """Make the least urgent sequence that came last give its pages back; returns whether any are free now.

        One at a time: the first in rank is never the last one unless it is alone, and alone it has room.
        """
        if (last := self._running.lowest_priority()) is None:  # somebody's pages are coming back
            return False
        self._preempt(last)
        return not last.num_in_flight

    def _preempt(self, sequence: Sequence) -> None:
        self._deschedule(sequence, PREEMPTED)
        self.num_preempted += 1
        self._release_if_drained(sequence)

    def _apply_result(self, sequence: Sequence, token_id: int | None, finish: FinishReason | None) -> list[Accepted]:
        """Something of the sequence has come back, with a token or without, and with a reason if the stage says that it ends."""
        accepted = [self._accept(sequence, token_id, finish)] if token_id is not None and sequence.status is not FINISHED else []
        if sequence.status is not RUNNING:
            self._release_if_drained(sequence)
        return accepted

    def _accept(self, sequence: Sequence, token_id: int, finish: FinishReason | None) -> Accepted:
        num_known = sequence.accept(token_id)
        if sequence.is_decoding:
            self._decodes.record_growth([num_known])
        if finish is None and token_id in self._eos and not sequence.sampling.ignore_eos:
            finish = FinishReason.STOP
        if finish is None and num_known >= sequence.max_len:
            finish = FinishReason.LENGTH
        if finish is not None:
            self._deschedule(sequence, FINISHED)
        elif sequence.status is RUNNING:
            self._decodes.add(sequence)
        if self._poison_detector.clear(sequence):
            self._deschedule(sequence, PREEMPTED)
        return sequence.seq_id, token_id, finish

    def _deschedule(self, sequence: Sequence, status: SequenceStatus) -> None:
        """It is not scheduled any more; what is in flight comes back."""
        self._prefills.discard(sequence)
        self._decodes.discard(sequence)
        if status is FINISHED:
            self._poison_detector.discard(sequence)
        sequence.status = status

    def _release_if_drained(self, sequence: Sequence) -> None:
        if sequence.num_in_flight:
            return
        self._running.release(sequence)
        if sequence.num_dispatched:
            self._released.append(sequence.seq_id)
        if sequence.status is PREEMPTED:
            sequence.status, sequence.num_dispatched = SequenceStatus.WAITING, 0
            self._waiting.push(sequence)
