"""Experts on actors: the tokens are the same whichever actor runs an expert, also if actors die."""

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from harness import PROMPTS, run_in_process, run_prompts, scheduler_for
from host_ipc import HostIpc
from lazy_groups import HERE, LAZY, THERE, BetweenPlaces
from local_expert_actors import (
    ExpertActors,
    PingPongChain,
    expert_plan,
    ping_pong_chain,
    wait_until,
)
from tiny_models import groups_of, random_model, split_model, tiny_args, tiny_plan, write_checkpoint

from tramontane.proto.errors import ExpertRelocatedError, PipelineError, StaleEpochError
from tramontane.proto.model_folder import RandomWeights
from tramontane.proto.plan import ExpertId, ExpertPlan, PipelinePlan
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import Chunk, ExpertTiming, ExpertUsage, MicroBatch
from tramontane.router.scheduling.policy import FixedInFlightPolicy
from tramontane.workers.experts.expert_worker import ExpertCall, ExpertWorker
from tramontane.workers.experts.remote_experts import RemoteExperts
from tramontane.workers.links.channel import ChannelFactory
from tramontane.workers.links.gpu_channel import ChannelOptions, DeviceLocation, GpuChannelFactory
from tramontane.workers.links.process_group_channel import ProcessGroupChannelFactory
from tramontane.workers.stage.ping_pong_executor import PingPongExecutor
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.stage.step_record import PendingStep

ARGS = tiny_args(n_layers=4)
SHORT = [prompt for prompt in PROMPTS if len(prompt) <= 130]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), ARGS, random_model(ARGS))


@cache
def _inside() -> list[list[int]]:
    plan = tiny_plan(ARGS)
    return run_in_process(plan, split_model(random_model(ARGS), plan), SHORT)


@pytest.mark.parametrize(
    ("num_stages", "num_actors", "replicas", "max_open"),
    [
        (1, 1, 1, 1),
        (1, 2, 1, 2),
        (2, 4, 1, 2),
        (4, 8, 1, 3),
        (4, 2, 2, 2),
        (2, 4, 2, 4),
        (1, 8, 4, 2),
    ],
)
def test_same_tokens(
    folder: Path, num_stages: int, num_actors: int, replicas: int, max_open: int
) -> None:
    plan = tiny_plan(ARGS, num_stages)
    actors = ExpertActors(expert_plan(ARGS, num_actors, replicas), folder)
    with ping_pong_chain(plan, folder, actors, max_open) as chain:
        scheduler = scheduler_for(plan, 64, FixedInFlightPolicy(4 * num_stages, 64))
        assert asyncio.run(run_prompts(chain, scheduler, SHORT)) == _inside()
        given = [
            sum(tokens)
            for stage in chain.stages
            for tokens in stage.worker.model.expert_load.values()
        ]
    assert given == [given[0]] * ARGS.n_layers, "every token passes every layer"
    assert sum(worker.num_rows for worker in actors.workers) == sum(given)
    assert all((worker.busy_s > 0) == (worker.num_rows > 0) for worker in actors.workers)


GROUPS = ProcessGroupChannelFactory("gloo")
ON_ONE_GPU = GpuChannelFactory(
    ChannelOptions(DeviceLocation("this boot", "GPU-1"), torch.device("cpu"), HostIpc(), GROUPS)
)


@pytest.mark.parametrize(
    "edges",
    [GROUPS, ON_ONE_GPU, BetweenPlaces(HERE, THERE, LAZY)],
    ids=["groups", "one GPU", "two GPUs"],
)
def test_same_tokens_over_the_edges_of_gpus(folder: Path, edges: ChannelFactory) -> None:
    """With gloo in NCCL's place, and memory of the host in that of a GPU's."""
    plan, actors = tiny_plan(ARGS, 2), ExpertActors(expert_plan(ARGS, 2), folder, edges)
    with ping_pong_chain(plan, folder, actors) as chain:
        assert _generate(chain, plan, SHORT[:8]) == _inside()[:8]


def test_a_stale_fence_disturbs_nothing(folder: Path) -> None:
    plan, actors = tiny_plan(ARGS), ExpertActors(expert_plan(ARGS, 2), folder)
    with ping_pong_chain(plan, folder, actors) as chain:
        epoch = asyncio.run(chain.fence())
        gate = threading.Event()
        actors.before_call[0] = lambda _: gate.wait()
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(chain._run, _prompt_batch(epoch))
            wait_until(lambda: len(chain.stages[0]._open) == 1)
            with pytest.raises(StaleEpochError, match="cannot go back"):
                chain.stages[0].fence(epoch)
            gate.set()
            assert len(waiting.result().token_ids) == 1
        assert len(chain._run(_prompt_batch(epoch, 1, 1)).token_ids) == 1


def test_a_fence_fails_where_experts_are_lost_for_good(folder: Path) -> None:
    """So that the router gets one error for the pipeline, rather than one for every request."""
    plan, actors = tiny_plan(ARGS), ExpertActors(expert_plan(ARGS, 2), folder)
    with ping_pong_chain(plan, folder, actors) as chain:
        asyncio.run(chain.fence())
        actors.failure = "the disk is gone"
        actors.kill(1)
        wait_until(lambda: chain.experts[0].failure((1,)) is not None)
        with pytest.raises(PipelineError, match="the disk is gone"):
            asyncio.run(chain.fence())


def test_an_expert_that_has_moved_is_found_by_the_plan(folder: Path) -> None:
    """Its old actor has forgotten it, and the plan is only recorded a little later."""
    first = expert_plan(ARGS, 2)
    actors = ExpertActors(first, folder)
    moved = first.with_assignment([actor.experts for actor in reversed(first.actors)])
    requested: list[ExpertPlan] = []

    def current_plan() -> ExpertPlan:
        requested.append(first if len(requested) < 3 else moved)
        return requested[-1]

    for worker, actor in zip(actors.workers, moved.actors, strict=True):
        worker.load_experts(actor.experts)
        worker.unload_experts(actor.experts)
        assert worker.num_bytes == actor.weight_bytes
        assert (worker.busy_s, worker.num_rows) == (0.0, 0)
    experts = RemoteExperts(first, actors.connect, current_plan)
    wait_until(lambda: experts.is_any_up((0,)) and experts.is_any_up((1,)))
    rows = torch.randn(9, ARGS.dim)
    answer = experts.dispatch(2, rows, groups_of([2, 3, 0, 4]))
    wait_until(answer.poll)
    assert requested[-1] == moved
    with torch.inference_mode():
        inside = StageWorker.load(tiny_plan(ARGS).stages[0], folder).model.experts
        assert torch.equal(answer.result(), inside(2, rows, groups_of([2, 3, 0, 4])))
    experts.close()


def _generate(
    chain: PingPongChain, plan: PipelinePlan, prompts: list[list[int]]
) -> list[list[int]]:
    return asyncio.run(
        run_prompts(chain, scheduler_for(plan, 64, FixedInFlightPolicy(4, 64)), prompts)
    )


def _dies_at(
    actors: ExpertActors, actor_id: int, number: int, then: Callable[[], None] = lambda: None
) -> None:
    """Actor dies when it has been given its call of that number, and before it answers."""
    calls = itertools.count()

    def die(_: object) -> None:
        if next(calls) == number:
            actors.kill(actor_id)
            then()

    actors.before_call[actor_id] = die


def test_a_worker_runs_all_that_it_has_loaded_and_nothing_else() -> None:
    worker = ExpertWorker(expert_plan(ARGS, 1), RandomWeights())
    worker.load_experts([ExpertId(1, 0), ExpertId(1, 2)])
    rows_CD = torch.ones(3, ARGS.dim)
    assert worker.run(ExpertCall(1, (0, 2), (1, 2)), rows_CD).rows_CD.shape == rows_CD.shape
    assert worker.run(ExpertCall(1, (2,), (3,)), rows_CD).rows_CD.shape == rows_CD.shape
    with pytest.raises(ExpertRelocatedError, match=r"not all of experts \(1, 2\) of layer 1"):
        worker.run(ExpertCall(1, (1, 2), (1, 2)), rows_CD)


def test_a_replica_takes_over_at_once(folder: Path) -> None:
    """The actor is not revived: its calls, and all that follow, go to the other."""
    plan, actors = tiny_plan(ARGS, 2), ExpertActors(expert_plan(ARGS, 2, 2), folder)
    _dies_at(actors, 0, 9)
    with ping_pong_chain(plan, folder, actors) as chain:
        assert _generate(chain, plan, SHORT) == _inside()
        assert _generate(chain, plan, SHORT[:3]) == _inside()[:3]


def test_without_a_replica_calls_wait_until_the_actor_is_back(folder: Path) -> None:
    plan, actors = tiny_plan(ARGS, 2), ExpertActors(expert_plan(ARGS, 2), folder)
    _dies_at(actors, 1, 9, lambda: threading.Timer(0.3, actors.revive, [1]).start())
    _dies_at(actors, 0, 50, lambda: actors.revive(0))
    with ping_pong_chain(plan, folder, actors) as chain:
        assert _generate(chain, plan, SHORT) == _inside()


def test_an_actor_that_is_lost_permanently_fails_the_step_and_a_fence_frees_what_waits(
    folder: Path,
) -> None:
    plan, actors = tiny_plan(ARGS, 1), ExpertActors(expert_plan(ARGS, 2), folder)
    with ping_pong_chain(plan, folder, actors) as chain:
        actors.kill(0)
        with ThreadPoolExecutor(1) as thread:
            epoch = asyncio.run(chain.fence())
            waiting = thread.submit(chain._run, _prompt_batch(epoch))
            wait_until(lambda: len(chain.stages[0]._open) == 1)
            assert asyncio.run(chain.fence()) > epoch
            with pytest.raises(StaleEpochError, match="interrupted"):
                waiting.result()
            actors.failure = "the disk is gone"
            with pytest.raises(PipelineError, match="the disk is gone"):
                chain._run(_prompt_batch(epoch + 1))


def _prompt_batch(epoch: int, step_id: int = 0, seq_id: int = 0) -> MicroBatch:
    sampling = SamplingParams(temperature=0.0)
    return MicroBatch(
        epoch, step_id, (Chunk(seq_id, 0, (1, 2, 3, 4, 5), ((seq_id,),), sampling, True),)
    )


def test_a_layer_is_one_message_per_actor_and_an_experts_rows_stay_together(folder: Path) -> None:
    actors = ExpertActors(expert_plan(ARGS, 2, 2), folder)
    experts = RemoteExperts(actors.plan, actors.connect)
    wait_until(lambda: experts.is_any_up((0,)) and experts.is_any_up((1,)))
    rows = torch.randn(12, ARGS.dim)
    groups = groups_of([5, 0, 4, 3])
    requested = experts.dispatch(1, rows, groups)
    wait_until(requested.poll)
    assert sorted((actor, num_rows) for actor, _, num_rows in requested.usage.actors) == [
        (0, 5),
        (1, 7),
    ]
    assert requested.usage.wait_s > 0
    with torch.inference_mode():
        inside = StageWorker.load(tiny_plan(ARGS).stages[0], folder).model.experts
        assert torch.equal(requested.result(), inside(1, rows, groups))
    experts.close()


def test_the_actor_with_the_fewest_queued_rows_is_called(folder: Path) -> None:
    """5 rows wait at the first actor, the second has done 9: the next one goes there."""
    actors = ExpertActors(expert_plan(ARGS, 2, 2), folder)
    gate = threading.Event()
    actors.before_call[0] = lambda _: gate.wait()
    experts = RemoteExperts(actors.plan, actors.connect)
    wait_until(lambda: experts.is_any_up((0,)) and experts.is_any_up((1,)))
    slow = experts.dispatch(0, torch.randn(5, ARGS.dim), groups_of([5, 0, 0, 0]))
    quick = experts.dispatch(0, torch.randn(9, ARGS.dim), groups_of([9, 0, 0, 0]))
    wait_until(quick.poll)
    assert [actor for actor, *_ in quick.usage.actors] == [1]
    assert experts.select_replicas(0, {0: 1})[0] == {1: (0,)}
    gate.set()
    wait_until(slow.poll)
    assert [actor for actor, *_ in slow.usage.actors] == [0]
    experts.close()


class HeldExperts:
    """Experts that answer with what they are given, when a test lets them; knows the requests, in
    order.
    """

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.requested: list[HeldAnswer] = []

    def dispatch(self, layer: int, rows_CD: torch.Tensor, _groups: object) -> "HeldAnswer":
        answer = HeldAnswer(layer, rows_CD)
        with self.condition:
            self.requested.append(answer)
        return answer

    def check(self) -> None:
        """None is lost."""

    def let(self, number: int) -> None:
        with self.condition:
            self.requested[number].is_ready = True
            self.condition.notify_all()


class HeldAnswer:
    usage = ExpertUsage(0.5, (ExpertTiming(7, 0.25, 3), ExpertTiming(8, 0.125, 7)))

    def __init__(self, layer: int, rows_CD: torch.Tensor) -> None:
        self.layer, self._rows_CD, self.is_ready = layer, rows_CD, False

    def poll(self) -> bool:
        return self.is_ready

    def result(self) -> torch.Tensor:
        return self._rows_CD


def test_the_work_of_every_layers_experts_is_counted_once(folder: Path) -> None:
    """However often the step is resumed before they have answered."""
    worker, held = (
        StageWorker.load(replace(tiny_plan(ARGS).stages[0], experts_inside=False), folder),
        HeldExperts(),
    )
    worker.fence(0)

    def resume_to_the_end() -> Iterator[HeldAnswer]:
        ended.append((yield from worker.step_coroutine(_prompt_batch(0), None, held)))  # type: ignore[arg-type, misc]

    ended: list[PendingStep] = []
    with torch.inference_mode():
        for number, answer in enumerate(resume_to_the_end()):
            answer.is_ready = number % 3 == 2  # after two resumptions without an answer
    assert len(held.requested) == ARGS.n_layers
    (timing,) = ended[0].read().timings
    assert timing.expert_wait_s == 0.5 * ARGS.n_layers
    assert timing.experts_busy_s == 0.25 * ARGS.n_layers, "of the busiest actor"
    assert timing.experts == (
        ExpertTiming(7, 0.25 * ARGS.n_layers, 3 * ARGS.n_layers),
        ExpertTiming(8, 0.125 * ARGS.n_layers, 7 * ARGS.n_layers),
    )


def test_no_micro_batch_overtakes_another_and_only_so_many_are_open(folder: Path) -> None:
    """Requested in the order of number, layer: a is released after b, and must still be the first
    in every layer.
    """
    plan = tiny_plan(ARGS)
    worker, held = (
        StageWorker.load(replace(plan.stages[0], experts_inside=False), folder),
        HeldExperts(),
    )
    stage = PingPongExecutor(worker, held, max_open=2, num_threads=1)  # type: ignore[arg-type]
    stage.fence(0)
    ended: list[int] = []
    with ThreadPoolExecutor(3) as threads:
        for step in (2, 0, 1):  # arrive in any order
            threads.submit(
                stage.step,
                _prompt_batch(0, step, step),
                lambda: None,
                lambda _, step=step: ended.append(step),
            )
        for layer in range(4):
            first = 2 * layer
            wait_until(lambda first=first: len(held.requested) == first + 2)
            assert [answer.layer for answer in held.requested[first:]] == [layer, layer]
            with held.condition:
                held.requested[first + 1].is_ready = True
                assert stage._next() is None, "the later one has its answer, but must not overtake"
            held.let(first)
        wait_until(lambda: len(held.requested) == 9)
        assert held.requested[8].layer == 0, "the third began when the first had ended"
        for number in range(8, 12):
            wait_until(lambda number=number: len(held.requested) == number + 1)
            held.let(number)
    assert ended == [0, 1, 2]
    stage.close()


def test_steps_of_another_epoch_are_refused_and_nothing_is_received_for_them(folder: Path) -> None:
    """Also where the epoch ends while hidden states are received: they would be of a step before
    the fence.
    """
    worker, held = (
        StageWorker.load(replace(tiny_plan(ARGS).stages[0], experts_inside=False), folder),
        HeldExperts(),
    )
    stage = PingPongExecutor(worker, held, max_open=2, num_threads=1)  # type: ignore[arg-type]
    stage.fence(3)
    received: list[int] = []

    def receive(next_epoch: int | None = None) -> None:
        received.append(worker.epoch)
        if next_epoch is not None:
            stage.fence(next_epoch)

    for epoch in (2, 4):
        with pytest.raises(StaleEpochError, match="is at epoch 3"):
            stage.step(replace(_prompt_batch(0), epoch=epoch), receive)
        with pytest.raises(StaleEpochError, match="is at epoch 3"):  # without waiting for step 0
            stage.step(replace(_prompt_batch(0, 1, 1), epoch=epoch), receive)
    assert received == []
    with pytest.raises(StaleEpochError, match="is at epoch 5"):
        stage.step(replace(_prompt_batch(0), epoch=3), lambda: receive(5))
    assert (received, held.requested, worker.next_step_id) == ([3], [], 0)
    stage.close()
