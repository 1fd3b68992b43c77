"""Which workers count as hung, by what Ray reports of each."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

from tramontane.cluster.actors import hang_detector
from tramontane.cluster.actors.hang_detector import LoadWatch, replace_hung_workers
from tramontane.proto.timing import LOAD_STALL_TIMEOUT_S

WELL = SimpleNamespace(busy_for_s=0.0, bytes_loaded=8, weight_bytes=8)
LOADS = SimpleNamespace(
    label="stage 1", busy_for_s=0.0, bytes_read=0, bytes_loaded=4, weight_bytes=8, activity=""
)
LOST = "a micro-batch was lost"
UNAVAILABLE, DIED = ActorUnavailableError("connection attempt timed out", None), ActorDiedError()


class _Worker:
    """As an actor's handle; ``answer``: None where none comes, or what is returned or raised at
    once.
    """

    def __init__(self, answer: Any, is_stopped: bool = False) -> None:
        self.answer, self.is_stopped = answer, is_stopped
        self.health = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: self))


@pytest.fixture(autouse=True)
def ended(monkeypatch: pytest.MonkeyPatch) -> list[_Worker]:
    """Whose processes were."""
    ended: list[_Worker] = []

    def end(worker: _Worker, min_age_s: float) -> bool:
        if worker.is_stopped or min_age_s == 0:
            ended.append(worker)
        return worker in ended

    def get(worker: _Worker) -> Any:
        if isinstance(worker.answer, RayError):
            raise worker.answer
        return worker.answer

    def wait(workers: list[_Worker], **_: Any) -> tuple[list[_Worker], list[_Worker]]:
        return [w for w in workers if w.answer is not None], []

    monkeypatch.setattr(hang_detector, "ray", SimpleNamespace(wait=wait, get=get))
    monkeypatch.setattr(hang_detector, "kill_worker_process", end)
    return ended


@pytest.mark.parametrize("answer", [None, UNAVAILABLE])
def test_one_that_is_stopped_is_replaced_whatever_ray_says_of_it(
    answer: Any, ended: list[_Worker]
) -> None:
    workers: Any = {"stage-0": _Worker(WELL), "stage-1": _Worker(answer, is_stopped=True)}
    assert (
        replace_hung_workers(workers, 2.0) == "stage-1 got a new process: its process was stopped"
    )
    assert ended == [workers["stage-1"]]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [(LOADS, ""), (UNAVAILABLE, ""), (None, ""), (DIED, LOST), (WELL, LOST)],
)
def test_a_worker_that_loads_or_restarts_is_waited_for(
    answer: Any, reason: str, ended: list[_Worker]
) -> None:
    workers: Any = {"stage-0": _Worker(WELL), "stage-1": _Worker(answer)}
    assert replace_hung_workers(workers, 2.0) == reason
    assert not ended


@pytest.mark.parametrize("answer", [None, UNAVAILABLE])
def test_one_that_is_stopped_while_it_is_waited_for_is_replaced(
    answer: Any, ended: list[_Worker]
) -> None:
    workers: Any = [_Worker(LOADS), _Worker(answer, is_stopped=True)]
    LoadWatch().kill_hung(workers)
    assert ended == workers[1:]


@pytest.mark.parametrize(
    "check",
    [
        lambda workers: replace_hung_workers(workers, 2.0),
        lambda w: LoadWatch().kill_hung(w.values()),
    ],
)
def test_all_late_workers_are_examined_at_once(
    check: Callable[[Any], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their nodes are lost: each takes as long as Ray waits for it, and the caller does not wait
    for fourteen times that.
    """
    workers: Any = {f"stage-{number}": _Worker(None, is_stopped=True) for number in range(14)}
    # seconds, if one is examined after the other
    together = threading.Barrier(len(workers), timeout=10)

    def kill(_worker: _Worker, _min_age_s: float) -> bool:
        together.wait()
        return False

    monkeypatch.setattr(hang_detector, "kill_worker_process", kill)
    check(workers)


class _Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def _loading(num_bytes: int, activity: str = "") -> SimpleNamespace:
    return SimpleNamespace(**vars(LOADS) | {"bytes_read": num_bytes, "activity": activity})


def test_one_that_loads_nothing_for_long_is_replaced_however_often_it_answers(
    ended: list[_Worker],
) -> None:
    clock, worker = _Clock(), _Worker(_loading(3))
    workers: Any = [worker]
    watch = LoadWatch(clock)
    for clock.now in (0.0, LOAD_STALL_TIMEOUT_S):
        watch.kill_hung(workers)
    worker.answer = _loading(4)  # a byte, at the last moment
    for clock.now in (LOAD_STALL_TIMEOUT_S + 1, 2 * LOAD_STALL_TIMEOUT_S + 1):
        watch.kill_hung(workers)
    assert not ended
    clock.now += 1
    watch.kill_hung(workers)
    assert ended == [worker]


def test_later_phases_of_loading_may_take_as_long_as_they_like(ended: list[_Worker]) -> None:
    clock, workers = _Clock(), [_Worker(_loading(3, "choosing kernels"))]
    watch: Any = LoadWatch(clock)
    for clock.now in (0.0, 10 * LOAD_STALL_TIMEOUT_S):
        watch.kill_hung(workers)
    assert not ended
