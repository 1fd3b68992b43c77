"""Prefix caching: the keys of blocks of tokens, and the longest prefix whose pages are cached.

A block is the tokens of one page, positions nP to nP + P - 1. Its key is a hash of the sequence's
salt and of all tokens up to the block's end, so equal keys mean equal contents of the caches.

With a window a token sees only the last W positions. A prefix of L = nP tokens can be reused where
every class without a window has all of its pages 0 to n - 1, and every other class has the pages of
the positions that the token at L sees, L - W + 1 to L - 1.

P = 16, W = 40: the token at L = 96 sees positions 57 to 95, which are on the pages 3, 4 and 5.
"""

import hashlib
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from tramontane.proto.plan import CachePlan

# The log of cached prefixes: keys of blocks that were added and removed. Ingresses choose a
# pipeline by it.

# of a key in a digest: with a million cached keys, a false match has probability 1 in 1.8e13
KEY_BYTES = 8
MAX_CHANGES = 2**15  # changes that are kept; a reader that is further behind receives the full list
# latest keys sent at once: they fit into one message between replicas, of up to 4 MiB
MAX_KEYS = 2**18


@dataclass(frozen=True, slots=True)
class KeyChanges:
    """The changes up to a version, by the first ``KEY_BYTES`` of each key.

    ``is_whole``: ``added`` are all keys there are, or the latest ``MAX_KEYS``.
    """

    version: int
    is_whole: bool
    added: bytes
    removed: bytes


class PrefixHashLog:
    """The keys of which every pool has a page. With three pools of which two have key k, nothing
    changes; once the third has it, k is added.
    """

    def __init__(self, num_pools: int) -> None:
        self._num_pools = num_pools
        self._num_with: dict[bytes, int] = {}  # pools with a page of this key
        # the key, and whether it exists now
        self._changes: deque[tuple[bytes, bool]] = deque(maxlen=MAX_CHANGES)
        self._version = 0

    def add(self, key: bytes) -> None:
        """Record that one more pool has a page of this key."""
        self._num_with[key] = number = self._num_with.get(key, 0) + 1
        if number == self._num_pools:
            self._record(key, is_there=True)

    def remove(self, key: bytes) -> None:
        """Record that a pool has no page of this key any more."""
        number = self._num_with.pop(key)
        if number > 1:
            self._num_with[key] = number - 1
        if number == self._num_pools:
            self._record(key, is_there=False)

    def clear(self) -> None:
        """Record that no pool has any page."""
        self._num_with.clear()
        self._changes.clear()
        self._version += 1

    def since(self, version: int) -> KeyChanges:
        """Return the changes after a version, each key once; the full list if the version is too
        old or of another log.
        """
        num_changes = self._version - version
        if not 0 <= num_changes <= len(self._changes):
            whole = (
                key for key, number in reversed(self._num_with.items()) if number == self._num_pools
            )
            return KeyChanges(self._version, True, _join(list(islice(whole, MAX_KEYS))[::-1]), b"")
        last = dict(list(self._changes)[len(self._changes) - num_changes :])
        added = (key for key, is_there in last.items() if is_there)
        removed = (key for key, is_there in last.items() if not is_there)
        return KeyChanges(self._version, False, _join(added), _join(removed))

    def _record(self, key: bytes, *, is_there: bool) -> None:
        self._changes.append((key, is_there))
        self._version += 1


def split_keys(data: bytes) -> list[bytes]:
    """Return the keys that ``KeyChanges`` has concatenated."""
    return [data[start : start + KEY_BYTES] for start in range(0, len(data), KEY_BYTES)]


def _join(keys: Iterable[bytes]) -> bytes:
    return b"".join([key[:KEY_BYTES] for key in keys])


TOKEN_TYPE = "I"  # 4 bytes, unsigned: made in half the time of signed integers


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


def cache_salt(model: str, salt: str, *, share_prefixes: bool = False) -> str:
    """Return the salt of the keys, so that models do not share blocks, and neither do tenants
    unless they ``share_prefixes``. Blocks with a client's own salt are shared only with that.

    ``salt``: see ``Identity.cache_salt``.
    """
    tenant, *own = salt.split(" ", 1)
    return " ".join((model, "" if share_prefixes else tenant, *own))


def first_page_seen(num_positions: int, window: int | None, page_size: int) -> int:
    """Return the index of the page with the oldest position that the token after ``num_positions``
    positions sees.
    """
    return 0 if window is None else max(num_positions - window + 1, 0) // page_size


def reusable_blocks(cache: CachePlan, pages: Sequence[Sequence[int | None]]) -> int:
    """Return how many blocks of a prefix can be reused. ``pages`` has for each class the page of
    every block, or None.

    P = 16, W = 40, block 4 of 8 is missing: a prefix of 8 blocks needs blocks 5 to 7, which are
    there. If 6 is missing, too, prefixes of 7 and 8 blocks are impossible, as they need it, and a
    prefix of 6 needs blocks 3 to 5; so 4 is the next candidate, which needs blocks 1 to 3.
    """
    windows = [c.window for c in cache.classes]
    has_page = [bytes([page is not None for page in own]) for own in pages]  # bytes: searched in C
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
    of blocks with pages that ends before the gap.

    Blocks 0, 1 and 6 of 7 have pages: some from 2 to 7 are missing, so that 2 is the next
    candidate.
    """
    gap = has_page.rfind(0, first, end)
    return end if gap < 0 else has_page.rfind(1, 0, gap) + 1
