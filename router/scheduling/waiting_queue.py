"""The waiting queue: sequences without a slot, by priority, then by fair queueing between keys, or
requests without keys.

``WaitingQueue`` holds one ``FairQueue`` per priority. ``age_starved`` prevents starvation.
"""

import math
from bisect import insort
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain

from tramontane.proto.errors import RequestError
from tramontane.proto.plan import SpeculativeConfig
from tramontane.proto.request import validate_prompt, validate_token_ids
from tramontane.router.scheduling.fair_shares import FairShares
from tramontane.router.scheduling.page_allocator import PageAllocator
from tramontane.router.scheduling.prefill_queue import PrefillQueue
from tramontane.router.scheduling.prefix_cache import cache_salt
from tramontane.router.scheduling.running_set import RunningSet
from tramontane.router.scheduling.sequence import Sequence, SequenceStatus, arrival_key

# micro-batches that may pass a sequence over; after the last one it becomes as urgent as any
MAX_PASSES = 64


class FairQueue:
    """Start-time fair queueing between accounts (``fair_shares.py``): each has a queue of its own,
    in the order of arrival.

    Next is the account that has been charged the fewest tokens, of equals the one whose first
    sequence arrived first. An account without work begins at the virtual time: while A has 100
    sequences waiting, the first sequence of B waits for at most one of them. A single key's
    sequences are taken in the order of arrival, and so are all requests without keys.

    Sequences that were scheduled before and have been preempted come before all others.
    """

    def __init__(self, shares: FairShares) -> None:
        self._shares = shares
        self._requeued: list[Sequence] = []
        self._by_account: dict[int, list[Sequence]] = {}  # no list is empty
        # a heap; an entry may be stale: its turn has become later, or its account has no sequence
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
        """Return the sort key of an account's turn, None if it has no sequence here."""
        queue = self._by_account.get(account)
        return (self._shares.turn(account), arrival_key(queue[0]), account) if queue else None

    def _enter(self, account: int) -> None:
        """Push an account whose turn may be earlier than its entry in the heap."""
        if (turn := self._turn(account)) is not None:
            heappush(self._turns, turn)
            self._forget_most()

    def _forget_most(self) -> None:
        """Remove stale entries, left by cancelled requests, if they are the majority."""
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
        if sequence.goes_first:
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
        """Assert the order of every queue, and that ``first`` is the sequence with the lowest
        turn.
        """
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
        sequence.goes_first = True

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence."""
        self._levels[sequence.effective_priority].remove(sequence)
        self._length -= 1
        self.num_tokens -= sequence.num_known

    def promote(self, sequence: Sequence) -> None:
        """Make a sequence as urgent as any, and the next one of the most urgent priority."""
        self.remove(sequence)
        sequence.effective_priority, sequence.goes_first = 0, True
        self.push(sequence)

    def of_priority(self, priority: int) -> list[Sequence]:
        """Return the sequences that arrived with this priority, including those promoted since."""
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

    Ages are counted in micro-batches because the scheduler has no clock. Only the oldest sequence
    ages: waiting for equals makes no sequence more urgent. After ``MAX_PASSES`` it is promoted and
    is the first of all; no sequence can take its slot, so it will end. The next oldest then
    continues the count.
    """
    level = min(sequence.effective_priority for sequence in going)
    passed = [s for s in prefills.sequences if s.effective_priority > level and s not in going]
    if (oldest_waiting := waiting.oldest_lower_priority(level)) is not None:
        passed.append(oldest_waiting)
    if not passed:
        return
    oldest = min(passed, key=arrival_key)
    oldest.num_passes += 1
    if oldest.num_passes < MAX_PASSES:
        return
    if oldest.status is SequenceStatus.RUNNING:
        prefills.discard(oldest)
        running.promote(oldest)
        prefills.add(oldest)
    else:
        waiting.promote(oldest)


# Admission checks: whether a sequence can run at all, and whether the waiting queue may take it
# now.


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of one scheduler."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    max_queued_seqs: int | None = None  # in the waiting queue, of each priority
    max_queued_tokens: int | None = None  # of prompts in the waiting queue, of each priority
    enable_prefix_caching: bool = False  # whether sequences reuse cached pages
    share_prefixes: bool = False  # also across tenants
    model: str = ""  # identifier of the model and its weights
    speculative: SpeculativeConfig | None = None
    # whether decodes are submitted before the preceding tokens are known
    async_scheduling: bool = False

    def cache_salt(self, salt: str) -> str:
        """Return the salt of the keys of cached pages of a request with this salt."""
        return cache_salt(self.model, salt, share_prefixes=self.share_prefixes)


def validate_sequence(
    sequence: Sequence, limits: SchedulerLimits, allocator: PageAllocator
) -> None:
    """Raise RequestError if this sequence could never run, however long it waited."""
    validate_prompt(sequence.prompt_ids, limits.max_model_len, limits.vocab_size)
    sampling = sequence.sampling
    biased = [token_id for token_id, _ in sampling.logit_bias]
    validate_token_ids(
        {"logit_bias": biased, "stop_token_ids": sampling.stop_token_ids}, limits.vocab_size
    )
    assert sequence.max_len <= limits.max_model_len
    if not allocator.can_ever_fit(sequence):
        raise RequestError(
            f"a sequence of {sequence.max_len} tokens needs more cache pages than there are; "
            "shorten it or raise --kv-cache-memory"
        )


def is_full(priority: int, owner: int, waiting: WaitingQueue, limits: SchedulerLimits) -> bool:
    """Return whether even the smallest request of this priority and owner could neither wait nor
    start at once.
    """
    own, others = _split_by_owner(waiting.of_priority(priority), owner)
    seqs_full = len(own) >= _queue_share(limits.max_queued_seqs, len(others), owner)
    tokens_full = bool(own) and _num_tokens(own) >= _queue_share(
        limits.max_queued_tokens, _num_tokens(others), owner
    )
    return waiting.has_at_least(priority) and (seqs_full or tokens_full)


def overload_reason(
    arriving: Collection[Sequence],
    waiting: WaitingQueue,
    running: RunningSet,
    limits: SchedulerLimits,
) -> str | None:
    """Return why these sequences must not be added now, or None.

    Only arrivals that would wait are counted, next to waiting sequences of the same priority. With
    3 of 64 slots free, pages for them, and no sequence waiting that is as urgent, 5 arrivals queue
    2. Slots and pages of less urgent sequences count as free. All arrivals have the same owner.
       With several owners, one may fill half of the queue space that the others leave.
    """
    reasons = (
        _overload_reason(
            [s for s in arriving if s.priority == priority], priority, waiting, running, limits
        )
        for priority in {s.priority for s in arriving}
    )
    return next(filter(None, reasons), None)


def _overload_reason(
    arriving: list[Sequence],
    priority: int,
    waiting: WaitingQueue,
    running: RunningSet,
    limits: SchedulerLimits,
) -> str | None:
    num_starting = (
        0 if waiting.has_at_least(priority) else running.num_admissible(arriving, priority)
    )
    queued, owner = arriving[num_starting:], arriving[0].owner
    own, others = _split_by_owner(waiting.of_priority(priority), owner)
    with_key = " with this key" * bool(owner)
    bound = _queue_share(limits.max_queued_seqs, len(others), owner)
    if len(own) + len(queued) > bound:
        subject = (
            f"1 sequence{with_key} is" if len(own) == 1 else f"{len(own)} sequences{with_key} are"
        )
        return f"{subject} waiting and at most {bound:.0f} may"
    num_tokens, bound = (
        _num_tokens((*own, *queued)),
        _queue_share(limits.max_queued_tokens, _num_tokens(others), owner),
    )
    if len(own) + len(queued) > 1 and num_tokens > bound:
        return f"{num_tokens} prompt tokens{with_key} would be waiting and at most {bound:.0f} may"
    return None


def _split_by_owner(waiting: list[Sequence], owner: int) -> tuple[list[Sequence], list[Sequence]]:
    """Split into this owner's sequences and all others; without API keys every sequence has the
    same owner.
    """
    return [s for s in waiting if s.owner == owner], [s for s in waiting if s.owner != owner]


def _queue_share(bound: int | None, num_of_others: int, owner: int) -> float:
    """Return the number that an owner may use: of a queue of 256, one owner may use 128, next to it
    a second one 64; without owners, all.
    """
    if bound is None:
        return math.inf
    left = max(bound - num_of_others, 0)
    return (left + 1) // 2 if owner else left


def _num_tokens(sequences: Collection[Sequence]) -> int:
    return sum(len(s.prompt_ids) for s in sequences)
