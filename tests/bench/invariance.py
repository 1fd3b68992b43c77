"""Benchmark of batch invariance: throughput and time to first token with it against without it.

    python tests/bench/invariance.py [--rounds 5] [--cache .bench] [--before CHECKOUT] [--json]

The two models of ``peers.py`` on two stages of one core each, 64 prompts of 128 random tokens and
answers of 64. In each round both run once, in processes of their own and in turns; the ratios are
medians of the rounds' ratios. Without batch invariance stages choose attention by its speed.
``--before`` is a checkout of an earlier version, with its ``.venv``, which runs instead of
``--no-batch-invariant``.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from peers import DTYPE, MODELS, TRAMONTANE, TWO_BY_ONE, Bench
from rich.console import Console
from rich.table import Table
from targets import Target, at_least, at_most, conclude

NUM_PROMPTS = 64
WITH, WITHOUT = "with", "without"
Figures = dict[str, dict[str, list[dict[str, float]]]]  # of each round, by model and system


def commands(before: Path | None) -> dict[str, list[str]]:
    """Return the command of each system."""
    others = (
        [str(before / ".venv/bin/tramontane"), "bench"]
        if before
        else [*TRAMONTANE, "bench", "--no-batch-invariant"]
    )
    return {WITH: [*TRAMONTANE, "bench", "--batch-invariant"], WITHOUT: others}


def measure(folder: Path, command: list[str]) -> dict[str, float]:
    """Return tokens/s and the median time to the first token, in seconds."""
    flags = [
        "--json",
        "--model",
        str(folder),
        "--num-prompts",
        str(NUM_PROMPTS),
        *TWO_BY_ONE.flags(),
    ]
    run = subprocess.run([*command, *flags], capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(run.stderr)
    answer = json.loads([line for line in run.stdout.splitlines() if line.startswith("{")][-1])
    return {
        "tokens_per_second": answer["tokens_per_second"],
        "ttft_s": answer["median_ttft_ms"] / 1000,
    }


def run(args: argparse.Namespace, console: Console) -> Figures:
    figures: Figures = {model: defaultdict(list) for model in MODELS}
    folders = {model: Bench(args.cache.resolve(), console).checkpoint(model) for model in MODELS}
    for number in range(args.rounds):
        for model, folder in folders.items():
            for system, command in commands(args.before).items():
                console.print(
                    f"round {number + 1} of {args.rounds}: {model}, {system} ...", style="dim"
                )
                figures[model][system].append(measure(folder, command))
    return figures


def ratio(figures: dict[str, list[dict[str, float]]], name: str) -> float:
    pairs = zip(figures[WITH], figures[WITHOUT], strict=True)
    return statistics.median(own[name] / other[name] for own, other in pairs)


def show(figures: Figures, console: Console) -> None:
    table = Table(
        "model", "batch-invariant", "tokens/s, in and out", "median time to first token, s"
    )
    for model, systems in figures.items():
        for system, rounds in systems.items():
            columns = ("tokens_per_second", ".0f"), ("ttft_s", ".2f")
            table.add_row(
                model,
                system,
                *(", ".join(format(each[name], form) for each in rounds) for name, form in columns),
            )
    console.print(table, f"All compute in {DTYPE}.")


def targets(figures: Figures) -> list[Target]:
    found = []
    for model, systems in figures.items():
        found.append(
            at_least(
                f"{model}: tokens/s, with against without",
                ratio(systems, "tokens_per_second"),
                0.97,
                "x",
            )
        )
        found.append(
            at_most(
                f"{model}: time to first token, with against without",
                ratio(systems, "ttft_s"),
                1.05,
                "x",
            )
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cache", type=Path, default=Path(__file__).parents[2] / ".bench")
    parser.add_argument("--before", type=Path, help="checkout of an earlier version")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = run(options, Console(stderr=True, highlight=False))
    show(figures, Console(stderr=options.json, highlight=False))
    conclude(targets(figures), data=figures, as_json=options.json)


if __name__ == "__main__":
    main()
