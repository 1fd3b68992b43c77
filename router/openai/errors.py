"""Errors as OpenAI's HTTP tells them: the same for a request of its own and for a line of a batch job."""

from dataclasses import dataclass
from typing import Any

from tramontane.proto.errors import (
    DeadlineError,
    DrainingError,
    FileTooLargeError,
    JobRefusedError,
    OverloadedError,
    ParameterError,
    PoisonError,
    RequestError,
    TramontaneError,
    UnfollowableError,
    UnknownFileError,
    UnknownJobError,
    UnknownModelError,
    UserError,
)
from tramontane.router.openai.completion_request import ErrorType, error_body


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """All but the message, which is the error's own."""

    status: int
    type: ErrorType
    param: str | None = None
    code: str | None = None

    def body(self, message: str) -> dict[str, Any]:
        return error_body(message, self.type, self.param, self.code)


def shape_of(error: TramontaneError) -> ErrorShape:
    match error:
        case OverloadedError():
            return ErrorShape(429, "rate_limit_error", code="rate_limit_exceeded")
        case UnknownModelError():
            return ErrorShape(404, "invalid_request_error", "model", "model_not_found")
        case UnknownJobError() | UnknownFileError():
            return ErrorShape(404, "invalid_request_error", code="not_found")
        case FileTooLargeError():
            return ErrorShape(413, "invalid_request_error")
        case UnfollowableError() | PoisonError():
            return ErrorShape(400, "invalid_request_error", code="poison" if isinstance(error, PoisonError) else "unfollowable")
        case ParameterError():
            return ErrorShape(400, "invalid_request_error", error.parameter)
        case JobRefusedError():
            return ErrorShape(400, "invalid_request_error")
        case RequestError():
            return ErrorShape(400, "invalid_request_error", "prompt")
        case UserError():
            return ErrorShape(400, "invalid_request_error")
        case _:
            return _no_fault_of_the_request(error)


def _no_fault_of_the_request(error: TramontaneError) -> ErrorShape:
    match error:
        case DeadlineError():
            return ErrorShape(504, "server_error", code="deadline_exceeded")
        case DrainingError():
            return ErrorShape(503, "server_error", code="draining")
        case _:
            return ErrorShape(503, "server_error", code="unavailable")
