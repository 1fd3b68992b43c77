"""Which daemons of a local cluster it cannot do without, and what Ray knows of an actor's end."""

from types import SimpleNamespace

import pytest
from ray.core.generated import gcs_pb2

from tramontane.cluster.ray_internals import table
from tramontane.cluster.ray_internals.accessors import end_of_last_process
from tramontane.cluster.ray_internals.local_node import find_dead_daemon


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
