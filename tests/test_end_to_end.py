"""The command as a user runs it, in a process of its own, over a Ray of its own."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

COMMAND = [str(Path(sys.executable).parent / "tramontane"), "generate"]
PROMPTS = [
    "ROMEO:",
    "What news from Rome, and what of the tribunes?",
    "O",
    "KING RICHARD III:\n" * 12,
]


def _environment(home: Path) -> dict[str, str]:
    """As on a machine that has never seen Ray: no authentication mode chosen, an empty home."""
    return {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {"HOME": str(home)}


def _run(home: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *args], env=_environment(home), capture_output=True, text=True, check=True
    )


def _restore_signals() -> None:
    """A test run in the background of a shell would pass on that it ignores Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _ray_processes_of(home: Path) -> list[str]:
    """Ray processes that this test started, recognized by the home they inherited."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("HOME") == str(home):
                found.append(process.name())
        except psutil.Error:
            continue
    return found


@pytest.mark.nightly
def test_over_ray_and_locally_the_same_tokens(tmp_path: Path) -> None:
    options = ["--json", "--dtype", "float32", "--temperature", "0", "--max-tokens", "40", *PROMPTS]
    over_ray = json.loads(_run(tmp_path, "--stages", "2", *options).stdout)
    locally = json.loads(_run(tmp_path, "--local", "--stages", "4", *options).stdout)
    assert [c["token_ids"] for c in over_ray["completions"]] == [
        c["token_ids"] for c in locally["completions"]
    ]
    assert [c["prompt"] for c in over_ray["completions"]] == PROMPTS
    assert {len(c["token_ids"]) for c in over_ray["completions"]} == {40}
    assert [s["layers"] for s in over_ray["stages"]] == [[0, 3], [4, 7]]
    prompt_tokens = over_ray["stages"][0]["tokens"] - 4 * 39  # the last new token is not fed back
    assert prompt_tokens == locally["stages"][0]["tokens"] - 4 * 39 > 80
    assert 0 < over_ray["bubble"] < 1
    assert not (tmp_path / ".ray").exists(), "no token is left in the user's home"
    assert _ray_processes_of(tmp_path) == []


def _start(home: Path, *args: str) -> "subprocess.Popen[str]":
    """Start the command. Where native code or the interpreter would crash, standard error has the
    stack of every thread.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = _environment(home) | {"PYTHONFAULTHANDLER": "1"}
    return subprocess.Popen(
        [*COMMAND, *args], env=environment, text=True, preexec_fn=_restore_signals, **pipes
    )


@pytest.mark.parametrize(
    ("number", "where"),
    [(signal.SIGTERM, ()), (signal.SIGINT, ("--local",)), (signal.SIGHUP, ("--local",))],
)
def test_a_signal_ends_it_and_leaves_nothing(
    tmp_path: Path, number: signal.Signals, where: tuple[str, ...]
) -> None:
    """Over Ray one of them: all three are handled in one function."""
    with _start(tmp_path, *where, "--max-tokens", "2000", "ROMEO:") as process:
        assert process.stdout is not None
        assert len(process.stdout.read(20)) == 20  # the prompt and the first of many tokens
        process.send_signal(number)
        _, errors = process.communicate()
    assert process.returncode == 130, errors
    assert errors.splitlines()[-1] == "error: interrupted", errors
    assert "Traceback" not in errors
    assert "***" not in errors, (
        "Ray's library has handled the signal, and would abort the process in three seconds"
    )
    assert _ray_processes_of(tmp_path) == []


def test_ctrl_c_while_the_stages_load(tmp_path: Path) -> None:
    with _start(tmp_path, "ROMEO:") as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("loading"):
                break
        process.send_signal(signal.SIGINT)
        errors = process.stderr.read()
    assert process.wait() == 130, errors
    assert errors.splitlines() == ["removing the stages ...", "error: interrupted"]
    assert _ray_processes_of(tmp_path) == []
