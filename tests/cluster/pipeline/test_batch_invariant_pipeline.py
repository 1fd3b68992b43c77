"""On Ray's actors answers have the same bits, too: both links, any number of stages, with experts
outside, and after deaths.
"""

import asyncio
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import ray
from exact_values import SAMPLING, Values, exact_values
from harness import random_ids, run_answers, running_chain, scheduler_for
from local_expert_actors import expert_plan, without_experts
from small_cluster import small_cluster
from tiny_models import (
    latent_args,
    random_model,
    sparse_args,
    tiny_args,
    tiny_plan,
    write_checkpoint,
)

from tramontane.cluster.actors.pipeline_spec import PipelineSpec
from tramontane.cluster.pipeline.local_chain import LocalStageChain
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.plan import Link
from tramontane.proto.step import StepResult
from tramontane.workers.stage.stage_worker import StageWorker

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.skipif(
        shutil.which("cc") is None,
        reason="batch invariance needs kernels in C, and they a C compiler",
    ),
]
# 1 KiB for each token's hidden state: a chunk of 160 tokens is more than the 100 KiB that Ray sends
# without its object store.
MODELS = {
    "mixtral": replace(tiny_args(n_layers=4, window=24, max_seq_len=400), dim=512, vocab_size=300),
    "latent": replace(latent_args(n_layers=4, max_seq_len=400), dim=512, vocab_size=300),
    "sparse": replace(sparse_args(max_seq_len=400), dim=512, vocab_size=300),
}
PROMPTS = [random_ids(length, seed) for seed, length in enumerate((1, 17, 300, 40, 2, 90))]


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    with small_cluster(num_cpus=6):
        yield


@dataclass(frozen=True)
class Model:
    args: ModelArgs
    folder: Path
    # of prompts that have a stage in this process for themselves, one after the other
    expected: list[Values]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    @cache
    def make(kind: str) -> Model:
        args = MODELS[kind]
        folder = write_checkpoint(tmp_path_factory.mktemp("model"), args, random_model(args))
        plan = tiny_plan(args, dtype="bfloat16", batch_invariant=True)
        chain = LocalStageChain([StageWorker.load(plan.stages[0], folder)])
        try:
            answers = asyncio.run(
                run_answers(chain, scheduler_for(plan), PROMPTS, SAMPLING, together=False)
            )
        finally:
            chain.close()
        return Model(args, folder, list(map(exact_values, answers)))

    return make


@pytest.mark.parametrize(
    ("kind", "link", "num_stages", "num_actors", "deaths"),
    [
        pytest.param("mixtral", "object-store", 2, 0, 1, marks=pytest.mark.nightly),
        pytest.param("mixtral", "direct", 4, 0, 1, marks=pytest.mark.nightly),
        pytest.param("mixtral", "object-store", 2, 3, 0, marks=pytest.mark.nightly),
        ("mixtral", "direct", 2, 2, 1),
        ("latent", "object-store", 3, 0, 1),
        pytest.param("latent", "direct", 2, 2, 1, marks=pytest.mark.nightly),
        pytest.param("sparse", "direct", 4, 0, 1, marks=pytest.mark.nightly),
        pytest.param("sparse", "object-store", 2, 2, 1, marks=pytest.mark.nightly),
    ],
)
def test_the_same_bits(
    models: Callable[[str], Model],
    kind: str,
    link: Link,
    num_stages: int,
    num_actors: int,
    deaths: int,
) -> None:
    model = models(kind)
    plan = tiny_plan(model.args, num_stages, dtype="bfloat16", batch_invariant=True)
    if num_actors:
        experts = replace(
            expert_plan(model.args, num_actors, dtype="bfloat16"), batch_invariant=True
        )
        plan = without_experts(plan, experts)
    name = f"exact-{kind}-{link}-{num_stages}-{num_actors}"
    spec = PipelineSpec(name, plan, model.folder, threads_per_stage=1, use_gpus=False, link=link)
    killed: list[int] = []
    with running_chain(spec) as chain:

        def kill(result: StepResult) -> None:
            if len(killed) < deaths and result.step_id == 7:
                killed.append(result.epoch)
                ray.kill(chain.stages[-1], no_restart=False)

        answers = asyncio.run(
            run_answers(chain, scheduler_for(plan, 200), PROMPTS, SAMPLING, observe=kill)
        )
    assert len(killed) == deaths
    assert list(map(exact_values, answers)) == model.expected
