"""The image's own ``ray``, which answers the health checks of the KubeRay operator at once."""

import shutil
import socket
import subprocess
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "k8s" / "ray"
ADDRESS = "127.0.0.1"

if shutil.which("bash") is None:
    pytest.skip("the image's ray is a script for bash, which is not here", allow_module_level=True)


def _run(*words: str, file: Path = FILE) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([file, *words], capture_output=True, text=True, check=False, timeout=30)


def test_health_check_asks_whether_the_port_answers() -> None:
    with socket.create_server((ADDRESS, 0)) as server:
        port = server.getsockname()[1]
        assert _run("health-check", "--address", f"{ADDRESS}:{port}").returncode == 0
    assert _run("health-check", "--address", f"{ADDRESS}:{port}").returncode != 0
    unknown = _run("health-check", "--address", f"no-such-head.invalid:{port}")
    assert unknown.returncode != 0


@pytest.mark.parametrize(
    "words",
    [
        ("start", "--head", "--block"),
        ("health-check",),
        ("health-check", "--address", "head"),
        ("health-check", "--address", "head:6379", "--skip-version-check"),
        ("health-check", "--component", "head:6379"),
        ("status", "--address", "head:6379"),
    ],
)
def test_all_else_is_for_rays_own(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Every other call reaches Ray's command with all of its words."""
    rays = tmp_path / "rays"
    rays.write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    rays.chmod(0o755)
    own = tmp_path / "ray"
    text = FILE.read_text()
    assert text.count("/opt/tramontane/bin/ray") == 1
    own.write_text(text.replace("/opt/tramontane/bin/ray", str(rays)))
    own.chmod(0o755)
    assert _run(*words, file=own).stdout == "".join(f"{word}|" for word in words)


def test_image_finds_it_first() -> None:
    text = (FILE.parent / "Dockerfile").read_text()
    assert "COPY k8s/ray /opt/kuberay/ray" in text
    assert "ENV PATH=/opt/kuberay:/opt/tramontane/bin:$PATH" in text
    assert FILE.stat().st_mode & 0o111 == 0o111
    assert "!k8s/ray" in (FILE.parents[1] / ".dockerignore").read_text().splitlines()
