"""Options that several commands have, and the configuration that they and a ``--config`` file give.

Options of ``serve`` beside those of every pipeline: its doors, its queue and its batch jobs.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer

from tramontane.cluster.config.engine_config import ConfigFile, EngineConfig
from tramontane.proto.errors import UserError


def option(*names: str, help: str) -> Any:  # noqa: ANN401
    return typer.Option(*names, help=help)


def flag(name: str, help: str, is_eager: bool = False) -> Any:  # noqa: ANN401
    """An option without a value, which typer's help would show with one: ``--json <bool>``."""
    return typer.Option(name, help=help, is_eager=is_eager, metavar="")


Model = Annotated[Path | None, option("--model", help="Checkpoint folder. Default: the built-in demo model.")]
LoadFormat = Annotated[
    str | None,
    option("--load-format", help="auto: the folder's weights. dummy: random ones; --model may be a geometry, as for plan."),
]
Stages = Annotated[int | None, option("--stages", help="Pipeline depth. Default: all that GPUs take, or 2.")]
StagesPerGpu = Annotated[int | None, option("--stages-per-gpu", help="Stages that share a GPU. Default 1.")]
Local = Annotated[bool | None, flag("--local", help="Stages as plain objects in this process, no Ray.")]
Address = Annotated[str | None, option("--address", help="Join a running Ray cluster: auto or host:port.")]
Dtype = Annotated[str | None, option("--dtype", help="auto, bfloat16, float16 or float32.")]
Quantize = Annotated[str | None, option("--quantize", help="int8 or fp8: half the memory for weights. Default: not quantised.")]
MaxModelLen = Annotated[int | None, option("--max-model-len", help="Positions per sequence.")]
MaxNumSeqs = Annotated[int | None, option("--max-num-seqs", help="Sequences admitted at once. Default 64.")]
MaxNumBatchedTokens = Annotated[int | None, option("--max-num-batched-tokens", help="Tokens in one micro-batch. Default 512.")]
ItlTargetMs = Annotated[
    float | None, option("--itl-target-ms", help="Time between a sequence's tokens that prompts may not break. Default: none.")
]
PageSize = Annotated[int | None, option("--page-size", help="Positions per cache page. Default 16.")]
KvCacheMemory = Annotated[str | None, option("--kv-cache-memory", help="Page pool per stage, such as 512MiB.")]
ThreadsPerStage = Annotated[int | None, option("--threads-per-stage", help="CPU threads of a stage. Default: cores / stages.")]
GpuMemory = Annotated[str | None, option("--gpu-memory", help="Of each stage's GPU: 24GiB,24GiB,80GiB. Default: asked of it.")]
GpuSpeed = Annotated[
    str | None, option("--gpu-speed", help="Relative, of each stage's GPU: 1,1,3. Default: measured, where unlike.")
]
StepTimeout = Annotated[
    float | None, option("--step-timeout", help="Seconds after which a stage that does nothing is replaced. Default 30.")
]
Link = Annotated[str | None, option("--link", help="How hidden states travel: object-store or direct. Default: object-store.")]
ExpertActors = Annotated[
    int | None, option("--expert-actors", help="Actors that hold the experts. Default 0: experts are inside the stages.")
]
ExpertReplicas = Annotated[
    str | None, option("--expert-replicas", help="Actors that hold each expert; auto: more for those with most to do. Default 1.")
]
ExpertMemory = Annotated[
    str | None, option("--expert-memory", help="Of each expert actor's GPU: 80GiB,40GiB. Default: asked of it.")
]
ExpertLoadFile = Annotated[
    Path | None, option("--expert-load", help="What tramontane experts --json measured: experts are spread by it.")
]
PingPong = Annotated[
    int | None, option("--ping-pong", help="Micro-batches a stage keeps open while experts work elsewhere. Default 2.")
]
Seed = Annotated[int | None, option("--seed", help="Seed of sampling, or of random prompts. Default 0.")]
Config = Annotated[Path | None, option("--config", help="YAML file of these options.")]
Json = Annotated[bool | None, flag("--json", help="Machine-readable output on standard output.")]

Temperature = Annotated[float, option("--temperature", help="0 is greedy.")]
TopP = Annotated[float, option("--top-p", help="Keep the likeliest tokens up to this much probability.")]
TopK = Annotated[int, option("--top-k", help="Keep this many likeliest tokens; 0 keeps all.")]

# What every command with a pipeline takes. Whoever adds an option adds it here, not to the commands.
PIPELINE: Mapping[str, Any] = MappingProxyType(
    {
        "model": Model,
        "load_format": LoadFormat,
        "stages": Stages,
        "stages_per_gpu": StagesPerGpu,
        "address": Address,
        "dtype": Dtype,
        "quantize": Quantize,
        "max_model_len": MaxModelLen,
        "page_size": PageSize,
        "kv_cache_memory": KvCacheMemory,
        "threads_per_stage": ThreadsPerStage,
        "gpu_memory": GpuMemory,
        "gpu_speed": GpuSpeed,
        "link": Link,
        "step_timeout": StepTimeout,
        "expert_actors": ExpertActors,
        "expert_replicas": ExpertReplicas,
        "expert_memory": ExpertMemory,
        "expert_load": ExpertLoadFile,
        "ping_pong": PingPong,
        "config": Config,
        "json": Json,
    }
)
BATCHING: Mapping[str, Any] = MappingProxyType(
    {"max_num_seqs": MaxNumSeqs, "max_num_batched_tokens": MaxNumBatchedTokens, "itl_target_ms": ItlTargetMs}
)
RUN_OPTIONS: Mapping[str, Any] = MappingProxyType({"local": Local, "seed": Seed})  # what runs once, rather than serves

Command = Callable[..., None]


def with_options(*shared: Mapping[str, Any]) -> Callable[[Command], Command]:
    """Give a command these options beside its own; those that nobody gives are None.

    The command does not name them: ``load_config`` finds them in the context. One that it does name is its own.
    """

    def decorate(command: Command) -> Command:
        own = inspect.signature(command).parameters
        added = {name: kind for options in shared for name, kind in options.items() if name not in own}
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [inspect.Parameter(name, keyword, default=None, annotation=kind) for name, kind in added.items()]

        @wraps(command)
        def run(**given: Any) -> None:  # noqa: ANN401
            command(**{name: value for name, value in given.items() if name in own})

        run.__annotations__ = command.__annotations__ | added  # typer reads both
        vars(run)["__signature__"] = inspect.Signature([*own.values(), *parameters])
        return run

    return decorate


def _as_defaults(context: typer.Context, path: Path | None) -> Path | None:
    """What of the file is an option of this command is what that is where nobody gives it. A plan has a stage per GPU."""
    if path is not None:
        keys = {key: value for key, value in ConfigFile.read(path).keys.items() if value is not None}
        names = {parameter.name for parameter in context.command.params}
        if "stages" in keys and "stages" not in names:
            keys["gpus"] = _num_gpus(keys["stages"], keys.get("stages_per_gpu", 1))
        texts = {key: ",".join(map(str, value)) if isinstance(value, list) else str(value) for key, value in keys.items()}
        context.default_map = {key: text for key, text in texts.items() if key in names}
    return path


def _num_gpus(stages: object, together: object) -> object:
    """5 stages, 2 to a GPU: 3. What is no number is for the option to refuse."""
    return -(-stages // together) if isinstance(stages, int) and isinstance(together, int) and together > 0 else stages


# For commands that plan or model something, of which only some keys are options.
ConfigDefaults = Annotated[
    Path | None,
    typer.Option("--config", is_eager=True, callback=_as_defaults, help="YAML file; those of its keys that are options here."),
]


def explicit_options(context: typer.Context) -> list[str]:
    """Names, of those that are None where nobody gives them."""
    return [name for name, value in context.params.items() if value is not None]


@contextmanager
def load_config(context: typer.Context) -> Iterator[EngineConfig]:
    """The flags that are keys of the configuration, over those of ``--config``; errors name each where it was given."""
    flags = {name: value for name, value in context.params.items() if name in EngineConfig.key_names()}
    path = context.params["config"]
    file = ConfigFile.read(path) if path else None
    try:
        yield EngineConfig.build(file, flags)
    except UserError as error:
        if file is None:
            raise
        raise type(error)(file.named_in(str(error), flags)) from error


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
