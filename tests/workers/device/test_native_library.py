"""Kernels in C are compiled by what the machine has; if it has nothing, one line says what to install."""

import stat
from collections.abc import Callable
from ctypes import CDLL
from pathlib import Path

import pytest

from tramontane.workers.device.native_library import CompilerError, compile_library

SOURCE = Path(__file__).parents[3] / "workers" / "kernels" / "fused_ops.c"


@pytest.fixture
def compile_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], CDLL]:
    """Compile with another compiler, whatever has been compiled before."""

    def compile_fresh(command: str) -> CDLL:
        monkeypatch.setenv("CC", command)
        library: CDLL = compile_library.__wrapped__(SOURCE, "float32")
        return library

    return compile_fresh


def _script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_without_a_compiler_the_package_to_install_is_named(compile_with: Callable[[str], CDLL]) -> None:
    with pytest.raises(CompilerError, match="there is no C compiler no-such-cc; Debian's package gcc has one"):
        compile_with("no-such-cc")


def test_a_compiler_that_fails_is_quoted_in_one_line(compile_with: Callable[[str], CDLL], tmp_path: Path) -> None:
    broken = _script(tmp_path / "broken", "echo 'no such target' >&2; echo 'in line 7' >&2; exit 1")
    with pytest.raises(CompilerError, match=r"broken cannot compile them: no such target \.\.\. in line 7$"):
        compile_with(broken)


def test_a_compiler_without_openmp_compiles_for_one_thread(compile_with: Callable[[str], CDLL], tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    without = _script(tmp_path / "without", f'echo "$*" >> {seen}; case "$*" in *-fopenmp*) exit 1;; esac; exec cc "$@"')
    try:
        compile_library(SOURCE, "float32")
    except CompilerError as error:
        pytest.skip(f"needs a C compiler: {error}")
    assert compile_with(without).silu_and_mul
    first, second = seen.read_text(encoding="utf-8").splitlines()
    assert "-DELEMENT=0" in first
    assert first == f"{second} -fopenmp"


def test_a_compiler_with_options_is_a_command(compile_with: Callable[[str], CDLL], tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    with pytest.raises(CompilerError):
        compile_with(_script(tmp_path / "noted", f'echo "$1" > {seen}; exit 1') + " -m32")
    assert seen.read_text(encoding="utf-8") == "-m32\n"
