"""The image's own ``ray``: it answers the health checks of the KubeRay operator at once, and waits
for Ray's daemons with a shell.
"""

import shutil
import signal
import socket
import subprocess
from pathlib import Path

import psutil
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
    own = _before(tmp_path, 'printf "%s|" "$@"')
    assert _run(*words, file=own).stdout == "".join(f"{word}|" for word in words)


def _before(folder: Path, rays: str) -> Path:
    """Write the script so that it stands before another ``ray``, whose lines are given."""
    command, own, text = folder / "rays", folder / "ray", FILE.read_text()
    assert text.count("/opt/tramontane/bin/ray") == 1
    command.write_text(f"#!/bin/bash\n{rays}\n")
    own.write_text(text.replace("/opt/tramontane/bin/ray", str(command)))
    for file in (command, own):
        file.chmod(0o755)
    return own


AS_FIRST_PROCESS = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
NO_FIRST_PROCESS = (
    shutil.which("unshare") is None
    or subprocess.run([*AS_FIRST_PROCESS, "true"], capture_output=True, check=False).returncode != 0
)


@pytest.mark.skipif(NO_FIRST_PROCESS, reason="only root may make a first process, as containers do")
@pytest.mark.parametrize(
    ("ends", "how", "status"),
    [("raylet", signal.SIGKILL, 1), ("gcs_server", signal.SIGTERM, 1), ("ray", signal.SIGTERM, 0)],
)
def test_a_shell_waits_for_the_daemons(
    tmp_path: Path, ends: str, how: signal.Signals, status: int
) -> None:
    """As a container's first process: Ray's command ends, its daemons run until the first of them
    has died, or until the container is ended by a signal.
    """
    daemons = ("raylet", "gcs_server")
    for name in daemons:
        shutil.copy(str(shutil.which("sleep")), tmp_path / name)
    start = "".join(f"{tmp_path / name} 600 >/dev/null & disown\n" for name in daemons)
    own = _before(tmp_path, f'{start}echo "$@"')
    process = subprocess.Popen(
        [*AS_FIRST_PROCESS, own, "start", "--head", "--block", "--num-cpus=1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "start --head --num-cpus=1\n"
        (shell,) = psutil.Process(process.pid).children()
        while {each.name() for each in shell.children()} != {*daemons, "sleep"}:
            assert process.poll() is None
        named = {each.name(): each for each in (shell, *shell.children())}
        named[ends].send_signal(how)
        assert process.wait(60) == status
        assert process.stderr is not None
        said = process.stderr.read()
    assert (f"Ray's {ends} has ended" in said) == (status == 1)
    assert not any(each.is_running() for each in named.values())


def test_image_finds_it_first() -> None:
    text = (FILE.parent / "Dockerfile").read_text()
    assert "COPY k8s/ray /opt/kuberay/ray" in text
    assert "ENV PATH=/opt/kuberay:/opt/tramontane/bin:$PATH" in text
    assert FILE.stat().st_mode & 0o111 == 0o111
    assert "!k8s/ray" in (FILE.parents[1] / ".dockerignore").read_text().splitlines()
