"""Models with a shared expert and layers without experts, whose other experts are on actors:
tokens, deaths, and the order.
"""

import asyncio
import itertools
import threading
from pathlib import Path

import pytest
import torch
from harness import PROMPTS, run_in_process, run_prompts, scheduler_for
from local_expert_actors import ExpertActors, PingPongChain, expert_plan, ping_pong_chain
from tiny_models import latent_args, random_model, sparse_args, tiny_plan, write_checkpoint

from tramontane.proto.plan import PipelinePlan
from tramontane.router.scheduling.policy import FixedInFlightPolicy
from tramontane.workers.experts.expert_worker import ExpertCall
from tramontane.workers.stage.stage_worker import StageWorker

KINDS = {
    "softmax": latent_args(n_layers=4),
    "sigmoid": latent_args(n_layers=4, is_sigmoid=True),
    "sparse": sparse_args(),
}
SHORT = [prompt for prompt in PROMPTS if len(prompt) <= 130][:12]
WAIT_S = 30.0  # only where the test fails


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp("model"), KINDS[kind], random_model(KINDS[kind])
    )


@pytest.fixture(scope="module")
def inside(kind: str, folder: Path) -> list[list[int]]:
    plan = tiny_plan(KINDS[kind])
    return run_in_process(plan, [StageWorker.load(plan.stages[0], folder)], SHORT)


def _generate(chain: PingPongChain, plan: PipelinePlan) -> list[list[int]]:
    return asyncio.run(
        run_prompts(chain, scheduler_for(plan, 64, FixedInFlightPolicy(4, 64)), SHORT)
    )


@pytest.mark.parametrize(
    ("num_stages", "num_actors", "replicas"), [(1, 1, 1), (2, 2, 2), (4, 8, 1), (2, 8, 3)]
)
def test_same_tokens(
    kind: str,
    folder: Path,
    inside: list[list[int]],
    num_stages: int,
    num_actors: int,
    replicas: int,
) -> None:
    """Also in a stage whose only layer has no experts."""
    plan = tiny_plan(KINDS[kind], num_stages)
    actors = ExpertActors(expert_plan(KINDS[kind], num_actors, replicas), folder)
    assert all(expert.layer > 0 for actor in actors.plan.actors for expert in actor.experts)
    with ping_pong_chain(plan, folder, actors, 3) as chain:
        assert _generate(chain, plan) == inside
        counted = {
            layer: sum(n)
            for stage in chain.stages
            for layer, n in stage.worker.model.expert_load.items()
        }
    assert counted.keys() == set(KINDS[kind].moe_layers)
    assert sum(worker.num_rows for worker in actors.workers) == sum(counted.values())


def test_same_tokens_when_an_actor_dies_and_a_replica_takes_over(
    kind: str, folder: Path, inside: list[list[int]]
) -> None:
    plan, actors = tiny_plan(KINDS[kind], 2), ExpertActors(expert_plan(KINDS[kind], 2, 2), folder)
    calls = itertools.count()

    def die(_: ExpertCall) -> None:
        if next(calls) == 9:
            actors.kill(0)

    actors.before_call[0] = die
    with ping_pong_chain(plan, folder, actors) as chain:
        assert _generate(chain, plan) == inside
    assert next(calls) > 9


def test_the_shared_expert_is_computed_while_actors_work(
    kind: str, folder: Path, inside: list[list[int]]
) -> None:
    """No actor answers before the stage has computed the shared expert of that layer."""
    plan, actors = tiny_plan(KINDS[kind]), ExpertActors(expert_plan(KINDS[kind], 2), folder)
    has_run = {layer: threading.Event() for layer in KINDS[kind].moe_layers}
    was_first: list[bool] = []

    def wait(call: ExpertCall) -> None:
        was_first.append(has_run[call.layer].wait(WAIT_S if all(was_first) else 0))

    actors.before_call = {0: wait, 1: wait}
    with ping_pong_chain(plan, folder, actors, max_open=1) as chain:
        model = chain.stages[0].worker.model
        for layer, event in has_run.items():
            shared = model.block(layer).shared_experts
            assert shared is not None
            shared.register_forward_hook(lambda *_, event=event: event.set())
            model.block(layer).register_forward_hook(lambda *_, event=event: event.clear())
        assert _generate(chain, plan) == inside
    assert was_first
    assert all(was_first)


def test_the_shared_expert_counts(kind: str, folder: Path, inside: list[list[int]]) -> None:
    plan = tiny_plan(KINDS[kind])
    worker = StageWorker.load(plan.stages[0], folder)
    for layer in KINDS[kind].moe_layers:
        shared = worker.model.block(layer).shared_experts
        assert shared is not None
        shared.register_forward_hook(lambda _module, _inputs, out_TD: torch.zeros_like(out_TD))
    assert run_in_process(plan, [worker], SHORT) != inside
