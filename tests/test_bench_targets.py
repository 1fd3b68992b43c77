"""Every benchmark ends in one way: its targets in a table or in the JSON, and status 1 if one is
missed.
"""

import ast
import json
import math
import os
import platform
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from processor import describe_processor
from rich.table import Table
from targets import Target, as_data, at_least, at_most, conclude, exit_status, none_of

pytestmark = pytest.mark.nightly

BENCH = Path(__file__).parent / "bench"
SOURCES = {path.name: path.read_text() for path in sorted(BENCH.glob("*.py"))}
# A program that other ones run in an environment, to read what it prints or writes.
ANSWERING = {"peer_programs.py"}
PROGRAMS = [
    name for name, source in SOURCES.items() if "if __name__ ==" in source and name not in ANSWERING
]
ENDS = ("conclude", "conclude_part", "exit_status", "Report", "measure_products")
OWN_WORDS = re.compile(r"\b(targets?|wanted|missed)\b", re.IGNORECASE)
# A key of rows, a state and the heading of a table for the documents; an option of pip; an option
# of guidellm.
KEPT = {
    "gpu_rows.py": ["wanted"],
    "gpu_stages.py": ["wanted"],
    "gpu.py": ["wanted", "missed"],
    "gpu_report.py": ["wanted", "| row | measured | target | met | detail |"],
    "gpu_server_report.py": ["| server | figure | before | measured | target | met | detail |"],
    "gpu_server.py": ["wanted"],
    "peer_environments.py": ["--target"],
    "peers.py": ["kind=openai_http,target="],
}


@pytest.mark.parametrize(
    ("target", "is_met"),
    [
        (at_most("x", 2.0, 2.0), True),
        (at_most("x", 2.01, 2.0), False),
        (at_least("x", 2.0, 2.0), True),
        (at_least("x", 1.99, 2.0), False),
        (Target("x", 2.0, "<", 2.0), False),
        (Target("x", 1.99, "<", 2.0), True),
        (Target("x", 2.0, ">", 2.0), False),
        (Target("x", 2.01, ">", 2.0), True),
        (none_of("x", []), True),
        (none_of("x", ["request 3"]), False),
        (at_most("x", math.nan, 2.0), False),
        (at_least("x", math.nan, 2.0), False),
    ],
)
def test_a_target_is_met_up_to_its_limit_and_never_by_nan(target: Target, is_met: bool) -> None:
    assert target.is_met is is_met
    assert exit_status([at_most("y", 0, 1), target]) == (0 if is_met else 1)
    assert exit_status([]) == 0


def test_figures_have_their_units() -> None:
    assert (at_most("x", 0.1234, 0.2, "ms").shown, at_most("x", 0.1234, 0.2, "ms").wanted) == (
        "0.123 ms",
        "at most 0.2 ms",
    )
    assert (at_least("x", 0.7512, 0.75, "%").shown, at_least("x", 0.7512, 0.75, "%").wanted) == (
        "75.1 %",
        "at least 75 %",
    )
    assert (none_of("x", range(12345)).shown, none_of("x", []).wanted) == ("12,345", "at most 0")


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("limit", [1.0, 2.0])
def test_the_program_ends_with_the_status_of_its_targets(
    as_json: bool, limit: float, capsys: pytest.CaptureFixture[str]
) -> None:
    table = Table("a column")
    table.add_row("a cell")
    with pytest.raises(SystemExit) as ended:
        conclude([at_most("a pause", 1.5, limit, "s")], table, data={"rows": [3]}, as_json=as_json)
    assert ended.value.code == (0 if limit > 1.5 else 1)
    out, err = capsys.readouterr()
    shown = err if as_json else out
    assert "a cell" in shown
    assert f"processor: {describe_processor()}" in " ".join(shown.split())  # of several lines
    assert re.search(
        rf"a pause\W+1\.5 s\W+at most {limit:g} s\W+{'yes' if limit > 1.5 else 'NO'}\b", shown
    )
    if as_json:
        verdict = {
            "name": "a pause",
            "figure": 1.5,
            "target": f"at most {limit:g} s",
            "met": limit > 1.5,
        }
        assert json.loads(out) == {
            "rows": [3],
            "processor": describe_processor(),
            "targets": [verdict],
        }
    else:
        assert err == ""


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (
            "model name : AMD EPYC\nflags : fpu avx2 sse avx512f avx512_bf16 fma\n",
            "AMD EPYC (avx2, fma, avx512f, avx512_bf16)",
        ),
        (
            "CPU part : 0xd40\nFeatures : fp asimd bf16 i8mm\n",
            f"{platform.processor() or platform.machine()} (asimd, bf16, i8mm)",
        ),
        ("", f"{platform.processor() or platform.machine()} (instructions not known)"),
    ],
)
def test_the_processor_is_named_with_its_instructions(
    lines: str, expected: str, tmp_path: Path
) -> None:
    (tmp_path / "cpuinfo").write_text(lines)
    assert describe_processor(tmp_path / "cpuinfo") == f"{os.cpu_count()} cores of {expected}"
    assert describe_processor(tmp_path / "none").endswith("(instructions not known)")


def test_a_figure_that_is_no_number_is_null() -> None:
    assert [
        each["figure"] for each in as_data([at_most("x", math.nan, 1), at_most("y", math.inf, 1)])
    ] == [None, None]


def faults(source: str, kept: Sequence[str] = ()) -> list[str]:
    """Return what keeps a program from ending as all others do."""
    tree = ast.parse(source)
    mains = [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"
    ]
    if not mains:
        return ["no function main"]
    calls = [node for node in ast.walk(tree) if _is_call(node, "Part")]
    parts = {ast.unparse(call.args[0]) for call in calls}  # type: ignore[attr-defined]
    return [
        *own_verdicts(source, kept),
        *_early_ends(mains[0]),
        *(
            problem
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in parts
            for problem in _early_ends(node)
        ),
        *_other_exits(tree),
        *_other_json(tree),
    ]


def own_verdicts(source: str, kept: Sequence[str] = ()) -> list[str]:
    """Return the strings that speak of targets, which only ``targets`` prints."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and id(node) not in docstrings
    ]
    found = [
        node
        for node in strings
        if isinstance(node.value, str) and node.value not in kept and OWN_WORDS.search(node.value)
    ]
    return [f"line {node.lineno}: prints a target itself: {node.value!r}" for node in found]


def _early_ends(main: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    last = main.body[-1]
    if not _is_call(last.value if isinstance(last, ast.Expr | ast.Return) else None, *ENDS):
        yield f"line {last.lineno}: does not end with conclude, or return exit_status"
    for node in ast.walk(main):
        if isinstance(node, ast.Return) and node is not last and not _is_failure(node.value):
            yield f"line {node.lineno}: returns before its targets are checked"


def _other_exits(tree: ast.Module) -> Iterator[str]:
    """Find exits with a status of their own; a text, which is printed with status 1, is allowed."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "sys.exit",
            "exit",
            "os._exit",
            "SystemExit",
        ):
            of_main = any(_is_call(argument, "main") for argument in node.args)
            if not of_main and not all(map(_is_failure, [*node.args, *[None] * (not node.args)])):
                yield f"line {node.lineno}: exits with a status of its own"


def _other_json(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if _is_call(node, "print") and any("json.dumps" in ast.unparse(part) for part in node.args):  # type: ignore[attr-defined]
            yield f"line {node.lineno}: prints JSON itself"  # type: ignore[attr-defined]


def _is_call(node: ast.AST | None, *names: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


def _is_failure(value: ast.expr | None) -> bool:
    """Return True for a text, and for a number other than 0."""
    return isinstance(value, ast.JoinedStr) or (
        isinstance(value, ast.Constant) and bool(value.value)
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_ends_with_its_targets(name: str) -> None:
    assert faults(SOURCES[name], KEPT.get(name, ())) == []


@pytest.mark.parametrize("name", sorted(SOURCES.keys() - set(PROGRAMS) - ANSWERING))
def test_modules_of_programs_print_no_target_themselves(name: str) -> None:
    assert own_verdicts(SOURCES[name], KEPT.get(name, ())) == []


GOOD = (
    "def main():\n    x = 1\n    conclude([], data=x)\n\nif __name__ == '__main__':\n    main()\n"
)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    conclude([], data=x)\n", "    conclude([], data=x)\n    print(x)\n"),
        ("    conclude([], data=x)\n", "    if x:\n        conclude([], data=x)\n"),
        ("    x = 1\n", "    if x:\n        return\n"),
        ("    x = 1\n", "    if x:\n        return 0\n"),
        ("    x = 1\n", "    sys.exit(0 if x else 1)\n"),
        ("    x = 1\n", "    sys.exit()\n"),
        ("    x = 1\n", "    raise SystemExit(0)\n"),
        ("    x = 1\n", "    print(json.dumps(x))\n"),
        ("    x = 1\n", "    x = Table('figure', 'target')\n"),
        ("    x = 1\n", "    x = f'{x} is wanted'\n"),
        ("def main", "def start"),
    ],
)
def test_a_planted_other_end_is_found(old: str, new: str) -> None:
    assert faults(GOOD) == []
    assert faults(GOOD.replace(old, new)) != []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    conclude([], data=x)\n", "    return exit_status([])\n"),
        ("    conclude([], data=x)\n", "    conclude_part(__doc__, PARTS)\n"),
        ("    x = 1\n", "    if x:\n        return 2\n"),
        ("    x = 1\n", "    sys.exit('no GPU is available')\n"),
        ("    main()\n", "    sys.exit(main())\n"),
        ("    x = 1\n", '    """Compare with the target."""\n'),
        ("    x = 1\n", "    x = {'autoscale_tokens': 1500}\n"),
    ],
)
def test_what_may_be_in_a_program_is_no_fault(old: str, new: str) -> None:
    assert faults(GOOD.replace(old, new)) == []
