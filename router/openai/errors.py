"""Errors as OpenAI's HTTP tells them: the same for a request of its own and for a line of a batch job."""

from dataclasses import dataclass
from typing import Any

from tramontane.proto.errors import (
    DeadlineExceededError,
    DrainingError,
    FileTooLargeError,
    JobRefusedError,
    OverloadedError,
    ParameterError,
    PoisonRequestError,
    RequestError,
    TramontaneError,
    UnknownFileError,
    UnknownJobError,
    UnknownModelError,
    UnsatisfiableSchemaError,
    UserError,
)
from tramontane.router.openai.completion_request import ErrorType, error_body


@dataclass(frozen=True, slots=True)
class HttpErrorSpec:
    """All but the message, which is the error's own."""

    status: int
    type: ErrorType
    param: str | None = None
    code: str | None = None

    def body(self, message: str) -> dict[str, Any]:
        return error_body(message, self.type, self.param, self.code)


def http_error_for(error: TramontaneError) -> HttpErrorSpec:
    match error:
        case OverloadedError():
            return HttpErrorSpec(429, "rate_limit_error", code="rate_limit_exceeded")
        case UnknownModelError():
            return HttpErrorSpec(404, "invalid_request_error", "model", "model_not_found")
        case UnknownJobError() | UnknownFileError():
            return HttpErrorSpec(404, "invalid_request_error", code="not_found")
        case FileTooLargeError():
            return HttpErrorSpec(413, "invalid_request_error")
        case UnsatisfiableSchemaError() | PoisonRequestError():
            return HttpErrorSpec(
                400, "invalid_request_error", code="poison" if isinstance(error, PoisonRequestError) else "unfollowable"
            )
        case ParameterError():
            return HttpErrorSpec(400, "invalid_request_error", error.parameter)
        case JobRefusedError():
            return HttpErrorSpec(400, "invalid_request_error")
        case RequestError():
            return HttpErrorSpec(400, "invalid_request_error", "prompt")
        case UserError():
            return HttpErrorSpec(400, "invalid_request_error")
        case _:
            return _server_error_for(error)


def _server_error_for(error: TramontaneError) -> HttpErrorSpec:
    match error:
        case DeadlineExceededError():
            return HttpErrorSpec(504, "server_error", code="deadline_exceeded")
        case DrainingError():
            return HttpErrorSpec(503, "server_error", code="draining")
        case _:
            return HttpErrorSpec(503, "server_error", code="unavailable")
