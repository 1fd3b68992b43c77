"""The command run in this process, where it must complain."""

import io
import re
import sys
from collections.abc import Callable, Iterator

import pytest

from tramontane.cluster.cli import main as cli
from tramontane.cluster.planning import runtime_memory
from tramontane.cluster.planning.runtime_memory import RuntimeMemory

# What may stand above the complaint: how far the command had come.
MEMORY = r"\S+ \S+ of weights, up to \S+ \S+ of key/value cache per stage \(--kv-cache-memory\)"
PROGRESS = re.compile(
    rf"(checking the checkpoint|loading the model, {MEMORY}|starting Ray|joining Ray at \S+) \.\.\."
)


@pytest.fixture
def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Runs ``tramontane`` in this process; returns the one line of complaint, after asserting that
    there is just one.
    """

    def run(*arguments: object, code: int = 2, stdin: bytes | None = b"") -> str:
        monkeypatch.setattr(sys, "argv", ["tramontane", *map(str, arguments)])
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        out, err = capsys.readouterr()
        assert exit_.value.code == code
        assert out == ""
        return _only_complaint(err)

    return run


def _only_complaint(err: str) -> str:
    """The last line, the only one that begins with "error: "; before it nothing but progress."""
    assert err.endswith("\n")
    *before, last = err.splitlines()
    assert last.startswith("error: ")
    assert all(PROGRESS.fullmatch(line) for line in before), err
    assert "Traceback" not in last
    return last.removeprefix("error: ")


@pytest.fixture(scope="class")  # also for tests of many examples
def bare_gpus() -> Iterator[None]:
    """On GPUs of some KiB there is no place for CUDA, nor for more than weights and cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime_memory, "gpu_runtime", lambda *_, **__: RuntimeMemory(0, 0, 0, 0, 0))
        yield
