"""The policy: which tokens travel together next. Pure: no torch, no Ray, no clock, no I/O."""

from collections import deque
from collections.abc import Collection

from tramontane.proto.plan import CachePlan
from tramontane.proto.request import FinishReason, TokenEvent
from tramontane.proto.step import Chunk, Decodes, MicroBatch, StepResult
from tramontane.router.admission import Limits, check_possible, overload
from tramontane.router.pages import PageLedger
from tramontane.router.policy import Load, Policy, Share, Work
from tramontane.router.sequence import Sequence, SequenceStatus
from tramontane.router.visible_keys import VisibleKeys

# Looked up hundreds of times in a step, which through the class takes Python 3.11 four times as long.
RUNNING, PREEMPTED, FINISHED = SequenceStatus.RUNNING, SequenceStatus.PREEMPTED, SequenceStatus.FINISHED
Accepted = tuple[int, int, FinishReason | None]  # the fields of a TokenEvent


class Scheduler:
    """Chunked prefill and decode in one micro-batch, several micro-batches in flight.

    How much of either is the policy's to say; prompts go first come first served. A decode token waits for its
    predecessor; a prompt's next chunk need not. Where pages run out, which happens only in layers without a window, the
    sequence that came last gives its own back, waits, and is computed again: prompt and answer so far, as one prompt.
    """

    def __init__(self, cache: CachePlan, limits: Limits, policy: Policy, epoch: int = 0) -> None:
        self.limits = limits
        self.policy = policy
        self.epoch = epoch
        self.ledger = PageLedger(cache)
        self._eos = frozenset(limits.eos_token_ids)
        self._waiting: deque[Sequence] = deque()
        self._prefilling: deque[Sequence] = deque()  # admitted, known tokens not all submitted
        self._ready: deque[Sequence] = deque()  # one decode token to submit
        self._admitted: dict[int, Sequence] = {}  # running, or finished and still in flight
        self._released: list[int] = []  # ended since the last micro-batch; stages forget them with the next
        self._next_step = 0
        self._in_flight: deque[tuple[Share, Work, list[Sequence]]] = deque()  # and whose decodes, in the order of columns
        self._waiting_tokens = 0
        self._num_decoding = self._decoding_keys = 0  # sequences past their prompts, and the keys that they see
        self.num_preempted = 0  # times that a sequence gave its pages back
        self._keys = VisibleKeys([limits.max_model_len if c.window is None else c.window for c in cache.classes])

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, and admit it if there is room. Raises RequestError if it could never run."""
        self.check(sequence)
        self._waiting.append(sequence)
        self._waiting_tokens += sequence.num_known
        self._admit()

    def check(self, sequence: Sequence) -> None:
        """Raises RequestError if this sequence could never run, however long it waited."""
        check_possible(sequence, self.limits, self.ledger)

    def overload(self, arriving: Collection[Sequence]) -> str | None:
        """Why these sequences must not be added now, or None."""
        places = self.limits.max_num_seqs - len(self._admitted)
        return overload(list(arriving), self._waiting, places, self.limits, self.ledger)

    def abort(self, seq_id: int) -> None:
        """The client left: give its place back now, its pages as soon as nothing in flight touches them."""
        if (admitted := self._admitted.get(seq_id)) is not None:
            self._stop(admitted, FINISHED)
            self._release_if_drained(admitted)
        for sequence in [s for s in self._waiting if s.seq_id == seq_id]:
            self._waiting.remove(sequence)
            self._waiting_tokens -= sequence.num_known
            sequence.status = FINISHED

    def schedule(self) -> MicroBatch | None:
        """The next micro-batch, or None when nothing can be submitted now."""
        self._admit()
        share = self.policy.share(self._load())
        if share is None:
            return None
        decoding, decodes = self._decodes(share.decodes)
        prefills = self._prefill_chunks(min(share.prefill_tokens, self.limits.max_num_batched_tokens - len(decoding)))
        if not decoding and not prefills:
            return None
        chunks = [c for c in prefills if c.num_tokens > 1] + [c for c in prefills if c.num_tokens == 1]
        batch = MicroBatch(self.epoch, self._next_step, tuple(chunks), tuple(self._released), decodes)
        self._released.clear()
        self._next_step += 1
        self._in_flight.append((share, self.work_of(batch), decoding))
        return batch

    def complete(self, batch: MicroBatch, result: StepResult) -> list[TokenEvent]:
        """Take in a result; returns one event per token of a sequence that has not ended."""
        if result.epoch != self.epoch:
            return []
        assert result.step_id == batch.step_id
        share, work, decoding = self._in_flight.popleft()
        self.policy.observe(share, work, result.timings)
        token_ids, ended = iter(result.token_ids), dict(result.ended)
        accepted: list[Accepted] = []
        lengths = []  # of sequences that go on decoding
        for chunk in batch.chunks:
            sequence = self._admitted[chunk.seq_id]
            sequence.num_in_flight -= 1
            accepted += self._take_in(sequence, next(token_ids) if chunk.wants_token else None, ended.get(chunk.seq_id))
        for sequence, token_id in zip(decoding, token_ids, strict=True):
            sequence.num_in_flight -= 1
            num_known = sequence.num_known + 1
            goes_on = num_known < sequence.max_len and token_id not in self._eos and sequence.seq_id not in ended
            if goes_on and sequence.status is RUNNING:  # nearly always
                sequence.output_ids.append(token_id)
                sequence.num_known = num_known
                lengths.append(num_known)
                self._ready.append(sequence)
                accepted.append((sequence.seq_id, token_id, None))
            else:
                accepted += self._take_in(sequence, token_id, ended.get(sequence.seq_id))
        self._decoding_keys += self._keys.gained(lengths)
        return list(map(TokenEvent._make, accepted))  # three fifths of what calling TokenEvent takes

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold a place, those included that have ended and are still in flight."""
        return len(self._admitted)

    @property
    def num_steps(self) -> int:
        """Micro-batches made so far in this epoch."""
        return self._next_step

    @property
    def is_idle(self) -> bool:
        return not (self._waiting or self._admitted)

    def check_integrity(self) -> None:
        """Recount everything; raises AssertionError if the books do not balance."""
        self.ledger.check_integrity(self._admitted.values())
        for sequence in self._admitted.values():
            assert sequence.num_dispatched <= sequence.num_known
            assert sequence.status is RUNNING or sequence.num_in_flight > 0
        assert self._waiting_tokens == sum(s.num_known for s in self._waiting)
        decoding = [s for s in self._admitted.values() if s.is_decoding]
        assert all(s.status is RUNNING for s in decoding)
        assert self._num_decoding == len(decoding)
        assert self._decoding_keys == sum(self._keys.of(s.num_known) for s in decoding)
        if self.is_idle:
            assert self.ledger.num_free == [c.num_pages for c in self.ledger.cache.classes]

    def _admit(self) -> None:
        """In the order of arrival. Beside others only where each of them has room for one page more."""
        while self._waiting and len(self._admitted) < self.limits.max_num_seqs:
            sequence = self._waiting[0]
            if not self.ledger.promise(sequence, num_spare=len(self._admitted)):
                return
            self._waiting.popleft()
            self._waiting_tokens -= sequence.num_known
            sequence.status = RUNNING
            self._admitted[sequence.seq_id] = sequence
            self._prefilling.append(sequence)

    def _load(self) -> Load:
        able = self._prefilling
        if not self.policy.overlaps_chunks:
            able = deque(s for s in able if not s.num_in_flight)
        return Load(
            num_in_flight=len(self._in_flight),
            num_decoding=self._num_decoding,
            decoding_keys=self._decoding_keys,
            num_ready=len(self._ready),
            ready_keys=(self._keys.of(s.num_known) for s in self._ready),
            pending_tokens=sum(s.num_pending for s in able),
            prefill_start=self._keys.of(able[0].num_dispatched) if able else 0,
            waiting_tokens=self._waiting_tokens,
            free_share=min(n / c.num_pages for n, c in zip(self.ledger.num_free, self.ledger.cache.classes, strict=True)),
        )

    def work_of(self, batch: MicroBatch) -> Work:
        """What it gives a stage to do."""
        return self._keys.work_of(batch)

    def _decodes(self, most: int) -> tuple[list[Sequence], Decodes]:
        """One token each, whoever was ready first; fewer where a page is needed that is not free yet."""
        going: list[Sequence] = []
        grown = []
        ready = self._ready
        while ready and len(going) < most:
            sequence = ready[0]
            if (num_known := sequence.num_known) > sequence.num_covered:
                if not self.ledger.reserve(sequence, num_known):
                    if self._preempt():
                        continue
                    break
                grown.append((len(going), self.ledger.grow(sequence, num_known)))
            ready.popleft()
            going.append(sequence)
            sequence.num_dispatched = num_known
            sequence.num_in_flight += 1
        return going, Decodes(
            seq_ids=tuple([s.seq_id for s in going]),
            starts=tuple([s.num_known - 1 for s in going]),
            token_ids=tuple([s.output_ids[-1] for s in going]),
            new_pages=tuple(grown),
        )

    def _preempt(self) -> bool:
        """Make the sequence that came last give its pages back; returns whether any are free now.

        One at a time: the oldest sequence is never the last one unless it is alone, and alone it has room.
        """
        running = [s for s in self._admitted.values() if s.status is RUNNING]
        if len(running) < len(self._admitted):  # somebody's pages are coming back
            return False
        youngest = max(running, key=lambda sequence: sequence.seq_id)
        self._stop(youngest, PREEMPTED)
        self.num_preempted += 1
        self._release_if_drained(youngest)
        return not youngest.num_in_flight

    def _prefill_chunks(self, budget: int) -> list[Chunk]:
        """In the order of arrival; where chunks may not overlap, prompts that wait for their last one are passed over."""
        chunks = []
        for sequence in list(self._prefilling):
            if budget <= 0:
                break
            if sequence.num_in_flight and not self.policy.overlaps_chunks:
                continue
            chunks.append(self._chunk(sequence, min(sequence.num_pending, budget)))
            budget -= chunks[-1].num_tokens
            if not sequence.num_pending:
                self._prefilling.remove(sequence)
        return chunks

    def _chunk(self, sequence: Sequence, num_tokens: int) -> Chunk:
        start, end = sequence.num_dispatched, sequence.num_dispatched + num_tokens
        sequence.num_dispatched = end
        sequence.num_in_flight += 1
        return Chunk(
            seq_id=sequence.seq_id,
            start=start,
            token_ids=sequence.known_ids(start, end),
            new_pages=self.ledger.grow(sequence, end),
            sampling=sequence.sampling if start == 0 else None,
            wants_token=end == sequence.num_known,
            num_prompt=len(sequence.prompt_ids) if start == 0 else 0,
        )

    def _take_in(self, sequence: Sequence, token_id: int | None, finish: FinishReason | None) -> list[Accepted]:
        """Something of the sequence has come back, with a token or without, and with a reason if the stage says that it ends."""
        accepted = [self._accept(sequence, token_id, finish)] if token_id is not None and sequence.status is not FINISHED else []
        if sequence.status is not RUNNING:
            self._release_if_drained(sequence)
        return accepted

    def _accept(self, sequence: Sequence, token_id: int, finish: FinishReason | None) -> Accepted:
        num_known = sequence.accept(token_id)
        if sequence.is_decoding:  # it sees one key more, up to the window
            self._decoding_keys += self._keys.gained([num_known])
        if finish is None and token_id in self._eos and not sequence.sampling.ignore_eos:
            finish = FinishReason.STOP
        if finish is None and num_known >= sequence.max_len:
            finish = FinishReason.LENGTH
        if finish is not None:
            self._stop(sequence, FINISHED)
        elif sequence.status is RUNNING:
            self._ready.append(sequence)
            if not sequence.is_decoding:
                sequence.is_decoding = True
                self._num_decoding += 1
                self._decoding_keys += self._keys.of(num_known)
        return sequence.seq_id, token_id, finish

    def _stop(self, sequence: Sequence, status: SequenceStatus) -> None:
        """It is not scheduled any more; what is in flight comes back."""
        for queue in (self._prefilling, self._ready):
            if sequence in queue:
                queue.remove(sequence)
        if sequence.is_decoding:
            sequence.is_decoding = False
            self._num_decoding -= 1
            self._decoding_keys -= self._keys.of(sequence.num_known)
        sequence.status = status

    def _release_if_drained(self, sequence: Sequence) -> None:
        if sequence.num_in_flight:
            return
        self.ledger.release(sequence)
        del self._admitted[sequence.seq_id]
        if sequence.num_dispatched:
            self._released.append(sequence.seq_id)
        if sequence.status is PREEMPTED:
            sequence.status, sequence.num_dispatched = SequenceStatus.WAITING, 0
            self._waiting.appendleft(sequence)
            self._waiting_tokens += sequence.num_known
