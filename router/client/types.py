"""What the client takes and returns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tramontane.proto.errors import ConnectionLostError, TramontaneError
from tramontane.proto.request import FinishReason

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with its log-probability; ``top`` has the likeliest tokens there. The first token of a text has no logprob."""

    token: str
    logprob: float | None
    top: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds that a request spent in each phase."""

    ingress_s: float
    queue_s: float
    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class Chunk:
    """New output of one of n choices; the last chunk of a request has ``usage`` and ``timings``."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None
    usage: Usage | None = None
    timings: Timings | None = None


@dataclass(frozen=True, slots=True)
class Score:
    """Log-probabilities of a prompt."""

    tokens: tuple[TokenLogprob, ...]
    usage: Usage


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A served model."""

    name: str
    max_model_len: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How a client resumes a stream after it has lost its server: every ``retry_s``, for ``total_s`` since the last message."""

    total_s: float = 60.0
    retry_s: float = 1.0

    def pause(self, error: TramontaneError, silent_s: float) -> float:
        """Return the seconds until the next attempt.

        Raises ``error`` if it is not a lost connection, or if the next attempt would be later than ``total_s``.
        """
        if not isinstance(error, ConnectionLostError) or silent_s + self.retry_s > self.total_s:
            raise error
        return self.retry_s
