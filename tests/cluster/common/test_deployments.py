"""The order of deployments, whatever the clocks of the machines say."""

from types import SimpleNamespace

import pytest

from tramontane.cluster.common import deployments
from tramontane.cluster.common.deployments import (
    clear_drained,
    is_drained,
    is_superseded,
    mark_drained,
    newest_deployment,
    number_deployment,
)

APP = "app"


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The times that the next replicas to start read, in ns; the last one stays. The store is a dict."""
    times, store = [100], dict[str, bytes]()

    def put(key: str, value: bytes, *, overwrite: bool = True) -> None:
        if overwrite or key not in store:
            store[key] = value

    monkeypatch.setattr(deployments, "kv_put", put)
    monkeypatch.setattr(deployments, "kv_get", store.get)
    monkeypatch.setattr(deployments, "kv_delete", lambda key: store.pop(key, None))
    time_ns = lambda: times.pop(0) if len(times) > 1 else times[0]  # noqa: E731
    monkeypatch.setattr(deployments, "time", SimpleNamespace(time_ns=time_ns))
    return times


def test_a_deployment_from_a_machine_whose_clock_is_behind_is_the_newest(clocks: list[int]) -> None:
    clocks[:] = [100, 7]
    first, second = number_deployment(APP, "first"), number_deployment(APP, "second")
    assert second > first
    assert is_superseded(APP, first)
    assert not is_superseded(APP, second)
    assert newest_deployment(APP) == second


def test_all_replicas_of_a_build_have_its_number_also_those_that_start_after_the_next_one(clocks: list[int]) -> None:
    clocks[:] = [100, 200, 300, 50]
    first, second = number_deployment(APP, "first"), number_deployment(APP, "second")
    assert (number_deployment(APP, "first"), number_deployment(APP, "second")) == (first, second) == (100, 200)
    assert newest_deployment(APP) == second, "a late replica of the first does not make it the newest"


def test_a_build_after_a_drained_one_is_not_drained(clocks: list[int]) -> None:
    clocks[:] = [100, 7]
    first = number_deployment(APP, "first")
    mark_drained(APP)
    assert is_drained(APP, first)
    assert not is_drained(APP, number_deployment(APP, "second")), "its machine's clock is behind"
    clear_drained(APP)
    assert not is_drained(APP, first)
