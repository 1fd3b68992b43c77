"""Calls to a supervisor that does not answer: until it has a process they are repeated."""

import asyncio
from typing import Any

import pytest
from event_loops import in_event_loop
from ray.exceptions import RayError

from tramontane.cluster.actors import supervisor_client
from tramontane.cluster.actors.supervisor_client import (
    MAX_FURTHER_CALLS,
    MAX_MISSED_CALLS,
    call_or_restart,
)

COUNTED = MAX_MISSED_CALLS + MAX_FURTHER_CALLS


class _Supervisor:
    """It answers the call of a number, and is alive from another on."""

    def __init__(self, answers_at: int, alive_from: int) -> None:
        self.num_calls, self.answers_at, self.alive_from = 0, answers_at, alive_from

    async def call(self) -> int:
        self.num_calls += 1
        if self.num_calls < self.answers_at:
            await asyncio.Event().wait()
        return self.num_calls

    def state(self, _supervisor: Any) -> dict[str, Any]:
        return {"State": "ALIVE" if self.num_calls >= self.alive_from else "PENDING_CREATION"}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_client, "LEASE_CALL_TIMEOUT_S", 0.001)
    monkeypatch.setattr(supervisor_client, "kill_worker_process", lambda *_: False)


async def _claim(supervisor: _Supervisor, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(supervisor_client, "actor_state", supervisor.state)
    handle: Any = supervisor
    return await call_or_restart(handle, supervisor.call)


@in_event_loop
async def test_calls_before_its_first_process_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = _Supervisor(answers_at=3 * COUNTED, alive_from=3 * COUNTED - 2)
    assert await _claim(supervisor, monkeypatch) == 3 * COUNTED


@in_event_loop
async def test_calls_to_a_process_that_hangs_count(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = _Supervisor(answers_at=3 * COUNTED, alive_from=0)
    with pytest.raises(RayError, match=f"not answered {COUNTED} calls in a row"):
        await _claim(supervisor, monkeypatch)
    assert supervisor.num_calls == COUNTED


@in_event_loop
async def test_a_supervisor_that_gets_no_process_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor_client, "START_TIMEOUT_S", 0.0)
    supervisor = _Supervisor(answers_at=3 * COUNTED, alive_from=3 * COUNTED)
    with pytest.raises(RayError, match="could not be replaced"):
        await _claim(supervisor, monkeypatch)
