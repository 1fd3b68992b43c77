"""Hosts made of network namespaces: their links, their processes, and that nothing is left of
them.
"""

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from hosts import NAMESPACES, Host, namespaces_unavailable_reason, network

pytestmark = pytest.mark.nightly

if reason := namespaces_unavailable_reason():
    pytest.skip(reason, allow_module_level=True)

PORT = 8377  # at which nothing else on this machine listens, and the kernel gives to no connection
ECHO = f"""
import socket
with socket.create_server(("0.0.0.0", {PORT})) as server:
    print("listening", flush=True)
    while True:
        with server.accept()[0] as connection:
            while data := connection.recv(100):
                connection.sendall(data)
"""


def test_a_dropped_link_is_silent_and_comes_back() -> None:
    with network() as switch:
        near, far = switch.add_host(), switch.add_host(apart=True)
        _echoing(far)
        with near.entered(), _connection(far) as connection:
            assert _echo(connection, b"one")
            far.drop_link()
            far.drop_link()
            connection.settimeout(1)
            assert not _echo(connection, b"two"), "it was not notified either"
            with pytest.raises(OSError, match=r"timed out|No route|unreachable"):
                _connection(far, timeout_s=1)
            far.restore_link()
            connection.settimeout(None)
            assert connection.recv(10) == b"two", "what was sent in that time arrives"
        assert _is_alone(PORT), "none of it was on this machine's own network"


def test_only_that_link_is_dropped() -> None:
    with network() as switch:
        near, far, third = (switch.add_host() for _ in range(3))
        _echoing(third)
        far.drop_link()
        with near.entered(), _connection(third) as connection:
            assert _echo(connection, b"one")


def test_a_host_apart_has_processes_a_name_and_folders_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "own").mkdir()
    with network() as switch:
        host = switch.add_host(apart=True, own_folders={str(tmp_path / "shared"): tmp_path / "own"})
        host.run("touch", str(tmp_path / "shared" / "file"))
        assert (tmp_path / "own" / "file").exists()
        assert not (tmp_path / "shared" / "file").exists()
        assert host.run("hostname") == "host1\n"
        assert f"\n{os.getpid()} " not in host.run("ps", "-eo", "pid")
        assert host.first_pid in {process.pid for process in host.processes()}
        with pytest.raises(subprocess.CalledProcessError):
            host.run("false")


@pytest.mark.parametrize("apart", [False, True])
def test_nothing_is_left_also_where_something_fails(apart: bool) -> None:
    before = _of(os.getpid())  # other processes have hosts of their own
    with contextlib.suppress(ZeroDivisionError), network() as switch:
        server = _echoing(switch.add_host(apart=apart))
        inside = switch.hosts[0].processes()
        assert _of(os.getpid()) > before
        assert inside
        raise ZeroDivisionError
    assert server.returncode is not None, "it has been waited for"
    assert psutil.wait_procs(inside)[1] == []
    assert _of(os.getpid()) == before


def test_what_a_killed_process_left_is_removed_by_the_next() -> None:
    makes_and_waits = (
        "from hosts import network\nwith network() as n: n.add_host(apart=True); print('up',"
        " flush=True); input()"
    )
    command = [sys.executable, "-c", makes_and_waits]
    maker = subprocess.Popen(
        command,
        cwd=Path(__file__).parent / "support",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert maker.stdout is not None
    assert maker.stdout.readline() == b"up\n"
    maker.kill()
    maker.communicate()
    assert _of(maker.pid) != set()
    with network():
        assert _of(maker.pid) == set()


def _echoing(host: Host) -> "subprocess.Popen[bytes]":
    server = host.start(sys.executable, "-c", ECHO, stdout=subprocess.PIPE)
    assert server.stdout is not None
    with server.stdout as output:
        assert output.readline() == b"listening\n"
    return server


def _connection(host: Host, timeout_s: float = 60) -> socket.socket:
    return socket.create_connection((host.address, PORT), timeout_s)


def _echo(connection: socket.socket, what: bytes) -> bool:
    connection.sendall(what)
    try:
        return connection.recv(10) == what
    except TimeoutError:
        return False


def _is_alone(port: int) -> bool:
    return all(each.laddr.port != port for each in psutil.net_connections("tcp"))


def _namespaces() -> set[str]:
    return {path.name for path in NAMESPACES.glob("*")} if NAMESPACES.exists() else set()


def _of(pid: int) -> set[str]:
    return {name for name in _namespaces() if f"-{pid}-" in name}
