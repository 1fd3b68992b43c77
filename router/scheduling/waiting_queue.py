"""The waiting queue: sequences without a slot, by priority, then by fair queueing between keys, or
requests without keys.

``WaitingQueue`` holds one ``FairQueue`` per priority. ``age_starved`` prevents starvation.
"""

from bisect import insort
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain

from tramontane.router.scheduling.batch_queues import PrefillQueue
from tramontane.router.scheduling.fair_shares import FairShares
from tramontane.router.scheduling.running_set import RunningSet
from tramontane.router.scheduling.sequence import Sequence, SequenceStatus, arrival_key

# micro-batches that may pass a sequence over; with the last one it becomes as urgent as any
MAX_PASSES = 64


class FairQueue:
    """Start-time fair queueing between accounts (``fair_shares.py``): each has a queue of its own,
    in the order of arrival.

    Next is the account that has been charged the fewest tokens, of equals the one whose first
    sequence arrived first. An account that had nothing to compute begins at the virtual time, so
    while A has 100 sequences waiting, the first one of B waits for one of them at most. A single
    key's sequences go in the order of arrival, and without keys those of all requests.

    Sequences that were scheduled before and have been preempted come before all others.
    """

    def __init__(self, shares: FairShares) -> None:
        self._shares = shares
        self._requeued: list[Sequence] = []
        self._by_account: dict[int, list[Sequence]] = {}  # no list is empty
        # a heap; a turn in it may have become later since, or be gone
        self._turns: list[tuple[int, int, int]] = []

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self._requeued, *self._by_account.values())

    def __bool__(self) -> bool:
        return bool(self._requeued or self._by_account)

    @property
    def first(self) -> Sequence:
        """The sequence whose turn it is."""
        if self._requeued:
            return self._requeued[0]
        while self._shares.lowered:
            self._enter(self._shares.lowered.pop())
        turns = self._turns
        while (turn := self._turn(account := turns[0][-1])) != turns[0]:
            if turn is None:
                heappop(turns)
            else:
                heapreplace(turns, turn)
        return self._by_account[account][0]

    def _turn(self, account: int) -> tuple[int, int, int] | None:
        """Return what decides whether an account is next, None if it has no sequence here."""
        queue = self._by_account.get(account)
        return (self._shares.turn(account), arrival_key(queue[0]), account) if queue else None

    def _enter(self, account: int) -> None:
        """Put an account into the heap whose turn may be earlier than what it has there."""
        if (turn := self._turn(account)) is not None:
            heappush(self._turns, turn)
            self._forget_most()

    def _forget_most(self) -> None:
        """Forget entries of accounts that have gone or come again, if they are most: of requests
        that were cancelled.
        """
        if len(self._turns) > 2 * len(self._by_account) + 16:
            self._turns = [turn for account in self._by_account if (turn := self._turn(account))]
            heapify(self._turns)

    @property
    def oldest(self) -> Sequence:
        """The sequence that arrived first."""
        return min(
            (queue[0] for queue in (self._requeued, *self._by_account.values()) if queue),
            key=arrival_key,
        )

    def push(self, sequence: Sequence) -> None:
        """Add a sequence."""
        if sequence.was_scheduled:
            insort(self._requeued, sequence, key=arrival_key)
            return
        self._shares.wait(sequence.account)
        queue = self._by_account.setdefault(sequence.account, [])
        insort(queue, sequence, key=arrival_key)
        if queue[0] is sequence:
            self._enter(sequence.account)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence."""
        if sequence in self._requeued:
            self._requeued.remove(sequence)
            return
        queue = self._by_account[sequence.account]
        queue.remove(sequence)
        if not queue:
            del self._by_account[sequence.account]
        self._shares.stop_waiting(sequence.account)
        self._forget_most()

    def check_integrity(self) -> None:
        """Assert the order of every queue, and that the one whose turn it is has been found."""
        for queue in (self._requeued, *self._by_account.values()):
            assert queue == sorted(queue, key=arrival_key)
        assert all(self._by_account.values())
        if self and not self._requeued:
            first = self._turn(self.first.account)
            assert first == min(
                turn for account in self._by_account if (turn := self._turn(account))
            )
            assert len(self._turns) <= 2 * len(self._by_account) + 16


class WaitingQueue:
    """Sequences by effective priority, within one by fair queueing; preempted ones come before
    their equals.
    """

    def __init__(self, shares: Iterable[FairShares]) -> None:
        self._levels = list(map(FairQueue, shares))
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
        """Remove a sequence that has got a slot."""
        self.remove(sequence)
        sequence.was_scheduled = True

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence."""
        self._levels[sequence.effective_priority].remove(sequence)
        self._length -= 1
        self.num_tokens -= sequence.num_known

    def promote(self, sequence: Sequence) -> None:
        """Make a sequence as urgent as any, and the next one of the most urgent."""
        self.remove(sequence)
        sequence.effective_priority, sequence.was_scheduled = 0, True
        self.push(sequence)

    def of_priority(self, priority: int) -> list[Sequence]:
        """Return the sequences that arrived with this priority, also those that have been promoted
        since.
        """
        return [sequence for sequence in self if sequence.priority == priority]

    def has_at_least(self, level: int) -> bool:
        """Return whether a sequence that is at least as urgent as this level is waiting."""
        return any(self._levels[: level + 1])

    def oldest_lower_priority(self, level: int) -> Sequence | None:
        """Return the oldest of the sequences that are less urgent than this level."""
        return min(
            (queue.oldest for queue in self._levels[level + 1 :] if queue),
            key=arrival_key,
            default=None,
        )

    def check_integrity(self) -> None:
        """Assert that the counts and every level are right."""
        waiting = list(self)
        assert self._length == len(waiting)
        assert self.num_tokens == sum(sequence.num_known for sequence in waiting)
        for level, queue in enumerate(self._levels):
            assert all(sequence.effective_priority == level for sequence in queue)
            queue.check_integrity()


def age_starved(
    going: Iterable[Sequence], waiting: WaitingQueue, prefills: PrefillQueue, running: RunningSet
) -> None:
    """Count a micro-batch that takes prompt tokens of ``going`` against the oldest less urgent
    sequence that it passes over.

    Ages are counted in micro-batches because the scheduler has no clock. Only the oldest one ages:
    waiting for equals makes no sequence more urgent. After ``MAX_PASSES`` it is promoted and is the
    first of all; no sequence can take its slot, so it ends. The next oldest then continues the
    count.
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
        prefills.discard(oldest)
        running.promote(oldest)
        prefills.add(oldest)
    else:
        waiting.promote(oldest)
