"""Detection of poison requests: a suspected sequence runs alone before it is blamed."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from tramontane.proto.step import MicroBatch
from tramontane.router.scheduling.sequence import Sequence, SequenceStatus

# failed micro-batches in a row, without a token between them; the last one with the sequence alone
MAX_FAILURES = 3


@dataclass(frozen=True, slots=True)
class FailedBatch:
    """The sequences of a failed micro-batch, each with its first position in it and the one after
    the last.

    ``is_alone``: no other sequence was in the pipeline.
    """

    positions: Mapping[Sequence, tuple[int, int]]
    is_alone: bool


def position_spans(batch: MicroBatch) -> dict[int, tuple[int, int]]:
    """Return the first position of each sequence in a micro-batch and the one after the last, by
    the sequence's id.
    """
    spans = {chunk.seq_id: (chunk.start, chunk.start + chunk.num_tokens) for chunk in batch.chunks}
    for seq_id, start in zip(batch.decodes.seq_ids, batch.decodes.starts, strict=True):
        spans[seq_id] = spans.get(seq_id, (start, start))[0], start + 1
    return spans


class PoisonDetector:
    """Finds the sequence that makes micro-batches fail.

    Each sequence of a failed micro-batch may be the cause. A poisonous sequence fails at the same
    position every time, so a sequence that was in two failures for a common position is run alone,
    before all others: if it yields a token it is cleared, if the pipeline fails again, for the
    third time, it is the cause. Two failures of other causes therefore convict no sequence, even if
    it was alone both times.
    """

    def __init__(self) -> None:
        self._to_isolate: deque[Sequence] = deque()

    def __bool__(self) -> bool:
        return bool(self._to_isolate)

    @property
    def first(self) -> Sequence:
        """The next sequence to be run alone."""
        return self._to_isolate[0]

    def record_failure(self, failed: FailedBatch) -> Sequence | None:
        """Count a failed micro-batch against its sequences that have not ended; return the cause,
        if it is certain.
        """
        for sequence, span in failed.positions.items():
            if sequence.status is SequenceStatus.FINISHED:
                continue
            _count_failure(sequence, span)
            if sequence.num_failures >= MAX_FAILURES and failed.is_alone:
                return sequence
            if sequence.num_failures >= MAX_FAILURES - 1 and sequence not in self._to_isolate:
                self._to_isolate.append(sequence)
        return None

    def clear(self, sequence: Sequence) -> bool:
        """Clear a sequence that yielded a token; return whether it must be preempted so that the
        next one can run alone.
        """
        if sequence in self._to_isolate:
            self._to_isolate.remove(sequence)
            return bool(self._to_isolate) and sequence.status is SequenceStatus.RUNNING
        return False

    def discard(self, sequence: Sequence) -> None:
        """Drop a sequence that has ended."""
        if sequence in self._to_isolate:
            self._to_isolate.remove(sequence)


def _count_failure(sequence: Sequence, span: tuple[int, int]) -> None:
    """Count a failure at these positions. Positions 0..63 and then 32..95 are two failures at
    32..63; 64..127 is a first failure again.
    """
    common = max(sequence.failed_at[0], span[0]), min(sequence.failed_at[1], span[1])
    again = sequence.num_known == sequence.num_known_at_failure and common[0] < common[1]
    sequence.num_failures = sequence.num_failures + 1 if again else 1
    sequence.failed_at = common if again else span
    sequence.num_known_at_failure = sequence.num_known
