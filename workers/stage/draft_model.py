"""A draft model: a small model that drafts the next tokens of sequences for a large one.

Drafts are sampled with the same random numbers as the tokens that they predict; these depend only
on seed, choice and position. A draft model with the large model's weights would have all of its
drafts accepted, at any temperature.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from tramontane.proto.plan import StagePlan, WindowClass, ring_pages
from tramontane.proto.request import NOT_FINITE_TOKEN, SamplingParams
from tramontane.proto.step import Chunk, DecodeColumns, DraftRequest, MicroBatch, StepResult
from tramontane.workers.device.numerics import Numerics
from tramontane.workers.stage.stage_worker import StageWorker

# of one call, about: later calls compute the rest of long texts
MAX_CALL_TOKENS = 1024
NOT_BEGUN = -1


@dataclass(slots=True)
class _Sequence:
    """A held sequence. The cache has the first ``num_cached`` tokens of its text, which then grows
    up to ``goal``.

    ``num_written``: the most tokens that the cache has had since the sequence began; newer tokens
    overwrite older ones in the page ring.
    """

    slot: int
    sampling: SamplingParams
    text: list[int] = field(default_factory=list)
    worker_id: int = NOT_BEGUN  # its id on the worker, a new one each time it begins
    goal: int = 0
    num_cached: int = 0
    num_written: int = 0


class _Piece(NamedTuple):
    """Tokens ``start`` up to ``end`` of a sequence's text, to be computed in the next
    micro-batch.
    """

    sequence: _Sequence
    start: int
    end: int

    @property
    def needs_sample(self) -> bool:
        """Whether it ends with the last known token."""
        return self.end == len(self.sequence.text)

    @property
    def is_decode(self) -> bool:
        """Whether it is a decode, for which GPUs have graphs."""
        return (
            self.needs_sample
            and self.end - self.start == 1
            and self.sequence.worker_id != NOT_BEGUN
        )


class DraftModel:
    """Drafts tokens on a worker that has the whole model. Plain and synchronous: one caller, one
    thread.

    Each held sequence has a slot with its own pages in every window class, so that going back to an
    earlier token needs no bookkeeping: the tokens after it are overwritten. A sequence that goes
    back further than its ring of pages is computed from its start.
    """

    def __init__(self, worker: StageWorker) -> None:
        plan, cache = worker.plan, worker.plan.cache
        assert plan.num_stages == 1, "a draft model has one stage"
        assert all(c.num_pages >= plan.max_num_seqs * c.ring_pages for c in cache.classes), (
            "every slot has pages of its own"
        )
        self._worker, self._page_size, self._classes = worker, cache.page_size, cache.classes
        self._max_len = _max_text(plan)
        self._restart()

    @property
    def numerics(self) -> Numerics:
        """Numerics of the worker."""
        return self._worker.numerics

    def draft(
        self, requests: Sequence[DraftRequest], ended: Collection[int] = ()
    ) -> list[tuple[int, ...] | None]:
        """Return the drafts of each request; all requests are computed together.

        A request gets fewer drafts where the context ends, and none yet where its text is longer
        than one call computes. None: the sequence is not held up to ``num_kept``, or is new and no
        slot is free. Sequences in ``ended`` are dropped. After an exception no sequence is held.
        """
        for seq_id in ended:
            self._drop(seq_id)
        called = {request.seq_id for request in requests}
        assert len(called) == len(requests), "a sequence has one request in a call"
        sequences = [self._take(request, called) for request in requests]
        lengths = [0 if sequence is None else len(sequence.text) for sequence in sequences]
        self._compute([sequence for sequence in sequences if sequence is not None])
        return [
            None if s is None else tuple(s.text[length:])
            for s, length in zip(sequences, lengths, strict=True)
        ]

    # ---- held sequences, and their texts

    def _restart(self) -> None:
        """Drop all sequences, here and on the worker."""
        self._worker.fence(self._worker.epoch + 1)
        self._held: dict[int, _Sequence] = {}  # the least recently used first
        self._free_slots = list(range(self._worker.plan.max_num_seqs))
        # worker ids of sequences that ended since the last micro-batch
        self._freed: list[int] = []
        self._worker_ids = count()

    def _take(self, request: DraftRequest, called: Collection[int]) -> _Sequence | None:
        """Return a request's sequence with its new text, as the most recently used; None if it is
        not held.
        """
        sequence = self._held.pop(request.seq_id, None)
        if sequence is None:
            slot = None if request.num_kept else self._free_slot(called)
            if slot is None:
                return None
            sequence = _Sequence(slot, request.sampling)
        self._held[request.seq_id] = sequence
        if request.num_kept > len(sequence.text):
            return None
        self._set_text(sequence, request)
        return sequence

    def _set_text(self, sequence: _Sequence, request: DraftRequest) -> None:
        """Truncate the text to the kept tokens, append the new ones and set the goal. At least the
        last token is left to compute.

        The cache has 6 tokens of 7, of which 5 are kept: with a new token computing begins at
        position 5, without a new token at 4.
        """
        sequence.text[request.num_kept :] = request.token_ids
        assert sequence.text, "drafts follow a token"
        sequence.sampling = request.sampling
        sequence.goal = min(len(sequence.text) + request.num_tokens, self._max_len)
        sequence.num_cached = min(sequence.num_cached, request.num_kept, len(sequence.text) - 1)
        if request.num_kept == 0 or not all(
            self._has_window(sequence, each) for each in self._classes
        ):
            self._begin_again(sequence)

    def _has_window(self, sequence: _Sequence, window_class: WindowClass) -> bool:
        """Return whether the cache still has all positions that the next token sees.

        P = 4, W = 6, R = 3: after 17 tokens the ring has the pages 2 to 4, with positions from 8
        on. Position 13 sees from 8 on, and can be computed again; position 12 cannot.
        """
        oldest = (
            0
            if window_class.window is None
            else max(sequence.num_cached - window_class.window + 1, 0)
        )
        return oldest >= window_class.first_written(0, sequence.num_written, self._page_size)

    def _begin_again(self, sequence: _Sequence) -> None:
        """Restart a sequence from its first token, under a new id on the worker."""
        if sequence.worker_id != NOT_BEGUN:
            self._freed.append(sequence.worker_id)
        sequence.worker_id = NOT_BEGUN
        sequence.num_cached = sequence.num_written = 0

    def _free_slot(self, called: Collection[int]) -> int | None:
        """Return a slot for a new sequence. If none is free, the least recently used sequence
        without a request is dropped.
        """
        if not self._free_slots:
            self._drop(next((seq_id for seq_id in self._held if seq_id not in called), None))
        return self._free_slots.pop() if self._free_slots else None

    def _drop(self, seq_id: int | None) -> None:
        """Drop a sequence if it is held."""
        if seq_id is not None and (sequence := self._held.pop(seq_id, None)) is not None:
            self._begin_again(sequence)
            self._free_slots.append(sequence.slot)

    # ---- micro-batches

    def _compute(self, sequences: Sequence[_Sequence]) -> None:
        """Draft until all sequences have reached their goals, or the call's token budget is used
        up.

        If that fails, all sequences are dropped.
        """
        num_left = MAX_CALL_TOKENS
        try:
            while num_left > 0 and (
                growing := [each for each in sequences if len(each.text) < each.goal]
            ):
                pieces = _next_pieces(growing, self._worker.plan.max_num_batched_tokens)
                self._step(pieces)
                num_left -= sum(piece.end - piece.start for piece in pieces)
        except BaseException:
            self._restart()
            raise

    def _step(self, pieces: Sequence[_Piece]) -> None:
        """Compute one micro-batch, and add the sampled tokens to their texts."""
        batch = self._make_batch(pieces)
        result = self._worker.step(batch, None)
        assert isinstance(result, StepResult)
        self._freed.clear()
        sampled = dict(zip(batch.sampled_seq_ids, result.token_ids, strict=True))
        for sequence, _, end in pieces:
            sequence.num_cached = end
            sequence.num_written = max(sequence.num_written, end)
            token_id = sampled.get(sequence.worker_id)
            if token_id == NOT_FINITE_TOKEN:  # no drafts are possible
                sequence.goal = len(sequence.text)
            elif token_id is not None:
                sequence.text.append(token_id)

    def _make_batch(self, pieces: Sequence[_Piece]) -> MicroBatch:
        rows = [piece for piece in pieces if piece.is_decode]
        chunks = [self._chunk(piece) for piece in pieces if not piece.is_decode]
        # single tokens last, next to the decodes
        chunks.sort(key=lambda chunk: chunk.num_tokens == 1)
        new_pages = [(index, self._new_pages(piece)) for index, piece in enumerate(rows)]
        decodes = DecodeColumns(
            seq_ids=tuple([piece.sequence.worker_id for piece in rows]),
            starts=tuple([piece.start for piece in rows]),
            token_ids=tuple([piece.sequence.text[-1] for piece in rows]),
            new_pages=tuple([(index, pages) for index, pages in new_pages if any(pages)]),
        )
        return MicroBatch(
            self._worker.epoch,
            self._worker.next_step_id,
            tuple(chunks),
            tuple(self._freed),
            decodes,
        )

    def _chunk(self, piece: _Piece) -> Chunk:
        sequence, start, end = piece
        begins = sequence.worker_id == NOT_BEGUN
        if begins:
            sequence.worker_id = next(self._worker_ids)
        return Chunk(
            seq_id=sequence.worker_id,
            start=start,
            token_ids=tuple(sequence.text[start:end]),
            new_pages=self._new_pages(piece),
            sampling=_own_sampling(sequence.sampling) if begins else None,
            needs_sample=piece.needs_sample,
        )

    def _new_pages(self, piece: _Piece) -> tuple[tuple[int, ...], ...]:
        """Return the pages of the blocks that begin in a piece, for each window class. Page n of a
        sequence is page n mod R of its slot.

        R = 3, slot 2 has the pages 6 to 8. The sequence's pages 3 and 4 are 6 and 7, where its
        pages 0 and 1 were before.
        """
        slot = piece.sequence.slot
        return tuple(
            tuple(
                [
                    slot * c.ring_pages + n % c.ring_pages
                    for n in c.new_pages(piece.start, piece.end, self._page_size)
                ]
            )
            for c in self._classes
        )


def _next_pieces(sequences: Sequence[_Sequence], max_tokens: int) -> list[_Piece]:
    """Return the pieces of the next micro-batch: the known tokens of each sequence, up to
    ``max_tokens`` in all.

    Sequences that lack the fewest tokens come first, so that they draft while long texts are
    computed. Sequences lack 500, 1 and 30 tokens, at most 512 fit: 481, 1 and 30 tokens now, and
    then the last 19, with a decode of each of the other two.
    """
    pieces, num_left = [], max_tokens
    for sequence in sorted(sequences, key=lambda each: len(each.text) - each.num_cached):
        start = sequence.num_cached
        end = min(len(sequence.text), start + num_left)
        if start < end:
            pieces.append(_Piece(sequence, start, end))
            num_left -= end - start
    return pieces


def _own_sampling(sampling: SamplingParams) -> SamplingParams:
    """Return the sampling parameters of drafts, a subset of the request's."""
    return SamplingParams(
        max_tokens=1,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        choice=sampling.choice,
    )


def _max_text(plan: StagePlan) -> int:
    """Return the maximum length of a text with its drafts: the model's context, or the size of page
    rings that must not wrap around.

    P = 16, a context of 4096, planned for 300 positions. Without a window a ring has 19 pages, for
    304 tokens. With W = 64 it has 5 and wraps around: this class alone would allow a text of 4096
    tokens.
    """
    cache, context = plan.cache, plan.args.max_seq_len
    lengths = cache.page_size, context, cache.num_drafts
    short = [
        c.ring_pages * cache.page_size
        for c in cache.classes
        if c.ring_pages < ring_pages(c.window, *lengths)
    ]
    return min([context, *short])
