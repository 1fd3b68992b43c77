"""The queues from which micro-batches are made: prompts, which are cut into chunks, and sequences
that decode.
"""

from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from operator import add

from tramontane.proto.plan import SpeculativeConfig
from tramontane.proto.request import NUM_PRIORITIES
from tramontane.proto.step import PLACEHOLDER_TOKEN, Chunk, DecodeColumns
from tramontane.router.scheduling.fair_shares import FairShares
from tramontane.router.scheduling.page_allocator import PageAllocator
from tramontane.router.scheduling.policy import WorkEstimator
from tramontane.router.scheduling.sequence import Sequence, SequenceStatus
from tramontane.router.speculation.model_drafter import DraftQueue, ModelDrafter, NgramDrafter
from tramontane.router.speculation.speculation_state import Drafter, SpeculationState

# Indexing budget of drafts per micro-batch, in tokens (about 1 ms). Longer prompts are indexed over
# several.
TOKENS_INDEXED = 1024
NewPages = tuple[tuple[int, tuple[tuple[int, ...], ...]], ...]


class PrefillQueue:
    """Admitted sequences whose known tokens have not all been submitted, by priority and fair
    shares.

    Of a priority, first is the sequence that would be finished first if all accounts (keys, or
    requests without keys) were computed at the same speed. It is computed to its end unless one
    comes that would be finished before it: a short prompt waits for no long one, and equal ones do
    not take turns. Of an account's prompts that with the fewest tokens left is first, and none is
    passed over for more tokens than it has itself (``due``). What has been computed or cached makes
    no difference to the order, so it is restored only when sequences come or end (``is_sorted``).
    Answers that are charged count from then on: of prompts that are about equal, one that has been
    begun is computed to its end.

    Sequences that have been promoted come before their equals, in the order of arrival.
    """

    def __init__(
        self, allocator: PageAllocator, shares: Several[FairShares], overlaps_chunks: bool
    ) -> None:
        self._allocator, self._shares, self._overlaps_chunks = allocator, shares, overlaps_chunks
        self.sequences: list[Sequence] = []
        # less urgent levels pause while their slots or pages are needed
        self.priority_limit = NUM_PRIORITIES
        self.is_sorted = True
        # accounts of which one prompt was submitted, so that the next may be cached
        self._to_look_up: set[int] = set()

    def add(self, sequence: Sequence) -> None:
        """Add a sequence, which may have been begun if it was promoted."""
        num_cached = 0 if sequence.num_dispatched else self._allocator.count_cached(sequence)
        sequence.num_claimed = sequence.num_pending - num_cached
        sequence.due = self._shares_of(sequence).begin(sequence.account, sequence.num_claimed)
        self.sequences.append(sequence)
        self.is_sorted = False

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence if it is here."""
        if sequence in self.sequences:
            self._shares_of(sequence).end(sequence.account, sequence.num_claimed)
            self.sequences.remove(sequence)
            self.is_sorted = False

    def charge_decodes(self, sequences: Iterable[Sequence]) -> None:
        """Charge keys the tokens of answers that were scheduled since they were charged last."""
        for sequence in sequences:
            if (
                sequence.is_decoding
                and sequence.owner
                and (num_tokens := sequence.num_dispatched - sequence.num_charged) > 0
            ):
                self._shares_of(sequence).charge_decodes(sequence.owner, num_tokens)
                sequence.num_charged = sequence.num_dispatched

    def _shares_of(self, sequence: Sequence) -> FairShares:
        return self._shares[sequence.effective_priority]

    def _sort(self) -> None:
        """Sort by the virtual time at which each sequence would be finished: an account's sequences
        one after the other.

        A is at 100 and has prompts of 30 and 500 tokens, B is at 0 and has one of 200: 130 (A), 200
        (B), 630 (A).
        """
        ends: dict[tuple[int, int], int] = {}
        ranked = []
        for sequence in sorted(self.sequences, key=lambda s: (s.due, s.seq_id)):
            account = sequence.effective_priority, sequence.account
            if account not in ends:
                ends[account] = self._shares_of(sequence).tag(sequence.account)
                if sequence.account in self._to_look_up and not sequence.num_dispatched:
                    self._set_claimed(
                        sequence, sequence.num_known - self._allocator.count_cached(sequence)
                    )
            ends[account] += sequence.num_claimed
            finished = -1 if sequence.is_promoted else ends[account]
            ranked.append((sequence.effective_priority, finished, sequence.seq_id, sequence))
        ranked.sort()
        self.sequences = [sequence for *_, sequence in ranked]
        self.is_sorted = True
        self._to_look_up.clear()

    def schedulable(self) -> list[Sequence]:
        """Return the sequences of which a chunk could be submitted now."""
        if not self.is_sorted:
            self._sort()
        if self._overlaps_chunks and self.priority_limit == NUM_PRIORITIES:
            return self.sequences
        urgent = [s for s in self.sequences if s.effective_priority <= self.priority_limit]
        return [s for s in urgent if self._overlaps_chunks or not s.num_in_flight]

    def prepared(self) -> list[Sequence]:
        """Return the schedulable sequences; the first begins where its cached prefix ends, so that
        only the rest is cut.
        """
        sequences = self.schedulable()
        if sequences:
            self._look_up(sequences[0])
        return sequences

    def _look_up(self, sequence: Sequence) -> None:
        if not sequence.num_dispatched:
            self._allocator.reuse_prefix(sequence)
            self._set_claimed(sequence, sequence.num_pending)

    def _set_claimed(self, sequence: Sequence, num_tokens: int) -> None:
        """Correct what a sequence claims, now that more or less of it is cached than when it
        came.
        """
        if more := num_tokens - sequence.num_claimed:
            self._shares_of(sequence).adjust(sequence.account, more)
            sequence.num_claimed = num_tokens
            self.is_sorted = False

    def take_chunks(self, budget: int) -> list[Chunk]:
        """Return chunks of at most ``budget`` tokens together: all of the first sequence, then of
        the next.
        """
        chunks = []
        for sequence in list(self.schedulable()):
            if budget <= 0:
                break
            self._look_up(sequence)
            chunks.append(self._chunk(sequence, min(sequence.num_pending, budget)))
            budget -= chunks[-1].num_tokens
            self._charge(sequence, chunks[-1].num_tokens)
        return chunks

    def _charge(self, sequence: Sequence, num_tokens: int) -> None:
        """Charge a chunk that is submitted, and remove the sequence with its last one."""
        shares = self._shares_of(sequence)
        shares.compute(sequence.account, num_tokens)
        sequence.num_claimed -= num_tokens
        sequence.num_charged = sequence.num_dispatched
        if not sequence.num_pending:
            shares.end(sequence.account, 0)
            self.sequences.remove(sequence)
            if self._allocator.reuses_prefixes:
                self._to_look_up.add(sequence.account)
            self.is_sorted = not self.sequences

    def check_integrity(self) -> None:
        """Assert that every sequence claims what is left of it, and that the order is right."""
        for sequence in self.sequences:
            assert sequence.num_claimed == sequence.num_pending or not sequence.num_dispatched
            assert sequence.num_claimed > 0
        ranks = [(s.effective_priority, not s.is_promoted) for s in self.sequences]
        assert not self.is_sorted or ranks == sorted(ranks)
        for shares in self._shares:
            shares.check_integrity()

    def _chunk(self, sequence: Sequence, num_tokens: int) -> Chunk:
        """Return the next tokens. The first chunk has the pages of the prefix before it."""
        start, end = sequence.num_dispatched, sequence.num_dispatched + num_tokens
        given = None if sequence.is_started else tuple(map(tuple, sequence.pages))
        sequence.num_dispatched, sequence.is_started = end, True
        sequence.num_in_flight += 1
        pages = self._allocator.allocate(sequence, start, end)
        if given is None:
            return Chunk(
                sequence.seq_id,
                start,
                sequence.known_ids(start, end),
                pages,
                None,
                end == sequence.num_known,
            )
        self._allocator.record_start(sequence, start)
        return Chunk(
            seq_id=sequence.seq_id,
            start=start,
            token_ids=sequence.known_ids(start, end),
            new_pages=tuple(map(add, given, pages)),
            sampling=sequence.sampling,
            needs_sample=end == sequence.num_known,
            num_prompt=len(sequence.prompt_ids),
            request_id=sequence.request_id,
            skipped_ids=sequence.known_ids(0, start) if sequence.sampling.needs_tokens else (),
        )


def urgent_tokens(prefills: list[Sequence]) -> int:
    """Return the unsubmitted tokens of the sequences that are as urgent as the first one."""
    return sum(
        s.num_pending
        for s in takewhile(
            lambda s: s.effective_priority == prefills[0].effective_priority, prefills
        )
    )


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """What drafts a micro-batch may have.

    ``break_even``: how likely a draft must be right. ``max_rows``: of decodes, with drafts.
    ``num_spare``: pages of each class without a window that drafts must leave for other sequences.
    """

    break_even: float
    max_rows: int
    num_spare: int


class DecodeQueue:
    """Decoding sequences; one is ready once its last token is known."""

    def __init__(
        self,
        allocator: PageAllocator,
        work_estimator: WorkEstimator,
        speculative: SpeculativeConfig | None = None,
    ) -> None:
        self._allocator, self._work_estimator, self._speculative = (
            allocator,
            work_estimator,
            speculative,
        )
        self.ready: deque[Sequence] = deque()
        self.draft_queue = DraftQueue()  # of a draft model, if drafts come from one
        self._num_to_index = 0  # tokens, with the micro-batch that is being made
        # also of those that are in flight and not ready; keys that they see
        self.num_sequences = self.num_keys = 0

    def add(self, sequence: Sequence) -> None:
        """Make a sequence ready, perhaps for the first time."""
        self.ready.append(sequence)
        if not sequence.is_decoding:
            sequence.is_decoding = True
            self.num_sequences += 1
            self.num_keys += self._work_estimator.visible_keys(sequence.num_known)

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence if it is here."""
        if sequence in self.ready:
            self.ready.remove(sequence)
        if sequence.is_decoding:
            sequence.is_decoding = False
            self.num_sequences -= 1
            self.num_keys -= self._work_estimator.visible_keys(sequence.num_known)

    def add_placeholders(self, sequences: Iterable[Sequence]) -> None:
        """Make sequences ready again before the token is known that the micro-batch just made
        samples for them.

        Prompt of 3, at most 5 tokens: once the prompt is submitted, a placeholder stands for the
        fourth token. Once that is, none does for the fifth: the last token of all is never
        submitted.
        """
        for sequence in sequences:
            num_tokens = sequence.num_known + sequence.num_placeholders + 1
            if num_tokens < sequence.max_len and sequence.status is SequenceStatus.RUNNING:
                sequence.num_placeholders += 1
                self.add(sequence)

    def record_growth(self, lengths: Several[int]) -> None:
        """Count one token more for sequences that now have these lengths: each sees one key more,
        up to the window.
        """
        self.num_keys += self._work_estimator.visible_keys_gained(lengths)

    def take_batch(
        self,
        max_decodes: int,
        preempt: Callable[[], bool],
        limits: DraftLimits | None = None,
        *,
        goes_ahead: bool = False,
    ) -> tuple[list[Sequence], list[int], DecodeColumns]:
        """Return one token of each of the first ready sequences; fewer where a page is needed that
        is not free yet.

        ``preempt`` makes another sequence release its pages, and returns whether any are free now.
        Within ``limits`` drafts follow; if there are any, the list has the rows of each sequence.
        ``goes_ahead``: placeholders may be submitted.
        """
        going: list[Sequence] = []
        grown = []
        drafts: list[tuple[int, ...]] = []
        ready, num_rows = self.ready, 0
        self._num_to_index = TOKENS_INDEXED
        num_left = 0 if limits is None else limits.max_rows - min(max_decodes, len(ready))
        while ready and len(going) < max_decodes:
            sequence = ready[0]
            if sequence.num_placeholders and not goes_ahead:
                break
            end = num_tokens = sequence.num_known + sequence.num_placeholders
            if limits is not None:
                drafts.append(self._draft(sequence, limits, num_left))
                end += len(drafts[-1])
            if end > sequence.num_paged_positions:
                if not self._allocator.reserve(sequence, end):
                    if limits is not None:
                        drafts.pop()
                    if preempt():
                        continue
                    break
                grown.append(
                    (
                        num_rows + end - num_tokens,
                        self._allocator.allocate(sequence, num_tokens - 1, end),
                    )
                )
            ready.popleft()
            going.append(sequence)
            sequence.num_dispatched = num_tokens
            sequence.num_in_flight += 1
            num_rows += 1 + end - num_tokens
            num_left -= end - num_tokens
        if any(drafts):
            return (
                going,
                [1 + len(each) for each in drafts],
                _with_drafts(going, drafts, tuple(grown)),
            )
        columns = DecodeColumns(
            seq_ids=tuple([s.seq_id for s in going]),
            starts=tuple([s.num_dispatched - 1 for s in going]),
            token_ids=tuple(
                [PLACEHOLDER_TOKEN if s.num_placeholders else s.output_ids[-1] for s in going]
            ),
            new_pages=tuple(grown),
        )
        return going, [], columns

    def _draft(self, sequence: Sequence, limits: DraftLimits, num_left: int) -> tuple[int, ...]:
        """Return drafts of the tokens after the next one, for which pages are reserved.

        A sequence whose experts are returned gets none: those of wrong drafts would be among them.
        """
        assert self._speculative is not None
        if sequence.sampling.return_experts:
            return ()
        if sequence.speculation is None:
            sequence.speculation = SpeculationState(
                self._speculative, sequence.prompt_ids, partial(self._drafter, sequence)
            )
        sequence.speculation.update(sequence.output_ids)
        self._num_to_index -= sequence.speculation.index(self._num_to_index)
        drafts = sequence.speculation.draft(
            limits.break_even, min(num_left, self._max_drafts(sequence))
        )
        if drafts and not self._allocator.reserve(
            sequence, sequence.num_known + len(drafts), limits.num_spare
        ):
            return ()
        sequence.speculation.num_ahead = len(drafts)
        return drafts

    def _drafter(self, sequence: Sequence, tokens: Several[int]) -> Drafter:
        config, sampling = self._speculative, sequence.sampling
        assert config is not None
        if config.method == "ngram":
            return NgramDrafter(tokens, config.prompt_lookup_min, config.prompt_lookup_max)
        num_tokens = 1 + config.num_speculative_tokens
        return ModelDrafter(
            tokens, sequence.seq_id, sampling, num_tokens, sequence.max_len, self.draft_queue
        )

    def take_ahead(
        self, sequences: Iterable[Sequence], limits: DraftLimits
    ) -> tuple[list[Sequence], list[int], DecodeColumns]:
        """Return the next drafts of decoding sequences whose last drafts are in flight, and the
        rows of each.

        Sequences whose tokens depend on the ones before (penalties, grammars) have none: these have
        to be known first.
        """
        going: list[Sequence] = []
        drafts: list[tuple[int, ...]] = []
        grown, num_rows = [], 0
        self._num_to_index = TOKENS_INDEXED
        for sequence in sequences:
            state = sequence.speculation
            if state is None or not sequence.num_in_flight or sequence.sampling.needs_tokens:
                continue
            assert not sequence.num_pending, "drafts follow the last known token"
            max_tokens = min(
                limits.max_rows - num_rows, self._max_drafts(sequence) - state.num_ahead
            )
            self._num_to_index -= state.index(self._num_to_index)
            own = state.draft_ahead(limits.break_even, max_tokens)
            end = sequence.num_known + state.num_ahead + len(own)
            if not own or not self._allocator.reserve(sequence, end, limits.num_spare):
                continue
            num_rows += len(own)
            if end > sequence.num_paged_positions:
                grown.append(
                    (num_rows - 1, self._allocator.allocate(sequence, sequence.num_dispatched, end))
                )
            sequence.num_in_flight += 1
            going.append(sequence)
            drafts.append(own)
        columns = _with_drafts(going, drafts, tuple(grown), is_ahead=True)
        for sequence, own in zip(going, drafts, strict=True):
            assert sequence.speculation is not None
            sequence.speculation.num_ahead += len(own)
        return going, [len(own) for own in drafts], columns

    def _max_drafts(self, sequence: Sequence) -> int:
        """Return the most drafts after a sequence's last known token: its last token of all is
        never submitted.
        """
        return min(sequence.max_len - sequence.num_known - 1, self._allocator.cache.num_drafts)

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Assert that the counts are right."""
        decoding = [s for s in running if s.is_decoding]
        assert all(s.status is SequenceStatus.RUNNING for s in decoding)
        assert self.num_sequences == len(decoding)
        ready = set(map(id, self.ready))
        assert all(s.num_pending == (id(s) in ready) for s in decoding), (
            "what is ready has one token that is not submitted"
        )
        assert self.num_keys == sum(
            self._work_estimator.visible_keys(s.num_known) for s in decoding
        )


def _with_drafts(
    going: list[Sequence], drafts: list[tuple[int, ...]], grown: NewPages, *, is_ahead: bool = False
) -> DecodeColumns:
    """Return the rows of each sequence: its last known token and its drafts, or the drafts after
    those in flight.
    """
    runs = []
    for sequence, own in zip(going, drafts, strict=True):
        if is_ahead:
            assert sequence.speculation is not None
            runs.append((sequence.seq_id, sequence.num_known + sequence.speculation.num_ahead, own))
        else:
            runs.append((sequence.seq_id, sequence.num_known - 1, (sequence.output_ids[-1], *own)))
    return DecodeColumns(
        seq_ids=tuple([seq_id for seq_id, _, tokens in runs for _ in tokens]),
        starts=tuple([start + i for _, start, tokens in runs for i in range(len(tokens))]),
        token_ids=tuple([token_id for _, _, tokens in runs for token_id in tokens]),
        new_pages=grown,
        is_ahead=is_ahead,
    )
