"""Kernels in C for CPUs, compiled when a stage starts by the machine's C compiler: for its dtype and processor, in a second.

What they compute for one row or token does not depend on the others of the micro-batch.
"""

import ctypes
import os
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from tramontane.workers.device.self_test import one_line

ELEMENTS = {"float32": 0, "bfloat16": 1, "float16": 2}  # ELEMENT in the sources
# What -ffast-math has for sums in any order, without its code that changes the arithmetic of the whole process.
ORDER = ("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno", "-ffp-contract=fast")
FLAGS = ("-O3", "-march=native", *ORDER, "-shared", "-fPIC", f"-I{Path(__file__).parent}")  # where element.h is
THREADS = "-fopenmp"  # with the library of PyTorch's own threads, which is loaded already and has the same name
COMPILE_TIMEOUT_S = 60.0


class CompilerError(Exception):
    """There is no C compiler, or it cannot compile the kernels."""


@cache
def compile_library(source: Path, dtype: str, **sizes: int) -> ctypes.CDLL:
    """Compile a source, once per process and arguments; ``sizes`` are names that it needs. Raises CompilerError."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(compiler[0]) is None:
        raise CompilerError(f"there is no C compiler {compiler[0]}; Debian's package gcc has one")
    defines = [f"-D{name}={size}" for name, size in {"ELEMENT": ELEMENTS[dtype], **sizes}.items()]
    with tempfile.TemporaryDirectory(prefix="tramontane-") as folder:
        library = Path(folder) / "kernels.so"
        command = [*compiler, *FLAGS, *defines, str(source), "-o", str(library), "-lm"]
        try:
            _run([*command, THREADS])
        except CompilerError:  # some compilers have no OpenMP
            _run(command)
        return ctypes.CDLL(str(library))  # which stays loaded when the file is gone


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        raise CompilerError(f"{command[0]} cannot compile them: {one_line(Exception(error.stderr))}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompilerError(f"{command[0]} cannot compile them: {one_line(error)}") from None
