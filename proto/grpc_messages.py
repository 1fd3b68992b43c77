"""Conversions of both ends of gRPC: errors to statuses, from which a client restores the same
error; jobs to messages and back.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast, get_args

from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc import StatusCode

from tramontane.proto import errors
from tramontane.proto import inference_pb2 as pb
from tramontane.proto.jobs import Endpoint, Job, JobOptions, JobState, ResultLine
from tramontane.proto.request import request_fields

logger = logging.getLogger(__name__)

DETAILS = "grpc-status-details-bin"
DOMAIN = "tramontane"
DRAIN_RETRY_S = 1  # less than over HTTP
# characters; a client's HTTP/2 accepts 8 KiB of trailers, where a byte that is not ASCII takes
# three
MAX_MESSAGE = 2000
MAX_METADATA = 16  # pairs, as OpenAI has it
MAX_METADATA_CHARS = 512
STATES = {pb.JobState.Value(f"JOB_STATE_{state.name}"): state for state in JobState}
DEFAULTS = JobOptions()

# ---- errors


@dataclass(frozen=True, slots=True)
class GrpcStatus:
    """The status of a call that failed."""

    code: StatusCode
    message: str
    details: bytes

    def apply(self, context: Any) -> None:  # gRPC's own, or Ray Serve's substitute
        """Set the status on a server's context. If an exception were raised, Ray Serve would lose
        the details and log it.
        """
        context.set_code(self.code)
        context.set_details(self.message)
        context.set_trailing_metadata([(DETAILS, self.details)])


def status_for(error: Exception, request_id: str = "") -> GrpcStatus:
    """Return the status for an error. Any error but a TramontaneError is a defect; its message is
    only logged.
    """
    if not isinstance(error, errors.TramontaneError):
        name, fields = request_id or "-", request_fields(request_id)
        logger.error(
            "request %s failed because of a defect of the server",
            name,
            exc_info=error,
            extra=fields,
        )
        return _make_status(StatusCode.INTERNAL, errors.DEFECT, ErrorInfo(reason="DEFECT"), None)
    if not isinstance(error, errors.UserError | errors.OverloadedError):
        logger.warning(
            "request %s failed: %s", request_id or "-", error, extra=request_fields(request_id)
        )
    info = ErrorInfo(reason=error.grpc_reason)
    if isinstance(error, errors.ParameterError) and error.parameter is not None:
        info.metadata["parameter"] = error.parameter
    is_draining = isinstance(error, errors.DrainingError)
    delay = DRAIN_RETRY_S if is_draining else error.retry_after_s
    return _make_status(StatusCode[error.grpc_code], str(error), info, delay)


def _make_status(
    code: StatusCode, message: str, info: ErrorInfo, retry_after_s: int | None
) -> GrpcStatus:
    message = " ".join(message.encode(errors="replace").decode().split())[:MAX_MESSAGE]
    status = Status(code=code.value[0], message=message)
    info.domain = DOMAIN
    status.details.add().Pack(info)
    if retry_after_s is not None:
        status.details.add().Pack(RetryInfo(retry_delay=Duration(seconds=retry_after_s)))
    return GrpcStatus(code, message, status.SerializeToString())


# How a client sees errors of gRPC itself or of Ray Serve's proxy: a message is too large, a method
# does not exist, ...
TRANSPORT_ERRORS: Mapping[StatusCode, type[errors.TramontaneError]] = MappingProxyType(
    {
        StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceededError,
        StatusCode.RESOURCE_EXHAUSTED: errors.RequestError,
        StatusCode.INVALID_ARGUMENT: errors.RequestError,
        StatusCode.UNIMPLEMENTED: errors.UnimplementedError,
        StatusCode.UNAUTHENTICATED: errors.AuthenticationError,
        StatusCode.PERMISSION_DENIED: errors.AuthenticationError,
    }
)


# pairs of gRPC, or None
def error_from_status(code: StatusCode, message: str, trailers: Any) -> errors.TramontaneError:
    """Restore, in a client, the error from a status of ``status_for``.

    A status that is neither ours nor in TRANSPORT_ERRORS is a lost connection: the server may be
    down, or may run without its application (NOT_FOUND).
    """
    info, retry = _details(trailers)
    message = message or code.name
    if info.reason:
        cls = errors.find_error("grpc_reason", info.reason)
        return cls.restore(message, retry.retry_delay.seconds, info.metadata.get("parameter"))
    return TRANSPORT_ERRORS.get(code, errors.ConnectionLostError)(message)


def _details(trailers: Any) -> tuple[ErrorInfo, RetryInfo]:
    """Return our details, or empty messages if the status has none."""
    info, retry, status = ErrorInfo(), RetryInfo(), Status()
    for key, value in trailers or ():
        if key == DETAILS:
            status.ParseFromString(value)
    for detail in status.details:
        detail.Unpack(info)
        detail.Unpack(retry)
    return (info, retry) if info.domain == DOMAIN else (ErrorInfo(), RetryInfo())


# ---- batch jobs


def options_message(options: JobOptions) -> pb.JobOptions:
    """Convert options to a message."""
    return pb.JobOptions(
        endpoint=options.endpoint, keeps_order=options.keeps_order, metadata=options.metadata
    )


def parse_options(message: pb.JobOptions) -> JobOptions:
    """Convert a message to options; a field that is not set has its default. Raises
    ParameterError.
    """
    endpoint = message.endpoint if message.HasField("endpoint") else DEFAULTS.endpoint
    if endpoint not in get_args(Endpoint):
        raise errors.ParameterError(
            f"endpoint is {endpoint!r:.80}; there are {' and '.join(get_args(Endpoint))}",
            "endpoint",
        )
    metadata = dict(message.metadata) if len(message.metadata) <= MAX_METADATA else None
    if metadata is None or any(
        len(text) > MAX_METADATA_CHARS for pair in metadata.items() for text in pair
    ):
        raise errors.ParameterError(
            f"metadata: there may be at most {MAX_METADATA} pairs of at most {MAX_METADATA_CHARS}"
            " characters each",
            "metadata",
        )
    keeps_order = message.keeps_order if message.HasField("keeps_order") else DEFAULTS.keeps_order
    return JobOptions(cast("Endpoint", endpoint), keeps_order, metadata)


def job_message(job: Job) -> pb.Job:
    """Convert a job to a message."""
    return pb.Job(
        job_id=job.job_id,
        state=f"JOB_STATE_{job.state.name}",
        options=options_message(job.options),
        num_lines=job.num_lines,
        num_done=job.num_done,
        num_failed=job.num_failed,
        num_bad=job.num_invalid,
        created_at=job.created_at,
        started_at=job.started_at,
        ended_at=job.ended_at,
        error=job.error,
    )


def parse_job(message: pb.Job) -> Job:
    """Convert a message to a job."""
    return Job(
        job_id=message.job_id,
        state=STATES[message.state],
        options=parse_options(message.options),
        num_lines=message.num_lines,
        num_done=message.num_done,
        num_failed=message.num_failed,
        num_invalid=message.num_bad,
        created_at=message.created_at,
        started_at=message.started_at if message.HasField("started_at") else None,
        ended_at=message.ended_at if message.HasField("ended_at") else None,
        error=message.error if message.HasField("error") else None,
    )


def line_message(line: ResultLine) -> pb.ResultLine:
    """Convert a result to a message."""
    return pb.ResultLine(
        offset=line.offset,
        line=line.line,
        custom_id=line.custom_id,
        is_error=line.is_error,
        body=line.body,
    )


def parse_line(message: pb.ResultLine) -> ResultLine:
    """Convert a message to a result."""
    return ResultLine(
        message.offset, message.line, message.custom_id, message.is_error, message.body
    )
