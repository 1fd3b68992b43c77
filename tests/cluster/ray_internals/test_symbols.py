"""The table of Ray's private names: this version of Ray has them all, and a missing one is one
clear line.
"""

import ast
import inspect
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from packaging.requirements import Requirement
from packaging.version import Version
from ray._private import services

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.pipeline.ray_cluster import join_ray_cluster, local_ray_cluster
from tramontane.cluster.ray_internals import accessors, local_node, table
from tramontane.cluster.ray_internals.symbol import RAY_VERSION, PrivateSymbol
from tramontane.cluster.ray_internals.table import (
    JOIN_SYMBOLS,
    MONITORING_SYMBOLS,
    RAY_SYMBOLS,
    SERVE_SYMBOLS,
    assert_supported,
)
from tramontane.cluster.serve_patches.proxy import proxy_middlewares
from tramontane.cluster.serving.app import build
from tramontane.cluster.serving.server import run_server
from tramontane.proto.errors import ConfigError, UserError

TABLES = (RAY_SYMBOLS, JOIN_SYMBOLS, SERVE_SYMBOLS, MONITORING_SYMBOLS)
KNOWN = PrivateSymbol(
    "ray.serve._private.replica:MessageQueue", (), RAY_VERSION, "a test", "this test"
)


def test_this_version_of_ray_has_every_symbol() -> None:
    assert_supported(*TABLES)


def test_every_symbol_says_why_it_is_needed_and_what_breaks() -> None:
    symbols = [symbol for each in TABLES for symbol in each]
    assert all(
        symbol.needed_for and symbol.breaks and symbol.ray_version == RAY_VERSION
        for symbol in symbols
    )
    assert len({symbol.path for symbol in symbols}) == len(symbols) > 40


def test_every_named_symbol_is_in_a_table() -> None:
    """Also those that accessors read: an accessor cannot use a name that no check covers."""
    named = {value for value in vars(table).values() if isinstance(value, PrivateSymbol)}
    assert named <= {symbol for each in TABLES for symbol in each}


class _Uses:
    """What a source uses of the table: its constants, attributes of any objects, methods of any
    classes, which may replace those of Ray's, and keywords of any calls.
    """

    def __init__(self, *trees: ast.AST) -> None:
        nodes = [node for tree in trees for node in ast.walk(tree)]
        imports = [
            node
            for node in nodes
            if isinstance(node, ast.ImportFrom) and node.module == table.__name__
        ]
        self.constants = {alias.name for node in imports for alias in node.names}
        self.attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        bodies = (node.body for node in nodes if isinstance(node, ast.ClassDef))
        self.attributes |= {
            each.name
            for body in bodies
            for each in body
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        self.keywords = {node.arg for node in nodes if isinstance(node, ast.keyword) and node.arg}
        through_module = (
            node
            for node in nodes
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "table"
        )
        self.constants |= {node.attr for node in through_module}


def _unused_rows(
    uses: _Uses, constants: dict[str, PrivateSymbol], rows: Iterable[PrivateSymbol]
) -> list[str]:
    """Rows that no code uses: neither by the constant, nor, for an attribute, by its name and the
    parameters that we pass.
    """
    used = {symbol for name, symbol in constants.items() if name in uses.constants}
    words = uses.attributes | uses.keywords
    for row in rows:
        private_parameters = {name for name in row.parameters if name.startswith("_")}
        if (
            row.is_attribute
            and row.path.rpartition(".")[2] in words
            and private_parameters <= uses.keywords
        ):
            used.add(row)
    return [row.path for row in rows if row not in used]


def _accessors_without_a_row(source: str, rows: Iterable[PrivateSymbol]) -> list[str]:
    """Functions that use no row, and private attributes and keywords that no row has."""
    tree = ast.parse(source)
    known = {row.path.rpartition(".")[2] for row in rows if row.is_attribute} | {
        name for row in rows for name in row.parameters
    }
    functions = {
        node.name: _Uses(node)
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    idle = [
        name
        for name, uses in functions.items()
        if not (uses.constants or (uses.attributes | uses.keywords) & known)
    ]
    uses = _Uses(tree)
    private = (
        name
        for name in uses.attributes | uses.keywords
        if name.startswith("_") and not name.startswith("__")
    )
    return idle + sorted(set(private) - known)


CLUSTER = Path(table.__file__).parents[1]
CONSTANTS = {name: value for name, value in vars(table).items() if isinstance(value, PrivateSymbol)}
ROWS = tuple(symbol for each in TABLES for symbol in each)
ACCESSORS = inspect.getsource(accessors) + inspect.getsource(local_node)
PLANTED = """
def planted(handle: Any) -> Any:
    class Planted:
        def _overridden(self) -> None: ...

    return handle._planted(_also=1)
"""


def test_every_row_is_used() -> None:
    sources = [
        path.read_text(encoding="utf-8")
        for path in sorted(CLUSTER.rglob("*.py"))
        if path.name != "table.py"
    ]
    uses = _Uses(*map(ast.parse, sources))
    assert _unused_rows(uses, CONSTANTS, ROWS) == []
    planted = (
        replace(KNOWN, path="ray.util:planted"),
        replace(KNOWN, path="ray.util:Planted._planted"),
    )
    assert _unused_rows(uses, CONSTANTS | {"PLANTED": planted[0]}, (*ROWS, *planted)) == [
        row.path for row in planted
    ]


def test_every_accessor_has_a_row() -> None:
    assert _accessors_without_a_row(ACCESSORS, ROWS) == []
    assert _accessors_without_a_row(ACCESSORS + PLANTED, ROWS) == [
        *("planted", "_also", "_overridden", "_planted")
    ]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "path", ["ray.serve.handle:DeploymentHandle.options", "ray.actor:ActorHandle._actor_id"]
)
def test_an_accessor_whose_row_is_removed_is_found(path: str) -> None:
    assert _accessors_without_a_row(ACCESSORS, [row for row in ROWS if row.path != path]) != []


def test_accessors_import_nothing_private_themselves() -> None:
    assert "ray._" not in ACCESSORS
    assert "ray.serve._" not in ACCESSORS


@pytest.mark.parametrize(
    ("path", "parameters", "change"),
    [
        ("ray.serve._private.replica:NoSuchQueue", (), "NoSuchQueue is missing"),
        (
            "ray.serve._private.no_such_module:MessageQueue",
            (),
            "no_such_module:MessageQueue is missing",
        ),
        (
            "ray.serve._private.replica:NoSuchClass._message_queue",
            (),
            "NoSuchClass._message_queue is missing",
        ),
        ("ray.serve._private.replica:MessageQueue._no_such_field", (), "_no_such_field is missing"),
        (
            "ray.serve._private.replica:add_port_to_grpc_server",
            ("server", "host"),
            "has no parameter host",
        ),
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
    assert all(
        f"ray.no_such_module:{name} is missing" in str(error.value) for name in ("one", "two")
    )


def test_using_a_missing_symbol_is_the_same_error() -> None:
    with pytest.raises(ConfigError, match="is missing"):
        _ = replace(KNOWN, path="ray.no_such_module:name").value


def test_classes_that_tramontane_has_replaced_have_every_symbol() -> None:
    """A proxy checks the table each time it makes its middlewares, which replaces classes once."""
    kept = (table.MESSAGE_QUEUE, table.RESPONSE_GENERATOR)
    with kept[0].replaced(kept[0].value), kept[1].replaced(kept[1].value):
        proxy_middlewares()
        replaced = kept[1].value
        proxy_middlewares()
        assert kept[1].value is replaced
        assert_supported(*TABLES)


def test_a_replaced_symbol_is_put_back() -> None:
    symbol, original = (
        replace(KNOWN, path="ray._private.worker:_worker_logs_enabled"),
        ray._private.worker._worker_logs_enabled,
    )
    with symbol.replaced("planted"):
        assert symbol.value == "planted"
    assert ray._private.worker._worker_logs_enabled is original


def test_a_local_cluster_keeps_its_loopback_address() -> None:
    """Ray takes 127.0.0.1 for the machine's outer address where it believes that clusters are
    possible, as on Linux.
    """
    with table.RAY_CLUSTERS_POSSIBLE.replaced(True), pytest.MonkeyPatch.context() as patch:
        patch.setattr(services, "node_ip_address_from_perspective", lambda _: "192.0.2.7")
        assert services.resolve_ip_for_localhost("127.0.0.1") == "192.0.2.7"
        with local_node.keep_loopback_address():
            assert services.resolve_ip_for_localhost("127.0.0.1") == "127.0.0.1"
        assert services.resolve_ip_for_localhost("127.0.0.1") == "192.0.2.7"


def _version_problems(pyproject: str, installed: str, tested: str) -> list[str]:
    """Where the pin of Ray and the installed Ray are of another minor version than the table."""
    minor = Version(tested).release[:2]
    (requirement,) = [
        each
        for each in tomllib.loads(pyproject)["project"]["dependencies"]
        if each.startswith("ray[")
    ]
    pin = Requirement(requirement).specifier
    after, before = f"{minor[0]}.{minor[1] + 1}.0", f"{minor[0]}.{minor[1] - 1}.99"
    allowed = [each for each in (before, tested, after) if each in pin]
    problems = (
        [] if allowed == [tested] else [f"{requirement} allows {allowed} and not only {tested}"]
    )
    return problems + (
        [] if Version(installed).release[:2] == minor else [f"Ray {installed} is installed"]
    )


def test_the_table_is_of_the_pinned_and_the_installed_version() -> None:
    pyproject = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    assert _version_problems(pyproject, ray.__version__, RAY_VERSION) == []
    assert len(_version_problems(pyproject, ray.__version__, "2.59.0")) == 2
    assert _version_problems(pyproject, "2.61.0", RAY_VERSION) == ["Ray 2.61.0 is installed"]
    pin = "ray[default,serve]>=2.60,<2.61"
    assert pin in pyproject
    for planted in (
        "ray[default,serve]>=2.60",
        "ray[default,serve]<2.61",
        "ray[default,serve]>=2.61,<2.62",
    ):
        assert (
            len(_version_problems(pyproject.replace(pin, planted), ray.__version__, RAY_VERSION))
            == 1
        )


@pytest.mark.parametrize("symbol", JOIN_SYMBOLS, ids=lambda symbol: symbol.path)
def test_joining_a_cluster_checks_what_only_that_needs(
    symbol: PrivateSymbol, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it looks for the cluster: nothing listens at port 1, which would be the error
    otherwise.
    """
    monkeypatch.delattr(symbol.path.replace(":", "."))
    with pytest.raises(ConfigError, match=f"{symbol.path} is missing"):
        join_ray_cluster("127.0.0.1:1").__enter__()


@pytest.fixture
def _ray_without_a_symbol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("ray._private.utils.set_sigterm_handler")
    monkeypatch.delattr("ray.serve.context._get_in_flight_requests")


def _serve() -> None:
    """Run ``tramontane serve``, which refuses this exporter before it starts anything, but after
    the check.
    """
    run_server(
        EngineConfig(tracing_exporter="no_such_module:exporter"),
        print,
        lambda _: None,
        lambda _: None,
    )


@pytest.mark.usefixtures("_ray_without_a_symbol")
@pytest.mark.parametrize(
    ("start", "name"),
    [
        (lambda: local_ray_cluster(1).__enter__(), "set_sigterm_handler"),
        (lambda: join_ray_cluster("127.0.0.1:1").__enter__(), "set_sigterm_handler"),
        (proxy_middlewares, "_get_in_flight_requests"),
        (lambda: build({}), "_get_in_flight_requests"),
        (_serve, "set_sigterm_handler"),
        (_serve, "_get_in_flight_requests"),
    ],
)
def test_what_starts_ray_or_serve_checks_first(start: Callable[[], object], name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is missing"):
        start()
