"""The order of deployments, whatever the clocks of the machines say."""

from types import SimpleNamespace

import pytest

from tramontane.cluster.common import ray_api
from tramontane.cluster.common.ray_api import (
    TTL_NS,
    DeploymentWatch,
    clear_drained,
    is_drained,
    mark_drained,
    newest_deployment,
    number_deployment,
)

APP = "app"
HOUR_NS = 3600 * 10**9
MONOTONIC_NS = {0: 5}  # of this process


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The times that the next replicas to start read, in ns; the last one stays. The store is a
    dict.
    """
    times, store = [100], dict[str, bytes]()

    def put(key: str, value: bytes, *, overwrite: bool = True) -> None:
        if overwrite or key not in store:
            store[key] = value

    monkeypatch.setattr(ray_api, "kv_put", put)
    monkeypatch.setattr(ray_api, "kv_get", store.get)
    monkeypatch.setattr(ray_api, "kv_delete", lambda key: store.pop(key, None))
    time_ns = lambda: times.pop(0) if len(times) > 1 else times[0]  # noqa: E731
    monkeypatch.setattr(
        ray_api, "time", SimpleNamespace(time_ns=time_ns, monotonic_ns=lambda: MONOTONIC_NS[0])
    )
    monkeypatch.setitem(MONOTONIC_NS, 0, 5)
    return times


def test_a_deployment_from_a_machine_whose_clock_is_behind_is_the_newest(clocks: list[int]) -> None:
    clocks[:] = [100, 7]
    first, second = number_deployment(APP, "first"), number_deployment(APP, "second")
    assert second > first
    assert DeploymentWatch(APP).is_superseded(first)
    assert not DeploymentWatch(APP).is_superseded(second)
    assert newest_deployment(APP) == second


def test_all_replicas_of_a_build_have_its_number_also_those_that_start_after_the_next_one(
    clocks: list[int],
) -> None:
    clocks[:] = [100, 200, 300, 50]
    first, second = number_deployment(APP, "first"), number_deployment(APP, "second")
    assert (
        (number_deployment(APP, "first"), number_deployment(APP, "second"))
        == (first, second)
        == (100, 200)
    )
    assert newest_deployment(APP) == second, (
        "a late replica of the first does not make it the newest"
    )


def test_a_build_after_a_drained_one_is_not_drained(clocks: list[int]) -> None:
    clocks[:] = [100, 7]
    first = number_deployment(APP, "first")
    mark_drained(APP)
    assert is_drained(APP, first)
    assert not is_drained(APP, number_deployment(APP, "second")), "its machine's clock is behind"
    clear_drained(APP)
    assert not is_drained(APP, first)


@pytest.mark.parametrize("ahead_ns", [0, HOUR_NS, -HOUR_NS])
def test_a_newer_deployment_counts_for_a_quarter_of_an_hour_whatever_its_clock_said(
    clocks: list[int], monkeypatch: pytest.MonkeyPatch, ahead_ns: int
) -> None:
    """Whose machine's clock is an hour behind, gets a number after the last one, and counts as old
    as that is.
    """
    now = 10 * HOUR_NS
    clocks[:] = [now, now + ahead_ns, now]
    first, _second = number_deployment(APP, "first"), number_deployment(APP, "second")
    watch = DeploymentWatch(APP)
    assert watch.is_superseded(first)
    monkeypatch.setitem(MONOTONIC_NS, 0, 5 + TTL_NS - 2)
    assert watch.is_superseded(first)
    monkeypatch.setitem(MONOTONIC_NS, 0, 5 + TTL_NS)
    assert not watch.is_superseded(first), "no router of it came"


@pytest.mark.parametrize("jump_ns", [HOUR_NS, -HOUR_NS])
def test_a_clock_that_is_set_after_a_deployment_was_seen_changes_nothing(
    clocks: list[int], monkeypatch: pytest.MonkeyPatch, jump_ns: int
) -> None:
    clocks[:] = [10 * HOUR_NS]
    first, _second = number_deployment(APP, "first"), number_deployment(APP, "second")
    watch = DeploymentWatch(APP)
    assert watch.is_superseded(first)
    clocks[:] = [10 * HOUR_NS + jump_ns]
    assert watch.is_superseded(first)
    monkeypatch.setitem(MONOTONIC_NS, 0, 5 + TTL_NS)
    assert not watch.is_superseded(first)


def test_a_process_that_begins_later_counts_what_has_passed(clocks: list[int]) -> None:
    clocks[:] = [10 * HOUR_NS]
    first, _second = number_deployment(APP, "first"), number_deployment(APP, "second")
    clocks[:] = [10 * HOUR_NS + TTL_NS + 1]
    assert not DeploymentWatch(APP).is_superseded(first)
