"""The keys of ``EngineConfig`` that only servers have, in groups.

Flags (``console/options.py``) and docs/configuration.md (``cli/config.py``) are built from these
declarations.
"""

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, ByteSize, Field, SecretStr

from tramontane.cluster.config.key import (
    KeyGroup,
    PositiveInt,
    PositiveSeconds,
    Seconds,
    SecretText,
    SmallInt,
    Text,
    key,
    parse_api_keys,
    parse_origins,
    parse_url_prefixes,
)
from tramontane.cluster.config.logging import LogFormat, LogLevel
from tramontane.cluster.config.vllm_values import parse_names


class ServingKeys(KeyGroup):
    """The API server, its queue and its API keys."""

    title = "Serving"

    served_model_name: Annotated[Text | None, BeforeValidator(parse_names)] = key(
        None, "Names for clients: a or a,b.", unset="the folder's name; demo for the demo model"
    )
    host: Text = key(
        "127.0.0.1",
        "Address on which HTTP and gRPC listen. TRAMONTANE_HOST, which images set, is another"
        " default.",
        in_serve_config=False,
    )
    port: Annotated[int, Field(ge=1, le=65535)] = key(8000, "HTTP port.", in_serve_config=False)
    grpc_port: Annotated[int, Field(ge=0, le=65535)] = key(
        9000, "gRPC port, on the same host. 0: no gRPC.", in_serve_config=False
    )
    ingress_replicas: SmallInt | None = key(
        None,
        "Ingress replicas.",
        unset="1; for more pipelines, or GPUs and many cores, 2 or more",
        has_flag=False,
    )
    max_queued_requests: Annotated[int, Field(ge=0, le=2**24)] = key(
        256, "Sequences that may wait for a slot, per pipeline. More are refused with 429."
    )
    max_queued_tokens: PositiveInt = key(
        2**17, "Prompt tokens that may wait, per pipeline. More are refused with 429."
    )
    share_prefixes: bool = key(
        False,
        "Share cached prefixes between requests with different API keys. The time to the first"
        " token then shows other clients which text is cached.",
    )
    max_body_bytes: PositiveInt = key(
        8 * 2**20, "Largest body of one HTTP request, in bytes.", has_flag=False
    )
    stream_writes_per_s: PositiveInt | None = key(
        None,
        "Writes to streams per second of one ingress replica.",
        unset="as many as there is time for; under full load 50 per core and machine, at most 400",
        has_flag=False,
    )
    drain_timeout: Seconds | None = key(
        None,
        "Seconds that running requests have to finish when the server stops."
        " TRAMONTANE_DRAIN_TIMEOUT, which images set, is another default for serve.",
        unset="30 for serve, 600 in a Ray Serve config",
    )
    slow_client_timeout: PositiveSeconds = key(
        60.0,
        "Seconds after which a client that does not read its answer is disconnected.",
        former_names=("slow_reader_timeout",),
    )
    dashboard: bool = key(
        False, "Start Ray's dashboard with the cluster that serve starts.", in_serve_config=False
    )
    move_experts: bool = key(False, "Let clients redistribute experts by POST /experts.")
    public_metrics: bool = key(
        False, "Answer /metrics without an API key, for gateways and for Prometheus."
    )
    allowed_origins: Annotated[tuple[str, ...], BeforeValidator(parse_origins)] = key(
        (),
        "Origins of web pages that may call the server from a browser (CORS), such as"
        " https://a.example, with commas between them, or * for all.",
        unset="none",
        metavar="ORIGINS",
    )
    strict_requests: bool = key(
        False, "Refuse requests with fields that the API does not have, instead of ignoring these."
    )
    api_key: Annotated[tuple[SecretStr, ...], BeforeValidator(parse_api_keys)] = key(
        (),
        "A key that clients must send. May be repeated. It is never shown.",
        unset="for serve those in TRAMONTANE_API_KEY, with commas between them, unless there is an"
        " api_key_file; else none",
        in_serve_config=False,
    )
    api_key_file: Path | None = key(
        None,
        "Keys, one per line; lines with # are comments. The file is read again when it changes.",
        unset="none",
    )


class ScalingKeys(KeyGroup):
    """The number of pipelines that serve."""

    title = "Autoscaling"

    replicas: SmallInt = key(
        1,
        "Pipelines behind the ingress; the minimum where --max-replicas is larger.",
        other_names=("data_parallel_size",),
    )
    max_replicas: SmallInt | None = key(
        None,
        "Most pipelines, under high load. GPUs, cores and memory are divided among this many.",
        unset="the value of replicas",
    )
    autoscale_load: Annotated[float, Field(gt=0, le=100)] = key(
        0.75,
        "Target load of each pipeline, for autoscaling: 1 is full. Above 1, some sequences wait.",
        former_names=("target_load",),
    )
    autoscale_tokens: PositiveInt | None = key(
        None,
        "Target number of tokens in flight of one pipeline, in addition to the load.",
        unset="tokens do not count",
        former_names=("target_tokens",),
    )
    upscale_delay: Seconds = key(30.0, "Seconds of high load before a pipeline is added.")
    downscale_delay: Seconds = key(600.0, "Seconds of low load before a pipeline is removed.")


class JobKeys(KeyGroup):
    """Batch jobs."""

    title = "Batch jobs"

    jobs_database: SecretText | None = key(
        None,
        "Database of batch jobs: sqlite:////FILE or postgresql://USER:PASSWORD@HOST/NAME. Other"
        " users of the machine may see it on the command line for a moment, so a password is better"
        " kept in ~/.pgpass.",
        unset="~/.tramontane/jobs.sqlite, created with its folder for the first job or file",
        metavar="URL",
    )
    jobs_storage: SecretText | None = key(
        None,
        "Storage for the files of batch jobs: a folder, or an fsspec URL such as s3://bucket/jobs"
        " (which needs the library s3fs).",
        unset="~/.tramontane/jobs",
        metavar="URL",
    )
    jobs_concurrency: SmallInt | None = key(
        None,
        "Lines of batch jobs in progress at once.",
        unset="a quarter more than max_num_seqs of all pipelines that there may be",
    )
    jobs_retention: Annotated[int, Field(ge=0, le=2**14)] = key(
        30,
        "Days for which jobs are kept after their end, and files after their creation. 0: forever.",
    )
    jobs_max_open: PositiveInt = key(
        1000, "Batch jobs that one API key may have open. More are refused with 429."
    )
    jobs_max_lines: PositiveInt = key(
        2**24, "Lines in the open batch jobs of one API key. More are refused with 429."
    )
    jobs_max_bytes: Annotated[ByteSize, Field(ge=1)] = key(
        ByteSize(2**36),
        "Bytes that the files, lines and results of one API key may occupy. More are refused with"
        " 429.",
        metavar="SIZE",
    )
    jobs_url_prefixes: Annotated[tuple[str, ...], BeforeValidator(parse_url_prefixes)] = key(
        (),
        "URL prefixes from which jobs may read their input: file:///data/in,s3://bucket/in. A"
        " prefix with a password is refused, since clients would have to name it too.",
        unset="none",
        metavar="URLS",
    )


class LoggingKeys(KeyGroup):
    """Logs and traces."""

    title = "Logging and tracing"

    log_format: LogFormat = key("text", "text, or json: one object per line.")
    log_level: LogLevel = key(
        "warning", "debug, info, warning or error: the lowest level that Tramontane logs."
    )
    tracing_exporter: Text | None = key(
        None,
        "Where OpenTelemetry spans go: otlp, file or MODULE:FUNCTION.",
        unset="no tracing",
        in_serve_config=False,
    )
    tracing_sampling_ratio: Annotated[float, Field(ge=0, le=1)] = key(
        0.01,
        "Fraction of requests that are traced, of those that arrive without a trace context.",
        in_serve_config=False,
    )
