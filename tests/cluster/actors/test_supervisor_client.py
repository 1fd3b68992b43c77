"""Who is missed, and who is not, while the head node is away; and how often a call is repeated.
Without Ray.
"""

import asyncio
import queue
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError

from tramontane.cluster.actors import expert_actor, supervisor_client
from tramontane.cluster.actors import supervisor as applications
from tramontane.cluster.actors import supervisor as supervisor_module
from tramontane.cluster.actors.pipeline_spec import OwnerApplication
from tramontane.proto.errors import PipelineError

UNAVAILABLE = ActorUnavailableError("it restarts", None)


def test_supervisors_get_heartbeats_of_the_command_also_while_they_cannot_be_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    received: queue.SimpleQueue[str] = queue.SimpleQueue()
    received_first: set[str] = set()
    is_away, is_back = threading.Event(), threading.Event()

    def names() -> list[str]:
        if len(received_first) < 2:
            return ["one", "gone", "other"]
        is_away.set()
        is_back.wait()
        raise GetTimeoutError("the head node is away")

    def get_actor(name: str, _namespace: str) -> Any:
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


def test_what_was_silent_while_the_head_node_was_away_is_not_removed_for_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    for name, value in {
        "SUPERVISOR_WATCH_INTERVAL_S": 0.001,
        "ABANDONED_AFTER_S": 0.01,
        "UNCLAIMED_AFTER_S": 0.01,
    }.items():
        monkeypatch.setattr(supervisor_module, name, value)
    monkeypatch.setattr(supervisor_module, "may_be_claimed", lambda _application: True)
    monkeypatch.setattr(
        supervisor_module, "delete_application", lambda _application: reported.put("ended")
    )
    monkeypatch.setattr(supervisor_module, "is_head_alive", is_head_alive)
    monkeypatch.setattr(supervisor_module, "remove_pipeline", remove)
    spec: Any = SimpleNamespace(name="a", application=OwnerApplication("b", launched=True))
    supervisor_module.Supervisor(spec)
    for expected in ("away", "away", "there", "ended", "removed"):
        assert reported.get() == expected


@pytest.mark.parametrize("accepted", [-1, 7, 1_790_000_000_000])
@pytest.mark.parametrize("clock_ns", [5 * 10**6, 1_780_000_000 * 10**9])
def test_a_supervisor_that_restarts_with_a_clock_that_is_behind_fences_with_a_larger_epoch(
    monkeypatch: pytest.MonkeyPatch, clock_ns: int, accepted: int
) -> None:
    """No stage answered when it began. Stages refuse an epoch that is not larger than theirs."""
    fenced: list[int] = []
    never = SimpleNamespace(
        monotonic=time.monotonic, time_ns=lambda: clock_ns, sleep=lambda _: threading.Event().wait()
    )
    for name, value in {
        "time": never,
        "recover_lease": lambda _spec: None,
        "must_yield": lambda *_: False,
        "find_stage_actors": lambda _spec: ["stage"],
        "newest_epoch": lambda _stages: accepted,
        "fence_stages": lambda _stages, epoch, _holder, _link: fenced.append(epoch),
    }.items():
        monkeypatch.setattr(supervisor_module, name, value)
    spec: Any = SimpleNamespace(
        name="a", application=None, link="direct", plan=SimpleNamespace(stages=["stage"])
    )
    supervisor = supervisor_module.Supervisor(spec)
    assert [supervisor.fence("router")[0], supervisor.fence("router")[0]] == fenced
    assert accepted < fenced[0] < fenced[1]


@pytest.mark.parametrize(("seconds", "is_there"), [(0.0, True), (60.0, False)])
def test_a_head_node_that_let_us_wait_was_away(
    monkeypatch: pytest.MonkeyPatch, seconds: float, *, is_there: bool
) -> None:
    times = iter([100.0, 100.0 + seconds])
    monkeypatch.setattr(applications, "time", SimpleNamespace(monotonic=lambda: next(times)))
    monkeypatch.setattr(ray.util, "list_named_actors", lambda: [])
    assert applications.is_head_alive() is is_there


def test_a_head_node_that_does_not_answer_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def away() -> None:
        raise GetTimeoutError("the head node is away")

    monkeypatch.setattr(ray.util, "list_named_actors", away)
    assert not applications.is_head_alive()


@pytest.mark.parametrize(("num_failures", "succeeds"), [(0, True), (2, True), (31, False)])
def test_a_supervisor_that_restarts_is_called_again_for_some_time(
    num_failures: int, monkeypatch: pytest.MonkeyPatch, *, succeeds: bool
) -> None:
    """Each attempt takes a second here."""
    now, num_left = 0.0, num_failures
    delays: list[float] = []

    async def call() -> str:
        nonlocal now, num_left
        now += 1.0
        if num_left:
            num_left -= 1
            raise UNAVAILABLE
        return "done"

    async def sleep(seconds: float) -> None:
        delays.append(seconds)

    monkeypatch.setattr(supervisor_client, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(
        supervisor_client, "backoff_delays", lambda first_s, max_s: iter([first_s] + [max_s] * 40)
    )
    with monkeypatch.context() as patched:
        patched.setattr(supervisor_client.asyncio, "sleep", sleep)
        if succeeds:
            assert asyncio.run(supervisor_client.call_with_retry(call)) == "done"
        else:
            with pytest.raises(ActorUnavailableError):
                asyncio.run(supervisor_client.call_with_retry(call))
    assert delays == [0.2, *[2.0] * 40][: num_failures if succeeds else 29], (
        "it gives up at the 30th second"
    )


@pytest.mark.parametrize(("num_failures", "succeeds"), [(0, True), (2, True), (3, False)])
def test_an_expert_actor_that_restarts_is_called_again_a_number_of_times(
    num_failures: int, monkeypatch: pytest.MonkeyPatch, *, succeeds: bool
) -> None:
    calls: list[tuple[object, ...]] = []
    delays: list[float] = []

    def get(call: tuple[object, ...]) -> None:
        calls.append(call)
        if len(calls) <= num_failures:
            raise UNAVAILABLE

    actor = SimpleNamespace(load_experts=SimpleNamespace(remote=lambda *arguments: arguments))
    monkeypatch.setattr(expert_actor, "MAX_ATTEMPTS", 3)
    monkeypatch.setattr(expert_actor, "time", SimpleNamespace(sleep=delays.append))
    monkeypatch.setattr(ray, "get_actor", lambda _name, _namespace: actor)
    monkeypatch.setattr(ray, "get", get)
    if succeeds:
        expert_actor._call_with_retry("experts-0", "load_experts", 7)
    else:
        with pytest.raises(
            PipelineError, match="experts-0 was unavailable 3 times in a row"
        ) as raised:
            expert_actor._call_with_retry("experts-0", "load_experts", 7)
        assert raised.value.__cause__ is UNAVAILABLE
    assert calls == [(7,)] * min(num_failures + 1, 3)
    assert delays == [0.2] * min(num_failures, 2)
