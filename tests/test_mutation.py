"""The mutation run, on a toy tree: which faults it makes, which tests it chooses, and what it
reports.
"""

import ast
import json
import py_compile
import sys
from pathlib import Path

import mutation
import pytest
from mutants import Mutant, find_mutants

pytestmark = pytest.mark.nightly

TESTS = Path(__file__).parent
TOY = '''"""A shelf. If it is full, nothing more fits."""

import logging

logger = logging.getLogger(__name__)
WAIT_S = 3.0


def room(held: int, size: int = 8) -> int:
    """Return what still fits: 2 of 8 if 6 are held."""
    return max(size - held, 0)


def fits(held: int, more: int) -> bool:
    if more < 1:
        raise ValueError(f"{more} is less than {1}")
    logger.info("asked for %d of %d", more, 100)
    return more <= room(held)
'''
TEST_OF_TOY = """from tramontane.router.shelf.toy import fits, room


def test_room():
    assert room(6) == 2
    assert room(9) == 0


def test_fits():
    assert fits(7, 1)
    assert not fits(7, 2)
"""


def _made(source: str) -> dict[str, str]:
    """Return the changed lines of all mutants: the new one by kind and old one."""
    found = {}
    for mutant in find_mutants("x.py", source):
        old, new = (line[1:].strip() for line in mutant.diff(source).splitlines())
        found[f"{mutant.kind}: {new}"] = old
    return found


@pytest.mark.parametrize(
    ("source", "made"),
    [
        ("x = a < b", ["comparison: x = a <= b"]),
        ("x = a >= b", ["comparison: x = a > b"]),
        ("x = a == b != c", ["comparison: x = a != b != c", "comparison: x = a == b == c"]),
        ("x = a not in b", ["comparison: x = a in b"]),
        ("x = a is not None", ["comparison: x = a is None"]),
        ("x = a and b and c", ["boolean: x = a or b or c"]),
        ("x = a or (b and c)", ["boolean: x = a and (b and c)", "boolean: x = a or (b or c)"]),
        ("x = not a", ["boolean: x = (a)"]),
        ("x = a + b * c", ["arithmetic: x = a - b * c", "arithmetic: x = a + b // c"]),
        (
            "x = a // b % -c",
            [
                "arithmetic: x = a * b % -c",
                "arithmetic: x = a // b // -c",
                "arithmetic: x = a // b % (c)",
            ],
        ),
        ("x = min(a, b)", ["arithmetic: x = max(a, b)"]),
        (
            "x = f(7, True, 0.5)",
            [
                "constant: x = f(8, True, 0.5)",
                "constant: x = f(7, False, 0.5)",
                "constant: x = f(7, True, 1.0)",
            ],
        ),
        ("x = 'ä', 7  # ö", ["constant: x = 'ä', 8  # ö"]),
        ("x += a", ["deleted statement: pass", "arithmetic: x -= a"]),
        ("self.x = a", ["deleted statement: pass"]),
        ("a.run()", ["deleted statement: pass"]),
        ("while a:\n    break", ["negated condition: while not (a):", "deleted statement: pass"]),
        (
            "x = a if b or c else d",
            ["negated condition: x = a if not (b or c) else d", "boolean: x = a if b and c else d"],
        ),
        ("x = [a for a in b if c(a)]", ["negated condition: x = [a for a in b if not (c(a))]"]),
        ("if a < b:\n    pass", ["comparison: if a <= b:", "negated condition: if not (a < b):"]),
        ("if a == b:\n    pass", ["comparison: if a != b:"]),
        ("if not a:\n    pass", ["boolean: if (a):"]),
        ("def f():\n    return", ["deleted statement: pass"]),
    ],
)
def test_a_fault_changes_one_place(source: str, made: list[str]) -> None:
    assert set(_made(source)) == set(made)


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring of 7."""',
        "x = 'text'",
        "x = f'{a + 7}'",
        "x = 'a' + b",
        "assert a < 7",
        "raise_s: Literal[7] = a",
        "def f(x: Literal[7] | None) -> A[3]: ...",
        "@cache(7)\ndef f(): ...",
        "x = zip(a, b, strict=True)",
        "logger.info('%d', a + 1)",
        "self._logger.warning('%d', a + 1)",
        "POLL_S = 0.2",
        "EARLY_S, LATE_S = 1.0, 2.0",
        "if TYPE_CHECKING:\n    x = 7",
        "x = a",
        "class A:\n    def __init__(self):\n        self.x = a",
    ],
)
def test_what_no_test_should_see_has_no_fault(source: str) -> None:
    assert find_mutants("x.py", source) == []


def test_every_fault_of_a_module_is_another_program() -> None:
    source = (TESTS / "mutation.py").read_text()
    mutants = find_mutants("mutation.py", source)
    trees = {ast.dump(ast.parse(mutant.apply(source))) for mutant in mutants}
    assert len(mutants) == len(trees) > 50
    assert ast.dump(ast.parse(source)) not in trees


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with a package of three modules, one of which is tested in its mirror, one by a test
    of another folder.
    """
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # which take longer than the tests
    files = {
        "router/shelf/toy.py": TOY,
        "router/shelf/user.py": "from tramontane.router.shelf import toy",
        "router/shelf/other.py": "x = 7",
        "tests/router/shelf/test_toy.py": TEST_OF_TOY,
        "tests/router/shelf/test_all.py": "",
        "tests/router/desk/test_user.py": (
            "import tramontane.router.shelf.user\n\n\ndef test_nothing():\n    pass\n"
        ),
        "tests/router/desk/test_other.py": "import tramontane.router.shelf.other",
        "tests/cluster/test_toy.py": "import tramontane.router.shelf.toy",
        "pyproject.toml": "[tool.pytest.ini_options]\nmarkers = ['ray']\n",
        ".venv/not_copied.py": "",
    }
    for name, text in files.items():
        (path := tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "root"


def test_the_tests_of_a_module_are_of_its_mirror_and_of_what_imports_it(root: Path) -> None:
    mirror = ["tests/router/shelf/test_toy.py", "tests/router/shelf/test_all.py"]
    assert mutation.tests_of("router/shelf/toy.py", root) == [
        *mirror,
        "tests/router/desk/test_user.py",
    ]
    assert mutation.tests_of("router/shelf/user.py", root) == [
        "tests/router/desk/test_user.py",
        *reversed(mirror),
    ]
    assert mutation.tests_of("router/shelf/other.py", root) == [
        "tests/router/desk/test_other.py",
        *reversed(mirror),
    ]


def test_the_modules_of_every_area_have_tests() -> None:
    for patterns in mutation.AREAS.values():
        modules = [path for pattern in patterns for path in mutation.ROOT.glob(pattern)]
        assert modules
        assert all(
            mutation.tests_of(str(path.relative_to(mutation.ROOT)), mutation.ROOT)
            for path in modules
        )


def test_a_sample_is_the_same_for_the_same_seed() -> None:
    mutants = find_mutants("toy.py", TOY)
    assert len(mutants) > 6
    assert (
        mutation.sample_of(mutants, 5, "0")
        == mutation.sample_of(mutants, 5, "0")
        != mutation.sample_of(mutants, 5, "1")
    )
    assert mutation.sample_of(mutants, 99, "0") == mutants


def _run(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *flags: str
) -> tuple[object, str, str]:
    """Run ``main`` on the toy tree, as ``python tests/mutation.py`` does on this one. Returns its
    status and its output.
    """
    monkeypatch.setattr(mutation, "AREAS", {"shelf": ("router/shelf/toy.py",)})
    monkeypatch.setattr(sys, "argv", ["mutation.py", "--areas", "shelf", *flags])
    with pytest.raises(SystemExit) as ended:
        mutation.main(root)
    out, err = capsys.readouterr()
    return ended.value.code, out, err


def test_survivors_are_shown_and_counted(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing tests that ``fits`` refuses to take nothing: one of nine faults survives, and the
    tree stays as it was.
    """
    before = {path: path.read_text() for path in root.rglob("*.py")}
    status, out, err = _run(root, monkeypatch, capsys, "--json")
    assert status == 1
    data = json.loads(out)
    found = data["areas"]["shelf"]
    assert [each["verdict"] for each in found].count("caught") == 8
    (survivor,) = [each for each in found if each["verdict"] == "survived"]
    assert survivor == {
        **{
            "path": "router/shelf/toy.py",
            "line": 16,
            "kind": "deleted statement",
            "verdict": "survived",
        },
        "diff": '-        raise ValueError(f"{more} is less than {1}")\n+        pass',
    }
    assert data["targets"] == [
        {
            "name": "faults that are caught, shelf",
            "figure": 8 / 9,
            "target": "at least 90 %",
            "met": False,
        }
    ]
    assert f"survived: router/shelf/toy.py:16 deleted statement\n{survivor['diff']}\n" in err
    assert {path: path.read_text() for path in root.rglob("*.py")} == before


def test_the_target_and_the_place_are_options(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = _run(
        root, monkeypatch, capsys, "--at", "router/shelf/toy.py:16", "--workers", "1"
    )
    assert status == 1
    assert "at least 90 %" in out
    assert (
        _run(root, monkeypatch, capsys, "--at", "router/shelf/toy.py:16", "--target", "0")[0] == 0
    )
    (root / "tests/router/shelf/test_toy.py").write_text(
        TEST_OF_TOY
        + "\n\ndef test_nothing():\n    import pytest\n\n    with pytest.raises(ValueError):\n     "
        "   fits(0, 0)\n"
    )
    assert _run(root, monkeypatch, capsys, "--at", "router/shelf/toy.py:16")[0] == 0


def test_without_a_fault_the_tests_must_pass(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "tests/router/shelf/test_toy.py").write_text("def test_never():\n    assert False\n")
    status, _, _ = _run(root, monkeypatch, capsys, "--sample", "1")
    assert "without a fault pytest ends with status 1 for tests/router/shelf/test_toy.py" in str(
        status
    )
    status, _, _ = _run(root, monkeypatch, capsys, "--at", "router/shelf/toy.py:2")
    assert status == "there is no fault to try in router/shelf/toy.py:2"


def test_tests_that_do_not_end_are_ended(root: Path, tmp_path: Path) -> None:
    (root / "tests/router/shelf/test_toy.py").write_text(
        "def test_never():\n    while True:\n        pass\n"
    )
    copy = mutation.Copy(root, tmp_path)
    assert copy.run(["tests/router/shelf/test_toy.py"], timeout_s=0.1) is None
    mutant = Mutant("router/shelf/toy.py", 11, "arithmetic", TOY.index("max("), "max", "min")
    outcome = copy.try_mutant(mutant, ["tests/router/shelf/test_toy.py"], 0.1)
    assert (outcome.verdict, outcome.is_caught) == ("endless", True)
    assert (copy.root / "router/shelf/toy.py").read_text() == TOY


def test_compiled_code_does_not_hide_a_fault(root: Path, tmp_path: Path) -> None:
    """Python compiles a module again if its size or the second of its change differs; a fault may
    differ in neither.
    """
    copy = mutation.Copy(root, tmp_path)
    path = copy.root / "router/shelf/toy.py"
    compiled = Path(py_compile.compile(str(path), doraise=True) or "")
    assert compiled.is_file()
    copy.write(path, TOY.replace("size - held", "size + held"))
    assert not compiled.exists()


def test_the_copy_is_what_its_tests_import(root: Path, tmp_path: Path) -> None:
    """Neither an installed tramontane nor the tree itself, in which other work may go on."""
    where = (
        "import tramontane.router.shelf.toy as toy\n\n\ndef test_where():\n    assert {!r} in"
        " toy.__file__\n"
    )
    copy = mutation.Copy(root, tmp_path)
    for folder, status in ((copy.root, 0), (root, 1)):
        (copy.root / "tests/router/shelf/test_toy.py").write_text(where.format(f"{folder}/"))
        assert copy.run(["tests/router/shelf/test_toy.py"]) == status
    assert not (copy.root / ".venv").exists()
