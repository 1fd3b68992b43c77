"""Experts on Ray actors of their own: the same tokens, whatever holds them, whatever dies."""

import asyncio
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import ray
from chat_turns import check_turns
from expert_kills import kill_under_load
from harness import GREEDY, PROMPTS, run_prompts, running_chain, scheduler_for
from local_expert_actors import expert_plan, without_experts
from reference import Expected, assert_same_tokens, greedy
from small_cluster import small_cluster
from tiny_models import random_model, tiny_args, tiny_plan, write_checkpoint

from tramontane.cluster.actors.expert_actor import ExpertHealth
from tramontane.cluster.actors.pipeline_spec import PipelineSpec
from tramontane.cluster.actors.stage_actor import StageHealth
from tramontane.cluster.actors.worker_actor import NAMESPACE
from tramontane.cluster.pipeline.stage_chain import (
    ObjectStoreStageChain,
    pipeline_fingerprint,
    weights_name,
)
from tramontane.cluster.planning.expert_planner import replan
from tramontane.proto.plan import ExpertId, Link
from tramontane.workers.stage.stage_worker import StageWorker

if TYPE_CHECKING:
    from ray.actor import ActorHandle

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")]

ARGS = tiny_args(n_layers=4)
CHOSEN = [prompt for prompt in PROMPTS if len(prompt) <= 130]
# two experts of each layer for every token
NUM_CHOICES = 2 * sum(len(prompt) + GREEDY.max_tokens - 1 for prompt in CHOSEN)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), ARGS, random_model(ARGS))


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    with small_cluster(num_cpus=12, metrics_report_interval_ms=1000):
        yield


@cache
def _expected() -> list[Expected]:
    weights = random_model(ARGS).state_dict()
    return [greedy(weights, ARGS, prompt, GREEDY.max_tokens) for prompt in CHOSEN]


@contextmanager
def _pipeline(
    folder: Path, num_stages: int, num_actors: int, replicas: int | None, link: Link
) -> Iterator[tuple[PipelineSpec, ObjectStoreStageChain]]:
    plan = without_experts(tiny_plan(ARGS, num_stages), expert_plan(ARGS, num_actors, replicas))
    name = f"test-{num_stages}-{num_actors}-{replicas}-{link}"
    spec = PipelineSpec(
        name, plan, folder, threads_per_stage=1, use_gpus=False, link=link, expert_micro_batches=2
    )
    with running_chain(spec) as chain:
        yield spec, chain


def _expert(spec: PipelineSpec, actor_id: int) -> "ActorHandle[Any]":
    return ray.get_actor(spec.expert_name(actor_id), NAMESPACE)


# The whole matrix, with replicas and without, is in workers/test_remote_experts.py, where processes
# cost nothing.
CASES: list[tuple[int, int, int, Link]] = [(2, 2, 1, "direct"), (1, 2, 2, "object-store")]
LINKS: tuple[Link, ...] = ("direct", "object-store")
# minutes: --full-products
EVERY = [case for case in product((1, 2, 4), (1, 2, 4, 8), (1, 2), LINKS) if case[2] <= case[1]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_same_tokens:
        cases = EVERY if metafunc.config.getoption("--full-products") else CASES
        metafunc.parametrize(("num_stages", "num_actors", "replicas", "link"), cases)


@pytest.mark.pairwise
def test_same_tokens(
    folder: Path, num_stages: int, num_actors: int, replicas: int, link: Link
) -> None:
    with _pipeline(folder, num_stages, num_actors, replicas, link) as (spec, chain):
        outputs = asyncio.run(run_prompts(chain, scheduler_for(spec.plan, 64), CHOSEN))
        for prompt, output, expected in zip(CHOSEN, outputs, _expected(), strict=True):
            assert_same_tokens(f"prompt of {len(prompt)}", output, expected)
        stages = ray.get([stage.health.remote() for stage in chain.stages])
        experts = ray.get(
            [_expert(spec, actor.actor_id).health.remote() for actor in spec.plan.experts.actors]
        )
        for health, planned in zip(
            [*stages, *experts], [*spec.plan.stages, *spec.plan.experts.actors], strict=True
        ):
            assert health.bytes_read == health.bytes_loaded == planned.weight_bytes
        tokens = {layer: sum(own) for stage in stages for layer, own in stage.expert_load.items()}
        assert tokens == dict.fromkeys(range(ARGS.n_layers), NUM_CHOICES)
        assert sum(actor.num_rows for actor in experts) == ARGS.n_layers * NUM_CHOICES
        assert all(actor.busy_s > 0 for actor in experts)
        _check_exported(spec, stages, experts)


def _check_exported(
    spec: PipelineSpec, stages: list[StageHealth], experts: list[ExpertHealth]
) -> None:
    """What was counted is at Ray's own endpoint for Prometheus, under names that say whose it
    is.
    """
    tokens = {
        (str(stage), str(layer), str(expert)): float(number)
        for stage, health in enumerate(stages)
        for layer, own in health.expert_load.items()
        for expert, number in enumerate(own)
        if number
    }
    rows = {(str(actor),): float(health.num_rows) for actor, health in enumerate(experts)}
    busy_s = {(str(actor),): health.busy_s for actor, health in enumerate(experts)}
    while _exported("tramontane_expert_tokens", spec.name, "stage", "layer", "expert") != tokens:
        time.sleep(0.1)
    while _exported("tramontane_expert_rows", spec.name, "actor") != rows:
        time.sleep(0.1)
    while _exported("tramontane_expert_busy_seconds", spec.name, "actor") != pytest.approx(busy_s):
        time.sleep(0.1)


def _exported(name: str, pipeline: str, *tags: str) -> dict[tuple[str, ...], float]:
    """What Ray reports to Prometheus of a counter of this pipeline's, by these tags."""
    port = ray.nodes()[0]["MetricsExportPort"]
    lines = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30).text.splitlines()
    found = {}
    for line in lines:
        if line.startswith(f"ray_{name}_total{{") and f'pipeline="{pipeline}"' in line:
            labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
            found[tuple(labels[tag] for tag in tags)] = float(line.split()[-1])
    return found


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("cc") is None, reason="only kernels in C are batch-invariant")
def test_the_fingerprint_is_that_of_one_stage_with_its_experts(folder: Path) -> None:
    stage = tiny_plan(ARGS).stages[0]
    expected = pipeline_fingerprint(
        weights_name(folder, (), None), [(stage, StageWorker.load(stage, folder).numerics)]
    )
    with _pipeline(folder, 2, 2, 1, "direct") as (_, chain):
        assert asyncio.run(chain.fingerprint()) == expected


# over the direct link: below
@pytest.mark.parametrize(("link", "replicas", "kills"), [("object-store", 2, 1)])
def test_expert_actors_that_are_killed_cost_no_request(
    folder: Path, link: Link, replicas: int, kills: int
) -> None:
    """More of them, and how long requests wait: ``make bench-expert-kills``."""
    prompts = [prompt for prompt in CHOSEN if len(prompt) < 30]
    expected = {tuple(prompt): answer for prompt, answer in zip(CHOSEN, _expected(), strict=True)}
    with _pipeline(folder, 2, 2, replicas, link) as (spec, chain):
        survived = asyncio.run(kill_under_load(spec, chain, prompts, kills))
    for prompt, output in survived.outputs:
        assert_same_tokens(f"prompt of {len(prompt)}", output, expected[prompt])


@pytest.mark.nightly
@pytest.mark.skipif(
    shutil.which("cc") is None, reason="without kernels in C other chunks have other roundings"
)
def test_chats_in_turns_get_the_same_with_and_without_prefix_caching(folder: Path) -> None:
    """Two stages with ping-pong, which call two expert actors for the tokens that are not
    cached.
    """
    with _pipeline(folder, 2, 2, 1, "direct") as (spec, chain):
        check_turns(chain, spec.plan)


@pytest.mark.nightly
def test_experts_move_while_requests_run_and_stay_moved_when_an_actor_dies(folder: Path) -> None:
    """First all tokens of a layer go to its experts 0 and 1, as far as the plan knows; then to the
    others.
    """
    ids = [ExpertId(layer, expert) for layer in range(4) for expert in range(4)]
    biased, otherwise = (
        {each: 100.0 if (each.expert < 2) == low else 1.0 for each in ids} for low in (True, False)
    )
    first = expert_plan(ARGS, 3, None, biased)
    then = replan(first, otherwise)
    prompts = [prompt for prompt in CHOSEN if len(prompt) < 30]
    expected = {tuple(prompt): answer for prompt, answer in zip(CHOSEN, _expected(), strict=True)}
    plan = without_experts(tiny_plan(ARGS, 2), first)
    spec = PipelineSpec(
        "test-moves",
        plan,
        folder,
        threads_per_stage=1,
        use_gpus=False,
        link="direct",
        expert_micro_batches=2,
    )
    with running_chain(spec) as chain:

        def move(number: int) -> None:
            if number == 0:
                supervisor = ray.get_actor(spec.supervisor_name, NAMESPACE)
                assert ray.get(supervisor.move_experts.remote(then)) > 0

        survived = asyncio.run(kill_under_load(spec, chain, prompts, kills=2, on_kill=move))
        for actor in then.actors:
            health = ray.get(_expert(spec, actor.actor_id).health.remote())
            assert health.bytes_loaded == health.weight_bytes == actor.weight_bytes
    for prompt, output in survived.outputs:
        assert_same_tokens(f"prompt of {len(prompt)}", output, expected[prompt])
