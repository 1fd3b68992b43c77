"""What a client asks of a sequence, and what comes back while it lives."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from tramontane.proto.errors import RequestError

MAX_PENALTY = 2.0
REPETITION_PENALTIES = (0.01, 100.0)
MAX_BIAS = 100.0
MAX_BIASES = 1024
MAX_LOGPROBS = 20
NUM_PRIORITIES = 10


class FinishReason(StrEnum):
    STOP = "stop"  # the model said end-of-sequence, or nothing can follow by the sequence's grammar
    LENGTH = "length"  # max_tokens, or the end of the context
    ABORT = "abort"  # the client left
    ERROR = "error"  # of this sequence alone: its grammar cannot be followed


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a sequence's tokens are chosen.

    ``temperature`` 0 is greedy. ``top_k`` 0 and ``top_p`` 1 keep every token.
    Randomness depends on (seed, choice, position) alone, so a sequence that is
    computed again, or packed with others, continues as it would have.
    ``return_experts``: layers (global numbers) whose choice of experts is to be told with the tokens.

    Logits are changed before the temperature divides them: ``logit_bias`` (token id, what is added to it) first, then the
    penalties. ``repetition_penalty`` divides positive logits, and multiplies negative ones, of tokens that the prompt or the
    output so far has (Keskar and others, arXiv 1909.05858); ``frequency_penalty`` is subtracted for each time that the output
    has a token, ``presence_penalty`` once. Before ``min_tokens`` have been made none may end the sequence. ``min_p``, after
    the temperature: tokens of less than this share of the best one's probability are dropped.

    ``logprobs``: each new token's log-probability is told, and so many of the likeliest; None: nothing. ``prompt_logprobs``:
    the same of the prompt's tokens after the first. Both are of the model's own distribution, before anything above changes it.
    """

    max_tokens: int = 128
    temperature: float = 0.8
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    choice: int = 0
    ignore_eos: bool = False
    return_experts: tuple[int, ...] = ()
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: str = ""  # that the answer follows, in llguidance's words

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
        if not 0 <= self.min_p <= 1:
            raise RequestError(f"min_p is {self.min_p}; it must be from 0 to 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens}; it must be from 0 to max_tokens, which is {self.max_tokens}")
        self._check_logit_changes()
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None and not 0 <= value <= MAX_LOGPROBS:
                raise RequestError(f"{name} is {value}; it must be from 0 to {MAX_LOGPROBS}")

    def _check_logit_changes(self) -> None:
        for name, value in (("presence_penalty", self.presence_penalty), ("frequency_penalty", self.frequency_penalty)):
            if not -MAX_PENALTY <= value <= MAX_PENALTY:
                raise RequestError(f"{name} is {value}; it must be from {-MAX_PENALTY} to {MAX_PENALTY}")
        low, high = REPETITION_PENALTIES
        if not low <= self.repetition_penalty <= high:
            raise RequestError(f"repetition_penalty is {self.repetition_penalty}; it must be from {low} to {high}")
        if len(self.logit_bias) > MAX_BIASES:
            raise RequestError(f"logit_bias has {len(self.logit_bias)} tokens; there may be at most {MAX_BIASES}")
        for token_id, bias in self.logit_bias:
            if not -MAX_BIAS <= bias <= MAX_BIAS:
                raise RequestError(f"logit_bias of token {token_id} is {bias}; it must be from {-MAX_BIAS} to {MAX_BIAS}")

    @property
    def needs_token_counts(self) -> bool:
        """Whether what has been said changes what may follow."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1

    @property
    def needs_logits_processing(self) -> bool:
        return self.needs_token_counts or bool(self.logit_bias or self.min_tokens)


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """One sequence of a request: a request has one per prompt and choice.

    ``priority`` 0 is interactive, 1 batch work; the higher, the less urgent. ``output_ids``: tokens of the answer that a
    router which has been lost since has told already; the next one goes on after them. ``owner``: a number in place of the
    API key with which it came, by which keys share a queue. ``was_accepted``: by a router or a door that has been lost since, so
    that it is not refused for want of room. ``request_id``: what logs call its request, on its way to the stages.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    output_ids: tuple[int, ...] = ()
    owner: int = 0
    already_admitted: bool = False
    request_id: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.priority < NUM_PRIORITIES:
            raise RequestError(f"priority is {self.priority}; it must be 0 (most urgent) to {NUM_PRIORITIES - 1}")


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


class Logprobs(NamedTuple):
    """Log-probabilities of consecutive tokens of one sequence, by the model's own distribution: each given all before it.

    ``start`` is the position of the first of these tokens, never 0. ``top`` has of each the likeliest tokens that could have
    stood there, as many as were asked for, the likeliest first: (token id, log-probability). ``seq_id`` is that of a
    ``TokenEvent``.
    """

    seq_id: int
    start: int
    logprobs: tuple[float, ...]
    top: tuple[tuple[tuple[int, float], ...], ...]


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """Where a request's time went inside the router, in seconds.

    queue: until its first chunk was submitted; prefill: from there to its first token;
    decode: from there to its last.
    """

    queue_s: float
    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """Tokens of one request that were ready together, and where its time has gone so far.

    ``experts``: for sequences that want to know, what every token before the last one of ``events`` has chosen, as far as it
    has not been told; in the order of positions, and never without an event of the same sequence.
    ``logprobs``: in the same way, for sequences that want to know, of every token up to the last one of ``events``.
    """

    events: tuple[TokenEvent, ...]
    times: RequestTimings
    experts: tuple[ExpertChoices, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()

    @classmethod
    def merge(cls, batches: "list[RequestOutput]") -> "RequestOutput":
        """Several in one, in order."""
        if len(batches) == 1:
            return batches[0]
        events = tuple(event for batch in batches for event in batch.events)
        return cls(
            events,
            batches[-1].times,
            tuple(choices for batch in batches for choices in batch.experts),
            tuple(logprobs for batch in batches for logprobs in batch.logprobs),
        )
