"""Kernels in C are compiled by what the machine has, and kept; if it has nothing, one line says
what to install.
"""

import hashlib
import os
import platform
import shutil
import stat
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import CDLL
from pathlib import Path
from types import SimpleNamespace

import pytest

from tramontane.workers.device import native_library
from tramontane.workers.device.native_library import CompilerError, compile_library, source_digest

Compile = Callable[[str], CDLL]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "seven.c"
    path.write_text(
        '#include "element.h"\nint seven(void) { return MORE + 7 + (int)sizeof(element); }\n',
        encoding="utf-8",
    )
    return path


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def compile_with(source: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> Compile:
    """Compile with another compiler, as a new process would; ``temporary`` is the machine's
    temporary folder.
    """
    assert temporary.is_dir()

    def compile_fresh(command: str) -> CDLL:
        monkeypatch.setenv("CC", command)
        library: CDLL = compile_library.__wrapped__(source, "float32", MORE=100)
        return library

    return compile_fresh


@pytest.fixture
def noted(tmp_path: Path, compile_with: Compile) -> tuple[str, Path]:
    """A compiler that notes its arguments in a file before it calls the machine's own."""
    seen = tmp_path / "seen"
    try:
        compile_with("cc")
    except CompilerError as error:
        pytest.skip(f"needs a C compiler: {error}")
    return _script(tmp_path / "noted", f'echo "$*" >> {seen}; exec cc "$@"'), seen


def _script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_without_a_compiler_the_package_to_install_is_named(compile_with: Compile) -> None:
    with pytest.raises(
        CompilerError, match="there is no C compiler no-such-cc; Debian's package gcc has one"
    ):
        compile_with("no-such-cc")


def test_a_compiler_that_fails_is_quoted_in_one_line(compile_with: Compile, tmp_path: Path) -> None:
    broken = _script(tmp_path / "broken", "echo 'no such target' >&2; echo 'in line 7' >&2; exit 1")
    with pytest.raises(
        CompilerError, match=r"broken cannot compile them: no such target \.\.\. in line 7$"
    ):
        compile_with(broken)


def test_a_compiler_with_options_is_a_command(compile_with: Compile, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    with pytest.raises(CompilerError):
        compile_with(_script(tmp_path / "noted", f'echo "$1" > {seen}; exit 1') + " -m32")
    assert seen.read_text(encoding="utf-8") == "-m32\n"


def test_a_compiler_without_openmp_compiles_for_one_thread(
    compile_with: Compile, noted: tuple[str, Path], tmp_path: Path
) -> None:
    compiler, seen = noted
    without = f'case "$*" in *-fopenmp*) echo "$*" >> {seen}; exit 1;; esac; exec {compiler} "$@"'
    assert compile_with(_script(tmp_path / "without", without)).seven() == 111
    first, second = seen.read_text(encoding="utf-8").splitlines()
    assert "-DELEMENT=0 -DMORE=100" in first
    assert first == f"{second} -fopenmp"


def test_stages_that_start_together_compile_once(
    compile_with: Compile, noted: tuple[str, Path], tmp_path: Path
) -> None:
    """All of them find that there is no library: the compiler does not end before the others have
    looked.
    """
    compiler, seen = noted
    slow = _script(tmp_path / "slow", f'sleep 0.5; exec {compiler} "$@"')
    with ThreadPoolExecutor(4) as pool:
        assert [library.seven() for library in pool.map(compile_with, [slow] * 4)] == [111] * 4
    assert len(seen.read_text(encoding="utf-8").splitlines()) == 1


def test_what_is_compiled_is_kept_until_something_changes(
    compile_with: Compile,
    noted: tuple[str, Path],
    source: Path,
    temporary: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler, seen = noted

    def times() -> int:
        assert compile_with(compiler).seven() in (111, 112)
        return len(seen.read_text(encoding="utf-8").splitlines())

    assert (times(), times()) == (1, 1)
    source.write_text(source.read_text(encoding="utf-8").replace("7", "8"), encoding="utf-8")
    assert (times(), times()) == (2, 2)
    monkeypatch.setattr(native_library, "processor", lambda: "another one")
    assert (times(), times()) == (3, 3)
    Path(compiler).touch()
    assert (times(), times()) == (4, 4)
    (folder,) = temporary.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.suffix for path in folder.iterdir()] == [".so"] * 5, (
        "and the one of cc itself; nothing else is left"
    )


def _group_writable(folder: Path) -> None:
    folder.chmod(0o770)


def _of_another_user(folder: Path) -> None:
    if os.getuid():
        pytest.skip("only root can give a folder away")
    os.chown(folder, 12345, 12345)


def _a_link(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"))


def _a_dangling_link(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.symlink_to("nowhere")


def _a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("x", encoding="utf-8")


@pytest.mark.parametrize(
    "take", [_group_writable, _of_another_user, _a_link, _a_dangling_link, _a_file]
)
def test_a_folder_that_is_not_this_users_is_not_used(
    compile_with: Compile,
    noted: tuple[str, Path],
    temporary: Path,
    caplog: pytest.LogCaptureFixture,
    take: Callable[[Path], None],
) -> None:
    """Another user who made it cannot turn kernels off: a process has a folder of its own then."""
    compiler, seen = noted
    (folder,) = temporary.iterdir()
    take(folder)
    known = {*temporary.iterdir()}
    before = {path for each in known if each.is_dir() for path in each.iterdir()}
    assert compile_with(compiler).seven() == compile_with(compiler).seven() == 111
    (private,) = {*temporary.iterdir()} - known
    assert private.stat().st_mode & 0o777 == 0o700
    assert len([*private.iterdir()]) == 1
    assert {path for each in known if each.is_dir() for path in each.iterdir()} == before, (
        "nothing was read or written there"
    )
    assert len(seen.read_text(encoding="utf-8").splitlines()) == 1, "once per process"
    (warning,) = caplog.records
    assert warning.levelname == "WARNING"
    assert (
        f"{folder} is not a folder that only this user can write to; remove it"
        in warning.getMessage()
    )


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "its first half": lambda content: content[: len(content) // 2],
    "all but its last byte": lambda content: content[:-1],
    "nothing": lambda content: b"",
    "a changed byte": lambda content: content[:999] + bytes([content[999] ^ 1]) + content[1000:],
    "zeros": lambda content: b"\x7fELF" + bytes(100),
    "whole, but no library": lambda content: b"x" + hashlib.sha256(b"x").digest(),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_a_damaged_library_is_compiled_again_once(
    compile_with: Compile,
    noted: tuple[str, Path],
    temporary: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[bytes], bytes],
) -> None:
    """In another folder than where it was compiled: a path that a process has loaded once is not
    read again.
    """
    compiler, seen = noted
    (folder,) = temporary.iterdir()
    before = {*folder.iterdir()}
    assert compile_with(compiler).seven() == 111
    (library,) = {*folder.iterdir()} - before
    content = library.read_bytes()
    elsewhere = temporary.with_name("elsewhere")
    elsewhere.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    library = elsewhere / folder.name / library.name
    library.parent.mkdir(mode=0o700)
    library.write_bytes(damage(content))
    assert compile_with(compiler).seven() == 111
    (warning,) = caplog.records
    assert (
        f"the compiled kernels in {library} cannot be loaded and are compiled again"
        in warning.getMessage()
    )
    assert library.stat().st_size == len(content)
    assert compile_with(compiler).seven() == 111
    assert len(seen.read_text(encoding="utf-8").splitlines()) == 2


def test_what_cannot_be_loaded_is_an_error_of_one_line(
    compile_with: Compile, tmp_path: Path, temporary: Path
) -> None:
    garbage = _script(
        tmp_path / "garbage", 'while [ "$1" != -o ]; do shift; done; echo nothing > "$2"'
    )
    with pytest.raises(CompilerError, match=f"cannot be kept or loaded: {temporary}/.*so: "):
        compile_with(garbage)


def test_a_temporary_folder_from_which_nothing_may_be_loaded_is_named(
    compile_with: Compile, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As containers with a read-only root have it; the compiler is not at fault."""
    mounted = os.statvfs(temporary)
    flags = SimpleNamespace(f_flag=mounted.f_flag | os.ST_NOEXEC)
    monkeypatch.setattr(os, "statvfs", lambda _: flags)
    reason = f"{temporary}/tramontane-[0-9]+ is mounted noexec, .* set TMPDIR to a folder"
    with pytest.raises(CompilerError, match=reason):
        compile_with("cc")
    assert "is mounted noexec" in native_library.last_failure()


def test_a_temporary_folder_that_is_not_there_is_an_error_of_one_line(
    compile_with: Compile, temporary: Path
) -> None:
    temporary.rmdir()
    with pytest.raises(CompilerError, match="cannot be kept or loaded"):
        compile_with("sh")


def test_the_processor_is_known_by_its_instructions() -> None:
    if Path("/proc/cpuinfo").exists():
        assert native_library.processor().count("\n") in (1, 2), "of the first core"


def test_a_library_depends_on_the_headers(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = tmp_path / "element.h"
    header.write_text("typedef float element;", encoding="utf-8")
    monkeypatch.setattr(native_library, "HEADERS", tmp_path)
    before = source_digest(source)
    header.write_text("typedef double element;", encoding="utf-8")
    assert source_digest(source) != before


@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the options are of compilers for x86-64"
)
@pytest.mark.parametrize(
    ("options", "instructions"),
    [
        ("-march=haswell", "avx2"),  # not the machine's own
        ("-march=skylake-avx512 -mno-avx512f", "avx2"),
        ("-march=sandybridge", "avx"),
        ("-march=x86-64", ""),
        ("-mno-avx", ""),
    ],
)
def test_the_compiler_names_the_instructions(
    options: str,
    instructions: str,
    noted: tuple[str, Path],
    compile_with: Compile,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CC may name a processor, and the library is compiled for that one."""
    compiler, seen = noted
    monkeypatch.setenv("CC", f"{compiler} {options}")
    assert native_library.vector_instructions() == instructions
    seen.write_text("", encoding="utf-8")
    assert compile_with(f"{compiler} {options}").seven() == 111
    assert ("-march=native" in seen.read_text(encoding="utf-8")) == ("-march" not in options)
    assert native_library.platform_name().count("-march=") == 1
