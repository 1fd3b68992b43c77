"""The keys of ``EngineConfig`` for every command, in groups; the keys of servers are in
``serving_keys.py``.

Flags (``console/options.py``) and docs/configuration.md (``cli/config.py``) are built from these
declarations.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field

from tramontane.cluster.config.key import (
    KeyGroup,
    PageSize,
    PositiveInt,
    PositiveSeconds,
    SmallInt,
    expand_home,
    key,
    parse_expert_memory,
    parse_expert_replicas,
    parse_gpu_memory,
    parse_gpu_speed,
)
from tramontane.cluster.config.measurements import (
    ExpertLoad,
    StageTime,
    parse_load_option,
    parse_stage_times_option,
)
from tramontane.cluster.config.vllm_values import parse_dtype, parse_length, parse_number
from tramontane.proto.errors import ConfigError
from tramontane.proto.plan import KvCacheDtype, Link, SpeculativeConfig
from tramontane.proto.step import STEP_TIMEOUT_S
from tramontane.proto.weight_format import Quantization

# The value of ``--speculative-config``: a JSON object with vLLM's keys.

MAX_DRAFTS, MAX_LOOKUP = 32, 64
DEFAULT_LOOKUP_MIN, DEFAULT_LOOKUP_MAX = 2, 5
SPECULATIVE_KEYS = (
    "method",
    "model",
    "num_speculative_tokens",
    "prompt_lookup_min",
    "prompt_lookup_max",
)


def parse_speculative_config(value: object) -> SpeculativeConfig | None:
    """Return the configuration from vLLM's JSON object, or a file's mapping. Raises ConfigError."""
    if value is None or isinstance(value, SpeculativeConfig):
        return value
    try:
        keys = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        keys = value
    if not isinstance(keys, dict) or not all(isinstance(key, str) for key in keys):
        raise ConfigError(
            f"--speculative-config is {value!r:.60}; it must be a JSON object such as "
            '{"method": "ngram", "num_speculative_tokens": 5}'
        )
    if unknown := [key for key in keys if key not in SPECULATIVE_KEYS]:
        raise ConfigError(
            f"--speculative-config has {unknown[0]!r}; its keys are {', '.join(SPECULATIVE_KEYS)}"
        )
    if (method := keys.get("method", "ngram")) not in ("ngram", "draft_model"):
        raise ConfigError(
            f"--speculative-config: method is {method!r}; it must be ngram, which drafts from the"
            " text itself, or draft_model"
        )
    if keys.get("num_speculative_tokens") is None:
        raise ConfigError(
            "--speculative-config has no num_speculative_tokens: how many tokens are drafted at a"
            " time, such as 5"
        )
    _check_number("num_speculative_tokens", keys["num_speculative_tokens"], 1, MAX_DRAFTS)
    return _ngrams(keys) if method == "ngram" else _draft_model(keys)


def _ngrams(keys: Mapping[str, Any]) -> SpeculativeConfig:
    if keys.get("model"):
        raise ConfigError(
            "--speculative-config: model is for method draft_model; n-grams are of the text itself"
        )
    low, high = keys.get("prompt_lookup_min"), keys.get("prompt_lookup_max")
    low = (
        min(DEFAULT_LOOKUP_MIN, high if type(high) is int else DEFAULT_LOOKUP_MIN)
        if low is None
        else low
    )
    high = (
        max(DEFAULT_LOOKUP_MAX, low if type(low) is int else DEFAULT_LOOKUP_MAX)
        if high is None
        else high
    )
    _check_number("prompt_lookup_min", low, 1, MAX_LOOKUP)
    _check_number("prompt_lookup_max", high, 1, MAX_LOOKUP)
    if high < low:
        raise ConfigError(
            f"--speculative-config: prompt_lookup_max is {high}, less than prompt_lookup_min, which"
            f" is {low}"
        )
    return SpeculativeConfig(keys["num_speculative_tokens"], low, high)


def _draft_model(keys: Mapping[str, Any]) -> SpeculativeConfig:
    for name in ("prompt_lookup_min", "prompt_lookup_max"):
        if keys.get(name):
            raise ConfigError(f"--speculative-config: {name} is for method ngram")
    if (model := keys.get("model")) is None:
        raise ConfigError(
            "--speculative-config has no model: method draft_model needs the folder of the draft"
            " model"
        )
    if not isinstance(model, str) or not model:
        raise ConfigError(
            f"--speculative-config: model is {model!r}; it must be the folder of the draft model"
        )
    return SpeculativeConfig(keys["num_speculative_tokens"], 0, 0, "draft_model", model)


def _check_number(name: str, value: object, least: int, most: int) -> None:
    """Raise ConfigError unless the value of a key of ``--speculative-config`` is a whole number in
    this range.
    """
    if type(value) is not int or not least <= value <= most:
        raise ConfigError(
            f"--speculative-config: {name} is {value!r}; it must be a whole number from {least} to"
            f" {most}"
        )


DEMO_MODEL = Path(__file__).parents[1] / "demo_model"
MAX_STAGES_PER_GPU = 64  # each of them is a process

# Defaults without a GPU; on GPUs ``planning/batch_limits.py`` chooses, with at least as many
# sequences.
SEQS_ON_CPUS, BATCHED_TOKENS_ON_CPUS = 64, 512
MAX_SEQS_ON_GPUS = 256

Numbers = tuple[int, ...] | None


class PipelineKeys(KeyGroup):
    """The model, and its stages."""

    title = "Pipeline"

    model: Annotated[Path, AfterValidator(expand_home)] = key(
        DEMO_MODEL,
        "Checkpoint folder, the same path on every node; nothing is downloaded. "
        "With --load-format dummy it may also be the name of a published geometry.",
        unset="the built-in demo model",
        defines_pipeline=True,
    )
    load_format: Literal["auto", "dummy"] = key(
        "auto",
        "auto: the weights of the folder. dummy: random weights, created by every stage in place,"
        " at full size.",
        defines_pipeline=True,
    )
    stages: SmallInt | None = key(
        None,
        "Pipeline stages, each a group of layers on one GPU.",
        unset="one per GPU, shared out over all pipelines, at most one per layer; 2 without a GPU",
        defines_pipeline=True,
        other_names=("pipeline_parallel_size",),
    )
    stages_per_gpu: Annotated[int, Field(ge=1, le=MAX_STAGES_PER_GPU)] = key(
        1,
        "Stages that share a GPU, for small models and tests. Without --stages, each GPU gets this"
        " many. No effect without a GPU.",
        defines_pipeline=True,
    )
    address: str | None = key(
        None,
        "Join a running Ray cluster from one of its nodes: auto or host:port.",
        unset="start a local Ray",
        in_serve_config=False,
    )
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"], BeforeValidator(parse_dtype)
    ] = key(
        "auto",
        "bfloat16, float16 or float32, which keeps bfloat16 matrices. auto: the checkpoint's.",
        defines_pipeline=True,
    )
    quantize: Quantization | None = key(
        None,
        "int8, w8a8 or fp8 weights: half the memory.",
        unset="off",
        defines_pipeline=True,
        other_names=("quantization",),
    )
    batch_invariant: bool | None = key(
        None,
        "A request's output is bit-identical whatever else is in the batch, however its prompt is"
        " divided into chunks, on any number of stages (docs/batch-invariance.md). A stage that"
        " cannot guarantee this refuses to start, and GPUs use slower kernels of our own."
        " --no-batch-invariant: GPUs use the fastest kernels, and stages do not check it.",
        unset="on without a GPU, with a warning where it cannot be; off on GPUs",
        defines_pipeline=True,
    )
    max_model_len: Annotated[PositiveInt | None, BeforeValidator(parse_length)] = key(
        None,
        "Positions per sequence: 4096, 32k (32,000), 32K (32,768), or auto.",
        unset="the checkpoint's",
        metavar="<int>",
        defines_pipeline=True,
    )
    page_size: PageSize = key(
        16,
        "Positions per cache page, at most 1024.",
        defines_pipeline=True,
        other_names=("block_size",),
    )
    kv_cache_memory: ByteSize | None = key(
        None,
        "Bytes of the page pool per stage, such as 512MiB.",
        unset="planned",
        metavar="SIZE",
        defines_pipeline=True,
        other_names=("kv_cache_memory_bytes",),
    )
    kv_cache_dtype: KvCacheDtype = key(
        "auto",
        "fp8: keys and values in 8 bits with a scale for each vector; about twice as many"
        " positions fit as in bfloat16, and results differ (docs/quantization.md). auto: the"
        " dtype of activations.",
        defines_pipeline=True,
    )
    threads_per_stage: SmallInt | None = key(
        None,
        "CPU threads of a stage, at most the machine's cores. Stages take turns if there are not"
        " enough cores for all.",
        unset="cores / stages; on k8s and cluster-yaml 4, or 1 with --cpu",
        defines_pipeline=True,
    )
    placement_timeout: PositiveSeconds = key(
        60.0,
        "Seconds for which a pipeline waits until the cluster has nodes with enough free"
        " resources. A command does not wait if all nodes together are too small, unless Ray's"
        " autoscaler may add nodes. k8s writes 3600 into its overlays.",
        has_flag=False,
    )
    gpu_memory: Annotated[Numbers, BeforeValidator(parse_gpu_memory)] = key(
        None,
        "Memory of each stage's GPU: 24GiB,24GiB,80GiB in the order of the stages, or one size"
        " for all. With --stages-per-gpu: of each GPU. Without a GPU: the memory that a stage may"
        " use. A GPU never counts for more memory than it has.",
        unset="queried from the GPU",
        metavar="SIZES",
        defines_pipeline=True,
    )
    gpu_speed: Annotated[Numbers, BeforeValidator(parse_gpu_speed)] = key(
        None,
        "Relative speed of each stage's GPU: 1,1,3, or one number for all.",
        unset="measured where nodes have unlike GPUs",
        metavar="LIST",
        defines_pipeline=True,
    )
    stage_times: Annotated[
        tuple[StageTime, ...] | None, BeforeValidator(parse_stage_times_option)
    ] = key(
        None,
        "Stage times, a file that bench --json wrote: layers are balanced over the stages by them.",
        unset="by size",
        metavar="FILE",
        defines_pipeline=True,
        former_names=("measured",),
    )
    link: Link = key(
        "object-store",
        "How hidden states travel between stages: object-store (through Ray) or direct (from stage"
        " to stage).",
        defines_pipeline=True,
    )
    inline_hidden_states_below: Annotated[ByteSize, Field(ge=1, le=2**26)] | None = key(
        None,
        "Hidden states smaller than this are sent inline with the router's calls, larger ones"
        " through Ray's object store. For a cluster that this command starts; the head node of"
        " another cluster sets it.",
        unset="1MiB",
        in_serve_config=False,
        former_names=("inline_limit",),
    )
    step_timeout: PositiveSeconds = key(
        STEP_TIMEOUT_S,
        "Seconds after which a micro-batch that has not returned is abandoned, and every process"
        " is replaced that does not answer or has computed all that time. Never less than four"
        " times the slowest micro-batch so far; four times as long for the first.",
    )


class ExpertKeys(KeyGroup):
    """Experts on separate actors."""

    title = "Expert actors"

    expert_actors: Annotated[int, Field(ge=0, le=2**14)] = key(
        0, "Actors that hold the experts. 0: experts are inside the stages.", defines_pipeline=True
    )
    expert_replicas: Annotated[Literal["auto"] | int, BeforeValidator(parse_expert_replicas)] = key(
        1,
        "Actors that hold each expert. auto: more actors, as memory allows, for experts with more"
        " than 1.5 times the mean load of their layer.",
        metavar="N|auto",
        defines_pipeline=True,
    )
    expert_memory: Annotated[Numbers, BeforeValidator(parse_expert_memory)] = key(
        None,
        "Memory of each expert actor's GPU: 80GiB,40GiB, or one size for all. Without a GPU: the"
        " memory that an actor may use.",
        unset="queried from the GPU",
        metavar="SIZES",
        defines_pipeline=True,
    )
    expert_load: Annotated[ExpertLoad | None, BeforeValidator(parse_load_option)] = key(
        None,
        "A file that tramontane experts --json wrote. Experts are distributed by this load.",
        unset="all experts alike",
        metavar="FILE",
        defines_pipeline=True,
    )
    expert_micro_batches: SmallInt = key(
        2,
        "Micro-batches that a stage keeps open while expert actors work.",
        defines_pipeline=True,
        former_names=("ping_pong",),
    )


class BatchingKeys(KeyGroup):
    """The contents of a micro-batch."""

    title = "Batching"

    max_num_seqs: SmallInt | None = key(
        None,
        "Sequences admitted at once, per pipeline.",
        unset="64 without a GPU; on GPUs up to 256, as memory allows (docs/planning.md)",
        defines_pipeline=True,
    )
    max_num_batched_tokens: Annotated[PositiveInt | None, BeforeValidator(parse_number)] = key(
        None,
        "Tokens in one micro-batch, of which several may be in flight.",
        unset=(
            "512 without a GPU; on GPUs 2048 to 8192, by their speed and memory (docs/planning.md)"
        ),
        metavar="<int>",
    )
    enable_prefix_caching: bool = key(
        True,
        "Reuse the KV cache of shared prompt prefixes (docs/prefix-caching.md). Pages that no"
        " request uses stay cached until they are needed.",
    )
    async_scheduling: bool = key(
        True,
        "Submit the next step before the tokens of the last one are known, if that hides enough"
        " time (docs/async-scheduling.md). Only for pipelines of one stage, or of stages that"
        " share one GPU, without expert actors, speculation or max_in_flight, and only with Ray.",
    )
    speculative_config: Annotated[
        SpeculativeConfig | None, BeforeValidator(parse_speculative_config)
    ] = key(
        None,
        'Speculative decoding (docs/speculation.md), as JSON with vLLM\'s keys: {"method":'
        ' "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 5},'
        ' or "method": "draft_model" with the folder of a draft model as "model". It changes no'
        " token. A sequence drafts while stages would otherwise wait, and as long as its drafts"
        " are accepted.",
        unset="off",
        metavar="JSON",
        defines_pipeline=True,
    )
    max_in_flight: SmallInt | None = key(
        None, "Micro-batches in flight.", unset="measured; starts at stages + 1", has_flag=False
    )
    itl_target_ms: Annotated[float, Field(gt=0)] | None = key(
        None,
        "Target for the time between a sequence's tokens, in milliseconds: prefill chunks are"
        " made small enough to meet it, as far as stage times can be predicted, which costs"
        " throughput. Decodes alone may take longer.",
        unset="no target",
    )


class RunKeys(KeyGroup):
    """A run that ends by itself, rather than a server."""

    title = "Run"

    local: bool = key(
        False,
        "Run all stages in one process without Ray. Not with --address, --link direct or"
        " --expert-actors; not for serve.",
        in_serve_config=False,
    )
    seed: int = key(
        0,
        "Seed of sampling, and of bench's prompts. Over HTTP it is random.",
        in_serve_config=False,
    )
    json_output: bool = key(
        False,
        "Write machine-readable output to standard output.",
        alias="json",
        in_serve_config=False,
    )
