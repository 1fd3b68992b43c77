"""What a sequence has reserved stays reserved, in every window class."""

import pytest
from fake_pipeline import new_sequence

from tramontane.proto.plan import CachePlan, WindowClass
from tramontane.router.scheduling.page_allocator import PageAllocator
from tramontane.router.scheduling.sequence import Sequence

MIXED = CachePlan(4, (WindowClass(8, 3, 6), WindowClass(None, 16, 20)))


def _admitted(allocator: PageAllocator, seq_id: int) -> Sequence:
    sequence = new_sequence(seq_id, 3, 40)
    assert allocator.reserve_for_admission(sequence)
    return sequence


def test_a_sequence_that_grows_keeps_what_it_reserved_in_a_class_with_a_window() -> None:
    """43 tokens in pages of 4: a whole ring of 3 from the beginning, and without a window as many
    as are known.
    """
    allocator = PageAllocator(MIXED)
    sequence = _admitted(allocator, 0)
    assert sequence.reserved_pages == [3, 1]
    assert allocator.reserve(sequence, 5)
    assert sequence.reserved_pages == [3, 2], (
        "5 positions take 2 pages of a ring, and it may need all 3"
    )
    other = _admitted(allocator, 1)
    assert not allocator.reserve_for_admission(new_sequence(2, 3, 40)), "both rings are taken"
    assert allocator.reserve(sequence, 42)
    assert sequence.reserved_pages == [3, 11]
    for num_positions in range(1, 43):
        sequence.num_dispatched = num_positions
        allocator.allocate(sequence, num_positions - 1, num_positions)
        allocator.check_integrity([sequence, other])


def test_check_integrity_sees_a_ring_that_is_not_reserved() -> None:
    allocator = PageAllocator(MIXED)
    sequence = _admitted(allocator, 0)
    allocator.check_integrity([sequence])
    sequence.reserved_pages[0] -= 1
    allocator._reserved[0] -= 1
    with pytest.raises(AssertionError):
        allocator.check_integrity([sequence])


def test_what_does_not_fit_changes_nothing() -> None:
    allocator = PageAllocator(MIXED)
    first, second = _admitted(allocator, 0), _admitted(allocator, 1)
    assert allocator.reserve(first, 42)
    assert not allocator.reserve(second, 40), "11 and 10 of 20 pages"
    assert second.reserved_pages == [3, 1]
    assert allocator.reserve(second, 36)
    allocator.check_integrity([first, second])
