"""Who is missed, and who is not, while the head node is away. Without Ray."""

import queue
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError

from tramontane.cluster.actors import supervisor as applications
from tramontane.cluster.actors import supervisor as supervisor_module
from tramontane.cluster.actors import supervisor_client
from tramontane.cluster.actors.pipeline_spec import OwnerApplication


def test_supervisors_get_heartbeats_of_the_command_also_while_they_cannot_be_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    received: queue.SimpleQueue[str] = queue.SimpleQueue()
    received_first: set[str] = set()
    is_away, is_back = threading.Event(), threading.Event()

    def names() -> list[str]:
        if len(received_first) < 2:
            return ["one", "gone", "other"]
        is_away.set()
        is_back.wait()
        raise GetTimeoutError("the head node is away")

    def get_actor(name: str, _namespace: str) -> Any:  # noqa: ANN401
        if name == "gone":
            raise ValueError(name)

        def receive() -> None:
            received_first.add(name)
            received.put(name)

        keep = SimpleNamespace(remote=receive)
        return SimpleNamespace(heartbeat=SimpleNamespace(options=lambda concurrency_group: keep))

    monkeypatch.setattr(ray, "get_actor", get_actor)
    monkeypatch.setattr(supervisor_client, "RENEW_INTERVAL_S", 0.001)
    with supervisor_client.send_heartbeats(names):
        is_away.wait()
        for _ in range(received.qsize()):
            received.get()
        assert {received.get() for _ in range(4)} == {"one", "other"}
        is_back.set()


def test_what_was_silent_while_the_head_node_was_away_is_not_removed_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: queue.SimpleQueue[str] = queue.SimpleQueue()
    answers = [True, False, False]

    def is_head_alive() -> bool:
        answer = answers.pop() if answers else True
        reported.put("there" if answer else "away")
        return answer

    def remove(_name: str) -> None:
        reported.put("removed")
        threading.Event().wait()  # the thread that watches has nothing more to do

    monkeypatch.setattr(supervisor_module, "recover_lease", lambda _spec: None)
    for name, value in {"WATCH_INTERVAL_S": 0.001, "ABANDONED_AFTER_S": 0.01, "UNCLAIMED_AFTER_S": 0.01}.items():
        monkeypatch.setattr(supervisor_module, name, value)
    monkeypatch.setattr(supervisor_module, "may_be_claimed", lambda _application: True)
    monkeypatch.setattr(supervisor_module, "delete_application", lambda _application: reported.put("ended"))
    monkeypatch.setattr(supervisor_module, "is_head_alive", is_head_alive)
    monkeypatch.setattr(supervisor_module, "remove_pipeline", remove)
    spec: Any = SimpleNamespace(name="a", application=OwnerApplication("b", launched=True))
    supervisor_module.Supervisor(spec)
    for expected in ("away", "away", "there", "ended", "removed"):
        assert reported.get() == expected


@pytest.mark.parametrize(("seconds", "is_there"), [(0.0, True), (60.0, False)])
def test_a_head_node_that_let_us_wait_was_away(monkeypatch: pytest.MonkeyPatch, seconds: float, *, is_there: bool) -> None:
    times = iter([100.0, 100.0 + seconds])
    monkeypatch.setattr(applications, "time", SimpleNamespace(monotonic=lambda: next(times)))
    monkeypatch.setattr(ray.util, "list_named_actors", lambda: [])
    assert applications.is_head_alive() is is_there


def test_a_head_node_that_does_not_answer_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def away() -> None:
        raise GetTimeoutError("the head node is away")

    monkeypatch.setattr(ray.util, "list_named_actors", away)
    assert not applications.is_head_alive()
