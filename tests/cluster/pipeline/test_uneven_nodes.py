"""Three raylets that offer GPUs which are not there: which node each stage is on, and what is
requested of the nodes.
"""

import itertools
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from harness import running_chain
from ray import cloudpickle
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table, remove_placement_group
from tiny_models import tiny_args, write_checkpoint

from tramontane.cluster.actors.pipeline_spec import PipelineSpec
from tramontane.cluster.actors.supervisor import _group
from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.config.ray_settings import ONE_MACHINE_SETTINGS
from tramontane.cluster.pipeline.engine import pipeline_spec
from tramontane.cluster.planning.hardware import Hardware, probe_cluster
from tramontane.proto.errors import PlanError
from tramontane.proto.units import GIB
from tramontane.workers.device.probe import VisibleGpu

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")]
# what runs on the nodes is not installed there
cloudpickle.register_pickle_by_value(sys.modules[__name__])

ARGS = tiny_args(n_layers=8, window=24)
BIG, SMALL = ("H200", 140 * GIB), ("L4", 24 * GIB)
GPUS = {"big": [BIG], "both small": [SMALL, SMALL], "another big": [BIG]}  # by the node's name
SPEED = {"H200": 4_800_000_000_000, "L4": 300_400_000_000}


@pytest.fixture(scope="module")
def nodes() -> Iterator[dict[str, str]]:
    """Names of nodes by Ray's ids. Each has cores for all stages, so that nothing but its GPUs says
    which of them it gets.
    """
    cluster = Cluster()
    names = {}
    for name, gpus in GPUS.items():
        of_head = {} if names else {"_system_config": dict(ONE_MACHINE_SETTINGS)}
        node = cluster.add_node(
            **of_head,
            num_cpus=8,
            num_gpus=len(gpus),
            env_vars={"GPUS": json.dumps(gpus)},
            include_dashboard=False,
        )
        names[node.node_id] = name
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False)
    yield names
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def hardware(nodes: dict[str, str]) -> Hardware:
    return probe_cluster(list_gpus=_look, measure=_measure)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("uneven") / "model", ARGS)


def _look() -> list[VisibleGpu]:
    return [VisibleGpu(name, memory) for name, memory in json.loads(os.environ["GPUS"])]


def _measure(device: str) -> int:
    name = _look()[int(device.removeprefix("cuda:"))].name
    return SPEED[name]


def _fail(*_arguments: str) -> int:
    raise ValueError("no such thing")


def _spec(
    hardware: Hardware, folder: Path, name: str = "uneven", **settings: object
) -> PipelineSpec:
    config = EngineConfig.build(None, {"model": folder, "max_num_seqs": 2, **settings})
    return pipeline_spec(config, ARGS, hardware, name)


@contextmanager
def _where(*specs: PipelineSpec) -> Iterator[list[list[str]]]:
    """Ray's ids of the nodes of all bundles, which hold a GPU each."""
    groups = [_group(spec) for spec in specs]
    try:
        assert all(group.wait(60) for group in groups)
        bundles = [placement_group_table(group)["bundles_to_node_id"] for group in groups]
        yield [[ids[i] for i in range(len(ids))] for ids in bundles]
    finally:
        for group in groups:
            remove_placement_group(group)


def test_every_gpu_is_known_with_its_node_and_speed(
    nodes: dict[str, str], hardware: Hardware
) -> None:
    found = sorted(
        (nodes[gpu.node], gpu.index, gpu.name, gpu.memory, gpu.speed) for gpu in hardware.gpus
    )
    assert found == [
        ("another big", 0, *BIG, 4800),
        ("big", 0, *BIG, 4800),
        ("both small", 0, *SMALL, 300),
        ("both small", 1, *SMALL, 300),
    ]


def test_what_was_measured_is_not_measured_again(hardware: Hardware) -> None:
    assert probe_cluster(list_gpus=_look, measure=_fail) == hardware


def test_gpus_of_one_name_or_with_given_speeds_are_not_measured(nodes: dict[str, str]) -> None:
    def all_alike() -> list[VisibleGpu]:
        return [VisibleGpu("A100", 80 * GIB)] * 2

    for measured, look in ((True, all_alike), (False, _look)):
        assert {gpu.speed for gpu in probe_cluster(measured, look, _fail).gpus} == {None}


def test_nodes_that_cannot_say_what_they_have_are_named_in_one_line(nodes: dict[str, str]) -> None:
    address = ray.nodes()[0]["NodeManagerAddress"]
    with pytest.raises(
        PlanError, match=rf"node {address} offers [12] GPUs to Ray, but CUDA shows 0 there"
    ):
        probe_cluster()
    with pytest.raises(
        PlanError, match=r"the GPUs of the cluster cannot be listed: ValueError: no such thing$"
    ):
        probe_cluster(list_gpus=_fail)


def test_stages_land_where_the_plan_wants_them(
    nodes: dict[str, str], hardware: Hardware, folder: Path
) -> None:
    """The roomiest first; in another order where sizes are given in it; and tied to no node where
    one would do as well.
    """
    with _where(_spec(hardware, folder)) as [ids]:
        assert {nodes[id_] for id_ in ids[:2]} == {"big", "another big"}
        assert [nodes[id_] for id_ in ids[2:]] == ["both small"] * 2
    with _where(_spec(hardware, folder, gpu_memory="24GiB,140GiB,24GiB,140GiB")) as [ids]:
        assert [nodes[id_] for id_ in ids[0::2]] == ["both small"] * 2
        assert {nodes[id_] for id_ in ids[1::2]} == {"big", "another big"}
    alike = replace(
        hardware, gpus=tuple(replace(gpu, name="L4", memory=24 * GIB) for gpu in hardware.gpus)
    )
    assert _spec(alike, folder).nodes == ((),) * 4


def test_neighbors_share_a_node_where_they_can(
    nodes: dict[str, str], hardware: Hardware, folder: Path
) -> None:
    """Ray packs stages in their order: between the first and the last of a node there is no
    other.
    """
    alike = replace(
        hardware, gpus=tuple(replace(gpu, name="L4", memory=24 * GIB) for gpu in hardware.gpus)
    )
    with _where(_spec(alike, folder)) as [ids]:
        assert sum(one != other for one, other in itertools.pairwise(ids)) == 2


def test_two_pipelines_get_one_of_each_kind(
    nodes: dict[str, str], hardware: Hardware, folder: Path
) -> None:
    with _where(*(_spec(hardware, folder, f"uneven-{n}", replicas=2) for n in range(2))) as both:
        assert {nodes[ids[0]] for ids in both} == {"big", "another big"}
        assert [nodes[ids[1]] for ids in both] == ["both small"] * 2


@pytest.mark.nightly
def test_real_stages_stand_there_with_the_layers_that_were_meant_for_them(
    nodes: dict[str, str], hardware: Hardware, folder: Path
) -> None:
    """On cores, for want of GPUs; everything else is as with them."""
    spec = replace(_spec(hardware, folder), use_gpus=False)
    sizes = [len(stage.layers) for stage in spec.plan.stages]
    with running_chain(spec) as chain:
        stages = [ray.get(stage.health.remote()) for stage in chain.stages]
    assert [stage.label for stage in stages] == [stage.label for stage in spec.plan.stages]
    assert {nodes[stage.node_id] for stage in stages[:2]} <= {"big", "another big"}
    assert [nodes[stage.node_id] for stage in stages[2:]] == ["both small"] * 2
    assert min(sizes[:2]) > max(sizes[2:]), "a sixteenth of the speed"


def test_a_kind_that_is_taken_is_not_replaced_by_another(
    nodes: dict[str, str], hardware: Hardware, folder: Path
) -> None:
    with (
        _where(_spec(hardware, folder, "taker", stages=2)),
        pytest.raises(
            PlanError,
            match=(
                r"no room for 1 stage \(.*\) on the nodes that they are planned for after .*:"
                r" free are"
            ),
        ),
        running_chain(replace(_spec(hardware, folder, stages=1), placement_timeout_s=1.0)),
    ):
        pass
