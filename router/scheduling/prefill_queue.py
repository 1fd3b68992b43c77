"""The queue of prompts, from which chunks are cut."""

from collections.abc import Iterable
from collections.abc import Sequence as Several
from itertools import takewhile
from operator import add

from tramontane.proto.request import NUM_PRIORITIES
from tramontane.proto.step import Chunk
from tramontane.router.scheduling.fair_shares import FairShares
from tramontane.router.scheduling.page_allocator import PageAllocator
from tramontane.router.scheduling.sequence import Sequence


class PrefillQueue:
    """Admitted sequences whose known tokens have not all been submitted, by priority and fair
    shares.

    Within a priority, the sequence comes first that would be finished first if all accounts (keys,
    or requests without keys) were computed at the same speed. It is computed to its end unless a
    sequence arrives that would be finished before it: a short prompt does not wait for a long one,
    and equal ones do not take turns. Within an account, the prompt with the fewest tokens left
    comes first, and no prompt is passed over for more tokens than it has itself (``due``). Computed
    or cached tokens do not change the order, so it is restored only when sequences come or end
    (``is_sorted``). Charged output tokens count from then on: of prompts that are about equal, the
    one that has begun is computed to its end.

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
        # accounts that have submitted a prompt, so that their next prompt may be cached
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
        """Charge keys the output tokens that were scheduled since the last charge."""
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

    @property
    def must_yield(self) -> bool:
        """Whether the slots or pages of less urgent sequences are needed."""
        return self.priority_limit < NUM_PRIORITIES

    def schedulable(self) -> list[Sequence]:
        """Return the sequences that could submit a chunk now."""
        if not self.is_sorted:
            self._sort()
        if self._overlaps_chunks and not self.must_yield:
            return self.sequences
        urgent = [s for s in self.sequences if s.effective_priority <= self.priority_limit]
        return [s for s in urgent if self._overlaps_chunks or not s.num_in_flight]

    def prepared(self) -> list[Sequence]:
        """Return the schedulable sequences; the first one has its cached prefix, so that only the
        remaining tokens are cut.
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
        """Update the claimed tokens of a sequence when more or fewer of its tokens are cached than
        on arrival.
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
        """Charge a submitted chunk, and remove the sequence after its last one."""
        shares = self._shares_of(sequence)
        shares.compute(sequence.account, num_tokens)
        sequence.num_claimed -= num_tokens
        sequence.num_charged = sequence.num_dispatched
        if not sequence.num_pending:
            shares.end(sequence.account, 0)
            self.sequences.remove(sequence)
            if self._allocator.enable_prefix_caching:
                self._to_look_up.add(sequence.account)
            self.is_sorted = not self.sequences

    def check_integrity(self) -> None:
        """Assert that every sequence claims its remaining tokens, and that the order is right."""
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
