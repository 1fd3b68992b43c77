"""Who holds which page. The stages own the bytes; this is the only place that owns the numbers."""

from collections.abc import Iterable

from tramontane.proto.plan import CachePlan, WindowClass
from tramontane.router.scheduling.sequence import Sequence

UNBOUNDED = 2**62  # positions: a full ring suffices for any number


class PageAllocator:
    """Free and promised pages of every window class.

    Of a class with a window a sequence is promised the pages of its full length when it is admitted: they are few, and
    then it can always grow. Of a class without one it is promised those of the tokens that are known, and more as it
    grows (``reserve``), which may fail: most sequences end long before they might. Pages are taken only as they fill.
    """

    def __init__(self, cache: CachePlan) -> None:
        self.cache = cache
        self._free = [list(range(c.num_pages))[::-1] for c in cache.classes]
        self._promised = [0] * len(cache.classes)
        self._nothing: tuple[tuple[int, ...], ...] = ((),) * len(cache.classes)

    @property
    def num_free(self) -> list[int]:
        return [len(free) for free in self._free]

    @property
    def num_pages(self) -> int:
        """Of all classes."""
        return sum(window_class.num_pages for window_class in self.cache.classes)

    @property
    def num_held(self) -> int:
        """Of all classes."""
        return self.num_pages - sum(self.num_free)

    def can_ever_fit(self, sequence: Sequence) -> bool:
        """Could this sequence be admitted if nothing else ran?"""
        return self._is_possible(self._pages(sequence.max_cached))

    def num_fitting(self, sequences: Iterable[Sequence], leaving: Iterable[Sequence] = ()) -> int:
        """Of these, one after the other, so many could be promised their pages if those that leave had given theirs back."""
        promised, fitting = self._promised_without(leaving), 0
        for sequence in sequences:
            promised = [p + n for p, n in zip(promised, self.pages_needed(sequence), strict=True)]
            if not self._is_possible(promised):
                break
            fitting += 1
        return fitting

    def fits_after_freeing(self, leaving: Iterable[Sequence], sequence: Sequence, num_spare: int) -> bool:
        """Could ``promise`` be given if these had given their pages back?"""
        needs = self.pages_needed(sequence)
        promised = self._promised_without(leaving)
        return self._is_possible([p + n for p, n in zip(promised, needs, strict=True)], num_spare)

    def reserve_for_admission(self, sequence: Sequence, num_spare: int = 0) -> bool:
        """Reserve what the sequence needs to begin, if that leaves ``num_spare`` pages of each class without a window."""
        needs = self.pages_needed(sequence)
        promised = [p + n for p, n in zip(self._promised, needs, strict=True)]
        if not self._is_possible(promised, num_spare):
            return False
        self._promised = promised
        sequence.pages, sequence.num_paged_positions = [[] for _ in needs], 0
        self._note_promise(sequence, needs)
        return True

    def reserve(self, sequence: Sequence, num_positions: int) -> bool:
        """See to it that ``grow`` to so many positions is possible."""
        if num_positions <= sequence.num_reserved_positions:
            return True
        needs = [max(old, n) for old, n in zip(sequence.reserved_pages, self._pages(num_positions), strict=True)]
        promised = [p + n - old for p, n, old in zip(self._promised, needs, sequence.reserved_pages, strict=True)]
        if not self._is_possible(promised):
            return False
        self._promised = promised
        self._note_promise(sequence, needs)
        return True

    def allocate(self, sequence: Sequence, num_positions: int) -> tuple[tuple[int, ...], ...]:
        """Take the pages that ``num_positions`` cached positions need beyond those held, all promised; returns the new ones.

        P = 16, R = 5, 3 pages held (48 positions): for 70 positions ceil(70/16) = 5, so two
        more; for 700 positions min(44, 5) = 5, two more again.
        """
        if num_positions <= sequence.num_paged_positions:
            return self._nothing
        assert num_positions <= sequence.num_reserved_positions
        gained, covered = [], UNBOUNDED
        for window_class, free, held in zip(self.cache.classes, self._free, sequence.pages, strict=True):
            wanted = window_class.pages_for(num_positions, self.cache.page_size)
            new = tuple([free.pop() for _ in range(wanted - len(held))])
            held += new
            gained.append(new)
            covered = min(covered, self._covered(window_class, wanted))
        sequence.num_paged_positions = covered
        return tuple(gained)

    def release(self, sequence: Sequence) -> None:
        """Take back everything. Only when no micro-batch in flight can still touch the pages."""
        assert sequence.num_in_flight == 0
        for free, held in zip(self._free, sequence.pages, strict=True):
            free += held
        self._promised = [p - n for p, n in zip(self._promised, sequence.reserved_pages, strict=True)]
        sequence.pages, sequence.reserved_pages, sequence.num_paged_positions, sequence.num_reserved_positions = [], [], 0, 0

    def check_integrity(self, holders: Iterable[Sequence]) -> None:
        """Recount: free and held pages are all pages, each exactly once, and promises add up."""
        holders = list(holders)
        for index, window_class in enumerate(self.cache.classes):
            held = [page for sequence in holders for page in sequence.pages[index]]
            assert sorted(self._free[index] + held) == list(range(window_class.num_pages))
            assert self._promised[index] == sum(s.reserved_pages[index] for s in holders) <= window_class.num_pages
            assert all(len(s.pages[index]) <= s.reserved_pages[index] for s in holders)

    def pages_needed(self, sequence: Sequence) -> list[int]:
        """To begin: with a window all that it can ever need, without one what is known and one token more."""
        at_first = min(sequence.num_known + 1, sequence.max_cached)
        return [
            c.pages_for(at_first if c.window is None else sequence.max_cached, self.cache.page_size) for c in self.cache.classes
        ]

    def _promised_without(self, leaving: Iterable[Sequence]) -> list[int]:
        returned = [sum(pages) for pages in zip(*(s.reserved_pages for s in leaving), strict=True)]
        return [p - n for p, n in zip(self._promised, returned, strict=True)] if returned else self._promised

    def _pages(self, num_positions: int) -> list[int]:
        return [c.pages_for(num_positions, self.cache.page_size) for c in self.cache.classes]

    def _is_possible(self, promised: list[int], num_spare: int = 0) -> bool:
        """Two pages to spare of 10: 8 may be promised where there is no window, all 10 where there is one."""
        return all(
            p + (num_spare if c.window is None else 0) <= c.num_pages for p, c in zip(promised, self.cache.classes, strict=True)
        )

    def _covered(self, window_class: WindowClass, num_pages: int) -> int:
        """Positions for which so many pages suffice."""
        return UNBOUNDED if num_pages == window_class.ring_pages else num_pages * self.cache.page_size

    def _note_promise(self, sequence: Sequence, needs: list[int]) -> None:
        sequence.reserved_pages = needs
        sequence.num_reserved_positions = min(map(self._covered, self.cache.classes, needs))
