"""When a Router replica calls itself healthy, and which pipelines are its own; without Ray.

The replicas are real: their surroundings are the test's, that is Ray Serve, the pipeline and the
router that drives it.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from activity_records import log_of
from event_loops import in_event_loop
from local_expert_actors import expert_plan
from tiny_models import tiny_args, tiny_plan

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.config.measurements import ExpertLoad
from tramontane.cluster.pipeline import lifecycle as any_pipeline_module
from tramontane.cluster.pipeline.lifecycle import adopt_or_create_pipeline, pipeline_prefix
from tramontane.cluster.planning.hardware import TooFewNodesError
from tramontane.cluster.serving import router_replica
from tramontane.cluster.serving.router_replica import MAX_FAILED_STARTS, RouterReplica
from tramontane.proto import wire
from tramontane.proto.errors import LeaseError, PipelineError, PipelineSupersededError
from tramontane.proto.plan import PipelinePlan
from tramontane.proto.request import SamplingParams
from tramontane.router.engine.activity_log import ActivityLog
from tramontane.router.engine.health import PipelineHealth
from tramontane.router.engine.router import Router
from tramontane.router.scheduling.scheduler import Scheduler
from tramontane.router.scheduling.sequence import Sequence as Prompt

FINGERPRINT = (("config.json", "abc"),)
ARGS = tiny_args(n_layers=8)
TURNS = 20  # of the event loop


class StubRouter:
    """A router in the state that the test gives it; ``end`` ends its run."""

    snapshot: Any = Router.snapshot

    def __init__(self, scheduler: Scheduler, previous: Any, changes: dict[str, Any]) -> None:
        self.scheduler, self.previous = scheduler, previous
        self.is_ready, self.is_healthy = True, True
        self.failure: BaseException | None = None
        self.loss: PipelineError | None = None
        self.health = SimpleNamespace(is_failing=False, num_recoveries=3, paused_s=0.0)
        self.fingerprint, self.num_refreshed = "fp_a", 0
        self._ended = asyncio.Event()
        self._defect: Exception | None = None
        self.change(**{"epoch": 7} | changes)

    def change(self, **changes: Any) -> None:
        """Set its epoch, whether it ``is_failing``, or an attribute."""
        for name, value in changes.items():
            owner = {"epoch": self.scheduler, "is_failing": self.health}.get(name, self)
            assert hasattr(owner, name)
            setattr(owner, name, value)

    def pipeline_health(self) -> PipelineHealth:
        if not self.is_healthy:
            since_s = 0.0 if self.is_ready else 71.4
            return PipelineHealth("unavailable", "nothing has come back", since_s)
        return PipelineHealth("ready" if self.is_ready else "degraded", "a stage died", 3.0)

    @property
    def is_attached(self) -> bool:
        return self.is_ready

    async def run(self) -> None:
        await self._ended.wait()
        if self._defect is not None:
            raise self._defect

    def end(self, defect: Exception | None = None) -> None:
        self._defect = defect
        self._ended.set()

    def request_recovery(self, error: PipelineError) -> None:
        self.loss = error

    async def refresh_fingerprint(self) -> None:
        self.num_refreshed += 1


class Chain:
    """Stages that answer when the test lets them, with the epoch that they obey, or with what they
    raise.
    """

    def __init__(self) -> None:
        self.epoch, self.answers, self.num_requests = 7, asyncio.Event(), 0
        self.awaited = ""
        self.reported: list[Any] | PipelineError | None = None

    async def fingerprint(self) -> str:
        return "fp_a"

    async def describe_wait(self) -> str:
        return self.awaited

    async def health(self) -> list[Any]:
        self.num_requests += 1
        await self.answers.wait()
        if isinstance(self.reported, PipelineError):
            raise self.reported
        return [SimpleNamespace(epoch=self.epoch)] * 2 if self.reported is None else self.reported


@dataclass
class Surroundings:
    """What a replica is given and what it does with it."""

    plan: PipelinePlan = field(default_factory=lambda: tiny_plan(tiny_args(n_layers=8), 2))
    is_superseded: bool = False
    has_room: bool = True
    record_error: PipelineError | None = None
    # what is different of the routers that it makes from now on
    next_router: dict[str, Any] = field(default_factory=dict)
    routers: list[StubRouter] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    periodic: list[Callable[[], None]] = field(default_factory=list)
    exported: list[Any] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)  # what the start has published
    is_entered: bool = False
    chain: Chain = field(init=False)

    @property
    def router(self) -> StubRouter:
        return self.routers[-1]

    @asynccontextmanager
    async def pipeline(
        self, *_: object, first_number: int, report: Callable[[str], None]
    ) -> AsyncIterator[tuple[Any, Chain]]:
        assert first_number == 3, "the rank of the replica"
        self.is_entered, self.chain = True, Chain()
        report("waiting for nodes")
        try:
            if not self.has_room:
                await asyncio.get_running_loop().create_future()
            yield (
                SimpleNamespace(name="app-1", plan=self.plan, expert_actors=None, draft_model=None),
                self.chain,
            )
        finally:
            await asyncio.sleep(0)
            self.removed.append("the pipeline")

    def make_wait(self, application: str) -> Any:
        assert application == "app"
        end = lambda: self.waits.append("")  # noqa: E731
        return SimpleNamespace(report=self.waits.append, end=end)

    def make_router(
        self,
        scheduler: Scheduler,
        chain: Chain,
        *,
        step_timeout_s: float,
        activity: ActivityLog,
        previous: Any = None,
        read_fingerprint: Callable[[], Awaitable[str]],
    ) -> StubRouter:
        assert chain is self.chain
        assert read_fingerprint == chain.fingerprint
        assert step_timeout_s > 0
        assert activity is not None
        self.routers.append(StubRouter(scheduler, previous, self.next_router))
        return self.router

    async def follow(self, **changes: Any) -> StubRouter:
        """End the router that drives the pipeline; return the one that follows it, with these
        changes.
        """
        self.next_router, before = changes, self.router
        before.end()
        for _ in range(TURNS):
            await asyncio.sleep(0)
        assert self.router is not before, "no router has followed"
        assert self.router.previous is before.health
        return self.router

    def number_deployment(self, application: str, build_id: str) -> int:
        assert (application, build_id) == ("app", "a build")
        if self.record_error is not None:
            raise self.record_error
        return 5


@pytest.fixture
def around(monkeypatch: pytest.MonkeyPatch) -> Surroundings:
    around = Surroundings()
    replica = SimpleNamespace(
        replica_id=SimpleNamespace(unique_id="replica"),
        app_name="app",
        rank=SimpleNamespace(rank=3),
    )
    metrics = SimpleNamespace(export=around.exported.append)
    replaced: dict[str, Any] = {
        "serve": SimpleNamespace(get_replica_context=lambda: replica),
        "use_serve_log": lambda *_, **__: None,
        "bind_internal_port_to_node": lambda: None,
        "number_deployment": around.number_deployment,
        "DeploymentWatch": lambda _: SimpleNamespace(is_superseded=lambda _: around.is_superseded),
        "adopt_or_create_pipeline": around.pipeline,
        "StartWait": around.make_wait,
        "MetricFactory": lambda: None,
        "PipelineMetrics": lambda *_: metrics,
        "start_periodic_thread": lambda _, work: around.periodic.append(work),
        "ActivityLog": log_of,
        "Router": around.make_router,
        "RETRY_INTERVAL_S": 0.0,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(router_replica, name, value)
    return around


@dataclass(frozen=True)
class Stop:
    """What stops a replica if it is awaited."""

    replica: RouterReplica

    def __await__(self) -> Generator[Any, None, None]:
        return RouterReplica.__del__(self.replica).__await__()


class Collected(RouterReplica):
    """A replica that Python may collect, which does not await what it calls."""

    def __del__(self) -> Stop:  # type: ignore[override]
        return Stop(self)


def _new() -> tuple[Any, Coroutine[Any, Any, None]]:
    """Return a replica and its constructor, which Ray Serve awaits."""
    replica: Any = Collected.__new__(Collected)
    config = EngineConfig.build(None, {"stages": 2})
    return replica, replica.__init__(
        config, FINGERPRINT, launched=True, owns_serve=False, build_id="a build"
    )


def _run(around: Surroundings, scenario: Callable[[Any], Awaitable[None]]) -> list[str]:
    """Run a scenario with a replica that has started, stop the replica, and return what that has
    removed.
    """

    async def run() -> list[str]:
        replica, start = _new()
        await start
        try:
            await scenario(replica)
        finally:
            await replica.__del__()
        return [*around.removed]  # the end of the event loop closes what is still open

    return asyncio.run(run())


@in_event_loop
async def test_a_replica_that_is_stopped_while_it_waits_for_room_removes_what_it_was_making(
    around: Surroundings,
) -> None:
    around.has_room = False

    replica, start = _new()
    starting = asyncio.create_task(start)
    while not around.is_entered:
        await asyncio.sleep(0)
    await replica.__del__()
    assert around.removed == ["the pipeline"]
    await asyncio.gather(starting, return_exceptions=True)
    assert starting.cancelled()


def test_a_replica_that_failed_before_it_requested_a_pipeline_has_nothing_to_remove(
    around: Surroundings,
) -> None:
    around.record_error = PipelineError("the head node does not answer")

    async def scenario() -> None:
        replica, start = _new()
        with pytest.raises(PipelineError, match="the head node"):
            await start
        await replica.__del__()

    asyncio.run(scenario())
    assert not around.is_entered
    assert around.removed == []


@in_event_loop
async def test_a_replica_whose_first_router_fails_removes_its_pipeline_and_says_why(
    around: Surroundings,
) -> None:
    """Ray Serve would not: it was never ready."""
    around.next_router = {"is_ready": False, "failure": PipelineError("a stage cannot load")}

    _, start = _new()
    with pytest.raises(PipelineError, match="a stage cannot load"):
        await start
    assert around.removed == ["the pipeline"]


def test_what_a_start_waits_for_is_published_until_it_has_its_pipeline(
    around: Surroundings,
) -> None:
    """A text that stays would be the reason that /health gives for a later failure."""

    async def scenario(_replica: Any) -> None:
        assert around.waits == ["waiting for nodes", ""]

    _run(around, scenario)


def test_metrics_are_those_of_the_router_that_drives_the_pipeline_now(around: Surroundings) -> None:
    async def scenario(_: RouterReplica) -> None:
        (export,) = around.periodic
        export()
        await around.follow()
        export()

    _run(around, scenario)
    assert around.exported == around.routers


def test_a_pipeline_that_runs_again_is_healthy_however_often_it_failed_to_start(
    around: Surroundings,
) -> None:
    async def scenario(replica: RouterReplica) -> None:
        down = {"is_ready": False, "failure": PipelineError("a stage is loading"), "epoch": 0}
        await around.follow(**down)
        for _ in range(MAX_FAILED_STARTS - 1):
            await around.follow(**down)
            await replica.check_health()
        await around.follow(**down)
        with pytest.raises(PipelineError, match="a stage is loading"):
            await replica.check_health()
        around.router.change(is_ready=True, failure=None, epoch=8)
        await replica.check_health()

    _run(around, scenario)


@pytest.mark.parametrize("makes_progress", [True, False])
def test_a_router_that_is_replaced_for_its_health_leaves_its_pipeline_to_the_next(
    around: Surroundings, makes_progress: bool
) -> None:
    async def scenario(replica: RouterReplica) -> None:
        around.router.is_healthy = False
        with pytest.raises(PipelineError, match="nothing was done"):
            await replica.check_health()
        around.router.is_healthy = makes_progress
        with suppress(PipelineError):
            await replica.check_health()

    assert _run(around, scenario) == ["the pipeline"] * makes_progress


def test_a_router_whose_pipeline_is_a_newer_versions_stays_and_says_so(
    around: Surroundings,
) -> None:
    async def scenario(replica: RouterReplica) -> None:
        around.router.change(is_ready=False, failure=LeaseError("driven by another"))
        around.is_superseded = True
        await replica.check_health()
        refusal, name = wire.decode_error(await replica.generate("ingress", 1, b"", ""))
        assert (type(refusal), name) == (PipelineSupersededError, "replica")

    _run(around, scenario)


def test_what_an_ingress_says_about_a_request_reaches_its_stream(
    around: Surroundings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(replica: RouterReplica) -> None:
        async def generate(_router: object, *arguments: object) -> bytes:
            given.append(arguments)
            return b"done"

        monkeypatch.setattr(replica._streams, "generate", generate)
        assert await replica.generate("ingress", 5, b"specs", "model", False, 0.25) == b"done"

    given = list[tuple[object, ...]]()
    _run(around, scenario)
    assert given == [("ingress", 5, b"specs", "model", False, 0.25)]


def test_a_router_that_lost_its_lease_is_not_healthy(around: Surroundings) -> None:
    async def scenario(replica: RouterReplica) -> None:
        around.router.change(is_ready=False, failure=LeaseError("driven by another"))
        with pytest.raises(PipelineError, match="driven by another"):
            await replica.check_health()

    _run(around, scenario)


def test_a_replica_whose_loop_has_ended_is_not_healthy_and_removes_its_pipeline(
    around: Surroundings,
) -> None:
    async def scenario(replica: RouterReplica) -> None:
        await replica.check_health()
        around.router.end(ZeroDivisionError())
        for _ in range(3):
            await asyncio.sleep(0)
        with pytest.raises(PipelineError, match="drives no pipeline"):
            await replica.check_health()

    assert _run(around, scenario) == ["the pipeline"]


def test_a_pipeline_that_only_fails_is_made_anew(around: Surroundings) -> None:
    """Router after router has it obey, and then nothing comes back."""

    async def scenario(replica: RouterReplica) -> None:
        await around.follow(epoch=8, is_failing=True)
        for _ in range(MAX_FAILED_STARTS):
            await replica.check_health()
            await around.follow(epoch=8, is_failing=True)
        with pytest.raises(PipelineError, match="drives no pipeline"):
            await replica.check_health()

    assert _run(around, scenario) == ["the pipeline"]


def test_a_pipeline_that_only_failed_may_become_well(around: Surroundings) -> None:
    async def scenario(replica: RouterReplica) -> None:
        for _ in range(MAX_FAILED_STARTS + 1):
            await around.follow(epoch=8, is_failing=True)
        await around.follow(epoch=10)
        await replica.check_health()

    _run(around, scenario)


def test_a_stage_without_an_epoch_is_found_by_a_health_check(around: Surroundings) -> None:
    async def scenario(replica: RouterReplica) -> None:
        around.chain.epoch = -1
        around.chain.answers.set()
        health, name = await replica.health()
        assert (health.status, health.is_serving, name) == ("degraded", True, "replica")
        assert health.reason == "a stage has lost its sequences"
        assert "lost its sequences" in str(around.router.loss)

    _run(around, scenario)


def test_what_a_degraded_pipeline_waits_for_is_its_reason(around: Surroundings) -> None:
    async def scenario(replica: RouterReplica) -> None:
        around.router.is_ready = False
        assert (await replica.health())[0].reason == "a stage died"
        around.chain.awaited = "waiting for 1 of 2 stages"
        health = (await replica.health())[0]
        assert (health.status, health.reason, health.since_s) == (
            "degraded",
            "waiting for 1 of 2 stages",
            3.0,
        )
        around.router.is_healthy = False
        health = (await replica.health())[0]
        assert (health.status, health.reason) == (
            "unavailable",
            "waiting for 1 of 2 stages, for 71 s",
        )
        around.chain.answers.set()
        around.router.is_ready = True  # nothing is being replaced
        assert (await replica.health())[0].reason == "nothing has come back"

    _run(around, scenario)


def test_health_is_progress(around: Surroundings) -> None:
    async def scenario(replica: RouterReplica) -> None:
        around.chain.answers.set()
        assert (await replica.health())[0].status == "ready"
        around.router.is_healthy = False
        assert (await replica.health())[0].status == "unavailable"
        with pytest.raises(PipelineError, match="nothing was done"):
            await replica.check_health()
        around.router.is_ready = False
        await replica.check_health()  # stages are loading again
        assert not (await replica.health())[0].is_serving

    _run(around, scenario)


@pytest.mark.parametrize("is_same", [True, False])
def test_what_stages_said_before_a_router_was_fenced_anew_does_not_count_against_it(
    around: Surroundings, is_same: bool
) -> None:
    """The same router after a failure, or another one that followed it."""

    async def scenario(replica: RouterReplica) -> None:
        chain = around.chain
        requested = [asyncio.create_task(replica.health()) for _ in range(3)]
        while not chain.num_requests:
            await asyncio.sleep(0)
        chain.epoch = 8
        if is_same:
            around.router.change(epoch=8)
        else:
            await around.follow(epoch=8)
        chain.answers.set()
        await asyncio.gather(*requested)
        assert around.router.loss is None
        assert chain.num_requests == 1, "however many requests there are"

    _run(around, scenario)


def test_only_what_makes_a_pipeline_decides_whether_it_is_adopted() -> None:
    def prefix(**keys: Any) -> str:
        return pipeline_prefix(
            "app", EngineConfig.build(None, {"stages": 2} | keys), (("config.json", "abc"),)
        )

    same = prefix()
    assert prefix(port=9000, replicas=5, max_queued_requests=3, served_model_name="x") == same
    others = [
        prefix(stages=3),
        prefix(dtype="float32"),
        prefix(quantize="int8"),
        prefix(max_model_len=64),
    ]
    assert len({same, *others, prefix(model=Path("/elsewhere"))}) == 6
    other_files = pipeline_prefix(
        "app", EngineConfig.build(None, {"stages": 2}), (("config.json", "abd"),)
    )
    assert other_files != same


@pytest.mark.parametrize(("fingerprint", "has_expert_actors"), [("", False), ("fp_a", True)])
def test_a_fingerprint_that_is_not_known_or_has_expert_actors_in_it_is_read_again(
    around: Surroundings, monkeypatch: pytest.MonkeyPatch, fingerprint: str, has_expert_actors: bool
) -> None:
    monkeypatch.setattr(router_replica, "FINGERPRINT_INTERVAL_S", 0.0)

    async def scenario(replica: Any) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)
        assert around.router.num_refreshed == 0, "it is known, and no fence can have been missed"
        around.router.change(is_ready=False, fingerprint=fingerprint)
        if has_expert_actors:
            around.plan = replace(around.plan, experts=expert_plan(ARGS, 1))
            replica._spec.plan = around.plan
        for _ in range(TURNS):
            await asyncio.sleep(0)
        assert around.router.num_refreshed == 0, "not while stages are fenced"
        around.router.change(is_ready=True)
        while around.router.num_refreshed < 3:
            await asyncio.sleep(0)

    _run(around, scenario)


EXPERTS = [{2: (5, 6)}, {0: (1, 2), 1: (3, 4)}]


@pytest.mark.parametrize(
    ("loads", "error", "expected"),
    [
        (EXPERTS, None, ((1, 2), (3, 4), (5, 6))),
        ([EXPERTS[1], {}], None, None),  # a stage is loading
        ([], PipelineError("a stage does not answer"), None),
    ],
)
def test_the_experts_load_is_that_of_all_layers(
    around: Surroundings,
    loads: Sequence[dict[int, Any]],
    error: PipelineError | None,
    expected: ExpertLoad | None,
) -> None:
    async def scenario(replica: RouterReplica) -> None:
        around.chain.reported = error or [SimpleNamespace(expert_load=load) for load in loads]
        around.chain.answers.set()
        assert await replica.expert_load() == (expected, "replica")

    around.plan = tiny_plan(tiny_args(n_layers=3), 2)
    _run(around, scenario)


def test_a_model_without_experts_has_no_load(around: Surroundings) -> None:
    async def scenario(replica: RouterReplica) -> None:
        assert await replica.expert_load() == ((), "replica")

    around.plan = tiny_plan(tiny_args(n_layers=3, moe=False), 2)
    _run(around, scenario)


def test_a_pipeline_reports_what_it_is_and_does(around: Surroundings) -> None:
    async def scenario(replica: RouterReplica) -> None:
        scheduler = around.router.scheduler
        around.router.change(epoch=5)
        scheduler.add(Prompt(0, (1,) * 20, SamplingParams(max_tokens=4), 24))
        scheduler.schedule()
        shown, name = await replica.activity({"app-1": 1, "other": 2})
        assert shown is not None
        assert (name, shown.name, shown.epoch, shown.recoveries) == ("replica", "app-1", 5, 3)
        assert [stage.label for stage in shown.stages] == [
            "Stage 1/2 layers 0-3",
            "Stage 2/2 layers 4-7",
        ]
        assert (shown.running, shown.waiting, shown.pages_held) == (1, 0, 2)
        assert shown.pages == sum(each.num_pages for each in around.plan.cache.classes)
        assert [batch.number for batch in shown.micro_batches] == [2, 3]
        around.router.is_ready = False
        assert await replica.activity({}) == (None, "replica"), "it drives none now"

    _run(around, scenario)


@dataclass(frozen=True)
class StubSpec:
    name: str = "unnamed"


def _nodes_join(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> tuple[list[StubSpec], Callable[[float], Coroutine[Any, Any, None]]]:
    """The cluster has room at the last of so many looks; returns what is driven, and what drives
    it.
    """
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
