"""``tramontane plan``: who would hold what, before anything is bought, downloaded or started."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tramontane.cluster.config.engine_config import MAX_STAGES_PER_GPU
from tramontane.cluster.config.expert_load import per_expert, read_load
from tramontane.cluster.config.parsers import expert_sizes, for_each_expert_actor, gpu_speeds, parse_gpu_memory
from tramontane.cluster.console.options import ConfigDefaults, flag
from tramontane.cluster.planning.capacity import pipeline_capacity, plan_as_data, stage_capacity, suggest_fixes
from tramontane.cluster.planning.expert_planner import ExpertPlanReport, ExpertRequest, report
from tramontane.cluster.planning.planner import PlanRequest, StageBudget, TooLittleMemoryError, make_plan
from tramontane.proto.byte_size import GIB
from tramontane.proto.errors import ConfigError, PlanError
from tramontane.proto.model_args import DTYPE_BYTES, ModelArgs, Quantization
from tramontane.proto.model_folder import resolve_model_args
from tramontane.proto.plan import PipelinePlan
from tramontane.proto.presets import PRESETS

FEW, MANY = 2**14, 2**24  # as ``config.EngineConfig`` bounds them


def plan(
    model: Annotated[str, typer.Option("--model", help=f"Checkpoint folder, or one of {', '.join(PRESETS)}.")],
    gpu_memory: Annotated[str, typer.Option("--gpu-memory", help="Of each GPU: 80GiB, or one per GPU: 24GiB,24GiB,80GiB.")],
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, max=FEW, help="How many.")] = None,
    stages_per_gpu: Annotated[
        int, typer.Option("--stages-per-gpu", min=1, max=MAX_STAGES_PER_GPU, help="Stages that share a GPU.")
    ] = 1,
    gpu_speed: Annotated[str | None, typer.Option("--gpu-speed", help="Relative, one per GPU: 1,1,3.")] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="auto, bfloat16, float16 or float32.")] = "auto",
    quantize: Annotated[Quantization | None, typer.Option("--quantize", help="int8 or fp8: half the memory for weights.")] = None,
    max_model_len: Annotated[int | None, typer.Option("--max-model-len", min=1, max=MANY, help="Positions per sequence.")] = None,
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", min=1, max=FEW, help="Sequences admitted at once.")] = 64,
    page_size: Annotated[int, typer.Option("--page-size", min=1, max=MANY, help="Positions per cache page.")] = 16,
    expert_actors: Annotated[
        int, typer.Option("--expert-actors", min=0, max=FEW, help="Actors that hold the experts, beside the stages' GPUs.")
    ] = 0,
    expert_memory: Annotated[
        str | None, typer.Option("--expert-memory", help="Of each expert actor: 80GiB, or one per actor: 80GiB,40GiB.")
    ] = None,
    expert_replicas: Annotated[
        str | None, typer.Option("--expert-replicas", help="Actors that hold each expert, or auto. Default 1.")
    ] = None,
    expert_load: Annotated[
        Path | None, typer.Option("--expert-load", help="What tramontane experts --json measured: experts are spread by it.")
    ] = None,
    config: ConfigDefaults = None,
    as_json: Annotated[bool, flag("--json", help="Machine-readable output on standard output.")] = False,
) -> None:
    """Show how a model would be split over GPUs, from its configuration alone."""
    args = resolve_model_args(Path(model))
    if dtype != "auto" and dtype not in DTYPE_BYTES:
        raise ConfigError(f"--dtype is {dtype!r}; it must be auto, {', '.join(DTYPE_BYTES)}")
    rooms = _stage_budgets(gpus, gpu_memory, gpu_speed, stages_per_gpu)
    if len(rooms) > args.n_layers:
        many = f"{len(rooms) // stages_per_gpu} GPUs{f' of {stages_per_gpu} stages' if stages_per_gpu > 1 else ''}"
        raise PlanError(f"{many} are too many: the model has {args.n_layers} layers, and no stage may be empty")
    chosen = args.dtype if dtype == "auto" else dtype
    holding = _expert_rooms(expert_actors, expert_memory, expert_replicas, expert_load)
    loads = None if expert_load is None else per_expert(read_load(expert_load))
    wanted = ExpertRequest(holding, chosen, quantize, _replicas(expert_replicas), loads)
    experts = report(args, wanted) if holding else None
    request = PlanRequest(
        rooms,
        chosen,
        max_model_len or args.max_seq_len,
        max_num_seqs,
        page_size,
        quantize=quantize,
        experts_inside=experts is None,
    )
    made = _make_plan(args, request, stages_per_gpu)
    if as_json:
        print(json.dumps(plan_as_data(made, rooms, experts)))
        return
    console = Console(highlight=False)
    _show(console, model, args, made, rooms)
    if experts is not None:
        _show_experts(console, experts)


def _make_plan(args: ModelArgs, request: PlanRequest, together: int) -> PipelinePlan:
    """Raises PlanError, with the ways out where memory is too little."""
    try:
        return make_plan(args, request)
    except TooLittleMemoryError as error:
        raise PlanError(f"{error}; {suggest_fixes(args, request, together)}") from error


def _stage_budgets(gpus: int | None, gpu_memory: str, gpu_speed: str | None, together: int) -> tuple[StageBudget, ...]:
    """Of each stage: 80 GiB and 2 together are two of 40 GiB."""
    memories = parse_gpu_memory(gpu_memory) or ()
    if len(memories) == 1:
        memories *= 1 if gpus is None else max(gpus, 0)
    speeds = gpu_speeds(gpu_speed) or (1,) * len(memories)
    for name, number in (("--gpus", len(memories) if gpus is None else gpus), ("--gpu-speed", len(speeds))):
        if number != len(memories) or number < 1:
            raise ConfigError(f"{name} is for {number} GPUs, and --gpu-memory for {len(memories)}; give as many of each")
    each = [StageBudget(memory // together, speed) for memory, speed in zip(memories, speeds, strict=True)]
    return tuple(room for room in each for _ in range(together))


def _expert_rooms(num_actors: int, memory: str | None, replicas: str | None, load: Path | None) -> tuple[StageBudget, ...]:
    """Of the expert actors; none where experts stay inside the stages."""
    if not num_actors:
        given = {"--expert-memory": memory, "--expert-replicas": replicas, "--expert-load": load}
        if wrong := [name for name, value in given.items() if value is not None]:
            raise ConfigError(f"{', '.join(wrong)}: only for experts on actors of their own; give --expert-actors as well")
        return ()
    sizes = expert_sizes(memory)
    if sizes is None:
        raise ConfigError("--expert-actors needs --expert-memory, which says what each of them has, such as 80GiB")
    return tuple(StageBudget(size) for size in for_each_expert_actor(sizes, num_actors))


def _replicas(given: str | None) -> int | None:
    """None for auto, as ``ExpertRequest`` has it."""
    if given == "auto":
        return None
    if given is not None and not (given.isdecimal() and int(given) >= 1):
        raise ConfigError(f"--expert-replicas is {given!r}; it must be a whole number from 1, or auto")
    return int(given or 1)


def _show(console: Console, model: str, args: ModelArgs, made: PipelinePlan, rooms: tuple[StageBudget, ...]) -> None:
    windowed = any(args.windows)
    held = [stage_capacity(stage, room, made.cache.page_size) for stage, room in zip(made.stages, rooms, strict=True)]
    table = Table("stage", "layers", "GiB", "weights", "cache", *(f"{each.length // 1024}k" for each in held[0]))
    for stage, room, row in zip(made.stages, rooms, held, strict=True):
        counts = (f"{h.num_seqs} ({h.num_seqs_without_windows})" if windowed else str(h.num_seqs) for h in row)
        sizes = (f"{size / GIB:.2f}" for size in (room.memory, stage.weight_bytes, stage.cache_bytes))
        table.add_row(f"{stage.stage_id + 1}/{len(rooms)}", f"{stage.first_layer}-{stage.last_layer - 1}", *sizes, *counts)
    together = pipeline_capacity(made)
    totals = (sum(sizes) / GIB for sizes in zip(*((s.weight_bytes, s.cache_bytes) for s in made.stages), strict=True))
    memory = sum(room.memory for room in rooms) / GIB
    counts = (str(together.get(each.length, "")) for each in held[0])
    table.add_row("all", f"0-{args.n_layers - 1}", f"{memory:.2f}", *(f"{total:.2f}" for total in totals), *counts)
    console.print(table)
    if held[0]:
        lengths = ", ".join(f"{each.length // 1024}k" for each in held[0])
        console.print(f"under {lengths}: how many sequences of so many tokens fit beside a stage's weights", end="")
        console.print(" (in brackets: if every layer kept all positions)" if windowed else "", end="")
        console.print("; of all, into the pages that are planned")
    pages = ", ".join(f"{c.num_pages} pages for window {c.window or 'none'}" for c in made.cache.classes)
    chosen, quantize = made.stages[0].dtype, made.stages[0].quantize
    weights = f"{chosen}, weights in {quantize}" if quantize else chosen
    console.print(
        f"{model} in {weights}, contexts of {made.max_model_len}: "
        f"{made.max_num_seqs} sequence{'s' * (made.max_num_seqs > 1)} at once; {pages}",
        soft_wrap=True,
    )


def _show_experts(console: Console, experts: ExpertPlanReport) -> None:
    table = Table("expert actor", "GiB", "may use", "weights", "experts", "load")
    actors = experts.plan.actors
    for actor, room, share in zip(actors, experts.budgets, experts.shares, strict=True):
        sizes = (f"{size / GIB:.2f}" for size in (room.memory, room.usable, actor.weight_bytes))
        table.add_row(f"{actor.actor_id + 1}/{actor.num_actors}", *sizes, str(len(actor.experts)), f"{share:.2f} x")
    totals = [sum(room.memory for room in experts.budgets), sum(room.usable for room in experts.budgets)]
    totals.append(sum(actor.weight_bytes for actor in actors))
    table.add_row("all", *(f"{total / GIB:.2f}" for total in totals), str(sum(len(actor.experts) for actor in actors)), "")
    console.print(table)
    kind = "all experts assumed to be alike" if experts.busiest_if_even is None else "by the measured load"
    console.print(f"experts: pairs of a layer and one of its experts; load: of the actors' mean, {kind}")
    busiest = f"the busiest expert actor does {experts.busiest:.2f} times the mean"
    if experts.busiest_if_even is not None:
        busiest += f"; spread as if all experts were alike it would be {experts.busiest_if_even:.2f} times"
    console.print(busiest, soft_wrap=True)
    console.print(_replicas_line(experts), soft_wrap=True)


def _replicas_line(experts: ExpertPlanReport) -> str:
    copies = [number for number in experts.num_copies.values() if number > 1]
    if not copies:
        return f"none of {len(experts.num_copies)} experts has replicas"
    number = str(copies[0]) if min(copies) == max(copies) else f"{min(copies)} to {max(copies)}"
    return f"{len(copies)} of {len(experts.num_copies)} experts are on {number} actors each, the others on one"
