"""Which sequences may be what makes stages fail: they are tried alone before anybody is accused."""

from collections import deque
from collections.abc import Mapping

from tramontane.router.scheduling.sequence import Sequence, SequenceStatus

MAX_FAILURES = 2  # in a row, without a token between them; the last one alone


class PoisonDetector:
    """A sequence that was in a failing micro-batch may have caused it, or only have been in its company.

    If one that was in ``MAX_FAILURES`` of them is to blame, it is for the same position each time. It is tried alone, before
    anybody else goes on: where it makes a token it is acquitted, where the pipeline fails again it is guilty.
    """

    def __init__(self) -> None:
        self._to_isolate: deque[Sequence] = deque()

    def __bool__(self) -> bool:
        return bool(self._to_isolate)

    @property
    def first(self) -> Sequence:
        """Whose turn it is."""
        return self._to_isolate[0]

    def record_failure(self, positions: Mapping[Sequence, tuple[int, int]], *, alone: bool) -> Sequence | None:
        """These, from here to before there, were in a micro-batch that failed; ``alone``: nothing else was in the pipeline.

        Returns who is guilty.
        """
        for sequence, span in positions.items():
            _count(sequence, span)
            if sequence.num_failures >= MAX_FAILURES and alone:
                return sequence
            if sequence.num_failures >= MAX_FAILURES and sequence not in self._to_isolate:
                self._to_isolate.append(sequence)
        return None

    def clear(self, sequence: Sequence) -> bool:
        """It is acquitted; returns whether it has to make room for the next one's trial."""
        if sequence in self._to_isolate:
            self._to_isolate.remove(sequence)
            return bool(self._to_isolate) and sequence.status is SequenceStatus.RUNNING
        return False

    def discard(self, sequence: Sequence) -> None:
        """It has ended."""
        if sequence in self._to_isolate:
            self._to_isolate.remove(sequence)


def _count(sequence: Sequence, span: tuple[int, int]) -> None:
    """Positions 0..63 and then 32..95: twice, for one of 32..63. Then 64..127: that is another failure, and the first."""
    common = max(sequence.failed_at[0], span[0]), min(sequence.failed_at[1], span[1])
    again = sequence.num_known == sequence.num_known_at_failure and common[0] < common[1]
    sequence.num_failures = sequence.num_failures + 1 if again else 1
    sequence.failed_at = common if again else span
    sequence.num_known_at_failure = sequence.num_known
