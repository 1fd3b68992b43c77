"""The page allocator: assigns cache pages to sequences. Stages own the bytes; only this module owns
the page numbers.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from itertools import repeat

from tramontane.proto.plan import CachePlan, WindowClass
from tramontane.router.scheduling.prefix_cache import (
    PrefixHashLog,
    first_page_seen,
    reusable_blocks,
)
from tramontane.router.scheduling.sequence import Sequence

UNBOUNDED = 2**62  # positions: a full ring suffices for any number
FIRST_BLOCKS = 4  # blocks whose keys are computed before the first one is looked up


class PagePool:
    """Pages that are free, held by one or more sequences, or *cached*: idle, with known contents.

    The key of its block of tokens (``prefix_cache.py``) identifies a page. Cached pages are
    taken, the least recently used first, when none is free, so they never keep a page from a
    sequence.
    """

    def __init__(self, num_pages: int, log: PrefixHashLog) -> None:
        self.num_pages, self._log = num_pages, log
        self._free = list(range(num_pages))[::-1]
        self._num_holders = [0] * num_pages
        # idle pages with a key, the least recently used first
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def num_idle(self) -> int:
        """Pages that no sequence holds."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Idle pages with known contents."""
        return len(self._cached)

    def take(self) -> int:
        """Return a page without a holder. One must exist."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            key = self._key_of.pop(page)
            del self._page_of[key]
            self._log.remove(key)
        self._num_holders[page] = 1
        return page

    def find(self, keys: Iterable[bytes]) -> list[int | None]:
        """Return the page with the contents of each key, None for missing ones."""
        return list(map(self._page_of.get, keys))

    def share(self, pages: Iterable[int]) -> None:
        """Add a holder to each page; all have keys."""
        num_holders, cached = self._num_holders, self._cached
        for page in pages:
            if not num_holders[page]:
                del cached[page]
            num_holders[page] += 1

    def give_back(self, pages: list[int]) -> None:
        """Remove a holder of each page. Of the pages that become idle, later ones are reused first:
        more prompts share the earlier ones.
        """
        for page in reversed(pages):
            self._num_holders[page] -= 1
            if self._num_holders[page]:
                continue
            if page in self._key_of:
                self._cached[page] = None
            else:
                self._free.append(page)

    def register(self, key: bytes, page: int) -> None:
        """Record the contents of a held page, unless another page has the same."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key], self._key_of[page] = page, key
            self._log.add(key)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Remove the pages with these contents from the cache; their holders keep them."""
        for key in keys:
            if (page := self._page_of.pop(key, None)) is None:
                continue
            del self._key_of[page]
            self._log.remove(key)
            if page in self._cached:
                del self._cached[page]
                self._free.append(page)

    def forget_contents(self) -> None:
        """Remove all pages from the cache; the caller clears the log for all pools together. No
        sequence may hold pages.
        """
        self._free += self._cached
        self._cached.clear()
        self._page_of.clear()
        self._key_of.clear()

    def check_integrity(self, held: Iterable[int]) -> None:
        """Assert that each page has as many holders as it is among ``held``, and that the others
        are free or cached.
        """
        holders = Counter(held)
        assert list(map(holders.get, range(self.num_pages), repeat(0))) == self._num_holders
        assert sorted([*self._free, *self._cached, *holders]) == list(range(self.num_pages))
        assert dict(zip(self._page_of.values(), self._page_of, strict=True)) == self._key_of
        assert self._key_of.keys().isdisjoint(self._free)
        assert self._cached.keys() <= self._key_of.keys()


class PageAllocator:
    """Pages of every window class, and how many of them are reserved.

    In a class with a window a sequence reserves the pages of its full length when it is admitted:
    they are few, and then it can always grow. In a class without one it reserves the pages of its
    known tokens, and more as it grows (``reserve``), which may fail: most sequences end long before
    their full length. Pages are allocated only as they fill.

    A page that leaves the window is given back, and its entry gets a fresh one. The contents of
    full pages are identified by their tokens: a sequence that begins with the same tokens shares
    them (``reuse_prefix``). It reserves as many pages as it would without sharing, so caching does
    not change admission and preemption.
    """

    def __init__(self, cache: CachePlan, enable_prefix_caching: bool = False) -> None:
        self.cache = cache
        self.enable_prefix_caching = enable_prefix_caching
        self.prefix_hashes = PrefixHashLog(len(cache.classes))
        self._pools = [PagePool(c.num_pages, self.prefix_hashes) for c in cache.classes]
        self._just_written: list[tuple[Sequence, int]] = []  # by the micro-batch that is being made
        # tokens that were looked up, and tokens that were cached
        self.num_queried = self.num_hit = 0
        self._reserved = [0] * len(cache.classes)
        self._no_pages: tuple[tuple[int, ...], ...] = ((),) * len(cache.classes)

    @property
    def num_free(self) -> list[int]:
        """Pages of each class that no sequence holds, reserved and cached ones included."""
        return [pool.num_idle for pool in self._pools]

    @property
    def free_share(self) -> float:
        """The share of the pages that no sequence holds, of the class with the lowest share."""
        return min(n / c.num_pages for n, c in zip(self.num_free, self.cache.classes, strict=True))

    @property
    def num_cached(self) -> list[int]:
        """Pages of each class that no sequence holds and whose contents are cached."""
        return [pool.num_cached for pool in self._pools]

    @property
    def num_pages(self) -> int:
        """Pages of all classes together."""
        return sum(window_class.num_pages for window_class in self.cache.classes)

    @property
    def num_held(self) -> int:
        """Allocated pages of all classes together."""
        return self.num_pages - sum(self.num_free)

    def can_ever_fit(self, sequence: Sequence) -> bool:
        """Return whether the sequence could be admitted if no other sequence ran."""
        return self._is_possible(self._pages(sequence.max_cached))

    def num_fitting(self, sequences: Iterable[Sequence], leaving: Iterable[Sequence] = ()) -> int:
        """Return how many of the sequences, in order, could reserve their pages if ``leaving`` had
        released theirs.
        """
        reserved, fitting = self._reserved_without(leaving), 0
        for sequence in sequences:
            reserved = _add(reserved, self.pages_needed(sequence))
            if not self._is_possible(reserved):
                break
            fitting += 1
        return fitting

    def fits_after_freeing(
        self, leaving: Iterable[Sequence], sequence: Sequence, num_spare: int
    ) -> bool:
        """Return whether ``reserve_for_admission`` would succeed if ``leaving`` had released their
        pages.
        """
        return self._is_possible(
            _add(self._reserved_without(leaving), self.pages_needed(sequence)), num_spare
        )

    def reserve_for_admission(self, sequence: Sequence, num_spare: int = 0) -> bool:
        """Reserve the pages that the sequence needs to begin, if that leaves ``num_spare`` pages of
        each class without a window.
        """
        needs = self.pages_needed(sequence)
        reserved = _add(self._reserved, needs)
        if not self._is_possible(reserved, num_spare):
            return False
        self._reserved = reserved
        sequence.pages = [[] for _ in needs]
        self._set_reserved(sequence, needs)
        return True

    def reserve(self, sequence: Sequence, num_positions: int, num_spare: int = 0) -> bool:
        """Reserve the pages for ``num_positions`` positions; return False if pages are lacking.

        ``num_spare``: pages of each class without a window that must remain free after that.
        """
        if num_positions <= sequence.num_reserved_positions:
            return True
        needs = [
            max(old, n)
            for old, n in zip(sequence.reserved_pages, self._pages(num_positions), strict=True)
        ]
        reserved = [
            r + n - old
            for r, n, old in zip(self._reserved, needs, sequence.reserved_pages, strict=True)
        ]
        if not self._is_possible(reserved, num_spare):
            return False
        self._reserved = reserved
        self._set_reserved(sequence, needs)
        return True

    def allocate(self, sequence: Sequence, start: int, end: int) -> tuple[tuple[int, ...], ...]:
        """Allocate the pages for positions ``start`` to ``end`` that the sequence does not hold
        yet, all reserved; return the new ones.

        In a class with a window the sequence gives back the pages that no later token sees. Steps
        pass every stage in their order, so pages can have new holders at once. P = 16, R = 5, pages
        0 to 4 held: for position 80 page 5, and page 0 is given back.
        """
        if end <= sequence.num_paged_positions:
            self._just_written.append((sequence, end))
            return self._no_pages
        assert end <= sequence.num_reserved_positions
        self._register_blocks(sequence, start)
        gained, paged = [], sequence.num_paged_positions
        for window_class, pool, held in zip(
            self.cache.classes, self._pools, sequence.pages, strict=True
        ):
            num_new = len(window_class.new_pages(paged, end, self.cache.page_size))
            num_left = max(len(held) + num_new - window_class.ring_pages, 0)
            pool.give_back(held[:num_left])
            new = tuple([pool.take() for _ in range(num_new)])
            del held[:num_left]
            held += new
            gained.append(new)
        sequence.num_paged_positions = -(-end // self.cache.page_size) * self.cache.page_size
        self._just_written.append((sequence, end))
        return tuple(gained)

    def reuse_prefix(self, sequence: Sequence) -> None:
        """Give a sequence that has not begun the cached pages of its longest known prefix.

        ``sequence.num_dispatched`` is then the length of that prefix. At least one known token is
        left to be computed.
        """
        assert not sequence.is_started
        assert not sequence.num_dispatched
        if not self._looks_up(sequence):
            return
        found, num_blocks = self._find_prefix(sequence)
        num_positions, given = num_blocks * self.cache.page_size, []
        for window_class, pool, own in zip(self.cache.classes, self._pools, found, strict=True):
            first = first_page_seen(num_positions, window_class.window, self.cache.page_size)
            pages = [page for page in own[first:num_blocks] if page is not None]
            assert len(pages) == num_blocks - first
            pool.share(pages)
            given.append(pages)
        sequence.pages = given
        sequence.num_dispatched = sequence.num_paged_positions = num_positions
        sequence.num_registered = num_blocks

    def count_cached(self, sequence: Sequence) -> int:
        """Return how many tokens a sequence that has not begun could skip if it began now. Keys are
        computed once.
        """
        return (
            self._find_prefix(sequence)[1] * self.cache.page_size if self._looks_up(sequence) else 0
        )

    def record_start(self, sequence: Sequence, num_cached: int) -> None:
        """Count a sequence that begins after ``num_cached`` cached tokens, if its prefix was looked
        up.
        """
        self.num_queried += sequence.num_known if self._looks_up(sequence) else 0
        self.num_hit += num_cached

    def _looks_up(self, sequence: Sequence) -> bool:
        return self.enable_prefix_caching and sequence.can_skip_prefix

    def release(self, sequence: Sequence) -> None:
        """Give back all pages and reservations; only when no micro-batch in flight can still touch
        the pages.
        """
        assert sequence.num_in_flight == 0
        self._register_blocks(sequence, sequence.num_dispatched)
        for pool, held in zip(self._pools, sequence.pages, strict=True):
            pool.give_back(held)
        self._reserved = self._reserved_without([sequence])
        sequence.pages, sequence.reserved_pages = [], []
        sequence.num_paged_positions = sequence.num_reserved_positions = sequence.num_registered = 0

    def forget(self, sequence: Sequence) -> None:
        """Remove all blocks of this sequence from the prefix cache: their contents may not be
        finite.

        This includes pages that it has given back, and pages of other sequences with the same
        tokens.
        """
        sequence.is_cacheable = False
        for pool in self._pools:
            pool.forget(sequence.hasher.keys)

    def forget_contents(self) -> None:
        """Empty the prefix cache, after the stages have lost it. No sequence may hold pages."""
        self._just_written.clear()
        self.prefix_hashes.clear()
        for pool in self._pools:
            pool.forget_contents()

    def register_written(self) -> None:
        """Register the pages that the last micro-batch writes in the prefix cache. Before that,
        another sequence of the same micro-batch would read them before they are written.
        """
        for sequence, end in self._just_written:
            if sequence.pages:  # otherwise it has been released
                # 0 if it is to begin again
                self._register_blocks(sequence, min(end, sequence.num_dispatched))
        self._just_written.clear()

    def _register_blocks(self, sequence: Sequence, num_positions: int) -> None:
        """Register in the prefix cache the pages that the first ``num_positions`` positions fill,
        as far as their tokens are known.
        """
        num_blocks = min(num_positions, sequence.num_known) // self.cache.page_size
        if num_blocks <= sequence.num_registered or not (
            self.enable_prefix_caching and sequence.is_cacheable
        ):
            return
        self._hash_blocks(sequence, num_blocks)
        size, first_new = self.cache.page_size, sequence.num_registered
        for pool, held in zip(self._pools, sequence.pages, strict=True):
            # pages of a chunk longer than the ring that are still held
            first_held = sequence.num_paged_positions // size - len(held)
            for block in range(max(first_new, first_held), num_blocks):
                pool.register(sequence.hasher.keys[block], held[block - first_held])
        sequence.num_registered = num_blocks

    def _hash_blocks(self, sequence: Sequence, num_blocks: int) -> None:
        if (num_known := len(sequence.hasher.keys)) < num_blocks:
            size = self.cache.page_size
            sequence.hasher.extend(sequence.known_ids(num_known * size, num_blocks * size), size)

    def _find_prefix(self, sequence: Sequence) -> tuple[list[list[int | None]], int]:
        """Return the page of each block of the longest known prefix, by class, and how many of the
        blocks can be reused.
        """
        found = self._find_pages(sequence, (sequence.num_known - 1) // self.cache.page_size)
        return found, reusable_blocks(self.cache, found)

    def _find_pages(self, sequence: Sequence, num_blocks: int) -> list[list[int | None]]:
        """Return the page of each block, by class, up to the first block that a class without a
        window lacks, or slightly beyond.

        Keys are computed in groups: most prompts have no hit.
        """
        found: list[list[int | None]] = [[] for _ in self._pools]
        is_broken, num_found = False, 0
        while num_found < num_blocks and not is_broken:
            end = min(2 * num_found + FIRST_BLOCKS, num_blocks)
            self._hash_blocks(sequence, end)
            for window_class, pool, own in zip(self.cache.classes, self._pools, found, strict=True):
                own += (new := pool.find(sequence.hasher.keys[num_found:end]))
                is_broken |= window_class.window is None and None in new
            num_found = end
        return found

    def check_integrity(self, holders: Iterable[Sequence]) -> None:
        """Assert that pages have the counted holders, and that reservations are complete and add
        up.
        """
        holders = list(holders)
        for index, window_class in enumerate(self.cache.classes):
            self._pools[index].check_integrity(
                page for sequence in holders for page in sequence.pages[index]
            )
            assert (
                self._reserved[index]
                == sum(s.reserved_pages[index] for s in holders)
                <= window_class.num_pages
            )
            assert all(len(s.pages[index]) <= s.reserved_pages[index] for s in holders)
            if window_class.window is not None:
                ring = [window_class.pages_for(s.max_cached, self.cache.page_size) for s in holders]
                assert [s.reserved_pages[index] for s in holders] == ring

    def pages_needed(self, sequence: Sequence) -> list[int]:
        """Return the pages needed to begin: with a window the maximum that it can ever need, else
        for its known tokens and one more.
        """
        at_first = min(sequence.num_known + 1, sequence.max_cached)
        return [
            c.pages_for(at_first if c.window is None else sequence.max_cached, self.cache.page_size)
            for c in self.cache.classes
        ]

    def _reserved_without(self, leaving: Iterable[Sequence]) -> list[int]:
        returned = [sum(pages) for pages in zip(*(s.reserved_pages for s in leaving), strict=True)]
        return (
            [r - n for r, n in zip(self._reserved, returned, strict=True)]
            if returned
            else self._reserved
        )

    def _pages(self, num_positions: int) -> list[int]:
        return [c.pages_for(num_positions, self.cache.page_size) for c in self.cache.classes]

    def _is_possible(self, reserved: list[int], num_spare: int = 0) -> bool:
        """With two spare pages of 10, 8 may be reserved in a class without a window, all 10 in a
        class with one.
        """
        return all(
            r + (num_spare if c.window is None else 0) <= c.num_pages
            for r, c in zip(reserved, self.cache.classes, strict=True)
        )

    def _covered(self, window_class: WindowClass, num_pages: int) -> int:
        """Return the number of positions that this number of pages covers."""
        return (
            UNBOUNDED if num_pages == window_class.ring_pages else num_pages * self.cache.page_size
        )

    def _set_reserved(self, sequence: Sequence, needs: list[int]) -> None:
        sequence.reserved_pages = needs
        sequence.num_reserved_positions = min(map(self._covered, self.cache.classes, needs))


def _add(pages: list[int], more: list[int]) -> list[int]:
    return [a + b for a, b in zip(pages, more, strict=True)]
