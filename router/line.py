"""Who waits for a place, and who is next."""

from bisect import insort
from collections.abc import Iterator
from itertools import chain

from tramontane.proto.request import NUM_PRIORITIES
from tramontane.router.sequence import Sequence, arrival


class Line:
    """The most urgent first, of equals whoever came first; a sequence that was computed already stands where it stood."""

    def __init__(self) -> None:
        self._levels: list[list[Sequence]] = [[] for _ in range(NUM_PRIORITIES)]
        self._length = 0
        self.num_tokens = 0  # known ones, of all that wait

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        return chain(*self._levels)

    @property
    def first(self) -> Sequence | None:
        return next(filter(None, self._levels))[0] if self._length else None

    def join(self, sequence: Sequence) -> None:
        insort(self._levels[sequence.level], sequence, key=arrival)
        self._length += 1
        self.num_tokens += sequence.num_known

    def leave(self, sequence: Sequence) -> None:
        self._levels[sequence.level].remove(sequence)
        self._length -= 1
        self.num_tokens -= sequence.num_known

    def of_priority(self, priority: int) -> list[Sequence]:
        """Those that came with it, also where they have become more urgent since."""
        return [sequence for sequence in self if sequence.priority == priority]

    def has_any_up_to(self, level: int) -> bool:
        """Whether anybody as urgent as this, or more, waits."""
        return any(self._levels[: level + 1])

    def oldest_below(self, level: int) -> Sequence | None:
        """Of those that are less urgent, whoever came first."""
        return min((waiting[0] for waiting in self._levels[level + 1 :] if waiting), key=arrival, default=None)

    def check_integrity(self) -> None:
        assert self._length == sum(map(len, self._levels))
        assert self.num_tokens == sum(sequence.num_known for sequence in self)
        for level, waiting in enumerate(self._levels):
            assert all(sequence.level == level for sequence in waiting)
            assert waiting == sorted(waiting, key=arrival)
