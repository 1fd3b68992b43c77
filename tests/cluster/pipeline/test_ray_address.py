"""Addresses where there is no cluster to join: one line at once, where Ray would log for
minutes.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import grpc
import pytest
from ray._private import services
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

from tramontane.cluster.pipeline import ray_cluster
from tramontane.cluster.pipeline.ray_cluster import ADVICE, join_ray_cluster
from tramontane.proto.errors import ConfigError

HERE = services.get_node_ip_address()  # an outer address, as Ray turns 127.0.0.1 into that
TOKEN = "t" * 32

RunsHere = Callable[[str | None], None]


class _Head(grpc.GenericRpcHandler):  # type: ignore[misc]
    """What a cluster's head node answers to a ping; without ``token``, that it is required."""

    def __init__(self, token: str | None) -> None:
        self.token = token

    def service(self, _details: object) -> object:
        return grpc.unary_unary_rpc_method_handler(self._answer)

    def _answer(self, _request: bytes, context: Any) -> bytes:
        if (
            self.token is not None
            and ("authorization", f"Bearer {self.token}") not in context.invocation_metadata()
        ):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
        return b""


@contextmanager
def _head(token: str | None = None) -> Iterator[str]:
    """Its address."""
    with ThreadPoolExecutor(max_workers=1) as threads:
        server = grpc.server(threads, handlers=[_Head(token)])
        port = server.add_insecure_port(f"{HERE}:0")
        server.start()
        yield f"{HERE}:{port}"
        server.stop(grace=None).wait()


@contextmanager
def _something_else(answers: bool) -> Iterator[str]:
    """It listens: it answers in a language of its own, or accepts and is silent."""
    with socket.create_server((HERE, 0)) as listener:

        def answer() -> None:
            # the first only looks whether anything listens
            for reply in (b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"):
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(reply)

        if answers:
            Thread(target=answer, daemon=True).start()
        yield f"{HERE}:{listener.getsockname()[1]}"


@pytest.fixture
def runs_here(monkeypatch: pytest.MonkeyPatch) -> RunsHere:
    """Decides which cluster ``auto`` finds, whatever runs on this machine."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def decide(address: str | None) -> None:
        monkeypatch.setattr(services, "find_gcs_addresses", lambda: {address} - {None})
        monkeypatch.setattr(services, "find_bootstrap_address", lambda _folder: None)

    return decide


def _refusal(address: str) -> str:
    with pytest.raises(ConfigError) as error, join_ray_cluster(address):
        pass
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_cluster_that_answers_is_joined() -> None:
    """The next thing is ray.init, which no test calls by accident."""
    with (
        _head() as address,
        pytest.raises(AssertionError, match="must not start a cluster"),
        join_ray_cluster(address),
    ):
        pass


def test_no_cluster_on_this_machine(runs_here: RunsHere) -> None:
    """Ray's own advice is to give --address."""
    runs_here(None)
    assert (
        _refusal("auto") == f"--address is auto, but no Ray cluster runs on this machine; {ADVICE}"
    )


def test_a_cluster_that_has_ended(runs_here: RunsHere) -> None:
    """Ray remembers the last one that was started."""
    runs_here(f"{HERE}:1")
    assert _refusal("auto").startswith(f"no Ray cluster answers at --address auto ({HERE}:1): ")


@pytest.mark.parametrize("value", ["local", "ray://somewhere:1", "somewhere"])
def test_a_variable_that_names_none(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", value)
    assert (
        _refusal("auto")
        == f"--address auto is what RAY_ADDRESS says, {value!r}; it must be host:port"
    )


@pytest.mark.parametrize("answers", [True, False])
def test_something_else_that_listens(monkeypatch: pytest.MonkeyPatch, answers: bool) -> None:
    if not answers:
        monkeypatch.setattr(ray_cluster, "CONNECT_TIMEOUT_S", 0.2)
    with _something_else(answers) as address:
        assert (
            _refusal(address)
            == f"what listens at --address {address} does not answer as a Ray cluster; {ADVICE}"
        )


@pytest.mark.skipif(HERE == "127.0.0.1", reason="this machine has no outer address")
def test_a_loopback_address_is_the_outer_one() -> None:
    """What listens on loopback only is no cluster that Ray could join: it would look at the outer
    address.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert _refusal(f"127.0.0.1:{port}").startswith(
            f"no Ray cluster answers at --address 127.0.0.1:{port} ({HERE}:{port}): "
        )


@pytest.fixture
def _with_a_token(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As a user who has one and has not chosen a mode."""
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    AuthenticationTokenLoader.instance().reset_cache()
    yield
    AuthenticationTokenLoader.instance().reset_cache()


@pytest.mark.usefixtures("_with_a_token")
def test_a_cluster_that_requires_a_token(runs_here: RunsHere) -> None:
    """Without a mode Ray shows one to ``auto``, and to no other address."""
    with _head(TOKEN) as address:
        assert (
            _refusal(address)
            == f"the Ray cluster at --address {address} asks for a token, and got none or another;"
            " set RAY_AUTH_MODE=token, and unless its token is in ~/.ray/auth_token here,"
            " RAY_AUTH_TOKEN to that"
        )
        runs_here(address)
        ray_cluster.check_ray_address("auto")


def test_a_mode_without_a_token(tmp_path: Path) -> None:
    """In a process of its own: Ray reads the mode once."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {
        "HOME": str(tmp_path)
    }
    command = [
        sys.executable,
        "-c",
        "from tramontane.cluster.cli.main import main; main()",
        "generate",
        "The",
        "--address",
    ]
    with _head(TOKEN) as address:
        done = subprocess.run(
            [*command, address],
            env=environment | {"RAY_AUTH_MODE": "token"},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.splitlines()[2:] == [
        "error: RAY_AUTH_MODE is token, but there is no token; set RAY_AUTH_TOKEN to the cluster's"
    ]
