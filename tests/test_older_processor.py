"""The second run of tests is on an older processor in fact, as the libraries say, or it fails; and
``make test`` has it.
"""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import older_processor
import pytest

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
NEWER = {
    "ATen": "AVX512",
    "oneDNN": "Intel AVX-512",
    "NumPy": "AVX2 AVX512F",
    "OpenBLAS": "SkylakeX",
    "kernels in C": "avx512f",
}


class Started(Exception):
    """Stands for a process that has been replaced."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], Mapping[str, str]]]:
    """What is run, and its environment."""
    calls: list[tuple[list[str], Mapping[str, str]]] = []

    def execve(_path: str, arguments: list[str], environment: Mapping[str, str]) -> None:
        calls.append((arguments, environment))
        raise Started

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setattr(older_processor.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(older_processor, "newer_features", lambda: ["AVX512F", "AVX512_SKX"])
    monkeypatch.setattr(sys, "argv", ["older_processor.py", "-m", "pytest", "tests/some.py"])
    return calls


@pytest.mark.nightly
def test_tests_run_with_the_instructions_that_are_shown(
    started: list[tuple[list[str], Mapping[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(older_processor, "instructions", lambda _: older_processor.EXPECTED)
    with pytest.raises(Started):
        older_processor.main()
    ((arguments, environment),) = started
    assert arguments == [sys.executable, "-m", "pytest", "tests/some.py"]
    assert environment["NPY_DISABLE_CPU_FEATURES"] == "AVX512F AVX512_SKX"
    assert environment["ATEN_CPU_CAPABILITY"] == "avx2"
    assert environment.items() >= older_processor.VARIABLES.items()
    shown = (
        "instructions: ATen AVX2, oneDNN Intel AVX2, NumPy AVX2, OpenBLAS Haswell, kernels in C"
        " avx2\n"
    )
    assert capsys.readouterr().out == shown


@pytest.mark.nightly
@pytest.mark.parametrize("library", NEWER)
def test_nothing_runs_where_a_variable_has_no_effect(
    library: str,
    started: list[tuple[list[str], Mapping[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reported = {**older_processor.EXPECTED, library: NEWER[library]}
    monkeypatch.setattr(older_processor, "instructions", lambda _: reported)
    assert older_processor.main() == 1
    assert not started


@pytest.mark.nightly
def test_libraries_are_asked_in_the_environment_of_the_tests() -> None:
    """Not in that of this process: on a processor with AVX2 or more OpenBLAS and the compiler can
    use less.
    """
    if older_processor.platform.machine() != "x86_64":
        pytest.skip("the variables are those of x86-64")
    older = {
        "OPENBLAS_CORETYPE": "Nehalem",
        "CC": "cc -march=x86-64",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
    }
    reported = older_processor.instructions({**os.environ, **older})
    assert (reported["OpenBLAS"], reported["kernels in C"], reported["oneDNN"]) == (
        "Nehalem",
        "",
        "Intel SSE4.1",
    )


def test_make_test_runs_it() -> None:
    recipe = re.search(r"^test:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert recipe is not None
    assert "test-older-processor" in recipe[1].partition("served=$$?")[0]
    listed = re.search(r"^OF_PRODUCTS = ((?:.*\\\n)*.*)", MAKEFILE, re.MULTILINE)
    assert listed is not None
    text = listed[1].replace("\\\n", " ")
    files = [
        f"{prefix}{name}"
        for prefix, names in re.findall(r"\$\(addprefix (\S+), ([^)]+)\)", text)
        for name in names.split()
    ]
    files += re.sub(r"\$\([^)]*\)", "", text).split()
    assert len(files) > 5
    assert not [file for file in files if not (ROOT / file).exists()]
