"""The log of cached prefixes: which keys of blocks became known and which were forgotten, for those
who choose a pipeline.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

# of a key in a digest: of a million keys one in 18 million million others is taken for one of them
KEY_BYTES = 8
MAX_CHANGES = 2**15  # that are kept; who is further behind gets all keys
# that are sent at once, the latest: they fit into one message between replicas, of up to 4 MiB
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


class CachedKeyLog:
    """The keys that every pool has a page of. Of three pools two have key k: no change; once the
    third has it, k is added.
    """

    def __init__(self, num_pools: int) -> None:
        self._num_pools = num_pools
        self._num_with: dict[bytes, int] = {}  # pools with a page of this key
        # the key, and whether it is there now
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
        """Record that no pool knows any page."""
        self._num_with.clear()
        self._changes.clear()
        self._version += 1

    def since(self, version: int) -> KeyChanges:
        """Return the changes after a version, each key once; all keys for a version that is too old
        or none of this log's.
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
    """Return the keys that ``KeyChanges`` has joined."""
    return [data[start : start + KEY_BYTES] for start in range(0, len(data), KEY_BYTES)]


def _join(keys: Iterable[bytes]) -> bytes:
    return b"".join([key[:KEY_BYTES] for key in keys])
