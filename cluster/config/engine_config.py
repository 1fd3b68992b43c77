"""The one validated configuration: every flag of the command line is a key of it."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, SecretStr, ValidationError

from tramontane.cluster.config.expert_load import ExpertLoad, parse_load_option
from tramontane.cluster.config.logging import LogFormat, LogLevel, LogSettings
from tramontane.cluster.config.parsers import (
    absolute_database,
    absolute_folder,
    expert_sizes,
    gpu_speeds,
    parse_api_keys,
    parse_gpu_memory,
    url_prefixes,
)
from tramontane.proto.errors import ConfigError
from tramontane.proto.model_args import Quantization
from tramontane.proto.model_folder import RandomWeights, WeightSource, is_preset
from tramontane.proto.plan import Link

PIPELINE_KEYS = {  # what makes a pipeline what it is; the other keys are the router's and the doors'
    *("model", "load_format", "stages", "stages_per_gpu", "dtype", "quantize", "max_model_len", "max_num_seqs"),
    *("page_size", "kv_cache_memory", "threads_per_stage", "link", "gpu_memory", "gpu_speed"),
    *("expert_actors", "expert_replicas", "expert_memory", "expert_load", "ping_pong"),
}
SECRETS = {"jobs_database", "jobs_storage"}  # which may hold a password
DEMO_MODEL = Path(__file__).parents[1] / "demo_model"

# Bounds beyond which a number can only be a slip: what is allotted in advance must stay small.
PositiveInt = Annotated[int, Field(ge=1, le=2**24)]
SmallInt = Annotated[int, Field(ge=1, le=2**14)]
MAX_STAGES_PER_GPU = 64  # stages on one GPU, of which each is a process
Seconds = Annotated[float, Field(ge=0, le=86_400)]


class EngineConfig(BaseModel):
    """How a pipeline is built. None means: chosen from the model and the machines."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Path = DEMO_MODEL
    load_format: Literal["auto", "dummy"] = "auto"
    stages: SmallInt | None = None
    stages_per_gpu: Annotated[int, Field(ge=1, le=MAX_STAGES_PER_GPU)] = 1
    local: bool = False
    address: str | None = None
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    quantize: Quantization | None = None
    max_model_len: PositiveInt | None = None
    max_num_seqs: SmallInt = 64
    max_num_batched_tokens: PositiveInt = 512
    max_in_flight: SmallInt | None = Field(None, description="micro-batches in flight; measured if not given")
    itl_target_ms: Annotated[float, Field(gt=0)] | None = Field(None, description="time between a sequence's tokens")
    step_timeout: Annotated[float, Field(gt=0, le=86_400)] = Field(30.0, description="seconds until a micro-batch is given up")
    page_size: PositiveInt = 16
    kv_cache_memory: ByteSize | None = Field(None, description="bytes per stage, such as 512MiB")
    threads_per_stage: SmallInt | None = None
    placement_timeout: Annotated[float, Field(gt=0, le=86_400)] = Field(60.0, description="seconds until there must be room")
    gpu_memory: Annotated[tuple[int, ...] | None, BeforeValidator(parse_gpu_memory)] = Field(
        None, description="of each stage, or of all"
    )
    gpu_speed: Annotated[tuple[int, ...] | None, BeforeValidator(gpu_speeds)] = Field(None, description="of each stage, relative")
    link: Link = "object-store"
    expert_actors: Annotated[int, Field(ge=0, le=2**14)] = Field(0, description="0: experts inside the stages")
    expert_replicas: Literal["auto"] | SmallInt = Field(1, description="of every expert; auto: of those that have most to do")
    expert_memory: Annotated[tuple[int, ...] | None, BeforeValidator(expert_sizes)] = Field(
        None, description="of each expert actor, or of all"
    )
    expert_load: Annotated[ExpertLoad | None, BeforeValidator(parse_load_option)] = Field(
        None, description="a file of measured load"
    )
    move_experts: bool = Field(False, description="clients may, by POST /experts")
    ping_pong: SmallInt = Field(2, description="micro-batches a stage keeps open while experts on actors of their own work")
    seed: int = 0
    served_model_name: Annotated[str, Field(min_length=1)] | None = None
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    grpc_port: Annotated[int, Field(ge=0, le=65535)] = Field(9000, description="0: no gRPC")
    replicas: SmallInt = 1
    max_replicas: SmallInt | None = Field(
        None, description="pipelines when there is much to do; as many as replicas if not given"
    )
    target_load: Annotated[float, Field(gt=0, le=100)] = Field(0.75, description="how full each is to be; above 1 some wait")
    target_tokens: PositiveInt | None = Field(
        None, description="that each is to have in flight, if they are to count beside that"
    )
    upscale_delay: Seconds = Field(30.0, description="seconds for which more pipelines have to be wanted")
    downscale_delay: Seconds = Field(600.0, description="seconds for which fewer have to be enough")
    ingress_replicas: SmallInt = 1
    max_queued_requests: Annotated[int, Field(ge=0, le=2**24)] = Field(256, description="sequences waiting for a place")
    max_queued_tokens: PositiveInt = Field(2**17, description="prompt tokens waiting for a place")
    max_body_bytes: PositiveInt = Field(8 * 2**20, description="of one HTTP request")
    stream_writes_per_s: PositiveInt | None = Field(None, description="of one ingress replica; 50 per core if not given")
    drain_timeout: Annotated[float, Field(ge=0, le=86_400)] | None = Field(None, description="seconds; 30, deployed by Serve 600")
    slow_reader_timeout: Annotated[float, Field(gt=0, le=86_400)] = Field(60.0, description="seconds without reading an answer")
    api_key: Annotated[tuple[SecretStr, ...], BeforeValidator(parse_api_keys)] = Field((), description="shown by nothing")
    api_key_file: Path | None = Field(None, description="one key per line, read again when it changes")
    jobs_database: Annotated[SecretStr, Field(min_length=1)] | None = Field(
        None, description="of batch jobs: sqlite or postgresql"
    )
    jobs_storage: Annotated[SecretStr, Field(min_length=1)] | None = Field(None, description="of batch jobs' files, by fsspec")
    jobs_concurrency: SmallInt | None = Field(
        None, description="lines of batch jobs in progress; a quarter more than run at once"
    )
    jobs_retention: Annotated[int, Field(ge=0, le=2**14)] = Field(30, description="days; 0: for ever")
    jobs_url_prefixes: Annotated[tuple[str, ...], BeforeValidator(url_prefixes)] = Field((), description="clients may name")
    log_format: LogFormat = Field("text", description="of what the log says; json: an object a line")
    log_level: LogLevel = Field("warning", description="of Tramontane's own lines")
    tracing_exporter: Annotated[str, Field(min_length=1)] | None = Field(None, description="of spans; none: no tracing")
    tracing_sampling_ratio: Annotated[float, Field(ge=0, le=1)] = Field(0.01, description="of requests without a trace")
    json_output: bool = Field(False, alias="json")

    @classmethod
    def key_names(cls) -> set[str]:
        """As they are written in a file and in ``build``'s flags."""
        return {field.alias or name for name, field in cls.model_fields.items()}

    @property
    def model_name(self) -> str:
        """What ``/v1/models`` says."""
        return self.served_model_name or ("demo" if self.model.resolve() == DEMO_MODEL.resolve() else self.model.resolve().name)

    @property
    def max_pipelines(self) -> int:
        """Pipelines that there may be at once."""
        return self.max_replicas or self.replicas

    def single_pipeline(self) -> Self:
        """Of a file that was written for ``serve``: one pipeline."""
        return self.model_copy(update={"replicas": 1, "max_replicas": None})

    @property
    def weights(self) -> WeightSource:
        """Where every stage gets its own."""
        return RandomWeights() if self.load_format == "dummy" else self.model.resolve()

    @property
    def logs(self) -> LogSettings:
        return LogSettings(self.log_format, self.log_level)

    def with_absolute_paths(self) -> Self:
        """The same files, for processes that run elsewhere."""
        model = self.model if is_preset(self.model) else self.model.resolve()
        return self.model_copy(
            update={
                "model": model,
                "api_key_file": self.api_key_file and self.api_key_file.absolute(),
                "jobs_database": self.jobs_database and absolute_database(self.jobs_database),
                "jobs_storage": self.jobs_storage and absolute_folder(self.jobs_storage),
            }
        )

    def without_secrets(self) -> Self:
        """For those who need none."""
        return self.model_copy(update={"api_key": (), "api_key_file": None})

    @classmethod
    def build(cls, file: "ConfigFile | None", flags: dict[str, Any]) -> Self:
        """Keys of the file, if there is one, overridden by flags that were given (None: it was not)."""
        keys = (file.keys if file else {}) | _given(flags)
        try:
            config = cls(**keys)
        except ValidationError as error:
            raise ConfigError("; ".join(_format_error(problem) for problem in error.errors())) from None
        if config.max_pipelines < config.replicas:
            raise ConfigError(
                f"--max-replicas is {config.max_replicas}, and --replicas is {config.replicas}; there are never fewer"
            )
        if config.local and config.address:
            raise ConfigError("--local runs without Ray, so --address cannot be used with it")
        if config.local and config.link == "direct":
            raise ConfigError(
                "--local keeps the stages in one process, where nothing travels, so --link direct cannot be used with it"
            )
        if config.local and config.expert_actors:
            raise ConfigError("--local keeps everything in one process, so --expert-actors cannot be used with it")
        if config.load_format == "auto" and is_preset(config.model):
            raise ConfigError(
                f"--model is {config.model}, a published geometry without weights; "
                "give a checkpoint's folder, or --load-format dummy for random weights"
            )
        return config


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """What ``--config`` names: YAML of keys and values."""

    path: Path
    keys: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Self:
        try:
            keys = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except OSError as error:
            raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from error
        except yaml.MarkedYAMLError as error:
            raise ConfigError(f"--config {path} is not valid YAML{_place(error)}") from None
        except (yaml.YAMLError, UnicodeDecodeError):
            raise ConfigError(f"--config {path} is not valid YAML: it holds characters that are not allowed") from None
        if not isinstance(keys, dict):
            raise ConfigError(f"--config {path} must hold keys and values, such as 'stages: 2'")
        keys = {str(key).replace("-", "_"): value for key, value in keys.items()}
        if unknown := [key for key in keys if key not in EngineConfig.key_names()]:
            raise ConfigError(f"{', '.join(unknown)} (in {path}): no such key of the configuration; README lists them")
        return cls(path, keys)

    def named_in(self, message: str, flags: dict[str, Any]) -> str:
        """``--stages is 9`` becomes ``stages (in file.yaml) is 9``, if the file gave it and no flag did."""

        def name(option: re.Match[str]) -> str:
            key = option[1].replace("-", "_")
            return f"{key} (in {self.path})" if key in self.keys.keys() - _given(flags).keys() else option[0]

        return re.sub(r"--([a-z][a-z-]*)", name, message)


def _given(flags: dict[str, Any]) -> dict[str, Any]:
    """A flag that may be repeated is () where nobody gives it."""
    return {name: value for name, value in flags.items() if value is not None and value != ()}


def _place(error: yaml.MarkedYAMLError) -> str:
    """Where, and not what is there: it may be a key."""
    mark = error.problem_mark or error.context_mark
    return f": line {mark.line + 1}, column {mark.column + 1}" if mark else ""


def _format_error(problem: Any) -> str:  # noqa: ANN401 - pydantic's ErrorDetails is private
    name = "--" + "-".join(str(part) for part in problem["loc"]).replace("_", "-")
    if problem["type"] == "extra_forbidden":
        return f"{problem['loc'][0]} is not a key of the configuration; README lists them"
    if problem["loc"][0] in SECRETS:
        return f"{name} must be a text that is not empty"
    if problem["type"].startswith("byte_size"):
        return f"{name} is {problem['input']!r}; it must be a size such as 512MiB or 2GiB"
    return f"{name} is {problem['input']!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}"
