"""Errors as gRPC statuses: a code, one line, and details from which a client restores the same error."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc import StatusCode

from tramontane.proto.errors import (
    AuthenticationError,
    ConnectionLostError,
    DeadlineExceededError,
    DrainingError,
    OverloadedError,
    ParameterError,
    PipelineError,
    PoisonRequestError,
    RequestError,
    TramontaneError,
    UnimplementedError,
    UnknownJobError,
    UnknownModelError,
    UnsatisfiableSchemaError,
    UserError,
)
from tramontane.proto.log_fields import request_fields

logger = logging.getLogger(__name__)

DETAILS = "grpc-status-details-bin"
DOMAIN = "tramontane"
RETRY_AFTER_S = 1  # while a pipeline restarts
MAX_MESSAGE = 2000  # characters; a client's HTTP/2 accepts 8 KiB of trailers, where a byte that is not ASCII takes three


@dataclass(frozen=True, slots=True)
class GrpcStatus:
    """The status of a call that failed."""

    code: StatusCode
    message: str
    details: bytes

    def apply(self, context: Any) -> None:  # noqa: ANN401 - gRPC's own, or Ray Serve's substitute
        """Set the status on a server's context. If an exception were raised, Ray Serve would lose the details and log it."""
        context.set_code(self.code)
        context.set_details(self.message)
        context.set_trailing_metadata([(DETAILS, self.details)])


# The first match counts. The reason is the name of the error on the wire.
CODES: tuple[tuple[type[TramontaneError], StatusCode, str], ...] = (
    (OverloadedError, StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED"),
    (UnknownModelError, StatusCode.NOT_FOUND, "UNKNOWN_MODEL"),
    (UnknownJobError, StatusCode.NOT_FOUND, "UNKNOWN_JOB"),
    (UnsatisfiableSchemaError, StatusCode.INVALID_ARGUMENT, "UNFOLLOWABLE"),
    (PoisonRequestError, StatusCode.INVALID_ARGUMENT, "POISON"),
    (AuthenticationError, StatusCode.UNAUTHENTICATED, "WRONG_KEY"),
    (UnimplementedError, StatusCode.UNIMPLEMENTED, "NOT_HERE"),
    (ParameterError, StatusCode.INVALID_ARGUMENT, "WRONG_PARAMETER"),
    (RequestError, StatusCode.INVALID_ARGUMENT, "WRONG_REQUEST"),
    (UserError, StatusCode.INVALID_ARGUMENT, "NOT_POSSIBLE"),
    (DeadlineExceededError, StatusCode.DEADLINE_EXCEEDED, "DEADLINE"),
    (DrainingError, StatusCode.UNAVAILABLE, "DRAINING"),
    (PipelineError, StatusCode.UNAVAILABLE, "UNAVAILABLE"),
)


def status_for(error: Exception, request_id: str = "") -> GrpcStatus:
    """Return the status for an error. One that is not a TramontaneError is a defect; its message goes only to the log."""
    if not isinstance(error, TramontaneError):
        name, fields = request_id or "-", request_fields(request_id)
        logger.error("request %s failed because of a defect of the server", name, exc_info=error, extra=fields)
        return _make_status(StatusCode.INTERNAL, "the server has a defect; see its log", ErrorInfo(reason="DEFECT"), None)
    if not isinstance(error, UserError | OverloadedError):
        logger.warning("request %s failed: %s", request_id or "-", error, extra=request_fields(request_id))
    code, reason = next(((code, reason) for kind, code, reason in CODES if isinstance(error, kind)), CODES[-1][1:])
    info = ErrorInfo(reason=reason)
    if isinstance(error, ParameterError) and error.parameter is not None:
        info.metadata["parameter"] = error.parameter
    delay = error.retry_after_s if isinstance(error, OverloadedError) else RETRY_AFTER_S
    return _make_status(
        code, str(error), info, delay if isinstance(error, OverloadedError | PipelineError | DrainingError) else None
    )


def _make_status(code: StatusCode, message: str, info: ErrorInfo, retry_after_s: int | None) -> GrpcStatus:
    message = " ".join(message.encode(errors="replace").decode().split())[:MAX_MESSAGE]
    status = Status(code=code.value[0], message=message)
    info.domain = DOMAIN
    status.details.add().Pack(info)
    if retry_after_s is not None:
        status.details.add().Pack(RetryInfo(retry_delay=Duration(seconds=retry_after_s)))
    return GrpcStatus(code, message, status.SerializeToString())


# How a client sees errors of gRPC itself or of Ray Serve's proxy: a message is too large, a method does not exist, ...
TRANSPORT_ERRORS: Mapping[StatusCode, type[TramontaneError]] = MappingProxyType(
    {
        StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
        StatusCode.RESOURCE_EXHAUSTED: RequestError,
        StatusCode.INVALID_ARGUMENT: RequestError,
        StatusCode.UNIMPLEMENTED: UnimplementedError,
        StatusCode.UNAUTHENTICATED: AuthenticationError,
        StatusCode.PERMISSION_DENIED: AuthenticationError,
    }
)


def error_from_status(code: StatusCode, message: str, trailers: Any) -> TramontaneError:  # noqa: ANN401 - gRPC's pairs, or None
    """Restore, in a client, the error that ``status_for`` was given.

    A status that is neither ours nor in TRANSPORT_ERRORS is a lost connection: the server may be gone, or may run without
    its application (NOT_FOUND).
    """
    info, retry = _details(trailers)
    message = message or code.name
    kind = next((kind for kind, _, reason in CODES if reason == info.reason), None)
    if kind is OverloadedError:
        return OverloadedError(message, retry.retry_delay.seconds)
    if kind is ParameterError:
        return ParameterError(message, info.metadata.get("parameter"))
    if kind is not None:
        return kind(message)
    if info.reason:
        return PipelineError(message)
    return TRANSPORT_ERRORS.get(code, ConnectionLostError)(message)


def _details(trailers: Any) -> tuple[ErrorInfo, RetryInfo]:  # noqa: ANN401
    """Return our details, or empty messages if there are none."""
    info, retry, status = ErrorInfo(), RetryInfo(), Status()
    for key, value in trailers or ():
        if key == DETAILS:
            status.ParseFromString(value)
    for detail in status.details:
        detail.Unpack(info)
        detail.Unpack(retry)
    return (info, retry) if info.domain == DOMAIN else (ErrorInfo(), RetryInfo())
