"""Starvation prevention. Ages are counted in micro-batches because the scheduler has no clock."""

from collections.abc import Iterable

from tramontane.router.scheduling.prefill_queue import PrefillQueue
from tramontane.router.scheduling.running_set import RunningSet
from tramontane.router.scheduling.sequence import Sequence, SequenceStatus, arrival_key
from tramontane.router.scheduling.waiting_queue import WaitingQueue

MAX_PASSES = 64  # micro-batches that may pass a sequence over; with the last one it becomes as urgent as any


def age_starved(going: Iterable[Sequence], waiting: WaitingQueue, prefills: PrefillQueue, running: RunningSet) -> None:
    """Count a micro-batch that takes prompt tokens of ``going`` against the oldest less urgent sequence that it passes over.

    Only the oldest one ages: waiting for equals makes no sequence more urgent. After ``MAX_PASSES`` it is promoted and is the
    first of all; no sequence can take its slot, so it ends. The next oldest then continues the count.
    """
    level = min(sequence.effective_priority for sequence in going)
    passed = [s for s in prefills.sequences if s.effective_priority > level and s not in going]
    if (oldest_waiting := waiting.oldest_lower_priority(level)) is not None:
        passed.append(oldest_waiting)
    if passed:
        oldest = min(passed, key=arrival_key)
        oldest.num_skipped += 1
        if oldest.num_skipped >= MAX_PASSES:
            _promote(oldest, waiting, prefills, running)


def _promote(sequence: Sequence, waiting: WaitingQueue, prefills: PrefillQueue, running: RunningSet) -> None:
    if sequence.status is SequenceStatus.RUNNING:
        running.promote(sequence)
        prefills.sort()
    else:
        waiting.promote(sequence)
