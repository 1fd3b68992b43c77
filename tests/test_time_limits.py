"""Bounds of time fit each other: what waits for an answer waits longer than the answer may take."""

import ast
from itertools import pairwise
from pathlib import Path

import pytest

from tramontane.cluster.common import node_watch
from tramontane.proto import timing
from tramontane.proto.timing import ASCENDING

ROOT = Path(__file__).parent.parent
NODES = "a dead node is announced while requests may still be sent to it"
# of a package that may not import proto
NODE_BOUNDS_S = (node_watch.POLL_INTERVAL_S, node_watch.ACK_TIMEOUT_S, node_watch.RECENT_DEATH_S)
BOUNDS_S = {**ASCENDING, NODES: NODE_BOUNDS_S}


@pytest.mark.parametrize("reason", BOUNDS_S)
def test_bounds_of_time_ascend(reason: str) -> None:
    bounds_s = BOUNDS_S[reason]
    assert bounds_s[0] > 0
    assert all(shorter < longer for shorter, longer in pairwise(bounds_s)), bounds_s
    assert bounds_s[-1] <= 600, (
        "nothing is waited for longer than for weights to load, or for a server to drain"
    )


def _limits() -> set[str]:
    return {name for name in vars(timing) if name.isupper() and name != "ASCENDING"} - {"_OFFSET_S"}


def test_every_limit_of_the_table_has_its_order() -> None:
    tree = ast.parse(Path(timing.__file__).read_text())
    table = next(
        node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "ASCENDING"
    )
    assert table is not None
    derived = {
        ast.unparse(node.targets[0]): node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0])[0] == "_"
    }
    trees = [table, *(derived[name] for name in ("_RENEWAL_S", "_DEAD_REPLICA_S"))]
    used = {node.id for each in trees for node in ast.walk(each) if isinstance(node, ast.Name)}
    assert _limits() - used == set()


def test_no_module_has_a_limit_of_the_table_of_its_own() -> None:
    found = [
        f"{file.relative_to(ROOT)}: {target.id}"
        for room in ("proto", "workers", "router", "cluster")
        for file in sorted((ROOT / room).rglob("*.py"))
        if file.name != "timing.py"
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.Assign)
        for each in node.targets
        for target in ast.walk(each)
        if isinstance(target, ast.Name) and target.id in _limits()
    ]
    assert found == []
