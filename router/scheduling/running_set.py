"""Who holds a place and pages, and who gives them back for whom.

How much a router has been given that has not ended: what pipelines are scaled by.
"""

from collections.abc import Collection
from dataclasses import dataclass

from tramontane.proto.plan import CachePlan
from tramontane.proto.request import NUM_PRIORITIES
from tramontane.router.scheduling.page_allocator import PageAllocator
from tramontane.router.scheduling.sequence import Sequence, SequenceStatus, priority_key


class RunningSet:
    """Sequences that run, or have stopped and are still in flight.

    Where there is no room for a sequence, less urgent ones give theirs back; never one that is as urgent.
    """

    def __init__(self, cache: CachePlan, num_places: int) -> None:
        self.allocator = PageAllocator(cache)
        self.by_id: dict[int, Sequence] = {}
        self._num_slots = num_places
        self._num_of_level = [0] * NUM_PRIORITIES

    def __len__(self) -> int:
        return len(self.by_id)

    def admit(self, sequence: Sequence) -> bool:
        """A place and the promise of pages. Beside others only where each of them has room for one page more."""
        if len(self.by_id) >= self._num_slots or not self.allocator.reserve_for_admission(sequence, num_spare=len(self.by_id)):
            return False
        sequence.status = SequenceStatus.RUNNING
        self.by_id[sequence.seq_id] = sequence
        self._num_of_level[sequence.effective_priority] += 1
        return True

    def release(self, sequence: Sequence) -> None:
        """Only when nothing in flight can touch its pages."""
        self.allocator.release(sequence)
        del self.by_id[sequence.seq_id]
        self._num_of_level[sequence.effective_priority] -= 1

    def promote(self, sequence: Sequence) -> None:
        """It is as urgent as any from now on."""
        self._num_of_level[sequence.effective_priority] -= 1
        self._num_of_level[0] += 1
        sequence.effective_priority = 0

    def has_any_below(self, level: int) -> bool:
        """Whether anybody is less urgent than this."""
        return any(self._num_of_level[level + 1 :])

    def lower_priority_than(self, level: int) -> list[Sequence]:
        return [s for s in self.by_id.values() if s.effective_priority > level] if self.has_any_below(level) else []

    def can_preempt_for(self, claimant: Sequence) -> bool:
        """Whether there would be room for it if all less urgent ones had given theirs back."""
        less_urgent = self.lower_priority_than(claimant.effective_priority)
        num_others = len(self.by_id) - len(less_urgent)
        return (
            bool(less_urgent)
            and num_others < self._num_slots
            and self.allocator.fits_after_freeing(less_urgent, claimant, num_spare=num_others)
        )

    def preemption_victim(self, claimant: Sequence) -> Sequence | None:
        """Of the less urgent, the least urgent with nothing in flight, of these whoever has least to compute again."""
        idle = [s for s in self.lower_priority_than(claimant.effective_priority) if not s.num_in_flight]
        return min(idle, key=lambda s: (-s.effective_priority, s.num_dispatched, -s.seq_id), default=None)

    def lowest_priority(self) -> Sequence | None:
        """The least urgent, of these the youngest; None while somebody who has stopped is still to give its pages back."""
        running = [s for s in self.by_id.values() if s.status is SequenceStatus.RUNNING]
        return max(running, key=priority_key) if len(running) == len(self.by_id) else None

    def num_admissible(self, arriving: list[Sequence], level: int) -> int:
        """How many of these could begin now, one after the other, if all less urgent ones gave way."""
        less_urgent = self.lower_priority_than(level)
        num_places = self._num_slots - len(self.by_id) + len(less_urgent)
        return self.allocator.num_fitting(arriving[:num_places], less_urgent)

    def check_integrity(self) -> None:
        self.allocator.check_integrity(self.by_id.values())
        assert len(self.by_id) <= self._num_slots
        for sequence in self.by_id.values():
            assert sequence.num_dispatched <= sequence.num_known
            assert sequence.status is SequenceStatus.RUNNING or sequence.num_in_flight > 0
        levels = [s.effective_priority for s in self.by_id.values()]
        assert self._num_of_level == [levels.count(level) for level in range(NUM_PRIORITIES)]


@dataclass(frozen=True, slots=True)
class PipelineLoad:
    """``share``: of the pipeline's places or of its cache's pages, whichever is more; above 1 where something has to wait.

    ``tokens``: in flight, which are the prompts and the answers so far, of what runs and of what waits.
    """

    share: float
    tokens: int


def measure_load(sequences: Collection[Sequence], ledger: PageAllocator, num_places: int) -> PipelineLoad:
    """Of all that run or wait.

    Three sequences that need 4 pages each, of 4 places and 8 pages: three quarters of the places, 1.5 times the pages.
    """
    of_pages = [
        sum(needs) / window_class.num_pages
        for window_class, needs in zip(ledger.cache.classes, zip(*map(ledger.pages_needed, sequences), strict=True), strict=False)
    ]
    return PipelineLoad(max([len(sequences) / num_places, *of_pages]), sum(s.num_known for s in sequences))
