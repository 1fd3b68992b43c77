"""Completion requests: OpenAI's fields and vLLM's extensions. Other fields are ignored."""

import codecs
import re
from functools import cache
from itertools import islice
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from tramontane.proto.errors import ParameterError, describe_value
from tramontane.proto.request import SamplingParams
from tramontane.router.openai.errors import (
    describe_json_error,
    is_form,
    preview,
    printable_name,
    printable_path,
)
from tramontane.router.openai.json_limits import check_elements, is_utf16
from tramontane.router.openai.sampling_values import (
    LogitBias,
    LogitBiasInput,
    Seed,
    StopInput,
    StopTokens,
    parse_biases,
    parse_stops,
)
from tramontane.router.structured.guided import MAX_TOKEN_ID, GuidedFields
from tramontane.router.structured.request_model import (
    MAX_COMPARED,
    MAX_IGNORED,
    IgnoredField,
    NoEffect,
    NotedFields,
    RequestBody,
    RequestModel,
    bounded,
    check_text,
    default_if_null,
    ignored_fields,
    intended_name,
    only_true,
    other_name,
    unsupported_except,
)

Text = Annotated[str, AfterValidator(check_text)]
MAX_SALT_CHARS = 256
NO_BAD_WORDS = (
    "words cannot be excluded, since each may be written with many different tokens; leave it out,"
    " or make single tokens unlikely with logit_bias"
)
NOT_TRUNCATED = "only prompts of /v1/completions are cut; leave it out, and send fewer messages"
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
    # of other servers, whose names are nearly those of fields here
    models: NoEffect = None
    top_a: NoEffect = None


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
        LogitBias, BeforeValidator(parse_biases, json_schema_input_type=LogitBiasInput)
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

    cache_salt: Annotated[Text | None, Field(max_length=MAX_SALT_CHARS)] = None

    bad_words: Annotated[Any, unsupported_except([], reason=NO_BAD_WORDS)] = None
    best_of: Annotated[Any, unsupported_except(1)] = None
    detokenize: Annotated[
        Literal[True] | None, only_true("answers always have text; leave it out")
    ] = None
    length_penalty: Annotated[Any, unsupported_except(1)] = None
    skip_special_tokens: Annotated[Literal[True] | None, only_true(CONTROL_TOKENS)] = None
    truncate_prompt_tokens: Annotated[Any, unsupported_except(reason=NOT_TRUNCATED)] = None
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

    def unused_fields(self) -> tuple[str, ...]:
        """See ``RequestBody``."""
        is_unused = self.stream_options is not None and not self.stream
        return ("stream_options",) if is_unused else ()

    def check_combinations(self) -> None:
        """Raise ParameterError for fields that contradict each other."""
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


MAX_LAYERS = 1024
MAX_PROMPTS = 2**16  # of one request; the server's own limit is lower
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

    # the last tokens of each prompt are kept; -1: as many as fit
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=MAX_TOKEN_ID)] | None = None

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
    if request.truncate_prompt_tokens == 0:
        raise ParameterError(
            "truncate_prompt_tokens is 0; it must be a number of tokens, or -1 for as many as fit",
            "truncate_prompt_tokens",
        )
    if request.suffix is not None:
        _check_suffix(request)
    return request


def _check_suffix(request: CompletionRequest) -> None:
    """Raise ParameterError for options that are not possible with a suffix."""
    if not all(isinstance(prompt, str) for prompt in request.prompt):
        raise ParameterError("suffix is for prompts that are texts, not token ids", "suffix")
    if request.truncate_prompt_tokens is not None:
        raise ParameterError(
            "truncate_prompt_tokens is not possible with suffix: the prompt would lose the tokens"
            " that mark its parts",
            "truncate_prompt_tokens",
        )
    if request.echo:
        raise ParameterError(
            "echo is not possible with suffix, since the tokens of the prompt are not those of its"
            " text",
            "echo",
        )


Body = TypeVar("Body", bound=RequestBody)
HISTORIES = (("messages",), ("input",))
ENDPOINTS = MappingProxyType(  # by what only they take
    {"messages": "/v1/chat/completions", "prompt": "/v1/completions", "input": "/v1/responses"}
)
MAX_MENDED_BYTES = 2**18  # up to a comma, where other threads may run: at most 40 ms
LONE_SURROGATE = re.compile("lone leading surrogate|end of hex escape")
# The escape of half of a surrogate pair, after an even number of backslashes: of "\\ud83d\\ude00x"
# none, and of "\\ud83dx" the first. A pair has D800 to DBFF and then DC00 to DFFF.
HALF = re.compile(
    rb"(?<!\\)((?:\\\\)*)\\u[dD]"
    rb"(?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD])[c-fC-F][0-9a-fA-F]{2})"
)
WITHOUT_HALF = rb"\1\\ufffd"


def parse_body(kind: type[Body], body: bytes) -> Body:
    """Parse a body as ``kind``. Raises ParameterError, which names the first problem.

    At most 50 ms of the interpreter lock; call it in ``run_off_loop``, where another thread runs it
    for a large body.
    """
    if is_utf16(body):
        raise ParameterError("the body is UTF-16, which JSON over HTTP is not; send UTF-8")
    check_elements(body)
    try:
        codecs.decode(body, "utf-8")
    except UnicodeDecodeError as error:
        raise ParameterError(f"the body is not valid UTF-8 (byte {error.start})") from None
    noted: NotedFields = {}
    try:
        parsed = _parsed(kind, body, noted)
    except ValidationError as error:
        raise _to_parameter_error(error) from None
    except RecursionError:
        raise ParameterError("the body is nested too deeply") from None
    _note_ignored(parsed, noted)
    return parsed


def _parsed(kind: type[Body], body: bytes, noted: NotedFields) -> Body:
    """Parse a body. Halves of surrogate pairs in a conversation, where a client has cut an emoji,
    become U+FFFD. Raises ValidationError.
    """
    try:
        return kind.model_validate_json(body, context=noted)
    except ValidationError as error:
        [problem, *_] = error.errors(include_url=False, include_input=False)
        is_cut = problem["type"] == "json_invalid" and LONE_SURROGATE.search(problem["msg"])
        # no escape has a comma
        parts = body.split(b",") if is_cut and kind.has_history else []
        if not 0 < max(map(len, parts), default=0) <= MAX_MENDED_BYTES:
            raise
        noted.clear()
        mended = b",".join(HALF.sub(WITHOUT_HALF, part) for part in parts)
        return kind.model_validate_json(mended, context=noted)


def _note_ignored(parsed: RequestBody, of_parts: NotedFields) -> None:
    """Note the fields of a body that have no effect. Raises ParameterError for one that is probably
    a misspelling.
    """
    unknown, noted, num_unknown = "", set[str](), 0
    checked: set[tuple[type[RequestModel], str]] = set()
    for field in ignored_fields(parsed):
        kind = type(field.model), field.name
        if kind in checked or len(checked) == MAX_IGNORED:
            continue
        checked.add(kind)
        path = printable_path((*field.place, field.name))
        num_unknown += not field.is_known
        if not field.is_known and num_unknown <= MAX_COMPARED:
            _check_spelling(field, path)
        unknown = unknown or ("" if field.is_known else path)
        noted.add(path if field.has_effect_elsewhere else re.sub(r"\[\d+\]", "[]", path))
    fields = type(parsed).model_fields if of_parts else ()
    within = next((f"{name}[]." for name in ("input", "messages") if name in fields), "")
    for given, is_known in of_parts.items():
        path = printable_name(given if given.partition("[")[0] in fields else within + given)
        unknown = unknown or ("" if is_known else path)
        noted.add(path)
    noted.update(parsed.unused_fields())
    if noted:
        parsed.note_ignored(tuple(sorted(noted)), unknown)


def _check_spelling(field: IgnoredField, path: str) -> None:
    """Raise ParameterError if an unknown field is probably a misspelling, or another server's name
    of a field that the object lacks. In a conversation, which a client cannot take back, a
    misspelling is also of a field that the object lacks.
    """
    known, given = _names(type(field.model)), field.model.model_fields_set
    other = other_name(field.name, known)
    meant = other or intended_name(field.name, known)
    is_extra = (other or field.place[:1] in HISTORIES) and meant in given
    if meant and not is_extra:
        raise ParameterError(
            f"{path} is not a parameter of this endpoint; did you mean {meant}?", path
        )


@cache
def _names(kind: type[RequestModel]) -> list[str]:
    return [field.alias or name for name, field in kind.model_fields.items()]


def _to_parameter_error(error: ValidationError) -> ParameterError:
    if error.error_count() > MAX_ERRORS:
        return ParameterError(
            f"{error.error_count()} things are wrong with the body, too many to describe"
        )
    problem = error.errors(include_url=False)[0]
    name = printable_path(_path(problem)) or None
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
            return ParameterError(describe_value(name, preview(_tag(problem)), problem), name)
        case _:
            return ParameterError(describe_value(name, preview(problem["input"]), problem), name)


def _misspelling(missing: ErrorDetails) -> str:
    """Return the end of the message if the object has a field of a similar name, or that of another
    endpoint, else "".
    """
    name, given = str(_path(missing)[-1]), missing["input"]
    for other, endpoint in ENDPOINTS.items() if name in ENDPOINTS else ():
        if isinstance(given, dict) and other in given:
            return f"; {other} is for {endpoint}"
    for other in islice(given, MAX_IGNORED) if isinstance(given, dict) else ():
        if other_name(str(other), [name]) or intended_name(str(other), [name]):
            return f'; unknown field "{printable_name(str(other))}", did you mean "{name}"?'
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
