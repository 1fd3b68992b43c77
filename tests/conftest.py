"""No test starts a Ray cluster by accident: the ones that need it ask for a fixture."""

import os
from typing import Any

os.environ["RAY_AUTH_MODE"] = "disabled"  # before ray is imported: it reads this once

import pytest
import ray
import reference
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_stray_ray(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside tests marked ``ray``, ray.init raises."""
    if request.node.get_closest_marker("ray") is None:

        def refuse(*_args: object, **_kwargs: object) -> None:
            raise AssertionError("this test is not marked with @pytest.mark.ray and must not start a cluster")

        monkeypatch.setattr(ray, "init", refuse)


@pytest.hookimpl(tryfirst=True)  # before xdist looks for groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where several processes share the tests, one at a time has a Ray cluster: clusters share what they keep in /tmp."""
    for item in items:
        if item.get_closest_marker("ray") is not None:
            item.add_marker(pytest.mark.xdist_group("ray"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """One of several processes hands its list to the one that started them."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["close_calls"] = reference.close_calls


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:  # noqa: ANN401 - xdist's, which need not be there
    reference.close_calls += getattr(node, "workeroutput", {}).get("close_calls", [])  # none, if it crashed


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Rounding may decide between two nearly equal logits; such cases are listed, not hidden."""
    terminalreporter.write_line(f"close calls between the two best logits: {len(reference.close_calls)}")
    for call in reference.close_calls:
        terminalreporter.write_line(f"  {call}")
