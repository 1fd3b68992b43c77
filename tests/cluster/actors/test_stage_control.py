"""How long a fence waits for stages, with fake answers of Ray."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError

from tramontane.cluster.actors import stage_control
from tramontane.cluster.actors.stage_control import fence_stages, newest_epoch


class _Ref:
    def __init__(self, stage: "_Stage", what: str) -> None:
        self.stage, self.what = stage, what

    @property
    def is_there(self) -> bool:
        return self.stage.answers(self.what)


class _Method:
    def __init__(self, stage: "_Stage", name: str) -> None:
        self._stage, self._name = stage, name

    def options(self, **_: object) -> "_Method":
        return self

    def remote(self, *_: object) -> _Ref:
        self._stage.requested.append(self._name)
        return _Ref(self._stage, self._name)


class _Stage:
    """Fenced once it has been looked at so often; ``stops``: it answers nothing once its fence was
    requested.
    """

    def __init__(self, looks: int = 0, *, stops: bool = False) -> None:
        self.requested: list[str] = []
        self._looks, self._stops = looks, stops
        self.interrupt, self.fence, self.health = (
            _Method(self, name) for name in ("interrupt", "fence", "health")
        )

    def answers(self, what: str) -> bool:
        if self._stops and "fence" in self.requested:
            return False
        return what != "fence" or self.requested.count("health") >= self._looks


class _Ray:
    @staticmethod
    def wait(refs: list[_Ref], num_returns: int, timeout: float) -> tuple[list[_Ref], list[_Ref]]:
        return [ref for ref in refs if ref.is_there], [ref for ref in refs if not ref.is_there]

    @staticmethod
    def get(refs: list[_Ref], timeout: float) -> None:
        if not all(ref.is_there for ref in refs):
            raise GetTimeoutError


def _fence(monkeypatch: pytest.MonkeyPatch, *stages: Any) -> None:
    monkeypatch.setattr(stage_control, "ray", _Ray)
    fence_stages(list(stages), 7, "router", "object-store")


def test_the_newest_epoch_is_that_of_any_stage_and_a_silent_one_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    epochs, timeouts = [7, -1, 1_790_000_000_000], []

    def get(refs: list[_Ref], timeout: float) -> list[SimpleNamespace]:
        timeouts.append(timeout)
        _Ray.get(refs, timeout)
        return [SimpleNamespace(epoch=epoch) for epoch in epochs]

    monkeypatch.setattr(stage_control, "ray", SimpleNamespace(get=get))
    stages: list[Any] = [_Stage() for _ in epochs]
    assert newest_epoch(stages) == 1_790_000_000_000
    assert timeouts == [stage_control.INTERRUPT_TIMEOUT_S]
    stages[1].requested.append("fence")
    stages[1]._stops = True
    with pytest.raises(GetTimeoutError):
        newest_epoch(stages)


def test_stages_that_are_fenced_at_once_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = _Stage(), _Stage()
    _fence(monkeypatch, *stages)
    assert [stage.requested for stage in stages] == [["interrupt", "fence"]] * 2


def test_one_that_is_loading_is_waited_for_as_long_as_it_says_how_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loading = _Stage(looks=5)
    _fence(monkeypatch, _Stage(), loading)
    assert loading.requested.count("health") == 5


def test_one_that_stops_after_it_was_interrupted_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stopped = _Stage(stops=True)
    with pytest.raises(GetTimeoutError):
        _fence(monkeypatch, _Stage(), stopped)
    assert stopped.requested.count("health") == 1


def test_a_stage_that_is_never_fenced_is_not_waited_for_forever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stage_control, "FENCE_TIMEOUT_S", 0.0)
    with pytest.raises(GetTimeoutError):
        _fence(monkeypatch, _Stage(looks=10**9))
