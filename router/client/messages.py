"""The client's messages: requests from arguments, results from responses, errors from statuses."""

import io
import json
import os
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar

import grpc
from google.protobuf.message import Message

from tramontane.proto import inference_pb2 as pb
from tramontane.proto.errors import (
    ConfigError,
    ConnectionLostError,
    DeadlineExceededError,
    TramontaneError,
    did_you_mean,
)
from tramontane.proto.grpc_messages import error_from_status, options_message
from tramontane.proto.jobs import JobOptions
from tramontane.proto.request import FinishReason

# Checks of the client's target and key, and errors that say why it cannot reach its server.

DEFAULT_PORT = 9000  # of --grpc-port
# of targets that gRPC interprets itself
SCHEMES = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:", "vsock:", "xds:")
HOST_AND_PORT = re.compile(r"(\[[\w:.%]+\]|[^\s:/@\[\]]+):(\d{1,5})")
MAX_PORT = 2**16 - 1
HEADER_TEXT = re.compile(r"[ -~]*")
HTTP_1 = "http1.x server"
UNREACHABLE = ("failed to connect to all addresses", "errors resolving ", "DNS resolution failed")
WHERE = (
    f"the gRPC API is at --grpc-port of tramontane serve ({DEFAULT_PORT} by default), not at its"
    " HTTP port"
)


def check_target(target: str) -> None:
    """Raise ConfigError unless the target is host:port, or a name in one of gRPC's schemes."""
    if target.startswith(SCHEMES):
        return
    found = HOST_AND_PORT.fullmatch(target)
    if found is None or not 0 < int(found[2]) <= MAX_PORT:
        raise ConfigError(
            f"the server's address is {target!r}; it must be host:port, without http://; {WHERE}"
        )


def check_api_key(key: str | None) -> None:
    """Raise ConfigError, which does not repeat the key, if no header can carry the key."""
    if key is not None and not HEADER_TEXT.fullmatch(key):
        raise ConfigError("the API key must be printable ASCII, without line breaks")


def connection_error(target: str, message: str) -> TramontaneError | None:
    """Return the error for gRPC's message that no connection was made; None for any other message.

    "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Connection refused"
    becomes "no server can be reached at 127.0.0.1:1: Connection refused; ...".
    """
    if HTTP_1 in message:
        return ConfigError(f"the server at {target} speaks HTTP/1, not gRPC; {WHERE}")
    if not message.startswith(UNREACHABLE):
        return None
    reason = message.rpartition(": ")[2].rstrip("]")
    return ConnectionLostError(
        f"no server can be reached at {target}: {reason}; is one running there? {WHERE}"
    )


M = TypeVar("M", bound=Message)
Prompt = str | Sequence[int]

# the prompt has an argument
PARAMETERS = frozenset(pb.GenerateRequest.DESCRIPTOR.fields_by_name) - {"text", "token_ids"}
UPLOAD_BYTES = 2**18  # of one message
FINISH_REASONS = {
    number: FinishReason[name.removeprefix("FINISH_REASON_")]
    for name, number in pb.FinishReason.items()
    if number
}


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with its log-probability; ``top`` has the likeliest tokens there. The first token of
    a text has no logprob.
    """

    token: str
    logprob: float | None
    top: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class PromptTokensDetails:
    """Kinds of the tokens of a prompt. ``cached_tokens``: tokens that were not computed."""

    cached_tokens: int


@dataclass(frozen=True, slots=True)
class CompletionTokensDetails:
    """Draft tokens: accepted ones, which became new tokens, and rejected ones."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request. ``completion_tokens_details``: only from servers that
    speculate.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds that a request spent in each phase. ``cached_tokens``: prompt tokens that were not
    computed.
    """

    ingress_s: float
    queue_s: float
    prefill_s: float
    decode_s: float
    cached_tokens: int


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
    """How a client resumes a stream after it has lost its server: every ``retry_s``, for
    ``total_s`` since the last message.
    """

    total_s: float = 60.0
    retry_s: float = 1.0

    def pause(self, error: TramontaneError, silent_s: float) -> float:
        """Return the seconds until the next attempt; raise ``error`` if it is not a lost
        connection, or that would be too late.
        """
        if not isinstance(error, ConnectionLostError) or silent_s + self.retry_s > self.total_s:
            raise error
        return self.retry_s


def generate_request(prompt: Prompt, parameters: Mapping[str, Any]) -> pb.GenerateRequest:
    """Make the request of ``generate``. ``stop`` may be one text, ``response_format`` a mapping or
    its JSON.

    Raises ConfigError for a parameter that does not exist or has a value of the wrong type.
    """
    given = {name: value for name, value in parameters.items() if value is not None}
    if unknown := [name for name in given if name not in PARAMETERS]:
        likely = did_you_mean(unknown[0], PARAMETERS)
        there_are = " There are" if likely else "; there are"
        raise ConfigError(
            f"there is no parameter {unknown[0]}{likely}{there_are} {', '.join(sorted(PARAMETERS))}"
        )
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    if not isinstance(given.get("response_format", ""), str):
        given["response_format"] = _json(given["response_format"])
    request = pb.GenerateRequest(**_prompt(prompt))
    for name, value in given.items():
        request.MergeFrom(_field(pb.GenerateRequest, name, value))
    return request


def score_request(prompt: Prompt, logprobs: int | None, model: str | None) -> pb.ScoreRequest:
    """Make the request of ``score``. Raises ConfigError."""
    request = pb.ScoreRequest(**_prompt(prompt))
    request.MergeFrom(_field(pb.ScoreRequest, "logprobs", logprobs))
    request.MergeFrom(_field(pb.ScoreRequest, "model", model))
    return request


def request_message(kind: type[M], **fields: Any) -> M:
    """Make a message of these fields; None values are left out. Raises ConfigError."""
    message = kind()
    for name, value in fields.items():
        if value is not None:
            message.MergeFrom(_field(kind, name, value))
    return message


def check_timeout(timeout_s: float | None) -> None:
    """Raise ConfigError unless this is a number of seconds, or None."""
    if not isinstance(timeout_s, int | float | None):
        raise ConfigError(
            f"timeout_s is {timeout_s!r:.60}; it must be a number of seconds, or None"
        )


def _field(kind: type[M], name: str, value: Any) -> M:
    """Make a message with only this field, so that an error can name it. Protobuf's own messages
    describe its internals.
    """
    try:
        return kind(**{name: value})
    except (TypeError, ValueError, AttributeError):
        raise ConfigError(f"{name} is {value!r:.60}; it must be {_expected(kind, name)}") from None


def _expected(kind: type[Message], name: str) -> str:
    field = kind.DESCRIPTOR.fields_by_name[name]
    if field.message_type is not None:
        expected = "a mapping"
    elif field.cpp_type in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
        expected = "a number"
    else:
        expected = {field.CPPTYPE_STRING: "a text", field.CPPTYPE_BOOL: "true or false"}.get(
            field.cpp_type, "a whole number"
        )
    is_list = field.is_repeated and field.message_type is None
    return f"a list; each item is {expected}" if is_list else expected


def _json(response_format: Any) -> str:
    try:
        return json.dumps(response_format)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"response_format cannot be written as JSON: {error}") from None


def _prompt(prompt: Prompt) -> dict[str, Any]:
    try:
        if prompt is None:
            raise TypeError
        return (
            {"text": prompt} if isinstance(prompt, str) else {"token_ids": pb.TokenIds(ids=prompt)}
        )
    except (TypeError, ValueError, AttributeError):
        raise ConfigError(
            "the prompt must be a text, or token ids, which are whole numbers"
        ) from None


def submit_requests(
    options: JobOptions,
    source: bytes | os.PathLike[str] | None,
    url: str | None,
    request_key: str | None = None,
) -> Iterator[pb.SubmitJobRequest]:
    """Make the messages of one upload: of a text, a file, or a URL that the server reads. Raises
    ConfigError.
    """
    if (source is None) == (url is None):
        raise ConfigError("a job needs either lines or a url")
    if not isinstance(options, JobOptions):
        raise ConfigError(f"options is {options!r:.60}; it must be a JobOptions")
    first = request_message(
        pb.SubmitJobRequest, options=options_message(options), request_key=request_key
    )
    if source is None:
        return iter([first, request_message(pb.SubmitJobRequest, url=url)])
    if not isinstance(source, bytes | str | os.PathLike):
        raise ConfigError(
            f"source is {source!r:.60}; it must be JSON Lines as bytes, or the path of a file"
        )
    try:
        # read later
        file = io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb")  # noqa: SIM115
    except (OSError, ValueError) as error:
        path = os.fspath(source)
        hint = (
            "; JSON Lines are given as bytes, and a URL as url=..."
            if "://" in str(path) or "{" in str(path)
            else ""
        )
        raise ConfigError(
            f"{path!s:.200} cannot be read: {getattr(error, 'strerror', error)}{hint}"
        ) from error
    return _upload(first, file)


def _upload(first: pb.SubmitJobRequest, file: BinaryIO) -> Iterator[pb.SubmitJobRequest]:
    with file:
        yield first
        while data := file.read(UPLOAD_BYTES):
            yield pb.SubmitJobRequest(data=data)


def parse_chunks(response: pb.GenerateResponse) -> list[Chunk]:
    """Return the chunks of a response; usage and timings belong to the last chunk."""
    usage = _usage(response.usage) if response.HasField("usage") else None
    timings = _timings(response.timings) if response.HasField("timings") else None
    last = len(response.pieces) - 1
    return [
        Chunk(
            index=piece.index,
            text=piece.text,
            token_ids=tuple(piece.token_ids),
            logprobs=_logprobs(piece.logprobs),
            finish_reason=FINISH_REASONS.get(piece.finish_reason),
            usage=usage if number == last else None,
            timings=timings if number == last else None,
        )
        for number, piece in enumerate(response.pieces)
    ]


def parse_score(response: pb.ScoreResponse) -> Score:
    """Return the score of a response."""
    return Score(_logprobs(response.tokens), _usage(response.usage))


def parse_models(response: pb.ModelsResponse) -> list[ModelInfo]:
    """Return the models of a response."""
    return [ModelInfo(model.id, model.max_model_len, model.vocab_size) for model in response.models]


@contextmanager
def translate_errors(target: str, timeout_s: float | None) -> Generator[None]:
    """Raise gRPC's errors as the errors of ``tramontane.proto.errors`` that the server raised, or
    that describe why it did not answer.
    """
    try:
        yield
    except grpc.RpcError as rpc_error:
        call: Any = rpc_error
        message = call.details() or ""
        error = connection_error(target, message) or error_from_status(
            call.code(), message, call.trailing_metadata()
        )
        if isinstance(error, DeadlineExceededError) and timeout_s is not None:
            raise DeadlineExceededError(
                f"the call did not end within timeout_s={timeout_s:g}"
            ) from None
        raise error from None


def _usage(message: pb.Usage) -> Usage:
    drafts, kinds = message.completion_tokens_details, None
    if message.HasField("completion_tokens_details"):
        kinds = CompletionTokensDetails(
            drafts.accepted_prediction_tokens, drafts.rejected_prediction_tokens
        )
    details = PromptTokensDetails(message.prompt_tokens_details.cached_tokens)
    return Usage(
        message.prompt_tokens, message.completion_tokens, message.total_tokens, details, kinds
    )


def _timings(message: pb.Timings) -> Timings:
    seconds = (message.ingress_s, message.queue_s, message.prefill_s, message.decode_s)
    return Timings(*seconds, message.cached_tokens)


def _logprobs(messages: Sequence[pb.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            message.token,
            message.logprob if message.HasField("logprob") else None,
            {other.token: other.logprob for other in message.top},
        )
        for message in messages
    )
