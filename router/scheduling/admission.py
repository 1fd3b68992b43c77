"""What may be added to a scheduler at all, and what may be added now."""

import math
from collections.abc import Collection
from dataclasses import dataclass

from tramontane.proto.errors import RequestError
from tramontane.router.scheduling.page_allocator import PageAllocator
from tramontane.router.scheduling.running_set import RunningSet
from tramontane.router.scheduling.sequence import Sequence
from tramontane.router.scheduling.waiting_queue import WaitingQueue


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """``max_queued_seqs`` and ``max_queued_tokens`` (of prompts) bound what waits for admission, of each priority by itself."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    max_queued_seqs: int | None = None
    max_queued_tokens: int | None = None


def validate_sequence(sequence: Sequence, limits: SchedulerLimits, ledger: PageAllocator) -> None:
    """Raises RequestError if this sequence could never run, however long it waited."""
    if not sequence.prompt_ids:
        raise RequestError("the prompt is empty; give it at least one token")
    if len(sequence.prompt_ids) >= limits.max_model_len:
        raise RequestError(
            f"the prompt has {len(sequence.prompt_ids)} tokens; with a context of "
            f"{limits.max_model_len} positions it may have at most {limits.max_model_len - 1}"
        )
    for token_id in (min(sequence.prompt_ids), max(sequence.prompt_ids)):
        if not 0 <= token_id < limits.vocab_size:
            raise RequestError(f"token id {token_id} is outside the model's vocabulary of {limits.vocab_size}")
    for token_id, _ in sequence.sampling.logit_bias:
        if not 0 <= token_id < limits.vocab_size:
            raise RequestError(f"logit_bias: token id {token_id} is outside the model's vocabulary of {limits.vocab_size}")
    assert sequence.max_len <= limits.max_model_len
    if not ledger.can_ever_fit(sequence):
        raise RequestError(
            f"a sequence of {sequence.max_len} tokens needs more cache pages than there are; "
            "shorten it or raise --kv-cache-memory"
        )


def is_full(priority: int, owner: int, line: WaitingQueue, limits: SchedulerLimits) -> bool:
    """Whether not even the smallest request of this priority and owner could wait, and none would begin at once."""
    own, others = _by_owner(line.of_priority(priority), owner)
    no_places = len(own) >= _queue_share(limits.max_queued_seqs, len(others), owner)
    no_tokens = bool(own) and _num_tokens(own) >= _queue_share(limits.max_queued_tokens, _num_tokens(others), owner)
    return line.has_at_least(priority) and (no_places or no_tokens)


def overload_reason(
    arriving: Collection[Sequence], waiting: WaitingQueue, admitted: RunningSet, limits: SchedulerLimits
) -> str | None:
    """Why these sequences must not be added now, or None.

    Only what would wait is counted, and of waiting ones only those of the same priority. With 3 of 64 places free, pages for
    them, and nobody as urgent waiting, 5 arrivals queue 2. Places and pages of less urgent sequences count as free.
    All arrivals are of one owner. Where there are several, one may fill half of what the others leave of the queue.
    """
    reasons = (
        _overload([s for s in arriving if s.priority == priority], priority, waiting, admitted, limits)
        for priority in {s.priority for s in arriving}
    )
    return next(filter(None, reasons), None)


def _overload(
    arriving: list[Sequence], priority: int, line: WaitingQueue, admitted: RunningSet, limits: SchedulerLimits
) -> str | None:
    waiting = line.of_priority(priority)
    free = 0 if line.has_at_least(priority) else admitted.num_admissible(arriving, priority)
    queued, owner = arriving[free:], arriving[0].owner
    own, others = _by_owner(waiting, owner)
    whose = " with this key" * bool(owner)
    most = _queue_share(limits.max_queued_seqs, len(others), owner)
    if len(own) + len(queued) > most:
        those = f"1 sequence{whose} is" if len(own) == 1 else f"{len(own)} sequences{whose} are"
        return f"{those} waiting and at most {most:.0f} may"
    num_tokens, most = _num_tokens((*own, *queued)), _queue_share(limits.max_queued_tokens, _num_tokens(others), owner)
    if len(own) + len(queued) > 1 and num_tokens > most:
        return f"{num_tokens} prompt tokens{whose} would be waiting and at most {most:.0f} may"
    return None


def _by_owner(waiting: list[Sequence], owner: int) -> tuple[list[Sequence], list[Sequence]]:
    """Its own, and those of others; where there are no owners all are one's own."""
    return [s for s in waiting if s.owner == owner], [s for s in waiting if s.owner != owner]


def _queue_share(bound: int | None, num_of_others: int, owner: int) -> float:
    """Of a queue of 256 an owner may fill 128, a second one 64 beside them; where there are no owners all 256."""
    if bound is None:
        return math.inf
    left = max(bound - num_of_others, 0)
    return (left + 1) // 2 if owner else left


def _num_tokens(sequences: Collection[Sequence]) -> int:
    return sum(len(s.prompt_ids) for s in sequences)
