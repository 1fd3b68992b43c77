"""Engines of benchmarks in processes of their own: answers by lines, pauses, and what is said of
one that ends.
"""

import sys
from pathlib import Path

import psutil
import pytest
from engine_process import EngineError, EngineProcess

pytestmark = pytest.mark.nightly

ECHO = """
import json, os, sys
print("loading ...")
print(json.dumps({"about": os.environ["WHAT"]}), flush=True)
for line in sys.stdin:
    work = json.loads(line)
    print("a warning")
    print(json.dumps({"seconds": work["sampling"]["s"], "token_ids": work["prompts"]}), flush=True)
"""


@pytest.mark.parametrize("pauses", [False, True])
def test_it_answers_work_and_is_paused_in_between(tmp_path: Path, pauses: bool) -> None:
    engine = EngineProcess(
        [sys.executable, "-c", ECHO], {"WHAT": "an echo"}, tmp_path / "log", pauses
    )
    try:
        process = psutil.Process(engine.pid)
        for number in range(2):
            while pauses and process.status() != psutil.STATUS_STOPPED:
                pass
            assert pauses or process.status() != psutil.STATUS_STOPPED
            assert engine.run([[number, 5]], {"s": 2.5}) == (2.5, [[number, 5]])
        assert engine.about == "an echo"
    finally:
        engine.close()
    assert not process.is_running()


def test_one_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"status 3.*out of memory"):
        EngineProcess(
            [
                sys.executable,
                "-c",
                "import sys; print('out of memory', file=sys.stderr); sys.exit(3)",
            ],
            {},
            tmp_path / "log",
        )
