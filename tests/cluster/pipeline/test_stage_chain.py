"""What a chain makes of a supervisor's errors, which Ray gives the class of their cause as well as
its own; calls of stages.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from event_loops import in_event_loop
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayTaskError

from tramontane.cluster.common.node_watch import NodeLossDetector
from tramontane.cluster.pipeline import stage_chain
from tramontane.cluster.pipeline.stage_chain import (
    UNREACHABLE_TIMEOUT_S,
    DirectStageChain,
    ObjectStoreStageChain,
)
from tramontane.proto import wire
from tramontane.proto.errors import LeaseError, PipelineError
from tramontane.proto.step import MicroBatch, StageTiming, StepResult

EPOCH = 7
NEW_STAGES = ["stage 1, created again"]


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
        self.fence, self.replace_hung_workers = (
            _Method(self._fence),
            _Method(self._replace_hung_workers),
        )

    async def _fence(self, holder: str) -> tuple[int, list[Any]]:
        self.calls.append(f"fence for {holder}")
        if "replace" in self.calls:
            return EPOCH, NEW_STAGES
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


def test_when_a_stage_does_not_answer_the_fence_it_is_replaced_and_not_the_supervisor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def kill(*_: object, **__: object) -> None:
        raise AssertionError("the supervisor has answered")

    monkeypatch.setattr(stage_chain.ray, "kill", kill)
    supervisor = _Supervisor(GetTimeoutError("not within 5 s"))
    assert asyncio.run(_chain(supervisor).fence()) == EPOCH
    assert supervisor.calls == ["fence for router", "replace", "fence for router"]


def test_stages_that_were_created_again_get_the_next_steps() -> None:
    chain = _chain(_Supervisor(GetTimeoutError("not within 5 s")))
    asyncio.run(chain.fence())
    assert chain.stages == NEW_STAGES


def test_a_stage_that_cannot_be_reached_is_looked_at_before_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray says of one that is stopped what it says of one that restarts, to a supervisor that has
    not called it.
    """
    supervisor = _Supervisor(ActorUnavailableError("connection attempt timed out", None))
    times = iter([0.0, 1.0, UNREACHABLE_TIMEOUT_S, UNREACHABLE_TIMEOUT_S + 0.1])
    monkeypatch.setattr(stage_chain, "time", SimpleNamespace(monotonic=lambda: next(times)))
    assert asyncio.run(_chain(supervisor).fence()) == EPOCH
    assert supervisor.calls == ["fence for router"] * 3 + ["replace", "fence for router"]


def test_a_supervisor_that_does_not_answer_gets_a_new_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    monkeypatch.setattr(stage_chain, "SUPERVISOR_FENCE_TIMEOUT_S", 0.01)
    monkeypatch.setattr(stage_chain.ray, "kill", kill)
    assert asyncio.run(_chain(supervisor).fence()) == EPOCH
    assert killed == [(supervisor, False)]


def test_a_lease_that_another_router_holds_ends_the_fence() -> None:
    supervisor = _Supervisor(LeaseError("held by another router"))
    with pytest.raises(LeaseError, match="held by another router"):
        asyncio.run(_chain(supervisor).fence())
    assert supervisor.calls == ["fence for router"]


# ---- calls of stages

KINDS = pytest.mark.parametrize("kind", [ObjectStoreStageChain, DirectStageChain])


class _Stage:
    """As a stage's handle; every call blocks its caller until ``may_return``, and raises ``error``
    if there is one.
    """

    def __init__(
        self, stage_id: int, may_return: threading.Event, error: Exception | None = None
    ) -> None:
        self._stage_id, self._may_return, self._error = stage_id, may_return, error
        self.called: list[int] = []  # steps
        self.step = self.linked_step = _Method(self._call)  # type: ignore[arg-type]

    def _call(self, message: bytes, _carried: object = None) -> Any:
        self._may_return.wait(10)  # seconds, if the loop makes the call
        if self._error is not None:
            raise self._error
        batch = wire.decode_batch(message)
        self.called.append(batch.step_id)
        reply: Future[bytes] = Future()
        timing = StageTiming(self._stage_id, 0.0, 0.0, 0)
        reply.set_result(wire.encode_result(StepResult(batch.epoch, batch.step_id, (), (timing,))))
        return SimpleNamespace(future=lambda: reply)


def _stages(num_stages: int, may_return: threading.Event, error: Exception | None = None) -> Any:
    return [_Stage(number, may_return, error) for number in range(num_stages)]


@KINDS
@pytest.mark.parametrize("num_stages", [1, 4, 64])
@in_event_loop
async def test_no_call_of_a_stage_is_made_on_the_event_loop(
    kind: type[ObjectStoreStageChain], num_stages: int
) -> None:
    """Calls that block for as long as the loop has not done other work, and then return in the
    order of submission.
    """
    may_return = threading.Event()
    stages = _stages(num_stages, may_return)
    chain = kind(stages, stages[0], "router")
    results = [
        asyncio.ensure_future(chain.submit(MicroBatch(EPOCH, step_id, ()))) for step_id in range(5)
    ]
    await asyncio.sleep(0)
    assert not any(stage.called for stage in stages)
    may_return.set()  # by the loop, which is free
    assert [result.step_id for result in await asyncio.gather(*results)] == [*range(5)]
    assert all(stage.called == [*range(5)] for stage in stages)


@KINDS
@in_event_loop
async def test_a_call_that_cannot_be_made_fails_its_step(kind: type[ObjectStoreStageChain]) -> None:
    may_return = threading.Event()
    may_return.set()
    stages = _stages(3, may_return, ActorUnavailableError("it restarts", None))
    with pytest.raises(PipelineError, match=r"a stage failed: .*it restarts"):
        await kind(stages, stages[0], "router").submit(MicroBatch(EPOCH, 0, ()))


# ---- nodes


@pytest.mark.parametrize(("died", "has_lost"), [({"b"}, True), ({"z"}, False), (set(), False)])
@in_event_loop
async def test_a_chain_knows_after_a_fence_whether_a_node_of_its_pipeline_has_died(
    died: set[str], has_lost: bool
) -> None:
    used, dead = {"a", "b"}, {"y"}
    supervisor = _Supervisor(GetTimeoutError())
    supervisor.calls.append("replace")
    handle: Any = supervisor

    chain = ObjectStoreStageChain(
        [], handle, "router", NodeLossDetector(lambda: set(used), lambda: set(dead))
    )
    await chain.fence()
    assert not chain.has_lost_node
    dead.update(died)
    used.difference_update(died)
    used.add("c")
    await chain.fence()
    assert chain.has_lost_node == has_lost
    await chain.fence()
    assert not chain.has_lost_node, "not since the last fence"


@in_event_loop
async def test_a_fence_does_not_wait_for_the_head_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_chain, "NODES_TIMEOUT_S", 0.01)
    supervisor, is_over, answers = _Supervisor(GetTimeoutError()), threading.Event(), []
    supervisor.calls.append("replace")
    handle: Any = supervisor

    def silent() -> set[str]:
        is_over.wait(10)  # seconds, if the fence waits for it
        answers.append(is_over.is_set())
        return set()

    chain = ObjectStoreStageChain([], handle, "router", NodeLossDetector(silent, set))
    assert await chain.fence() == EPOCH
    assert not chain.has_lost_node
    assert not answers
    is_over.set()
