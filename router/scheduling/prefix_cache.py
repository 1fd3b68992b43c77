"""Prefix caching: the keys of blocks of tokens, and the longest prefix whose pages are cached.

A block is the tokens of one page, positions nP to nP + P - 1. Its key is a hash of the sequence's salt and of all tokens up to
the block's end, so equal keys mean equal contents of the caches.

With a window a token sees only the last W positions. A prefix of L = nP tokens can be reused where every class without a window
has all of its pages 0 to n - 1, and every other class those of the positions that the token at L sees, L - W + 1 to L - 1.

P = 16, W = 40: the token at L = 96 sees positions 57 to 95, which are on the pages 3, 4 and 5.
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence

from tramontane.proto.plan import CachePlan

TOKEN_TYPE = "i"  # of 4 bytes


class BlockHasher:
    """The keys of a sequence's blocks, from the first on. It is given every block once."""

    def __init__(self, salt: str) -> None:
        self._hash = hashlib.sha256(salt.encode())
        self.keys: list[bytes] = []

    def extend(self, token_ids: Sequence[int], page_size: int) -> None:
        """Append the keys of whole blocks."""
        data, update, digest = memoryview(array(TOKEN_TYPE, token_ids)).cast("B"), self._hash.update, self._hash.digest
        step = page_size * 4
        for start in range(0, len(data), step):
            update(data[start : start + step])
            self.keys.append(digest())


def cache_salt(model: str, tenant: str) -> str:
    """Return the salt of the keys: what a model computes is not another one's, and tenants do not share."""
    return f"{model} {tenant}"


def first_page_seen(num_positions: int, window: int | None, page_size: int) -> int:
    """Return the index of the page with the oldest position that the token after so many positions sees."""
    return 0 if window is None else max(num_positions - window + 1, 0) // page_size


def reusable_blocks(cache: CachePlan, hits: Iterator[Sequence[bool]]) -> int:
    """Return how many blocks of a prefix can be reused. ``hits`` has for each block which classes have its page.

    Reads no further than a class without a window has pages.
    """
    windows = [c.window for c in cache.classes]
    runs = [0] * len(windows)  # pages in a row, up to the current one
    best = 0
    for num_blocks, found in enumerate(hits, start=1):
        runs = [run + 1 if is_hit else 0 for run, is_hit in zip(runs, found, strict=True)]
        if any(window is None and run < num_blocks for window, run in zip(windows, runs, strict=True)):
            break
        needed = (num_blocks - first_page_seen(num_blocks * cache.page_size, w, cache.page_size) for w in windows)
        if all(run >= number for run, number in zip(runs, needed, strict=True)):
            best = num_blocks
    return best
