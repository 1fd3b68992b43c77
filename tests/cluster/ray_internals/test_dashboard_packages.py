"""Ray without the packages of ``ray[default]``, such as one that was copied to a machine without a
network.
"""

import sys

import pytest

from tramontane.cluster.ray_internals import table
from tramontane.cluster.ray_internals.local_node import OF_RAY_DEFAULT, assume_dashboard_packages


def _found_by_ray(monkeypatch: pytest.MonkeyPatch) -> ImportError | None:
    """Return what Ray says if it looks again; how long it takes depends on what is imported
    already.
    """
    monkeypatch.delitem(sys.modules, "ray.dashboard.optional_deps", raising=False)
    with assume_dashboard_packages():
        error: ImportError | None = table.DASHBOARD_PACKAGES.value()
    return error


@pytest.mark.parametrize("package", OF_RAY_DEFAULT)
def test_ray_knows_of_a_missing_package(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert package in str(_found_by_ray(monkeypatch))


def test_ray_does_not_import_packages_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _found_by_ray(monkeypatch) is None
    assert "ray.dashboard.optional_deps" not in sys.modules


def test_an_outer_package_may_be_missing_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    assert "opentelemetry" in str(_found_by_ray(monkeypatch))
