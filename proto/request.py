"""What a client asks of a sequence, and what comes back while it lives."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from tramontane.proto.errors import RequestError


class FinishReason(StrEnum):
    STOP = "stop"  # the model said end-of-sequence
    LENGTH = "length"  # max_tokens, or the end of the context
    ABORT = "abort"  # the client left


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a sequence's tokens are chosen.

    ``temperature`` 0 is greedy. ``top_k`` 0 and ``top_p`` 1 keep every token.
    Randomness depends on (seed, choice, position) alone, so a sequence that is
    computed again, or packed with others, continues as it would have.
    ``return_experts``: layers (global numbers) whose choice of experts is to be told with the tokens.
    """

    max_tokens: int = 128
    temperature: float = 0.8
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    choice: int = 0
    ignore_eos: bool = False
    return_experts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.max_tokens < 2**31:
            raise RequestError(f"max_tokens is {self.max_tokens}; it must be at least 1 and fit in 31 bits")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise RequestError(f"temperature is {self.temperature}; it must be 0 (greedy) or a positive number")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if not 0 <= self.top_k < 2**31:
            raise RequestError(f"top_k is {self.top_k}; it must be 0 (all tokens) or a positive whole number of 31 bits")
        if not -(2**63) <= self.seed < 2**63:
            raise RequestError(f"seed is {self.seed}; it must fit in 64 bits")


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """One sequence of a request: a request has one per prompt and choice."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams


class TokenEvent(NamedTuple):
    """One token of one sequence, and the reason if it was the last.

    ``seq_id`` is the router's number inside the router, and the index within its
    request in what a request's client gets.
    """

    seq_id: int
    token_id: int
    finish: FinishReason | None = None


class ExpertChoices(NamedTuple):
    """Which experts of one layer consecutive tokens of one sequence have chosen, of each token the heaviest first.

    ``start`` is the position of the first of these tokens. ``seq_id`` is that of a ``TokenEvent``. A sequence's last token
    never goes into the model, so it chooses none.
    """

    seq_id: int
    layer: int
    start: int
    expert_ids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Where a request's time went inside the router, in seconds.

    queue: until its first chunk was submitted; prefill: from there to its first token;
    decode: from there to its last.
    """

    queue_s: float
    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Tokens of one request that were ready together, and where its time has gone so far.

    ``experts``: for sequences that want to know, what every token before the last one of ``events`` has chosen, as far as it
    has not been told; in the order of positions, and never without an event of the same sequence.
    """

    events: tuple[TokenEvent, ...]
    times: RequestTimes
    experts: tuple[ExpertChoices, ...] = ()

    @classmethod
    def merged(cls, batches: "list[TokenBatch]") -> "TokenBatch":
        """Several in one, in order."""
        if len(batches) == 1:
            return batches[0]
        events = tuple(event for batch in batches for event in batch.events)
        return cls(events, batches[-1].times, tuple(choices for batch in batches for choices in batch.experts))
