"""Sampling parameters of requests, with the names of OpenAI's API and vLLM's."""

import secrets
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from tramontane.proto.errors import ParameterError
from tramontane.proto.request import (
    MAX_BIAS,
    MAX_BIASES,
    MAX_PENALTY,
    MAX_STOP_TOKENS,
    REPETITION_PENALTIES,
    SamplingParams,
)
from tramontane.router.structured.guided import GuidedFields
from tramontane.router.structured.request_model import (
    RequestModel,
    check_depth,
    default_if_null,
    only_true,
    unsupported_except,
)

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_TOKEN_ID = 2**31

Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopInput = Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)]
LogitBiasInput = Annotated[
    dict[
        Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")],
        Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)],
    ],
    Field(max_length=MAX_BIASES),
]
LogitBias = tuple[tuple[int, float], ...]


def parse_stops(value: Any) -> tuple[str, ...]:
    """Return stop strings, from one text or several. Raises ValueError."""
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list | tuple) or not all(
        isinstance(stop, str) and stop for stop in stops[: MAX_STOPS + 1]
    ):
        raise ValueError("it must be a text or a list of texts, none of them empty")
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise ValueError(
            f"there may be at most {MAX_STOPS} of at most {MAX_STOP_CHARS} characters each"
        )
    return tuple(stops)


def _biases(value: Any) -> LogitBias:
    biases = {} if value is None else value
    if not isinstance(biases, dict):
        raise ValueError("it must be an object with a number for each token id")
    if len(biases) > MAX_BIASES:
        raise ValueError(f"it has {len(biases)} tokens; there may be at most {MAX_BIASES}")
    return tuple((_token_id(key), _bias(key, bias)) for key, bias in biases.items())


def _token_id(key: str) -> int:
    if not (
        key.isascii()
        and key.isdecimal()
        and len(key) <= 10
        and str(int(key)) == key
        and int(key) < MAX_TOKEN_ID
    ):
        raise ValueError(
            f"{key[:40]!r} is not a token id, which is a whole number from 0 to {MAX_TOKEN_ID - 1}"
        )
    return int(key)


def _bias(key: str, bias: Any) -> float:
    if type(bias) not in (int, float) or not -MAX_BIAS <= bias <= MAX_BIAS:
        raise ValueError(
            f"the bias of token {key} must be a number from {-MAX_BIAS:g} to {MAX_BIAS:g}"
        )
    return float(bias)


Penalty = Annotated[float, default_if_null(0.0)]


Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
StopTokens = Annotated[
    tuple[Annotated[int, Field(ge=0, lt=MAX_TOKEN_ID)], ...],
    Field(max_length=MAX_STOP_TOKENS, strict=False, fail_fast=True),
    default_if_null(()),
]
CONTROL_TOKENS = "control tokens have no text in answers; return_token_ids returns their ids"


class NeutralFields(RequestModel):
    """Fields that cannot change an answer, of which some are refused because they ask for something
    else than an answer.
    """

    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Annotated[dict[str, Any] | None, AfterValidator(check_depth)] = None
    metadata: Annotated[dict[str, Any] | None, AfterValidator(check_depth)] = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    store: Annotated[
        Any,
        unsupported_except(
            reason="this server does not store answers; leave it out, or send false"
        ),
    ] = None
    spaces_between_special_tokens: bool | None = None
    request_id: str | None = None
    priority: Annotated[
        Any, unsupported_except(0, reason="requests over HTTP have the same priority; leave it out")
    ] = None


class StreamOptions(RequestModel):
    """``stream_options`` of a request."""

    include_usage: Annotated[bool, default_if_null(False)] = False
    continuous_usage_stats: Annotated[bool, default_if_null(False)] = False
    include_obfuscation: Annotated[bool | None, unsupported_except()] = None


class SamplingFields(NeutralFields, GuidedFields):
    """Base of requests that generate tokens. Bounds that depend on the model are checked in
    ``served_model``.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    temperature: Annotated[float, default_if_null(1.0)] = Field(1.0, ge=0, allow_inf_nan=False)
    top_p: Annotated[float, default_if_null(1.0)] = Field(1.0, gt=0, le=1)
    top_k: Annotated[int, default_if_null(0)] = Field(0, ge=-1, lt=2**31)
    min_p: Annotated[float, default_if_null(0.0)] = Field(0.0, ge=0, le=1)
    presence_penalty: Penalty = Field(0.0, ge=-MAX_PENALTY, le=MAX_PENALTY)
    frequency_penalty: Penalty = Field(0.0, ge=-MAX_PENALTY, le=MAX_PENALTY)
    repetition_penalty: Annotated[float, default_if_null(1.0)] = Field(
        1.0, ge=REPETITION_PENALTIES[0], le=REPETITION_PENALTIES[1]
    )
    logit_bias: Annotated[
        LogitBias, BeforeValidator(_biases, json_schema_input_type=LogitBiasInput)
    ] = Field((), strict=False)
    min_tokens: Annotated[int, default_if_null(0)] = Field(0, ge=0, lt=2**31)
    seed: Seed | None = None
    random_seed: Seed | None = None  # Mistral's name
    stop: Annotated[
        tuple[str, ...], BeforeValidator(parse_stops, json_schema_input_type=StopInput)
    ] = Field((), strict=False)
    ignore_eos: Annotated[bool, default_if_null(False)] = False
    n: Annotated[int, default_if_null(1)] = Field(1, ge=1, le=128)
    stop_token_ids: StopTokens = ()
    include_stop_str_in_output: Annotated[bool, default_if_null(False)] = False
    stream: Annotated[bool, default_if_null(False)] = False
    stream_options: StreamOptions | None = None
    return_token_ids: Annotated[bool, default_if_null(False)] = False

    allowed_token_ids: Annotated[Any, unsupported_except()] = None
    bad_words: Annotated[Any, unsupported_except([])] = None
    detokenize: Annotated[
        Literal[True] | None, only_true("answers always have text; leave it out")
    ] = None
    length_penalty: Annotated[Any, unsupported_except(1)] = None
    skip_special_tokens: Annotated[Literal[True] | None, only_true(CONTROL_TOKENS)] = None
    truncate_prompt_tokens: Annotated[Any, unsupported_except()] = None
    use_beam_search: Annotated[Any, unsupported_except()] = None

    @property
    def given_seed(self) -> int | None:
        """The seed, by either name."""
        return self.random_seed if self.seed is None else self.seed

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk about the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def counts_in_chunks(self) -> bool:
        """Whether every chunk of a stream has the usage so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def num_sequences(self) -> int:
        """Number of sequences of the request."""
        return self.n

    def check_combinations(self) -> None:
        """Raise ParameterError for fields that contradict each other."""
        if self.stream_options is not None and not self.stream:
            raise ParameterError(
                "stream_options is only allowed with stream: true", "stream_options"
            )
        if None not in (self.seed, self.random_seed) and self.seed != self.random_seed:
            raise ParameterError(
                "seed and random_seed are the same thing; give one of them", "random_seed"
            )

    def to_sampling_params(self, max_tokens: int) -> SamplingParams:
        """Return the parameters of the first choice; the others differ in ``choice``. Without a
        seed each call draws one.

        Raises RequestError if min_tokens is above ``max_tokens``.
        """
        return SamplingParams(
            max_tokens,
            self.temperature,
            self.top_p,
            self.top_k,
            secrets.randbits(63) if self.given_seed is None else self.given_seed,
            ignore_eos=self.ignore_eos,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            min_tokens=self.min_tokens,
            stop_token_ids=self.stop_token_ids,
        )
