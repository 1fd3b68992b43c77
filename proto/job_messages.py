"""Messages of the service BatchJobs, to and from the vocabulary of ``jobs``."""

from typing import cast, get_args

from tramontane.proto import inference_pb2 as pb
from tramontane.proto.errors import ParameterError
from tramontane.proto.jobs import Endpoint, Job, JobOptions, JobState, ResultLine

MAX_METADATA = 16  # pairs, as OpenAI has it
MAX_METADATA_CHARS = 512
STATES = {pb.JobState.Value(f"JOB_STATE_{state.name}"): state for state in JobState}
DEFAULTS = JobOptions()


def options_message(options: JobOptions) -> pb.JobOptions:
    """Convert options to a message."""
    return pb.JobOptions(endpoint=options.endpoint, keeps_order=options.keeps_order, metadata=options.metadata)


def parse_options(message: pb.JobOptions) -> JobOptions:
    """Convert a message to options; a field that is not set has its default. Raises ParameterError."""
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
    return pb.ResultLine(offset=line.offset, line=line.line, custom_id=line.custom_id, is_error=line.is_error, body=line.body)


def parse_line(message: pb.ResultLine) -> ResultLine:
    """Convert a message to a result."""
    return ResultLine(message.offset, message.line, message.custom_id, message.is_error, message.body)
