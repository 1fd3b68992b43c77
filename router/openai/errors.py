"""Errors in OpenAI's shape, for HTTP requests and for the lines of batch jobs."""

from dataclasses import dataclass
from typing import Any

from tramontane.proto import errors
from tramontane.router.openai.responses import Error, ErrorDetails, ErrorType


def error_body(message: str, type: ErrorType, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return OpenAI's object for an error."""
    return Error(error=ErrorDetails(message=message, type=type, param=param, code=code)).as_json()


@dataclass(frozen=True, slots=True)
class HttpErrorSpec:
    """Everything that a response says about an error except its message."""

    status: int
    type: ErrorType
    param: str | None = None
    code: str | None = None

    def body(self, message: str) -> dict[str, Any]:
        """Return the response's body."""
        return error_body(message, self.type, self.param, self.code)


_INVALID = HttpErrorSpec(400, "invalid_request_error")
_NOT_FOUND = HttpErrorSpec(404, "invalid_request_error", code="not_found")
# The first class that an error is an instance of decides.
_SPECS: tuple[tuple[type[errors.TramontaneError], HttpErrorSpec], ...] = (
    (errors.QuotaExceededError, HttpErrorSpec(429, "rate_limit_error", code="quota_exceeded")),
    (errors.OverloadedError, HttpErrorSpec(429, "rate_limit_error", code="rate_limit_exceeded")),
    (errors.UnknownModelError, HttpErrorSpec(404, "invalid_request_error", "model", "model_not_found")),
    (errors.UnknownJobError, _NOT_FOUND),
    (errors.UnknownFileError, _NOT_FOUND),
    (errors.FileTooLargeError, HttpErrorSpec(413, "invalid_request_error")),
    (errors.UnsatisfiableSchemaError, HttpErrorSpec(400, "invalid_request_error", code="unfollowable")),
    (errors.PoisonRequestError, HttpErrorSpec(400, "invalid_request_error", code="poison")),
    (errors.JobRefusedError, _INVALID),
    (errors.RequestError, HttpErrorSpec(400, "invalid_request_error", "prompt")),
    (errors.UserError, _INVALID),
    (errors.DeadlineExceededError, HttpErrorSpec(504, "server_error", code="deadline_exceeded")),
    (errors.DrainingError, HttpErrorSpec(503, "server_error", code="draining")),
)


def http_error_for(error: errors.TramontaneError) -> HttpErrorSpec:
    """Return how a response describes an error."""
    if isinstance(error, errors.ParameterError):
        return HttpErrorSpec(400, "invalid_request_error", error.parameter)
    unavailable = HttpErrorSpec(503, "server_error", code="unavailable")
    return next((spec for kind, spec in _SPECS if isinstance(error, kind)), unavailable)
