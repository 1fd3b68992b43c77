"""Three raylets, one stage on each: the same tokens, and large hidden states in the object
store.
"""

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import ray
from harness import GREEDY, random_ids, run_prompts, running_chain, scheduler_for
from nodes import three_nodes
from ray.cluster_utils import Cluster
from reference import assert_same_tokens, greedy
from tiny_models import random_model, tiny_args, tiny_plan, write_checkpoint

from tramontane.cluster.actors.pipeline_spec import PipelineSpec
from tramontane.cluster.actors.stage_actor import (
    SERIALIZED_OVERHEAD,
    HiddenStateTransfers,
    inline_hidden_states_below,
)
from tramontane.cluster.config.ray_settings import INLINE_LIMIT, RAY_SETTINGS
from tramontane.cluster.ray_internals.accessors import end_of_last_process
from tramontane.proto import wire
from tramontane.proto.plan import Link
from tramontane.proto.request import SamplingParams
from tramontane.proto.step import Chunk, MicroBatch

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")]

DIM = 256  # of float32: 1 KiB per token
ARGS = replace(tiny_args(n_layers=3, window=24, max_seq_len=2048), dim=DIM)
EPOCH = 2**50  # above those that count milliseconds
PROMPTS = [random_ids(n, seed=n) for n in (1, 30, 900, 1500)]
LIMIT = RAY_SETTINGS[INLINE_LIMIT]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with three_nodes() as nodes:
        yield nodes


def test_one_stage_on_each_of_three_nodes(cluster: Cluster, tmp_path: Path) -> None:
    model = random_model(ARGS)
    plan = tiny_plan(ARGS, 3)
    spec = PipelineSpec(
        "three-nodes", plan, write_checkpoint(tmp_path / "model", ARGS, model), 1, use_gpus=False
    )
    outputs = {}
    for link in get_args(Link):
        with running_chain(replace(spec, name=f"three-{link}", link=link)) as chain:
            nodes = [ray.get(stage.health.remote()).node_id for stage in chain.stages]
            assert len(set(nodes)) == 3
            scheduler = scheduler_for(plan, budget=2048)
            outputs[link] = asyncio.run(run_prompts(chain, scheduler, PROMPTS))
            _check_ways(link, chain.stages)
            if link == "object-store":
                _check_object_store(chain.stages, nodes)
    for prompt, output in zip(PROMPTS, outputs["object-store"], strict=True):
        expected = greedy(model.state_dict(), ARGS, prompt, GREEDY.max_tokens, output)
        assert_same_tokens(f"prompt of {len(prompt)}", output, expected)
    assert outputs["direct"] == outputs["object-store"]


def _check_ways(link: str, stages: list[Any]) -> None:
    """Prompts of 2,431 tokens were computed at most 2,048 at a time; decodes are at most 4 KiB."""
    first, second, last = (ray.get(stage.health.remote()).sent for stage in stages)
    assert first == second
    assert last == {}, "its results go to the router"
    assert first.keys() == ({"direct"} if link == "direct" else {"inline", "plasma"})
    hops, num_bytes = map(sum, zip(*first.values(), strict=True))
    assert num_bytes == 1024 * (sum(map(len, PROMPTS)) + len(PROMPTS) * (GREEDY.max_tokens - 1))
    assert hops >= GREEDY.max_tokens
    if link == "object-store":
        assert first["plasma"][1] >= LIMIT


def _check_object_store(stages: list[Any], nodes: list[str]) -> None:
    """2,048 tokens are 2 MiB, above the shipped limit of 1 MiB; 1 token is 1 KiB."""
    for stage in stages:
        ray.get(stage.fence.remote(EPOCH, "test"))
    before = ray.get(stages[0].health.remote()).sent
    large = _first_hop(stages[0], _prompt_batch(step_id=0, seq_id=0, num_tokens=2048))
    small = _first_hop(stages[0], _prompt_batch(step_id=1, seq_id=1, num_tokens=1))
    where = ray.experimental.get_object_locations([large, small])
    assert where[large]["node_ids"] == [nodes[0]], "in the store of the node that made it"
    assert where[large]["object_size"] > 2 * 2**20
    assert where[small]["node_ids"] == [], "small hidden states ride inline"
    after = ray.get(stages[0].health.remote()).sent
    counted = {
        way: tuple(new - old for new, old in zip(after[way], before[way], strict=True))
        for way in after
    }
    assert counted == {"plasma": (1, 2 * 2**20), "inline": (1, 2**10)}


@ray.remote
class _Sender:
    """Counts as a stage does, from what it reads of the cluster."""

    def __init__(self) -> None:
        self.limit = inline_hidden_states_below()

    def read_limit(self) -> int:
        return self.limit

    def send(self, num_bytes: int) -> Any:  # Packed
        return bytes(300), np.zeros(num_bytes, dtype=np.uint8)


@pytest.mark.nightly
@pytest.mark.parametrize("over", [-40, -10, 10, 40])
def test_the_count_follows_ray_s_own_choice(cluster: Cluster, over: int) -> None:
    """Near the limit, to some bytes."""
    sender = _Sender.options(num_cpus=0).remote()
    assert ray.get(sender.read_limit.remote()) == LIMIT
    size = LIMIT - 300 - SERIALIZED_OVERHEAD + over
    ref = sender.send.remote(size)
    ray.wait([ref], fetch_local=False)
    sent = HiddenStateTransfers(LIMIT)
    sent.add_result(ray.get(ref))
    is_stored = bool(ray.experimental.get_object_locations([ref])[ref]["node_ids"])
    assert is_stored == (over > 0)
    assert sent.totals() == {"plasma" if is_stored else "inline": (1, size)}


def _first_hop(stage: Any, batch: MicroBatch) -> "ray.ObjectRef[object]":  # an actor
    ref: ray.ObjectRef[object] = stage.step.remote(wire.encode_batch(batch), None)
    ray.wait([ref], fetch_local=False)
    return ref


def _prompt_batch(step_id: int, seq_id: int, num_tokens: int) -> MicroBatch:
    pages = tuple(range(3 * seq_id, 3 * seq_id + min(3, -(-num_tokens // 16))))
    chunk = Chunk(seq_id, 0, (5,) * num_tokens, (pages,), SamplingParams(temperature=0.0), False)
    return MicroBatch(EPOCH, step_id, (chunk,))


@pytest.mark.nightly
def test_a_process_that_ended_with_its_node_says_so(cluster: Cluster) -> None:
    class Probe:  # here, so that Ray pickles it whole
        def node(self) -> str:
            return str(ray.get_runtime_context().get_node_id())

    options: dict[str, Any] = {"num_cpus": 0, "resources": {"probe": 1}}
    doomed = cluster.add_node(num_cpus=1, resources={"probe": 1})
    probe = ray.remote(Probe).options(max_restarts=1, max_task_retries=-1, **options).remote()
    assert ray.get(probe.node.remote()) == doomed.node_id
    actor_id = probe._actor_id.hex()
    assert end_of_last_process(actor_id) is None
    other = cluster.add_node(num_cpus=1, resources={"probe": 1})
    cluster.remove_node(doomed, allow_graceful=False)
    while ray.get(probe.node.remote(), timeout=60) == doomed.node_id:  # it may answer once more
        pass
    assert ray.get(probe.node.remote(), timeout=60) == other.node_id
    said = end_of_last_process(actor_id)
    assert said is not None
    assert re.match(r"its node [0-9.]+ died: \S", said), said
