"""One router at a time: the book alone, then supervisors, stages and two routers that both
believe.
"""

import asyncio
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import psutil
import pytest
import ray
from harness import GREEDY, random_ids, run_prompts, running_chain, scheduler_for
from hypothesis import given
from hypothesis import strategies as st
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from small_cluster import small_cluster
from tiny_models import random_model, tiny_args, tiny_plan, write_checkpoint

from tramontane.cluster.actors import supervisor as supervisor_module
from tramontane.cluster.actors.lease import (
    Lease,
    LeaseManager,
    actor_holder_name,
    driver_holder_name,
    must_yield,
)
from tramontane.cluster.actors.pipeline_spec import (
    SUPERVISOR_SUFFIX,
    OwnerApplication,
    PipelineSpec,
)
from tramontane.cluster.actors.stage_actor import StageHealth
from tramontane.cluster.actors.supervisor import Supervisor, create_supervisor, remove_pipeline
from tramontane.cluster.actors.worker_actor import NAMESPACE, actor_names
from tramontane.cluster.pipeline.lifecycle import (
    adopt_or_create_pipeline,
    running_pipeline,
    shut_down_pipeline,
)
from tramontane.cluster.pipeline.stage_chain import ObjectStoreStageChain
from tramontane.proto.errors import CheckpointError, LeaseError, PipelineError, PlanError
from tramontane.proto.step import Chunk, MicroBatch, StepResult

TTL = 10.0


def test_the_lease_is_one_holders_until_it_lapses() -> None:
    book = LeaseManager(TTL, now=0.0)
    book.claim("a", now=0.0)
    assert book.next_epoch(floor=1000) == 1001
    with pytest.raises(LeaseError, match="driven by a"):
        book.claim("b", now=TTL)
    assert book.renew("a", now=9.0)
    with pytest.raises(LeaseError):
        book.claim("b", now=9.0 + TTL)
    book.claim("b", now=9.1 + TTL)
    assert not book.renew("a", now=20.0)
    assert book.next_epoch(floor=0) == 1002, (
        "higher than every epoch before, whatever the clock says"
    )


def test_the_lease_of_a_holder_that_is_known_to_be_dead_need_not_expire() -> None:
    book = LeaseManager(TTL, now=0.0, recovered=Lease("a", 7))
    book.claim("b", now=0.1, yielding="a")
    assert book.lease == Lease("b", 7)
    assert book.next_epoch(floor=0) == 8
    with pytest.raises(LeaseError, match="driven by b"):
        book.claim("c", now=0.2, yielding="a")  # which has lost the lease since


def test_a_later_deployments_router_need_not_wait_but_no_other() -> None:
    older, newer = "driver@7/x/y", "driver@8/x"
    assert must_yield(older, newer)
    assert not must_yield(newer, older)
    assert not must_yield(older, "driver@7/z")
    assert not must_yield("driver@0/a", "driver@0/b")


def test_the_holder_may_claim_again() -> None:
    book = LeaseManager(TTL, now=0.0)
    book.claim("a", now=0.0)
    first = book.next_epoch(floor=0)
    book.claim("a", now=1.0)
    assert book.next_epoch(floor=0) > first


def test_a_holder_that_the_book_has_forgotten_has_the_lease_again_when_it_renews() -> None:
    """No stage knew the lease when the supervisor restarted. The driving router continues, and does
    not claim.
    """
    book = LeaseManager(TTL, now=0.0)
    assert book.renew("a", now=5.0)
    assert book.silent_for_s(now=6.0) == 1.0
    with pytest.raises(LeaseError, match="driven by a"):
        book.claim("b", now=6.0)


def test_a_book_found_in_stages_gives_its_holder_a_full_term() -> None:
    book = LeaseManager(TTL, now=100.0, recovered=Lease("a", 7))
    with pytest.raises(LeaseError):
        book.claim("b", now=100.0 + TTL)
    book.claim("b", now=100.1 + TTL)


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.sampled_from(["claim", "renew", "fence"]), st.floats(0, 15)
        )
    )
)
def test_epochs_only_grow_and_belong_to_the_holder(events: list[tuple[str, str, float]]) -> None:
    """Against a plain model: who renewed or claimed last, and when."""
    book, now = LeaseManager(TTL, now=0.0), 0.0
    holder, since, epochs = "", 0.0, [0]
    for who, what, later in events:
        now += later
        free = holder in ("", who) or now - since > TTL
        if what == "renew":
            assert book.renew(who, now) == (holder in ("", who))
            holder = holder or who
            since = now if who == holder else since
        elif free:
            book.claim(who, now)
            holder, since = who, now
            if what == "fence":
                epochs.append(book.next_epoch(floor=0))
        else:
            with pytest.raises(LeaseError):
                book.claim(who, now)
    assert epochs == sorted(set(epochs))


class _Book(Supervisor):
    """A supervisor without workers and without Ray, driven by one router."""

    def __init__(self) -> None:
        self._lock, self._leases = threading.Lock(), LeaseManager(TTL, time.monotonic())
        self._leases.claim("actor@7/driving", time.monotonic())


def test_the_lease_is_renewed_while_a_claim_waits_for_the_head_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    book, called = _Book(), []

    def silent_head(*_: str) -> bool:
        renewing = threading.Thread(
            target=lambda: called.append(book.renew("actor@7/driving")), daemon=True
        )
        renewing.start()
        renewing.join(10)  # seconds, if the lock is held; else it ends at once
        return False

    monkeypatch.setattr(supervisor_module, "must_yield", silent_head)
    with pytest.raises(LeaseError, match="driven by actor@7/driving"):
        book.claim("actor@7/other")
    assert called == [True]


def test_claims_and_renewals_have_threads_of_their_own() -> None:
    """Two claims that wait for the head node would otherwise occupy both threads of the lease."""
    groups = {
        name: getattr(Supervisor, name).__ray_concurrency_group__
        for name in ("claim", "renew", "heartbeat")
    }
    assert groups["claim"] not in (groups["renew"], groups["heartbeat"])


# ---- with Ray

ARGS = tiny_args(n_layers=2, window=24)
PROMPTS = [random_ids(n, seed=n) for n in (3, 40, 100)]


@pytest.fixture(scope="module")
def _ray() -> Iterator[None]:
    with small_cluster(num_cpus=4):
        yield


@pytest.fixture
def spec(_ray: None, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[PipelineSpec]:
    folder = write_checkpoint(tmp_path / "model", ARGS, random_model(ARGS))
    spec = PipelineSpec(
        f"lease-{abs(hash(request.node.name))}", tiny_plan(ARGS, 2), folder, 1, use_gpus=False
    )
    yield spec
    remove_pipeline(spec.name)
    for name in actor_names(rf"{spec.name}-\d+-supervisor"):  # of a test that failed
        shut_down_pipeline(name.removesuffix(SUPERVISOR_SUFFIX))


def _health(spec: PipelineSpec) -> list[StageHealth]:
    stages = [ray.get_actor(spec.stage_name(i), NAMESPACE) for i in range(2)]
    return ray.get([stage.health.remote() for stage in stages])


@pytest.mark.ray
def test_of_two_routers_only_the_last_that_was_fenced_gets_steps_through(
    spec: PipelineSpec,
) -> None:
    """The first believes in its lease until stages refuse its steps; then the supervisor does not
    let it fence them again.
    """
    supervisor = create_supervisor(spec)
    with running_chain(spec) as first:
        asyncio.run(run_prompts(first, scheduler_for(spec.plan), PROMPTS))
        old = [health.epoch for health in _health(spec)]

        async def usurped() -> None:
            def usurp(result: StepResult) -> None:
                if result.step_id == 3:  # in the middle of its work, another one takes over
                    for stage in range(2):
                        handle = ray.get_actor(spec.stage_name(stage), NAMESPACE)
                        ray.get(handle.fence.remote(result.epoch + 1, "another"))
                    # the next one reads in the stages whose they are
                    ray.kill(supervisor, no_restart=False)

            await run_prompts(first, scheduler_for(spec.plan), PROMPTS, observe=usurp)

        with pytest.raises(PipelineError, match="driven by"):
            asyncio.run(usurped())
        assert all(health.holder == "another" for health in _health(spec))
        assert min(health.epoch for health in _health(spec)) > max(old)
        with pytest.raises(LeaseError, match="driven by"):
            asyncio.run(_claim(supervisor, "third/party"))


async def _claim(supervisor: object, holder: str) -> None:
    try:
        await supervisor.claim.remote(holder)  # type: ignore[attr-defined]
    except LeaseError as error:
        raise LeaseError(str(error)) from None


@pytest.mark.ray
def test_a_pipeline_that_is_driven_is_not_touched(spec: PipelineSpec) -> None:
    with running_chain(spec) as chain:
        before = _health(spec)

        async def intrude() -> None:
            async with running_pipeline(spec, holder="no such/actor"):
                raise AssertionError("two routers drive one pipeline")

        with pytest.raises(LeaseError, match="driven by driver"):
            asyncio.run(intrude())
        assert _health(spec) == before
        assert asyncio.run(run_prompts(chain, scheduler_for(spec.plan), PROMPTS, GREEDY))


class Contender:
    """As a Router replica: it adopts any pipeline that no router drives, or creates one."""

    def __init__(self) -> None:
        self._exit = AsyncExitStack()

    async def start(self, spec: PipelineSpec, is_full: bool = False) -> PipelineSpec:
        """``is_full``: the cluster has nothing left with which a pipeline could be planned."""

        def new_spec() -> PipelineSpec:
            if is_full:
                raise PlanError("no room")
            return spec

        self._spec, self._chain = await self._exit.enter_async_context(
            adopt_or_create_pipeline(spec.name, new_spec)
        )
        return self._spec

    async def run(self) -> list[list[int]]:
        self._scheduler = scheduler_for(self._spec.plan)
        return await run_prompts(self._chain, self._scheduler, PROMPTS)

    async def claim_that_of(self, other: PipelineSpec) -> int:
        return await self._chain_of(other).fence()

    async def step_on_that_of(self, other: PipelineSpec) -> StepResult:
        chunk = Chunk(0, 0, (1,), ((0,),), GREEDY, True)
        return await self._chain_of(other).submit(MicroBatch(self._scheduler.epoch, 0, (chunk,)))

    async def stop(self) -> None:
        await self._exit.aclose()

    def _chain_of(self, other: PipelineSpec) -> ObjectStoreStageChain:
        stages = [ray.get_actor(other.stage_name(i), NAMESPACE) for i in range(2)]
        return ObjectStoreStageChain(
            stages, ray.get_actor(other.supervisor_name, NAMESPACE), actor_holder_name()
        )


@contextmanager
def _contenders(names: str) -> Iterator[list["ActorHandle[Any]"]]:
    """Named actors that are ready to start."""
    modules = [sys.modules[__name__], harness]
    for module in modules:
        ray.cloudpickle.register_pickle_by_value(module)  # actors cannot import tests
    try:
        actors = [
            ray.remote(num_cpus=0)(Contender).options(name=f"contender-{name}").remote()
            for name in names
        ]
        ray.get([actor.__ray_ready__.remote() for actor in actors])
    finally:
        for module in modules:
            ray.cloudpickle.unregister_pickle_by_value(module)
    try:
        yield actors
    finally:
        for actor in actors:
            ray.kill(actor)


def _kill(actor: "ActorHandle[Any]", name: str, namespace: str | None = None) -> None:
    """And wait until Ray knows that it is dead, and so that a lease of its is free."""
    ray.kill(actor)
    with suppress(ValueError):
        while True:
            ray.get_actor(name, namespace)
            time.sleep(0.02)


@pytest.mark.ray
def test_of_two_routers_that_start_at_once_one_gets_the_free_pipeline_and_the_other_makes_one(
    spec: PipelineSpec,
) -> None:
    with _contenders("abc") as (first, *both):
        free = ray.get(first.start.remote(spec))
        before = _health(free)
        _kill(first, "contender-a")
        specs = ray.get([contender.start.remote(spec) for contender in both])
        assert sorted(s.name for s in specs) == [free.name, free.name.removesuffix("0") + "1"]
        assert [h.pid for h in _health(free)] == [h.pid for h in before], (
            "it was taken over as it was"
        )
        assert [h.epoch for h in before] == [-1, -1], "no router had run anything"

        one, other = ray.get([contender.run.remote() for contender in both])
        assert one == other, "both work at the same time, and neither disturbs the other"
        held = [_health(s) for s in specs]
        assert [{h.holder for h in stages} for stages in held] == [
            {"actor@0/contender-b"},
            {"actor@0/contender-c"},
        ]

        for intruder, theirs in zip(both, reversed(specs), strict=True):
            with pytest.raises(LeaseError, match="driven by actor@0/contender"):
                ray.get(intruder.claim_that_of.remote(theirs))
            # Both may have been fenced in the same millisecond; then it is the number of the step
            # that gives it away.
            with pytest.raises(PipelineError, match=r"is at epoch|step 0 came where \d+ was due"):
                ray.get(intruder.step_on_that_of.remote(theirs))
        assert [_health(s) for s in specs] == held
        assert ray.get([contender.run.remote() for contender in both]) == [one, other]
        ray.get([contender.stop.remote() for contender in both])
    while any(
        a["name"].startswith(spec.name) for a in ray.util.list_named_actors(all_namespaces=True)
    ):
        time.sleep(0.05)


@pytest.mark.ray
def test_a_free_pipeline_is_adopted_as_it_was_made_also_where_nothing_could_be_planned_any_more(
    spec: PipelineSpec,
) -> None:
    with _contenders("de") as (first, second):
        made = ray.get(first.start.remote(spec))
        _kill(first, "contender-d")
        assert (
            ray.get(second.start.remote(replace(spec, threads_per_stage=7), is_full=True)) == made
        )
        ray.get(second.stop.remote())
    assert not _actors_of(spec)


@pytest.mark.nightly
@pytest.mark.ray
def test_a_router_that_waits_for_room_takes_a_pipeline_that_becomes_free(
    spec: PipelineSpec,
) -> None:
    """The lease of a router that has just fallen is not always free at once. There is no room for
    another pipeline.
    """
    others = placement_group([{"CPU": 1}] * 2)
    ray.get(others.ready())
    with _contenders("fg") as (first, second):
        versioned = replace(spec, name=f"{spec.name}-0123abcd")
        made = ray.get(first.start.remote(versioned))
        starting = second.start.remote(versioned)
        another = f"{made.name.removesuffix('0')}1{SUPERVISOR_SUFFIX}"
        while another not in actor_names(re.escape(another)):
            time.sleep(0.05)
        _kill(first, "contender-f")
        assert ray.get(starting) == made
        assert not actor_names(re.escape(another))
        ray.get(second.stop.remote())
    remove_placement_group(others)
    assert not _actors_of(spec)


@pytest.mark.ray
def test_a_supervisor_that_was_killed_still_knows_who_drives(spec: PipelineSpec) -> None:
    """It reads the lease back from the stages; an impostor is refused before and after."""
    with running_chain(spec) as chain:
        asyncio.run(run_prompts(chain, scheduler_for(spec.plan), PROMPTS))
        holder = _health(spec)[0].holder
        supervisor = ray.get_actor(spec.supervisor_name, NAMESPACE)
        # of no module, so that it can be sent
        pid_of = eval("lambda _actor: __import__('os').getpid()")
        pid = ray.get(supervisor.__ray_call__.remote(pid_of))
        ray.kill(supervisor, no_restart=False)
        while True:
            try:
                if ray.get(supervisor.__ray_call__.remote(pid_of)) != pid:
                    break
            except RayError:
                time.sleep(0.05)
        assert ray.get(supervisor.renew.remote(holder)), "the new life knows the holder"
        with pytest.raises(LeaseError, match="driven by"):
            ray.get(supervisor.claim.remote("no such/actor"))
        epoch = _health(spec)[0].epoch
        assert ray.get(supervisor.fence.remote(holder))[0] > epoch


@pytest.mark.nightly
@pytest.mark.ray
def test_a_router_that_takes_a_pipeline_with_a_stopped_stage_does_not_wait_for_it(
    spec: PipelineSpec,
) -> None:
    async def scenario() -> None:
        async with running_pipeline(spec) as first:
            stopped = (await first.health())[1].pid
            os.kill(stopped, signal.SIGSTOP)
            # as if the first had been killed: its driver is this process
            async with running_pipeline(spec) as second:
                await second.fence()
                assert (await second.health())[1].pid != stopped

    asyncio.run(scenario())


@pytest.mark.ray
def test_a_stopped_supervisor_is_replaced_whether_a_pipeline_is_driven_or_taken(
    spec: PipelineSpec,
) -> None:
    async def scenario() -> None:
        async with running_pipeline(spec) as first:
            stopped = _stop_supervisor(spec)
            assert await first.fence(), "which it would have to answer for"
            stopped.wait()
            stopped = _stop_supervisor(spec)
            async with running_pipeline(spec) as second:
                stopped.wait()
                assert await second.fence()

    asyncio.run(scenario())


def _stop_supervisor(spec: PipelineSpec) -> psutil.Process:
    supervisor = ray.get_actor(spec.supervisor_name, NAMESPACE)
    process = psutil.Process(
        ray.get(supervisor.__ray_call__.remote(eval("lambda _actor: __import__('os').getpid()")))
    )
    process.suspend()
    return process


@pytest.mark.ray
def test_an_abandoned_pipeline_is_removed_by_its_supervisor(
    spec: PipelineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a command was killed on a joined cluster: no router renews, and no application claims
    it.
    """
    monkeypatch.setattr(supervisor_module, "ABANDONED_AFTER_S", 3.0)
    _start_and_leave(spec, monkeypatch)
    while _actors_of(spec):
        time.sleep(0.05)
    with pytest.raises(ValueError, match="Failed to look up"):
        ray.util.get_placement_group(spec.name)


@pytest.mark.ray
def test_a_pipeline_that_no_router_claims_is_removed_although_its_application_is_there(
    spec: PipelineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when Ray Serve has killed a replica that took too long to stop, and wants fewer of them
    now.
    """
    monkeypatch.setattr(supervisor_module, "ABANDONED_AFTER_S", 0.0)
    monkeypatch.setattr(supervisor_module, "UNCLAIMED_AFTER_S", 3.0)
    monkeypatch.setattr(supervisor_module, "may_be_claimed", lambda *_: True)
    _start_and_leave(replace(spec, application=OwnerApplication("some application")), monkeypatch)
    while _actors_of(spec):
        time.sleep(0.05)


def _start_and_leave(spec: PipelineSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor's process gets the module as it is patched here."""
    ray.cloudpickle.register_pickle_by_value(supervisor_module)
    monkeypatch.setattr(supervisor_module, "SUPERVISOR_WATCH_INTERVAL_S", 0.1)
    try:
        supervisor = create_supervisor(spec)
        ray.get(supervisor.claim.remote("driver/that will be gone"))
        started = supervisor.start.remote(60.0)
        while not ray.wait([started], timeout=0.05)[0]:
            ray.get(supervisor.renew.remote("driver/that will be gone"))
        assert len(ray.get(started)) == 2
    finally:
        ray.cloudpickle.unregister_pickle_by_value(supervisor_module)


def _actors_of(spec: PipelineSpec) -> list[str]:
    return actor_names(f"{spec.name}-.*")


@pytest.mark.ray
def test_a_pipeline_that_has_lost_a_stage_for_good_is_not_fenced(spec: PipelineSpec) -> None:
    """Its router would wait forever for steps that no stage computes."""
    with running_chain(spec) as chain:
        asyncio.run(run_prompts(chain, scheduler_for(spec.plan), PROMPTS))
        _kill(ray.get_actor(spec.stage_name(1), NAMESPACE), spec.stage_name(1), NAMESPACE)
        supervisor = ray.get_actor(spec.supervisor_name, NAMESPACE)
        with pytest.raises(PipelineError, match="only 1 of 2 stages are left"):
            ray.get(supervisor.fence.remote(driver_holder_name()))


@pytest.mark.nightly
@pytest.mark.ray
def test_a_stage_that_finds_another_checkpoint_names_its_node(spec: PipelineSpec) -> None:
    wrong = replace(spec, checkpoint_digest=(("config.json", "0" * 64),))
    with (
        pytest.raises(
            CheckpointError,
            match=r"on node [\d.]+ \(.+\): .*config.json differs from the same file",
        ),
        running_chain(wrong),
    ):
        pass
    missing = replace(spec, checkpoint_digest=(("model-00002.safetensors", "0" * 64),))
    with (
        pytest.raises(
            CheckpointError, match=r"on node [\d.]+ \(.+\): .*model-00002.safetensors is missing"
        ),
        running_chain(missing),
    ):
        pass
