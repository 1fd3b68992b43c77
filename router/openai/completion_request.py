"""Completion requests: OpenAI's fields and vLLM's extensions. Other fields are ignored."""

import codecs
import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from tramontane.proto.errors import ParameterError, describe_value, intended_name
from tramontane.proto.request import (
    MAX_BIAS,
    MAX_BIASES,
    MAX_STOP_TOKENS,
    SamplingParams,
)
from tramontane.router.openai.errors import describe_json_error, is_form
from tramontane.router.openai.json_limits import check_elements
from tramontane.router.structured.guided import GuidedFields
from tramontane.router.structured.request_model import (
    NoEffect,
    RequestBody,
    RequestModel,
    bounded,
    check_text,
    default_if_null,
    ignored_fields,
    only_true,
    unsupported_except,
)

# Sampling parameters of requests, with the names of OpenAI's API and vLLM's.

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_TOKEN_ID = 2**31

Stop = Annotated[str, Field(max_length=MAX_STOP_CHARS)]
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
    """Return stop strings, from one text or several; empty ones are left out. Raises ValueError."""
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list | tuple) or not all(
        isinstance(stop, str) for stop in stops[: MAX_STOPS + 1]
    ):
        raise ValueError("it must be a text or a list of texts")
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise ValueError(
            f"there may be at most {MAX_STOPS} of at most {MAX_STOP_CHARS} characters each"
        )
    return tuple(filter(None, stops))


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


def _wrapped_seed(value: Any) -> Any:
    """Return a whole number modulo 2**64, from -2**63 on: 2.0 as 2, and 2**64 - 1 as -1. Other
    values are left to the type's check.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return (value + 2**63) % 2**64 - 2**63 if type(value) is int else value


Seed = Annotated[
    int, bounded("seed"), BeforeValidator(_wrapped_seed, json_schema_input_type=int | float)
]
StopTokens = Annotated[
    tuple[Annotated[int, Field(ge=0, lt=MAX_TOKEN_ID)], ...],
    Field(max_length=MAX_STOP_TOKENS, strict=False, fail_fast=True),
    default_if_null(()),
]
CONTROL_TOKENS = "control tokens have no text in answers; return_token_ids returns their ids"


class NeutralFields(RequestBody):
    """Fields that cannot change an answer."""

    user: NoEffect = None
    safety_identifier: NoEffect = None
    prompt_cache_key: NoEffect = None
    prompt_cache_retention: NoEffect = None
    prompt_cache_options: NoEffect = None
    metadata: NoEffect = None
    service_tier: NoEffect = None
    store: NoEffect = None
    spaces_between_special_tokens: NoEffect = None
    request_id: NoEffect = None
    priority: NoEffect = None


class StreamOptions(RequestModel):
    """``stream_options`` of a request."""

    include_usage: Annotated[bool, default_if_null(False)] = False
    continuous_usage_stats: Annotated[bool, default_if_null(False)] = False
    include_obfuscation: NoEffect = None
    # Mistral's clients need every tool call whole, in one chunk, unless they say true
    stream_tool_calls: bool | None = None


class SamplingFields(NeutralFields, GuidedFields):
    """Base of requests that generate tokens. Bounds that depend on the model are checked in
    ``served_model``.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    temperature: Annotated[float, bounded("temperature"), default_if_null(1.0)] = 1.0
    top_p: Annotated[float, bounded("top_p"), default_if_null(1.0)] = 1.0
    top_k: Annotated[int, bounded("top_k"), default_if_null(0)] = 0
    min_p: Annotated[float, bounded("min_p"), default_if_null(0.0)] = 0.0
    presence_penalty: Annotated[float, bounded("presence_penalty"), default_if_null(0.0)] = 0.0
    frequency_penalty: Annotated[float, bounded("frequency_penalty"), default_if_null(0.0)] = 0.0
    repetition_penalty: Annotated[float, bounded("repetition_penalty"), default_if_null(1.0)] = 1.0
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
        """Return the parameters that all APIs share, for all choices.

        Raises RequestError if min_tokens is above ``max_tokens``.
        """
        return SamplingParams(
            max_tokens,
            self.temperature,
            self.top_p,
            self.top_k,
            self.given_seed,
            ignore_eos=self.ignore_eos,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            min_tokens=self.min_tokens,
            stop_token_ids=self.stop_token_ids,
        )


MAX_NAME_CHARS = 64
MAX_LAYERS = 1024
MAX_PROMPTS = 2**16  # of one request; the server's own limit is lower
MAX_IGNORED = 256  # different fields without effect of one request that are noted
MAX_ERRORS = 64  # further errors are only counted, because pydantic lists each with its input

LayersInput = Annotated[
    list[Annotated[int, Field(ge=0, lt=MAX_LAYERS)]], Field(json_schema_extra={"uniqueItems": True})
]

TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=MAX_TOKEN_ID)]], Field(min_length=1)]
SeveralPrompts = Field(min_length=1, max_length=MAX_PROMPTS)
PromptInput = (
    str
    | Annotated[list[str], SeveralPrompts]
    | TokenIds
    | Annotated[list[TokenIds], SeveralPrompts]
)
Prompts = tuple[str | tuple[int, ...], ...]


def _prompts(value: Any) -> Prompts:
    """Return a tuple of prompts for any form: a text, texts, token ids, or lists of token ids."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise ValueError(
            "it must be a text, a list of texts, a list of token ids or a list of such lists"
        )
    if not value:
        raise ValueError("it is an empty list; it must have a text, a token id or a list of those")
    if _are_ids(value):
        return (tuple(value),)
    if len(value) > MAX_PROMPTS:
        raise ValueError(
            f"there are {len(value)} prompts; one request may have at most {MAX_PROMPTS}"
        )
    if all(isinstance(item, str) for item in value):
        return tuple(value)
    if all(isinstance(item, list) and _are_ids(item) for item in value):
        return tuple(tuple(item) for item in value)
    raise ValueError(
        "a list must hold either texts, or token ids, or lists of token ids, and no list may be"
        " empty"
    )


def _are_ids(value: list[Any]) -> bool:
    if set(map(type, value)) != {int}:  # fast: there may be millions
        return False
    if min(value) < 0 or max(value) >= MAX_TOKEN_ID:
        raise ValueError(f"token ids are whole numbers from 0 to {MAX_TOKEN_ID - 1}")
    return True


def _layers(value: Any) -> tuple[int, ...]:
    layers = [] if value is None else value
    if isinstance(layers, list) and len(layers) > MAX_LAYERS:
        raise ValueError(f"there may be at most {MAX_LAYERS} layers")
    if not isinstance(layers, list) or not all(
        type(layer) is int and 0 <= layer < MAX_LAYERS for layer in layers
    ):
        raise ValueError("it must be a list of layers, which are counted from 0")
    if len(set(layers)) < len(layers):
        raise ValueError("a layer is listed twice")
    return tuple(layers)


def _all_encodable(value: Prompts) -> Prompts:
    for text in value:
        if isinstance(text, str):
            check_text(text)
    return value


Text = Annotated[str, AfterValidator(check_text)]


class CompletionRequest(SamplingFields):
    """Body of ``POST /v1/completions``. With ``echo`` and ``max_tokens`` 0 prompts are only
    scored.
    """

    model: str | None = None
    prompt: Annotated[
        Prompts,
        BeforeValidator(_prompts, json_schema_input_type=PromptInput),
        AfterValidator(_all_encodable),
    ] = Field(strict=False)
    max_tokens: Annotated[int, default_if_null(16)] = Field(16, ge=0, lt=2**31)
    logprobs: Annotated[int | None, bounded("logprobs")] = None
    prompt_logprobs: Annotated[int | None, bounded("prompt_logprobs")] = None
    echo: Annotated[bool, default_if_null(False)] = False
    return_experts: Annotated[
        tuple[int, ...], BeforeValidator(_layers, json_schema_input_type=LayersInput)
    ] = Field((), strict=False)
    # an empty suffix counts as none
    suffix: Annotated[Text | None, AfterValidator(lambda suffix: suffix or None)] = None
    add_special_tokens: Annotated[
        Literal[True] | None,
        only_true("prompts that are texts begin as the model's training texts do; give token ids"),
    ] = None

    best_of: Annotated[Any, unsupported_except(1)] = None

    @property
    def num_sequences(self) -> int:
        """Number of sequences: ``n`` per prompt."""
        return len(self.prompt) * self.n

    @property
    def prompt_logprobs_count(self) -> int | None:
        """Number of likeliest tokens per position of the prompt, by either name, or None."""
        counts = [
            each
            for each in (self.prompt_logprobs, self.logprobs if self.echo else None)
            if each is not None
        ]
        return max(counts, default=None)


def parse_completion(body: bytes) -> CompletionRequest:
    """Parse and validate a body. Raises ParameterError, which names the first problem."""
    request = parse_body(CompletionRequest, body)
    request.check_combinations()
    if not request.max_tokens and not request.echo:
        raise ParameterError(
            "max_tokens is 0: without echo: true there would be no answer", "max_tokens"
        )
    if request.min_tokens > request.max_tokens:
        raise ParameterError(
            f"min_tokens is {request.min_tokens}, above max_tokens, {request.max_tokens}",
            "min_tokens",
        )
    if request.suffix is not None:
        _check_suffix(request)
    return request


def _check_suffix(request: CompletionRequest) -> None:
    """Raise ParameterError for options that are not possible with a suffix."""
    if not all(isinstance(prompt, str) for prompt in request.prompt):
        raise ParameterError("suffix is for prompts that are texts, not token ids", "suffix")
    if request.echo:
        raise ParameterError(
            "echo is not possible with suffix, since the tokens of the prompt are not those of its"
            " text",
            "echo",
        )


Body = TypeVar("Body", bound=RequestBody)


def parse_body(kind: type[Body], body: bytes) -> Body:
    """Parse a body as ``kind``. Raises ParameterError, which names the first problem.

    At most 50 ms of the interpreter lock; call it in ``run_off_loop``, where another thread runs it
    for a large body.
    """
    check_elements(body)
    try:
        codecs.decode(body, "utf-8")
    except UnicodeDecodeError as error:
        raise ParameterError(f"the body is not valid UTF-8 (byte {error.start})") from None
    noted: set[str] = set()
    try:
        parsed = kind.model_validate_json(body, context=noted)
    except ValidationError as error:
        raise _to_parameter_error(error) from None
    except RecursionError:
        raise ParameterError("the body is nested too deeply") from None
    _note_ignored(parsed, noted)
    return parsed


def _note_ignored(parsed: RequestBody, noted: set[str]) -> None:
    """Note the fields of a body that have no effect. Raises ParameterError for one that is probably
    a misspelling.
    """
    unknown = ""
    checked: set[tuple[type[RequestModel], str]] = set()
    for model, place, name, is_known in ignored_fields(parsed):
        kind = type(model), name
        if kind in checked or len(checked) == MAX_IGNORED:
            continue
        checked.add(kind)
        path = _printable_path((*place, name))
        if not is_known and (meant := intended_name(name, _names(type(model)))):
            raise ParameterError(
                f"{path} is not a parameter of this endpoint; did you mean {meant}?", path
            )
        unknown = unknown or ("" if is_known else path)
        noted.add(re.sub(r"\[\d+\]", "[]", path))
    parsed.note_ignored(tuple(sorted(noted)), unknown)


def _names(kind: type[RequestModel]) -> list[str]:
    return [field.alias or name for name, field in kind.model_fields.items()]


def _to_parameter_error(error: ValidationError) -> ParameterError:
    if error.error_count() > MAX_ERRORS:
        return ParameterError(
            f"{error.error_count()} things are wrong with the body, too many to describe"
        )
    problem = error.errors(include_url=False)[0]
    name = _printable_path(_path(problem)) or None
    match problem["type"]:
        case "json_invalid":
            return ParameterError(f"the body is not JSON: {describe_json_error(problem['msg'])}")
        case _ if name is None:
            return ParameterError("the body must be a JSON object")
        case "missing" | "union_tag_not_found":
            return ParameterError(f"{name} is missing{_misspelling(problem)}", name)
        case "value_error":
            return ParameterError(f"{name}: {problem['ctx']['error']}", name)
        case "union_tag_invalid":
            return ParameterError(describe_value(name, _preview(_tag(problem)), problem), name)
        case _:
            return ParameterError(describe_value(name, _preview(problem["input"]), problem), name)


def _misspelling(missing: ErrorDetails) -> str:
    """Return the end of the message if the object has a field of a similar name, else ""."""
    name, given = str(_path(missing)[-1]), missing["input"]
    for other in given if isinstance(given, dict) else ():
        if intended_name(str(other), [name]):
            return f'; unknown field "{_printable_name(str(other))}", did you mean "{name}"?'
    return ""


def _path(problem: ErrorDetails) -> tuple[str | int, ...]:
    """Return the location of the problem in the client's JSON, with the field that selects the type
    of a message, which pydantic leaves out.
    """
    path = problem["loc"]
    if problem["type"].startswith("union_tag"):
        return (*path, problem["ctx"]["discriminator"].strip("'"))
    return tuple(part for index, part in enumerate(path) if not is_form(path, index))


def _tag(problem: ErrorDetails) -> Any:
    """Return the client's value of the field that selects the type of a message."""
    return problem["input"][problem["ctx"]["discriminator"].strip("'")]


def _preview(value: Any) -> str:
    """Return the first 60 characters without formatting a value of megabytes; null, true and false
    are as JSON has them.
    """
    match value:
        case None | True | False:
            return {None: "null", True: "true", False: "false"}[value]
        case list():
            return "a list of 1 item" if len(value) == 1 else f"a list of {len(value)} items"
        case dict():
            return "an object"
        case _:
            start = value[:60] if isinstance(value, str) else value
            return f"{start!r:.60}"


def _printable_path(path: Iterable[str | int]) -> str:
    """Return a path as OpenAI writes it: ``messages[0].role``."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{_printable_name(part)}" for part in path)
    return "".join(parts).removeprefix(".")


def _printable_name(part: str) -> str:
    """Return a client's name for a parameter in one short printable line."""
    name = "".join(char if char.isprintable() else "?" for char in part[:MAX_NAME_CHARS])
    return name or '""'
