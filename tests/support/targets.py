"""Targets of benchmarks: the table, the list in the JSON, and the exit status of every program in
``tests/bench``.

``main`` of a program ends with ``conclude``, also with ``--json`` and without a target.
"""

import json
import operator
import sys
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from processor import describe_processor
from rich.console import Console, RenderableType
from rich.table import Table

Relation = Literal["at most", "at least", "<", ">"]
HOLDS = {"at most": operator.le, "at least": operator.ge, "<": operator.lt, ">": operator.gt}
COLUMNS = ("figure", "measured", "target", "met")
VERDICTS = {True: "yes", False: "NO", None: ""}


@dataclass(frozen=True, slots=True)
class Target:
    """A figure and what it should be. NaN, for a figure that could not be measured, misses every
    target.
    """

    name: str
    figure: float
    relation: Relation
    limit: float
    unit: str = ""

    @property
    def is_met(self) -> bool:
        return bool(HOLDS[self.relation](self.figure, self.limit))

    @property
    def shown(self) -> str:
        return self._with_unit(self.figure)

    @property
    def wanted(self) -> str:
        return f"{self.relation} {self._with_unit(self.limit)}"

    def _with_unit(self, value: float) -> str:
        if self.unit == "%":
            return f"{100 * value:.3g} %"
        return f"{f'{value:.3g}' if abs(value) < 1000 else f'{value:,.0f}'} {self.unit}".rstrip()


def at_most(name: str, figure: float, limit: float, unit: str = "") -> Target:
    return Target(name, figure, "at most", limit, unit)


def at_least(name: str, figure: float, limit: float, unit: str = "") -> Target:
    return Target(name, figure, "at least", limit, unit)


def none_of(name: str, found: Sized) -> Target:
    """Return the target that a list is empty: failed requests, lost tokens, resources that were not
    released.
    """
    return at_most(name, len(found), 0)


def exit_status(targets: Sequence[Target]) -> int:
    return 0 if all(target.is_met for target in targets) else 1


def as_data(targets: Sequence[Target]) -> list[dict[str, Any]]:
    """Return the targets as JSON has them. A figure that is no finite number is null."""
    return [
        {
            "name": t.name,
            "figure": t.figure if abs(t.figure) < float("inf") else None,
            "target": t.wanted,
            "met": t.is_met,
        }
        for t in targets
    ]


def target_table(targets: Sequence[Target]) -> Table:
    table = Table(*COLUMNS, title="targets")
    for target in targets:
        table.add_row(target.name, target.shown, target.wanted, VERDICTS[target.is_met])
    return table


def conclude(
    targets: Sequence[Target],
    *tables: RenderableType,
    data: Mapping[str, Any] | None = None,
    as_json: bool = False,
) -> NoReturn:
    """Print the results, the processor and the targets, and exit: with status 1 if a target is
    missed.

    With ``as_json`` the standard output gets one JSON object, the data with ``processor`` and the
    list ``targets``, and the tables go to stderr.
    """
    console = Console(stderr=as_json, highlight=False, width=130)
    processor = describe_processor()
    for each in [*tables, f"processor: {processor}", *([target_table(targets)] if targets else [])]:
        console.print(each)
    if as_json:
        print(
            json.dumps(
                {**(data or {}), "processor": processor, "targets": as_data(targets)}, indent=1
            )
        )
    sys.exit(exit_status(targets))
