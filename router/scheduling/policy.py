"""How much of what could run goes into the next micro-batch: the part of scheduling that can be argued about."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tramontane.proto.step import StageTiming


@dataclass(frozen=True, slots=True)
class BatchWork:
    """What a micro-batch gives a stage to do, counted so that time is about linear in it.

    ``prefill_keys``: keys that all prompt tokens together attend to, ``decode_keys`` likewise.
    """

    prefill_tokens: int = 0
    prefill_keys: int = 0
    decodes: int = 0
    decode_keys: int = 0


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """What there is to do at this moment.

    ``num_decoding`` sequences are past their prompts, with ``decoding_keys`` visible keys in all; the next token of
    ``num_ready`` of them can go now (``ready_keys``: visible keys of each, in the order in which they would go). Of prompts,
    ``pending_tokens`` are admitted and not yet submitted, the first of them after ``prefill_start`` earlier positions;
    the first ``urgent_tokens`` of these are more urgent than something else that runs, and that should give way to them.
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


def reserved_for_prefill(load: SchedulerState, max_tokens: int) -> int:
    """Tokens of a micro-batch that decodes leave to prompts: one, and what urgent ones need up to seven eighths of all.

    Of 64, urgent prompts of 20 tokens get 20 and those of 200 get 56. Of 1 a decode takes it.
    """
    if not load.pending_tokens or max_tokens == 1:
        return 0
    return max(min(load.urgent_tokens, max_tokens * 7 // 8), 1)


@dataclass(frozen=True, slots=True)
class BatchBudget:
    """At most so many decode tokens and so many prompt tokens in the next micro-batch.

    ``spread`` is for the policy itself: of a micro-batch without prompts, over how many decodes are spread, and how
    long it expects a round of them to take.
    """

    decodes: int
    prefill_tokens: int
    spread: int = 0
    round_s: float = 0.0


class Policy(Protocol):
    """``overlaps_chunks``: whether a prompt's next chunk may go while its last one is in flight."""

    overlaps_chunks: bool

    def choose_budget(self, load: SchedulerState) -> BatchBudget | None:
        """For the next micro-batch; None if nothing should be submitted before a result comes back."""

    def observe(self, share: BatchBudget, work: BatchWork, timings: Sequence[StageTiming]) -> None:
        """How long each stage took for a micro-batch, and what had been decided for it. In the order of submission."""


class FixedInFlightPolicy:
    """A fixed number M of micro-batches in flight, with as many decodes each as even shares of them have.

    Urgent prompts travel with no others.
    """

    overlaps_chunks = True

    def __init__(self, max_in_flight: int, max_tokens: int) -> None:
        self._max_in_flight, self._max_tokens = max_in_flight, max_tokens

    def choose_budget(self, load: SchedulerState) -> BatchBudget | None:
        if load.num_in_flight >= self._max_in_flight:
            return None
        most = self._max_tokens - reserved_for_prefill(load, self._max_tokens)
        decodes = min(-(-load.num_decoding // self._max_in_flight), most, load.num_ready)
        return BatchBudget(decodes, min(load.urgent_tokens or self._max_tokens, self._max_tokens - decodes))

    def observe(self, share: BatchBudget, work: BatchWork, timings: Sequence[StageTiming]) -> None:
        """Nothing is learned."""
