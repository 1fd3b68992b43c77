"""A load that a test sets, in place of one that is measured."""

from collections.abc import Iterator
from contextlib import contextmanager

from tramontane.cluster.common.load_meter import FullLoad


class FixedLoad(FullLoad):
    """``counts``: how many watch, after each that began or ended."""

    def __init__(self, level: float = 0.0) -> None:
        self.level = level
        self.counts: list[int] = []
        self._num_watching = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        self._count(1)
        yield
        self._count(-1)

    def _count(self, change: int) -> None:
        self._num_watching += change
        self.counts.append(self._num_watching)
