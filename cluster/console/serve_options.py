"""Options of ``serve`` beside those of every pipeline: its doors, its queue and its batch jobs."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from tramontane.cluster.console.options import flag, option

SERVING: Mapping[str, Any] = MappingProxyType(
    {
        "served_model_name": Annotated[
            str | None, option("--served-model-name", help="What clients call the model. Default: the folder's name.")
        ],
        "host": Annotated[str | None, option("--host", help="Address to listen on. Default 127.0.0.1.")],
        "port": Annotated[int | None, option("--port", help="HTTP port. Default 8000.")],
        "grpc_port": Annotated[int | None, option("--grpc-port", help="gRPC port; 0 for none. Default 9000.")],
        "replicas": Annotated[int | None, option("--replicas", help="Pipelines behind the door. Default 1.")],
        "max_replicas": Annotated[
            int | None, option("--max-replicas", help="Pipelines when there is much to do. Default: never more than --replicas.")
        ],
        "target_load": Annotated[
            float | None, option("--target-load", help="How full each is to be, where their number changes. Default 0.75.")
        ],
        "target_tokens": Annotated[
            int | None, option("--target-tokens", help="Tokens in flight that one is meant for, if they are to count as well.")
        ],
        "upscale_delay": Annotated[
            float | None, option("--upscale-delay", help="Seconds for which more have to be wanted. Default 30.")
        ],
        "downscale_delay": Annotated[
            float | None, option("--downscale-delay", help="Seconds for which fewer have to be enough. Default 600.")
        ],
        "max_queued_requests": Annotated[
            int | None, option("--max-queued-requests", help="Sequences that may wait, per pipeline. Default 256.")
        ],
        "max_queued_tokens": Annotated[
            int | None, option("--max-queued-tokens", help="Prompt tokens that may wait, per pipeline. Default 131072.")
        ],
        "drain_timeout": Annotated[
            float | None, option("--drain-timeout", help="Seconds to finish what runs, once it is to stop. Default 30.")
        ],
        "slow_reader_timeout": Annotated[
            float | None,
            option("--slow-reader-timeout", help="Seconds for which a client may leave its answer unread. Default 60."),
        ],
        "log_format": Annotated[str | None, option("--log-format", help="text, or json: an object a line. Default: text.")],
        "log_level": Annotated[
            str | None,
            option("--log-level", help="What is logged: debug, info, warning or error. Default: warning."),
        ],
        "tracing_exporter": Annotated[
            str | None,
            option("--tracing-exporter", help="Where spans go: otlp, file or MODULE:FUNCTION. Default: nowhere."),
        ],
        "tracing_sampling_ratio": Annotated[
            float | None, option("--tracing-sampling-ratio", help="Share of requests that are traced, 0 to 1. Default 0.01.")
        ],
        "move_experts": Annotated[
            bool | None, flag("--move-experts", help="Let clients have experts spread by another load, by POST /experts.")
        ],
        "api_key": Annotated[
            list[str] | None, option("--api-key", help="Clients must have this key, or another of those given.")
        ],
        "api_key_file": Annotated[
            Path | None, option("--api-key-file", help="Keys, one per line; read again whenever the file changes.")
        ],
        "jobs_database": Annotated[
            str | None, option("--jobs-database", help="Of batch jobs: sqlite:////FILE or postgresql://HOST/NAME.")
        ],
        "jobs_storage": Annotated[
            str | None, option("--jobs-storage", help="Of batch jobs' files: a folder or any URL of fsspec.")
        ],
        "jobs_concurrency": Annotated[
            int | None,
            option("--jobs-concurrency", help="Lines of batch jobs in progress at once. Default: a bit more than fit."),
        ],
        "jobs_retention": Annotated[
            int | None, option("--jobs-retention", help="Days for which ended jobs and files are kept; 0: for ever. Default 30.")
        ],
        "jobs_url_prefixes": Annotated[
            str | None,
            option("--jobs-url-prefixes", help="What batch jobs may be read from: file:///in,s3://bucket. Default: nothing."),
        ],
    }
)
