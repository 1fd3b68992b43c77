"""Prefix caching: the keys of blocks of tokens, and the longest prefix whose pages are cached.

A block is the tokens of one page, positions nP to nP + P - 1. Its key is a hash of the sequence's
salt and of all tokens up to the block's end, so equal keys mean equal contents of the caches.

With a window a token sees only the last W positions. A prefix of L = nP tokens can be reused where
every class without a window has all of its pages 0 to n - 1, and every other class those of the
positions that the token at L sees, L - W + 1 to L - 1.

P = 16, W = 40: the token at L = 96 sees positions 57 to 95, which are on the pages 3, 4 and 5.
"""

import hashlib
from array import array
from collections.abc import Sequence

from tramontane.proto.plan import CachePlan

TOKEN_TYPE = "I"  # of 4 bytes without sign, which is made in half of the time of one with a sign


class BlockHasher:
    """The keys of a sequence's blocks, from the first on. It is given every block once."""

    def __init__(self, salt: str) -> None:
        self._hash = hashlib.sha256(salt.encode())
        self.keys: list[bytes] = []

    def extend(self, token_ids: Sequence[int], page_size: int) -> None:
        """Append the keys of whole blocks."""
        data, update, digest = (
            memoryview(array(TOKEN_TYPE, token_ids)).cast("B"),
            self._hash.update,
            self._hash.digest,
        )
        step = page_size * 4
        for start in range(0, len(data), step):
            update(data[start : start + step])
            self.keys.append(digest())


def cache_salt(model: str, tenant: str) -> str:
    """Return the salt of the keys: what a model computes is not another one's, and tenants do not
    share.
    """
    return f"{model} {tenant}"


def first_page_seen(num_positions: int, window: int | None, page_size: int) -> int:
    """Return the index of the page with the oldest position that the token after so many positions
    sees.
    """
    return 0 if window is None else max(num_positions - window + 1, 0) // page_size


def reusable_blocks(cache: CachePlan, pages: Sequence[Sequence[int | None]]) -> int:
    """Return how many blocks of a prefix can be reused. ``pages`` has for each class the page of
    every block, or None.

    P = 16, W = 40, block 4 of 8 is missing: 8 blocks need blocks 5 to 7, which are there. If 6 is
    missing, too, none of 7 and 8 is possible, which see it, and 6 needs blocks 3 to 5; so 4 is the
    next candidate, which needs blocks 1 to 3.
    """
    windows = [c.window for c in cache.classes]
    has_page = [bytes([page is not None for page in own]) for own in pages]  # which C code searches
    num_blocks = min(map(len, has_page))
    while num_blocks:
        firsts = [
            first_page_seen(num_blocks * cache.page_size, window, cache.page_size)
            for window in windows
        ]
        candidate = min(
            _last_candidate(own, first, num_blocks)
            for own, first in zip(has_page, firsts, strict=True)
        )
        if candidate == num_blocks:
            break
        num_blocks = candidate
    return num_blocks


def _last_candidate(has_page: bytes, first: int, end: int) -> int:
    """Return ``end`` if the blocks from ``first`` up to it have pages, else the end of the last run
    of them that is no longer.

    Blocks 0, 1 and 6 of 7 have pages: from 2 to 7 some are missing, so that 2 is the next
    candidate.
    """
    gap = has_page.rfind(0, first, end)
    return end if gap < 0 else has_page.rfind(1, 0, gap) + 1
