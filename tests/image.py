"""The image of ``k8s/Dockerfile``, built and run as users of Docker do: ``make test-image``.

It takes ten minutes and 12 GB the first time, so it is not part of ``make test``. ``IMAGE_OPTIONS``
has further options of ``docker build``, such as ``--build-arg TORCH_INDEX=...``, and ``DOCKER`` the
program, if it is not ``docker`` (``podman`` has the same options). Skipped where it has no daemon.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from free_ports import free_port

ROOT = Path(__file__).parents[1]
DOCKER = os.environ.get("DOCKER", "docker")
OPTIONS = shlex.split(os.environ.get("IMAGE_OPTIONS", ""))
IMAGE = "localhost/tramontane:test"
COPIED = ("pyproject.toml", "README.md", "LICENSE", ".dockerignore", "k8s")
ROOMS = ("proto", "workers", "router", "cluster")
# a random user in group 0, as some clusters have it; Docker mounts /tmp noexec
CONFINED = ("--user", "12345:0", "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL")
STREAM = {"prompt": "ROMEO:", "max_tokens": 2000, "ignore_eos": True, "stream": True}
OF_A_MODULE = "from tramontane.cluster.planning.hardware import {0}; print({0}())"
KILL = "import psutil; [p.kill() for p in psutil.process_iter() if p.name() == 'raylet']"
ZOMBIES = "import psutil; print([p.pid for p in psutil.process_iter() if p.status() == 'zombie'])"


def _docker(*words: str, status: int | None = 0, **more: Any) -> str:
    """Run docker, and return what it and the container print."""
    run = subprocess.run(
        [DOCKER, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        **more,
    )
    assert status is None or run.returncode == status, run.stdout
    return run.stdout


def _unavailable() -> str:
    if shutil.which(DOCKER) is None:
        return f"there is no {DOCKER} here; DOCKER=podman names another program"
    said = _docker("info", status=None)
    return f"{DOCKER} has no daemon: {said.splitlines()[-1]}" if "annot connect" in said else ""


pytestmark = pytest.mark.timeout(3600)
if reason := _unavailable():
    pytest.skip(reason, allow_module_level=True)


def _build(folder: Path, tag: str) -> list[str]:
    """Build the image and return its layers."""
    file = ["-f", str(folder / "k8s/Dockerfile"), "--target", "cpu", "-t", tag]
    _docker("build", *OPTIONS, *file, str(folder))
    layers: list[str] = _inspect(tag)["RootFS"]["Layers"]
    return layers


def _inspect(name: str) -> dict[str, Any]:
    (found,) = json.loads(_docker("inspect", name))
    return dict(found)


@pytest.fixture(scope="module")
def layers() -> list[str]:
    return _build(ROOT, IMAGE)


@pytest.fixture(scope="module", autouse=True)
def image(layers: list[str]) -> str:
    assert layers
    return IMAGE


@contextmanager
def _container(*words: str) -> Iterator[str]:
    """The id of a container that runs, and is removed at the end."""
    started = subprocess.run(
        [DOCKER, "run", "--detach", *words], check=True, stdout=subprocess.PIPE, text=True
    )
    name = started.stdout.strip()
    try:
        yield name
    finally:
        _docker("rm", "--force", "--volumes", name)


@contextmanager
def _server(*options: str) -> Iterator[tuple[str, str]]:
    """A container that serves at a published port, ready: its id and its URL."""
    port = free_port()
    with _container("--publish", f"127.0.0.1:{port}:8000", *options, IMAGE, "serve") as name:
        while "ready after" not in (log := _docker("logs", name)):
            assert _inspect(name)["State"]["Running"], log
            time.sleep(0.5)
        yield name, f"http://127.0.0.1:{port}"


def _status(name: str) -> int:
    """Wait until a container has ended."""
    return int(_docker("wait", name))


def test_a_change_of_the_code_leaves_all_layers_but_the_last(
    layers: list[str], tmp_path: Path
) -> None:
    for name in (*COPIED, *ROOMS):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, tmp_path / name)
    (tmp_path / "proto/more.py").write_text('"""A module more."""\n')
    try:
        assert _build(tmp_path, f"{IMAGE}-more")[:-1] == layers[:-1]
    finally:
        _docker("rmi", f"{IMAGE}-more")


def test_what_it_says_of_itself() -> None:
    config = _inspect(IMAGE)["Config"]
    labels = config["Labels"]
    assert labels["org.opencontainers.image.title"] == "Tramontane"
    assert (
        _docker("run", "--rm", *CONFINED, IMAGE, "--version").splitlines()[-1]
        == (labels["org.opencontainers.image.version"])
    )
    assert config["User"] == "1000"
    assert "Usage: tramontane" in _docker("run", "--rm", IMAGE)


def test_it_continues_prompts() -> None:
    said = _docker("run", "--rm", IMAGE, "generate", "--max-tokens", "8", "ROMEO:")
    assert "first token after" in said


def test_limits_of_the_container_count() -> None:
    def asked(function: str, *options: str) -> int:
        code = OF_A_MODULE.format(function)
        words = ["run", "--rm", *options, "--entrypoint", "python", IMAGE, "-c", code]
        return int(_docker(*words).splitlines()[-1])

    assert asked("usable_cpus", "--cpus", "1") == 1
    assert 2**30 < asked("usable_memory", "--memory", "2g") <= 2**31


def test_too_little_memory_is_said_at_once() -> None:
    said = _docker("run", "--rm", "--memory", "1g", IMAGE, "serve", status=2)
    assert re.search(r"^error: Ray and 2 workers need .* GiB of memory", said, re.MULTILINE)


def test_it_ends_before_docker_kills_it_and_says_so_to_clients() -> None:
    """With 64 MiB of shared memory, Docker's default, a read-only root and no capability."""
    with _server(*CONFINED) as (name, url):
        assert "/dev/shm has 64 MiB free" in _docker("logs", name)
        assert _upload(url) == 503, "there is no home folder"
        _docker("exec", name, "sh", "-c", "sleep 0.1 & exit")
        while _zombies(name):
            time.sleep(0.1)
        with httpx.stream("POST", f"{url}/v1/completions", json=STREAM, timeout=120) as answer:
            lines = answer.iter_lines()
            assert next(line for line in lines if line.startswith("data: {"))
            _docker("stop", name)
            assert "has stopped before this request ended" in [line for line in lines if line][-1]
        assert _status(name) == 0, _docker("logs", name)


def _upload(url: str) -> int:
    file = {"file": ("requests.jsonl", b"{}\n")}
    answer = httpx.post(f"{url}/v1/files", files=file, data={"purpose": "batch"}, timeout=60)
    return answer.status_code


def _zombies(name: str) -> list[int]:
    zombies: list[int] = json.loads(_docker("exec", name, "python", "-c", ZOMBIES))
    return zombies


def test_it_ends_with_rays_daemons_so_that_it_is_started_again() -> None:
    with _server("--restart", "on-failure:1") as (name, url):
        assert _upload(url) == 200
        _docker("exec", name, "python", "-c", KILL)
        while _inspect(name)["RestartCount"] < 1:
            time.sleep(0.5)
        assert "Ray's raylet (process" in _docker("logs", name)
        while _docker("logs", name).count("ready after") < 2:
            time.sleep(0.5)
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200
