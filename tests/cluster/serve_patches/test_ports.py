"""Which gRPC peers are on this machine, and what ports there are to have."""

import errno
import os
import socket
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace

import httpx
import psutil
import pytest

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.serve_patches.proxy import is_loopback
from tramontane.cluster.serving import preflight
from tramontane.cluster.serving import preflight as serve_checks
from tramontane.cluster.serving.preflight import check_ports, describe_listener
from tramontane.cluster.serving.server import run_server
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

        monkeypatch.setattr(
            serve_checks, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now)
        )
        monkeypatch.setattr(serve_checks, "_may_be_released", lambda *_: True)
        with (
            nullcontext()
            if is_given_back
            else pytest.raises(ConfigError, match=f"--port {port} is in use by ")
        ):
            check_ports(EngineConfig(port=port, grpc_port=0), reports.append)
    assert reports == [f"waiting up to 15 s for --port {port}, which another process still has"]


def test_a_port_of_another_program_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_checks, "time", SimpleNamespace(monotonic=lambda: 0.0))
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port} is in use by "):
            check_ports(EngineConfig(port=port, grpc_port=0), pytest.fail)


@pytest.mark.parametrize(
    ("titles", "is_waited_for"),
    [
        (["ray::ProxyActor", "/site/ray/raylet/raylet --raylet_socket_name=x", "/sbin/init"], True),
        (
            [
                "ray::ProxyActor",
                "/site/ray/raylet/raylet --x",
                "python /bin/tramontane serve --port 8000",
                "bash",
            ],
            False,
        ),
        (
            [
                "ray::ProxyActor",
                "/site/ray/raylet/raylet --x",
                "tini -- tramontane serve --port 8000",
            ],
            True,
        ),
        (
            [
                "ray::ProxyActor",
                "/site/ray/raylet/raylet --x",
                "python /bin/tramontane serve",
                "tini -- tramontane serve",
            ],
            False,
        ),
        (["python -m http.server 8000", "bash"], False),
        (None, True),
    ],
)
def test_the_cluster_of_a_killed_server_is_waited_for_and_no_other(
    monkeypatch: pytest.MonkeyPatch, titles: list[str] | None, is_waited_for: bool
) -> None:
    """None: the listener belongs to another user, so that it cannot be seen. The last title is that
    of process 1.
    """
    processes = [
        SimpleNamespace(cmdline=title.split, pid=pid)
        for pid, title in enumerate((titles or [])[::-1], start=1)
    ][::-1]
    for number, process in enumerate(processes):
        process.parents = lambda number=number: processes[number + 1 :]
    pid = 7 if titles else None
    listens = SimpleNamespace(status="LISTEN", laddr=("127.0.0.1", 8000), pid=pid)
    seen = {"net_connections": lambda _kind: [listens], "Process": lambda _pid: processes[0]}
    monkeypatch.setattr(
        preflight, "psutil", SimpleNamespace(CONN_LISTEN="LISTEN", Error=OSError, **seen)
    )
    assert serve_checks._may_be_released("127.0.0.1", 8000) is is_waited_for


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            errno.EADDRNOTAVAIL,
            (
                "--host h is not an address of this machine; give one that is, or 0.0.0.0 for all"
                " of them"
            ),
        ),
        (
            errno.EAFNOSUPPORT,
            "--host h is an IPv6 address, and this machine has no IPv6; give an IPv4 address",
        ),
        (
            errno.EACCES,
            (
                "--port 80 is for root alone on this machine, as low numbers are; choose a higher"
                " --port"
            ),
        ),
        (
            errno.EPERM,
            (
                "--port 80 is for root alone on this machine, as low numbers are; choose a higher"
                " --port"
            ),
        ),
        (
            errno.ENOBUFS,
            "--host h --port 80 cannot be opened (ENOBUFS); choose another --port or --host",
        ),
        (None, "--host h --port 80 cannot be opened (no code); choose another --port or --host"),
    ],
)
def test_an_address_that_cannot_be_had_is_described_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, error: int | None, message: str
) -> None:
    """Without the system's own words."""
    monkeypatch.setattr(serve_checks, "time", SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr(
        serve_checks,
        "_bind_error",
        lambda *_: OSError(error, os.strerror(error)) if error else OSError(),
    )
    with pytest.raises(ConfigError) as refused:
        check_ports(EngineConfig(host="h", port=80, grpc_port=0), pytest.fail)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("host", "message"),
    [
        (
            "192.0.2.1",
            (
                "--host 192.0.2.1 is not an address of this machine; give one that is, or 0.0.0.0"
                " for all of them"
            ),
        ),
        (
            "x" * 64,
            (
                f"--host {'x' * 64} is no address, and no name of one; give an address of this"
                " machine, such as 127.0.0.1"
            ),
        ),
        (
            "::x",
            (
                "--host ::x is no address, and no name of one; give an address of this machine,"
                " such as 127.0.0.1"
            ),
        ),
    ],
)
def test_a_host_that_is_not_here_is_refused_by_the_system(host: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_ports(EngineConfig(host=host, grpc_port=0), pytest.fail)
    assert str(refused.value) == message


# ---- what has a port

OURS = {"ui": "ui", "docs": "docs", "openapi": "openapi.json", "health": "health"}


def _answers(monkeypatch: pytest.MonkeyPatch, key: str = "", root: object = OURS) -> None:
    """Let HTTP requests reach an application as ours is, which asks for the key, and answers so at
    /.
    """

    def answer(request: httpx.Request) -> httpx.Response:
        pages: dict[str, object] = {
            "/": root,
            "/version": {"version": "0.9.1"},
            "/v1/models": {"data": [{"id": "tiny"}]},
        }
        if key and request.url.path != "/":
            return httpx.Response(401, json={"error": {"message": "no key"}})
        return httpx.Response(200, json=pages[request.url.path])

    client = partial(httpx.Client, transport=httpx.MockTransport(answer))
    monkeypatch.setattr(
        preflight,
        "httpx",
        SimpleNamespace(
            **{name: getattr(httpx, name) for name in ("HTTPError", "InvalidURL")}, Client=client
        ),
    )


def test_a_server_of_ours_is_named_with_its_version_and_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _answers(monkeypatch)
    monkeypatch.setattr(preflight, "find_listener", lambda *_: None)
    assert describe_listener("127.0.0.1", 8000) == "Tramontane 0.9.1, which serves tiny"
    assert describe_listener("::", 8000) == "Tramontane 0.9.1, which serves tiny"


def test_a_server_that_asks_for_a_key_is_named_without_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _answers(monkeypatch, key="k")
    monkeypatch.setattr(preflight, "find_listener", lambda *_: None)
    assert describe_listener("127.0.0.1", 8000) == "Tramontane, which asks for an API key"


@pytest.mark.parametrize("root", [{"detail": "Not Found"}, ["ui"], "ui"])
def test_another_server_with_a_version_and_models_is_not_ours(
    monkeypatch: pytest.MonkeyPatch, root: object
) -> None:
    _answers(monkeypatch, root=root)
    monkeypatch.setattr(preflight, "find_listener", lambda *_: None)
    assert describe_listener("127.0.0.1", 8000) == "another process, which cannot be seen from here"


@pytest.mark.parametrize(
    "reply", [b"", b'HTTP/1.1 200 OK\r\ncontent-length: 13\r\n\r\n["not ours"]\n', b"220 mail\r\n"]
)
def test_another_process_is_named_with_its_id(reply: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:

        def answer() -> None:
            connection, _ = held.accept()
            with connection:
                connection.recv(2**16)
                connection.sendall(reply)

        thread = Thread(target=answer)
        thread.start()
        port = held.getsockname()[1]
        own = f"process {os.getpid()}, {psutil.Process().name()}"
        assert describe_listener("127.0.0.1", port) == own
        thread.join()


@pytest.mark.parametrize("beginning", [b"transfer-encoding: chunked\r\n\r\n", b"x: "])
def test_an_answer_without_an_end_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, beginning: bytes
) -> None:
    """Such as music, or a header that never ends. The client itself bounds only the time between
    two of its parts.
    """
    monkeypatch.setattr(preflight, "ANSWER_TIMEOUT_S", 0.05)
    is_over = Event()
    with socket.create_server(("127.0.0.1", 0)) as held:

        def play() -> None:
            connection, _ = held.accept()
            with connection, suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\n" + beginning)
                while not is_over.wait(0.01):
                    connection.sendall(b"1\r\n[\r\n" if b"chunked" in beginning else b"x")

        thread = Thread(target=play)
        thread.start()
        assert "process" in describe_listener("127.0.0.1", held.getsockname()[1])
        is_over.set()
        thread.join()


def test_an_answer_that_is_too_long_is_no_server_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    long = dict.fromkeys((*preflight.ROOT_KEYS, "filler"), "x" * (preflight.MAX_ANSWER_BYTES // 4))
    transport = httpx.MockTransport(lambda _request: httpx.Response(200, json=long))
    monkeypatch.setattr(httpx, "Client", partial(httpx.Client, transport=transport))
    assert "Tramontane" not in describe_listener("127.0.0.1", 1)


def test_a_process_that_is_silent_or_cannot_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "ANSWER_TIMEOUT_S", 0.05)
    monkeypatch.setattr(preflight, "find_listener", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as held:
        assert (
            describe_listener("127.0.0.1", held.getsockname()[1])
            == "another process, which cannot be seen from here"
        )


def test_a_server_whose_port_another_of_its_processes_has_is_named_by_its_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Process 1 is not the command, though its command line may be the same."""
    lines = [
        (30, "ray::ProxyActor"),
        (20, "raylet"),
        (10, "python /bin/tramontane serve --port 8000"),
    ]
    lines.append((5, "uv run tramontane serve --port 8000"))  # the one to be stopped
    processes = [
        SimpleNamespace(pid=pid, cmdline=line.split, name=lambda: "ray")
        for pid, line in (*lines, (1, "tini tramontane serve"))
    ]
    processes[0].parents = lambda: processes[1:]
    monkeypatch.setattr(preflight, "find_listener", lambda *_: processes[0])
    monkeypatch.setattr(preflight, "_describe_server", lambda _host, _port: "")
    assert describe_listener("127.0.0.1", 9000) == "process 5, tramontane serve"
    processes[3].cmdline = "bash".split
    assert describe_listener("127.0.0.1", 9000) == "process 10, tramontane serve"
    processes[2].cmdline = "bash".split
    assert describe_listener("127.0.0.1", 9000) == "process 30, ray"


# Of two listeners at one port, at the first address and at the second, which one keeps a host from
# it.
TWO_LISTENERS = {
    ("127.0.0.1", "127.0.0.2", "127.0.0.1"): 2,
    ("127.0.0.1", "127.0.0.2", "127.0.0.3"): None,
    ("127.0.0.1", "127.0.0.2", "0.0.0.0"): 2,
    ("127.0.0.1", "0.0.0.0", "127.0.0.1"): 2,
    ("127.0.0.1", "::", "127.0.0.1"): 2,  # the first may be an IPv6 listener that leaves IPv4 alone
    ("127.0.0.1", "::", "127.0.0.2"): 1,
    ("127.0.0.1", "0.0.0.0", "::1"): 1,
    ("127.0.0.1", "::1", "127.0.0.1"): 2,
    ("127.0.0.1", "::ffff:127.0.0.1", "::1"): 1,
    ("::ffff:127.0.0.1", "127.0.0.1", "::"): 1,
    ("0.0.0.0", "127.0.0.2", "127.0.0.1"): 1,
    ("0.0.0.0", "::1", "::"): 2,
    ("::", "127.0.0.1", "::1"): 2,
    ("::", "127.0.0.1", "127.0.0.1"): 1,
    ("::", "0.0.0.0", "0.0.0.0"): 1,
    ("::1", "0.0.0.0", "::1"): 2,
    ("::1", "0.0.0.0", "::"): 2,
    ("::1", "0.0.0.0", "127.0.0.1"): None,
    ("::", "::1", "::2"): 1,
    ("::1", "::2", "::2"): None,
    ("localhost", "127.0.0.2", "127.0.0.1"): 2,
    ("x" * 64, "127.0.0.2", "127.0.0.1"): None,
}


@pytest.mark.parametrize("ours", TWO_LISTENERS, ids=" ".join)
def test_what_listens_at_another_address_does_not_hold_a_port(
    monkeypatch: pytest.MonkeyPatch, ours: tuple[str, str, str]
) -> None:
    """And of those that do, the nearest is named."""
    host, *addresses = ours
    listening = [
        SimpleNamespace(status="LISTEN", laddr=(ip, 8000), pid=pid)
        for pid, ip in enumerate(addresses, start=1)
    ]
    others = [
        SimpleNamespace(status="LISTEN", laddr=(host, 8001), pid=3),
        SimpleNamespace(status="ESTABLISHED", laddr=("0.0.0.0", 8000), pid=4),
        SimpleNamespace(status="LISTEN", laddr=("0.0.0.0", 8000), pid=None),
        SimpleNamespace(status="NONE", laddr=(), pid=5),
    ]
    seen = {"net_connections": lambda _kind: [*others, *listening], "Process": lambda pid: pid}
    monkeypatch.setattr(
        preflight, "psutil", SimpleNamespace(CONN_LISTEN="LISTEN", Error=OSError, **seen)
    )
    assert preflight.find_listener(host, 8000) == TWO_LISTENERS[ours]


def test_a_listener_of_this_machine_is_found_at_its_address_alone() -> None:
    with socket.create_server(("127.0.0.2", 0)) as held:
        port = held.getsockname()[1]
        assert preflight.find_listener("127.0.0.1", port) is None
        assert (
            preflight.find_listener("127.0.0.2", port)
            == preflight.find_listener("0.0.0.0", port)
            == psutil.Process()
        )


def test_a_port_in_use_is_refused_before_the_checkpoint_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reports: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        config = EngineConfig(
            model=tmp_path / "nowhere",
            port=port,
            grpc_port=0,
            jobs_database=f"sqlite:///{tmp_path}/jobs.db",
        )
        monkeypatch.setattr(serve_checks, "_may_be_released", lambda *_: False)
        monkeypatch.setattr(preflight, "ANSWER_TIMEOUT_S", 0.05)
        with pytest.raises(
            ConfigError,
            match=(
                rf"--port {port} is in use by process {os.getpid()}, .*; choose another --port, or"
                r" stop"
            ),
        ):
            run_server(config, reports.append, pytest.fail, pytest.fail)
    assert reports == []
