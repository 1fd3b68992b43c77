"""What a starting router waits for, as health checks read it."""

import asyncio
import logging
from typing import Any

import pytest

from tramontane.cluster.common import ray_api
from tramontane.cluster.common.ray_api import MAX_WAIT_AGE_S, MIN_WAIT_S, StartWait, read_wait

WAITS = "waiting for 1 of 2 stages: 1 CPU, offered by no node"


class _Store:
    """The key-value store, and the time."""

    def __init__(self) -> None:
        self.now, self.values = 1000.0, dict[str, bytes]()

    def put(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def time(self) -> float:
        return self.now


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> _Store:
    store = _Store()
    monkeypatch.setattr(ray_api, "kv_get", store.values.get)
    monkeypatch.setattr(ray_api, "kv_put", store.put)
    monkeypatch.setattr(ray_api, "kv_delete", store.values.pop)
    monkeypatch.setattr(ray_api, "time", store)
    return store


def _read(application: str = "app") -> str:
    return asyncio.run(read_wait(application))


def test_a_long_wait_is_known_and_logged_once(
    store: _Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, ray_api.__name__)
    wait = StartWait("app")
    store.now += MIN_WAIT_S - 1
    wait.report(WAITS)
    assert _read() == "", "most starts take a few seconds"
    for _ in range(3):
        store.now += 5
        wait.report(WAITS)
    assert _read() == f"{WAITS}, for 24 s"
    assert _read("another") == ""
    assert caplog.messages == [f"not ready after 14 s: {WAITS}"]
    wait.end()
    assert _read() == ""


def test_a_router_that_died_while_it_waited_is_forgotten(store: _Store) -> None:
    wait = StartWait("app")
    store.now += 60
    wait.report(WAITS)
    store.now += MAX_WAIT_AGE_S
    assert _read() == f"{WAITS}, for 60 s"
    store.now += 1
    assert _read() == ""


def test_without_a_head_node_nothing_is_known(
    store: _Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no head node")

    monkeypatch.setattr(ray_api, "kv_get", fail)
    monkeypatch.setattr(ray_api, "kv_delete", fail)
    monkeypatch.setattr(ray_api, "kv_put", fail)
    assert _read() == ""
    wait = StartWait("app")
    store.now += 60
    wait.report(WAITS)
    wait.end()
