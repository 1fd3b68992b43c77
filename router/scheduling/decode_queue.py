"""Sequences past their prompts: whose next token is computed next, and how many keys they see."""

from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Several

from tramontane.proto.step import DecodeColumns
from tramontane.router.scheduling.page_allocator import PageAllocator
from tramontane.router.scheduling.sequence import Sequence, SequenceStatus
from tramontane.router.scheduling.work_estimator import WorkEstimator


class DecodeQueue:
    """A sequence is ready once its last token is known; those in flight are counted, and are not ready."""

    def __init__(self, ledger: PageAllocator, keys: WorkEstimator) -> None:
        self._ledger, self._keys = ledger, keys
        self.ready: deque[Sequence] = deque()
        self.num_sequences = self.num_keys = 0

    def add(self, sequence: Sequence) -> None:
        """It is ready, perhaps for the first time."""
        self.ready.append(sequence)
        if not sequence.is_decoding:
            sequence.is_decoding = True
            self.num_sequences += 1
            self.num_keys += self._keys.visible_keys(sequence.num_known)

    def discard(self, sequence: Sequence) -> None:
        if sequence in self.ready:
            self.ready.remove(sequence)
        if sequence.is_decoding:
            sequence.is_decoding = False
            self.num_sequences -= 1
            self.num_keys -= self._keys.visible_keys(sequence.num_known)

    def record_growth(self, lengths: Several[int]) -> None:
        """Sequences have one token more, and now so many: each sees one key more, up to the window."""
        self.num_keys += self._keys.visible_keys_gained(lengths)

    def take_batch(self, most: int, make_room: Callable[[], bool]) -> tuple[list[Sequence], DecodeColumns]:
        """One token each, whoever was ready first; fewer where a page is needed that is not free yet.

        ``make_room`` has somebody give pages back, and says whether any are free now.
        """
        going: list[Sequence] = []
        grown = []
        ready = self.ready
        while ready and len(going) < most:
            sequence = ready[0]
            if (num_known := sequence.num_known) > sequence.num_paged_positions:
                if not self._ledger.reserve(sequence, num_known):
                    if make_room():
                        continue
                    break
                grown.append((len(going), self._ledger.allocate(sequence, num_known)))
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

    def check_integrity(self, admitted: Iterable[Sequence]) -> None:
        decoding = [s for s in admitted if s.is_decoding]
        assert all(s.status is SequenceStatus.RUNNING for s in decoding)
        assert self.num_sequences == len(decoding)
        assert self.num_keys == sum(self._keys.visible_keys(s.num_known) for s in decoding)
