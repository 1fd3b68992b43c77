"""Tests marked ``pairwise`` run with combinations that have all pairs of values, and with all
combinations by an option.
"""

import os
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path

import pytest
from pairwise import Row, covering

SUPPORT = Path(__file__).parent / "support"
A_TEST = """
import pytest

@pytest.fixture(params="ab")
def kind(request): return request.param

@pytest.mark.pairwise
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("low", "high"), [(1, 2), (1, 3), (2, 3)])
def test_it(kind, size, low, high): ...
"""
ROWS = {
    "full": list(product(range(4), range(3), range(5), range(2))),
    "with holes": [
        row for row in product(range(4), range(3), range(5)) if row[0] != row[1] and sum(row) % 7
    ],
    "two parameters": list(product(range(4), range(3))),
    "one parameter": [(0,), (1,), (2,)],
    "one row": [(0, 0, 0)],
}


def _pairs(rows: list[Row]) -> set[tuple[int, int, int, int]]:
    return {(i, row[i], j, row[j]) for row in rows for i, j in combinations(range(len(row)), 2)}


@pytest.mark.parametrize("name", ROWS)
def test_every_pair_that_was_there_is_there(name: str) -> None:
    rows = ROWS[name]
    chosen = covering(rows)
    assert set(chosen) <= set(rows)
    assert len(set(chosen)) == len(chosen)
    assert _pairs(chosen) == _pairs(rows)
    assert {value for row in chosen for value in enumerate(row)} == {
        value for row in rows for value in enumerate(row)
    }
    assert {min(rows), max(rows)} <= set(chosen)


def test_few_of_many_are_chosen_and_always_the_same() -> None:
    """At least 20 of 120, as two parameters have 4 and 5 values."""
    assert 20 <= len(covering(ROWS["full"])) <= 26
    assert covering(ROWS["full"]) == covering(ROWS["full"][::-1])
    assert len(covering(ROWS["two parameters"])) == 12


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("options", "outcome"), [((), "6 passed, 6 deselected"), (("--full-products",), "12 passed")]
)
def test_pytest_runs_them(tmp_path: Path, options: tuple[str, ...], outcome: str) -> None:
    """Also with a fixture's parameters, and where values of two parameters are not all together."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = pairwise")
    (tmp_path / "test_small.py").write_text(A_TEST)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(SUPPORT), str(SUPPORT.parent), *sys.path])
    }
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", *options]
    run = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert outcome in run.stdout
