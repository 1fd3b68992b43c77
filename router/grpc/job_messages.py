"""Messages of the service BatchJobs, to and from the vocabulary of ``jobs``."""

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, cast, get_args

from tramontane.proto import inference_pb2 as pb
from tramontane.proto.errors import ParameterError, RequestError
from tramontane.router.batch.jobs import Endpoint, Job, JobOptions, JobService, JobState, ResultLine
from tramontane.router.grpc.handlers import MalformedMessage

MAX_METADATA = 16  # pairs, as OpenAI has it
MAX_METADATA_CHARS = 512
MAX_OFFSET = 2**53
STATE_OF = {pb.JobState.Value(f"JOB_STATE_{state.name}"): state for state in JobState}
DEFAULTS = JobOptions()


async def submit(jobs: JobService, requests: AsyncIterator[Any]) -> Job:
    """Options first, then the pieces of a text or a URL. Raises RequestError."""
    first = await anext(requests, None)
    if isinstance(first, MalformedMessage):
        raise RequestError(first.message)
    if first is None or first.WhichOneof("part") != "options":
        raise RequestError("the first message must hold options")
    options = _options_from(first.options)
    key = first.request_key if first.HasField("request_key") else None
    second = await anext(requests, None)
    if isinstance(second, pb.SubmitJobRequest) and second.WhichOneof("part") == "url":
        if await anext(requests, None) is not None:
            raise RequestError("nothing may follow a url")
        return await jobs.submit_url(second.url, options, key)
    return await jobs.submit(_pieces(second, requests), options, key)


async def _pieces(first: Any, rest: AsyncIterator[Any]) -> AsyncGenerator[bytes, None]:  # noqa: ANN401
    message = first
    while message is not None:
        if isinstance(message, MalformedMessage):
            raise RequestError(message.message)
        if message.WhichOneof("part") != "data":
            raise RequestError("after the options there must be either data or one url")
        yield message.data
        message = await anext(rest, None)
    if getattr(rest, "is_cancelled", lambda: False)():  # Ray Serve's stream just ends where its client has left
        raise RequestError("the upload was broken off")


def _options_from(message: pb.JobOptions) -> JobOptions:
    endpoint = message.endpoint if message.HasField("endpoint") else DEFAULTS.endpoint
    if endpoint not in get_args(Endpoint):
        raise ParameterError(f"endpoint is {endpoint!r:.80}; there are {' and '.join(get_args(Endpoint))}", "endpoint")
    metadata = dict(message.metadata)
    if len(metadata) > MAX_METADATA or any(len(text) > MAX_METADATA_CHARS for pair in metadata.items() for text in pair):
        raise ParameterError(
            f"metadata: there may be at most {MAX_METADATA} pairs of at most {MAX_METADATA_CHARS} characters each", "metadata"
        )
    keeps_order = message.keeps_order if message.HasField("keeps_order") else DEFAULTS.keeps_order
    return JobOptions(cast("Endpoint", endpoint), keeps_order, metadata)


def options_message(options: JobOptions) -> pb.JobOptions:
    return pb.JobOptions(endpoint=options.endpoint, keeps_order=options.keeps_order, metadata=options.metadata)


def job_message(job: Job) -> pb.Job:
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
    return Job(
        job_id=message.job_id,
        state=STATE_OF[message.state],
        options=_options_from(message.options),
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
    return pb.ResultLine(offset=line.offset, line=line.line, custom_id=line.custom_id, is_error=line.is_error, body=line.body)


def parse_line(message: pb.ResultLine) -> ResultLine:
    return ResultLine(message.offset, message.line, message.custom_id, message.is_error, message.body)


def validate_offset(offset: int) -> int:
    if not 0 <= offset < MAX_OFFSET:
        raise ParameterError(f"offset is {offset}; it must be a number of results, from 0", "offset")
    return offset


def checked_limit(request: pb.ListJobsRequest) -> int:
    limit = request.limit if request.HasField("limit") else 20
    if not 1 <= limit <= 100:
        raise ParameterError(f"limit is {limit}; it must be from 1 to 100", "limit")
    return limit
