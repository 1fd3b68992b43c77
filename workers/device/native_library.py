"""Kernels in C for CPUs, compiled by the machine's C compiler when a stage starts: for its dtype and processor, in a second.

What they compute for one row or token does not depend on the others of the micro-batch.
"""

import ctypes
import hashlib
import itertools
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from tramontane.workers.device.self_test import one_line

ELEMENTS = {"float32": 0, "bfloat16": 1, "float16": 2}  # ELEMENT in the sources
# What -ffast-math has that changes no result but zeros' signs and the roundings between products and sums. Sums in any order are
# not among it: a compiler orders them as it unrolls a loop, one way for one row and another for several.
ARITHMETIC = ("-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno", "-ffp-contract=fast")
FLAGS = ("-O3", "-march=native", *ARITHMETIC, "-shared", "-fPIC", f"-I{Path(__file__).parent}")  # where element.h is
THREADS = "-fopenmp"  # with the library of PyTorch's own threads, which is loaded already and has the same name
COMPILE_TIMEOUT_S = 60.0


class CompilerError(Exception):
    """There is no C compiler, or it cannot compile the kernels."""


@cache
def compile_library(source: Path, dtype: str, **sizes: int) -> ctypes.CDLL:
    """Load a compiled source, once per process and arguments; ``sizes`` are names that it needs. Raises CompilerError.

    It is kept in a folder of this user below the machine's own temporary folder, for stages that start again.
    """
    compiler = shlex.split(os.environ.get("CC", "cc"))
    found = shutil.which(compiler[0])
    if found is None:
        raise CompilerError(f"there is no C compiler {compiler[0]}; Debian's package gcc has one")
    defines = [f"-D{name}={size}" for name, size in {"ELEMENT": ELEMENTS[dtype], **sizes}.items()]
    command = [*compiler, *FLAGS, *defines, str(source), "-lm"]
    try:
        library = _folder() / f"{source.stem}-{_digest(command, Path(found), source)}.so"
        if not library.exists():
            _compile(command, library)
        return ctypes.CDLL(str(library))
    except OSError as error:  # no space, or a folder from which nothing can be executed
        raise CompilerError(f"the compiled kernels cannot be kept or loaded: {one_line(error)}") from None


def _folder() -> Path:
    """Return the folder of libraries. Raises CompilerError if others could write to it: what it has is executed."""
    folder = Path(tempfile.gettempdir()) / f"tramontane-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise CompilerError(f"{folder} is not a folder that only this user can write to; remove it")
    return folder


def _digest(command: list[str], compiler: Path, source: Path) -> str:
    """Name all that a library depends on: sources, options, compiler and processor."""
    texts = [each.read_bytes() for each in (source, *sorted(Path(__file__).parent.glob("*.h")))]
    status = compiler.stat()
    others = f"{command} {status.st_mtime_ns} {status.st_size} {_processor()}"
    return hashlib.sha256(b"\0".join([*texts, others.encode()])).hexdigest()[:16]


def _processor() -> str:
    """Return the processor's name and instructions, as far as they are known."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            first = itertools.takewhile(str.strip, lines)
            return "".join(line for line in first if line.startswith(("model name", "flags", "Features", "CPU part")))
    except OSError:
        return f"{platform.machine()} {platform.processor()}"


def _compile(command: list[str], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        try:
            _run([*command, "-o", str(made), THREADS])
        except CompilerError:  # some compilers have no OpenMP
            _run([*command, "-o", str(made)])
        made.replace(library)  # at once: several stages may start together


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        raise CompilerError(f"{command[0]} cannot compile them: {one_line(Exception(error.stderr))}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompilerError(f"{command[0]} cannot compile them: {one_line(error)}") from None
