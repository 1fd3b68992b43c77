"""The policy interface: how much of what could run goes into the next micro-batch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tramontane.proto.step import StageTiming


@dataclass(frozen=True, slots=True)
class BatchWork:
    """The work of a micro-batch in one stage, counted so that time is about linear in it.

    ``prefill_keys`` is the number of keys that all prompt tokens together attend to, ``decode_keys`` that of all decodes.
    """

    prefill_tokens: int = 0
    prefill_keys: int = 0
    decodes: int = 0
    decode_keys: int = 0


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """What there is to do at this moment.

    ``num_decoding`` sequences are past their prompts, with ``decoding_keys`` visible keys in all; the next token of
    ``num_ready`` of them can be submitted now (``ready_keys``: visible keys of each, in the order in which they would go). Of
    prompts, ``pending_tokens`` are admitted and not yet submitted, the first of them after ``prefill_start`` earlier positions;
    the first ``urgent_tokens`` of these are more urgent than another running sequence, which should yield to them.
    ``waiting_tokens`` are not admitted. ``free_share`` of the scarcest pages is free.
    """

    num_in_flight: int
    num_decoding: int
    decoding_keys: int
    num_ready: int
    ready_keys: Iterable[int]
    pending_tokens: int
    prefill_start: int
    waiting_tokens: int
    free_share: float
    urgent_tokens: int = 0


@dataclass(frozen=True, slots=True)
class BatchBudget:
    """The most decode tokens and prompt tokens that the next micro-batch may have.

    ``spread`` and ``round_s`` are for the policy itself: over how many micro-batches it spreads decodes (0 if this one may have
    prompt tokens), and how long it expects a round of them to take.
    """

    decodes: int
    prefill_tokens: int
    spread: int = 0
    round_s: float = 0.0


class Policy(Protocol):
    """Decides the size of every micro-batch.

    ``overlaps_chunks`` states whether a prompt's next chunk may be submitted while its last one is in flight.
    """

    overlaps_chunks: bool

    def choose_budget(self, state: SchedulerState) -> BatchBudget | None:
        """Return the budget of the next micro-batch, or None if none is to be submitted before a result returns."""

    def observe(self, budget: BatchBudget, work: BatchWork, timings: Sequence[StageTiming]) -> None:
        """Learn how long each stage took for a micro-batch of this budget. Called in the order of submission."""


class FixedInFlightPolicy:
    """Keeps a fixed number M of micro-batches in flight and spreads decodes evenly over them.

    Urgent prompts share no micro-batch with others.
    """

    overlaps_chunks = True

    def __init__(self, max_in_flight: int, max_tokens: int) -> None:
        self._max_in_flight, self._max_tokens = max_in_flight, max_tokens

    def choose_budget(self, state: SchedulerState) -> BatchBudget | None:
        """See ``Policy``."""
        if state.num_in_flight >= self._max_in_flight:
            return None
        max_decodes = self._max_tokens - reserved_for_prefill(state, self._max_tokens)
        decodes = min(-(-state.num_decoding // self._max_in_flight), max_decodes, state.num_ready)
        return BatchBudget(decodes, min(state.urgent_tokens or self._max_tokens, self._max_tokens - decodes))

    def observe(self, budget: BatchBudget, work: BatchWork, timings: Sequence[StageTiming]) -> None:
        """Learn nothing."""


def reserved_for_prefill(state: SchedulerState, max_tokens: int) -> int:
    """Return how many tokens of a micro-batch decodes leave to prompts: one, or what urgent ones need up to seven eighths.

    Of 64, urgent prompts of 20 tokens get 20 and those of 200 get 56. Of 1 a decode takes it.
    """
    if not state.pending_tokens or max_tokens == 1:
        return 0
    return max(min(state.urgent_tokens, max_tokens * 7 // 8), 1)
