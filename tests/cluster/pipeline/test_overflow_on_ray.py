"""On Ray's actors, over both links and with experts outside, a request that overflows ends alone;
16 others keep their bits.
"""

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from exact_values import exact_values
from harness import random_ids, run_answers, running_chain, scheduler_for
from local_expert_actors import expert_plan, without_experts
from overflowing import (
    NUM_NEIGHBORS,
    neighbor_wishes,
    plant_overflow,
    with_trigger,
    without_trigger,
)
from small_cluster import small_cluster
from tiny_models import random_model, tiny_args, tiny_plan, write_checkpoint

from tramontane.cluster.actors.pipeline_spec import PipelineSpec
from tramontane.cluster.pipeline.local_chain import LocalStageChain
from tramontane.proto.plan import Link, PipelinePlan
from tramontane.proto.request import NOT_FINITE_TOKEN, FinishReason, TokenEvent
from tramontane.workers.stage.stage_worker import StageWorker

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.skipif(
        shutil.which("cc") is None,
        reason="batch invariance needs kernels in C, and they a C compiler",
    ),
]
ARGS = replace(tiny_args(n_layers=4, window=24, max_seq_len=256), vocab_size=300)
PROMPTS = [
    without_trigger(random_ids(length, length)) for length in range(3, 3 + 5 * NUM_NEIGHBORS, 5)
]
WISHES = [neighbor_wishes(number) for number in range(NUM_NEIGHBORS)]
PLACE = 7  # of the one that overflows among the others


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    with small_cluster(num_cpus=6):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(
        tmp_path_factory.mktemp("model") / "m", ARGS, plant_overflow(random_model(ARGS))
    )


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[object]:
    """The answers of the neighbors, each alone in one stage."""
    plan = _plan(1)
    chain = LocalStageChain([StageWorker.load(plan.stages[0], folder)])
    try:
        answers = asyncio.run(
            run_answers(chain, scheduler_for(plan), PROMPTS, WISHES, together=False)
        )
    finally:
        chain.close()
    return list(map(exact_values, answers))


def _plan(num_stages: int) -> PipelinePlan:
    return tiny_plan(ARGS, num_stages, dtype="float16", batch_invariant=True)


@pytest.mark.parametrize(
    ("link", "num_stages", "num_actors"),
    [
        pytest.param("object-store", 2, 0, marks=pytest.mark.nightly),
        ("direct", 2, 2),
        pytest.param("direct", 2, 0, marks=pytest.mark.nightly),
        pytest.param("object-store", 2, 2, marks=pytest.mark.nightly),
    ],
)
def test_neighbors_keep_their_bits(
    folder: Path, expected: list[object], link: Link, num_stages: int, num_actors: int
) -> None:
    plan = _plan(num_stages)
    if num_actors:
        plan = without_experts(
            plan, replace(expert_plan(ARGS, num_actors, dtype="float16"), batch_invariant=True)
        )
    name = f"overflow-{link}-{num_stages}-{num_actors}"
    spec = PipelineSpec(name, plan, folder, threads_per_stage=1, use_gpus=False, link=link)
    overflowing = with_trigger(random_ids(30, 77))
    prompts = [*PROMPTS[:PLACE], overflowing, *PROMPTS[PLACE:]]
    wishes = [*WISHES[:PLACE], neighbor_wishes(0), *WISHES[PLACE:]]
    with running_chain(spec) as chain:
        answers = asyncio.run(run_answers(chain, scheduler_for(plan, 64), prompts, wishes))
    assert answers.pop(PLACE).events == (TokenEvent(0, NOT_FINITE_TOKEN, FinishReason.ERROR),)
    assert list(map(exact_values, answers)) == expected
