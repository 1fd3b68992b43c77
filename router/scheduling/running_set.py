"""The running set: the sequences with a slot and pages, the choice of sequences to preempt, and the
load of a pipeline.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from tramontane.proto.plan import CachePlan
from tramontane.proto.request import NUM_PRIORITIES
from tramontane.router.scheduling.page_allocator import PageAllocator
from tramontane.router.scheduling.policy import BatchWork, WorkEstimator
from tramontane.router.scheduling.sequence import Sequence, SequenceStatus, priority_key

MIN_DECODES = 64  # expected further tokens of a sequence that has fewer


class RunningSet:
    """Sequences that run, or have stopped and are still in flight.

    Less urgent sequences are preempted for one that finds no slot or too few pages, never an
    equally urgent one.
    """

    def __init__(
        self, cache: CachePlan, num_slots: int, enable_prefix_caching: bool = False
    ) -> None:
        self.allocator = PageAllocator(cache, enable_prefix_caching)
        self.by_id: dict[int, Sequence] = {}
        self.num_slots = num_slots
        self._num_by_level = [0] * NUM_PRIORITIES

    def __len__(self) -> int:
        return len(self.by_id)

    def admit(self, sequence: Sequence) -> bool:
        """Give the sequence a slot and pages, or return False: each running sequence must keep a
        page to grow into.
        """
        if len(self.by_id) >= self.num_slots or not self.allocator.reserve_for_admission(
            sequence, num_spare=len(self.by_id)
        ):
            return False
        sequence.status = SequenceStatus.RUNNING
        self.by_id[sequence.seq_id] = sequence
        self._num_by_level[sequence.effective_priority] += 1
        return True

    def release(self, sequence: Sequence) -> None:
        """Free slot and pages; only when no micro-batch in flight can access the pages."""
        self.allocator.release(sequence)
        del self.by_id[sequence.seq_id]
        self._num_by_level[sequence.effective_priority] -= 1

    def promote(self, sequence: Sequence) -> None:
        """Make a sequence as urgent as any."""
        self._num_by_level[sequence.effective_priority] -= 1
        self._num_by_level[0] += 1
        sequence.effective_priority = 0

    def has_any_below(self, level: int) -> bool:
        """Return whether any sequence is less urgent than this level."""
        return any(self._num_by_level[level + 1 :])

    def lower_priority_than(self, level: int) -> list[Sequence]:
        """Return the sequences that are less urgent than this level."""
        return (
            [s for s in self.by_id.values() if s.effective_priority > level]
            if self.has_any_below(level)
            else []
        )

    def can_preempt_for(self, claimant: Sequence) -> bool:
        """Return whether the claimant could be admitted after all less urgent sequences were
        preempted.
        """
        less_urgent = self.lower_priority_than(claimant.effective_priority)
        num_others = len(self.by_id) - len(less_urgent)
        return (
            bool(less_urgent)
            and num_others < self.num_slots
            and self.allocator.fits_after_freeing(less_urgent, claimant, num_spare=num_others)
        )

    def preemption_victim(self, claimant: Sequence) -> Sequence | None:
        """Return the least urgent sequence with nothing in flight; of equals, the one with the
        fewest tokens to recompute.
        """
        idle = [
            s for s in self.lower_priority_than(claimant.effective_priority) if not s.num_in_flight
        ]
        return min(
            idle, key=lambda s: (-s.effective_priority, s.num_dispatched, -s.seq_id), default=None
        )

    def lowest_priority(self) -> Sequence | None:
        """Return the least urgent sequence, of equals the youngest; None while a stopped sequence
        has yet to release its pages.
        """
        running = [s for s in self.by_id.values() if s.status is SequenceStatus.RUNNING]
        return max(running, key=priority_key) if len(running) == len(self.by_id) else None

    def num_admissible(self, arriving: list[Sequence], level: int) -> int:
        """Return how many of the sequences, in order, could begin now if all sequences below this
        level were preempted.
        """
        less_urgent = self.lower_priority_than(level)
        num_slots = self.num_slots - len(self.by_id) + len(less_urgent)
        return self.allocator.num_fitting(arriving[:num_slots], less_urgent)

    def check_integrity(self) -> None:
        """Assert that pages, slots and counts are right."""
        self.allocator.check_integrity(self.by_id.values())
        assert len(self.by_id) <= self.num_slots
        for sequence in self.by_id.values():
            assert sequence.num_dispatched <= sequence.num_known + sequence.num_placeholders
            assert sequence.status is SequenceStatus.RUNNING or sequence.num_in_flight > 0
        levels = [s.effective_priority for s in self.by_id.values()]
        assert self._num_by_level == [levels.count(level) for level in range(NUM_PRIORITIES)]


@dataclass(frozen=True, slots=True)
class PipelineLoad:
    """The load of one pipeline, by which pipelines are scaled, and requests distributed."""

    # the used share of its slots or of its cache's pages, whichever is larger; above 1 where
    # sequences have to wait
    share: float
    tokens: int  # prompts and outputs so far of all running and waiting sequences
    # Remaining work, as far as it is known or expected, of sequences that are at least as urgent as
    # each priority.
    left: tuple[BatchWork, ...] = (BatchWork(),) * NUM_PRIORITIES


def measure_load(
    running: RunningSet, waiting: Iterable[Sequence], estimator: WorkEstimator
) -> PipelineLoad:
    """Return the load of the running and the waiting sequences.

    Three sequences that need 4 pages each, of 4 slots and 8 pages: three quarters of the slots, 1.5
    times the pages.
    """
    sequences, allocator = [*running.by_id.values(), *waiting], running.allocator
    needs_by_class = zip(*map(allocator.pages_needed, sequences), strict=True)
    page_shares = [
        sum(needs) / c.num_pages
        for c, needs in zip(allocator.cache.classes, needs_by_class, strict=False)
    ]
    spans: list[list[tuple[int, int, int]]] = [[] for _ in range(NUM_PRIORITIES)]
    for s in sequences:
        spans[s.effective_priority].append(
            (min(s.num_dispatched, s.num_known), s.num_known, expected_decodes(s))
        )
    left = tuple(accumulate(map(estimator.work_left, spans), BatchWork.__add__))
    return PipelineLoad(
        max([len(sequences) / running.num_slots, *page_shares]),
        sum(s.num_known for s in sequences),
        left,
    )


def expected_decodes(sequence: Sequence) -> int:
    """Return the expected number of further tokens: as many as there are, at least ``MIN_DECODES``,
    at most the tokens allowed.
    """
    return min(sequence.max_len - sequence.num_known, max(len(sequence.output_ids), MIN_DECODES))
