"""``ray up`` over SSH: a cluster is started, serves, loses a host and gets it back, and is stopped.

Three hosts and a client host are network, process and mount namespaces of this machine, each with
its own home and /tmp; the three have sshd. The wheel is built from this checkout and installed
there by the file that ``tramontane cluster-yaml`` writes; its dependencies are links to this
machine's packages.
"""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from chaos_faults import TITLES, title_of
from ssh_hosts import HOME, SshHost, ssh_hosts, ssh_unavailable_reason

from tramontane.cluster.cli.main import app

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
if reason := ssh_unavailable_reason():
    pytest.skip(reason, allow_module_level=True)

ROOT = Path(__file__).parents[1]
BUILT_FROM = ("proto", "workers", "router", "cluster", "pyproject.toml", "README.md", "LICENSE")
BODY = {
    "prompt": "ROMEO:",
    "max_tokens": 24,
    "temperature": 0.8,
    "seed": 1,
    "ignore_eos": True,
    "return_token_ids": True,
}
POLL_S = 1.0


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in BUILT_FROM:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, source / name)
    options = [
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(built),
    ]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], check=True)
    (path,) = built.iterdir()
    return path


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[SshHost]]:
    with ssh_hosts(tmp_path, 3) as hosts:
        yield hosts


def test_a_cluster_starts_serves_survives_the_loss_of_a_host_and_stops(
    machines: list[SshHost], wheel: Path
) -> None:
    *hosts, client = machines
    # ``ray up`` stops all Ray processes of a host: it must not see those of this machine
    for each in hosts:
        assert each.running() == []
    _prepare(client, hosts, wheel)
    _timed("ray up", lambda: _on(client, "ray up -y --no-config-cache cluster.yaml"))
    _timed(
        "three nodes",
        lambda: _wait(
            lambda: "3 local.cluster.node" in _on(client, "ray exec cluster.yaml 'ray status'")
        ),
    )
    serving = _serving(client)
    assert [_stages(each) for each in hosts] == [1, 1, 1]
    url = f"http://{hosts[0].host.address}:8000"
    with client.host.entered():
        before = _tokens(url)
        _timed("a host lost", hosts[1].lose)
        _timed(
            "Ray's autoscaler knows",
            lambda: _wait(
                lambda: "2 local.cluster.node" in _on(client, "ray exec cluster.yaml 'ray status'")
            ),
        )
        hosts[1].bring_back()
        _timed("its stage is back", lambda: _wait(lambda: _stages(hosts[1]) == 1))
        _timed("answers again", lambda: _wait(lambda: _answer(url).status_code == 200))
        assert _tokens(url) == before
    assert [_stages(each) for each in hosts] == [1, 1, 1]
    for process in hosts[0].host.processes():
        if process.name().startswith("tramontane"):
            process.terminate()
    assert serving.wait(120) == 0
    _timed("ray down", lambda: _on(client, "ray down -y cluster.yaml"))
    _timed(
        "nothing left", lambda: _wait(lambda: [each.running() for each in hosts] == [[], [], []])
    )


def _answer(url: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=BODY, timeout=300)


def _tokens(url: str) -> list[int]:
    answer = _answer(url)
    assert answer.status_code == 200, answer.text
    found: Any = answer.json()["choices"][0]["token_ids"]
    assert len(found) == BODY["max_tokens"]
    return list(found)


def _prepare(client: SshHost, hosts: list[SshHost], wheel: Path) -> None:
    """Prepare the client's host: the wheel, a token for Ray, and the cluster file."""
    shutil.copy(wheel, client.home)
    addresses = ",".join(each.host.address for each in hosts)
    machines = [
        "--provider",
        "local",
        "--hosts",
        addresses,
        "--ssh-user",
        "root",
        "--ssh-key",
        f"{HOME}/.ssh/key",
    ]
    size = [
        "--stages",
        "3",
        "--cpu",
        "--gpu-memory",
        "1GiB",
        "--dtype",
        "float32",
        "--max-num-seqs",
        "8",
    ]
    written = ["--wheel", wheel.name, "--out", str(client.home / "cluster.yaml")]
    app(["cluster-yaml", *machines, *size, *written], standalone_mode=False)
    _on(client, "ray get-auth-token --generate")


def _on(client: SshHost, command: str) -> str:
    """Run a command on the client's host and return its output."""
    words = client.host.command("bash", "-c", f"cd; {command}")
    environment = dict(client.environment)
    done = subprocess.run(
        words,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
        check=False,
    )
    output = done.stdout.decode(errors="replace")
    assert done.returncode == 0, f"{command}:\n{output}"
    return output


def _serving(client: SshHost) -> "subprocess.Popen[bytes]":
    """Start ``tramontane serve`` and wait until it is ready."""
    command = "cd; ray exec cluster.yaml 'tramontane serve --config tramontane.yaml --host 0.0.0.0'"
    log = client.folder / "serve.log"
    with log.open("wb") as file:
        serving = client.host.start(
            "bash", "-c", command, env=dict(client.environment), stdout=file, stderr=file
        )

    def ready() -> bool:
        assert serving.poll() is None, log.read_text(errors="replace")
        return "http://" in log.read_text(errors="replace")

    _timed("serving", lambda: _wait(ready))
    return serving


def _stages(host: SshHost) -> int:
    return sum(title_of(process).startswith(TITLES["stage"]) for process in host.host.processes())


def _wait(until: Callable[[], bool]) -> None:
    """Wait until the condition holds. Bounded by the test's timeout."""
    while not until():
        time.sleep(POLL_S)


def _timed(what: str, action: Callable[[], object]) -> None:
    """Run a step of the test and print its seconds."""
    began = time.monotonic()
    action()
    print(f"{what}: {time.monotonic() - began:.1f} s", flush=True)
