"""Three raylets, one stage on each: the same tokens, and large hidden states in the object store."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from harness import GREEDY, random_ids, run_prompts, running_chain, scheduler_for
from nodes import three_nodes
from ray.cluster_utils import Cluster
from reference import assert_same_tokens, greedy
from tiny_models import random_model, tiny_args, tiny_plan, write_checkpoint

from tramontane.cluster.actors.pipeline_spec import PipelineSpec
from tramontane.proto import wire
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import Chunk, MicroBatch

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")]

ARGS = tiny_args(n_layers=3, window=24, max_seq_len=2048)
EPOCH = 2**50  # above those that count milliseconds
PROMPTS = [random_ids(n, seed=n) for n in (1, 30, 900, 1500)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with three_nodes() as nodes:
        yield nodes


def test_one_stage_on_each_of_three_nodes(cluster: Cluster, tmp_path: Path) -> None:
    model = random_model(ARGS)
    plan = tiny_plan(ARGS, 3)
    spec = PipelineSpec("three-nodes", plan, write_checkpoint(tmp_path / "model", ARGS, model), 1, use_gpus=False)
    with running_chain(spec) as chain:
        nodes = [ray.get(stage.health.remote()).node_id for stage in chain.stages]
        assert len(set(nodes)) == 3
        scheduler = scheduler_for(plan, budget=2048)
        outputs = asyncio.run(run_prompts(chain, scheduler, PROMPTS))
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            expected = greedy(model.state_dict(), ARGS, prompt, GREEDY.max_tokens, output)
            assert_same_tokens(f"prompt of {len(prompt)}", output, expected)
        _check_object_store(chain.stages, nodes)


def _check_object_store(stages: list[object], nodes: list[str]) -> None:
    """1,024 tokens of 32 floats are 128 KiB: above Ray's default threshold of 100 KiB; 8 tokens are 1 KiB."""
    for stage in stages:
        ray.get(stage.fence.remote(EPOCH, "test"))  # type: ignore[attr-defined]
    large = _first_hop(stages[0], _prompt_batch(step_id=0, seq_id=0, num_tokens=1024))
    small = _first_hop(stages[0], _prompt_batch(step_id=1, seq_id=1, num_tokens=8))
    where = ray.experimental.get_object_locations([large, small])
    assert where[large]["node_ids"] == [nodes[0]], "in the store of the node that made it"
    assert where[large]["object_size"] > 128 * 1024
    assert where[small]["node_ids"] == [], "small hidden states ride inline"


def _first_hop(stage: object, batch: MicroBatch) -> "ray.ObjectRef[object]":
    ref: ray.ObjectRef[object] = stage.step.remote(wire.encode_batch(batch), None)  # type: ignore[attr-defined]
    ray.wait([ref], fetch_local=False)
    return ref


def _prompt_batch(step_id: int, seq_id: int, num_tokens: int) -> MicroBatch:
    pages = tuple(range(3 * seq_id, 3 * seq_id + min(3, -(-num_tokens // 16))))
    chunk = Chunk(seq_id, 0, (5,) * num_tokens, (pages,), SamplingParams(temperature=0.0), False)
    return MicroBatch(EPOCH, step_id, (chunk,))
