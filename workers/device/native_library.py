"""C kernels for CPUs, compiled by the machine's C compiler when a stage starts: for its dtype and
processor, in a second.

Their result for a row or token does not depend on the rest of the micro-batch.
"""

import atexit
import ctypes
import fcntl
import hashlib
import itertools
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from tramontane.workers.device.self_test import one_line

ELEMENTS = {"float32": 0, "bfloat16": 1, "float16": 2}  # ELEMENT in the sources
# The parts of -ffast-math that change only the signs of zeros and the rounding between products and
# sums. Reordering of sums is not included: a compiler orders them as it unrolls a loop, differently
# for one row and for several.
ARITHMETIC = ("-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno", "-ffp-contract=fast")
FLAGS = ("-O3", *ARITHMETIC, "-shared", "-fPIC")
# unless CC names one: CC="cc -march=haswell" compiles for processors with AVX2 and no AVX-512
THIS_PROCESSOR = "-march=native"
# Vector instructions, the best first, and the macros that a compiler defines for them.
VECTOR_MACROS = {
    **{
        "avx512_bf16": "__AVX512BF16__",
        "avx512f": "__AVX512F__",
        "avx2": "__AVX2__",
        "avx": "__AVX__",
    },
    **{"sve": "__ARM_FEATURE_SVE", "asimd": "__ARM_NEON"},
}
HEADERS = Path(__file__).parent  # where element.h is
# with the library of PyTorch's own threads, which is loaded already and has the same name
THREADS = "-fopenmp"
COMPILE_TIMEOUT_S = 60.0
# of a library, appended to its file; a loader ignores it
DIGEST, DIGEST_BYTES = "sha256", 32

logger = logging.getLogger(__name__)


class CompilerError(Exception):
    """There is no C compiler, or it cannot compile the kernels, or they cannot be loaded."""


_failures: list[str] = []  # the reasons in this process, the last one last


def last_failure() -> str:
    """Return why kernels could not be compiled or loaded in this process; "" if all could be."""
    return _failures[-1] if _failures else ""


@cache
def compile_library(source: Path, dtype: str, **sizes: int) -> ctypes.CDLL:
    """Load a compiled source, once per process and arguments; ``sizes`` are names that it needs.
    Raises CompilerError.

    It is cached in a folder of this user below the machine's temporary folder, for stages that
    start again.
    """
    try:
        return _compile_or_load(source, dtype, **sizes)
    except CompilerError as error:
        _failures.append(str(error))
        raise


def _compile_or_load(source: Path, dtype: str, **sizes: int) -> ctypes.CDLL:
    defines = [f"-D{name}={size}" for name, size in {"ELEMENT": ELEMENTS[dtype], **sizes}.items()]
    try:
        library = (
            kernel_folder()
            / f"{source.stem}-{_short_digest(source_digest(source), DIGEST, *defines)}.so"
        )
        if os.statvfs(library.parent).f_flag & os.ST_NOEXEC:
            raise CompilerError(
                f"{library.parent} is mounted noexec, so kernels cannot be loaded from it; set"
                " TMPDIR to a folder that is not"
            )
        if (kept := _load_kept(library)) is not None:
            return kept
        with locked(library.with_suffix(".lock")):
            if (kept := _load_kept(library)) is not None:  # another process has made it by now
                return kept
            _compile(
                [*_compiler()[0], *_target(), *FLAGS, f"-I{HEADERS}", *defines, str(source), "-lm"],
                library,
            )
        return ctypes.CDLL(str(library))
    except OSError as error:  # no space, or a file system of which nothing can be loaded
        raise CompilerError(
            f"the compiled kernels cannot be kept or loaded: {one_line(error)}"
        ) from None


def _load_kept(library: Path) -> ctypes.CDLL | None:
    """Load a cached library. None if it is missing, or damaged, for example after a power failure:
    it is compiled again.
    """
    try:
        content = library.read_bytes()
    except FileNotFoundError:
        return None
    try:
        if hashlib.new(DIGEST, content[:-DIGEST_BYTES]).digest() != content[-DIGEST_BYTES:]:
            # loading it could end this process
            raise OSError("its end is missing, or a part of it has changed")
        return ctypes.CDLL(str(library))
    except OSError as error:
        logger.warning(
            "the compiled kernels in %s cannot be loaded and are compiled again: %s",
            library,
            one_line(error),
        )
        library.unlink(missing_ok=True)
        return None


def kernel_folder() -> Path:
    """Return the folder of compiled kernels and of choices between kernels.

    Only this user can write to it, since its libraries are executed. Raises OSError if it cannot be
    created.
    """
    folder = Path(tempfile.gettempdir()) / f"tramontane-{os.getuid()}"
    with suppress(FileExistsError):  # also if it is not a folder
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    is_own = (
        stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
    )
    return folder if is_own else _private_folder(folder)


@cache
def _private_folder(instead_of: Path) -> Path:
    """Return a new folder of this process, which is removed with it."""
    folder = tempfile.mkdtemp(prefix=f"{instead_of.name}-", dir=instead_of.parent)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    logger.warning(
        "%s is not a folder that only this user can write to; remove it. Until then this process"
        " keeps kernels in %s",
        instead_of,
        folder,
    )
    return Path(folder)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Let one process at a time run the block: stages that start together need the same libraries,
    and share the cores.

    The file is removed with the lock still held. Processes that wait for it may then run together
    with one that creates it anew: they find the results of the block.
    """
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed, also by the end of the process
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def source_digest(source: Path) -> str:
    """Name the conditions of the results of a source's functions, for all sizes: its text, the
    headers and the platform.

    Raises CompilerError like ``compile_library``.
    """
    return _short_digest(
        platform_name(), *(each.read_bytes() for each in (source, *sorted(HEADERS.glob("*.h"))))
    )


def platform_name() -> str:
    """Name the conditions of C kernels besides their sources: options, compiler and processor.
    Raises CompilerError.
    """
    command, found = _compiler()
    status = found.stat()
    return (
        f"{[found.name, *command[1:], *_target()]} {FLAGS} {status.st_mtime_ns} {status.st_size}"
        f" {processor()}"
    )


@cache
def _defined_macros(command: tuple[str, ...]) -> frozenset[str]:
    """Return the macros that a compiler predefines with these options. Raises CompilerError."""
    text = _run([*command, "-dM", "-E", "-x", "c", os.devnull])
    return frozenset(line.split()[1] for line in text.splitlines() if line.startswith("#define "))


def vector_instructions() -> str:
    """Return the best vector instructions that the compiler uses for kernels, or "". Raises
    CompilerError.
    """
    macros = _defined_macros((*_compiler()[0], *_target()))
    return next((name for name, macro in VECTOR_MACROS.items() if macro in macros), "")


def _target() -> tuple[str, ...]:
    """Return the option for this processor; no option if the options in CC name another one. Raises
    CompilerError.
    """
    return () if any(word.startswith("-march=") for word in _compiler()[0]) else (THIS_PROCESSOR,)


def _compiler() -> tuple[list[str], Path]:
    """Return the command of the C compiler, with its options, and its file. Raises CompilerError if
    it is not installed.
    """
    command = shlex.split(os.environ.get("CC", "cc"))
    found = shutil.which(command[0])
    if found is None:
        raise CompilerError(f"there is no C compiler {command[0]}; Debian's package gcc has one")
    return command, Path(found)


def _short_digest(*parts: str | bytes) -> str:
    encoded = (part if isinstance(part, bytes) else part.encode() for part in parts)
    return hashlib.sha256(b"\0".join(encoded)).hexdigest()[:16]


def processor() -> str:
    """Return the processor's name and instructions, as far as known."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            first = itertools.takewhile(str.strip, lines)
            return "".join(
                line
                for line in first
                if line.startswith(("model name", "flags", "Features", "CPU part"))
            )
    except OSError:
        return f"{platform.machine()} {platform.processor()}"


def _compile(command: list[str], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        try:
            _run([*command, "-o", str(made), THREADS])
        except CompilerError:  # some compilers have no OpenMP
            _run([*command, "-o", str(made)])
        with made.open("r+b") as file:
            content = file.read()
            file.write(hashlib.new(DIGEST, content).digest())
            file.flush()
            os.fsync(file.fileno())  # after a power failure the file is complete or missing
        made.replace(library)  # atomically: several stages may start together


def _run(command: list[str]) -> str:
    try:
        return subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S
        ).stdout
    except subprocess.CalledProcessError as error:
        raise CompilerError(
            f"{command[0]} cannot compile them: {one_line(Exception(error.stderr))}"
        ) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompilerError(f"{command[0]} cannot compile them: {one_line(error)}") from None
