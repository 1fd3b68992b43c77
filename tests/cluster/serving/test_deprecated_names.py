"""Dotted names of version 0.1.0 in users' configurations: they lead to the new objects, with a warning."""

import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tramontane.cluster.observability.tracing import tracing_config
from tramontane.cluster.ray_internals.accessors import import_attribute
from tramontane.cluster.serving.app import DEPRECATED_GRPC_FUNCTIONS, GRPC_FUNCTIONS
from tramontane.cluster.serving.autoscaling import POLICY

ROOT = Path(__file__).parents[3]
NAMES = {
    "tramontane.cluster.serve_app:build": "tramontane.cluster.serving.app:build",
    "tramontane.cluster.demo_app:app": "tramontane.cluster.serving.demo_app:app",
    "tramontane.cluster.serve_headers:proxy_middlewares": "tramontane.cluster.serve_patches.proxy:proxy_middlewares",
    "tramontane.cluster.autoscaling:WantedPipelines": POLICY,
    "tramontane.cluster.tracing:otlp": "tramontane.cluster.observability.tracing:otlp",
    **DEPRECATED_GRPC_FUNCTIONS,
}


def _import_anew(path: str) -> Any:  # noqa: ANN401 - whatever the path names
    """Import as Ray Serve does, in a process that has not imported the alias before."""
    sys.modules.pop(path.replace(":", ".").rpartition(".")[0], None)
    return import_attribute(path)


@pytest.mark.parametrize(("old", "new"), NAMES.items())
def test_an_old_name_leads_to_the_new_object(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=r"is removed in 0\.3\.0; use tramontane\."):
        found = _import_anew(old)
    assert found is import_attribute(new)


def test_old_names_of_grpc_functions_count_as_the_new_ones() -> None:
    assert set(DEPRECATED_GRPC_FUNCTIONS) == {
        f"tramontane.router.grpc_handlers.{name}" for name in ("add_inference", "add_batch_jobs")
    }
    assert set(DEPRECATED_GRPC_FUNCTIONS.values()) == set(GRPC_FUNCTIONS)


def test_an_old_exporter_is_accepted() -> None:
    with pytest.warns(DeprecationWarning, match="is removed in 0"):
        _import_anew("tramontane.cluster.tracing:otlp")
    assert (tracing_config("tramontane.cluster.tracing:otlp", 1.0) or {})["enabled"] is True


def test_an_old_policy_takes_the_same_arguments() -> None:
    arguments = {"target_load": 0.5, "target_tokens": 100}
    with pytest.warns(DeprecationWarning, match="is removed in 0"):
        old = _import_anew("tramontane.cluster.autoscaling:WantedPipelines")(**arguments)
    assert vars(old) == vars(import_attribute(POLICY)(**arguments))


def test_old_names_do_not_exist_from_the_version_that_removes_them() -> None:
    """Fails once the version is 0.3.0: then the aliases, and this file, are to be removed."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert tuple(map(int, version.split("."))) < (0, 3, 0)
    for old in NAMES:
        module = old.replace(":", ".").rpartition(".")[0].removeprefix("tramontane.")
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file()
