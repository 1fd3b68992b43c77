"""The prefill queue: which prompts are computed next, and how they are cut into chunks."""

from bisect import insort
from itertools import takewhile

from tramontane.proto.request import NUM_PRIORITIES
from tramontane.proto.step import Chunk
from tramontane.router.scheduling.page_allocator import PageAllocator
from tramontane.router.scheduling.sequence import Sequence, priority_key


class PrefillQueue:
    """Admitted sequences whose known tokens have not all been submitted, by priority and arrival.

    ``overlaps_chunks`` states whether a prompt's next chunk may be submitted while its last one is in flight.
    ``priority_limit`` is the least urgent level that may be scheduled at all: others pause while their slots or pages are needed.
    """

    def __init__(self, allocator: PageAllocator, overlaps_chunks: bool) -> None:
        self._allocator, self._overlaps_chunks = allocator, overlaps_chunks
        self.sequences: list[Sequence] = []
        self.priority_limit = NUM_PRIORITIES

    def add(self, sequence: Sequence) -> None:
        """Insert a sequence by priority and arrival."""
        insort(self.sequences, sequence, key=priority_key)

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence if it is here."""
        if sequence in self.sequences:
            self.sequences.remove(sequence)

    def sort(self) -> None:
        """Restore the order after a sequence has been promoted."""
        self.sequences.sort(key=priority_key)

    def schedulable(self) -> list[Sequence]:
        """Return the sequences of which a chunk could be submitted now."""
        if self._overlaps_chunks and self.priority_limit == NUM_PRIORITIES:
            return self.sequences
        urgent = [s for s in self.sequences if s.effective_priority <= self.priority_limit]
        return [s for s in urgent if self._overlaps_chunks or not s.num_in_flight]

    def take_chunks(self, budget: int) -> list[Chunk]:
        """Return chunks of at most ``budget`` tokens together: all of the first sequence, then of the next."""
        chunks = []
        for sequence in list(self.schedulable()):
            if budget <= 0:
                break
            chunks.append(self._chunk(sequence, min(sequence.num_pending, budget)))
            budget -= chunks[-1].num_tokens
            if not sequence.num_pending:
                self.sequences.remove(sequence)
        return chunks

    def _chunk(self, sequence: Sequence, num_tokens: int) -> Chunk:
        start, end = sequence.num_dispatched, sequence.num_dispatched + num_tokens
        sequence.num_dispatched = end
        sequence.num_in_flight += 1
        return Chunk(
            seq_id=sequence.seq_id,
            start=start,
            token_ids=sequence.known_ids(start, end),
            new_pages=self._allocator.allocate(sequence, end),
            sampling=sequence.sampling if start == 0 else None,
            needs_sample=end == sequence.num_known,
            num_prompt=len(sequence.prompt_ids) if start == 0 else 0,
            request_id=sequence.request_id if start == 0 else "",
        )


def urgent_tokens(prefills: list[Sequence]) -> int:
    """Return the unsubmitted tokens of the sequences that are as urgent as the first one."""
    return sum(s.num_pending for s in takewhile(lambda s: s.effective_priority == prefills[0].effective_priority, prefills))
