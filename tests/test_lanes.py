"""The lanes of ``make test`` and ``make nightly`` run every test exactly once: by folder, and by
marks.

Those marked ``pairwise`` run in both, with some combinations of their parameters and with all.
"""

import ast
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from lane_marks import NEEDED_MARKS

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
FILES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
PLACES: tuple[frozenset[str], ...] = (frozenset(), frozenset({"ray"}), frozenset({"ray", "serve"}))
MARKS = (
    *PLACES,
    *(marks | {"nightly"} for marks in PLACES),
)  # which a test may have, and those of AGAIN
# of tests that make nightly runs again: with more combinations, or more of Hypothesis's examples
AGAIN = ("pairwise", "hypothesis", "interpreted")
NAMES = {"ray", "serve", "nightly", *AGAIN}


@dataclass(frozen=True)
class Lane:
    """One run of pytest: ``expression`` is that of ``-m``, ``ignored`` and ``folders`` are relative
    to the repository.
    """

    target: str
    expression: str
    folders: tuple[str, ...]
    ignored: tuple[str, ...]
    has_full_products: bool = False

    def runs(self, file: str, marks: frozenset[str]) -> bool:
        """Return whether the lane runs the tests of a file that have these marks."""
        is_chosen = any(file.startswith(f"{folder}/") for folder in self.folders)
        is_ignored = any(file.startswith(f"{folder}/") for folder in self.ignored)
        return is_chosen and not is_ignored and _chooses(self.expression, marks)


@cache
def _chooses(expression: str, marks: frozenset[str]) -> bool:
    return _holds(ast.parse(expression, mode="eval").body, marks)


def _holds(node: ast.expr, marks: frozenset[str]) -> bool:
    """Evaluate an expression of marks; a name that is no mark of the project is an error."""
    if isinstance(node, ast.BoolOp):
        values = [_holds(value, marks) for value in node.values]
        return all(values) if isinstance(node.op, ast.And) else any(values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return not _holds(node.operand, marks)
    assert isinstance(node, ast.Name), ast.unparse(node)
    assert node.id in NAMES, node.id
    return node.id in marks


def lanes_of(makefile: str) -> list[Lane]:
    """Return the lanes that the targets ``test`` and ``nightly`` run. An argument that is not
    understood is an error.
    """
    others = re.search(r"^OTHERS = (.*)$", makefile, re.MULTILINE)
    recipe = re.search(r"^test:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    nightly = re.search(r"^nightly:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert others is not None
    assert recipe is not None
    assert nightly is not None
    assert "$(OTHERS)" in recipe[1]
    run = {
        *others[1].split(),
        *re.findall(r"(?<=\s)test-[a-z-]+", recipe[1]),
        *re.findall(r"\bnightly-[a-z]+", nightly[1]),
    }
    commands = re.findall(
        r"^((?:test|nightly)-[a-z-]+):.*\n\t.*\$\(PYTEST\) (.*)$", makefile, re.MULTILINE
    )
    return [
        _lane(target, shlex.split(arguments)) for target, arguments in commands if target in run
    ]


def _lane(target: str, arguments: list[str]) -> Lane:
    assert arguments[0] == "-m", arguments
    others = [
        each
        for each in arguments[2:]
        if each not in ("$(PARALLEL)", "$(PATIENT)", "--full-products")
    ]
    ignored = tuple(
        each.removeprefix("--ignore=").rstrip("/")
        for each in others
        if each.startswith("--ignore=")
    )
    folders = tuple(each.rstrip("/") for each in others if each[0] not in "-$")
    assert len(ignored) + len(folders) == len(others), arguments
    return Lane(
        target, arguments[1], folders or ("tests",), ignored, "--full-products" in arguments
    )


def wrong_counts(lanes: Iterable[Lane], files: Iterable[str]) -> list[str]:
    """Files and marks whose tests no lane, or more than one lane, runs; of those that run again,
    with full products or without.
    """
    lanes, found = list(lanes), []
    for file in files:
        for marks in MARKS:
            targets = [lane.target for lane in lanes if lane.runs(file, marks)]
            expected = [True] if "nightly" in marks else [False, True]
            again = (
                sorted(lane.has_full_products for lane in lanes if lane.runs(file, marks | {mark}))
                for mark in AGAIN
            )
            if len(targets) != 1 or any(each != expected for each in again):
                found.append(f"{file}, marks {sorted(marks)}: {targets}")
    return found


def served_without_ray(source: str) -> list[str]:
    """Places with the mark ``serve`` and without ``ray``: such a test would run in two lanes.

    A decorator's marks are those of its function, its class and the module.
    """
    tree = ast.parse(source)
    assigned = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    return list(
        _unmarked(tree, {mark for value in assigned for mark in _marks(value)}, "the module")
    )


def _unmarked(node: ast.AST, marks: set[str], name: str) -> Iterator[str]:
    if "serve" in marks and "ray" not in marks:
        yield name
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            own = {mark for decorator in child.decorator_list for mark in _marks(decorator)}
            yield from _unmarked(child, marks | own, child.name)


def _marks(node: ast.AST) -> set[str]:
    return set(re.findall(r"\bpytest\.mark\.(ray|serve)\b", ast.unparse(node)))


def test_every_test_runs_in_exactly_one_lane() -> None:
    lanes = lanes_of(MAKEFILE)
    assert len(lanes) == 7
    assert len(FILES) > 100
    assert wrong_counts(lanes, FILES) == []


@pytest.mark.parametrize("file", FILES)
def test_what_starts_serve_also_has_the_mark_of_ray(file: str) -> None:
    assert served_without_ray((ROOT / file).read_text(encoding="utf-8")) == []


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("command", "planted"),
    [
        (
            '-m "ray and not serve and not nightly" tests/cluster --',
            '-m "ray and not serve and not nightly" tests/cluster/actors --',
        ),
        (
            '-m "ray and not serve and not nightly" tests/cluster --',
            '-m "ray and not nightly" tests/cluster --',
        ),
        (" tests/cluster --ignore=tests/cluster/pipeline", " tests/cluster"),
        (
            '-m "ray and not serve and not nightly" tests/cluster/p',
            '-m "ray and not serve" tests/cluster/p',
        ),
        ('nightly" tests/cluster/pipeline', 'nightly" tests/cluster/actors'),
        (
            '-m "serve and not nightly" tests/cluster',
            '-m "serve and not nightly" tests/cluster/serving',
        ),
        ('-m "serve and not nightly" tests/cluster', '-m "serve and not nightly"'),
        (
            '-m "not ray and not nightly"',
            '-m "not ray and not nightly" tests/workers tests/router tests/proto',
        ),
        ('-m "not ray and not nightly"', '-m "not serve and not nightly"'),
        ('-m "not ray and not nightly"', '-m "not ray"'),
        ('-m "not ray and not nightly"', '-m "not ray and not nightly and not pairwise"'),
        ('-m "ray and not nightly" --ignore=tests/cluster', '-m "ray and not nightly"'),
        (" --ignore=tests/cluster\n", " --ignore=tests/cluster --ignore=tests/proto\n"),
        ("test-serve-command test-ray-pipeline types\n", "test-serve-command types\n"),
        ("test-serve test-ray; served", "test-ray; served"),
        ("test-serve test-ray; served", "test-serve; served"),
        ("--keep-going test-plain ", "--keep-going types "),
        (
            '-m "not ray and (nightly or pairwise or hypothesis or interpreted)"',
            '-m "not ray and nightly"',
        ),
        (
            '-m "not ray and (nightly or pairwise or hypothesis or interpreted)"',
            '-m "not ray and (nightly or pairwise or hypothesis)"',
        ),
        (
            '-m "ray and (nightly or pairwise or hypothesis or interpreted)" --full-products',
            '-m "ray and (nightly or pairwise or hypothesis or interpreted)"',
        ),
        ("--keep-going nightly-plain nightly-ray", "--keep-going nightly-plain"),
    ],
)
def test_a_planted_change_of_a_lane_is_found(command: str, planted: str) -> None:
    assert command in MAKEFILE
    assert wrong_counts(lanes_of(MAKEFILE.replace(command, planted, 1)), FILES)


@pytest.mark.nightly
@pytest.mark.parametrize("argument", ["-k one", "--deselect=tests/x.py", "-x", "$(MORE)"])
def test_a_planted_argument_that_is_not_understood_is_found(argument: str) -> None:
    with pytest.raises(AssertionError):
        lanes_of(
            MAKEFILE.replace("tests/cluster/pipeline\n", f"tests/cluster/pipeline {argument}\n")
        )


@pytest.mark.nightly
def test_a_planted_mark_without_the_other_is_found() -> None:
    assert served_without_ray("pytestmark = [pytest.mark.serve]")[0] == "the module"
    assert served_without_ray("@pytest.mark.serve\ndef test_x(): ...") == ["test_x"]
    assert (
        served_without_ray(
            "@pytest.mark.ray\nclass TestX:\n    @pytest.mark.serve\n    def test_x(self): ..."
        )
        == []
    )
    assert served_without_ray("pytestmark = [pytest.mark.ray, pytest.mark.serve]") == []


def test_files_that_a_lane_does_not_import_have_none_of_its_tests() -> None:
    assert set(NEEDED_MARKS) == {
        lane.expression for lane in lanes_of(MAKEFILE) if not lane.expression.startswith("not ray")
    }
    for expression, mark in NEEDED_MARKS.items():
        for marks in (*MARKS, *(marks | {mark} for marks in MARKS for mark in AGAIN)):
            assert mark in marks or not _chooses(expression, marks)


def test_no_two_test_files_have_the_same_name() -> None:
    """The folders are no packages, so pytest imports each file by its name alone."""
    names = [Path(file).name for file in FILES]
    assert [name for name in set(names) if names.count(name) > 1] == []
