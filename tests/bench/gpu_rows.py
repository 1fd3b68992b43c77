"""Checks of a GPU's results against the CPU, then its speed as shares of the memory wall, in one
table and one process.

    python tests/bench/gpu_rows.py [--only checks,mistral,...] [--device cuda] [--small] [--json
    FILE]

Weights are random, generated in place at the real geometry, without a disk. One process without
Ray, except for the rows of stages that share the GPU. A row that is not available on this machine
gives the reason. ``--small --device cpu`` tries the program itself. ``gpu.py`` runs the groups in
processes of their own. The exit status is 1 if a check fails, if a figure misses its target, or if
an error ends a group.
"""

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parent))

import torch
from gpu_checks import Check, logits_check, mask_checks, pieces_check, replay_check, sanitizer_check
from gpu_comparisons import (
    against_mistral_inference,
    against_transformers,
    invariance_checks,
    invariance_cost,
    stages_on_one_gpu,
)
from gpu_speed import (
    Figure,
    Size,
    Walls,
    mistral_decode,
    mixtral_decode,
    page_sizes,
    quantized,
    rolling,
    walls,
)
from gpu_stage import UnavailableError
from rich.console import Console
from rich.table import Table
from targets import COLUMNS, VERDICTS, Target, at_least, at_most, exit_status

CHECKS: dict[str, Callable[[Size], Iterator[Check]]] = {
    "logits": lambda size: logits_check(size.device, size.small),
    "masks": lambda size: mask_checks(size.device, size.small),
    "replay": lambda size: replay_check(size.device, size.small),
    "pieces": lambda size: pieces_check(size.device, size.small),
    "invariance": lambda size: invariance_checks(size.device, size.small),
    "sanitizer": lambda _size: sanitizer_check(),
}
FIGURES: dict[str, Callable[[Size, Walls], Iterator[Figure]]] = {
    "mistral": mistral_decode,
    "mixtral": mixtral_decode,
    "rolling": rolling,
    "transformers": against_transformers,
    "mistral-inference": against_mistral_inference,
    "stages": stages_on_one_gpu,
    "quantized": quantized,
    "pages": page_sizes,
    "invariance-cost": invariance_cost,
}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    name: str
    figure: str
    detail: str
    target: Target | None = None

    @property
    def wanted(self) -> str:
        return self.target.wanted if self.target else ""

    @property
    def holds(self) -> bool | None:
        return self.target.is_met if self.target else None

    def as_data(self) -> dict[str, Any]:
        return {
            name: getattr(self, name) for name in ("name", "figure", "wanted", "holds", "detail")
        }


def main() -> int:
    options = _options()
    # which kernels were chosen
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "no GPU is available; --small --device cpu tries the program on a CPU", file=sys.stderr
        )
        return 2
    size, console = Size(options.device, options.small), Console(stderr=True)
    rows: list[Row] = []
    for row in _rows(size, options.only):
        console.print(f"{row.name}: {row.figure} {row.detail}")
        rows.append(row)
        if options.json:
            # After every row, because the run may be interrupted.
            options.json.write_text(json.dumps([r.as_data() for r in rows], indent=1))
    Console(width=180).print(_table(rows, _where(size)))
    return exit_status([row.target for row in rows if row.target])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = ["checks", *CHECKS, *FIGURES]  # "checks" stands for all checks
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=known,
        help=f"groups out of {', '.join(known)}",
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if unknown := set(options.only) - set(known):
        parser.error(
            f"--only {', '.join(sorted(unknown))} is unknown; the groups are {', '.join(known)}"
        )
    return options


def _rows(size: Size, only: list[str]) -> Iterator[Row]:
    for name, check in CHECKS.items():
        if name in only or "checks" in only:
            yield from _run_group(name, lambda check=check: map(_check_row, check(size)))  # type: ignore[misc]
    if not any(name in only for name in FIGURES):
        return
    wall = walls(size)
    yield Row("copy", f"{wall.bytes_per_s / 1e12:.2f} TB/s", "bytes read and written")
    yield Row(
        "products",
        f"{wall.flops / 1e12:.0f} TFLOP/s",
        "of bfloat16, 8192 x 8192 x 8192, random numbers",
    )
    for name, figures in FIGURES.items():
        if name in only:
            yield from _run_group(
                name, lambda figures=figures: map(_figure_row, figures(size, wall))
            )  # type: ignore[misc]


def _run_group(name: str, rows: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    """Run one group. An exception becomes a row, so that the other groups still run."""
    began = time.perf_counter()
    logging.getLogger(__name__).info("%s begins", name)
    try:
        yield from rows()
    except UnavailableError as error:
        yield Row(name, "not measured", str(error))
    except Exception as error:
        detail = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        yield Row(name, "not measured", detail, at_most(name, 1, 0, "errors"))
        logging.getLogger(__name__).exception("%s failed", name)
    logging.getLogger(__name__).info("%s took %.0f s", name, time.perf_counter() - began)


def _check_row(check: Check) -> Row:
    return Row(
        check.name,
        f"{check.figure:.2g}",
        check.detail,
        Target(check.name, check.figure, "<", check.limit),
    )


def _figure_row(figure: Figure) -> Row:
    is_ratio = figure.of == "1"
    shown = f"{figure.share:.2f}" if is_ratio else f"{figure.share:.0%} of the {figure.of}"
    unit = "" if is_ratio else "%"
    target = (
        None if figure.target is None else at_least(figure.name, figure.share, figure.target, unit)
    )
    return Row(figure.name, shown, figure.detail, target)


def _table(rows: list[Row], title: str) -> Table:
    table = Table(*COLUMNS, "detail", title=title)
    for row in rows:
        table.add_row(row.name, row.figure, row.wanted, VERDICTS[row.holds], row.detail)
    return table


def _where(size: Size) -> str:
    name = torch.cuda.get_device_name() if size.device == "cuda" else "CPU"
    note = ", small models: these figures do not describe the real ones" if size.small else ""
    return f"{name}, torch {torch.__version__}{note}"


if __name__ == "__main__":
    sys.exit(main())
