"""The decode queue: sequences past their prompts, in the order in which their next tokens are computed."""

from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Several

from tramontane.proto.step import DecodeColumns
from tramontane.router.scheduling.page_allocator import PageAllocator
from tramontane.router.scheduling.sequence import Sequence, SequenceStatus
from tramontane.router.scheduling.work_estimator import WorkEstimator


class DecodeQueue:
    """Decoding sequences; one is ready once its last token is known.

    ``num_sequences`` and ``num_keys`` (keys that they see) also count sequences that are in flight and not ready.
    """

    def __init__(self, allocator: PageAllocator, work_estimator: WorkEstimator) -> None:
        self._allocator, self._work_estimator = allocator, work_estimator
        self.ready: deque[Sequence] = deque()
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

    def record_growth(self, lengths: Several[int]) -> None:
        """Count one token more for sequences that now have these lengths: each sees one key more, up to the window."""
        self.num_keys += self._work_estimator.visible_keys_gained(lengths)

    def take_batch(self, max_decodes: int, preempt: Callable[[], bool]) -> tuple[list[Sequence], DecodeColumns]:
        """Return one token of each of the first ready sequences; fewer where a page is needed that is not free yet.

        ``preempt`` makes another sequence release its pages, and returns whether any are free now.
        """
        going: list[Sequence] = []
        grown = []
        ready = self.ready
        while ready and len(going) < max_decodes:
            sequence = ready[0]
            if (num_known := sequence.num_known) > sequence.num_paged_positions:
                if not self._allocator.reserve(sequence, num_known):
                    if preempt():
                        continue
                    break
                grown.append((len(going), self._allocator.allocate(sequence, num_known)))
            ready.popleft()
            going.append(sequence)
            sequence.num_dispatched = num_known
            sequence.num_in_flight += 1
        return going, DecodeColumns(
            seq_ids=tuple([s.seq_id for s in going]),
            starts=tuple([s.num_known - 1 for s in going]),
            token_ids=tuple([s.output_ids[-1] for s in going]),
            new_pages=tuple(grown),
        )

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Assert that the counts are right."""
        decoding = [s for s in running if s.is_decoding]
        assert all(s.status is SequenceStatus.RUNNING for s in decoding)
        assert self.num_sequences == len(decoding)
        assert self.num_keys == sum(self._work_estimator.visible_keys(s.num_known) for s in decoding)
