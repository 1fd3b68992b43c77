"""The wheel and the editable install, each in a fresh environment that knows nothing of this
checkout.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("proto", "workers", "router", "cluster")
FOR_GPUS = {"xformers_backend"}
DEMO_FILES = {"config.json", "model.safetensors", "tokenizer.model"}
BUILT_FROM = (*ROOMS, "pyproject.toml", "README.md", "LICENSE")
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
VERSION = PYPROJECT["project"]["version"]
FOLDERS = PYPROJECT["tool"]["setuptools"]["package-dir"]
# second, public names of packages of rooms
PUBLIC = {name: folder for name, folder in FOLDERS.items() if "/" in folder}
OFFLINE = ["--no-index", "--no-deps", "--no-build-isolation"]

# Imports every module that it is given and prints where each, and proto-plus, was found.
IMPORTER = """
import importlib, json, sys
files = {name: importlib.import_module(name).__file__ for name in sys.argv[1:]}
try:
    import proto
    files["proto"] = (proto.Message and proto.__file__)
    import google.api_core.rest_streaming  # needs proto.Message
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] not in ("google", "proto", "requests"):
        raise
print(json.dumps(files))
"""


def _run(command: list[str], cwd: Path) -> str:
    """Without PYTHONPATH, so that nothing but the environment itself decides what is found."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | {
        "PYTHONNOUSERSITE": "1"
    }
    done = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout


def _files_to_build_from() -> list[str]:
    """What git tracks, as it lies here now: a file that was forgotten is forgotten in the wheel as
    well.
    """
    git = [
        "git",
        "-c",
        f"safe.directory={ROOT}",
        "-C",
        str(ROOT),
        "ls-files",
        "-z",
        "--",
        *BUILT_FROM,
    ]
    listed = ""
    if (ROOT / ".git").exists() and shutil.which("git"):
        listed = subprocess.run(git, capture_output=True, text=True, check=True).stdout
    if listed:
        return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    found = [
        p
        for top in BUILT_FROM
        for p in ([ROOT / top] if (ROOT / top).is_file() else (ROOT / top).rglob("*"))
    ]
    return [str(p.relative_to(ROOT)) for p in found if p.is_file() and "__pycache__" not in p.parts]


class Environment:
    """A virtual environment with our dependencies but without us.

    The dependencies are links to what is installed here, all but our own distribution
    and every .pth file: the editable install that runs these tests cannot leak in.
    """

    def __init__(self, folder: Path) -> None:
        _run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], folder)
        self.bin = folder / "env" / ("Scripts" if os.name == "nt" else "bin")
        self.python = self.bin / Path(sys.executable).name
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        self.site = Path(_run([str(self.python), "-c", code], folder).strip())
        links = folder / "dependencies"
        links.mkdir()
        for home in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
            for entry in Path(home).iterdir():
                if (
                    entry.suffix != ".pth"
                    and "tramontane" not in entry.name
                    and not (links / entry.name).exists()
                ):
                    (links / entry.name).symlink_to(entry)
        (self.site / "dependencies.pth").write_text(f"{links}\n")
        self.before = self.entries

    @property
    def entries(self) -> set[str]:
        return {entry.name for entry in self.site.iterdir()} - {"__pycache__"}

    def install(self, *what: str) -> set[str]:
        """Returns what it has put in site-packages."""
        _run(
            [*PIP, "--python", str(self.python), "install", "--no-compile", *OFFLINE, *what],
            self.site,
        )
        return self.entries - self.before

    def where(self, modules: list[str], cwd: Path) -> dict[str, Path]:
        files: dict[str, Any] = json.loads(_run([str(self.python), "-c", IMPORTER, *modules], cwd))
        return {name: Path(file) for name, file in files.items()}

    def tramontane_version(self, cwd: Path) -> str:
        return _run([str(self.bin / "tramontane"), "--version"], cwd).strip()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of everything that a wheel is built from."""
    if find_spec("pip") is None:
        pytest.skip("pip is not installed here")
    folder = tmp_path_factory.mktemp("checkout")
    for name in _files_to_build_from():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the copy: setuptools leaves folders behind."""
    source = shutil.copytree(checkout, tmp_path_factory.mktemp("build") / "source")
    folder = tmp_path_factory.mktemp("wheel")
    _run([*PIP, "wheel", *OFFLINE, "--wheel-dir", str(folder), str(source)], folder)
    (path,) = folder.iterdir()
    return path


def _room_files(checkout: Path) -> set[str]:
    return {
        str(path.relative_to(checkout))
        for room in ROOMS
        for path in (checkout / room).rglob("*")
        if path.is_file()
    }


def _modules(checkout: Path) -> list[str]:
    """All but the CUDA kernels: xformers and Triton are not there on every platform, and slow to
    import.
    """
    files = [
        path
        for room in ROOMS
        for path in sorted((checkout / room).rglob("*.py"))
        if path.stem not in FOR_GPUS
    ]
    return [
        f"tramontane.{'.'.join(path.relative_to(checkout).with_suffix('').parts)}" for path in files
    ]


def _assert_found_in(folder: Path, where: dict[str, Path]) -> None:
    """The module ``tramontane.proto.step`` was loaded from ``folder``/proto/step.py."""
    for name, file in where.items():
        if name != "proto":
            expected = folder.joinpath(*name.split(".")[1:]).with_suffix(".py")
            assert file.resolve() == expected.resolve(), name


def _assert_proto_plus(where: dict[str, Path]) -> None:
    if find_spec("proto.message"):
        assert where["proto"].match("dependencies/proto/__init__.py")


def _assert_public_names(environment: Environment, cwd: Path) -> None:
    """A public package exports the classes of the package that it is a second name of."""
    assert PUBLIC.keys() == {"tramontane.client", "tramontane.llm"}
    for public, folder in PUBLIC.items():
        check = f"import {public} as a, tramontane.{folder.replace('/', '.')} as b"
        check += (
            "; assert a.__all__ and all(getattr(a, name) is getattr(b, name) for name in a.__all__)"
        )
        _run([str(environment.python), "-c", check], cwd)
    _run([str(environment.python), "-c", "from tramontane.client import AsyncClient, Client"], cwd)


def test_the_wheel_holds_the_rooms_and_nothing_else(checkout: Path, wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    files = {name for name in names if not name.endswith("/")}
    info = f"tramontane-{VERSION}.dist-info"
    assert {name.split("/")[0] for name in files} == {"tramontane", info}
    assert f"{info}/licenses/LICENSE" in files
    expected = _room_files(checkout)
    expected |= {
        f"{name.split('.')[1]}/{path.name}"
        for name, folder in PUBLIC.items()
        for path in (checkout / folder).iterdir()
    }
    assert {name for name in files if name.startswith("tramontane/")} == {
        f"tramontane/{name}" for name in expected
    }
    assert {f"tramontane/{room}/py.typed" for room in ROOMS} <= files
    if (ROOT / "cluster" / "demo_model").is_dir():
        assert {f"tramontane/cluster/demo_model/{name}" for name in DEMO_FILES} <= files


@pytest.mark.nightly
def test_a_source_distribution_makes_the_same_wheel(
    checkout: Path, wheel: Path, tmp_path: Path
) -> None:
    source = shutil.copytree(checkout, tmp_path / "source")
    _run(
        [
            sys.executable,
            "-m",
            "build",
            "--sdist",
            "--no-isolation",
            "--outdir",
            str(tmp_path / "dist"),
            str(source),
        ],
        tmp_path,
    )
    (archive,) = (tmp_path / "dist").iterdir()
    _run([*PIP, "wheel", *OFFLINE, "--wheel-dir", str(tmp_path / "wheel"), str(archive)], tmp_path)
    (made,) = (tmp_path / "wheel").iterdir()
    assert set(zipfile.ZipFile(made).namelist()) == set(zipfile.ZipFile(wheel).namelist())


def test_a_wheel_installs_and_runs_from_anywhere(
    checkout: Path, wheel: Path, tmp_path: Path
) -> None:
    environment = Environment(tmp_path)
    installed = environment.install(str(wheel))
    assert installed == {"tramontane", f"tramontane-{VERSION}.dist-info"}
    where = environment.where(_modules(checkout), cwd=tmp_path)
    _assert_found_in(environment.site / "tramontane", where)
    _assert_proto_plus(where)
    _assert_public_names(environment, tmp_path)
    assert environment.tramontane_version(tmp_path) == VERSION


@pytest.mark.nightly
def test_an_editable_install_runs_the_checkout(checkout: Path, tmp_path: Path) -> None:
    checkout = shutil.copytree(checkout, tmp_path / "checkout")
    environment = Environment(tmp_path)
    installed = environment.install("--editable", str(checkout))
    assert f"tramontane-{VERSION}.dist-info" in installed
    assert "tramontane" not in installed, "a link, not a copy"
    where = environment.where(_modules(checkout), cwd=tmp_path)
    _assert_found_in(checkout, where)
    _assert_proto_plus(where)
    _assert_public_names(environment, tmp_path)
    assert environment.tramontane_version(tmp_path) == VERSION
    (checkout / "proto" / "added_later.py").write_text("")
    where = environment.where(["tramontane.proto.added_later"], cwd=checkout)
    _assert_found_in(checkout, where)  # new modules are there at once,
    # and proto-plus is not shadowed where the checkout itself is on sys.path
    _assert_proto_plus(where)
