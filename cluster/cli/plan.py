"""``tramontane plan``: the contents of each stage, before any machine is bought, checkpoint
downloaded or process started.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from tramontane.cluster.cli.plan_tables import (
    DraftModelReport,
    show_draft_model,
    show_experts,
    show_plan,
)
from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.config.key import expand_home, for_each_expert_actor
from tramontane.cluster.config.measurements import per_expert
from tramontane.cluster.console.options import (
    ConfigDefaults,
    Json,
    given_keys,
    is_from_file,
    key_option,
    option,
    with_options,
)
from tramontane.cluster.planning.batch_limits import (
    Limits,
    least_limits,
    matrix_tflops,
    with_chosen_limits,
)
from tramontane.cluster.planning.capacity import (
    plan_as_data,
    relative_times,
    suggest_fixes,
)
from tramontane.cluster.planning.expert_planner import ExpertPlanReport, ExpertRequest, report
from tramontane.cluster.planning.ingresses import choose_num_ingresses, describe_ingresses
from tramontane.cluster.planning.planner import (
    PlanRequest,
    StageBudget,
    TooLittleMemoryError,
    layer_costs,
    make_plan,
)
from tramontane.cluster.planning.runtime_memory import config_runtime
from tramontane.proto.end_tokens import NOTHING_ENDS
from tramontane.proto.errors import CheckpointError, ConfigError, PlanError
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.model_folder import resolve_model_args
from tramontane.proto.plan import PipelinePlan
from tramontane.proto.presets import PRESETS
from tramontane.proto.units import format_bytes

if TYPE_CHECKING:
    from tramontane.cluster.planning.hardware import Gpu, Hardware

MAX_GPUS = 2**14
KEYS = (
    *(
        "stages_per_gpu",
        "gpu_speed",
        "dtype",
        "quantize",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
    ),
    *("page_size", "kv_cache_dtype", "speculative_config"),
    *("stage_times", "expert_actors", "expert_memory", "expert_replicas", "expert_load"),
)
ONLY_FOR_EXPERT_ACTORS = ("expert_memory", "expert_replicas", "expert_load")


@with_options(*KEYS, config=ConfigDefaults)
def plan(
    context: typer.Context,
    model: Annotated[
        Path, key_option("model", help=f"Checkpoint folder, or one of {', '.join(PRESETS)}.")
    ],
    gpu_memory: Annotated[
        str | None,
        key_option(
            "gpu_memory",
            help="Memory of each GPU: 80GiB for all, or one size per GPU: 24GiB,24GiB,80GiB. "
            "Default: of this machine's GPUs, or its free memory.",
        ),
    ] = None,
    stages: Annotated[
        int | None,
        key_option(
            "stages", help="Pipeline depth. Default: one per GPU, or as --stages-per-gpu says."
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        option(
            "--gpus",
            help="Number of GPUs. Default: as many as --stages needs, or --gpu-memory has sizes.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show how a model would be split over GPUs, from its configuration alone."""
    args = resolve_model_args(expand_home(model))  # a --config file may have ~
    if not args.eos_token_ids:
        Console(stderr=True, highlight=False).print(f"note: {NOTHING_ENDS % model}", soft_wrap=True)
    if problem := _problem_of_weights(expand_home(model), args):
        note = (
            "note: the plan is of the configuration alone; with these weights no server would "
            f"start: {problem}"
        )
        Console(stderr=True, highlight=False).print(note, soft_wrap=True, markup=False)
    settings = _settings(context, gpus)
    here = None
    if settings.gpu_memory is None:
        settings, here = _with_memory_here(settings, gpus)
    if stages is not None and gpus is not None and is_from_file(context, "stages"):
        settings = settings.model_copy(update={"stages": None})  # the flag overrides the file
    memories, speeds = _gpus(settings, gpus)
    budgets = _stage_budgets(settings, memories, speeds, here)
    args.check_num_stages(
        len(budgets),
        _describe_stages(len(budgets), settings.stages_per_gpu, here is None or bool(here.gpus)),
    )
    dtype = args.dtype if settings.dtype == "auto" else settings.dtype
    experts = _plan_experts(args, settings, dtype)
    pipeline, budgets = _plan_stages(settings, args, budgets, here, experts_inside=experts is None)
    times = relative_times(
        layer_costs(args, experts is None, settings.stage_times), pipeline, budgets
    )
    drafting = _plan_draft_model(settings, model, args, pipeline, memories, here)
    # by the number of cores, which is known here
    num_ingresses = None if here is None else choose_num_ingresses(settings, pipeline, here)
    index_bytes = _index_bytes(settings, pipeline)
    if as_json:
        parameters = {
            "parameters": args.num_parameters,
            "active_parameters": args.num_active_parameters,
        }
        data = parameters | plan_as_data(pipeline, budgets, times, experts, index_bytes)
        data |= {"ingress_replicas": num_ingresses, "draft_model": drafting and drafting.as_data()}
        print(json.dumps(data))
        return
    console = Console(highlight=False)
    show_plan(console, str(model), args, pipeline, budgets, times)
    if num_ingresses is not None and num_ingresses != settings.num_ingresses:
        console.print(describe_ingresses(settings, pipeline, num_ingresses), soft_wrap=True)
    if index_bytes:
        size = format_bytes(index_bytes)
        console.print(
            f"the router keeps indexes of n-grams for drafts, up to {size} of its machine's memory",
            soft_wrap=True,
        )
    if drafting is not None:
        show_draft_model(console, drafting)
    if experts is not None:
        show_experts(console, experts)


def _index_bytes(settings: EngineConfig, plan: PipelinePlan) -> int:
    """Return the size of the router's index for drafts from the text."""
    drafts = settings.speculative_config
    return 0 if drafts is None else drafts.index_bytes(plan.max_num_seqs, plan.max_model_len)


def _problem_of_weights(folder: Path, args: ModelArgs) -> str:
    """Return the fault of the weights in a folder, by their headers, or ""."""
    if not (folder.is_dir() and any(folder.glob("*.safetensors*"))):
        return ""
    from tramontane.workers.weights.checkpoint import Checkpoint  # imports NumPy

    try:
        Checkpoint(folder).check(args)
    except CheckpointError as error:
        return str(error)
    return ""


def _describe_stages(num_stages: int, per_gpu: int, has_gpus: bool) -> str:
    """Return ``8 GPUs would be 16 stages``."""
    what = f"{num_stages // per_gpu} GPUs would be {num_stages} stages"
    return what if has_gpus else f"there would be {num_stages} stages"


def _settings(context: typer.Context, gpus: int | None) -> EngineConfig:
    """Return the validated options. Raises ConfigError, also for options of expert actors without
    expert actors.
    """
    if gpus is not None and not 1 <= gpus <= MAX_GPUS:
        raise ConfigError(f"--gpus is {gpus}; it must be at least 1 and at most {MAX_GPUS}")
    keys: dict[str, Any] = given_keys(context)
    if not keys["expert_actors"] and (
        wrong := [name for name in ONLY_FOR_EXPERT_ACTORS if keys[name] is not None]
    ):
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
        raise ConfigError(
            f"{flags}: only for experts on actors of their own; give --expert-actors as well"
        )
    return EngineConfig.build(None, keys | {"load_format": "dummy"})  # weights are not needed


def _with_memory_here(settings: EngineConfig, gpus: int | None) -> tuple[EngineConfig, "Hardware"]:
    """Add the memory of this machine's GPUs, or each stage's share of its free memory, and print a
    note about it.
    """
    # imports Ray, which no other plan needs
    from tramontane.cluster.planning.hardware import probe_local

    hardware = probe_local()
    per_slot = hardware.stages_per_slot(settings.stages_per_gpu)
    if hardware.gpus:
        needed = settings.stages and -(-settings.stages // per_slot) + settings.num_draft_models
        num_gpus = gpus or needed
        memories = tuple(gpu.memory for gpu in hardware.gpus)[:num_gpus]
        sizes = ", ".join(map(_describe_memory, hardware.gpus[: len(memories)]))
        source = f"{len(memories)} of this machine's {len(hardware.gpus)} GPUs: {sizes}"
    else:
        num_stages = settings.stages or gpus or hardware.default_stage_count()
        share = hardware.stage_memory(num_stages + settings.num_draft_models)
        memories = (share,) * num_stages
        each, free = (format_bytes(memories[0] * number) for number in (1, num_stages))
        source = f"one stage with this machine's {free} of free memory, as it has no GPU"
        if num_stages > 1:
            source = (
                f"{num_stages} stages that share this machine's {free} of free memory, "
                f"{each} each, as it has no GPU"
            )
    Console(stderr=True, highlight=False).print(
        f"note: without --gpu-memory the plan is for {source}", soft_wrap=True
    )
    given = {"gpu_memory": memories, "stages_per_gpu": per_slot}
    return settings.model_copy(update=given), hardware


def _describe_memory(gpu: "Gpu") -> str:
    """Return ``30 GiB``, or ``30 GiB (other processes hold 50 GiB)``."""
    held = f" (other processes hold {format_bytes(gpu.held)})" if gpu.held else ""
    return f"{format_bytes(gpu.memory)}{held}"


def _make_plan(args: ModelArgs, request: PlanRequest, stages_per_gpu: int | None) -> PipelinePlan:
    """Make the plan. Raises PlanError, which suggests fixes if there is too little memory."""
    try:
        return make_plan(args, request)
    except TooLittleMemoryError as error:
        raise PlanError(f"{error}; {suggest_fixes(args, request, stages_per_gpu)}") from error


def _plan_stages(
    settings: EngineConfig,
    args: ModelArgs,
    budgets: tuple[StageBudget, ...],
    here: "Hardware | None",
    *,
    experts_inside: bool,
) -> tuple[PipelinePlan, tuple[StageBudget, ...]]:
    """Return the plan, and the budgets with the other GPU memory of a stage. ``here``: this
    machine, if the plan is for it.
    """
    dtype, has_gpus = (
        args.dtype if settings.dtype == "auto" else settings.dtype,
        here is None or bool(here.gpus),
    )

    def request_for(limits: Limits) -> PlanRequest:
        runtime = (
            config_runtime(settings, args, dtype, *limits, experts_inside=experts_inside)
            if has_gpus
            else None
        )
        return PlanRequest(
            tuple(replace(budget, runtime=runtime) for budget in budgets),
            dtype,
            settings.max_model_len or args.max_seq_len,
            limits.num_seqs,
            settings.page_size,
            quantize=settings.quantize,
            experts_inside=experts_inside,
            stage_times=settings.stage_times,
            num_drafts=settings.num_drafts,
            kv_cache_dtype=settings.kv_cache_dtype,
            max_num_batched_tokens=limits.num_tokens,
            panel_rows=1 if here is None or has_gpus else here.panel_rows,
        )

    plan = _make_plan(
        args, request_for(least_limits(settings)), settings.stages_per_gpu if has_gpus else None
    )
    if has_gpus:
        tflops = None if here is None else matrix_tflops(gpu.name for gpu in here.gpus)
        plan = with_chosen_limits(settings, args, plan, request_for, tflops)
    return plan, request_for(Limits(plan.max_num_seqs, plan.max_num_batched_tokens)).budgets


def _gpus(settings: EngineConfig, gpus: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the memory and the speed of each GPU. Raises ConfigError if their numbers differ. A
    draft model may have one more than the stages need.
    """
    memories, per_gpu, stages = settings.gpu_memory or (), settings.stages_per_gpu, settings.stages
    needed = None if stages is None else math.ceil(stages / per_gpu)
    offered = () if needed is None else (needed, needed + settings.num_draft_models)
    if offered and gpus is not None and gpus not in offered:
        raise ConfigError(
            f"--gpus is {gpus}, and --stages {stages} with --stages-per-gpu {per_gpu} needs "
            f"{needed}; give one of both"
        )
    source, given = ("--stages", needed) if gpus is None else ("--gpus", gpus)
    if len(memories) == 1:
        memories *= given or 1
    elif gpus is None and len(memories) in offered:
        given = len(memories)
    speeds = settings.gpu_speed or (1,) * len(memories)
    for name, number in (
        (source, len(memories) if given is None else given),
        ("--gpu-speed", len(speeds)),
    ):
        if number != len(memories):
            raise ConfigError(
                f"{name} is for {number} GPUs, and --gpu-memory for {len(memories)}; "
                "give as many of each"
            )
    return memories, speeds


def _offered(memories: Sequence[int], here: "Hardware | None") -> "Hardware":
    """Return this machine if the plan is for it and it has no GPU, else GPUs with this memory, each
    on a separate node.
    """
    from tramontane.cluster.planning.hardware import Gpu, Hardware  # imports Ray

    if here is not None and not here.gpus:
        return here
    found = tuple(Gpu("GPU", memory, node=str(node)) for node, memory in enumerate(memories))
    return Hardware((1,) * len(found), tuple(memories), found)


def _stage_budgets(
    settings: EngineConfig,
    memories: Sequence[int],
    speeds: Sequence[int],
    here: "Hardware | None",
) -> tuple[StageBudget, ...]:
    """Return each stage's memory: half of a GPU with 2 stages per GPU. Of 5 stages the third GPU
    has one.

    Without the draft model's memory: the smallest GPU, or a part of the last one.
    """
    shared = [*zip(memories, speeds, strict=True)]
    if settings.num_draft_models and (here is None or here.gpus):
        from tramontane.cluster.planning.gpu_placement import DRAFT_PART, draft_shares_gpu

        last, speed = shared[-1]
        without_experts = settings.model_copy(update={"expert_actors": 0})
        if draft_shares_gpu(without_experts, _offered(memories, here)):
            shared[-1] = last * (DRAFT_PART - 1) // DRAFT_PART, speed
        else:
            del shared[min(range(len(shared)), key=lambda gpu: (shared[gpu][0], -gpu))]
    per_gpu = settings.stages_per_gpu
    budgets = [StageBudget(memory // per_gpu, speed) for memory, speed in shared]
    return tuple(budget for budget in budgets for _ in range(per_gpu))[: settings.stages]


def _plan_draft_model(
    settings: EngineConfig,
    model: Path,
    args: ModelArgs,
    target: PipelinePlan,
    memories: Sequence[int],
    here: "Hardware | None",
) -> DraftModelReport | None:
    """Return the plan of the draft model; None without a draft model. Raises ConfigError if it does
    not match the model, and PlanError if it has too little memory.
    """
    drafts = settings.speculative_config
    if drafts is None or not settings.num_draft_models:
        return None
    from tramontane.cluster.pipeline.draft_model import plan_draft_model, validate_draft_model
    from tramontane.cluster.planning.gpu_placement import draft_shares_gpu

    # expert actors have a memory of their own, --expert-memory
    settings = settings.model_copy(update={"model": expand_home(model), "expert_actors": 0})
    own, offered = validate_draft_model(settings, args), _offered(memories, here)
    stage = plan_draft_model(settings, own, target, offered)
    shares = draft_shares_gpu(settings, offered)
    return DraftModelReport(drafts.model, stage, shares)


def _plan_experts(args: ModelArgs, settings: EngineConfig, dtype: str) -> ExpertPlanReport | None:
    """Return the plan of the expert actors; None if experts stay inside the stages."""
    if not settings.expert_actors:
        return None
    if settings.expert_memory is None:
        raise ConfigError(
            "--expert-actors needs --expert-memory, which is the memory of each of them, "
            "such as 80GiB"
        )
    budgets = tuple(
        map(StageBudget, for_each_expert_actor(settings.expert_memory, settings.expert_actors))
    )
    replicas = None if settings.expert_replicas == "auto" else settings.expert_replicas
    loads = None if settings.expert_load is None else per_expert(settings.expert_load)
    return report(args, ExpertRequest(budgets, dtype, settings.quantize, replicas, loads))
