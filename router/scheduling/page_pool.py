"""The pages of one window class: held by sequences, cached for prompts that begin alike, or
free.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import repeat

from tramontane.router.scheduling.cached_key_log import CachedKeyLog


class PagePool:
    """Pages that are free, held by one or more sequences, or *cached*: idle, with known contents.

    A page is known by the key of its block of tokens, see ``prefix_cache.py``. Cached pages are
    taken, the least recently used first, when none is free, so they never keep a page from a
    sequence.
    """

    def __init__(self, num_pages: int, log: CachedKeyLog) -> None:
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
        """Idle pages whose contents are known."""
        return len(self._cached)

    def take(self) -> int:
        """Return a page that had no holder. There must be one."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            key = self._key_of.pop(page)
            del self._page_of[key]
            self._log.remove(key)
        self._num_holders[page] = 1
        return page

    def find(self, keys: Sequence[bytes]) -> list[int | None]:
        """Return the page with the contents of each key, None where there is none."""
        return list(map(self._page_of.get, keys))

    def share(self, pages: Sequence[int]) -> None:
        """Add a holder to each of these pages with keys."""
        num_holders, cached = self._num_holders, self._cached
        for page in pages:
            if not num_holders[page]:
                del cached[page]
            num_holders[page] += 1

    def give_back(self, pages: Sequence[int]) -> None:
        """Remove a holder of each page. Of those that become idle later ones are taken first:
        earlier ones begin more prompts.
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
        """Make the contents of a held page known, unless another page has the same."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key], self._key_of[page] = page, key
            self._log.add(key)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Forget the pages with these contents; who holds them keeps them."""
        for key in keys:
            if (page := self._page_of.pop(key, None)) is None:
                continue
            del self._key_of[page]
            self._log.remove(key)
            if page in self._cached:
                del self._cached[page]
                self._free.append(page)

    def forget_contents(self) -> None:
        """Forget what all pages contain; the log is cleared for all pools together. No sequence
        holds any.
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
