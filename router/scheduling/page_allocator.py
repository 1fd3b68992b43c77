"""The page allocator: which sequence holds which cache page. Stages own the bytes; only this module owns the numbers."""

from collections.abc import Iterable

from tramontane.proto.plan import CachePlan, WindowClass
from tramontane.router.scheduling.sequence import Sequence

UNBOUNDED = 2**62  # positions: a full ring suffices for any number


class PageAllocator:
    """Free and reserved pages of every window class.

    In a class with a window a sequence reserves the pages of its full length when it is admitted: they are few, and then it can
    always grow. In a class without one it reserves the pages of its known tokens, and more as it grows (``reserve``), which may
    fail: most sequences end long before their full length. Pages are allocated only as they fill.
    """

    def __init__(self, cache: CachePlan) -> None:
        self.cache = cache
        self._free = [list(range(c.num_pages))[::-1] for c in cache.classes]
        self._reserved = [0] * len(cache.classes)
        self._no_pages: tuple[tuple[int, ...], ...] = ((),) * len(cache.classes)

    @property
    def num_free(self) -> list[int]:
        """Free pages of each class, reserved ones included."""
        return [len(free) for free in self._free]

    @property
    def num_pages(self) -> int:
        """Pages of all classes together."""
        return sum(window_class.num_pages for window_class in self.cache.classes)

    @property
    def num_held(self) -> int:
        """Allocated pages of all classes together."""
        return self.num_pages - sum(self.num_free)

    def can_ever_fit(self, sequence: Sequence) -> bool:
        """Return whether the sequence could be admitted if nothing else ran."""
        return self._is_possible(self._pages(sequence.max_cached))

    def num_fitting(self, sequences: Iterable[Sequence], leaving: Iterable[Sequence] = ()) -> int:
        """Return how many of these, in order, could reserve their pages if ``leaving`` had released theirs."""
        reserved, fitting = self._reserved_without(leaving), 0
        for sequence in sequences:
            reserved = _add(reserved, self.pages_needed(sequence))
            if not self._is_possible(reserved):
                break
            fitting += 1
        return fitting

    def fits_after_freeing(self, leaving: Iterable[Sequence], sequence: Sequence, num_spare: int) -> bool:
        """Return whether ``reserve_for_admission`` would succeed if ``leaving`` had released their pages."""
        return self._is_possible(_add(self._reserved_without(leaving), self.pages_needed(sequence)), num_spare)

    def reserve_for_admission(self, sequence: Sequence, num_spare: int = 0) -> bool:
        """Reserve what the sequence needs to begin, if that leaves ``num_spare`` pages of each class without a window."""
        needs = self.pages_needed(sequence)
        reserved = _add(self._reserved, needs)
        if not self._is_possible(reserved, num_spare):
            return False
        self._reserved = reserved
        sequence.pages, sequence.num_paged_positions = [[] for _ in needs], 0
        self._set_reserved(sequence, needs)
        return True

    def reserve(self, sequence: Sequence, num_positions: int) -> bool:
        """Make sure that ``allocate`` for so many positions is possible; return False if pages are lacking."""
        if num_positions <= sequence.num_reserved_positions:
            return True
        needs = [max(old, n) for old, n in zip(sequence.reserved_pages, self._pages(num_positions), strict=True)]
        reserved = [r + n - old for r, n, old in zip(self._reserved, needs, sequence.reserved_pages, strict=True)]
        if not self._is_possible(reserved):
            return False
        self._reserved = reserved
        self._set_reserved(sequence, needs)
        return True

    def allocate(self, sequence: Sequence, num_positions: int) -> tuple[tuple[int, ...], ...]:
        """Allocate the pages that ``num_positions`` cached positions need beyond those held, all reserved; return the new ones.

        P = 16, R = 5, 3 pages held (48 positions): for 70 positions ceil(70/16) = 5, so two
        more; for 700 positions min(44, 5) = 5, two more again.
        """
        if num_positions <= sequence.num_paged_positions:
            return self._no_pages
        assert num_positions <= sequence.num_reserved_positions
        gained, covered = [], UNBOUNDED
        for window_class, free, held in zip(self.cache.classes, self._free, sequence.pages, strict=True):
            num_needed = window_class.pages_for(num_positions, self.cache.page_size)
            new = tuple([free.pop() for _ in range(num_needed - len(held))])
            held += new
            gained.append(new)
            covered = min(covered, self._covered(window_class, num_needed))
        sequence.num_paged_positions = covered
        return tuple(gained)

    def release(self, sequence: Sequence) -> None:
        """Free all pages and reservations; only when no micro-batch in flight can still touch the pages."""
        assert sequence.num_in_flight == 0
        for free, held in zip(self._free, sequence.pages, strict=True):
            free += held
        self._reserved = self._reserved_without([sequence])
        sequence.pages, sequence.reserved_pages, sequence.num_paged_positions, sequence.num_reserved_positions = [], [], 0, 0

    def check_integrity(self, holders: Iterable[Sequence]) -> None:
        """Assert that free and held pages are all pages, each exactly once, and that reservations are complete and add up."""
        holders = list(holders)
        for index, window_class in enumerate(self.cache.classes):
            held = [page for sequence in holders for page in sequence.pages[index]]
            assert sorted(self._free[index] + held) == list(range(window_class.num_pages))
            assert self._reserved[index] == sum(s.reserved_pages[index] for s in holders) <= window_class.num_pages
            assert all(len(s.pages[index]) <= s.reserved_pages[index] for s in holders)
            if window_class.window is not None:
                ring = [window_class.pages_for(s.max_cached, self.cache.page_size) for s in holders]
                assert [s.reserved_pages[index] for s in holders] == ring

    def pages_needed(self, sequence: Sequence) -> list[int]:
        """Return the pages needed to begin: with a window all that it can ever need, else for its known tokens and one more."""
        at_first = min(sequence.num_known + 1, sequence.max_cached)
        return [
            c.pages_for(at_first if c.window is None else sequence.max_cached, self.cache.page_size) for c in self.cache.classes
        ]

    def _reserved_without(self, leaving: Iterable[Sequence]) -> list[int]:
        returned = [sum(pages) for pages in zip(*(s.reserved_pages for s in leaving), strict=True)]
        return [r - n for r, n in zip(self._reserved, returned, strict=True)] if returned else self._reserved

    def _pages(self, num_positions: int) -> list[int]:
        return [c.pages_for(num_positions, self.cache.page_size) for c in self.cache.classes]

    def _is_possible(self, reserved: list[int], num_spare: int = 0) -> bool:
        """With two spare pages of 10, 8 may be reserved in a class without a window, all 10 in a class with one."""
        return all(
            r + (num_spare if c.window is None else 0) <= c.num_pages for r, c in zip(reserved, self.cache.classes, strict=True)
        )

    def _covered(self, window_class: WindowClass, num_pages: int) -> int:
        """Return the number of positions for which so many pages suffice."""
        return UNBOUNDED if num_pages == window_class.ring_pages else num_pages * self.cache.page_size

    def _set_reserved(self, sequence: Sequence, needs: list[int]) -> None:
        sequence.reserved_pages = needs
        sequence.num_reserved_positions = min(map(self._covered, self.cache.classes, needs))


def _add(pages: list[int], more: list[int]) -> list[int]:
    return [a + b for a, b in zip(pages, more, strict=True)]
