"""Which actors count as stuck, by what Ray reports of them and of their placement group."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RpcError

from tramontane.cluster.actors import hang_detector
from tramontane.cluster.actors.hang_detector import PendingActorTracker
from tramontane.proto.timing import (
    ACTOR_RESTART_TIMEOUT_S,
    ACTOR_START_TIMEOUT_S,
    MAX_ACTOR_START_TIMEOUT_S,
)


class _Cluster:
    """The actors of a group, as the head node knows them, and a clock."""

    def __init__(self) -> None:
        self.now, self.group = 0.0, "CREATED"
        self.actors = {"stage-1": ("PENDING_CREATION", 0)}
        self.tracker = PendingActorTracker(lambda: self.now)

    def stuck(self, after_s: float = 0.0) -> list[str]:
        self.now += after_s
        handles: Any = {name: name for name in self.actors}
        return self.tracker.find_stuck("group", handles)

    def state(self, name: str) -> dict[str, Any]:
        state, num_restarts = self.actors[name]
        return {"State": state, "NumRestarts": num_restarts}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> _Cluster:
    cluster = _Cluster()
    monkeypatch.setattr(hang_detector, "actor_state", cluster.state)
    monkeypatch.setattr(hang_detector, "get_placement_group", lambda name: SimpleNamespace())
    monkeypatch.setattr(
        hang_detector, "placement_group_table", lambda group: {"state": cluster.group}
    )
    return cluster


@pytest.mark.parametrize("state", ["DEPENDENCIES_UNREADY", "PENDING_CREATION"])
def test_an_actor_that_never_gets_a_process_is_stuck(cluster: _Cluster, state: str) -> None:
    cluster.actors = {"stage-1": (state, 0)}
    assert not cluster.stuck()
    assert not cluster.stuck(ACTOR_START_TIMEOUT_S)
    assert cluster.stuck(0.1) == ["stage-1"]


def test_healthy_actors_keep_their_weights_for_longer(cluster: _Cluster) -> None:
    """A process that is only slow to start on a busy node must not cost the weights of others."""
    cluster.actors = {"stage-0": ("ALIVE", 0), "stage-1": ("RESTARTING", 1)}
    assert not cluster.stuck()
    assert not cluster.stuck(ACTOR_RESTART_TIMEOUT_S)
    assert cluster.stuck(0.1) == ["stage-1"]


def test_the_limit_doubles_each_time(cluster: _Cluster) -> None:
    limit_s = ACTOR_START_TIMEOUT_S
    for _ in range(8):
        assert not cluster.stuck()
        assert not cluster.stuck(limit_s)
        assert cluster.stuck(0.1) == ["stage-1"]
        limit_s = min(2 * limit_s, MAX_ACTOR_START_TIMEOUT_S)
    assert limit_s == MAX_ACTOR_START_TIMEOUT_S


def test_time_without_resources_does_not_count(cluster: _Cluster) -> None:
    cluster.group = "RESCHEDULING"  # its node has died, and there is no other
    assert not cluster.stuck()
    assert not cluster.stuck(ACTOR_START_TIMEOUT_S + 1)
    cluster.group = "CREATED"
    assert not cluster.stuck()
    assert not cluster.stuck(ACTOR_START_TIMEOUT_S)
    assert cluster.stuck(0.1) == ["stage-1"]


@pytest.mark.parametrize("error", [RpcError("no head node"), ValueError("no such group")])
def test_time_without_the_head_node_does_not_count(
    cluster: _Cluster, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_name: str) -> None:
        raise error

    assert not cluster.stuck()
    with monkeypatch.context() as patched:
        patched.setattr(hang_detector, "get_placement_group", fail)
        assert not cluster.stuck(ACTOR_START_TIMEOUT_S + 1)
    assert not cluster.stuck()
    assert cluster.stuck(ACTOR_START_TIMEOUT_S + 1) == ["stage-1"]


def test_an_actor_whose_process_dies_again_and_again_is_not_stuck(cluster: _Cluster) -> None:
    """Its successor reads from the key-value store how often it has died, by the actor's id."""
    for num_restarts in range(4):
        cluster.actors["stage-1"] = ("RESTARTING", num_restarts)
        assert not cluster.stuck(ACTOR_START_TIMEOUT_S)
    assert cluster.stuck(ACTOR_START_TIMEOUT_S + 1) == ["stage-1"]
