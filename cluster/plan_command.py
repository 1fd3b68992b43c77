"""``tramontane plan``: who would hold what, before anything is bought, downloaded or started."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tramontane.cluster.capacity import held_by, held_together, plan_as_data, ways_out
from tramontane.cluster.config import gpu_sizes, gpu_speeds
from tramontane.cluster.planner import GIB, PlanRequest, StageRoom, TooLittleMemoryError, make_plan
from tramontane.proto.errors import ConfigError, PlanError
from tramontane.proto.model_args import DTYPE_BYTES, ModelArgs, Quantization
from tramontane.proto.model_folder import find_model_args
from tramontane.proto.plan import ClusterPlan
from tramontane.proto.presets import PRESETS

FEW, MANY = 2**14, 2**24  # as ``config.EngineConfig`` bounds them


def plan(
    model: Annotated[str, typer.Option("--model", help=f"Checkpoint folder, or one of {', '.join(PRESETS)}.")],
    gpu_memory: Annotated[str, typer.Option("--gpu-memory", help="Of each GPU: 80GiB, or one per GPU: 24GiB,24GiB,80GiB.")],
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, max=FEW, help="How many; one stage each.")] = None,
    gpu_speed: Annotated[str | None, typer.Option("--gpu-speed", help="Relative, one per GPU: 1,1,3.")] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="auto, bfloat16, float16 or float32.")] = "auto",
    quantize: Annotated[Quantization | None, typer.Option("--quantize", help="int8: half the memory for weights.")] = None,
    max_model_len: Annotated[int | None, typer.Option("--max-model-len", min=1, max=MANY, help="Positions per sequence.")] = None,
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", min=1, max=FEW, help="Sequences admitted at once.")] = 64,
    page_size: Annotated[int, typer.Option("--page-size", min=1, max=MANY, help="Positions per cache page.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output on standard output.")] = False,
) -> None:
    """Show how a model would be split over GPUs, from its configuration alone."""
    args = find_model_args(Path(model))
    if dtype != "auto" and dtype not in DTYPE_BYTES:
        raise ConfigError(f"--dtype is {dtype!r}; it must be auto, {', '.join(DTYPE_BYTES)}")
    rooms = _rooms(gpus, gpu_memory, gpu_speed)
    if len(rooms) > args.n_layers:
        raise PlanError(f"{len(rooms)} GPUs are too many: the model has {args.n_layers} layers, and no stage may be empty")
    chosen = args.dtype if dtype == "auto" else dtype
    request = PlanRequest(rooms, chosen, max_model_len or args.max_seq_len, max_num_seqs, page_size, quantize=quantize)
    try:
        made = make_plan(args, request)
    except TooLittleMemoryError as error:
        raise PlanError(f"{error}; {ways_out(args, request)}") from error
    if as_json:
        print(json.dumps(plan_as_data(made, rooms)))
    else:
        _show(model, args, made, rooms)


def _rooms(gpus: int | None, gpu_memory: str, gpu_speed: str | None) -> tuple[StageRoom, ...]:
    memories = gpu_sizes(gpu_memory) or ()
    if len(memories) == 1:
        memories *= 1 if gpus is None else max(gpus, 0)
    speeds = gpu_speeds(gpu_speed) or (1,) * len(memories)
    for name, number in (("--gpus", len(memories) if gpus is None else gpus), ("--gpu-speed", len(speeds))):
        if number != len(memories) or number < 1:
            raise ConfigError(f"{name} is for {number} GPUs, and --gpu-memory for {len(memories)}; give as many of each")
    return tuple(StageRoom(memory, speed) for memory, speed in zip(memories, speeds, strict=True))


def _show(model: str, args: ModelArgs, made: ClusterPlan, rooms: tuple[StageRoom, ...]) -> None:
    windowed = any(args.windows)
    held = [held_by(stage, room, made.cache.page_size) for stage, room in zip(made.stages, rooms, strict=True)]
    table = Table("stage", "layers", "GiB", "weights", "cache", *(f"{each.length // 1024}k" for each in held[0]))
    for stage, room, row in zip(made.stages, rooms, held, strict=True):
        counts = (f"{h.num_seqs} ({h.num_seqs_without_windows})" if windowed else str(h.num_seqs) for h in row)
        sizes = (f"{size / GIB:.2f}" for size in (room.memory, stage.weight_bytes, stage.cache_bytes))
        table.add_row(f"{stage.stage_id + 1}/{len(rooms)}", f"{stage.first_layer}-{stage.last_layer - 1}", *sizes, *counts)
    together = held_together(made)
    totals = (sum(sizes) / GIB for sizes in zip(*((s.weight_bytes, s.cache_bytes) for s in made.stages), strict=True))
    memory = sum(room.memory for room in rooms) / GIB
    counts = (str(together.get(each.length, "")) for each in held[0])
    table.add_row("all", f"0-{args.n_layers - 1}", f"{memory:.2f}", *(f"{total:.2f}" for total in totals), *counts)
    console = Console(highlight=False)
    console.print(table)
    if held[0]:
        lengths = ", ".join(f"{each.length // 1024}k" for each in held[0])
        console.print(f"under {lengths}: how many sequences of so many tokens fit beside a stage's weights", end="")
        console.print(" (in brackets: if every layer kept all positions)" if windowed else "", end="")
        console.print("; of all, into the pages that are planned")
    pages = ", ".join(f"{c.num_pages} pages for window {c.window or 'none'}" for c in made.cache.classes)
    weights = f"{made.stages[0].dtype}, weights in int8" if made.stages[0].quantize else made.stages[0].dtype
    console.print(
        f"{model} in {weights}, contexts of {made.max_model_len}: {made.max_num_seqs} sequences at once; {pages}",
        soft_wrap=True,
    )
