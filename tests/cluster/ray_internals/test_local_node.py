"""Ports of a local cluster's agents, which of its daemons it cannot do without, and what Ray knows
of an actor's end.
"""

import random
import socket
from types import SimpleNamespace

import pytest
from ray.core.generated import gcs_pb2

from tramontane.cluster.ray_internals import local_node, table
from tramontane.cluster.ray_internals.accessors import end_of_last_process
from tramontane.cluster.ray_internals.local_node import find_dead_daemon


def _choose_ports() -> list[int]:
    params = SimpleNamespace()
    local_node._choose_agent_ports(params)
    return list(vars(params).values())


def test_programs_with_one_seed_get_other_ports() -> None:
    """The agent that finds its port taken ends, and its raylet with it."""
    chosen = []
    for _ in range(2):
        random.seed(0)
        chosen.append(_choose_ports())
    assert chosen[0] != chosen[1]
    assert all(len(set(ports)) == 4 for ports in chosen)


def test_a_port_is_free_at_all_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents listen at all of them, or at one that is not 127.0.0.1."""
    with socket.create_server(("127.0.0.2", 0)) as taken:
        number = taken.getsockname()[1]
        free = []
        for _ in range(8):  # more than are needed: another process may take some
            with socket.create_server(("", 0)) as other:
                free.append(other.getsockname()[1])
        monkeypatch.setattr(local_node, "AGENT_PORTS", [number, *dict.fromkeys(free)])
        for _ in range(8):
            assert number not in _choose_ports()


def _node(**statuses: int) -> SimpleNamespace:
    dead = [(kind, SimpleNamespace(pid=7, returncode=each)) for kind, each in statuses.items()]
    return SimpleNamespace(dead_processes=lambda: dead)


@pytest.mark.parametrize(
    ("dead", "said"),
    [
        ({}, ""),
        ({"log_monitor": 1, "dashboard": -9}, ""),
        ({"raylet": 1}, "raylet (process 7, status 1)"),
        ({"monitor": 0, "gcs_server": -9}, "gcs_server (process 7, signal 9)"),
    ],
)
def test_a_cluster_ends_with_its_raylet_and_its_control_store(
    dead: dict[str, int], said: str
) -> None:
    with table.LOCAL_NODE.replaced(_node(**dead)):
        assert find_dead_daemon() == said
    with table.LOCAL_NODE.replaced(None):
        assert find_dead_daemon() == "", "this process has started none"


def test_the_end_of_an_actors_last_process_is_that_of_the_newest() -> None:
    ends = {b"a": "killed at first", b"b": "killed at last\nby a signal"}
    row = gcs_pb2.ActorTableData()
    for worker in ends:
        row.previous_incarnations.add(worker_id=worker.ljust(28, b"\0"))
    state = SimpleNamespace(
        get_actor_info=lambda _: row.SerializeToString(),
        get_worker_info=lambda worker: gcs_pb2.WorkerTableData(
            exit_detail=ends[worker.binary().rstrip(b"\0")]
        ).SerializeToString(),
    )
    known = SimpleNamespace(_connect_and_get_accessor=lambda: state)
    with table.GLOBAL_STATE.replaced(known):
        assert end_of_last_process("00" * 16) == "killed at last"
