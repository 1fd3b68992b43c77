"""The rooms' walls: who may import whom, read from the source and seen in fresh interpreters."""

import ast
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "proto": {"proto"},
    "workers": {"workers", "proto"},
    "router": {"router", "proto"},
    "cluster": {"cluster", "workers", "router", "proto"},
}
# The packages in levels: each may import those named here, all of a lower level, and nothing else
# of ours.
PACKAGES: dict[str, set[str]] = {
    "proto": set(),
    "workers.device": set(),
    "workers.kernels": {"proto", "workers.device"},
    "workers.links": {"proto", "workers.device"},
    "workers.attention": {"proto", "workers.device"},
    "workers.sampling": {"proto", "workers.device"},
    "workers.model": {"proto", "workers.device", "workers.kernels"},
    "workers.weights": {"proto", "workers.device", "workers.kernels", "workers.model"},
    "workers.experts": {
        "proto",
        "workers.device",
        "workers.kernels",
        "workers.links",
        "workers.model",
        "workers.weights",
    },
    "workers.stage": {
        *(
            "proto",
            "workers.attention",
            "workers.device",
            "workers.experts",
            "workers.kernels",
            "workers.links",
        ),
        *("workers.model", "workers.sampling", "workers.weights"),
    },
    "router.scheduling": {"proto"},
    "router.tokenization": {"proto"},
    "router.engine": {"proto", "router.scheduling"},
    "router.structured": {"proto", "router.tokenization"},
    "router.openai": {"proto", "router.engine", "router.structured", "router.tokenization"},
    "router.batch": {"proto", "router.openai", "router.structured"},
    "router.chat_apis": {"proto", "router.openai", "router.structured", "router.tokenization"},
    "router.grpc": {"proto", "router.openai"},
    "router.client": {"proto"},
    "cluster.ray_internals": {"proto"},
    "cluster.common": {"cluster.ray_internals"},
    "cluster.config": {"proto", "cluster.ray_internals"},
    "cluster.console": {
        *(
            "proto",
            "cluster.common",
            "cluster.config",
            "cluster.ray_internals",
            "router.engine",
            "router.tokenization",
        ),
    },
    "cluster.planning": {
        *(
            "proto",
            "cluster.common",
            "cluster.config",
            "cluster.ray_internals",
            "workers.device",
            "workers.weights",
        ),
    },
    "cluster.observability": {
        *(
            "proto",
            "cluster.config",
            "cluster.ray_internals",
            "router.engine",
            "router.openai",
            "router.scheduling",
        ),
    },
    "cluster.http": {
        *("proto", "cluster.common", "cluster.config"),
        *(
            "router.batch",
            "router.chat_apis",
            "router.engine",
            "router.openai",
            "router.tokenization",
        ),
    },
    "cluster.serve_patches": {
        *(
            "proto",
            "cluster.common",
            "cluster.config",
            "cluster.http",
            "cluster.observability",
            "cluster.ray_internals",
        ),
        "router.openai",
    },
    "cluster.actors": {
        *(
            "proto",
            "cluster.common",
            "cluster.config",
            "cluster.observability",
            "cluster.planning",
            "cluster.ray_internals",
        ),
        *(
            "router.tokenization",
            "workers.device",
            "workers.experts",
            "workers.links",
            "workers.stage",
            "workers.weights",
        ),
    },
    "cluster.pipeline": {
        *(
            "proto",
            "cluster.actors",
            "cluster.common",
            "cluster.config",
            "cluster.planning",
            "cluster.ray_internals",
        ),
        *("router.engine", "router.scheduling", "router.tokenization"),
        *("workers.device", "workers.sampling", "workers.stage", "workers.weights"),
    },
    "cluster.serving": {
        *(
            "proto",
            "cluster.actors",
            "cluster.common",
            "cluster.config",
            "cluster.http",
            "cluster.observability",
        ),
        *("cluster.pipeline", "cluster.planning", "cluster.ray_internals", "cluster.serve_patches"),
        *(
            "router.batch",
            "router.engine",
            "router.grpc",
            "router.openai",
            "router.scheduling",
        ),
        *("router.tokenization", "workers.weights"),
    },
    "cluster.bench": {
        *("proto", "cluster.config", "cluster.console", "cluster.pipeline"),
        *("router.engine", "router.scheduling"),
    },
    "cluster.llm": {
        *("proto", "cluster.common", "cluster.config", "cluster.console", "cluster.pipeline"),
        *("router.openai", "router.tokenization"),
    },
    "cluster.deploy": {
        "proto",
        "cluster.config",
        "cluster.planning",
        "cluster.ray_internals",
        "cluster.serving",
    },
    "cluster.cli": {
        *(
            "proto",
            "cluster.bench",
            "cluster.common",
            "cluster.config",
            "cluster.console",
            "cluster.deploy",
        ),
        *(
            "cluster.pipeline",
            "cluster.planning",
            "cluster.serving",
            "router.batch",
            "router.engine",
            "router.scheduling",
        ),
        *("router.tokenization", "workers.weights"),
    },
}
# Libraries that a package must not import, although its room may.
BANNED_IN_PACKAGE = {"router.scheduling": {"asyncio", "time"}, "cluster.http": {"ray"}}
MAX_MODULES, MAX_LINES, MAX_IMPORTS = 20, 500, 15
# Modules that import more of ours, and how many they may: they put a stage, a pipeline, a server or
# a command together. A number here may only become smaller.
IMPORTS_MORE = {
    "cluster.actors.stage_actor": 17,
    "cluster.cli.plan": 22,
    "cluster.http.app": 20,
    "cluster.http.token_endpoints": 23,
    "cluster.pipeline.engine": 30,
    "cluster.serving.batch_replica": 29,
    "cluster.serving.ingress": 23,
    "cluster.serving.router_replica": 23,
    "cluster.serving.server": 25,
    "router.openai.chat_completion": 17,
    "workers.stage.device_backend": 20,
    "workers.stage.stage_worker": 32,
}
# Modules of fewer lines whose only importer is in their own package are parts of it, but for these.
MIN_LINES = 120
SMALL = {
    # a program that another process runs, without this package
    "router.structured.validator_process",
    # they need a library, or a part of it, that is not on every platform
    *("workers.attention.varlen_backend", "workers.attention.xformers_backend"),
    *("workers.kernels.row_tiles", "workers.kernels.triton_norm", "workers.kernels.triton_silu"),
    # together with their importer they would have more than ``MAX_LINES``
    *("workers.stage.stage_numerics", "workers.stage.step_profiler", "workers.stage.warm_up"),
    # a subject each, next to a module that puts parts together
    *("cluster.llm.engine_thread", "cluster.pipeline.local_chain", "workers.device.nvml"),
}
# of which the size rules say nothing
GENERATED = {"proto.inference_pb2", "proto.inference_pb2_grpc"}
USES_PRIVATE_NAMES = "cluster.ray_internals"  # the only package that uses private names of Ray
NAMED_TUPLE_METHODS = {"_asdict", "_make", "_replace"}
# modules, next to those called triton_*, that need a library which is not on every platform
FOR_GPUS = {"row_tiles": "triton", "xformers_backend": "xformers"}
BANNED = {"workers": {"ray"}, "router": {"ray", "torch", "xformers", "transformers"}}
# what comes from outside is only data
EXECUTES_DATA = {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve"}
PROTO_LIBRARIES = {"msgpack", "grpc", "google.protobuf", "google.rpc"}
TOP_LEVEL = {
    *("cluster", "workers", "router", "proto", "tests", "k8s", "docs"),
    *(
        "pyproject.toml",
        "README.md",
        "Makefile",
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "SECURITY.md",
        "LICENSE",
    ),
}


class _Imports(ast.NodeVisitor):
    """Every import of one module as (line, dotted name, whether only type checkers see it)."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str, bool]] = []
        self.typing_names: dict[str, int] = {}  # names that exist for type checkers only
        self.runtime_names: set[str] = set()  # names that are used outside annotations
        self._importers = {"import_module", "__import__"}
        self._typing_only = self._in_annotation = False

    def visit_If(self, node: ast.If) -> None:
        test = node.test
        is_typing = getattr(test, "id", getattr(test, "attr", None)) == "TYPE_CHECKING"
        before, self._typing_only = self._typing_only, self._typing_only or is_typing
        for child in node.body:
            self.visit(child)
        self._typing_only = before
        for child in [node.test, *node.orelse]:
            self.visit(child)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(node, alias.name, alias.asname or alias.name.split(".")[0])

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            if node.module == "importlib" and alias.name == "import_module":
                self._importers.add(alias.asname or alias.name)
            # "from x import y" may mean the module x.y: the longer name is judged
            self._add(
                node,
                f"{'.' * node.level}{node.module or ''}.{alias.name}",
                alias.asname or alias.name,
            )

    def visit_Call(self, node: ast.Call) -> None:
        name = getattr(node.func, "id", getattr(node.func, "attr", None))
        given = [*node.args, *(k.value for k in node.keywords if k.arg == "name")]
        if name in self._importers and given and isinstance(given[0], ast.Constant):
            self.found.append((node.lineno, str(given[0].value), False))
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """``import tramontane.proto.x`` also binds ``tramontane``, through which other rooms can be
        reached.
        """
        if isinstance(node.value, ast.Name) and node.value.id == "tramontane":
            self.found.append((node.lineno, f"tramontane.{node.attr}", False))
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if not self._in_annotation:
            self.runtime_names.add(node.id)

    def visit_arg(self, node: ast.arg) -> None:
        self._visit_annotation(node.annotation)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._visit_annotation(node.annotation)
        for child in (node.target, node.value):
            if child is not None:
                self.visit(child)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._visit_annotation(node.returns)
        for child in [*node.decorator_list, node.args, *node.body]:
            self.visit(child)

    visit_AsyncFunctionDef = visit_FunctionDef

    def _visit_annotation(self, node: ast.expr | None) -> None:
        if node is not None:
            before, self._in_annotation = self._in_annotation, True
            self.visit(node)
            self._in_annotation = before

    def _add(self, node: ast.stmt, name: str, bound: str) -> None:
        self.found.append((node.lineno, name, self._typing_only))
        if self._typing_only:
            self.typing_names[bound] = node.lineno


def breaches(room: str, source: str) -> list[str]:
    """What the imports of one module of ``room`` do against the rule, one line each."""
    imports = _Imports()
    imports.visit(ast.parse(source))
    found = [
        f"line {line}: {why}"
        for line, name, typing in imports.found
        if (why := _breach(room, name, typing))
    ]
    if room == "proto":
        misused = imports.typing_names.keys() & imports.runtime_names
        found += [
            f"line {imports.typing_names[name]}: {name} is for annotations only"
            for name in sorted(misused)
        ]
    return found


def _breach(room: str, name: str, typing_only: bool) -> str | None:
    if name.startswith("."):
        return f"relative import of {name}"
    top, _, rest = name.partition(".")
    if top in MAY_IMPORT:
        return f"{top} is imported as tramontane.{top}, never bare"
    if top == "tramontane":
        other = rest.partition(".")[0]
        return None if other in MAY_IMPORT[room] else f"{room} must not import {name}"
    if top in EXECUTES_DATA or name.startswith("ray.cloudpickle"):
        return f"{name} would execute what it reads"
    if room == "proto":
        harmless = top in sys.stdlib_module_names or any(
            f"{name}.".startswith(f"{lib}.") for lib in PROTO_LIBRARIES
        )
        return (
            None
            if harmless or (top == "torch" and typing_only)
            else f"proto must not import {name}"
        )
    return f"{room} must not import {name}" if top in BANNED.get(room, set()) else None


def _modules(room: str) -> list[str]:
    return sorted(
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in (ROOT / room).rglob("*.py")
    )


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_imports_go_one_way(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    found = {
        str(file.relative_to(ROOT)): breaches(room, file.read_text(encoding="utf-8"))
        for file in files
    }
    assert not {name: lines for name, lines in found.items() if lines}


@dataclass(frozen=True)
class Module:
    """One module of ours: ``name`` is ``router.engine.router``, ``imports`` are (line, dotted name,
    only for type checkers).
    """

    name: str
    num_lines: int
    imports: tuple[tuple[int, str, bool], ...]

    @property
    def package(self) -> str:
        return self.name.rpartition(".")[0]


def _read(name: str, source: str) -> Module:
    found = _Imports()
    found.visit(ast.parse(source))
    return Module(name, source.count("\n"), tuple(found.found))


@cache
def _all_modules() -> Sequence[Module]:
    paths = [path for room in MAY_IMPORT for path in sorted((ROOT / room).rglob("*.py"))]
    return [
        _read(
            ".".join(path.relative_to(ROOT).with_suffix("").parts), path.read_text(encoding="utf-8")
        )
        for path in paths
    ]


def _edges(modules: Sequence[Module], for_types: bool = False) -> dict[str, set[str]]:
    """Which modules each module imports at run time, inside of functions too; ``for_types``: and
    for type checkers only.
    """
    names = {module.name for module in modules}
    edges: dict[str, set[str]] = {}
    for module in modules:
        wanted = [
            name.removeprefix("tramontane.")
            for _, name, typing in module.imports
            if for_types or not typing
        ]
        # a module, or a name in it
        both = {each for name in wanted for each in (name, name.rpartition(".")[0])}
        edges[module.name] = both & names
    return edges


def package_breaches(modules: Sequence[Module]) -> list[str]:
    """Imports of packages, or of libraries, that ``PACKAGES`` and ``BANNED_IN_PACKAGE`` do not
    allow.
    """
    found = [
        f"{package} is in no level of PACKAGES"
        for package in sorted({m.package for m in modules} - PACKAGES.keys())
    ]
    packages = {module.name: module.package for module in modules}
    for name, targets in _edges(modules, for_types=True).items():
        for target in sorted(targets):
            if packages[target] not in PACKAGES.get(packages[name], set()) | {packages[name]}:
                found.append(f"{name} must not import {target}")
    for module in modules:
        allowed = PACKAGES.get(module.package, set()) | {module.package}
        for line, name, _ in module.imports:
            own = name.removeprefix("tramontane.")
            if own in PACKAGES and "." in own and own not in allowed:  # a package as a whole
                found.append(f"{module.name}, line {line}: {name}")
            if name.split(".")[0] in BANNED_IN_PACKAGE.get(module.package, set()):
                found.append(f"{module.name}, line {line}: {name}")
    return found


def package_table(page: str) -> dict[str, tuple[int, set[str]]]:
    """Level and imports of each package in the table of ARCHITECTURE.md; ``router/*.py`` is the
    package ``router`` itself.

    In the last column ``device`` is a package of the same room, and ``router/{batch,engine}`` are
    two of another.
    """
    table: dict[str, tuple[int, set[str]]] = {}
    for level, name, cell in re.findall(
        r"^\| (\d+) \| `([^`]+)` \|.*\|([^|]*)\|$", page, re.MULTILINE
    ):
        package = name.removesuffix("/*.py").replace("/", ".")
        room, imports = package.partition(".")[0], set()
        for span in re.findall(r"`([^`]+)`", cell):
            prefix, _, last = span.rpartition("/")
            parts = last.strip("{}").split(",")
            imports |= {
                "proto" if part == "proto" else f"{prefix or room}.{part}" for part in parts
            }
        table[package] = (int(level), imports)
        assert not re.sub(r"`[^`]+`", "", cell).strip(", "), (
            f"{package}: {cell} has more than names in it"
        )
    return table


def table_differences(page: str, packages: Mapping[str, set[str]]) -> list[str]:
    """Where the table of ARCHITECTURE.md and the dictionary of packages differ, and levels that are
    not above their imports.
    """
    table = package_table(page)
    found = [f"{name} is not in both" for name in sorted(table.keys() ^ packages.keys())]
    for name in sorted(table.keys() & packages.keys()):
        level, imports = table[name]
        found += [
            f"{name}: {other} is imported in one of both"
            for other in sorted(imports ^ packages[name])
        ]
        found += [
            f"{name}: {other} is not of a lower level"
            for other in sorted(imports)
            if table[other][0] >= level
        ]
    return found


def private_names(source: str, ours: Collection[str] = ()) -> list[str]:
    """Private names of Ray that a module's source imports, or reaches through a name that it
    imported, one line each.

    If it uses Ray at all, also private keywords that it passes, and private attributes that it does
    not define itself. Those of ``self`` and ``cls`` may be inherited from a class of ours; ``ours``
    are the names that all our modules define. ``ray.init`` takes any keyword, so no table can have
    those.
    """
    tree = ast.parse(source)
    imports = _Imports()
    imports.visit(tree)
    found = [(line, name) for line, name, _ in imports.found]
    uses_ray = any(
        name.split(".")[0] == "ray" or name.startswith("tramontane.cluster.ray_internals")
        for _, name in found
    )
    bound, defined = _names_of_ray(tree), defined_names(tree) | NAMED_TUPLE_METHODS
    for node in ast.walk(tree):
        if (accessed := _accessed_attribute(node)) is not None:
            line, owner, name = accessed
            root, _, rest = owner.partition(".")
            found.append((line, f"{bound.get(root, root)}.{rest}.{name}"))
            is_ours = name in defined or (owner in ("self", "cls", "super()") and name in ours)
            found += [] if is_ours or not uses_ray else [(line, f"ray.{name}")]
        elif isinstance(node, ast.Call) and uses_ray and ast.unparse(node.func) != "ray.init":
            found += [
                (node.lineno, f"ray.{keyword.arg}") for keyword in node.keywords if keyword.arg
            ]
    return [f"line {line}: {name}" for line, name in found if _is_private(name)]


def _accessed_attribute(node: ast.AST) -> tuple[int, str, str] | None:
    """The line, ``x.y`` and ``z`` of ``x.y.z`` and of ``getattr(x.y, "z")``."""
    if isinstance(node, ast.Attribute):
        return node.lineno, ast.unparse(node.value), node.attr
    if (
        isinstance(node, ast.Call)
        and ast.unparse(node.func) == "getattr"
        and isinstance(node.args[1], ast.Constant)
    ):
        return node.lineno, ast.unparse(node.args[0]), str(node.args[1].value)
    return None


def defined_names(tree: ast.AST) -> set[str]:
    """The names that a module defines, or gives to attributes."""
    nodes = list(ast.walk(tree))
    names = {
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    names |= {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    return names | {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }


def _names_of_ray(tree: ast.AST) -> dict[str, str]:
    """What each imported name stands for, such as ``ray.serve.context`` for ``context``."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            bound |= {
                alias.asname: alias.name
                for alias in node.names
                if alias.asname and alias.name.split(".")[0] == "ray"
            }
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ray":
            bound |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
    return bound


def _is_private(name: str) -> bool:
    """``ray._private.state.actors`` is, and so are ``ray.serve.context._get_global_client`` and
    generated messages.
    """
    top, *parts = name.split(".")
    is_internal = name.startswith(("ray.core.", "ray.experimental.internal_kv"))
    return top == "ray" and (
        is_internal or any(part.startswith("_") and not part.startswith("__") for part in parts)
    )


def cycle(edges: Mapping[str, Iterable[str]]) -> list[str]:
    """The names on one cycle of ``edges``, the first also at the end; empty where there is none."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for other in sorted(edges.get(name, ())):
            if found := visit(other, [*path, name]):
                return found
        done.add(name)
        return []

    return next((found for name in edges if (found := visit(name, []))), [])


def size_breaches(modules: Sequence[Module]) -> list[str]:
    """Folders of more than ``MAX_MODULES`` modules, and modules of more than ``MAX_LINES`` lines;
    generated ones aside.
    """
    written = [module for module in modules if module.name not in GENERATED]
    count = Counter(module.package for module in written if not module.name.endswith("__init__"))
    crowded = [
        f"{package} has {number} modules"
        for package, number in count.items()
        if number > MAX_MODULES
    ]
    return crowded + [
        f"{module.name} has {module.num_lines} lines"
        for module in written
        if module.num_lines > MAX_LINES
    ]


def import_breaches(modules: Sequence[Module]) -> list[str]:
    """Modules that import more of ours than ``MAX_IMPORTS``, or than ``IMPORTS_MORE`` says."""
    written = [module.name for module in modules if module.name not in GENERATED]
    edges = _edges(modules, for_types=True)
    return [
        f"{name} imports {len(edges[name])} modules"
        for name in written
        if len(edges[name]) > IMPORTS_MORE.get(name, MAX_IMPORTS)
    ]


def small_parts(modules: Sequence[Module]) -> set[str]:
    """Modules of fewer than ``MIN_LINES`` lines that one module of their own package imports, and
    no other.
    """
    importers: dict[str, set[str]] = {}
    for name, targets in _edges(modules, for_types=True).items():
        for target in targets:
            importers.setdefault(target, set()).add(name)
    return {
        module.name
        for module in modules
        if module.num_lines < MIN_LINES
        and [name.rpartition(".")[0] for name in importers.get(module.name, ())] == [module.package]
    }


def test_packages_import_downwards_only() -> None:
    modules = _all_modules()
    assert {module.package for module in modules} == PACKAGES.keys()
    assert package_breaches(modules) == []


def test_the_table_of_packages_is_the_one_that_is_enforced() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert table_differences(page, PACKAGES) == []
    without = {name: imports - {"router.scheduling"} for name, imports in PACKAGES.items()}
    assert "router.engine: router.scheduling is imported in one of both" in table_differences(
        page, without
    )
    assert table_differences(page, PACKAGES | {"cluster.utils": set()}) == [
        "cluster.utils is not in both"
    ]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("row", "planted", "difference"),
    [
        ("| 1 | `router/client` |", "| 1 | `router/clients` |", "router.client is not in both"),
        (
            "| 3 | `router/engine` |",
            "| 1 | `router/engine` |",
            "router.engine: router.scheduling is not of a lower level",
        ),
        (
            "`router/{engine,tokenization}`",
            "`router/engine`",
            "cluster.console: router.tokenization is imported in one of both",
        ),
        (
            "`device`, `kernels` |",
            "`device`, `kernels`, `links` |",
            "workers.model: workers.links is imported in one of both",
        ),
    ],
)
def test_a_planted_change_of_the_table_is_found(row: str, planted: str, difference: str) -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert row in page
    assert difference in table_differences(page.replace(row, planted, 1), PACKAGES)


def test_one_package_uses_private_names_of_ray() -> None:
    sources = {
        path: path.read_text(encoding="utf-8")
        for room in MAY_IMPORT
        for path in sorted((ROOT / room).rglob("*.py"))
    }
    ours = set().union(*(defined_names(ast.parse(source)) for source in sources.values()))
    others = {
        path: text
        for path, text in sources.items()
        if path.parent != ROOT / USES_PRIVATE_NAMES.replace(".", "/")
    }
    found = {
        str(path.relative_to(ROOT)): private_names(text, ours) for path, text in others.items()
    }
    assert len(found) > 200
    assert not {name: lines for name, lines in found.items() if lines}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "source",
    [
        "import ray._private.state",
        "from ray._private import ray_constants",
        "from ray._raylet import setproctitle",
        "from ray.experimental.internal_kv import _internal_kv_get",
        "from ray.experimental import internal_kv",
        "from ray.serve.context import _get_global_client",
        "from ray.core.generated.gcs_service_pb2 import CheckAliveRequest",
        "def f() -> None:\n    from ray._common.utils import import_attr",
        "import ray\nworker = ray._private.worker",
        "import ray as r\nworker = r._private.worker",
        "import ray.serve as s\nx = s._private",
        "from ray import serve\nserve.context._get_global_client()",
        "from ray.serve.handle import DeploymentHandle\nDeploymentHandle._init",
        "import ray\nx = getattr(ray, '_private')",
        "from importlib import import_module\nx = import_module('ray.serve._private.replica')",
        "from ray import serve\nserve.get_deployment_handle('A').options(_by_reference=True)",
        "from ray import serve\nhandle = serve.get_deployment_handle('A')\nhandle._init()",
        "import ray\nkey = actors[0]._actor_id.hex()",
        (
            "from ray.serve.request_router import RequestRouter\nclass A(RequestRouter):\n    def"
            " f(self): return self._replicas"
        ),
        (
            "from tramontane.cluster.ray_internals.table import QUEUE\nx ="
            " QUEUE.value()._message_queue"
        ),
        "import ray\nx = getattr(actor, '_actor_id')",
    ],
)
def test_a_planted_private_name_is_found(source: str) -> None:
    assert private_names(source)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "source",
    [
        *(
            "import ray.util",
            "from ray.serve import config",
            "a._b",
            "a(_b=1)",
            "import ray\nray.init(_b=1)",
        ),
        *(
            "import ray\na._asdict()",
            "import ray\nself._ours()",
            "import ray\nself._b = 1\na._b",
            "import ray\na.__class__",
        ),
    ],
)
def test_public_names_of_ray_are_allowed(source: str) -> None:
    assert not private_names(source, {"_ours"})


def test_no_module_and_no_package_imports_itself_by_way_of_others() -> None:
    assert cycle(PACKAGES) == []
    assert cycle(_edges(_all_modules())) == []


FOR_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "


def test_folders_and_modules_are_small() -> None:
    assert size_breaches(_all_modules()) == []


def test_few_modules_import_many() -> None:
    modules = _all_modules()
    assert import_breaches(modules) == []
    planted = "".join(
        f"from {module.name} import x\n".replace("from ", "from tramontane.")
        for module in modules[: MAX_IMPORTS + 1]
    )
    name = "cluster.cli.planted"
    assert import_breaches([*modules, _read(name, planted)]) == [
        f"{name} imports {MAX_IMPORTS + 1} modules"
    ]


def test_parts_of_one_module_are_in_it() -> None:
    modules = _all_modules()
    assert small_parts(modules) == SMALL
    part = _read("proto.planted", "x = 1\n")
    user = _read("proto.user", "from tramontane.proto.planted import x\n")
    assert small_parts([*modules, part, user]) - SMALL == {"proto.planted"}
    elsewhere = _read("router.grpc.user", "from tramontane.proto.planted import x\n")
    assert small_parts([*modules, part, elsewhere]) == SMALL


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("workers.device.planted", "from tramontane.workers.stage import stage_worker"),
        ("router.scheduling.planted", "from tramontane.router.engine.router import Router"),
        (
            "router.scheduling.planted",
            "def f() -> None:\n    from tramontane.router.engine.router import Router",
        ),
        ("router.scheduling.planted", "from tramontane.router import engine"),
        ("cluster.actors.planted", "import tramontane.cluster.cli"),
        (
            "cluster.console.planted",
            f"{FOR_TYPES}from tramontane.cluster.pipeline.engine import Engine",
        ),
        ("cluster.console.planted", f"{FOR_TYPES}from tramontane.cluster import pipeline"),
        ("cluster.http.planted", f"{FOR_TYPES}from ray.serve.handle import DeploymentHandle"),
        ("router.scheduling.planted", "import asyncio"),
        ("router.scheduling.planted", "from time import monotonic"),
        ("cluster.http.planted", "import ray.serve._private.replica"),
        ("cluster.serving.planted", "from tramontane.cluster.cli.main import app"),
        ("cluster.utils.planted", "x = 1"),
    ],
)
def test_a_planted_upward_import_is_found(name: str, source: str) -> None:
    planted = package_breaches([*_all_modules(), _read(name, source)])
    assert len(planted) == 1
    assert name.rpartition(".")[0] in planted[0]


@pytest.mark.nightly
def test_a_planted_cycle_is_found() -> None:
    """``sequence`` is imported by the page allocator; planted here, it imports that in turn, in a
    function.
    """
    planted = _read(
        "router.scheduling.sequence",
        "def f() -> None:\n    from tramontane.router.scheduling import page_allocator",
    )
    modules = [*(module for module in _all_modules() if module.name != planted.name), planted]
    found = cycle(_edges(modules))
    assert found[0] == found[-1]
    assert {"router.scheduling.sequence", "router.scheduling.page_allocator"} <= set(found)


@pytest.mark.nightly
def test_a_planted_21st_module_and_a_planted_long_one_are_found() -> None:
    few = [_read(f"workers.links.planted_{number}", "") for number in range(MAX_MODULES)]
    assert size_breaches(few) == []
    assert size_breaches([*few, _read("workers.links.one_more", "")]) == [
        f"workers.links has {MAX_MODULES + 1} modules"
    ]
    for name in ("proto.long", "proto.written_pb2", "proto.inference_pb2_more"):
        assert size_breaches([_read(name, "x = 1\n" * (MAX_LINES + 1))]) == [
            f"{name} has {MAX_LINES + 1} lines"
        ]
    assert size_breaches([_read(name, "x = 1\n" * (MAX_LINES + 1)) for name in GENERATED]) == []


def test_the_generated_modules_are_there() -> None:
    assert {module.name for module in _all_modules()} >= GENERATED


PLANTED = [
    ("workers", "import tramontane.router.scheduler"),
    ("workers", "import tramontane.router.scheduler as s"),
    ("workers", "from tramontane import router"),
    ("workers", "from tramontane import proto, router as r"),
    ("workers", "from tramontane import *"),
    ("workers", "from tramontane.router import scheduler"),
    ("workers", "from tramontane.router.scheduler import Scheduler"),
    ("workers", "import tramontane.proto.step\nx = tramontane.router"),
    ("workers", "import tramontane"),
    ("workers", "def f() -> None:\n    from tramontane.cluster import launch"),
    ("workers", "class A:\n    import tramontane.cluster"),
    (
        "workers",
        (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from tramontane.router import"
            " pages"
        ),
    ),
    ("workers", "try:\n    import ray\nexcept ImportError:\n    ray = None"),
    ("workers", "import os, ray.util.metrics"),
    ("workers", "from ray import remote"),
    ("workers", "import importlib\nx = importlib.import_module('tramontane.router.pages')"),
    ("workers", "from importlib import import_module\nx = import_module(name='ray')"),
    ("workers", "from importlib import import_module as load\nx = load('tramontane.router')"),
    ("workers", "import importlib\nx = importlib.import_module('.pages', 'tramontane.router')"),
    ("workers", "x = __import__('ray')"),
    ("router", "from tramontane.workers import tensor_names"),
    ("router", "from tramontane.cluster.config import EngineConfig"),
    ("router", "import torch"),
    ("router", "async def f() -> None:\n    import torch.nn as nn"),
    ("router", "import typing\nif typing.TYPE_CHECKING:\n    from torch import Tensor"),
    ("router", "from transformers import AutoTokenizer"),
    ("proto", "from tramontane.workers import sampler"),
    ("proto", "import pickle"),
    ("workers", "from pickle import loads"),
    ("router", "import cloudpickle as data"),
    ("cluster", "from ray import cloudpickle"),
    ("proto", "import numpy"),
    ("proto", "import torch"),
    ("proto", "import google.cloud.storage"),
    ("proto", "import grpcx"),
    ("proto", "from typing import TYPE_CHECKING\nif not TYPE_CHECKING:\n    import torch"),
    (
        "proto",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    pass\nelse:\n    import torch",
    ),
    (
        "proto",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\nx = torch.zeros(1)",
    ),
    (
        "proto",
        (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor as"
            " T\nclass A(T): ..."
        ),
    ),
    ("proto", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import ray"),
    *[("cluster", f"import {room}") for room in MAY_IMPORT],
    ("cluster", "import proto.step"),
    ("cluster", "from workers import model"),
    ("cluster", "from . import config"),
    ("cluster", "from .config import EngineConfig"),
    ("cluster", "from ..proto import step"),
    ("cluster", "from tramontane import tests"),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("room", "source"), PLANTED)
def test_a_planted_breach_is_found(room: str, source: str) -> None:
    assert breaches(room, source), source


ALLOWED = [
    ("proto", "import json\nimport msgpack\nimport grpc.aio\nfrom google.protobuf import message"),
    (
        "proto",
        (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor\ndef"
            " f(x: 'Tensor') -> 'Tensor': ..."
        ),
    ),
    (
        "proto",
        (
            "import typing\nif typing.TYPE_CHECKING:\n    import torch\nclass A:\n    x:"
            " torch.Tensor\n"
        ),
    ),
    ("proto", "from tramontane.proto.errors import UserError\nfrom tramontane.proto import errors"),
    (
        "workers",
        (
            "import torch\nfrom tramontane.proto import step\nfrom tramontane.workers.model import"
            " StageModel"
        ),
    ),
    ("router", "import sentencepiece\nimport importlib\nx = importlib.import_module('pydantic')"),
    ("cluster", "import ray\nimport torch\nfrom tramontane import workers, router, proto, cluster"),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("room", "source"), ALLOWED)
def test_what_is_allowed_is_no_breach(room: str, source: str) -> None:
    assert breaches(room, source) == []


# Runs in a fresh interpreter: imports the modules that it is given, then prints every module that
# is loaded.
IMPORTER = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(sorted(sys.modules)))
"""


def _loaded_by(modules: list[str], folder: Path) -> list[str]:
    """The modules that a fresh interpreter, started in ``folder``, holds after it has imported
    these.
    """
    command = [sys.executable, "-c", IMPORTER, *modules]
    env = os.environ | {"RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    names: list[str] = json.loads(done.stdout.splitlines()[-1])
    return names


def _forbidden(loaded: list[str], forbidden: set[str]) -> list[str]:
    return [
        name for name in loaded if any(f"{name}.".startswith(f"{other}.") for other in forbidden)
    ]


def _importable(room: str) -> Iterator[str]:
    for module in _modules(room):
        name = module.rpartition(".")[2]
        library = "triton" if name.startswith("triton_") else FOR_GPUS.get(name)
        if library is None or find_spec(library):  # which is not there on every platform
            yield f"tramontane.{module}"


def test_the_client_loads_only_proto_and_grpc(tmp_path: Path) -> None:
    """It can be used on a machine that has nothing of the server's libraries."""
    loaded = _loaded_by(["tramontane.client"], tmp_path)
    ours = {".".join(name.split(".")[1:3]) for name in loaded if name.startswith("tramontane.")}
    assert {name for name in ours if not name.startswith("proto")} == {
        "client",
        "router",
        "router.client",
    }
    theirs = {name.split(".")[0] for name in loaded} - sys.stdlib_module_names
    assert not theirs & {
        "fastapi",
        "httpx",
        "numpy",
        "pydantic",
        "ray",
        "sqlalchemy",
        "tokenizers",
        "torch",
        "transformers",
    }


@pytest.mark.parametrize(
    ("room", "libraries"),
    [
        ("proto", {"torch", "ray", "transformers", "numpy"}),
        ("router", {"torch", "ray", "transformers"}),
        ("workers", {"ray"}),
    ],
)
def test_a_room_loads_only_what_it_may(room: str, libraries: set[str], tmp_path: Path) -> None:
    others = {f"tramontane.{other}" for other in MAY_IMPORT.keys() - MAY_IMPORT[room]}
    modules = list(_importable(room))
    loaded = _loaded_by(modules, tmp_path)
    assert set(modules) <= set(loaded)
    assert _forbidden(loaded, libraries | others) == []


def test_every_module_of_cluster_can_be_imported(tmp_path: Path) -> None:
    modules = list(_importable("cluster"))
    assert set(modules) <= set(_loaded_by(modules, tmp_path))


def test_the_api_server_is_loaded_without_ray(tmp_path: Path) -> None:
    modules = [
        name for name in _importable("cluster") if name.startswith("tramontane.cluster.http.")
    ]
    loaded = _loaded_by(modules, tmp_path)
    assert set(modules) <= set(loaded)
    assert _forbidden(loaded, {"ray"}) == []


def test_the_driver_starts_without_torch(tmp_path: Path) -> None:
    """A process that only drives stages must not pay for importing torch: neither we nor ray may
    load it.
    """
    loaded = _loaded_by(
        ["tramontane.cluster.cli.main", "tramontane.cluster.pipeline.engine"], tmp_path
    )
    assert "ray" in loaded
    assert _forbidden(loaded, {"torch", "transformers", "xformers"}) == []


@pytest.mark.nightly
def test_a_library_that_loads_torch_is_seen(tmp_path: Path) -> None:
    """A breach that no reading of our source can find, planted with an empty torch."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "nn.py").touch()
    (tmp_path / "some_library.py").write_text(
        "def _load() -> None:\n    import torch.nn\n\n_load()\n"
    )
    loaded = _loaded_by(["tramontane.proto.step", "some_library"], tmp_path)
    assert _forbidden(loaded, {"torch", "tramontane.router"}) == ["torch", "torch.nn"]


def _tracked() -> list[str]:
    git = ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT)]
    try:
        where = subprocess.run(
            [*git, "rev-parse", "--show-toplevel"], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        pytest.skip("git is not installed")
    if where.returncode or Path(where.stdout.strip()).resolve() != ROOT.resolve():
        pytest.skip("not a git checkout")
    return subprocess.run(
        [*git, "ls-files", "-z"], capture_output=True, text=True, check=True
    ).stdout.split("\0")[:-1]


def _not_allowed(paths: list[str]) -> list[str]:
    tops = {path.split("/")[0] for path in paths}
    return sorted(top for top in tops if top not in TOP_LEVEL and not top.startswith("."))


def test_the_top_level_holds_only_what_the_design_names() -> None:
    tracked = _tracked()
    assert {"pyproject.toml", "README.md"} <= set(tracked)
    assert _not_allowed(tracked) == []


@pytest.mark.nightly
def test_a_planted_top_level_entry_is_found() -> None:
    assert _not_allowed(["proto/step.py", "tramontane/__init__.py", ".ci/run", "setup.py"]) == [
        "setup.py",
        "tramontane",
    ]


def test_proto_is_no_regular_package() -> None:
    """A proto/__init__.py would shadow proto-plus wherever the checkout is on sys.path."""
    assert not (ROOT / "proto" / "__init__.py").exists()
