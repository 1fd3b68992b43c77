"""Checks of Triton kernels by its interpreter: the functions ``CHECKS`` of a module, on the CPU.

A program of its own, because the interpreter has to be chosen before Triton is imported. Prints, as
JSON, the traceback of each check that failed and an empty string for each other. On a GPU the same
functions are called directly.
"""

import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

from examples import runs_all

Check = Callable[[str], None]  # of a device


def run_interpreted(module: str, *names: str) -> dict[str, str]:
    """Run checks of a module of this folder, all if none is named; return what each failed with, or
    nothing.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__, module, *names],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    failures: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return failures


def some(names: Iterable[str]) -> list[str]:
    """Return each third of these checks, of which the interpreter takes seconds for one; all in
    ``make nightly``.
    """
    return list(names) if runs_all() else list(names)[::3]


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    importlib.import_module("triton_on_cpu")
    import torch

    torch.set_num_threads(1)
    checks: dict[str, Check] = importlib.import_module(sys.argv[1]).CHECKS
    failures = {}
    for name in sys.argv[2:] or checks:
        try:
            checks[name]("cpu")
            failures[name] = ""
        except Exception:
            failures[name] = traceback.format_exc()
    print(json.dumps(failures))


if __name__ == "__main__":
    main()
