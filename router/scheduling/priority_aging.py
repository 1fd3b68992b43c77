"""That nobody is left behind for ever, however much is more urgent. Counted in micro-batches: a scheduler has no clock."""

from collections.abc import Iterable

from tramontane.router.scheduling.prefill_queue import PrefillQueue
from tramontane.router.scheduling.running_set import RunningSet
from tramontane.router.scheduling.sequence import Sequence, SequenceStatus, arrival_key
from tramontane.router.scheduling.waiting_queue import WaitingQueue

MAX_PASSES = 64  # micro-batches that a sequence may be left behind by; with the last one it becomes as urgent as any


def age_starved(going: Iterable[Sequence], waiting: WaitingQueue, prompts: PrefillQueue, admitted: RunningSet) -> None:
    """A micro-batch takes prompts of these. Of all less urgent ones of which it takes none, whoever came first counts it.

    Only that one: waiting for equals makes nobody more urgent. Having become urgent it is the first of all, nobody can take
    its place from it, and so it ends; then the count goes on with the next.
    """
    level = min(sequence.effective_priority for sequence in going)
    behind = [s for s in prompts.sequences if s.effective_priority > level and s not in going]
    if (oldest_waiting := waiting.oldest_lower_priority(level)) is not None:
        behind.append(oldest_waiting)
    if behind:
        oldest = min(behind, key=arrival_key)
        oldest.num_skipped += 1
        if oldest.num_skipped >= MAX_PASSES:
            _promote(oldest, waiting, prompts, admitted)


def _promote(sequence: Sequence, waiting: WaitingQueue, prompts: PrefillQueue, admitted: RunningSet) -> None:
    if sequence.status is SequenceStatus.RUNNING:
        admitted.promote(sequence)
        prompts.sort()
    else:
        waiting.promote(sequence)
