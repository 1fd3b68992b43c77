"""When a Router replica calls itself healthy, and which pipelines are its own; without Ray."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from past_activity import log_of, pipeline_data
from tiny_models import tiny_args, tiny_plan

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.config.expert_load import ExpertLoad
from tramontane.cluster.pipeline import adoption as any_pipeline_module
from tramontane.cluster.pipeline.adoption import adopt_or_create_pipeline, pipeline_prefix
from tramontane.cluster.planning.hardware import TooFewNodesError
from tramontane.cluster.serving import router_replica
from tramontane.cluster.serving.router_replica import MAX_FAILED_STARTS, RouterReplica
from tramontane.cluster.serving.token_channel import IngressStreams
from tramontane.proto import wire
from tramontane.proto.errors import LeaseError, PipelineError, PipelineSupersededError
from tramontane.proto.request import SamplingParams
from tramontane.router.engine.activity_log import PipelineActivity
from tramontane.router.scheduling.admission import SchedulerLimits
from tramontane.router.scheduling.policy import FixedInFlightPolicy
from tramontane.router.scheduling.scheduler import Scheduler
from tramontane.router.scheduling.sequence import Sequence


@dataclass
class StubRouter:
    epoch: int
    is_ready: bool = True
    failure: PipelineError | None = None
    loss: PipelineError | None = None
    is_healthy: bool = True
    is_failing: bool = False

    @property
    def health(self) -> Any:  # noqa: ANN401
        return SimpleNamespace(is_failing=self.is_failing)

    async def run(self) -> None:
        """It has ended."""

    @property
    def is_attached(self) -> bool:
        return self.is_ready

    @property
    def scheduler(self) -> Any:  # noqa: ANN401
        return SimpleNamespace(epoch=self.epoch, is_idle=True)

    def request_recovery(self, error: PipelineError) -> None:
        self.loss = error


class Undriven(RouterReplica):
    """Made without a pipeline, so there is nothing to remove."""

    is_superseded = False

    def __init__(self) -> None:
        pass

    async def _is_superseded(self) -> bool:
        return self.is_superseded

    def __del__(self) -> None:
        pass


def _replica(router: StubRouter, driving: "asyncio.Future[None]", num_failed_starts: int = 0) -> Any:  # noqa: ANN401
    replica: Any = Undriven()
    replica._router, replica._driving, replica._num_failed_starts = router, driving, num_failed_starts
    replica._health_check, replica._name = None, "replica"
    return replica


def test_a_replica_that_is_stopped_while_it_waits_for_room_removes_what_it_was_making() -> None:
    removed = []

    @asynccontextmanager
    async def without_room() -> AsyncIterator[None]:
        try:
            await asyncio.get_running_loop().create_future()
            yield
        finally:
            await asyncio.sleep(0)
            removed.append("the pipeline")

    async def scenario() -> None:
        replica: Any = Undriven()
        replica._driving, replica._acquiring = None, asyncio.create_task(without_room().__aenter__())
        await asyncio.sleep(0)
        await RouterReplica.__del__(replica)
        assert removed == ["the pipeline"]

    asyncio.run(scenario())


def test_a_replica_that_failed_before_it_requested_a_pipeline_has_nothing_to_remove() -> None:
    replica: Any = Undriven()
    replica._driving = replica._acquiring = None
    asyncio.run(RouterReplica.__del__(replica))


def test_a_pipeline_that_runs_again_is_healthy_however_often_it_failed_to_start() -> None:
    async def scenario() -> None:
        driving: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        failure = PipelineError("a stage is loading")
        down = StubRouter(0, is_ready=False, failure=failure)
        await _replica(down, driving, MAX_FAILED_STARTS - 1).check_health()
        with pytest.raises(PipelineError, match="a stage is loading"):
            await _replica(down, driving, MAX_FAILED_STARTS).check_health()
        await _replica(StubRouter(7), driving, MAX_FAILED_STARTS).check_health()

    asyncio.run(scenario())


@pytest.mark.parametrize("makes_progress", [True, False])
def test_a_router_that_is_replaced_for_its_health_leaves_its_pipeline_to_the_next(makes_progress: bool) -> None:
    closed: list[str] = []

    async def scenario() -> None:
        router = StubRouter(7)
        replica = _replica(router, asyncio.create_task(asyncio.Event().wait()))
        replica._exit = AsyncExitStack()
        replica._exit.callback(closed.append, "the pipeline")
        router.is_healthy = False
        with pytest.raises(PipelineError, match="nothing was done"):
            await replica.check_health()
        router.is_healthy = makes_progress
        with suppress(PipelineError):
            await replica.check_health()
        await RouterReplica.__del__(replica)

    asyncio.run(scenario())
    assert closed == ["the pipeline"] * makes_progress


def test_a_router_whose_pipeline_is_a_newer_versions_stays_and_says_so() -> None:
    async def scenario() -> None:
        replica = _replica(StubRouter(7, False, LeaseError("driven by another")), asyncio.get_running_loop().create_future())
        replica.is_superseded, replica._streams = True, IngressStreams("replica")
        await replica.check_health()
        refusal, name = wire.decode_error(await replica.generate("ingress", 1, b"", ""))
        assert (type(refusal), name) == (PipelineSupersededError, "replica")

    asyncio.run(scenario())


def test_a_router_that_lost_its_lease_or_its_loop_is_not_healthy() -> None:
    async def scenario() -> None:
        driving: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with pytest.raises(PipelineError, match="driven by another"):
            await _replica(StubRouter(7, False, LeaseError("driven by another")), driving).check_health()
        driving.set_result(None)
        with pytest.raises(PipelineError, match="drives no pipeline"):
            await _replica(StubRouter(7), driving).check_health()

    asyncio.run(scenario())


def test_a_pipeline_that_only_fails_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Router after router has it obey, and then nothing comes back."""
    monkeypatch.setattr(router_replica, "RETRY_INTERVAL_S", 0.0)

    async def scenario() -> None:
        replica = _replica(StubRouter(7), asyncio.get_running_loop().create_future())
        replica._new_router = lambda _before: StubRouter(8, is_failing=True)
        driving = asyncio.create_task(RouterReplica._drive(replica))
        while replica._num_failed_starts < MAX_FAILED_STARTS:
            await replica.check_health()
            await asyncio.sleep(0)
        driving.cancel()
        with pytest.raises(PipelineError, match="drives no pipeline"):
            await replica.check_health()
        assert not replica._is_given_up, "so that it is removed, and made anew"
        replica._router = StubRouter(10)
        await replica.check_health()

    asyncio.run(scenario())


class Chain:
    """Stages that answer when the test lets them, with the epoch that they obey."""

    def __init__(self, epoch: int) -> None:
        self.epoch, self.answers, self.num_requests = epoch, asyncio.Event(), 0

    async def health(self) -> list[Any]:
        self.num_requests += 1
        await self.answers.wait()
        return [SimpleNamespace(epoch=self.epoch)] * 2


def test_a_stage_without_an_epoch_is_found_by_a_health_check() -> None:
    async def scenario() -> None:
        router, chain = StubRouter(7), Chain(-1)
        chain.answers.set()
        replica = _replica(router, asyncio.get_running_loop().create_future())
        replica._chain = chain
        assert await replica.is_ready() == (True, "replica"), "until that takes too long"
        assert "lost its sequences" in str(router.loss)

    asyncio.run(scenario())


def test_health_is_progress() -> None:
    async def scenario() -> None:
        router, chain = StubRouter(7, is_healthy=False), Chain(7)
        chain.answers.set()
        replica = _replica(router, asyncio.get_running_loop().create_future())
        replica._chain = chain
        assert await replica.is_ready() == (False, "replica")
        with pytest.raises(PipelineError, match="nothing was done"):
            await replica.check_health()
        router.is_ready = False
        await replica.check_health()  # stages are loading again
        assert await replica.is_ready() == (False, "replica")

    asyncio.run(scenario())


@pytest.mark.parametrize("is_same", [True, False])
def test_what_stages_said_before_a_router_was_fenced_anew_does_not_count_against_it(is_same: bool) -> None:
    """The same router after a failure, or another one that followed it."""

    async def scenario() -> None:
        router, chain = StubRouter(7), Chain(7)
        replica = _replica(router, asyncio.get_running_loop().create_future())
        replica._chain = chain
        requested = [asyncio.create_task(replica.is_ready()) for _ in range(3)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        router.epoch, chain.epoch = (8, 7) if is_same else (7, 8)
        replica._router = router if is_same else StubRouter(8)
        chain.answers.set()
        await asyncio.gather(*requested)
        assert router.loss is None or not is_same
        assert replica._router.loss is None
        assert chain.num_requests == 1, "however many requests there are"

    asyncio.run(scenario())


def test_only_what_makes_a_pipeline_decides_whether_it_is_adopted() -> None:
    def prefix(**keys: Any) -> str:  # noqa: ANN401
        return pipeline_prefix("app", EngineConfig.build(None, {"stages": 2} | keys), (("config.json", "abc"),))

    same = prefix()
    assert prefix(port=9000, replicas=5, max_queued_requests=3, served_model_name="x") == same
    others = [prefix(stages=3), prefix(dtype="float32"), prefix(quantize="int8"), prefix(max_model_len=64)]
    assert len({same, *others, prefix(model=Path("/elsewhere"))}) == 6
    other_files = pipeline_prefix("app", EngineConfig.build(None, {"stages": 2}), (("config.json", "abd"),))
    assert other_files != same


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        ([{2: (5, 6)}, {0: (1, 2), 1: (3, 4)}], ((1, 2), (3, 4), (5, 6))),
        ([{0: (1, 2), 1: (3, 4)}, {}], None),  # a stage is loading
        (PipelineError("a stage does not answer"), None),
    ],
)
def test_the_experts_load_is_that_of_all_layers(reported: Any, expected: ExpertLoad | None) -> None:  # noqa: ANN401
    class Stages:
        async def health(self) -> list[Any]:
            if isinstance(reported, PipelineError):
                raise reported
            return [SimpleNamespace(expert_load=load) for load in reported]

    async def scenario() -> None:
        replica = _replica(StubRouter(7), asyncio.get_running_loop().create_future())
        replica._chain = Stages()
        replica._spec = SimpleNamespace(plan=SimpleNamespace(args=tiny_args(n_layers=3)))
        assert await replica.expert_load() == (expected, "replica")
        replica._spec = SimpleNamespace(plan=SimpleNamespace(args=tiny_args(n_layers=3, moe=False)))
        assert await replica.expert_load() == ((), "replica"), "a model without experts has no load"

    asyncio.run(scenario())


def test_a_pipeline_reports_what_it_is_and_does() -> None:
    plan = tiny_plan(tiny_args(n_layers=8), 2)
    scheduler = Scheduler(plan.cache, SchedulerLimits(8, 64, 256, 96), FixedInFlightPolicy(2, 64), epoch=5)
    scheduler.add(Sequence(0, (1,) * 20, SamplingParams(max_tokens=4), 24))
    scheduler.schedule()

    async def scenario() -> None:
        router: Any = SimpleNamespace(is_attached=True, scheduler=scheduler, health=SimpleNamespace(num_recoveries=3))
        replica = _replica(router, asyncio.get_running_loop().create_future())
        replica._spec, replica._activity = SimpleNamespace(name="app-1", plan=plan), log_of()
        reported, name = await replica.activity({"app-1": 1, "other": 2})
        shown = PipelineActivity.model_validate_json(json.dumps(reported))
        assert (name, shown.name, shown.epoch, shown.recoveries) == ("replica", "app-1", 5, 3)
        assert [stage.label for stage in shown.stages] == ["Stage 1/2 layers 0-3", "Stage 2/2 layers 4-7"]
        assert (shown.running, shown.waiting, shown.pages_held) == (1, 0, 2)
        assert shown.pages == plan.cache.classes[0].num_pages
        assert [batch.number for batch in shown.micro_batches] == [2, 3]
        assert reported.keys() == pipeline_data().keys()
        router.is_attached = False
        assert await replica.activity({}) == (None, "replica"), "it drives none now"

    asyncio.run(scenario())


@dataclass(frozen=True)
class StubSpec:
    name: str = "unnamed"


def _nodes_join(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> tuple[list[StubSpec], Callable[[float], Coroutine[Any, Any, None]]]:
    """The cluster has room at the last of so many looks; returns what is driven, and what drives it."""
    driven: list[StubSpec] = []
    looks = iter([TooFewNodesError("4 stages need a GPU each, and there are 2")] * (number - 1))

    def new_spec() -> StubSpec:
        if (error := next(looks, None)) is not None:
            raise error
        return StubSpec()

    @asynccontextmanager
    async def running(spec: StubSpec, holder: str, evict: object) -> AsyncIterator[str]:
        driven.append(spec)
        yield holder

    async def drive(timeout_s: float) -> None:
        async with adopt_or_create_pipeline("app", new_spec, nodes_timeout_s=timeout_s):  # type: ignore[arg-type]
            pass

    monkeypatch.setattr(any_pipeline_module, "actor_names", lambda _: [])
    monkeypatch.setattr(any_pipeline_module, "actor_holder_name", lambda _: "me")
    monkeypatch.setattr(any_pipeline_module, "running_pipeline", running)
    monkeypatch.setattr(any_pipeline_module, "NODES_POLL_S", 0.0)
    return driven, drive


def test_nodes_that_are_still_to_join_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    driven, drive = _nodes_join(monkeypatch, 3)
    asyncio.run(drive(3600.0))
    assert driven == [StubSpec("app-0")]


def test_after_the_timeout_the_cluster_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    driven, drive = _nodes_join(monkeypatch, 3)
    with pytest.raises(TooFewNodesError, match="and there are 2"):
        asyncio.run(drive(0.0))
    assert driven == []
