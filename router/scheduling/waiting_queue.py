"""Who waits for a place, and who is next."""

from collections.abc import Iterator
from itertools import chain

from tramontane.proto.request import NUM_PRIORITIES
from tramontane.router.scheduling.sequence import Sequence, arrival
from tramontane.router.scheduling.turns import Turns


class Line:
    """The most urgent first, of equals whoever's turn it is; a sequence that was computed already is before its equals."""

    def __init__(self) -> None:
        self._levels = [Turns() for _ in range(NUM_PRIORITIES)]
        self._length = 0
        self.num_tokens = 0  # known ones, of all that wait

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        return chain(*self._levels)

    @property
    def first(self) -> Sequence | None:
        return next(filter(None, self._levels)).first if self._length else None

    def join(self, sequence: Sequence) -> None:
        self._levels[sequence.level].join(sequence)
        self._length += 1
        self.num_tokens += sequence.num_known

    def begin(self, sequence: Sequence) -> None:
        """It has got a place."""
        self._levels[sequence.level].begin(sequence)
        self._count_out(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Without having got one."""
        self._levels[sequence.level].leave(sequence)
        self._count_out(sequence)

    def promote(self, sequence: Sequence) -> None:
        """It is as urgent as any from now on, and the next of these."""
        self.leave(sequence)
        sequence.level, sequence.has_had_turn = 0, True
        self.join(sequence)

    def _count_out(self, sequence: Sequence) -> None:
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
        return min((waiting.oldest for waiting in self._levels[level + 1 :] if waiting), key=arrival, default=None)

    def check_integrity(self) -> None:
        assert self._length == sum(1 for _ in self)
        assert self.num_tokens == sum(sequence.num_known for sequence in self)
        for level, waiting in enumerate(self._levels):
            assert all(sequence.level == level for sequence in waiting)
            waiting.check_integrity()
