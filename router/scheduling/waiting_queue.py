"""Who waits for a place, and who is next.

Whose turn it is among those who are equally urgent: API keys share what there is by tokens.
"""

from bisect import insort
from collections.abc import Iterator
from itertools import chain

from tramontane.proto.request import NUM_PRIORITIES
from tramontane.router.scheduling.sequence import Sequence, arrival_key


class FairQueue:
    """Start-time fair queueing (Goyal and others, SIGCOMM 1996): every owner's sequences wait in a line of their own.

    Next is the owner that has been given the fewest tokens, of equals the one whose first came first. Whoever has not been
    waiting counts from where the last turn began, so that nobody saves turns up and nobody is made to pay for quiet times:
    while A has 100 sequences waiting, B's first one waits for one of them at most. A single owner's go in the order of arrival.

    Sequences that have had their turn, and gave their place back, are before all others.
    """

    def __init__(self) -> None:
        self._requeued: list[Sequence] = []
        self._of_owner: dict[int, list[Sequence]] = {}  # none is empty
        self._virtual_time: dict[int, int] = {}  # tokens, by owner: those that wait, or did since somebody has been waiting
        self._now = 0  # how many the owner of the last turn had been given before it

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self._requeued, *self._of_owner.values())

    def __bool__(self) -> bool:
        return bool(self._requeued or self._of_owner)

    @property
    def first(self) -> Sequence:
        if self._requeued:
            return self._requeued[0]
        return min((line[0] for line in self._of_owner.values()), key=lambda s: (self._virtual_time[s.owner], arrival_key(s)))

    @property
    def oldest(self) -> Sequence:
        return min((line[0] for line in (self._requeued, *self._of_owner.values()) if line), key=arrival_key)

    def push(self, sequence: Sequence) -> None:
        if sequence.was_scheduled:
            insort(self._requeued, sequence, key=arrival_key)
            return
        if sequence.owner not in self._of_owner:
            self._of_owner[sequence.owner] = []
            self._virtual_time[sequence.owner] = max(self._virtual_time.get(sequence.owner, 0), self._now)
        insort(self._of_owner[sequence.owner], sequence, key=arrival_key)

    def remove(self, sequence: Sequence) -> None:
        """Without a turn: its client has left."""
        if sequence in self._requeued:
            self._requeued.remove(sequence)
            return
        line = self._of_owner[sequence.owner]
        line.remove(sequence)
        if not line:
            del self._of_owner[sequence.owner]
        if not self._of_owner:
            self._virtual_time.clear()
            self._now = 0

    def charge(self, sequence: Sequence) -> None:
        """It takes its turn, for which its owner pays with all tokens that it may come to."""
        if not sequence.was_scheduled:
            self._now = max(self._now, self._virtual_time[sequence.owner])
            self._virtual_time[sequence.owner] += sequence.max_len
        self.remove(sequence)
        sequence.was_scheduled = True

    def check_integrity(self) -> None:
        for line in (self._requeued, *self._of_owner.values()):
            assert line == sorted(line, key=arrival_key)
        assert all(self._of_owner.values())
        assert self._of_owner.keys() <= self._virtual_time.keys()


class WaitingQueue:
    """The most urgent first, of equals whoever's turn it is; a sequence that was computed already is before its equals."""

    def __init__(self) -> None:
        self._levels = [FairQueue() for _ in range(NUM_PRIORITIES)]
        self._length = 0
        self.num_tokens = 0  # known ones, of all that wait

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        return chain(*self._levels)

    @property
    def first(self) -> Sequence | None:
        return next(filter(None, self._levels)).first if self._length else None

    def push(self, sequence: Sequence) -> None:
        self._levels[sequence.effective_priority].push(sequence)
        self._length += 1
        self.num_tokens += sequence.num_known

    def pop_admitted(self, sequence: Sequence) -> None:
        """It has got a place."""
        self._levels[sequence.effective_priority].charge(sequence)
        self._count_out(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Without having got one."""
        self._levels[sequence.effective_priority].remove(sequence)
        self._count_out(sequence)

    def promote(self, sequence: Sequence) -> None:
        """It is as urgent as any from now on, and the next of these."""
        self.remove(sequence)
        sequence.effective_priority, sequence.was_scheduled = 0, True
        self.push(sequence)

    def _count_out(self, sequence: Sequence) -> None:
        self._length -= 1
        self.num_tokens -= sequence.num_known

    def of_priority(self, priority: int) -> list[Sequence]:
        """Those that came with it, also where they have become more urgent since."""
        return [sequence for sequence in self if sequence.priority == priority]

    def has_at_least(self, level: int) -> bool:
        """Whether anybody as urgent as this, or more, waits."""
        return any(self._levels[: level + 1])

    def oldest_lower_priority(self, level: int) -> Sequence | None:
        """Of those that are less urgent, whoever came first."""
        return min((waiting.oldest for waiting in self._levels[level + 1 :] if waiting), key=arrival_key, default=None)

    def check_integrity(self) -> None:
        assert self._length == sum(1 for _ in self)
        assert self.num_tokens == sum(sequence.num_known for sequence in self)
        for level, waiting in enumerate(self._levels):
            assert all(sequence.effective_priority == level for sequence in waiting)
            waiting.check_integrity()
