"""Programs of ``tests/bench``: parts, each with options of its own and all with ``--json``.

    python tests/bench/PROGRAM.py [PART] [options] [--json]

A program ends with ``conclude_part``. Without a name its first part runs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from rich.console import Console, RenderableType
from rich.table import Table
from targets import Target, conclude

F = TypeVar("F")
CACHE = Path(__file__).parents[2] / ".bench"  # models and environments that are made at first use
console = Console(stderr=True, highlight=False)


class ProgramError(Exception):
    """A program has failed; the message has its status and its last line."""


@dataclass(frozen=True)
class Report:
    """What a part has measured."""

    targets: Sequence[Target]
    tables: Sequence[RenderableType] = ()
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """``options`` has the default of each flag, or its arguments of ``add_argument``. A flag whose
    default is False sets it.
    """

    run: Callable[[argparse.Namespace], Report]
    options: Mapping[str, Any] = field(default_factory=dict)

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options, and ``--json``."""
        for flag, given in self.options.items():
            kwargs = dict(given) if isinstance(given, dict) else {"default": given}
            default = kwargs.get("default")
            if default is False:
                kwargs["action"] = "store_true"
            elif not {"type", "action"} & kwargs.keys() and isinstance(default, int | float | Path):
                kwargs["type"] = type(default)
            parser.add_argument(flag, **kwargs)
        parser.add_argument("--json", action="store_true", help="figures as JSON")


def conclude_part(doc: str | None, parts: Mapping[str, Part]) -> NoReturn:
    """Run the part that the command line names, print what it has measured, and exit as
    ``targets.conclude`` does.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments, (first, *others) = sys.argv[1:], parts
    if not others:
        parts[first].add_to(parser)
        options = parser.parse_args(arguments)
        report = parts[first].run(options)
    else:
        named = parser.add_subparsers(dest="part", metavar=f"{{{','.join(parts)}}}")
        for name, part in parts.items():
            part.add_to(named.add_parser(name, help=(part.run.__doc__ or "").strip()))
        if not arguments or arguments[0] not in {*parts, "-h", "--help"}:
            arguments = [first, *arguments]
        options = parser.parse_args(arguments)
        report = parts[options.part].run(options)
    conclude(report.targets, *report.tables, data=report.data, as_json=options.json)


def gpu_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return the parser of a part of ``gpu.py``, which has the same options as all others."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


def numbers(text: str) -> list[int]:
    """Return the numbers of an option such as ``1,4,16``."""
    return [int(each) for each in text.split(",")]


def say(text: str) -> None:
    """Print to stderr what is done now."""
    console.print(f"{text} ...", style="dim", soft_wrap=True)


def run_program(command: Iterable[object], timeout_s: float | None = None, **variables: str) -> str:
    """Run a program; return what it prints. Raises ProgramError with its last line of stderr."""
    run = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | variables,
        timeout=timeout_s,
    )
    if run.returncode:
        errors = [line for line in run.stderr.splitlines() if line.strip()] or ["no error message"]
        raise ProgramError(f"exited with status {run.returncode}: {errors[-1].strip()[:300]}")
    return run.stdout


def answer_of(
    command: Iterable[object], timeout_s: float | None = None, **variables: str
) -> dict[str, Any]:
    """Run a program; return the JSON object on the last line that begins as one. Raises
    ProgramError.
    """
    lines = run_program(command, timeout_s, **variables).splitlines()
    try:
        answer: dict[str, Any] = json.loads([line for line in lines if line.startswith("{")][-1])
    except (ValueError, IndexError) as error:
        raise ProgramError("printed no JSON object") from error
    return answer


def in_rounds(
    rounds: int, cases: Iterable[F], name: Callable[[F], object] = str
) -> Iterator[tuple[int, F]]:
    """Yield all cases in every round, one after the other, with the round's number, and say which
    is next.
    """
    for number, case in product(range(rounds), list(cases)):
        say(f"round {number + 1} of {rounds}: {name(case)}")
        yield number, case


def medians(figures: Sequence[F]) -> F:
    """Return the medians of each field of dataclasses of numbers."""
    columns = zip(*(astuple(each) for each in figures), strict=True)  # type: ignore[call-overload]
    return type(figures[0])(*map(statistics.median, columns))


def median_ratio(own: Iterable[float], other: Iterable[float]) -> float:
    """Return the median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(own, other, strict=True))


def table_of(columns: Iterable[str], rows: Iterable[Iterable[object]], title: str = "") -> Table:
    """Return a table of any values."""
    table = Table(*columns, title=title or None)
    for row in rows:
        table.add_row(*map(str, row))
    return table


def figures_table(figures: Mapping[str, object]) -> Table:
    """Return a table of two columns."""
    return table_of(("figure", "measured"), figures.items())
