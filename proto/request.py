"""Requests and their output: the sequences of a client's request, and the returned tokens; requests
in logs.
"""

import hashlib
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple

from tramontane.proto.errors import (
    ContextLengthError,
    NotFiniteError,
    ParameterError,
    RequestError,
    UnsatisfiableSchemaError,
)

MAX_BIAS = 100.0
MAX_BIASES = 1024
MAX_STOP_TOKENS = 128
# Bounds of sampling parameters, all finite, as keyword arguments of pydantic's ``Field``.
SAMPLING_BOUNDS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "max_tokens": {"ge": 1, "lt": 2**31},
        "temperature": {"ge": 0, "allow_inf_nan": False},
        "top_p": {"gt": 0, "le": 1},
        "top_k": {"ge": -1, "lt": 2**31},
        "seed": {"ge": -(2**63), "lt": 2**63},
        "min_p": {"ge": 0, "le": 1},
        "presence_penalty": {"ge": -2.0, "le": 2.0},
        "frequency_penalty": {"ge": -2.0, "le": 2.0},
        "repetition_penalty": {"ge": 0.01, "le": 100.0},
        "logprobs": {"ge": 0, "le": 20},
        "prompt_logprobs": {"ge": 0, "le": 20},
    }
)
_EXPECTED = {  # requirement for an out-of-bounds value; "be from 0 to 20" if missing
    "max_tokens": "be at least 1 and fit in 31 bits",
    "temperature": "be 0 (greedy) or a positive number",
    "top_p": "be above 0 and at most 1",
    "top_k": "be 0 or -1 (all tokens) or a positive whole number of 31 bits",
    "seed": "fit in 64 bits",
}
_OPTIONAL = {"seed", "logprobs", "prompt_logprobs"}  # may be None
_COMPARISONS = {"ge": operator.ge, "gt": operator.gt, "le": operator.le, "lt": operator.lt}
NUM_PRIORITIES = 10
# instead of a token: its logits are not finite
NOT_FINITE_TOKEN = -2
REQUEST_ID_HEADER = b"x-request-id"
REQUEST_ID_PATTERN = re.compile(rb"[!-~]{1,128}")  # allowed in headers and logs


class FinishReason(StrEnum):
    """The reason for a sequence's end."""

    STOP = "stop"  # an end-of-sequence token, or the sequence's grammar is complete
    LENGTH = "length"  # max_tokens, or the end of the context
    ABORT = "abort"  # the client left
    # of this sequence alone: its grammar cannot be followed, or its logits are not finite
    ERROR = "error"


class Identity(NamedTuple):
    """The sender of a request, by its API key."""

    # a number for sharing slots, which changes with the set of keys; 0 unless there are several
    owner: int = 0
    tenant: str = ""  # the key's digest, the owner of batch jobs and files; empty without keys

    def cache_salt(self, own: str) -> str:
        """Return the salt of a request; ``own``: the client's, which may be any text."""
        if not own:
            return self.tenant
        return f"{self.tenant} {hashlib.sha256(own.encode()).hexdigest()}"


# ---- from the client


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of a sequence. Raises RequestError if a value is out of range.

    The steps, in order: ``logit_bias``, penalties, ``min_tokens``, grammar, ``temperature``,
    ``min_p``, ``top_k``, ``top_p``. Randomness depends only on (seed, choice, position), so a
    sequence that is computed again, or batched with others, continues with the same tokens.

    Attributes:
        max_tokens: maximum length of the output.
        temperature: divides the logits; 0 is greedy.
        top_p: keep the likeliest tokens whose probabilities sum up to this; 1 keeps all.
        top_k: keep this number of the likeliest tokens; 0 keeps all, and so does -1, which becomes
            0.
        seed: seed of the random numbers, shared by all choices of a request; None: no seed was
            given, which counts as 0.
        choice: number of the sequence among the choices of its prompt, or of the request where the
            client gave no seed.
        ignore_eos: treat the end-of-sequence tokens like any other.
        return_experts: layers (global numbers) whose chosen experts are returned with the tokens.
        min_p: drop tokens with less than this share of the best token's probability.
        presence_penalty: subtracted once from the logit of a token that occurs in the output.
        frequency_penalty: subtracted from a token's logit once per occurrence in the output.
        repetition_penalty: divides positive logits, and multiplies negative ones, of tokens that
            occur in the prompt or the output (Keskar et al., arXiv 1909.05858).
        logit_bias: (token id, number added to its logit).
        min_tokens: neither an end-of-sequence token nor one of ``stop_token_ids`` is chosen before
            the output has this length.
        logprobs: return the log-probability of each new token, and of this number of the likeliest
            tokens; None: return none. They are of the model's own distribution, before any of the
            steps above.
        prompt_logprobs: the same for the tokens of the prompt after the first.
        grammar: grammar of the output in llguidance's format, or empty.
        stop_token_ids: tokens that end the output, as end-of-sequence tokens do; ``ignore_eos`` has
            no effect on them.
    """

    max_tokens: int = 128
    temperature: float = 0.8
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
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
    grammar: str = ""
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, bounds in SAMPLING_BOUNDS.items():
            value = getattr(self, name)
            if not (name in _OPTIONAL and value is None) and not _is_within(value, bounds):
                expected = _EXPECTED.get(name) or f"be from {bounds['ge']} to {bounds['le']}"
                raise RequestError(f"{name} is {value}; it must {expected}")
        object.__setattr__(self, "top_k", max(self.top_k, 0))  # vLLM's clients send -1
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}; it must be from 0 to max_tokens, which is"
                f" {self.max_tokens}"
            )
        if len(self.logit_bias) > MAX_BIASES:
            raise RequestError(
                f"logit_bias has {len(self.logit_bias)} tokens; there may be at most {MAX_BIASES}"
            )
        for token_id, bias in self.logit_bias:
            if not -MAX_BIAS <= bias <= MAX_BIAS:
                raise RequestError(
                    f"logit_bias of token {token_id} is {bias}; it must be from {-MAX_BIAS} to"
                    f" {MAX_BIAS}"
                )
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise RequestError(
                f"stop_token_ids has {len(self.stop_token_ids)} tokens; there may be at most"
                f" {MAX_STOP_TOKENS}"
            )

    @property
    def needs_token_counts(self) -> bool:
        """Whether logits depend on the tokens so far."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1

    @property
    def needs_tokens(self) -> bool:
        """Whether sampling depends on the tokens so far."""
        return self.needs_token_counts or bool(self.grammar)

    @property
    def needs_logits_processing(self) -> bool:
        """Whether logits are changed before sampling, other than by the grammar."""
        return self.needs_token_counts or bool(self.logit_bias or self.min_tokens)


def _is_within(value: float, bounds: Mapping[str, Any]) -> bool:
    """Return whether a number is finite and within the bounds."""
    return abs(value) < math.inf and all(
        is_true(value, bounds[name]) for name, is_true in _COMPARISONS.items() if name in bounds
    )


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """One sequence of a request: a request has one per prompt and choice."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    # returned by a router that was lost since; the sequence continues after them
    output_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """The sequences of one request, at least one, and their common values. Raises RequestError for
    an unknown priority.
    """

    sequences: tuple[SequenceRequest, ...]
    priority: int = 0  # 0 is interactive, 1 is batch work; the higher, the less urgent
    owner: int = 0  # represents the client's API key, for fair queueing between keys
    # by a router or ingress that has since been lost: not to be refused for lack of capacity
    already_admitted: bool = False
    request_id: str = ""  # name of the request in logs, including the stages' logs
    cache_salt: str = ""  # only requests with the same one share cached pages

    @classmethod
    def of(cls, prompt_ids: tuple[int, ...], sampling: SamplingParams) -> "Request":
        """Return a request of one sequence."""
        return cls((SequenceRequest(prompt_ids, sampling),))

    @property
    def was_accepted(self) -> bool:
        """Whether a router or ingress that has since been lost has accepted it."""
        return self.already_admitted or any(each.output_ids for each in self.sequences)

    def __post_init__(self) -> None:
        assert self.sequences
        if not 0 <= self.priority < NUM_PRIORITIES:
            raise RequestError(
                f"priority is {self.priority}; it must be 0 (most urgent) to {NUM_PRIORITIES - 1}"
            )


def validate_token_ids(parameters: Mapping[str, Iterable[int]], vocab_size: int) -> None:
    """Raise ParameterError if a sampling parameter names a token that the model does not have.

    ``parameters``: token ids by the names of parameters.
    """
    for name, token_ids in parameters.items():
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise ParameterError(
                    f"{name}: token id {token_id} is outside the model's vocabulary of"
                    f" {vocab_size}",
                    name,
                )


def validate_prompt(
    prompt_ids: Sequence[int], max_model_len: int, vocab_size: int, name: str = "the prompt"
) -> None:
    """Raise RequestError if the model cannot generate after these ids; ``name`` is the prompt's
    name in the message.
    """
    if not prompt_ids:
        raise RequestError(f"{name} is empty; give it at least one token")
    if len(prompt_ids) >= max_model_len:
        raise ContextLengthError.of_prompt(len(prompt_ids), max_model_len, name)
    for token_id in (min(prompt_ids), max(prompt_ids)):
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{name} has token id {token_id}; the model's vocabulary has the ids 0 to"
                f" {vocab_size - 1}"
            )


# ---- to the client


class TokenEvent(NamedTuple):
    """One token of one sequence, and the finish reason if it is the last.

    With ``FinishReason.ERROR`` the token is not part of the answer: it is one that the grammar does
    not allow, or NOT_FINITE_TOKEN.
    """

    # the router's own number inside the router, the index within the request in a ``RequestOutput``
    seq_id: int
    token_id: int
    finish: FinishReason | None = None


def sequence_error(event: TokenEvent) -> RequestError:
    """Return why a sequence has ended with an error, by the event that says so."""
    assert event.finish is FinishReason.ERROR
    if event.token_id == NOT_FINITE_TOKEN:
        return NotFiniteError(
            "the answer cannot be continued: the logits of its next token are not finite, because"
            " the model's numbers have overflowed; another dtype of the server may hold them"
        )
    return UnsatisfiableSchemaError(
        "the answer could not be continued as its schema requires; the schema may be too"
        " complicated for this model"
    )


# a sequence as in ``TokenEvent``, its drafts since the last output, and the accepted ones
SequenceDrafts = tuple[int, int, int]


class ExpertChoices(NamedTuple):
    """Experts of one layer that consecutive tokens of one sequence chose; for each token, the
    expert of highest weight first.

    The last token of a sequence never enters the model, so it has no experts.
    """

    seq_id: int  # as in ``TokenEvent``
    layer: int
    start: int  # position of the first token
    expert_ids: tuple[tuple[int, ...], ...]

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.expert_ids)

    @property
    def values_per_token(self) -> int:
        """Number of experts of one token."""
        return len(self.expert_ids[0]) if self.expert_ids else 0

    def between(self, first: int, end: int) -> "ExpertChoices":
        """Return the choices at positions first..end-1: for positions 2..4, between 3 and 9, the
        choices of 3 and 4.
        """
        expert_ids = self.expert_ids[max(first - self.start, 0) : max(end - self.start, 0)]
        return ExpertChoices(self.seq_id, self.layer, max(first, self.start), expert_ids)


class Logprobs(NamedTuple):
    """Log-probabilities of consecutive tokens of one sequence, each given all tokens before it, by
    the model's distribution.
    """

    seq_id: int  # as in ``TokenEvent``
    start: int  # position of the first token, never 0
    logprobs: tuple[float, ...]
    # For each token, the requested number of likeliest ones at its position, the likeliest first:
    # (token id, log-probability).
    top: tuple[tuple[tuple[int, float], ...], ...]

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.logprobs)

    @property
    def values_per_token(self) -> int:
        """Number of log-probabilities of one token, with its own."""
        return 1 + len(self.top[0]) if self.top else 0

    def between(self, first: int, end: int) -> "Logprobs":
        """Return the log-probabilities at positions first..end-1, like
        ``ExpertChoices.between``.
        """
        chosen = slice(max(first - self.start, 0), max(end - self.start, 0))
        return Logprobs(
            self.seq_id, max(first, self.start), self.logprobs[chosen], self.top[chosen]
        )


class RequestTimings(NamedTuple):
    """Time that a request has spent inside the router, in seconds."""

    queue_s: float  # until its first chunk was submitted
    prefill_s: float  # from there to its first token
    decode_s: float  # from there to its last


class RequestOutput(NamedTuple):
    """Tokens of one request that were ready together, and its times so far. A tuple, since one is
    made for every token.
    """

    events: tuple[TokenEvent, ...]
    times: RequestTimings
    # For sequences that request them, the choices not yet returned of all tokens before the last
    # one in ``events``; in the order of positions, and never without an event of the same sequence.
    experts: tuple[ExpertChoices, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()  # likewise, of all tokens up to the last one in ``events``
    # of the pipeline that makes these tokens and the following ones; "" if unchanged
    fingerprint: str = ""
    # tokens of prompts that were cached, of sequences whose first is in ``events``; each prompt
    # counts once
    num_cached: int = 0
    # of sequences in ``events``; included with their first token even if there were none
    drafts: tuple[SequenceDrafts, ...] = ()

    @property
    def num_values(self) -> int:
        """Number of expert ids and log-probabilities."""
        if not (self.experts or self.logprobs):  # nearly always
            return 0
        extras: list[ExpertChoices | Logprobs] = [*self.experts, *self.logprobs]
        return sum((each.end - each.start) * each.values_per_token for each in extras)


def fingerprint_output(fingerprint: str) -> RequestOutput:
    """Return an output without tokens: a pipeline with this fingerprint makes the following tokens;
    "" if it is unknown.
    """
    return RequestOutput((), RequestTimings(0.0, 0.0, 0.0), fingerprint=fingerprint)


# ---- in logs: fields of a record besides its message, for ``extra=``; the JSON format writes them
# as fields of their own


def request_fields(request_id: str, **more: object) -> dict[str, object]:
    """Return the fields of a record about one request. An empty id means that no client made the
    request.
    """
    return {"request_id": request_id, **more} if request_id else more


def requests_fields(request_ids: Iterable[str]) -> dict[str, list[str]]:
    """Return the fields of a record about several requests, each named once."""
    unique_ids = _unique(request_ids)
    return {"request_ids": unique_ids} if unique_ids else {}


def format_request_ids(request_ids: Iterable[str], max_shown: int = 8) -> str:
    """Format ids for a message: ``a, b and 3 more``; empty if there is no id."""
    unique_ids = _unique(request_ids)
    more = f" and {len(unique_ids) - max_shown} more" if len(unique_ids) > max_shown else ""
    return ", ".join(unique_ids[:max_shown]) + more


def _unique(request_ids: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(filter(None, request_ids)))
