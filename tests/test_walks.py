"""How many modules a reader goes through for a chat completion and for a step of a stage: the
numbers may only become smaller, and ARCHITECTURE.md has what is measured.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import walk
from walk import CHAT_COMPLETION, STAGE_STEP, Recorder, Walk

# A change may only lower these. See the module docstring of ``walk`` for what a return is.
# 232 since a request's fields without effect are noted, and its history is repaired
MAX_CHAT_MODULES, MAX_CHAT_RETURNS = 62, 232
MAX_STAGE_STEP_MODULES, MAX_STAGE_STEP_RETURNS = 25, 71
REWRITE = "ARCHITECTURE.md has other walks; run .venv/bin/python tests/support/walk.py --write"


def excess(measured: Walk, max_modules: int, max_returns: int) -> list[str]:
    """Return what a walk has more of than it may, with the modules that tell what to look at."""
    counts = {
        "modules": (len(measured.modules), max_modules),
        "returns": (measured.num_returns, max_returns),
    }
    return [
        f"{number} {name}, at most {limit}: {' '.join(measured.stays)}"
        for name, (number, limit) in counts.items()
        if number > limit
    ]


@pytest.fixture(scope="module")
def walks() -> dict[str, Walk]:
    """Return both walks, measured in a new process."""
    run = subprocess.run(
        [sys.executable, walk.__file__], check=True, capture_output=True, text=True
    )
    return {name: Walk(tuple(each["stays"])) for name, each in json.loads(run.stdout).items()}


def test_the_walk_of_a_chat_completion_does_not_grow(walks: dict[str, Walk]) -> None:
    assert excess(walks[CHAT_COMPLETION], MAX_CHAT_MODULES, MAX_CHAT_RETURNS) == []


def test_the_walk_of_a_stage_step_does_not_grow(walks: dict[str, Walk]) -> None:
    assert excess(walks[STAGE_STEP], MAX_STAGE_STEP_MODULES, MAX_STAGE_STEP_RETURNS) == []


def test_the_walks_go_through_the_main_modules(walks: dict[str, Walk]) -> None:
    """A recorder that misses a thread, or begins too late, would find few modules."""
    assert {
        "cluster/http/token_endpoints.py",
        "cluster/serving/pipeline_client.py",
        "router/engine/router.py",
    } <= set(walks[CHAT_COMPLETION].modules)
    assert {"workers/stage/stage_worker.py", "workers/model/transformer.py"} <= set(
        walks[STAGE_STEP].modules
    )


def test_the_architecture_has_the_measured_walks(walks: dict[str, Walk]) -> None:
    page = walk.PAGE.read_text(encoding="utf-8")
    assert walk.with_block(page, walk.block(walks)) == page, REWRITE


# Planted faults, in the rooms "a", "b", "c" and "d" of another repository

MODULES = {
    "a": "def f(b, c):\n    b.g()\n    b.g()\n    h(c)\n\ndef h(c):\n    c.i()\n",
    "b": "def g():\n    pass\n",
    "c": "def i():\n    pass\n",
    "d": "import threading\n\ndef i():\n    pass\n",
}


@pytest.fixture
def follow(tmp_path: Path) -> Callable[[str], Walk]:
    """Return the function that follows ``a.f``, where ``a.h`` calls this module."""

    def follow_with(last: str) -> Walk:
        loaded = {}
        for name, source in MODULES.items():
            path = tmp_path / name / "module.py"
            path.parent.mkdir()
            path.write_text(source)
            spec = spec_from_file_location(f"walk_{name}", path)
            assert spec is not None
            assert spec.loader is not None
            loaded[name] = module_from_spec(spec)
            spec.loader.exec_module(loaded[name])
        with walk.installed(Recorder(tmp_path, ("a", "b", "c"))) as recorder:
            loaded["b"].g()  # before the walk
            with recorder.noting():
                thread = threading.Thread(target=loaded["a"].f, args=(loaded["b"], loaded[last]))
                thread.start()
                thread.join()
            loaded["c"].i()  # after it
        return recorder.walk()

    return follow_with


def test_the_example_of_the_docstring(follow: Callable[[str], Walk]) -> None:
    measured = follow("c")
    assert measured.stays == ("a/module.py", "b/module.py", "a/module.py", "c/module.py")
    assert (len(measured.modules), measured.num_returns) == (3, 1)
    assert excess(measured, 3, 1) == []


def test_functions_outside_of_the_rooms_do_not_count(follow: Callable[[str], Walk]) -> None:
    assert follow("d").modules == ("a/module.py", "b/module.py")


def test_a_planted_module_and_a_planted_return_are_found(follow: Callable[[str], Walk]) -> None:
    stays = "a/module.py b/module.py a/module.py c/module.py"
    measured = follow("c")
    assert excess(measured, 2, 1) == [f"3 modules, at most 2: {stays}"]
    assert excess(measured, 3, 0) == [f"1 returns, at most 0: {stays}"]


def test_other_walks_change_the_page() -> None:
    page = f"# Page\n\n{walk.BEGIN}\nold\n{walk.END}\n\nText.\n"
    block = walk.block({"A walk": Walk(("a/x.py", "b/y.py", "a/z.py", "b/y.py"))})
    assert walk.with_block(page, block) == (
        f"# Page\n\n{walk.BEGIN}\nA walk: 3 modules, 1 returns.\n\n"
        "| package | modules, in the order of their first calls |\n|---|---|\n"
        f"| `a` | `x`, `z` |\n| `b` | `y` |\n\n{walk.END}\n\nText.\n"
    )
    with pytest.raises(ValueError, match="substring not found"):
        walk.with_block("# Page\n", block)
