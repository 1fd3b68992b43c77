"""Which gRPC peers are on this machine, and what ports there are to have."""

import socket
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.serve_patches.grpc_proxy import is_loopback
from tramontane.cluster.serving import preflight as serve_checks
from tramontane.cluster.serving.preflight import check_ports
from tramontane.proto.errors import ConfigError

HERE = [
    *("ipv4:127.0.0.1:50123", "ipv4:127.9.9.9:1", "unix:/x"),
    *("ipv6:%5B::1%5D:50123", "ipv6:[::1]:5", "ipv6:%5B::ffff:127.0.0.1%5D:5"),
]
ELSEWHERE = [
    *("ipv4:10.0.0.7:5", "ipv4:localhost:5", "ipv4:", "127.0.0.1", "vsock:1:2"),
    *("ipv6:%5B2001:db8::1%5D:5", "ipv6:%5B::ffff:10.0.0.7%5D:5"),
]


@pytest.mark.parametrize("peer", HERE)
def test_loopback_is_here(peer: str) -> None:
    assert is_loopback(peer)


@pytest.mark.parametrize("peer", ELSEWHERE)
def test_everything_else_is_not(peer: str) -> None:
    assert not is_loopback(peer)


def test_the_two_ports_are_two() -> None:
    with pytest.raises(ConfigError, match="both 31999; choose another --grpc-port"):
        check_ports(EngineConfig(port=31999, grpc_port=31999), print)


@pytest.mark.parametrize("is_given_back", [True, False])
def test_a_port_in_use_is_waited_for(monkeypatch: pytest.MonkeyPatch, is_given_back: bool) -> None:
    """The cluster of a server that was killed keeps it for some seconds."""
    now, reports = 0.0, list[str]()
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]

        def sleep(seconds: float) -> None:
            nonlocal now
            now += seconds
            if is_given_back and now > serve_checks.PORT_TIMEOUT_S / 2:
                held.close()

        monkeypatch.setattr(serve_checks, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now))
        monkeypatch.setattr(serve_checks, "_may_be_released", lambda _port: True)
        with nullcontext() if is_given_back else pytest.raises(ConfigError, match=f"--port {port} is not available: .* in use"):
            check_ports(EngineConfig(port=port, grpc_port=0), reports.append)
    assert reports == [f"waiting up to 15 s for --port {port}, which another process still has"]


def test_a_port_of_another_program_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_checks, "time", SimpleNamespace(monotonic=lambda: 0.0))
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port} is not available: .* in use"):
            check_ports(EngineConfig(port=port, grpc_port=0), pytest.fail)


@pytest.mark.parametrize(
    ("titles", "is_waited_for"),
    [
        (["ray::ProxyActor", "/site/ray/raylet/raylet --raylet_socket_name=x", "/sbin/init"], True),
        (["ray::ProxyActor", "/site/ray/raylet/raylet --x", "python /bin/tramontane serve --port 8000", "bash"], False),
        (["ray::ProxyActor", "/site/ray/raylet/raylet --x", "tini -- tramontane serve --port 8000"], True),
        (["ray::ProxyActor", "/site/ray/raylet/raylet --x", "python /bin/tramontane serve", "tini -- tramontane serve"], False),
        (["python -m http.server 8000", "bash"], False),
        (None, True),
    ],
)
def test_the_cluster_of_a_killed_server_is_waited_for_and_no_other(
    monkeypatch: pytest.MonkeyPatch, titles: list[str] | None, is_waited_for: bool
) -> None:
    """None: the listener belongs to another user, so that it cannot be seen. The last title is that of process 1."""
    processes = [SimpleNamespace(cmdline=title.split, pid=pid) for pid, title in enumerate((titles or [])[::-1], start=1)][::-1]
    for number, process in enumerate(processes):
        process.parents = lambda number=number: processes[number + 1 :]
    pid = 7 if titles else None
    listens = SimpleNamespace(status="LISTEN", laddr=("127.0.0.1", 8000), pid=pid)
    seen = {"net_connections": lambda _kind: [listens], "Process": lambda _pid: processes[0]}
    monkeypatch.setattr(serve_checks, "psutil", SimpleNamespace(CONN_LISTEN="LISTEN", Error=OSError, **seen))
    assert serve_checks._may_be_released(8000) is is_waited_for


def test_an_address_that_is_not_here_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_checks, "time", SimpleNamespace(monotonic=lambda: 0.0))
    with pytest.raises(ConfigError, match="is not available"):
        check_ports(EngineConfig(host="192.0.2.1"), pytest.fail)
