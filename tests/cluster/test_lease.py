"""One router at a time: the book alone, then supervisors, stages and two routers that both believe."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from harness import GREEDY, placed, random_ids, run_prompts, scheduler_for
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import RayError
from tiny import random_model, tiny_args, tiny_plan, write_checkpoint

from tramontane.cluster import supervisor as supervisor_module
from tramontane.cluster.actors import NAMESPACE, StageHealth, actor_names
from tramontane.cluster.lease import Lease, LeaseBook
from tramontane.cluster.pipeline import running_pipeline
from tramontane.cluster.supervisor import Application, PipelineSpec, create_supervisor, driver_as_holder, remove_pipeline
from tramontane.proto.errors import CheckpointError, LeaseError, PipelineError
from tramontane.proto.step import StepResult

TTL = 10.0


def test_the_lease_is_one_holders_until_it_lapses() -> None:
    book = LeaseBook(TTL, now=0.0)
    book.claim("a", now=0.0)
    assert book.next_epoch(floor=1000) == 1001
    with pytest.raises(LeaseError, match="driven by a"):
        book.claim("b", now=TTL)
    assert book.renew("a", now=9.0)
    with pytest.raises(LeaseError):
        book.claim("b", now=9.0 + TTL)
    book.claim("b", now=9.1 + TTL)
    assert not book.renew("a", now=20.0)
    assert book.next_epoch(floor=0) == 1002, "higher than every epoch before, whatever the clock says"


def test_a_holder_that_is_known_to_be_gone_need_not_lapse() -> None:
    book = LeaseBook(TTL, now=0.0, found=Lease("a", 7))
    book.claim("b", now=0.1, current_is_gone=True)
    assert book.lease == Lease("b", 7)
    assert book.next_epoch(floor=0) == 8


def test_the_holder_may_claim_again() -> None:
    book = LeaseBook(TTL, now=0.0)
    book.claim("a", now=0.0)
    first = book.next_epoch(floor=0)
    book.claim("a", now=1.0)
    assert book.next_epoch(floor=0) > first


def test_a_book_found_in_stages_gives_its_holder_a_full_term() -> None:
    book = LeaseBook(TTL, now=100.0, found=Lease("a", 7))
    with pytest.raises(LeaseError):
        book.claim("b", now=100.0 + TTL)
    book.claim("b", now=100.1 + TTL)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["claim", "renew", "fence"]), st.floats(0, 15))))
def test_epochs_only_grow_and_belong_to_whoever_may_drive(events: list[tuple[str, str, float]]) -> None:
    """Against a plain model: who renewed or claimed last, and when."""
    book, now = LeaseBook(TTL, now=0.0), 0.0
    holder, since, epochs = "", 0.0, [0]
    for who, what, later in events:
        now += later
        free = holder in ("", who) or now - since > TTL
        if what == "renew":
            assert book.renew(who, now) == (who == holder)
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


# ---- with Ray

ARGS = tiny_args(n_layers=2, window=24)
PROMPTS = [random_ids(n, seed=n) for n in (3, 40, 100)]


@pytest.fixture(scope="module")
def _ray() -> Iterator[None]:
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=256 * 2**20)
    yield
    ray.shutdown()


@pytest.fixture
def spec(_ray: None, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[PipelineSpec]:
    folder = write_checkpoint(tmp_path / "model", ARGS, random_model(ARGS))
    spec = PipelineSpec(f"lease-{abs(hash(request.node.name))}", tiny_plan(ARGS, 2), folder, 1, use_gpus=False)
    yield spec
    remove_pipeline(spec.name)


def _health(spec: PipelineSpec) -> list[StageHealth]:
    stages = [ray.get_actor(spec.stage_name(i), NAMESPACE) for i in range(2)]
    return ray.get([stage.health.remote() for stage in stages])


@pytest.mark.ray
def test_of_two_routers_only_the_last_that_was_fenced_gets_steps_through(spec: PipelineSpec) -> None:
    """The first believes in its lease to the end; what stops it is the stages."""
    supervisor = create_supervisor(spec)
    with placed(spec) as first:
        asyncio.run(run_prompts(first, scheduler_for(spec.plan), PROMPTS))
        old = [health.epoch for health in _health(spec)]

        async def usurped() -> None:
            def usurp(result: StepResult) -> None:
                if result.step_id == 3:  # in the middle of its work, another one takes over
                    for stage in range(2):
                        handle = ray.get_actor(spec.stage_name(stage), NAMESPACE)
                        ray.get(handle.fence.remote(result.epoch + 1, "another"))

            await run_prompts(first, scheduler_for(spec.plan), PROMPTS, observe=usurp)

        with pytest.raises(PipelineError, match="is at epoch"):
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
    with placed(spec) as chain:
        before = _health(spec)

        async def intrude() -> None:
            async with running_pipeline(spec, holder="no such/actor"):
                raise AssertionError("two routers drive one pipeline")

        with pytest.raises(LeaseError, match="driven by driver"):
            asyncio.run(intrude())
        assert _health(spec) == before
        assert asyncio.run(run_prompts(chain, scheduler_for(spec.plan), PROMPTS, GREEDY))


@pytest.mark.ray
def test_a_supervisor_that_was_killed_still_knows_who_drives(spec: PipelineSpec) -> None:
    """It reads the lease back from the stages; an impostor is refused before and after."""
    with placed(spec) as chain:
        asyncio.run(run_prompts(chain, scheduler_for(spec.plan), PROMPTS))
        holder = _health(spec)[0].holder
        supervisor = ray.get_actor(spec.supervisor_name, NAMESPACE)
        pid_of = eval("lambda _actor: __import__('os').getpid()")  # of no module, so that it can be sent
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
        assert ray.get(supervisor.fence.remote(holder)) > epoch


@pytest.mark.ray
def test_an_abandoned_pipeline_is_removed_by_its_supervisor(spec: PipelineSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a command was killed on a joined cluster: nobody renews, and no application claims it."""
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
    """As when Ray Serve has killed a replica that took too long to stop, and wants fewer of them now."""
    monkeypatch.setattr(supervisor_module, "ABANDONED_AFTER_S", 0.0)
    monkeypatch.setattr(supervisor_module, "UNCLAIMED_AFTER_S", 3.0)
    monkeypatch.setattr(supervisor_module, "_is_claimable", lambda _application: True)
    _start_and_leave(replace(spec, application=Application("some application")), monkeypatch)
    while _actors_of(spec):
        time.sleep(0.05)


def _start_and_leave(spec: PipelineSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor's process gets the module as it is patched here."""
    ray.cloudpickle.register_pickle_by_value(supervisor_module)
    monkeypatch.setattr(supervisor_module, "WATCH_EVERY_S", 0.1)
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
    """Its router would wait for ever for the steps that it submits to nobody."""
    with placed(spec) as chain:
        asyncio.run(run_prompts(chain, scheduler_for(spec.plan), PROMPTS))
        ray.kill(ray.get_actor(spec.stage_name(1), NAMESPACE))
        supervisor = ray.get_actor(spec.supervisor_name, NAMESPACE)
        with pytest.raises(PipelineError, match="only 1 of 2 stages are left"):
            ray.get(supervisor.fence.remote(driver_as_holder()))


@pytest.mark.ray
def test_a_stage_that_finds_another_checkpoint_names_its_node(spec: PipelineSpec) -> None:
    wrong = replace(spec, fingerprint=(("config.json", "0" * 64),))
    with pytest.raises(CheckpointError, match=r"on node [\d.]+ \(.+\): .*config.json differs from the same file"), placed(wrong):
        pass
    missing = replace(spec, fingerprint=(("model-00002.safetensors", "0" * 64),))
    with pytest.raises(CheckpointError, match=r"on node [\d.]+ \(.+\): .*model-00002.safetensors is missing"), placed(missing):
        pass
