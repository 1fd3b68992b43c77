"""Admission checks: whether a sequence can run at all, and whether the waiting queue may take it
now.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass

from tramontane.proto.errors import RequestError
from tramontane.proto.plan import SpeculativeConfig
from tramontane.proto.request import validate_prompt
from tramontane.router.scheduling.page_allocator import PageAllocator
from tramontane.router.scheduling.prefix_cache import cache_salt
from tramontane.router.scheduling.running_set import RunningSet
from tramontane.router.scheduling.sequence import Sequence
from tramontane.router.scheduling.waiting_queue import WaitingQueue


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of one scheduler."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    max_queued_seqs: int | None = None  # in the waiting queue, of each priority
    max_queued_tokens: int | None = None  # of prompts in the waiting queue, of each priority
    reuses_prefixes: bool = False  # whether sequences begin with cached pages of others
    shares_prefixes: bool = False  # also with those of other tenants
    model: str = ""  # mark of the model and its weights
    speculative: SpeculativeConfig | None = None
    # whether decodes follow each other before the tokens between them are known
    async_scheduling: bool = False

    def cache_salt(self, tenant: str) -> str:
        """Return the salt of the keys of cached pages."""
        return cache_salt(self.model, "" if self.shares_prefixes else tenant)


def validate_sequence(
    sequence: Sequence, limits: SchedulerLimits, allocator: PageAllocator
) -> None:
    """Raise RequestError if this sequence could never run, however long it waited."""
    validate_prompt(sequence.prompt_ids, limits.max_model_len, limits.vocab_size)
    for token_id, _ in sequence.sampling.logit_bias:
        if not 0 <= token_id < limits.vocab_size:
            raise RequestError(
                f"logit_bias: token id {token_id} is outside the model's vocabulary of"
                f" {limits.vocab_size}"
            )
    for token_id in sequence.sampling.stop_token_ids:
        if not 0 <= token_id < limits.vocab_size:
            raise RequestError(
                f"stop_token_ids: token id {token_id} is outside the model's vocabulary of"
                f" {limits.vocab_size}"
            )
    assert sequence.max_len <= limits.max_model_len
    if not allocator.can_ever_fit(sequence):
        raise RequestError(
            f"a sequence of {sequence.max_len} tokens needs more cache pages than there are; "
            "shorten it or raise --kv-cache-memory"
        )


def is_full(priority: int, owner: int, waiting: WaitingQueue, limits: SchedulerLimits) -> bool:
    """Return whether even the smallest request of this priority and owner could neither wait nor
    start at once.
    """
    own, others = _split_by_owner(waiting.of_priority(priority), owner)
    seqs_full = len(own) >= _queue_share(limits.max_queued_seqs, len(others), owner)
    tokens_full = bool(own) and _num_tokens(own) >= _queue_share(
        limits.max_queued_tokens, _num_tokens(others), owner
    )
    return waiting.has_at_least(priority) and (seqs_full or tokens_full)


def overload_reason(
    arriving: Collection[Sequence],
    waiting: WaitingQueue,
    running: RunningSet,
    limits: SchedulerLimits,
) -> str | None:
    """Return why these sequences must not be added now, or None.

    Only arrivals that would wait are counted, next to waiting sequences of the same priority. With
    3 of 64 slots free, pages for them, and no sequence waiting that is as urgent, 5 arrivals queue
    2. Slots and pages of less urgent sequences count as free. All arrivals have the same owner.
       With several owners, one may fill half of what the others leave of the queue.
    """
    reasons = (
        _overload_reason(
            [s for s in arriving if s.priority == priority], priority, waiting, running, limits
        )
        for priority in {s.priority for s in arriving}
    )
    return next(filter(None, reasons), None)


def _overload_reason(
    arriving: list[Sequence],
    priority: int,
    waiting: WaitingQueue,
    running: RunningSet,
    limits: SchedulerLimits,
) -> str | None:
    num_starting = (
        0 if waiting.has_at_least(priority) else running.num_admissible(arriving, priority)
    )
    queued, owner = arriving[num_starting:], arriving[0].owner
    own, others = _split_by_owner(waiting.of_priority(priority), owner)
    with_key = " with this key" * bool(owner)
    bound = _queue_share(limits.max_queued_seqs, len(others), owner)
    if len(own) + len(queued) > bound:
        subject = (
            f"1 sequence{with_key} is" if len(own) == 1 else f"{len(own)} sequences{with_key} are"
        )
        return f"{subject} waiting and at most {bound:.0f} may"
    num_tokens, bound = (
        _num_tokens((*own, *queued)),
        _queue_share(limits.max_queued_tokens, _num_tokens(others), owner),
    )
    if len(own) + len(queued) > 1 and num_tokens > bound:
        return f"{num_tokens} prompt tokens{with_key} would be waiting and at most {bound:.0f} may"
    return None


def _split_by_owner(waiting: list[Sequence], owner: int) -> tuple[list[Sequence], list[Sequence]]:
    """Split into this owner's sequences and all others; without API keys every sequence has the
    same owner.
    """
    return [s for s in waiting if s.owner == owner], [s for s in waiting if s.owner != owner]


def _queue_share(bound: int | None, num_of_others: int, owner: int) -> float:
    """Return how much an owner may fill: of a queue of 256 one may fill 128, next to it a second
    one 64; without owners all.
    """
    if bound is None:
        return math.inf
    left = max(bound - num_of_others, 0)
    return (left + 1) // 2 if owner else left


def _num_tokens(sequences: Collection[Sequence]) -> int:
    return sum(len(s.prompt_ids) for s in sequences)
