"""Who holds which page. The stages own the bytes; this is the only place that owns the numbers."""

from collections.abc import Iterable

from tramontane.proto.plan import CachePlan
from tramontane.router.sequence import Sequence


class PageLedger:
    """Free and promised pages of every window class.

    A sequence is promised the pages of its full length when it is admitted, so it can
    always grow; it takes them only as it fills them.
    """

    def __init__(self, cache: CachePlan) -> None:
        self.cache = cache
        self._free = [list(range(c.num_pages))[::-1] for c in cache.classes]
        self._promised = [0] * len(cache.classes)

    @property
    def num_free(self) -> list[int]:
        return [len(free) for free in self._free]

    def fits_ever(self, sequence: Sequence) -> bool:
        """Could this sequence be admitted if nothing else ran?"""
        return all(n <= c.num_pages for n, c in zip(self._needs(sequence), self.cache.classes, strict=True))

    def how_many_fit(self, sequences: Iterable[Sequence]) -> int:
        """Of these, one after the other, so many could be promised their pages now."""
        promised, fitting = self._promised, 0
        for sequence in sequences:
            promised = [p + n for p, n in zip(promised, self._needs(sequence), strict=True)]
            if any(p > c.num_pages for p, c in zip(promised, self.cache.classes, strict=True)):
                break
            fitting += 1
        return fitting

    def promise(self, sequence: Sequence) -> bool:
        """Reserve the pages of the sequence's full length, if they are there."""
        needs = self._needs(sequence)
        if any(p + n > c.num_pages for p, n, c in zip(self._promised, needs, self.cache.classes, strict=True)):
            return False
        self._promised = [p + n for p, n in zip(self._promised, needs, strict=True)]
        sequence.pages = [[] for _ in needs]
        return True

    def grow(self, sequence: Sequence, num_positions: int) -> tuple[tuple[int, ...], ...]:
        """Take the pages that ``num_positions`` cached positions need beyond those held; returns the new ones.

        P = 16, R = 5, 3 pages held (48 positions): for 70 positions ceil(70/16) = 5, so two
        more; for 700 positions min(44, 5) = 5, two more again.
        """
        gained = []
        for window_class, free, held in zip(self.cache.classes, self._free, sequence.pages, strict=True):
            wanted = window_class.pages_for(num_positions, self.cache.page_size) - len(held)
            new = [free.pop() for _ in range(wanted)]
            held += new
            gained.append(tuple(new))
        return tuple(gained)

    def release(self, sequence: Sequence) -> None:
        """Take back everything. Only when no micro-batch in flight can still touch the pages."""
        assert sequence.num_in_flight == 0
        for free, held in zip(self._free, sequence.pages, strict=True):
            free += held
        self._promised = [p - n for p, n in zip(self._promised, self._needs(sequence), strict=True)]
        sequence.pages = []

    def check_integrity(self, holders: Iterable[Sequence]) -> None:
        """Recount: free and held pages are all pages, each exactly once, and promises add up."""
        holders = list(holders)
        for index, window_class in enumerate(self.cache.classes):
            held = [page for sequence in holders for page in sequence.pages[index]]
            assert sorted(self._free[index] + held) == list(range(window_class.num_pages))
            assert self._promised[index] == sum(self._needs(s)[index] for s in holders)
            assert all(len(s.pages[index]) <= self._needs(s)[index] for s in holders)

    def _needs(self, sequence: Sequence) -> list[int]:
        return [c.pages_for(sequence.max_cached, self.cache.page_size) for c in self.cache.classes]
