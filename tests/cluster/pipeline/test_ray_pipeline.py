"""The pipeline over Ray stage actors: same tokens, real overlap, clean ends."""

import asyncio
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from chat_turns import caching_scheduler, check_turns, new_chats, run_turns
from harness import (
    GREEDY,
    PROMPTS,
    random_ids,
    run_answers,
    run_in_process,
    run_prompts,
    running_chain,
    scheduler_for,
)
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import placement_group_table
from reference import Expected, assert_best_experts, assert_same_tokens, greedy
from small_cluster import small_cluster
from stage_overlap import overlap_share
from tiny_models import random_model, tiny_args, tiny_plan, write_checkpoint

from tramontane.cluster.actors.pipeline_spec import PipelineSpec, WorkerSettings
from tramontane.cluster.actors.stage_actor import StageActor, StageHealth, remote_stage_class
from tramontane.cluster.actors.supervisor import wait_until_ready
from tramontane.cluster.actors.worker_actor import NAMESPACE, READY
from tramontane.cluster.pipeline.load_progress import LoadProgress, show_progress
from tramontane.cluster.pipeline.stage_chain import DirectStageChain, ObjectStoreStageChain
from tramontane.proto import wire
from tramontane.proto.errors import CheckpointError, PipelineError
from tramontane.proto.model_folder import Layout, RandomWeights
from tramontane.proto.plan import Link
from tramontane.proto.request import RequestOutput, SamplingParams
from tramontane.proto.step import Chunk, MicroBatch, StageTiming, StepResult
from tramontane.router.engine.router import Router
from tramontane.workers.device.probe import device_name
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.weights.random_checkpoint import write_random_checkpoint

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")]

Running = tuple[PipelineSpec, ObjectStoreStageChain]
ARGS = tiny_args(window=24)
LONG = SamplingParams(max_tokens=200, temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), ARGS, random_model(ARGS))


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    with small_cluster(num_cpus=8):
        yield


@cache
def _expected(index: int, guess: tuple[int, ...]) -> Expected:
    return greedy(_weights(), ARGS, PROMPTS[index], GREEDY.max_tokens, guess)


@cache
def _weights() -> dict[str, torch.Tensor]:
    return random_model(ARGS).state_dict()


def _check_outputs(outputs: list[list[int]], prompts: list[list[int]] = PROMPTS) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_same_tokens(
            f"prompt of {len(prompt)}", output, _expected(PROMPTS.index(prompt), tuple(output))
        )


def _spec(
    folder: Path, num_stages: int, page_size: int = 16, link: Link = "object-store"
) -> PipelineSpec:
    plan = tiny_plan(ARGS, num_stages, page_size)
    return PipelineSpec(
        f"test-{num_stages}-{page_size}",
        plan,
        folder,
        threads_per_stage=1,
        use_gpus=False,
        link=link,
    )


@contextmanager
def _pipeline(
    folder: Path, num_stages: int, page_size: int = 16, link: Link = "object-store"
) -> Iterator[Running]:
    spec = _spec(folder, num_stages, page_size, link)
    with running_chain(spec) as chain:
        yield spec, chain


@pytest.fixture(scope="module")
def pipeline(request: pytest.FixtureRequest, folder: Path) -> Iterator[Running]:
    """For tests that leave it as they find it, if with other processes: (link, number of stages),
    with pages of 8.
    """
    link, num_stages, *_ = request.param
    with _pipeline(folder, num_stages, page_size=8, link=link) as running:
        yield running


def _name(case: object) -> str | None:
    return f"{case[0]}-{case[1]}" if isinstance(case, tuple) else None


both_links = pytest.mark.parametrize(
    "pipeline",
    [("object-store", 2), pytest.param(("direct", 2), marks=pytest.mark.nightly)],
    indirect=True,
    ids=_name,
)
undisturbed = pytest.mark.parametrize(  # by the deaths of other tests
    "pipeline",
    [
        pytest.param(("object-store", 2, "chats"), marks=pytest.mark.nightly),
        ("direct", 2, "chats"),
    ],
    indirect=True,
    ids=_name,
)
direct_link = pytest.mark.parametrize("pipeline", [("direct", 3)], indirect=True, ids=_name)


def _check_tokens(
    spec: PipelineSpec, chain: ObjectStoreStageChain, budget: int, together: bool
) -> None:
    scheduler = scheduler_for(spec.plan, budget)
    prompts = [prompt for prompt in PROMPTS if budget > 7 or len(prompt) <= 130]
    _check_outputs(asyncio.run(run_prompts(chain, scheduler, prompts, together=together)), prompts)


def _check_experts(spec: PipelineSpec, chain: ObjectStoreStageChain) -> None:
    """Of layers in the first, a middle and the last of several stages."""
    with_experts = replace(GREEDY, return_experts=(0, 4, 7))
    weights = random_model(ARGS).state_dict()
    prompts = [prompt for prompt in PROMPTS if len(prompt) <= 49]
    answers: list[RequestOutput] = asyncio.run(
        run_answers(chain, scheduler_for(spec.plan, 20), prompts, with_experts)
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        reported: dict[int, list[list[int]]] = {layer: [] for layer in with_experts.return_experts}
        for _, layer, start, expert_ids in answer.experts:
            assert start == len(reported[layer])
            reported[layer] += map(list, expert_ids)
        assert_best_experts(
            weights, ARGS, prompt + [event.token_id for event in answer.events[:-1]], reported
        )


def _leftovers(name: str) -> list[str]:
    actors = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True)]
    groups = [g["name"] for g in placement_group_table().values() if g["state"] != "REMOVED"]
    return [n for n in actors + groups if n.startswith(name)]


def _wait_until_removed(name: str) -> None:
    """Ray removes actors in its own time; bounded by pytest's timeout, not by a clock here."""
    while _leftovers(name):
        time.sleep(0.05)


def test_same_tokens_on_two_stages_twice_and_nothing_is_left(folder: Path) -> None:
    with _pipeline(folder, 2, page_size=1) as (spec, chain):
        assert set(_leftovers(spec.name)) == {
            spec.name,
            f"{spec.name}-supervisor",
            spec.stage_name(0),
            spec.stage_name(1),
        }
        _check_tokens(spec, chain, 64, True)
        _check_tokens(spec, chain, 7, True)
    _wait_until_removed(spec.name)


def test_same_tokens_and_experts_on_three_stages(folder: Path) -> None:
    with _pipeline(folder, 3, page_size=64) as (spec, chain):
        _check_tokens(spec, chain, 64, True)
        _check_experts(spec, chain)


def test_four_stages_same_tokens_and_overlap(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Must hold: overlapped time over busy time, from the actors' own clocks, is above zero."""
    with _pipeline(folder, 4) as (spec, chain):
        _check_tokens(spec, chain, 4096, False)
        _check_tokens(spec, chain, 64, True)
        timings: list[StageTiming] = []

        def observe(result: StepResult) -> None:
            timings.extend(result.timings)

        sampling = SamplingParams(max_tokens=40, temperature=0.0)
        prompts = [random_ids(20 * i + 1, seed=i) for i in range(8)]
        asyncio.run(
            run_prompts(chain, scheduler_for(spec.plan), prompts, sampling, observe=observe)
        )
        assert {t.stage_id for t in timings} == {0, 1, 2, 3}
        for stage_id in range(4):
            own = [t for t in timings if t.stage_id == stage_id]
            assert len(own) == len(timings) / 4
        share = overlap_share(timings)
        with capsys.disabled():
            print(
                f"\n4 stages, 8 sequences: at least two stages worked during {share:.0%} of the"
                " busy time"
            )
        assert share > 0


def test_a_stage_refuses_steps_until_it_is_fenced_and_steps_of_other_epochs(folder: Path) -> None:
    with _pipeline(folder, 1) as (_, chain):
        (stage,) = chain.stages
        assert ray.get(stage.health.remote()).label == "Stage 1/1 layers 0-7"
        _refused(stage, epoch=0)
        ray.get(stage.fence.remote(5, "test"))
        _accepted(stage, epoch=5)
        _refused(stage, epoch=4)
        _refused(stage, epoch=6)
        with pytest.raises(RayError, match="cannot go back"):
            ray.get(stage.fence.remote(5, "test"))
        pid = ray.get(stage.health.remote()).pid
        ray.kill(stage, no_restart=False)
        _until_reborn(stage, pid)
        ray.get(stage.ready.remote())
        _refused(stage, epoch=5)
        ray.get(stage.fence.remote(6, "test"))
        _accepted(stage, epoch=6)


def test_a_stage_that_cannot_load_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    spec = _spec(tmp_path / "nowhere", 2)
    with (
        pytest.raises(CheckpointError, match=r"could not be started: .*nowhere does not exist"),
        running_chain(spec),
    ):
        pass
    _wait_until_removed(spec.name)


def test_control_calls_overtake_steps(folder: Path) -> None:
    """A step that waits for its input forever must not keep the stage from answering."""
    with _pipeline(folder, 1) as (_, chain):
        (stage,) = chain.stages
        never = ray.remote(num_cpus=0)(_sleep_forever).remote()
        stuck = stage.step.remote(_one_token(0), never)
        assert ray.get(stage.health.options(concurrency_group="control").remote()).epoch == -1
        assert ray.wait([stuck], timeout=0)[0] == []
        ray.cancel(never, force=True)


@pytest.mark.parametrize(
    ("pipeline", "dying"),
    [
        (("object-store", 2), 1),
        pytest.param(("direct", 2), 1, marks=pytest.mark.nightly),
        pytest.param(("direct", 3), 0, marks=pytest.mark.nightly),
        (("direct", 3), 1),
    ],
    indirect=["pipeline"],
    ids=_name,
    scope="module",  # so that they run with others of the same pipeline
)
def test_requests_of_a_dead_stage_only_wait(pipeline: Running, dying: int) -> None:
    """It dies twice, the second time while prompts and answers so far are being computed again, or
    soon after.
    """
    spec, chain = pipeline
    killed_in: set[int] = set()

    def kill_twice(result: StepResult) -> None:
        if result.step_id == 5 and result.epoch not in killed_in and len(killed_in) < 2:
            killed_in.add(result.epoch)
            ray.kill(chain.stages[dying], no_restart=False)

    outputs = asyncio.run(
        run_prompts(chain, scheduler_for(spec.plan, 64), PROMPTS, observe=kill_twice)
    )
    assert len(killed_in) == 2
    _check_outputs(outputs)
    own = ray.get([stage.health.remote() for stage in chain.stages])
    assert [stage.bytes_read for stage in own] == [stage.bytes_loaded for stage in own], (
        "each has read its own once"
    )


@both_links
def test_a_stage_that_stands_still_is_replaced(pipeline: Running) -> None:
    """Its process lives, so that Ray sees nothing wrong."""
    spec, chain = pipeline
    stopped: list[int] = []

    def stop_once(result: StepResult) -> None:
        if result.step_id == 5 and not stopped:
            stopped.append(ray.get(chain.stages[1].health.remote()).pid)
            os.kill(stopped[0], signal.SIGSTOP)

    outputs = asyncio.run(
        run_prompts(
            chain, scheduler_for(spec.plan, 64), PROMPTS, observe=stop_once, step_timeout_s=0.5
        )
    )
    _check_outputs(outputs)
    assert not psutil.pid_exists(stopped[0])


@both_links
def test_a_stage_whose_device_computes_no_more_gets_a_new_process(pipeline: Running) -> None:
    """As after a kernel that has failed: the process lives, answers and obeys, and each of its
    steps fails.
    """

    def break_down(actor: Any) -> None:
        from tramontane.cluster.actors import worker_actor as own_failures

        def fails(*_: object) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        actor._executor.step = fails
        own_failures.device_self_test = lambda device: False

    spec, chain = pipeline
    broken: list[int] = []

    def break_once(result: StepResult) -> None:
        if result.step_id == 5 and not broken:
            broken.append(ray.get(chain.stages[1].health.remote()).pid)
            with suppress(RayActorError):  # a step under way may end the process before its reply
                ray.get(chain.stages[1].__ray_call__.remote(break_down))

    outputs = asyncio.run(
        run_prompts(chain, scheduler_for(spec.plan, 64), PROMPTS, observe=break_once)
    )
    _check_outputs(outputs)
    assert ray.get(chain.stages[1].health.remote()).pid not in broken
    assert not psutil.pid_exists(broken[0])


# ---- prefix caching


@pytest.mark.skipif(
    shutil.which("cc") is None, reason="without kernels in C other chunks have other roundings"
)
@undisturbed
def test_chats_in_turns_get_the_same_with_and_without_prefix_caching(pipeline: Running) -> None:
    """Their first turn is three windows long."""
    spec, chain = pipeline
    check_turns(chain, spec.plan)


@pytest.mark.skipif(
    shutil.which("cc") is None, reason="without kernels in C other chunks have other roundings"
)
@undisturbed
def test_cached_prefixes_are_lost_with_a_stage(pipeline: Running) -> None:
    """It dies before turn 2 and in the middle of turn 3; the turns after each find what was
    computed since.
    """
    spec, chain = pipeline
    without = asyncio.run(
        run_turns(chain, caching_scheduler(spec.plan, enable_prefix_caching=False), new_chats(1), 5)
    )
    scheduler, num_hit = caching_scheduler(spec.plan), list[int]()  # before each turn
    num_left = 0  # micro-batches until it dies in turn 3

    async def begin(router: Router, turn: int) -> None:
        nonlocal num_left
        num_hit.append(scheduler.allocator.num_hit)
        if turn == 2:
            epoch = scheduler.epoch
            ray.kill(chain.stages[1], no_restart=False)
            router.request_recovery(PipelineError("a stage has died"))
            while scheduler.epoch == epoch or not router.is_ready:
                await asyncio.sleep(0.01)
            assert sum(scheduler.allocator.num_cached) == 0
        num_left = 4 if turn == 3 else 0

    def kill(_result: StepResult) -> None:
        nonlocal num_left
        num_left -= 1
        if num_left == 0:
            ray.kill(chain.stages[0], no_restart=False)

    turns = asyncio.run(run_turns(chain, scheduler, new_chats(1), 5, begin, kill))
    assert [turn.answer for (turn,) in turns] == [turn.answer for (turn,) in without]
    hits = [after - before for before, after in pairwise([*num_hit, scheduler.allocator.num_hit])]
    assert [hits[0], hits[2]] == [0, 0]
    assert all(
        hits[turn] == turns[turn][0].num_cached >= turns[turn][0].num_known - 8
        for turn in (1, 3, 4)
    )


# ---- the direct link


@direct_link
def test_same_tokens_over_the_direct_link_which_a_stale_step_does_not_disturb(
    pipeline: Running,
) -> None:
    spec, chain = pipeline
    assert isinstance(chain, DirectStageChain)
    _check_experts(spec, chain)
    _check_tokens(spec, chain, 7, True)

    def intrude(result: StepResult) -> None:
        if result.step_id == 3:
            for stage in chain.stages:
                with pytest.raises(RayError, match="is at epoch"):
                    ray.get(stage.linked_step.remote(_one_token(result.epoch - 1)))
                ray.get(stage.interrupt.options(concurrency_group="control").remote(result.epoch))
                with pytest.raises(RayError, match="not linked for epoch"):
                    ray.get(stage.listen.remote(result.epoch - 1))

    _check_outputs(
        asyncio.run(run_prompts(chain, scheduler_for(spec.plan, 64), PROMPTS, observe=intrude))
    )


@direct_link
def test_what_waits_over_the_direct_link_ends_with_a_failed_step_and_with_a_fence(
    pipeline: Running,
) -> None:
    spec, chain = pipeline
    failed: list[int] = []

    def disturb(result: StepResult) -> None:
        if result.step_id == 3 and not failed:
            failed.append(result.epoch)
            wrong = replace(wire.decode_batch(_one_token(result.epoch)), step_id=1000)
            chain.stages[1].linked_step.remote(wire.encode_batch(wrong))

    _check_outputs(
        asyncio.run(run_prompts(chain, scheduler_for(spec.plan, 64), PROMPTS, observe=disturb))
    )
    assert len(failed) == 1
    epoch = asyncio.run(chain.fence())
    waiting = [stage.linked_step.remote(_one_token(epoch)) for stage in chain.stages[1:]]
    assert asyncio.run(chain.fence()) > epoch
    for ref in waiting:
        with pytest.raises(RayError, match=r"the link .* is (closed|broken)"):
            ray.get(ref)
    _check_tokens(spec, chain, 64, True)


@direct_link
def test_channels_are_between_nodes_own_addresses_and_leave_nothing_open(pipeline: Running) -> None:
    _, chain = pipeline
    stages = [psutil.Process(ray.get(stage.health.remote()).pid) for stage in chain.stages]

    def opened(status: str) -> set[tuple[tuple[str, int], tuple[str, int]]]:
        sockets = [
            s for stage in stages for s in stage.net_connections("tcp") if s.status == status
        ]
        return {(tuple(s.laddr), tuple(s.raddr)) for s in sockets}

    def channels() -> set[tuple[tuple[str, int], tuple[str, int]]]:
        """Connections of which both ends are stages."""
        connected = opened(psutil.CONN_ESTABLISHED)
        return {(here, there) for here, there in connected if (there, here) in connected}

    listening = opened(psutil.CONN_LISTEN)
    for _ in range(3):
        asyncio.run(chain.fence())
        assert len(channels()) == 2 * (chain.num_stages - 1)
        assert {ip for (ip, _), _ in channels()} == {ray.util.get_node_ip_address()}  # type: ignore[no-untyped-call]
    assert opened(psutil.CONN_LISTEN) <= listening


def test_same_tokens_on_one_stage_which_outlives_its_supervisor(folder: Path) -> None:
    with _pipeline(folder, 1) as (spec, chain):
        _check_tokens(spec, chain, 4096, True)
        supervisor = ray.get_actor(f"{spec.name}-supervisor", NAMESPACE)
        ray.kill(supervisor, no_restart=False)
        _check_tokens(spec, chain, 512, True)
        # it may be restarting when everything is to be removed
        ray.kill(supervisor, no_restart=False)
    _wait_until_removed(spec.name)


def _sleep_forever() -> None:
    time.sleep(3600)


def _one_token(epoch: int) -> bytes:
    chunk = Chunk(0, 0, (1,), ((0,),), SamplingParams(temperature=0.0), True)
    return wire.encode_batch(MicroBatch(epoch, 0, (chunk,)))


def _refused(stage: "ActorHandle[Any]", epoch: int) -> None:
    with pytest.raises(RayError, match="is at epoch"):
        ray.get(stage.step.remote(_one_token(epoch), None))


def _accepted(stage: "ActorHandle[Any]", epoch: int) -> None:
    assert (
        len(wire.decode_result(ray.get(stage.step.remote(_one_token(epoch), None))).token_ids) == 1
    )


def _until_reborn(stage: "ActorHandle[Any]", old_pid: int) -> None:
    while True:
        try:
            if ray.get(stage.health.remote()).pid != old_pid:
                return
        except RayError:
            pass
        time.sleep(0.05)


# ---- while stages load


class _DyingStage(StageActor):
    def _load(self) -> StageWorker:
        os._exit(137)  # as the system's out-of-memory killer would


class _HeldUpStage(StageActor):
    """After its first tensor it waits for a file named 1 in its folder, after the second for 2, and
    so on, or for ``all``.
    """

    def _load(self) -> StageWorker:
        assert isinstance(self._settings.weights, Path)
        self._folder, self._num_tensors = self._settings.weights, 0
        return super()._load()

    def _on_tensor(self, num_read: int, num_loaded: int) -> None:
        super()._on_tensor(num_read, num_loaded)
        self._num_tensors += 1
        while not any((self._folder / name).exists() for name in (str(self._num_tensors), "all")):
            time.sleep(0.01)


@contextmanager
def _stage(kind: type[StageActor], folder: Path, name: str = "") -> Iterator["ActorHandle[Any]"]:
    """The only stage of a pipeline, which cannot import tests."""
    this_module = sys.modules[__name__]
    ray.cloudpickle.register_pickle_by_value(this_module)
    try:
        actor = remote_stage_class(kind).options(name=name or None, namespace=NAMESPACE)
        stage = actor.remote(tiny_plan(ARGS, 1).stages[0], WorkerSettings(folder, "cpu", threads=1))
    finally:
        ray.cloudpickle.unregister_pickle_by_value(this_module)
    yield stage
    ray.kill(stage)


def _health_once(stage: "ActorHandle[Any]", holds: Callable[[StageHealth], bool]) -> StageHealth:
    """The first answer for which a condition holds."""
    while True:
        with suppress(RayError):  # it is being started again
            health: StageHealth = ray.get(
                stage.health.options(concurrency_group="control").remote()
            )
            if holds(health):
                return health
        time.sleep(0.02)


def test_a_stage_whose_process_dies_while_loading_is_not_retried_forever(tmp_path: Path) -> None:
    with (
        _stage(_DyingStage, tmp_path) as stage,
        pytest.raises(PipelineError, match="died while it was loading"),
    ):
        wait_until_ready({"stage": stage})


def test_a_stage_that_loads_reports_its_progress_and_has_no_epoch(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, ARGS, random_model(ARGS))
    with _stage(_HeldUpStage, folder) as stage:
        first = _health_once(stage, lambda health: health.bytes_loaded > 0)
        assert first.bytes_loaded < first.weight_bytes == tiny_plan(ARGS, 1).stages[0].weight_bytes
        with pytest.raises(RayError, match="Stage 1/1 layers 0-7 is loading and accepts no epoch"):
            ray.get(stage.step.remote(_one_token(5), None))
        fenced = stage.fence.remote(5, "test")
        (folder / "1").touch()
        second = _health_once(stage, lambda health: health.bytes_loaded > first.bytes_loaded)
        assert second.bytes_loaded < second.weight_bytes
        assert (second.epoch, second.device) == (-1, "")
        assert ray.wait([fenced], timeout=0)[0] == [], "it waits for the weights"
        (folder / "all").touch()
        ray.get(fenced)
        _accepted(stage, epoch=5)
        whole = ray.get(stage.health.remote())
        assert whole.bytes_read == whole.bytes_loaded == whole.weight_bytes, (
            "all are stored as they are used"
        )
        assert whole.device == device_name("cpu")


def test_a_stage_that_is_started_again_loads_without_a_call(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, ARGS, random_model(ARGS))
    (folder / "all").touch()
    with _stage(_HeldUpStage, folder) as stage:
        ray.get(stage.ready.remote())
        pid = ray.get(stage.health.remote()).pid
        ray.kill(stage, no_restart=False)
        reborn = _health_once(
            stage, lambda health: health.pid != pid and health.bytes_loaded == health.weight_bytes
        )
        assert reborn.bytes_read == reborn.weight_bytes


def test_a_stage_that_cannot_load_is_reported_while_another_still_loads(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, ARGS, random_model(ARGS))
    with (
        _stage(_HeldUpStage, folder) as slow,
        _stage(StageActor, tmp_path / "nowhere") as broken,
        pytest.raises(CheckpointError, match="nowhere does not exist"),
    ):
        wait_until_ready({"slow": slow, "broken": broken})


def test_loading_progress_is_reported_to_all_that_wait(tmp_path: Path) -> None:
    """Also of a stage that is not there yet."""
    folder = write_checkpoint(tmp_path, ARGS, random_model(ARGS))
    plan = tiny_plan(ARGS, 2)
    shown: list[list[LoadProgress]] = []

    def wait_for(num_bytes: int) -> list[LoadProgress]:
        while not shown or shown[-1][0].num_bytes <= num_bytes:
            time.sleep(0.01)
        return shown[-1]

    with (
        _stage(_HeldUpStage, folder, "watched-stage-0"),
        show_progress("watched", plan, lambda stages: shown.append([*stages])),
    ):
        first, absent = wait_for(0)
        assert (first.label, first.total_bytes) == (
            plan.stages[0].label,
            plan.stages[0].weight_bytes,
        )
        assert absent == LoadProgress(plan.stages[1].label, 0, plan.stages[1].weight_bytes)
        (folder / "1").touch()
        wait_for(first.num_bytes)
        (folder / "all").touch()
        while shown[-1][0].activity != READY:
            time.sleep(0.01)
    assert [stages[0].num_bytes for stages in shown] == sorted(
        stages[0].num_bytes for stages in shown
    )
    assert not any(thread.name == "loading" for thread in threading.enumerate()), "no poll is left"


def test_random_weights_are_those_of_a_random_checkpoint_and_nothing_is_read(
    tmp_path: Path,
) -> None:
    write_random_checkpoint(tmp_path / "model", ARGS, Layout.HUGGING_FACE)
    plan = tiny_plan(ARGS, 2)
    expected = run_in_process(
        plan, [StageWorker.load(stage, tmp_path / "model") for stage in plan.stages], PROMPTS[:4]
    )
    with running_chain(
        PipelineSpec("test-random", plan, RandomWeights(), threads_per_stage=1, use_gpus=False)
    ) as chain:
        assert asyncio.run(run_prompts(chain, scheduler_for(plan), PROMPTS[:4])) == expected
        for health in ray.get([stage.health.remote() for stage in chain.stages]):
            assert health.bytes_read == 0
            assert health.bytes_loaded == health.weight_bytes


def test_threads_of_stages_that_take_turns_soon_sleep() -> None:
    plan = replace(tiny_plan(ARGS, 2), max_concurrent_stages=1)
    with running_chain(
        PipelineSpec("test-turns", plan, RandomWeights(), threads_per_stage=2, use_gpus=False)
    ) as chain:
        for health in ray.get([stage.health.remote() for stage in chain.stages]):
            assert b"GOMP_SPINCOUNT=50000" in Path(
                f"/proc/{health.pid}/environ"
            ).read_bytes().split(b"\0")
