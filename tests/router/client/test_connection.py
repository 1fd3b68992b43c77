"""What the Python client says where no server can be reached: one line, with the cause and what to
do.
"""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn
from starlette.applications import Starlette

from tramontane.client import AsyncClient, Client
from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.proto.errors import ConfigError, ConnectionLostError, TramontaneError
from tramontane.router.client.messages import DEFAULT_PORT, check_target

WHAT_TO_DO = (
    f"the gRPC API is at --grpc-port of tramontane serve ({DEFAULT_PORT} by default), not at its"
    " HTTP port"
)
NO_TARGETS = [
    *(
        "http://127.0.0.1:9000",
        "https://model.example.com/v1",
        "127.0.0.1",
        "localhost:",
        "localhost:http",
        ":9000",
        "",
    ),
    *("127.0.0.1:65536", "127.0.0.1:0", "::1", "a host:9000", "user@host:9000"),
]
TARGETS = [
    *(
        "127.0.0.1:9000",
        "localhost:1",
        "model.example.com:65535",
        "[::1]:9000",
        "[fe80::1%eth0]:9000",
    ),
    *("dns:///localhost:9000", "unix:/run/tramontane.sock", "ipv4:127.0.0.1:9000"),
]


@pytest.fixture(scope="module")
def http_port() -> Iterator[int]:
    """The port of a server that speaks HTTP/1 only, as a proxy of Ray Serve does."""
    server = uvicorn.Server(
        uvicorn.Config(Starlette(), port=0, log_level="critical", lifespan="off", ws="none")
    )
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    while not server.started:
        time.sleep(0.001)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join()


async def _models(target: str) -> None:
    async with AsyncClient(target) as client:
        await client.models()


def _errors(target: str) -> list[TramontaneError]:
    """What both clients raise."""
    with Client(target) as client, pytest.raises(TramontaneError) as blocking:
        client.models()
    with pytest.raises(TramontaneError) as awaited:
        asyncio.run(_models(target))
    return [blocking.value, awaited.value]


@pytest.mark.parametrize("target", NO_TARGETS)
def test_an_address_other_than_host_and_port_is_refused_before_any_call(target: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Client(target)
    assert (
        str(refused.value)
        == f"the server's address is {target!r}; it must be host:port, without http://;"
        f" {WHAT_TO_DO}"
    )


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_of_grpc_is_accepted(target: str) -> None:
    check_target(target)


def test_the_http_port_is_named_as_the_wrong_one(http_port: int) -> None:
    for error in _errors(f"127.0.0.1:{http_port}"):
        assert isinstance(error, ConfigError)
        assert (
            str(error)
            == f"the server at 127.0.0.1:{http_port} speaks HTTP/1, not gRPC; {WHAT_TO_DO}"
        )


def test_a_refused_connection_is_one_line_with_what_to_do() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{unused.getsockname()[1]}"
        for error in _errors(target):
            assert isinstance(error, ConnectionLostError)
            assert (
                str(error)
                == f"no server can be reached at {target}: Connection refused; is one running"
                f" there? {WHAT_TO_DO}"
            )


@pytest.mark.parametrize("key", ["two\nlines", "clé"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Client("127.0.0.1:9000", key)
    assert str(refused.value) == "the API key must be printable ASCII, without line breaks"


def test_the_port_of_the_message_is_the_default_of_serve() -> None:
    assert EngineConfig().grpc_port == DEFAULT_PORT
