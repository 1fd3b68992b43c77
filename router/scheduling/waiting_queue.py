"""The waiting queue: sequences without a slot, by priority, then by fair queueing between API keys.

``WaitingQueue`` holds one ``FairQueue`` per priority. ``age_starved`` prevents starvation.
"""

from bisect import insort
from collections.abc import Iterable, Iterator
from itertools import chain

from tramontane.proto.request import NUM_PRIORITIES
from tramontane.router.scheduling.batch_queues import PrefillQueue
from tramontane.router.scheduling.running_set import RunningSet
from tramontane.router.scheduling.sequence import Sequence, SequenceStatus, arrival_key

MAX_PASSES = 64  # micro-batches that may pass a sequence over; with the last one it becomes as urgent as any


class FairQueue:
    """Start-time fair queueing (Goyal and others, SIGCOMM 1996) between owners: each has a queue of its own.

    Next is the owner that has been charged the fewest tokens, of equals the one whose first sequence arrived first. An owner
    that had nothing waiting starts at the virtual time of the last turn, so idle time earns no credit and costs nothing: while
    A has 100 sequences waiting, the first one of B waits for one of them at most. A single owner's sequences go in the order of
    arrival.

    Sequences that were scheduled before and have been preempted come before all others.
    """

    def __init__(self) -> None:
        self._requeued: list[Sequence] = []
        self._by_owner: dict[int, list[Sequence]] = {}  # no list is empty
        self._virtual_time: dict[int, int] = {}  # tokens charged, by owner; cleared when the queue is empty
        self._now = 0  # virtual time of the last turn's owner, before that turn was charged

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self._requeued, *self._by_owner.values())

    def __bool__(self) -> bool:
        return bool(self._requeued or self._by_owner)

    @property
    def first(self) -> Sequence:
        """The sequence whose turn it is."""
        if self._requeued:
            return self._requeued[0]
        return min((queue[0] for queue in self._by_owner.values()), key=lambda s: (self._virtual_time[s.owner], arrival_key(s)))

    @property
    def oldest(self) -> Sequence:
        """The sequence that arrived first."""
        return min((queue[0] for queue in (self._requeued, *self._by_owner.values()) if queue), key=arrival_key)

    def push(self, sequence: Sequence) -> None:
        """Add a sequence."""
        if sequence.was_scheduled:
            insort(self._requeued, sequence, key=arrival_key)
            return
        if sequence.owner not in self._by_owner:
            self._by_owner[sequence.owner] = []
            self._virtual_time[sequence.owner] = max(self._virtual_time.get(sequence.owner, 0), self._now)
        insort(self._by_owner[sequence.owner], sequence, key=arrival_key)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence without charging its owner."""
        if sequence in self._requeued:
            self._requeued.remove(sequence)
            return
        queue = self._by_owner[sequence.owner]
        queue.remove(sequence)
        if not queue:
            del self._by_owner[sequence.owner]
        if not self._by_owner:
            self._virtual_time.clear()

    def charge(self, sequence: Sequence) -> None:
        """Remove a sequence that takes its turn; its owner is charged all tokens that it may come to."""
        if not sequence.was_scheduled:
            self._now = max(self._now, self._virtual_time[sequence.owner])
            self._virtual_time[sequence.owner] += sequence.max_len
        self.remove(sequence)
        sequence.was_scheduled = True

    def check_integrity(self) -> None:
        """Assert the order of every queue and that every owner has a virtual time."""
        for queue in (self._requeued, *self._by_owner.values()):
            assert queue == sorted(queue, key=arrival_key)
        assert all(self._by_owner.values())
        assert self._by_owner.keys() <= self._virtual_time.keys()


class WaitingQueue:
    """Sequences by effective priority, within one by fair queueing; preempted ones come before their equals."""

    def __init__(self) -> None:
        self._levels = [FairQueue() for _ in range(NUM_PRIORITIES)]
        self._length = 0
        self.num_tokens = 0  # known tokens of all waiting sequences

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        return chain(*self._levels)

    @property
    def first(self) -> Sequence | None:
        """The next sequence to be admitted."""
        return next(filter(None, self._levels)).first if self._length else None

    def push(self, sequence: Sequence) -> None:
        """Add a sequence."""
        self._levels[sequence.effective_priority].push(sequence)
        self._length += 1
        self.num_tokens += sequence.num_known

    def pop_admitted(self, sequence: Sequence) -> None:
        """Remove a sequence that has got a slot, and charge its owner."""
        self._levels[sequence.effective_priority].charge(sequence)
        self._subtract(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has got no slot."""
        self._levels[sequence.effective_priority].remove(sequence)
        self._subtract(sequence)

    def promote(self, sequence: Sequence) -> None:
        """Make a sequence as urgent as any, and the next one of the most urgent."""
        self.remove(sequence)
        sequence.effective_priority, sequence.was_scheduled = 0, True
        self.push(sequence)

    def of_priority(self, priority: int) -> list[Sequence]:
        """Return the sequences that arrived with this priority, also those that have been promoted since."""
        return [sequence for sequence in self if sequence.priority == priority]

    def has_at_least(self, level: int) -> bool:
        """Return whether a sequence that is at least as urgent as this level is waiting."""
        return any(self._levels[: level + 1])

    def oldest_lower_priority(self, level: int) -> Sequence | None:
        """Return the oldest of the sequences that are less urgent than this level."""
        return min((queue.oldest for queue in self._levels[level + 1 :] if queue), key=arrival_key, default=None)

    def check_integrity(self) -> None:
        """Assert that the counts and every level are right."""
        waiting = list(self)
        assert self._length == len(waiting)
        assert self.num_tokens == sum(sequence.num_known for sequence in waiting)
        for level, queue in enumerate(self._levels):
            assert all(sequence.effective_priority == level for sequence in queue)
            queue.check_integrity()

    def _subtract(self, sequence: Sequence) -> None:
        self._length -= 1
        self.num_tokens -= sequence.num_known


def age_starved(going: Iterable[Sequence], waiting: WaitingQueue, prefills: PrefillQueue, running: RunningSet) -> None:
    """Count a micro-batch that takes prompt tokens of ``going`` against the oldest less urgent sequence that it passes over.

    Ages are counted in micro-batches because the scheduler has no clock. Only the oldest one ages: waiting for equals makes no
    sequence more urgent. After ``MAX_PASSES`` it is promoted and is the first of all; no sequence can take its slot, so it ends.
    The next oldest then continues the count.
    """
    level = min(sequence.effective_priority for sequence in going)
    passed = [s for s in prefills.sequences if s.effective_priority > level and s not in going]
    if (oldest_waiting := waiting.oldest_lower_priority(level)) is not None:
        passed.append(oldest_waiting)
    if not passed:
        return
    oldest = min(passed, key=arrival_key)
    oldest.num_skipped += 1
    if oldest.num_skipped < MAX_PASSES:
        return
    if oldest.status is SequenceStatus.RUNNING:
        running.promote(oldest)
        prefills.sort()
    else:
        waiting.promote(oldest)
