"""Print reports of gpu.py as Markdown tables: the checks and figures of
docs/reports/benchmarks-gpu.md, servers, the best of each kernel.

    python tests/bench/gpu_report.py docs/reports/h200-2026-11-26-1.json [...] [--before REPORT
    [...]]

Rows of later reports replace those of earlier ones that have the same name, and kernels those of
the same part. Figures of servers stand next to those of the reports of ``--before``.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from gpu_server_report import server_table
from targets import VERDICTS, exit_status

Row = dict[str, Any]
Report = dict[str, Any]  # parts by their names, each with state, seconds and rows
TOKENS = (1, 16, 64)  # of the products that are shown
TABLE_HEAD = 2  # lines of a table without rows
DETAIL = 80  # characters at most, unless its first part is longer


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT")
    parser.add_argument("--before", nargs="+", type=Path, default=[], metavar="REPORT")
    options = parser.parse_args()
    reports, earlier = (
        [json.loads(path.read_text()) for path in paths]
        for paths in (options.reports, options.before)
    )
    tables = [*figures(reports)], [*server_table(reports, earlier)], [*kernels(reports)]
    print("\n\n".join("\n".join(table) for table in tables if len(table) > TABLE_HEAD))
    return exit_status([])


def figures(reports: Sequence[Report]) -> Iterator[str]:
    """Yield the table of figures and checks."""
    yield "| row | measured | target | met | detail |"
    yield "|---|---|---|---|---|"
    rows = [
        row
        for report in reports
        for part in report.values()
        for row in _rows_of(part)
        if "figure" in row
    ]
    for row in {row["name"]: row for row in rows}.values():
        yield _line(
            row["name"],
            row["figure"],
            row["wanted"],
            VERDICTS[row["holds"]],
            _first_parts(row["detail"]),
        )


def kernels(reports: Sequence[Report]) -> Iterator[str]:
    """Yield the table of kernels: the fastest way of each case."""
    yield "| part | case | fastest | us | |"
    yield "|---|---|---|---|---|"
    parts: dict[str, list[Row]] = {}
    for report in reports:
        parts |= {name: rows for name, part in report.items() if (rows := _rows_of(part))}
    for name, (case_of, way_of) in CASES.items():
        rows = [row for row in parts.get(name, ()) if "us" in row and case_of(row)]
        for case, each in groupby(sorted(rows, key=case_of), case_of):
            best = min(each, key=lambda row: row["us"])
            yield _line(name, case[-1], way_of(best), f"{best['us']:.0f}", _rate(best))


def _rows_of(part: dict[str, Any]) -> list[Row]:
    """Return the rows of a part, [] if it has none; those of a whole report within a report are
    that report's.
    """
    rows = part["rows"] or []
    return (
        [row for each in rows.values() for row in _rows_of(each)]
        if isinstance(rows, dict)
        else rows
    )


def _first_parts(detail: str) -> str:
    """Return as many of the parts between semicolons as fit."""
    parts = detail.split("; ")
    fitting = [n for n in range(1, len(parts) + 1) if n == 1 or len("; ".join(parts[:n])) <= DETAIL]
    return "; ".join(parts[: fitting[-1]])


def _rate(row: Row) -> str:
    units = {"tb_per_s": "TB/s", "gb_per_s": "GB/s", "tflops": "TFLOP/s"}
    return next((f"{row[key]:.3g} {unit}" for key, unit in units.items() if key in row), "")


def _product(row: Row) -> tuple[Any, ...]:
    return (
        (row["m"], row["n"], row["k"], "{m} x {n} x {k}".format(**row))
        if row.get("m") in TOKENS
        else ()
    )


def _decode(row: Row) -> tuple[Any, ...]:
    return row["batch"], row["keys"], "{batch} sequences of {keys} keys".format(**row)


def _split_k(row: Row) -> str:
    return (
        "pages of {page}, blocks of {block}, {parts} parts, {warps} warps, {stages} stages".format(
            **row
        )
    )


def _prompt(row: Row) -> tuple[Any, ...]:
    return row["tokens"], row["window"] or 0, "{tokens} tokens, window {window}".format(**row)


def _experts(row: Row) -> tuple[Any, ...]:
    """Return the case of a row of both products of experts; other rows are of one product, or of
    the choice of experts too.
    """
    if row["what"] not in BOTH_PRODUCTS and not row["what"].startswith("both, "):
        return ()
    return row["rows"], "{rows} rows of {experts} experts".format(**row)


BOTH_PRODUCTS = ("grouped", "row by row", "few: both")


def _transfer(row: Row) -> tuple[Any, ...]:
    return row["what"], *row["shape"], "{what}, {shape[0]} x {shape[1]}".format(**row)


def _what(row: Row) -> str:
    return str(row["what"])


# For each part: the case of a row, of which the last item is shown and the others are its order,
# and the way of the best row.
CASES: dict[str, tuple[Callable[[Row], tuple[Any, ...]], Callable[[Row], str]]] = {
    "linear": (_product, _what),
    "split-k": (_decode, _split_k),
    "prefill": (_prompt, _what),
    "experts": (_experts, _what),
    "channels": (_transfer, lambda _row: ""),
}


def _line(*cells: str) -> str:
    one_line = (" ".join(cell.replace("|", "/").split()) for cell in cells)
    return "".join(f"| {cell} " if cell else "| " for cell in one_line) + "|"


if __name__ == "__main__":
    sys.exit(main())
