"""The policy: which tokens travel together next. Pure: no torch, no Ray, no clock, no I/O."""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from tramontane.proto.errors import RequestError
from tramontane.proto.plan import CachePlan
from tramontane.proto.request import FinishReason, TokenEvent
from tramontane.proto.step import Chunk, MicroBatch, StepResult
from tramontane.router.pages import PageLedger
from tramontane.router.sequence import Sequence, SequenceStatus


@dataclass(frozen=True, slots=True)
class Limits:
    """``max_in_flight`` is M: over how many micro-batches running decodes are spread.

    ``max_queued_seqs`` and ``max_queued_tokens`` (of prompts) bound what waits for admission.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_in_flight: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    max_queued_seqs: int | None = None
    max_queued_tokens: int | None = None


class Scheduler:
    """Chunked prefill and decode in one micro-batch, several micro-batches in flight.

    Decodes come first, at most ceil(decoding / M) of them, so that M micro-batches can
    work at once; prompts fill what is left of the token budget (never nothing), first
    come first served. A decode token waits for its predecessor; a prompt's next chunk does not.
    """

    def __init__(self, cache: CachePlan, limits: Limits, epoch: int = 0) -> None:
        self.limits = limits
        self.epoch = epoch
        self.ledger = PageLedger(cache)
        self._waiting: deque[Sequence] = deque()
        self._prefilling: deque[Sequence] = deque()  # admitted, prompt tokens not all submitted
        self._ready: deque[Sequence] = deque()  # one decode token to submit
        self._admitted: dict[int, Sequence] = {}  # running, or finished and still in flight
        self._released: list[int] = []  # ended since the last micro-batch; stages forget them with the next
        self._next_step = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, and admit it if there is room. Raises RequestError if it could never run."""
        self.check(sequence)
        self._waiting.append(sequence)
        self._admit()

    def check(self, sequence: Sequence) -> None:
        """Raises RequestError if this sequence could never run, however long it waited."""
        if not sequence.prompt_ids:
            raise RequestError("the prompt is empty; give it at least one token")
        if len(sequence.prompt_ids) >= self.limits.max_model_len:
            raise RequestError(
                f"the prompt has {len(sequence.prompt_ids)} tokens; with a context of "
                f"{self.limits.max_model_len} positions it may have at most {self.limits.max_model_len - 1}"
            )
        for token_id in (min(sequence.prompt_ids), max(sequence.prompt_ids)):
            if not 0 <= token_id < self.limits.vocab_size:
                raise RequestError(f"token id {token_id} is outside the model's vocabulary of {self.limits.vocab_size}")
        assert sequence.max_len <= self.limits.max_model_len
        if not self.ledger.fits_ever(sequence):
            raise RequestError(
                f"a sequence of {sequence.max_len} tokens needs more cache pages than there are; "
                "shorten it or raise --kv-cache-memory"
            )

    def overload(self, arriving: Collection[Sequence]) -> str | None:
        """Why these sequences must not be added now, or None.

        Only what would wait is counted: with 3 of 64 places free, pages for them, and nobody waiting, 5 arrivals queue 2.
        """
        places = self.limits.max_num_seqs - len(self._admitted)
        free = 0 if self._waiting else self.ledger.how_many_fit(list(arriving)[:places])
        num_queued = len(self._waiting) + max(len(arriving) - free, 0)
        if self.limits.max_queued_seqs is not None and num_queued > self.limits.max_queued_seqs:
            return f"{len(self._waiting)} sequences are waiting and at most {self.limits.max_queued_seqs} may"
        num_tokens = [len(s.prompt_ids) for s in (*self._waiting, *list(arriving)[free:])]
        if self.limits.max_queued_tokens is not None and len(num_tokens) > 1 and sum(num_tokens) > self.limits.max_queued_tokens:
            return f"{sum(num_tokens)} prompt tokens would be waiting and at most {self.limits.max_queued_tokens} may"
        return None

    def abort(self, seq_id: int) -> None:
        """The client left: give its place back now, its pages as soon as nothing in flight touches them."""
        for queue in (self._waiting, self._prefilling, self._ready):
            for sequence in [s for s in queue if s.seq_id == seq_id]:
                queue.remove(sequence)
                sequence.status = SequenceStatus.FINISHED
        if (admitted := self._admitted.get(seq_id)) is not None:
            admitted.status = SequenceStatus.FINISHED
            self._release_if_drained(admitted)

    def schedule(self) -> MicroBatch | None:
        """The next micro-batch, or None when nothing can be submitted now."""
        self._admit()
        kept_for_prefill = 1 if self._prefilling and self.limits.max_num_batched_tokens > 1 else 0
        chunks = self._decode_chunks(self.limits.max_num_batched_tokens - kept_for_prefill)
        chunks += self._prefill_chunks(self.limits.max_num_batched_tokens - len(chunks))
        if not chunks:
            return None
        chunks.sort(key=lambda chunk: chunk.num_tokens == 1)  # stable: single tokens last
        batch = MicroBatch(self.epoch, self._next_step, tuple(chunks), tuple(self._released))
        self._released.clear()
        self._next_step += 1
        return batch

    def complete(self, batch: MicroBatch, result: StepResult) -> list[TokenEvent]:
        """Take in a result; returns one event per token of a sequence that still runs."""
        if result.epoch != self.epoch:
            return []
        assert result.step_id == batch.step_id
        sampled = {token.seq_id: token.token_id for token in result.tokens}
        events = []
        for chunk in batch.chunks:
            sequence = self._admitted[chunk.seq_id]
            sequence.num_in_flight -= 1
            if chunk.wants_token and sequence.status is SequenceStatus.RUNNING:
                events.append(self._accept(sequence, sampled[chunk.seq_id]))
            self._release_if_drained(sequence)
        return events

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
            assert sequence.status is SequenceStatus.RUNNING or sequence.num_in_flight > 0
        if self.is_idle:
            assert self.ledger.num_free == [c.num_pages for c in self.ledger.cache.classes]

    def _admit(self) -> None:
        while self._waiting and len(self._admitted) < self.limits.max_num_seqs:
            if not self.ledger.promise(self._waiting[0]):
                return
            sequence = self._waiting.popleft()
            sequence.status = SequenceStatus.RUNNING
            self._admitted[sequence.seq_id] = sequence
            self._prefilling.append(sequence)

    def _decode_chunks(self, budget: int) -> list[Chunk]:
        decoding = sum(not s.is_prefilling for s in self._admitted.values() if s.status is SequenceStatus.RUNNING)
        share = -(-decoding // self.limits.max_in_flight)
        return [self._chunk(self._ready.popleft(), 1) for _ in range(min(share, budget, len(self._ready)))]

    def _prefill_chunks(self, budget: int) -> list[Chunk]:
        chunks = []
        while budget and self._prefilling:
            sequence = self._prefilling[0]
            chunks.append(self._chunk(sequence, min(sequence.num_pending, budget)))
            budget -= chunks[-1].num_tokens
            if not sequence.is_prefilling:
                self._prefilling.popleft()
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
        )

    def _accept(self, sequence: Sequence, token_id: int) -> TokenEvent:
        sequence.output_ids.append(token_id)
        finish = None
        if token_id in self.limits.eos_token_ids and not sequence.sampling.ignore_eos:
            finish = FinishReason.STOP
        elif sequence.num_known >= sequence.max_len:
            finish = FinishReason.LENGTH
        if finish is None:
            self._ready.append(sequence)
        else:
            sequence.status = SequenceStatus.FINISHED
        return TokenEvent(sequence.seq_id, token_id, finish)

    def _release_if_drained(self, sequence: Sequence) -> None:
        if sequence.status is SequenceStatus.FINISHED and sequence.num_in_flight == 0:
            self.ledger.release(sequence)
            del self._admitted[sequence.seq_id]
            if sequence.num_dispatched:
                self._released.append(sequence.seq_id)
