"""Checks and figures of one GPU, and whole servers on it, in parts: each is a process with a time
limit of its own.

    python tests/bench/gpu.py [--out FOLDER] [--budget 560] [--parts smoke,tests,...] [--device
    cuda] [--small]

A CUDA error that makes a context unusable, a hang or a leak ends one part and no other. Parts are
in the order of their worth. ``report.json`` in FOLDER (.bench/gpu) is written again after each: its
state, seconds, rows, the end of its output, and the commit, which ``--commit`` names where git does
not know it. ``log.txt`` has all output. ``gpu_report.py`` prints tables of such reports. No
checkpoint is needed: weights are random, generated in place at the real geometry. The parts
``serve-...`` need Ray, and run only where they are named. ``--small --device cpu`` tries every part
on a CPU. What has not been started is printed last, as the ``--parts`` of the next call.

A part of which a figure misses its target, and which is right in all else, has the state "missed"
and not "failed". The exit status is 1 unless every part is "ok".
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import psutil
from targets import exit_status, none_of

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OUT = ROOT / ".bench" / "gpu"
TAIL = 4000  # characters of a part's output that the report has
MIN_SECONDS = 20  # a part with less time than this and than its limit is not started
GPU_TESTS = (
    "model/test_grouped_gemm_on_gpu.py",
    "kernels/test_quantized_linear.py",
    "kernels/test_triton_linear.py",
    "kernels/test_product_selection.py",
    "kernels/test_triton_moe.py",
    "attention/test_triton_attention.py",
    "attention/test_triton_decode.py",
    "stage/test_row_wise_backend.py",
    "weights/test_tensor_reader.py",
)
# Those that need no GPU have passed before, and Triton's interpreter does not run with every
# version of NumPy.
TESTS = "gpu and not without_a_gpu and not are_not_here"
PYTEST = (
    "-m",
    "pytest",
    "-q",
    "-p",
    "no:cacheprovider",
    "-o",
    "addopts=",
    "-o",
    "filterwarnings=default",
    "-k",
    TESTS,
)
MACHINE = f"""
nvidia-smi; lscpu | head -20; free -g | head -2; {sys.executable} --version
{sys.executable} -m pip list 2>/dev/null | grep -iE 'torch|triton|numpy|nvidia'; git log -1 --oneline || true
"""  # noqa: E501


@dataclass(frozen=True, slots=True)
class Part:
    """A program and its arguments, with the most seconds that it may take.

    ``writes_rows``: it takes ``--json FILE``, ``--device`` and ``--small``. ``needs_smoke``: it is
    not worth its time on a GPU on which that part failed.
    """

    limit_s: int
    command: tuple[str, ...]
    writes_rows: bool = True
    needs_smoke: bool = True


def _program(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, str(HERE / name), *arguments)


def _rows(*groups: str) -> tuple[str, ...]:
    return _program("gpu_rows.py", "--only", ",".join(groups))


def _server(limit_s: int, name: str) -> Part:
    return Part(limit_s, _program("gpu_server.py", name), needs_smoke=False)


PARTS = {
    "machine": Part(15, ("bash", "-c", MACHINE), writes_rows=False, needs_smoke=False),
    "smoke": Part(90, _program("gpu_smoke.py"), needs_smoke=False),
    "tests": Part(
        120,
        (sys.executable, *PYTEST, *(str(HERE.parent / "workers" / name) for name in GPU_TESTS)),
        writes_rows=False,
    ),
    "masks": Part(90, _rows("masks")),
    "replay": Part(60, _rows("replay,pieces")),
    "mistral": Part(120, _rows("mistral")),
    "profile": Part(75, _program("gpu_kernels.py", "profile")),
    "logits": Part(180, _rows("logits")),
    "linear": Part(60, _program("gpu_kernels.py", "linear")),
    "prefill": Part(45, _program("gpu_kernels.py", "prefill")),
    "mixtral": Part(120, _rows("mixtral")),
    "split-k": Part(120, _program("gpu_sweeps.py", "decode")),
    "gemv": Part(60, _program("gpu_sweeps.py", "gemv")),
    "host": Part(60, _program("gpu_kernels.py", "host")),
    "experts": Part(100, _program("gpu_kernels.py", "experts")),
    "rolling": Part(75, _rows("rolling")),
    "channels": Part(60, _program("gpu_channels.py")),
    "stages": Part(150, _program("gpu_stages.py")),
    "transformers": Part(120, _rows("transformers")),
    "invariance": Part(90, _rows("invariance")),
    "invariance-cost": Part(90, _rows("invariance-cost")),
    "quantized": Part(120, _rows("quantized")),
    "pages": Part(90, _rows("pages")),
    "sanitizer": Part(150, _rows("sanitizer")),
}
SERVERS = {
    f"serve-{name}": _server(limit_s, name)
    for name, limit_s in {
        "where": 40,
        "one": 170,
        "shared": 240,
        "fp8": 130,
        "exact": 170,
        "mixtral": 150,
        "latent": 120,
        "correct": 90,
        "disk": 200,
        "profile": 120,
        "store": 110,
        "speculation": 110,
    }.items()
}


@dataclass(frozen=True, slots=True)
class Report:
    """What became of a part: ``state`` is ok, missed, failed, exit N, timed out, skipped, or no
    time.
    """

    state: str
    seconds: float = 0.0
    rows: list[dict[str, Any]] | None = None
    tail: str = ""


def main() -> int:
    options = _options()
    flags = ["--device", options.device, *(["--small"] if options.small else [])]
    reports = run_parts(
        options.parts, flags, options.budget, options.out, options.commit or commit_of(ROOT)
    )
    return exit_status(
        [
            none_of(
                "parts that are not ok",
                [name for name, each in reports.items() if each.state != "ok"],
            )
        ]
    )


def commit_of(root: Path) -> str | None:
    """Return the commit of a checkout, with "-dirty" if tracked files were changed; None for copies
    without a history.
    """
    command = ("git", "describe", "--always", "--dirty", "--exclude=*")
    # not of a repository around the copy
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(root.parent)}
    with suppress(FileNotFoundError):  # git is not installed
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, check=False
        )
        return done.stdout.strip() or None
    return None


def run_parts(
    names: Sequence[str],
    flags: Sequence[str],
    budget_s: float,
    out: Path,
    commit: str | None = None,
) -> dict[str, Report]:
    """Run parts in their order; ``out`` has what is known after each, and of which commit."""
    out.mkdir(parents=True, exist_ok=True)
    ends_at, reports = time.monotonic() + budget_s, dict[str, Report]()
    with (out / "log.txt").open("w") as log:
        for name in names:
            has_smoke_failed = "smoke" in reports and reports["smoke"].state != "ok"
            part = (PARTS | SERVERS)[name]
            if part.needs_smoke and has_smoke_failed:
                reports[name] = Report("skipped")
            else:
                reports[name] = run_part(part, flags, ends_at - time.monotonic(), out, log)
            known = {n: asdict(each) | {"commit": commit} for n, each in reports.items()}
            (out / "report.json").write_text(json.dumps(known, indent=1))
            print(
                f"{name:16s} {reports[name].state:10s} {reports[name].seconds:6.1f} s", flush=True
            )
    if left := [name for name, each in reports.items() if each.state == "no time"]:
        print(f"not started: --parts {','.join(left)}", flush=True)
    return reports


def run_part(part: Part, flags: Sequence[str], left_s: float, out: Path, log: TextIO) -> Report:
    """Run a part for at most its limit and ``left_s``.

    Then its process group is killed in any case, and what it has started, so that nothing of it
    stays on the GPU: Ray's daemons have groups of their own and outlive a server that is killed.
    """
    if left_s < min(part.limit_s, MIN_SECONDS):
        return Report("no time")
    rows_file = out / "rows.json"
    rows_file.unlink(missing_ok=True)
    command = (
        [*part.command, *flags, "--json", str(rows_file)]
        if part.writes_rows
        else list(part.command)
    )
    log.write(f"\n===== {' '.join(command)}\n")
    log.flush()
    begins_at, began = os.fstat(log.fileno()).st_size, time.monotonic()
    process = subprocess.Popen(
        command,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    code: int | None = None  # if it is killed
    with suppress(subprocess.TimeoutExpired):
        code = process.wait(timeout=min(part.limit_s, left_s))
    end_children(process.pid)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    seconds, rows = time.monotonic() - began, _read(rows_file)
    rows_file.unlink(missing_ok=True)
    output = Path(log.name).read_bytes()[begins_at:].decode(errors="replace")
    return Report(state_of(code, rows or []), round(seconds, 1), rows, output[-TAIL:])


def end_children(pid: int) -> None:
    """Kill all that a process has started: Ray's daemons outlive a driver that was killed."""
    with suppress(psutil.Error):
        for each in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.Error):
                each.kill()


def _read(rows_file: Path) -> list[dict[str, Any]] | None:
    """Return the rows so far, or None if there are none, also where a part was killed while it
    wrote them.
    """
    with suppress(FileNotFoundError, ValueError):
        rows: list[dict[str, Any]] = json.loads(rows_file.read_text())
        return rows
    return None


def state_of(code: int | None, rows: Sequence[dict[str, Any]]) -> str:
    """Return the state of a part by its exit status, None if it was killed, and by its rows.

    The limits of figures are "at least", those of checks "<" and those of errors "at most".
    """
    if code is None:
        return "timed out"
    limits = [str(row.get("wanted", "")) for row in rows if row.get("holds") is False]
    if code == 1 and limits:
        return "missed" if all(limit.startswith("at least") for limit in limits) else "failed"
    return "ok" if code == 0 else f"exit {code}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT, metavar="FOLDER")
    parser.add_argument("--budget", type=float, default=560, metavar="SECONDS")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--commit", help="of the code, where git does not know it")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS | SERVERS):
        parser.error(
            f"--parts {', '.join(sorted(unknown))} is unknown; the parts are"
            f" {', '.join(PARTS | SERVERS)}"
        )
    return options


if __name__ == "__main__":
    sys.exit(main())
