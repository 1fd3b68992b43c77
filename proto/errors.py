"""Every error that Tramontane raises on purpose.

    TramontaneError
    +-- UserError
    |   +-- ConfigError
    |   +-- PlanError
    |   +-- AuthenticationError
    |   +-- UnimplementedError
    |   +-- CheckpointError
    |   |   +-- InvalidModelConfigError
    |   +-- RequestError
    |       +-- ParameterError
    |       |   +-- ContextLengthError
    |       +-- UnknownModelError
    |       +-- UnsatisfiableSchemaError
    |       +-- NotFiniteError
    |       +-- PoisonRequestError
    |       +-- UnknownJobError
    |       +-- JobRefusedError
    |       +-- UnknownFileError
    |       +-- FileTooLargeError
    +-- OverloadedError
    |   +-- QueueFullError
    |   +-- QuotaExceededError
    +-- DrainingError
    +-- DeadlineExceededError
    +-- ConnectionLostError
    +-- PipelineError
        +-- StaleEpochError
        +-- LinkError
        +-- ExpertUnavailableError
        |   +-- ExpertRelocatedError
        +-- LeaseError
        +-- RouterLostError
        +-- StreamNotOpenError
        +-- JobStoreError
        +-- PipelineUnavailableError
            +-- PipelineRecoveringError
            +-- PipelineSupersededError
            +-- ModelMismatchError

A ``UserError`` says what was wrong and what to do about it. The command line prints it as one line
and exits with code 2. Broken internal invariants are assertions, not part of this class hierarchy.

Attributes of an error's class, inherited by its subclasses, define its HTTP and gRPC responses, its
name between processes and the exit code of a command: this is the only module to change for a new
error.
"""

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

DEFECT = "the server has a defect; see its log"  # for clients, of errors that are not in this tree

ErrorType = Literal["invalid_request_error", "rate_limit_error", "server_error"]  # of OpenAI

MIN_PREFIX = 4  # characters of a name that is a prefix of a known one
MAX_NAME_CHARS = 64  # of a name that may be a misspelling


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: "; did you mean max_tokens?", or "" if no
    name is similar.
    """
    known = list(known)
    # of several versions the last is the newest
    longer = [each for each in known if len(name) >= MIN_PREFIX and each.startswith(name)]
    similar = longer[-1:] or get_close_matches(name[:MAX_NAME_CHARS], known, n=1)
    return f"; did you mean {similar[0]}?" if similar else ""


# Requirements for a value, by the type of pydantic's error; the braces hold its context. JSON
# values are not parsed from text, unlike flags.
EXPECTED: Mapping[str, str] = MappingProxyType(
    {
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "int_parsing": "a whole number",
        "int_parsing_size": "a whole number with fewer digits",
        "float_type": "a number",
        "float_parsing": "a number",
        "finite_number": "a finite number",
        "bool_type": "true or false",
        "bool_parsing": "true or false",
        "string_type": "a text",
        "string_unicode": "valid Unicode",
        "string_too_long": "a text of at most {max_length} characters",
        "string_too_short": "a text of at least {min_length} character",
        "string_pattern_mismatch": "a text that matches {pattern}",
        "list_type": "a list",
        "tuple_type": "a list",
        "dict_type": "an object",
        "model_type": "an object",
        "model_attributes_type": "an object",
        "too_short": "a list of at least {min_length} items",
        "too_long": "a list of at most {max_length} items",
        "greater_than": "above {gt}",
        "greater_than_equal": "at least {ge}",
        "less_than": "below {lt}",
        "less_than_equal": "at most {le}",
        "literal_error": "{expected}",
        "enum": "{expected}",
        "union_tag_invalid": "one of {expected_tags}",
    }
)


def describe_value(
    name: str,
    shown: str,
    problem: Mapping[str, Any],
    expected_of: Mapping[str, str] = EXPECTED,
    docs: str = "/docs",
) -> str:
    """Return a readable reason why a value is refused: ``n is 'x'; it must be a whole number``.

    Args:
        name: Path of the value in the client's JSON, or a flag.
        shown: The value, in few characters.
        problem: One of pydantic's errors.
        expected_of: Requirements for a value, by the type of the error.
        docs: Where to look up types that are not in ``expected_of``.
    """
    expected = expected_of.get(problem["type"])
    if expected is None:
        return f"{name} is {shown}; this value is not allowed here, see {docs}"
    context = {
        key: f"{value:.12g}" if isinstance(value, float) else value
        for key, value in problem.get("ctx", {}).items()
    }
    return f"{name} is {shown}; it must be {expected.format(**context)}"


def find_error(attribute: str, value: str) -> type["TramontaneError"]:
    """Return the class that sets an attribute to a value, not a class that inherits it:
    ``("wire_name", "poison")`` is PoisonRequestError.

    A value that no class sets belongs to an error of a newer version; it counts as a failure of the
    server.
    """
    found = (cls for cls in _below(TramontaneError) if vars(cls).get(attribute) == value)
    return next(found, PipelineError)


def _below(cls: type[Any]) -> Iterator[type[Any]]:
    for child in cls.__subclasses__():
        yield child
        yield from _below(child)


class TramontaneError(Exception):
    """Root of all errors that are raised on purpose. A class that sets no attributes is answered
    like a failed pipeline, but without the advice to try again, and is restored as a failed
    pipeline.

    Attributes:
        http_status: Of the response.
        openai_type: ``type`` in the body of OpenAI's errors.
        openai_code: ``code`` there.
        parameter: ``param`` there: the name of the client's parameter that is wrong.
        retry_after_s: Whole seconds after which the client should try again; None if it should not.
        grpc_code: Name of gRPC's status code.
        grpc_reason: Name of the error in the details of gRPC's status; clients restore the class
            that sets it.
        wire_name: Name of the error between ingress replicas and routers, which restore the class
            that sets it.
        exit_code: Of a command that ends with this error.
    """

    http_status: ClassVar[int] = 503
    openai_type: ClassVar[ErrorType] = "server_error"
    openai_code: ClassVar[str | None] = "unavailable"
    parameter: str | None = None
    retry_after_s: int | None = None
    grpc_code: ClassVar[str] = "UNAVAILABLE"
    grpc_reason: ClassVar[str] = "UNAVAILABLE"
    wire_name: ClassVar[str] = "failure"
    exit_code: ClassVar[int] = 1

    @classmethod
    def restore(cls, message: str, retry_after_s: int = 0, parameter: str | None = None) -> Self:
        """Make the error from its transmitted fields; see ``find_error``."""
        return cls(message)


# ---- errors that the user can fix


class UserError(TramontaneError):
    """Something that the user asked for cannot be done; the message is one line."""

    http_status = 400
    openai_type = "invalid_request_error"
    openai_code: ClassVar[str | None] = None
    grpc_code = "INVALID_ARGUMENT"
    grpc_reason = "NOT_POSSIBLE"
    exit_code = 2


class ConfigError(UserError):
    """A flag, a parameter, or a combination of them is wrong."""


class PlanError(UserError):
    """No plan fits the available machines: too many stages, or too little memory."""


class AuthenticationError(UserError):
    """An API key is missing or unknown to the ingress."""

    http_status = 401
    openai_code = "invalid_api_key"
    grpc_code = "UNAUTHENTICATED"
    grpc_reason = "WRONG_KEY"


class UnimplementedError(UserError):
    """The server does not have this method, or not yet."""

    grpc_code = "UNIMPLEMENTED"
    grpc_reason = "NOT_HERE"


class CheckpointError(UserError):
    """A model folder cannot be served: it is missing, incomplete, misshapen or not supported."""


class InvalidModelConfigError(CheckpointError):
    """The numbers of a configuration describe no model. The reader of the file adds its name to the
    message.
    """


# ---- one request


class RequestError(UserError):
    """One request cannot be accepted or completed."""

    parameter: str | None = "prompt"
    grpc_reason = "WRONG_REQUEST"
    wire_name = "request"

    def about(self, parameter: str | None, message: str = "") -> "ParameterError":
        """Return this error as one about a parameter of the client's API."""
        kind = type(self) if isinstance(self, ParameterError) else ParameterError
        return kind(message or str(self), parameter)


class ParameterError(RequestError):
    """One parameter is wrong; ``parameter`` is its name, or None if the body as a whole is
    wrong.
    """

    grpc_reason = "WRONG_PARAMETER"

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter

    @classmethod
    def restore(cls, message: str, retry_after_s: int = 0, parameter: str | None = None) -> Self:
        """Make the error from its transmitted fields."""
        return cls(message, parameter)


class ContextLengthError(ParameterError):
    """A prompt is longer than the model's context. Agents recognize this error by its code, or by
    the words of its message, and shorten their history.
    """

    openai_code = "context_length_exceeded"

    @classmethod
    def of_prompt(
        cls, num_tokens: int, context: int, name: str = "the prompt", *, at_least: bool = False
    ) -> Self:
        """Return the error for a prompt of ``num_tokens``, or of ``at_least`` so many, and a model
        with a context of so many positions.
        """
        return cls(
            f"{name} is too long: {'at least ' * at_least}{num_tokens} tokens > {context - 1}"
            f" maximum. This model's maximum context length is {context} tokens, of which an answer"
            " takes at least one; shorten the prompt",
            "prompt",
        )


class UnknownModelError(RequestError):
    """The client named a model that is not served here."""

    http_status = 404
    openai_code = "model_not_found"
    parameter = "model"
    grpc_code = "NOT_FOUND"
    grpc_reason = "UNKNOWN_MODEL"


class UnsatisfiableSchemaError(RequestError):
    """The model cannot follow the schema of the response; a retry would fail, too."""

    openai_code = "unfollowable"
    parameter = None
    grpc_reason = "UNFOLLOWABLE"


class NotFiniteError(RequestError):
    """The model's numbers for a request are not finite, so that no token can be sampled; a retry
    would fail, too.
    """

    openai_code = "not_finite"
    parameter = None
    grpc_reason = "NOT_FINITE"


class PoisonRequestError(RequestError):
    """A request has crashed the pipeline repeatedly; a retry would crash it again."""

    openai_code = "poison"
    parameter = None
    grpc_reason = "POISON"
    wire_name = "poison"


class UnknownJobError(RequestError):
    """There is no batch job of that name."""

    http_status = 404
    openai_code = "not_found"
    parameter = None
    grpc_code = "NOT_FOUND"
    grpc_reason = "UNKNOWN_JOB"


class JobRefusedError(RequestError):
    """The submitted data cannot become a job or a file."""

    parameter = None


class UnknownFileError(RequestError):
    """There is no file of that name."""

    http_status = 404
    openai_code = "not_found"
    parameter = None


class FileTooLargeError(RequestError):
    """A file has more bytes than the server accepts."""

    http_status = 413
    parameter = None


# ---- the server


class OverloadedError(TramontaneError):
    """Too many requests are waiting; this one may be sent again after ``retry_after_s``, a whole
    number of seconds.
    """

    http_status = 429
    openai_type = "rate_limit_error"
    openai_code = "rate_limit_exceeded"
    retry_after_s: int
    grpc_code = "RESOURCE_EXHAUSTED"
    grpc_reason = "OVERLOADED"
    wire_name = "overloaded"

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message, retry_after_s)  # all arguments, so that the error can be pickled
        self.retry_after_s = retry_after_s

    @classmethod
    def restore(cls, message: str, retry_after_s: int = 0, parameter: str | None = None) -> Self:
        """Make the error from its transmitted fields."""
        return cls(message, retry_after_s)

    def __str__(self) -> str:
        return str(self.args[0])


class QueueFullError(OverloadedError):
    """The waiting queue has no room for even the smallest request of this client."""

    wire_name = "full"


class QuotaExceededError(OverloadedError):
    """A client has reached its storage limit; it has to delete data, or wait until data expires."""

    openai_code = "quota_exceeded"


class DrainingError(TramontaneError):
    """The server is about to stop: it finishes running requests and accepts no new ones."""

    openai_code = "draining"
    retry_after_s = 5  # another server may have taken over by then
    grpc_reason = "DRAINING"


class DeadlineExceededError(TramontaneError):
    """The deadline that a client set has passed before its request was complete."""

    http_status = 504
    openai_code = "deadline_exceeded"
    grpc_code = "DEADLINE_EXCEEDED"
    grpc_reason = "DEADLINE"


class ConnectionLostError(TramontaneError):
    """A client cannot reach its server, or no longer; a retry may succeed."""


# ---- a pipeline and its parts


class PipelineError(TramontaneError):
    """A pipeline failed while requests were running on it."""

    retry_after_s = 1
    grpc_reason = "UNAVAILABLE"
    wire_name = "failure"


class StaleEpochError(PipelineError):
    """A step carried another epoch than its stage was fenced to."""


class LinkError(PipelineError):
    """A stage cannot receive from its neighbor or send to it. The cause of the neighbor's silence
    is reported elsewhere.
    """


class ExpertUnavailableError(PipelineError):
    """An expert actor died or became unreachable before it returned its rows; the call can be
    repeated.
    """


class ExpertRelocatedError(ExpertUnavailableError):
    """An expert actor does not hold the requested experts, because a newer expert plan is in
    force.
    """


class LeaseError(PipelineError):
    """Another router holds the lease of the pipeline."""


class RouterLostError(PipelineError):
    """A router is dead or unreachable; another router can continue its requests."""


class StreamNotOpenError(PipelineError):
    """A router has no open stream to the ingress that called it."""

    wire_name = "no stream"


class JobStoreError(PipelineError):
    """The database or the storage of the batch jobs is unavailable."""


class PipelineUnavailableError(PipelineError):
    """The pipeline of this router is restarting; another router may be available."""

    wire_name = "not running"


class PipelineRecoveringError(PipelineUnavailableError):
    """The pipeline of this router is being fenced again; the router queues the request if no other
    router can work on it now.
    """

    wire_name = "recovering"


class PipelineSupersededError(PipelineUnavailableError):
    """A newer version of the application took over the pipeline of this router, or its GPUs, and
    will accept requests soon.
    """

    wire_name = "handed over"


class ModelMismatchError(PipelineUnavailableError):
    """A router has another model or version than the request was made for; only a router with the
    request's model and version can run it.
    """

    wire_name = "other model"
