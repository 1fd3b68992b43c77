"""Which of an expert's replicas is called, with connections that the test takes down and brings
up.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import pytest
import torch
from local_expert_actors import expert_plan
from tiny_models import groups_of, tiny_args

from tramontane.proto.errors import PipelineError
from tramontane.workers.experts import remote_experts
from tramontane.workers.experts.expert_worker import ExpertCall, ExpertReply
from tramontane.workers.experts.remote_experts import RemoteExperts

ARGS = tiny_args(n_layers=2)  # of 4 experts in each layer


@dataclass
class Connection:
    """A connection to an actor that answers at once with the rows that it was given."""

    notify: Callable[[], None]
    is_up: bool = True
    failure: PipelineError | None = None

    def call(self, call: ExpertCall, rows_CD: torch.Tensor) -> "Future[ExpertReply]":
        assert call.num_rows == len(rows_CD)
        future: Future[ExpertReply] = Future()
        future.set_result(ExpertReply(rows_CD, 0.5))
        return future

    def close(self) -> None:
        """It has nothing to close."""

    def set_up(self, is_up: bool) -> None:
        self.is_up = is_up
        self.notify()


def _replicated() -> tuple[RemoteExperts, list[Connection]]:
    """Return experts of which both actors hold all, and their connections."""
    connections: list[Connection] = []

    def connect(actor_id: int, notify: Callable[[], None]) -> Connection:
        assert actor_id == len(connections)
        connections.append(Connection(notify))
        return connections[-1]

    return RemoteExperts(expert_plan(ARGS, 2, 2), connect), connections


def test_rows_are_balanced_and_not_groups() -> None:
    """5 rows go to the first actor; 3, 1 and 1 to the second, which then has as many."""
    experts, _ = _replicated()
    assert experts.select_replicas(0, {0: 5, 1: 3, 2: 1, 3: 1}) == ({0: (0,), 1: (1, 2, 3)}, ())


def test_the_example_of_the_documentation() -> None:
    experts, _ = _replicated()
    assert experts.select_replicas(0, {0: 5, 1: 4, 2: 3}) == ({0: (0,), 1: (1, 2)}, ())


def test_among_idle_actors_the_one_that_was_sent_fewer_rows_is_called() -> None:
    experts, _ = _replicated()
    assert [list(experts.select_replicas(0, {0: size})[0]) for size in (3, 1, 1, 1, 1)] == [
        [0],
        [1],
        [1],
        [1],
        [0],
    ]


def test_the_rows_of_one_call_are_balanced_whatever_was_sent_before() -> None:
    """The second actor is behind by 100 rows, and does not get both groups."""
    experts, _ = _replicated()
    experts.select_replicas(0, {0: 100})
    assert experts.select_replicas(0, {0: 5, 1: 4}) == ({1: (0,), 0: (1,)}, ())


def test_an_actor_that_is_up_again_does_not_get_all_until_it_has_caught_up() -> None:
    """While it was down the other was sent 100 rows. From then on they take turns."""
    experts, connections = _replicated()
    connections[1].set_up(False)
    assert experts.select_replicas(0, {0: 100}) == ({0: (0,)}, ())
    connections[1].set_up(True)
    assert [list(experts.select_replicas(0, {0: 1})[0]) for _ in range(4)] == [[0], [1], [0], [1]]


def test_a_plan_that_has_not_changed_is_not_read_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An expert has moved, and the plan that says where to is not recorded yet."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    plan = expert_plan(ARGS, 2)
    plans = [plan, plan.with_assignment([actor.experts for actor in reversed(plan.actors)])]
    experts = RemoteExperts(plan, lambda _, notify: Connection(notify), lambda: plans.pop(0))
    assert experts.holders(0, 0) == (0,)
    experts.refresh_plan()
    assert (experts.holders(0, 0), slept) == ((0,), [remote_experts.MOVE_RETRY_S])
    experts.refresh_plan()
    assert (experts.holders(0, 0), slept) == ((1,), [remote_experts.MOVE_RETRY_S])


def test_the_time_of_a_call_is_that_until_its_last_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 100.25, 100.75])  # the call, and the replies of two actors
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    experts, _ = _replicated()
    pending = experts.dispatch(1, torch.zeros(3, ARGS.dim), groups_of([2, 0, 0, 1]))
    assert pending.poll()
    assert pending.usage.wait_s == 0.75
    assert [(actor, busy_s) for actor, busy_s, _ in pending.usage.actors] == [(0, 0.5), (1, 0.5)]


def test_an_expert_waits_if_no_actor_that_holds_it_is_up() -> None:
    experts, connections = _replicated()
    for connection in connections:
        connection.set_up(False)
    assert experts.select_replicas(0, {0: 2, 3: 1}) == ({}, (0, 3))
    pending = experts.dispatch(
        1, torch.arange(3.0)[:, None].expand(3, ARGS.dim), groups_of([2, 0, 0, 1])
    )
    assert not pending.is_ready
    assert not pending.poll()
    connections[1].set_up(True)
    assert pending.is_ready
    while not pending.poll():
        assert pending.is_ready
    assert torch.equal(pending.result()[:, 0], torch.arange(3.0))
    assert [(actor, num_rows) for actor, _, num_rows in pending.usage.actors] == [(1, 3)]


def test_a_call_fails_if_all_actors_that_hold_an_expert_are_lost_for_good() -> None:
    experts, connections = _replicated()
    for connection in connections:
        connection.set_up(False)
    pending = experts.dispatch(1, torch.zeros(2, ARGS.dim), groups_of([2, 0, 0, 0]))
    connections[0].failure = PipelineError("the disk is gone")
    assert not pending.is_ready, "the other one may come back"
    experts.check()
    connections[1].failure = PipelineError("no memory")
    assert pending.is_ready
    for call in (pending.poll, experts.check):
        with pytest.raises(PipelineError, match="the disk is gone"):
            call()
