"""``tramontane plan``: what each stage would hold, before anything is bought, downloaded or
started.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

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
    LENGTHS,
    max_length_in_slots,
    num_seqs_in_pages,
    pipeline_capacity,
    plan_as_data,
    relative_times,
    stage_capacity,
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
from tramontane.cluster.planning.runtime_memory import RuntimeMemory, config_runtime
from tramontane.proto.end_tokens import NOTHING_ENDS
from tramontane.proto.errors import CheckpointError, ConfigError, PlanError
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.model_folder import resolve_model_args
from tramontane.proto.plan import PipelinePlan
from tramontane.proto.presets import PRESETS
from tramontane.proto.units import GIB, format_bytes

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
    *("measured", "expert_actors", "expert_memory", "expert_replicas", "expert_load"),
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
    settings = _settings(context)
    if gpus is not None and not 1 <= gpus <= MAX_GPUS:
        raise ConfigError(f"--gpus is {gpus}; it must be at least 1 and at most {MAX_GPUS}")
    here = None
    if settings.gpu_memory is None:
        settings, here = _with_memory_here(settings, gpus)
    if stages is not None and gpus is not None and is_from_file(context, "stages"):
        settings = settings.model_copy(update={"stages": None})  # the flag overrides the file
    budgets = _stage_budgets(settings, gpus)
    args.check_num_stages(
        len(budgets),
        _describe_stages(len(budgets), settings.stages_per_gpu, here is None or bool(here.gpus)),
    )
    dtype = args.dtype if settings.dtype == "auto" else settings.dtype
    experts = _plan_experts(args, settings, dtype)
    pipeline, budgets = _plan_stages(settings, args, budgets, here, experts_inside=experts is None)
    times = relative_times(layer_costs(args, experts is None, settings.measured), pipeline, budgets)
    drafts = settings.speculative_config
    index_bytes = (
        0 if drafts is None else drafts.index_bytes(pipeline.max_num_seqs, pipeline.max_model_len)
    )
    # by the cores, which are known here
    num_ingresses = None if here is None else choose_num_ingresses(settings, pipeline, here)
    if as_json:
        parameters = {
            "parameters": args.num_parameters,
            "active_parameters": args.num_active_parameters,
        }
        data = parameters | plan_as_data(pipeline, budgets, times, experts, index_bytes)
        print(json.dumps(data | {"ingress_replicas": num_ingresses}))
        return
    console = Console(highlight=False)
    _show(console, str(model), args, pipeline, budgets, times)
    if num_ingresses is not None and num_ingresses != settings.num_ingresses:
        console.print(describe_ingresses(settings, pipeline, num_ingresses), soft_wrap=True)
    if index_bytes:
        size = format_bytes(index_bytes)
        console.print(
            f"the router keeps indexes of n-grams for drafts, up to {size} of its machine's memory",
            soft_wrap=True,
        )
    if experts is not None:
        _show_experts(console, experts)


def _problem_of_weights(folder: Path, args: ModelArgs) -> str:
    """Return the fault of the weights in a folder, by their headers, or nothing."""
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


def _settings(context: typer.Context) -> EngineConfig:
    """Return the validated options. Raises ConfigError for expert actors where there are none."""
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
    """Add the memory of this machine's GPUs, or what each stage may use of its free memory, and
    print a note about it.
    """
    # imports Ray, which no other plan needs
    from tramontane.cluster.planning.hardware import probe_local

    hardware = probe_local()
    per_slot = hardware.stages_per_slot(settings.stages_per_gpu)
    if hardware.gpus:
        num_gpus = gpus or (settings.stages and -(-settings.stages // per_slot))
        memories = tuple(gpu.memory for gpu in hardware.gpus)[:num_gpus]
        sizes = ", ".join(map(_describe_memory, hardware.gpus[: len(memories)]))
        source = f"{len(memories)} of this machine's {len(hardware.gpus)} GPUs: {sizes}"
    else:
        num_stages = settings.stages or gpus or hardware.default_stage_count()
        memories = (hardware.stage_memory(num_stages),) * num_stages
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


def _size(num_bytes: float) -> str:
    """Return the number of GiB, or a smaller size with its unit."""
    return f"{num_bytes / GIB:.2f}" if num_bytes >= GIB else format_bytes(num_bytes)


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
    """Return the plan, and the budgets with what else a stage takes of a GPU. ``here``: this
    machine, if it is planned for.
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
            measured=settings.measured,
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


def _stage_budgets(settings: EngineConfig, gpus: int | None) -> tuple[StageBudget, ...]:
    """Return each stage's memory: half of a GPU with 2. Of 5 stages the third GPU has one."""
    memories, per_gpu, stages = settings.gpu_memory or (), settings.stages_per_gpu, settings.stages
    needed = None if stages is None else math.ceil(stages / per_gpu)
    if None not in (gpus, needed) and gpus != needed:
        raise ConfigError(
            f"--gpus is {gpus}, and --stages {stages} with --stages-per-gpu {per_gpu} needs "
            f"{needed}; give one of both"
        )
    source, given = ("--stages", needed) if gpus is None else ("--gpus", gpus)
    if len(memories) == 1:
        memories *= given or 1
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
    budgets = [
        StageBudget(memory // per_gpu, speed)
        for memory, speed in zip(memories, speeds, strict=True)
    ]
    return tuple(budget for budget in budgets for _ in range(per_gpu))[:stages]


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


def _show(
    console: Console,
    model: str,
    args: ModelArgs,
    plan: PipelinePlan,
    budgets: tuple[StageBudget, ...],
    times: Sequence[float],
) -> None:
    has_windows = any(args.windows)
    capacities = [
        stage_capacity(stage, budget) for stage, budget in zip(plan.stages, budgets, strict=True)
    ]
    lengths = [f"{each.length // 1024}k" for each in capacities[0]]
    table = Table("stage", "layers", "GiB", "weights", "cache", *lengths)
    for stage, budget, row in zip(plan.stages, budgets, capacities, strict=True):
        counts = (
            f"{c.num_seqs} ({c.num_seqs_without_windows})" if has_windows else str(c.num_seqs)
            for c in row
        )
        sizes = map(_size, (budget.memory, stage.packed_bytes, stage.cache_bytes))
        table.add_row(
            f"{stage.stage_id + 1}/{len(budgets)}",
            f"{stage.first_layer}-{stage.last_layer - 1}",
            *sizes,
            *counts,
        )
    of_all = pipeline_capacity(plan)
    totals = map(sum, zip(*((s.packed_bytes, s.cache_bytes) for s in plan.stages), strict=True))
    memory = sum(budget.memory for budget in budgets)
    counts = (str(of_all.get(each.length, "")) for each in capacities[0])
    table.add_row("all", f"0-{args.n_layers - 1}", _size(memory), *map(_size, totals), *counts)
    console.print(table)
    if lengths:
        brackets = " (in brackets: if every layer kept all positions)" if has_windows else ""
        explained = (
            f"columns {', '.join(lengths)}: how many sequences of so many tokens fit next to a "
            f"stage's weights{brackets}"
        )
        console.print(f"{explained}; row all: into the planned pages", soft_wrap=True)
    if (runtime := budgets[0].runtime) is not None:
        _show_runtime(console, runtime, budgets)
    for choice in plan.chosen:
        console.print(choice.describe(), soft_wrap=True)
    formats = plan.stages[0].weight_format
    matrices = formats.quantize or formats.matrix_dtype
    weights = (
        formats.dtype if matrices == formats.dtype else f"{formats.dtype}, matrices in {matrices}"
    )
    console.print(f"{model}: {_parameters(args)}", soft_wrap=True, markup=False)
    if plan.stages[0].kv_cache_dtype != "auto":
        weights += f", keys and values in {plan.stages[0].kv_cache_dtype}"
    console.print(
        f"in {weights}, contexts of {plan.max_model_len} tokens; {_pages(plan)}",
        soft_wrap=True,
        markup=False,
    )
    each = ", ".join(f"{time:.2f}" for time in times)
    console.print(
        f"time of a micro-batch, relative to the mean of the stages: {each}", soft_wrap=True
    )
    console.print(_at_once(plan), soft_wrap=True)


def _show_runtime(console: Console, runtime: RuntimeMemory, budgets: Sequence[StageBudget]) -> None:
    """Show what a stage's process takes besides weights and cache, and what is left where a tenth
    of the memory is more.
    """
    table = Table("besides weights and cache", "each stage")
    for name, num_bytes in runtime.as_data().items():
        table.add_row("all" if name == "total" else name, _size(num_bytes))
    spare = [budget.memory - budget.usable - runtime.total for budget in budgets]
    each = sorted(
        {_size(least) for least in (min(spare), max(spare))},
        key=lambda size: size != _size(min(spare)),
    )
    table.add_row("kept free", " to ".join(each))
    console.print(table)


def _parameters(args: ModelArgs) -> str:
    """Describe their number: ``46.7 billion parameters, of which 12.9 billion compute a token``."""
    total, active = (number / 1e9 for number in (args.num_parameters, args.num_active_parameters))
    digits = 1 if total > 1 else 3
    of_experts = f", of which {active:.{digits}f} billion compute a token" if args.moe else ""
    return f"{total:.{digits}f} billion parameters{of_experts}"


def _pages(plan: PipelinePlan) -> str:
    """Describe the cache: ``16448 pages of 16 tokens in layers with a sliding window of 4096``."""
    if len(plan.cache.classes) == 1 and plan.cache.classes[0].window is None:
        return (
            f"a cache of {plan.cache.classes[0].num_pages} pages of {plan.cache.page_size} tokens"
        )
    layers = [
        f"{c.num_pages} pages of {plan.cache.page_size} tokens in layers "
        + (f"with a sliding window of {c.window}" if c.window else "without a sliding window")
        for c in plan.cache.classes
    ]
    return f"a cache of {' and '.join(layers)}"


def _at_once(plan: PipelinePlan) -> str:
    """Describe how many sequences fit at once: one per slot, or as many long ones as pages hold."""
    num_slots, length = plan.max_num_seqs, max_length_in_slots(plan)
    sequences = "1 sequence" if num_slots == 1 else f"{num_slots} sequences"
    in_slots = f"at once: {sequences} of up to {length} tokens, one per slot (--max-num-seqs)"
    if length == plan.max_model_len:
        return f"{in_slots}; there are pages for all of them"
    longer = sorted(
        {*(each for each in LENGTHS if length < each < plan.max_model_len), plan.max_model_len}
    )
    return f"{in_slots}; of longer ones as many as the pages hold: " + ", ".join(
        f"{num_seqs_in_pages(plan, each)} of {each} tokens" for each in longer
    )


def _show_experts(console: Console, experts: ExpertPlanReport) -> None:
    table = Table("expert actor", "GiB", "may use", "weights", "experts", "load")
    actors = experts.plan.actors
    for actor, budget, share in zip(actors, experts.budgets, experts.shares, strict=True):
        sizes = map(_size, (budget.memory, budget.usable, actor.weight_bytes))
        table.add_row(
            f"{actor.actor_id + 1}/{actor.num_actors}",
            *sizes,
            str(len(actor.experts)),
            f"{share:.2f} x",
        )
    totals = [
        sum(budget.memory for budget in experts.budgets),
        sum(budget.usable for budget in experts.budgets),
    ]
    totals.append(sum(actor.weight_bytes for actor in actors))
    table.add_row("all", *map(_size, totals), str(sum(len(actor.experts) for actor in actors)), "")
    console.print(table)
    kind = (
        "all experts assumed to be alike"
        if experts.busiest_if_even is None
        else "by the measured load"
    )
    console.print(
        "experts: pairs of a layer and one of its experts; load: relative to the actors' mean, "
        f"{kind}"
    )
    busiest = f"the busiest expert actor does {experts.busiest:.2f} times the mean"
    if experts.busiest_if_even is not None:
        busiest += (
            "; distributed as if all experts were alike it would be "
            f"{experts.busiest_if_even:.2f} times"
        )
    console.print(busiest, soft_wrap=True)
    console.print(_replicas_line(experts), soft_wrap=True)


def _replicas_line(experts: ExpertPlanReport) -> str:
    copies = [number for number in experts.num_copies.values() if number > 1]
    if not copies:
        return f"none of {len(experts.num_copies)} experts has replicas"
    number = str(copies[0]) if min(copies) == max(copies) else f"{min(copies)} to {max(copies)}"
    of_all = f"{len(copies)} of {len(experts.num_copies)} experts"
    return f"{of_all} are on {number} actors each, the others on one"
