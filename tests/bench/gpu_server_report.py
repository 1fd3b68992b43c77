"""Rows of whole servers in the reports of gpu.py: figures with their targets, next to those of
earlier reports.

The targets are for one H100 with 80 GB.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from targets import Relation, Target

Row = dict[str, Any]
Report = Mapping[str, Any]  # parts by their names, each with state, seconds and rows
PREFIX = "serve-"  # of parts; the first reports have their names without it
RATE = "out/s"


class Figure(NamedTuple):
    """One number of a row. ``name`` is unique within a part."""

    name: str
    value: float
    unit: str
    detail: str = ""


class Wanted(NamedTuple):
    """What a figure should be."""

    relation: Relation
    limit: float


TITLES = {
    "one": "Mistral 7B",
    "shared": "two stages on the GPU",
    "exact": "two stages, --batch-invariant",
    "fp8": "Mistral 7B, FP8",
    "mixtral": "Mixtral 8x7B, FP8",
    "latent": "two layers of Small 4",
    "correct": "two stages in float32",
    "disk": "Mistral 7B from a disk",
    "store": "two stages, object store",
    "speculation": "Mistral 7B, n-gram drafts",
}
TABLE_SHAPE = "load as in TensorRT-LLM's tables, 128 streams"
WANTED: dict[tuple[str, str], Wanted] = {
    ("one", "ready"): Wanted("at most", 30),
    ("one", "load, 1 stream"): Wanted("at least", 170),
    ("one", "load, 64 streams"): Wanted("at least", 3_200),
    ("one", "load, 128 streams"): Wanted("at least", 3_700),
    ("one", TABLE_SHAPE): Wanted("at least", 9_500),
    ("one", "first token of 1024, alone"): Wanted("at most", 45),
    ("one", "sampled over greedy, cached prompts"): Wanted("at least", 0.97),
    ("shared", "ready"): Wanted("at most", 15),
    ("shared", "pause, kill -9 of stage process 0"): Wanted("at most", 6),
    ("shared", "pause, kill -9 of stage process 1"): Wanted("at most", 6),
    ("exact", "pause, kill -9 of stage process 0"): Wanted("at most", 5),
    ("fp8", TABLE_SHAPE): Wanted("at least", 10_000),
    ("mixtral", "load, 64 streams"): Wanted("at least", 2_600),
    ("latent", "loaded"): Wanted("at most", 5),
}
RATIOS = {  # of the rates of two parts with as many streams
    "of the speed of one stage": ("shared", "one", Wanted("at least", 0.85)),
    "of the speed without --batch-invariant": ("exact", "shared", Wanted("at least", 0.75)),
}
GAP_TARGET = Wanted("at most", 1.2)  # time between two events over the time of a token


def server_table(reports: Sequence[Report], earlier: Sequence[Report] = ()) -> Iterator[str]:
    """Yield the lines of a table, or none if no report has a server. Later reports replace rows of
    those before them.
    """
    found, before = _merged(reports), _merged(earlier)
    if not found:
        return
    yield "| server | figure | before | measured | target | met | detail |"
    yield "|---|---|---|---|---|---|---|"
    for (part, name), figure in found.items():
        wanted = _wanted(part, name)
        target = Target(name, figure.value, *wanted, figure.unit) if wanted else None
        shown = Target(name, figure.value, "at most", 0, figure.unit).shown
        past = before.get((part, name))
        cells = (
            *(
                TITLES.get(part, part),
                name,
                Target(name, past.value, "at most", 0, past.unit).shown if past else "",
                shown,
            ),
            *((target.wanted, "yes" if target.is_met else "NO") if target else ("", "")),
            figure.detail,
        )
        yield "".join(f"| {cell} " if cell else "| " for cell in cells) + "|"


def _wanted(part: str, name: str) -> Wanted | None:
    if name.startswith("gap"):
        return GAP_TARGET
    return (
        RATIOS[title][2] if (title := name.split(", ")[0]) in RATIOS else WANTED.get((part, name))
    )


def _merged(reports: Sequence[Report]) -> dict[tuple[str, str], Figure]:
    found = {
        (name.removeprefix(PREFIX), figure.name): figure
        for report in reports
        for name, part in report.items()
        if isinstance(part["rows"], list)  # a part of another program, as a report of its own
        for figure in part_figures(part["rows"])
    }
    for title, (part, other, _) in RATIOS.items():
        for streams in ("1 stream", "16 streams", "64 streams"):
            pair = [found.get((each, f"load, {streams}")) for each in (part, other)]
            if all(pair):
                rates = [each.value for each in pair if each]
                figure = Figure(
                    f"{title}, {streams}",
                    rates[0] / rates[1],
                    "",
                    "{:,.0f} over {:,.0f} out/s".format(*rates),
                )
                found[part, figure.name] = figure
    return found


def part_figures(rows: Sequence[Row]) -> Iterator[Figure]:
    """Yield the figures of a part: those of its rows, and ratios of two."""
    rates: dict[str, float] = {}
    for row in rows:
        for figure in _figures(row):
            if figure.unit == RATE:
                rates[figure.name] = figure.value
            yield figure
    for name, greedy in rates.items():
        sampled = rates.get(name.replace("load, cached prompts,", "load, cached prompts, sampled,"))
        if name.startswith("load, cached prompts, ") and sampled is not None:
            yield Figure(
                "sampled over greedy, cached prompts",
                sampled / greedy,
                "",
                f"{sampled:,.0f} over {greedy:,.0f} {RATE}",
            )


def _figures(row: Row) -> Iterator[Figure]:
    what = str(row.get("what", ""))
    if "out_per_s" in row:
        yield from _load_figures(what, row)
    elif what in ("ready", "loaded", "written"):
        yield Figure(what, row["seconds"], "s", str(row.get("flags", "")))
    elif what.startswith("kill -9"):
        lost = (
            f"{row['incomplete']} of {row['streams']} incomplete, {row['equal']} texts equal,"
            f" {row['that_survived']} survived"
        )
        yield Figure(f"pause, {what}", row["pause_s"][-1], "s", lost)
    elif what.startswith("first token, alone"):
        for key, times in row.items():
            if key.startswith("of_") and None not in times:
                phases = row.get(f"phases_{key}", {}).items()
                last = "".join(f"; {name} {each[-1]}" for name, each in phases)
                yield Figure(
                    f"first token of {key.removeprefix('of_')}, alone",
                    max(times),
                    "ms",
                    f"in order: {times}{last}",
                )
    elif "equal" in row:
        yield Figure(f"equal texts, {row.get('of', what)}", row["equal"], "", f"of {row['texts']}")
    elif what.startswith("latent"):
        yield Figure(
            f"step of {row['batch']}",
            row["step_ms"],
            "ms",
            f"{row['device_ms']} ms of it on the device",
        )


def _load_figures(what: str, row: Row) -> Iterator[Figure]:
    """Of the shape 1024 + 128, the usual one, nothing is said."""
    streams = f"{row['streams']} stream{'s' if row['streams'] > 1 else ''}"
    (token, _), (first, slowest), gap = row["token_ms"], row["first_ms"], row["event_gap_ms"][1]
    shape = "" if row["shape"] == [1024, 128] else "{} + {} tokens; ".format(*row["shape"])
    failed = f"{row['failed']} FAILED; " if row["failed"] else ""
    detail = f"{failed}{shape}{token} ms a token; first after {first} ms, 99 % {slowest} ms"
    yield Figure(f"{what}, {streams}", row["out_per_s"], RATE, detail)
    if what == "load" and token and gap:
        yield Figure(
            f"gap between events over a token, {streams}", gap / token, "", f"{gap} over {token} ms"
        )
