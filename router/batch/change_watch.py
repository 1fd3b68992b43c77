"""How long rows of the database have been unchanged, by this process's own monotonic clock."""

import time
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)


class Unchanged(NamedTuple):
    """Seconds since a row was first seen in its current state, and whether an earlier state was
    seen, so that its owner is alive.
    """

    seconds: float
    has_changed: bool


class _Seen(NamedTuple):
    value: object
    at: float
    has_changed: bool


class ChangeWatch(Generic[K]):
    """Detects whether the owners of rows still write them. Timestamps of other writers are only
    compared with each other.

    So the machines' clocks need not agree, and setting a clock has no effect.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[K, _Seen] = {}

    def look(self, rows: Mapping[K, object]) -> dict[K, Unchanged]:
        """Return the observation of each row; other rows are forgotten."""
        now = self._clock()
        self._seen = {key: self._seen_now(key, value, now) for key, value in rows.items()}
        return {key: Unchanged(now - seen.at, seen.has_changed) for key, seen in self._seen.items()}

    def _seen_now(self, key: K, value: object, now: float) -> _Seen:
        before = self._seen.get(key)
        if before is None:
            return _Seen(value, now, has_changed=False)
        return before if before.value == value else _Seen(value, now, has_changed=True)


def is_stale(touched_at: float, now: float, timeout_s: float) -> bool:
    """Return whether a row was last written more than ``timeout_s`` ago, or by a clock that far
    ahead of this one.

    At 1000 with 30: 969 and 1031 are stale, 970 and 1030 are not.
    """
    return abs(now - touched_at) > timeout_s
