"""What a chain makes of a supervisor's errors, which Ray gives the class of their cause as well as its own."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayTaskError

from tramontane.cluster.pipeline import stage_chain
from tramontane.cluster.pipeline.stage_chain import UNREACHABLE_TIMEOUT_S, ObjectStoreStageChain
from tramontane.proto.errors import LeaseError

EPOCH = 7


class _Method:
    """As a method of an actor's handle."""

    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        self.remote = call

    def options(self, **_: object) -> "_Method":
        return self


class _Supervisor:
    """Fences once ``replace_hung_workers`` has been requested, and raises ``error`` until then."""

    def __init__(self, error: Exception) -> None:
        self.calls: list[str] = []
        self._error = RayTaskError("fence", f"its traceback\n{error}", error).as_instanceof_cause()
        self.fence, self.replace_hung_workers = _Method(self._fence), _Method(self._replace_hung_workers)

    async def _fence(self, holder: str) -> int:
        self.calls.append(f"fence for {holder}")
        if "replace" in self.calls:
            return EPOCH
        raise self._error

    async def _replace_hung_workers(self, limit_s: float) -> str:
        self.calls.append("replace")
        return "stage 1 did nothing for too long"


def _chain(supervisor: _Supervisor) -> ObjectStoreStageChain:
    handle: Any = supervisor
    return ObjectStoreStageChain([], handle, "router")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_chain, "RETRY_S", 0.0)


def test_when_a_stage_does_not_answer_the_fence_it_is_replaced_and_not_the_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(*_: object, **__: object) -> None:
        raise AssertionError("the supervisor has answered")

    monkeypatch.setattr(stage_chain.ray, "kill", kill)
    supervisor = _Supervisor(GetTimeoutError("not within 5 s"))
    assert asyncio.run(_chain(supervisor).fence()) == EPOCH
    assert supervisor.calls == ["fence for router", "replace", "fence for router"]


def test_a_stage_that_cannot_be_reached_is_looked_at_before_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray says of one that is stopped what it says of one that restarts, to a supervisor that has not called it."""
    supervisor = _Supervisor(ActorUnavailableError("connection attempt timed out", None))
    times = iter([0.0, 1.0, UNREACHABLE_TIMEOUT_S, UNREACHABLE_TIMEOUT_S + 0.1])
    monkeypatch.setattr(stage_chain, "time", SimpleNamespace(monotonic=lambda: next(times)))
    assert asyncio.run(_chain(supervisor).fence()) == EPOCH
    assert supervisor.calls == ["fence for router"] * 3 + ["replace", "fence for router"]


def test_a_supervisor_that_does_not_answer_gets_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = _Supervisor(GetTimeoutError())
    killed = []

    async def silent(holder: str) -> int:
        await asyncio.Event().wait()
        raise AssertionError

    def kill(actor: object, *, no_restart: bool) -> None:
        killed.append((actor, no_restart))
        supervisor.calls.append("replace")
        supervisor.fence.remote = supervisor._fence

    supervisor.fence.remote = silent
    monkeypatch.setattr(stage_chain, "SUPERVISOR_TIMEOUT_S", 0.01)
    monkeypatch.setattr(stage_chain.ray, "kill", kill)
    assert asyncio.run(_chain(supervisor).fence()) == EPOCH
    assert killed == [(supervisor, False)]


def test_a_lease_that_another_router_holds_ends_the_fence() -> None:
    supervisor = _Supervisor(LeaseError("held by another router"))
    with pytest.raises(LeaseError, match="held by another router"):
        asyncio.run(_chain(supervisor).fence())
    assert supervisor.calls == ["fence for router"]
