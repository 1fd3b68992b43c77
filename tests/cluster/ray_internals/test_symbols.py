"""The table of Ray's private names: this version of Ray has them all, and a missing one is one clear line."""

import inspect
import types
from dataclasses import replace

import pytest
import ray

from tramontane.cluster.pipeline.ray_cluster import join_ray_cluster, local_ray_cluster
from tramontane.cluster.ray_internals import core, serve, table
from tramontane.cluster.ray_internals.symbols import RAY_VERSION, PrivateSymbol, assert_supported
from tramontane.cluster.ray_internals.table import JOIN_SYMBOLS, RAY_SYMBOLS, SERVE_SYMBOLS
from tramontane.cluster.serve_patches.proxy import proxy_middlewares
from tramontane.proto.errors import ConfigError, UserError

TABLES = (RAY_SYMBOLS, JOIN_SYMBOLS, SERVE_SYMBOLS)
KNOWN = PrivateSymbol("ray.serve._private.replica:MessageQueue", (), RAY_VERSION, "a test", "this test")


def test_this_version_of_ray_has_every_symbol() -> None:
    assert_supported(*TABLES)


def test_every_symbol_says_why_it_is_needed_and_what_breaks() -> None:
    symbols = [symbol for each in TABLES for symbol in each]
    assert all(symbol.needed_for and symbol.breaks and symbol.ray_version == RAY_VERSION for symbol in symbols)
    assert len({symbol.path for symbol in symbols}) == len(symbols) > 40


def test_every_named_symbol_is_in_a_table() -> None:
    """Also those that accessors read: an accessor cannot use a name that no check covers."""
    named = {value for value in vars(table).values() if isinstance(value, PrivateSymbol)}
    assert named <= {symbol for each in TABLES for symbol in each}


def test_accessors_import_nothing_private_themselves() -> None:
    sources = [inspect.getsource(module) for module in (core, serve)]
    assert not any("ray._" in source or "ray.serve._" in source for source in sources)


@pytest.mark.parametrize(
    ("path", "parameters", "change"),
    [
        ("ray.serve._private.replica:NoSuchQueue", (), "NoSuchQueue is missing"),
        ("ray.serve._private.no_such_module:MessageQueue", (), "no_such_module:MessageQueue is missing"),
        ("ray.serve._private.replica:NoSuchClass._message_queue", (), "NoSuchClass._message_queue is missing"),
        ("ray.serve._private.replica:MessageQueue._no_such_field", (), "_no_such_field is missing"),
        ("ray.serve._private.replica:add_port_to_grpc_server", ("server", "host"), "has no parameter host"),
        ("ray.serve._private.replica:add_port_to_grpc_server", ("server", "address"), ""),
        ("ray.serve._private.replica:MessageQueue._message_queue", (), ""),
    ],
)
def test_a_planted_change_is_found(path: str, parameters: tuple[str, ...], change: str) -> None:
    planted = replace(KNOWN, path=path, parameters=parameters)
    if not change:
        assert_supported((KNOWN, planted))
        return
    with pytest.raises(UserError) as error:
        assert_supported((KNOWN,), (planted,))
    message = str(error.value)
    assert change in message
    assert f"Ray {ray.__version__} has changed" in message
    assert "(breaks this test)" in message
    assert message.endswith(f"install ray=={RAY_VERSION}")
    assert "\n" not in message


def test_all_changes_are_in_one_line() -> None:
    planted = tuple(replace(KNOWN, path=f"ray.no_such_module:{name}") for name in ("one", "two"))
    with pytest.raises(ConfigError) as error:
        assert_supported(planted)
    assert all(f"ray.no_such_module:{name} is missing" in str(error.value) for name in ("one", "two"))


def test_using_a_missing_symbol_is_the_same_error() -> None:
    with pytest.raises(ConfigError, match="is missing"):
        _ = replace(KNOWN, path="ray.no_such_module:name").value


def test_a_replaced_symbol_is_put_back() -> None:
    symbol, original = replace(KNOWN, path="ray._private.worker:_worker_logs_enabled"), ray._private.worker._worker_logs_enabled
    with symbol.replaced("planted"):
        assert symbol.value == "planted"
    assert ray._private.worker._worker_logs_enabled is original


@pytest.fixture
def _ray_without_a_symbol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("ray._private.utils.set_sigterm_handler")
    monkeypatch.delattr("ray.serve.context._get_in_flight_requests")


@pytest.mark.usefixtures("_ray_without_a_symbol")
@pytest.mark.parametrize(
    ("start", "name"),
    [
        (lambda: local_ray_cluster(1).__enter__(), "set_sigterm_handler"),
        (lambda: join_ray_cluster("127.0.0.1:1").__enter__(), "set_sigterm_handler"),
        (proxy_middlewares, "_get_in_flight_requests"),
    ],
)
def test_what_starts_ray_or_serve_checks_first(start: types.FunctionType, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is missing"):
        start()
