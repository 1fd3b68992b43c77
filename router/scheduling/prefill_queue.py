"""Prompts that are being computed: which of them go next, and how they are cut."""

from bisect import insort
from itertools import takewhile

from tramontane.proto.request import NUM_PRIORITIES
from tramontane.proto.step import Chunk
from tramontane.router.scheduling.page_allocator import PageAllocator
from tramontane.router.scheduling.sequence import Sequence, priority_key


class PrefillQueue:
    """Admitted sequences whose known tokens have not all been submitted, by rank.

    ``overlap``: whether a prompt's next chunk may go while its last one is in flight. ``least_urgent`` is the level up to
    which any go at all: others make way for somebody who waits for a place.
    """

    def __init__(self, ledger: PageAllocator, overlap: bool) -> None:
        self._ledger, self._overlap = ledger, overlap
        self.sequences: list[Sequence] = []
        self.priority_limit = NUM_PRIORITIES

    def add(self, sequence: Sequence) -> None:
        insort(self.sequences, sequence, key=priority_key)

    def discard(self, sequence: Sequence) -> None:
        if sequence in self.sequences:
            self.sequences.remove(sequence)

    def sort(self) -> None:
        """Somebody's level is another now."""
        self.sequences.sort(key=priority_key)

    def schedulable(self) -> list[Sequence]:
        """Those of which something could go now."""
        if self._overlap and self.priority_limit == NUM_PRIORITIES:
            return self.sequences
        return [
            s for s in self.sequences if s.effective_priority <= self.priority_limit and (self._overlap or not s.num_in_flight)
        ]

    def take_chunks(self, budget: int) -> list[Chunk]:
        """Of whoever is first as much as there is, then of the next."""
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
            new_pages=self._ledger.allocate(sequence, end),
            sampling=sequence.sampling if start == 0 else None,
            needs_sample=end == sequence.num_known,
            num_prompt=len(sequence.prompt_ids) if start == 0 else 0,
            request_id=sequence.request_id if start == 0 else "",
        )


def urgent_tokens(prompts: list[Sequence]) -> int:
    """Of those as urgent as the first: what of them has not been submitted."""
    return sum(s.num_pending for s in takewhile(lambda s: s.effective_priority == prompts[0].effective_priority, prompts))
