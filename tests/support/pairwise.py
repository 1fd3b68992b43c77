"""Tests of some combinations of parameters in place of all: of those that hold each pair of two
parameters' values.

A test with the mark ``pairwise`` runs with these combinations only, unless pytest has the option
``--full-products``. Most faults need one value of one parameter, or two of two; few need three.

The choice is greedy, as that of Cohen et al., "The AETG System" (1997): again and again the
combination with most pairs that no chosen one has. Of 3 x 2 x 2 combinations these are 6: each
value of the first parameter with each of the second, and the values of the third in turns. Packages
for this make rows of a full product; these are of those that a test has, with holes and marks.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations

import pytest

Row = tuple[int, ...]  # the number of each parameter's value


def covering(rows: Sequence[Row]) -> list[Row]:
    """Choose rows that have all pairs of values of two parameters which the given ones have, the
    first and the last row too.
    """
    rows = sorted(rows)
    chosen, missing = [], {pair for row in rows for pair in _pairs(row)}
    corners = iter((rows[0], rows[-1]))
    while missing:
        row = next(corners, None) or max(rows, key=lambda each: len(missing & _pairs(each)))
        chosen.append(row)
        missing -= _pairs(row)
    return chosen


def _pairs(row: Row) -> set[tuple[tuple[int, int], ...]]:
    """Return the pairs of a row; a row of one parameter has its one value in place of pairs."""
    return set(combinations(enumerate(row), min(2, len(row))))


def left_out(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Return those items of tests with the mark ``pairwise`` whose pairs others have."""
    tests = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("pairwise"):
            tests[item.nodeid.partition("[")[0]].append(item)
    rows = [_by_row(each) for each in tests.values()]
    return {
        item
        for each in rows
        for item in set(each.values()) - {each[row] for row in covering([*each])}
    }


def _by_row(items: Sequence[pytest.Item]) -> dict[Row, pytest.Item]:
    """Return the items of a test by the numbers of their values, which count from 0 in the order of
    the items.
    """
    numbers, found = defaultdict[str, dict[int, int]](dict), {}
    for item in items:
        parameters: dict[str, object] = item.callspec.params  # type: ignore[attr-defined]
        values = ((numbers[name], id(value)) for name, value in sorted(parameters.items()))
        found[tuple(known.setdefault(value, len(known)) for known, value in values)] = item
    return found
