"""``tramontane make-random``: write a checkpoint of random weights."""

import signal
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from tramontane.proto.model_folder import Layout
from tramontane.proto.presets import PRESETS, preset, tiny_variant
from tramontane.proto.units import format_bytes
from tramontane.workers.weights.random_checkpoint import write_random_checkpoint
from tramontane.workers.weights.tensor_specs import stage_tensors


class Scale(StrEnum):
    """The size of the checkpoint."""

    FULL = "full"
    SMALL = "small"


class LayoutName(StrEnum):
    """The files of the checkpoint."""

    HF = "hf"
    MISTRAL = "mistral"


LAYOUTS = {LayoutName.HF: Layout.HUGGING_FACE, LayoutName.MISTRAL: Layout.MISTRAL}


def make_random(
    like: Annotated[str, typer.Option("--like", help=f"Published geometry: {', '.join(PRESETS)}.")],
    out: Annotated[Path, typer.Option("--out", help="Folder to write; it must be empty.")],
    scale: Annotated[
        Scale, typer.Option("--scale", help="small: the same shape ratios in 0.5 to 62 MB.")
    ] = Scale.FULL,
    layout: Annotated[
        LayoutName, typer.Option("--layout", help="Hugging Face's files or Mistral's own.")
    ] = LayoutName.HF,
) -> None:
    """Write a checkpoint of random weights (without a tokenizer), for benchmarks and tests."""
    args = preset(like)
    if scale is Scale.SMALL:
        args = tiny_variant(args)
    names = {spec.name: spec for spec in stage_tensors(args, range(args.n_layers), LAYOUTS[layout])}
    num_bytes = sum(spec.stored_bytes(args.dtype) for spec in names.values())
    columns = (
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True, highlight=False)
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    def report_start() -> None:
        console.print(
            f"writing {format_bytes(num_bytes)} to {out} ...", soft_wrap=True, markup=False
        )

    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(str(out), total=num_bytes)

        def advance(written: int) -> None:
            progress.advance(task, written)

        write_random_checkpoint(out, args, LAYOUTS[layout], advance, on_start=report_start)
    console.print(
        f"{out}: {args.n_layers} layers, {format_bytes(num_bytes)}, random",
        soft_wrap=True,
        markup=False,
    )
