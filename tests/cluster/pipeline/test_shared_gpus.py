"""Several stages on one GPU, on a raylet that offers GPUs which are not there: who gets which, also
after a death.
"""

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from harness import running_chain
from ray import cloudpickle
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, remove_placement_group
from small_cluster import small_cluster
from tiny_models import tiny_args, write_checkpoint

from tramontane.cluster.actors.pipeline_spec import PipelineSpec
from tramontane.cluster.actors.stage_actor import bundle_options
from tramontane.cluster.actors.supervisor import _group
from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.pipeline import engine, resources
from tramontane.cluster.pipeline.engine import joined_pipeline_spec, pipeline_spec
from tramontane.cluster.planning.hardware import Gpu, Hardware
from tramontane.cluster.ray_internals.accessors import end_of_last_process
from tramontane.cluster.serving import preflight as serve_checks
from tramontane.cluster.serving.preflight import check_resources
from tramontane.proto.errors import PlanError
from tramontane.proto.units import GIB

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")]
cloudpickle.register_pickle_by_value(sys.modules[__name__])

ARGS = tiny_args(n_layers=8)
NUM_GPUS = 3


class Holder:
    """What a stage is to Ray."""

    def __init__(self) -> None:
        self._born = time.time_ns()

    def gpus(self) -> tuple[list[str], str | None]:
        """As Ray says, and as CUDA would apply it."""
        return ray.get_runtime_context().get_accelerator_ids()["GPU"], os.environ.get(
            "CUDA_VISIBLE_DEVICES"
        )

    def born(self) -> int:
        return self._born

    def die(self) -> None:
        os._exit(1)


@pytest.fixture(scope="module")
def hardware() -> Iterator[Hardware]:
    with small_cluster(num_cpus=16, num_gpus=NUM_GPUS):
        node = ray.nodes()[0]["NodeID"]
        gpus = tuple(Gpu("H200", 8 * GIB, node, index) for index in range(NUM_GPUS))
        yield Hardware((16,), (GIB,), gpus)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("shared") / "model", ARGS)


def _spec(
    hardware: Hardware, folder: Path, name: str = "shared", **settings: object
) -> PipelineSpec:
    config = EngineConfig.build(
        None, {"model": folder, "max_num_seqs": 2, "threads_per_stage": 1, **settings}
    )
    return pipeline_spec(config, ARGS, hardware, name)


@contextmanager
def _group_of(spec: PipelineSpec) -> Iterator[PlacementGroup]:
    group = _group(spec)
    try:
        assert group.wait(60)
        yield group
    finally:
        remove_placement_group(group)


def _holder(spec: PipelineSpec, group: PlacementGroup, stage_id: int) -> ActorHandle[Any]:
    """Placed as the stage is."""
    options = bundle_options(spec, spec.bundle_of_stage(stage_id), group, spec.gpu_share) | {
        "lifetime": None,
        "get_if_exists": False,
    }
    made: ActorHandle[Any] = ray.remote(max_restarts=-1)(Holder).options(**options).remote()  # type: ignore[call-overload]
    return made


def _until(answers: Callable[[], bool]) -> None:
    while True:
        try:
            if answers():
                return
        except ray.exceptions.RayError:
            pass
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("stages", "together"), [(5, 2), pytest.param(4, 3, marks=pytest.mark.nightly), (6, 6)]
)
def test_neighbors_share_a_gpu_and_come_back_to_it(
    hardware: Hardware, folder: Path, stages: int, together: int
) -> None:
    """Whichever is created first or dies: its share is kept for it. Thirds and sixths are no
    multiples of Ray's units.
    """
    spec = _spec(hardware, folder, stages=stages, stages_per_gpu=together)
    with _group_of(spec) as group:
        holders = {stage_id: _holder(spec, group, stage_id) for stage_id in reversed(range(stages))}
        ids = [ray.get(holders[stage_id].gpus.remote()) for stage_id in range(stages)]
        assert all(len(own) == 1 and visible == own[0] for own, visible in ids)
        gpus = [own[0] for own, _ in ids]
        assert gpus == [gpus[stage_id // together * together] for stage_id in range(stages)]
        assert len(set(gpus)) == -(-stages // together)
        for stage_id in (0, stages - 1):
            holder = holders[stage_id]
            born = ray.get(holder.born.remote())
            holder.die.remote()
            _until(
                lambda holder=holder, born=born: ray.get(holder.born.remote(), timeout=10) != born
            )
            assert ray.get(holder.gpus.remote()) == ids[stage_id]
        for holder in holders.values():
            ray.kill(holder)


def test_another_pipeline_gets_other_gpus(hardware: Hardware, folder: Path) -> None:
    """Also where the first leaves room on its last one: that is planned as its own."""
    first, second = (
        _spec(hardware, folder, name, stages=3, stages_per_gpu=2) for name in ("first", "second")
    )
    with _group_of(first):
        assert not _group(second).wait(1)
        remove_placement_group(_group(second))
        alone = _spec(hardware, folder, "alone", stages=2, stages_per_gpu=2)
        with _group_of(alone):
            pass


def test_what_is_requested_of_the_cluster_is_what_bundles_take(
    hardware: Hardware, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = _spec(hardware, folder, stages=5, stages_per_gpu=2)
    assert spec.bundles == [{"CPU": 2, "GPU": 1}, {"CPU": 2, "GPU": 1}, {"CPU": 1, "GPU": 1}]
    assert spec.describe_workers() == "5 stages, 2 to a GPU"
    reports: list[str] = []
    check_resources(spec, 1, reports.append)
    with pytest.raises(
        PlanError,
        match=(
            r"too small for 10 stages, 2 to a GPU \(4 x \{CPU: 2, GPU: 1\} and 2 x .* 3 GPU in all"
        ),
    ):
        check_resources(spec, 2, reports.append)
    monkeypatch.setattr(serve_checks, "RESOURCES_TIMEOUT_S", 0.0)
    with (
        _group_of(_spec(hardware, folder, "other", stages=1)),
        pytest.raises(
            PlanError,
            match=(
                r"no room for 5 stages.*free are 15 of 16 CPU and 2 of 3 GPU; placement group"
                r" other has"
            ),
        ),
    ):
        check_resources(spec, 1, reports.append)
    assert reports == []
    monkeypatch.setattr(resources, "has_autoscaler", lambda: True)
    check_resources(spec, 2, reports.append)
    (line,) = reports
    assert re.fullmatch(
        r"waiting up to 65 s for 10 stages, 2 to a GPU \(.*\): free are .*; Ray's autoscaler may"
        r" add nodes; "
        "Ray Serve repeats the attempt some times",
        line,
    )


def test_too_few_gpus_are_an_error_that_names_what_makes_the_autoscaler_add_some(
    hardware: Hardware, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig.build(None, {"model": folder, "stages": 4})
    with pytest.raises(
        PlanError,
        match=r"^4 stages need a GPU each, and there are 3; use fewer --stages or --replicas$",
    ):
        joined_pipeline_spec(config, ARGS, hardware)
    monkeypatch.setattr(engine, "has_autoscaler", lambda: True)
    with pytest.raises(
        PlanError,
        match=r"or --replicas, or let Ray's autoscaler add nodes first \(see docs/planning.md\)$",
    ):
        joined_pipeline_spec(config, ARGS, hardware)


def test_expert_actors_have_gpus_of_their_own(hardware: Hardware, folder: Path) -> None:
    spec = _spec(hardware, folder, stages=3, stages_per_gpu=2, expert_actors=1)
    assert [spec.bundle_of_stage(0), spec.bundle_of_stage(2), spec.bundle_of_experts(0)] == [
        0,
        1,
        2,
    ]
    assert spec.bundles == [{"CPU": 2, "GPU": 1}, {"CPU": 1, "GPU": 1}, {"CPU": 1, "GPU": 1}]
    assert len(spec.nodes) == len(spec.bundles)


def test_real_stages_share_bundles_and_are_replaced_there(hardware: Hardware, folder: Path) -> None:
    """On cores, for want of GPUs; everything else is as with them."""
    spec = replace(_spec(hardware, folder, stages=4, stages_per_gpu=2), use_gpus=False)
    assert spec.bundles == [{"CPU": 2}] * 2
    with running_chain(spec) as chain:
        before = [ray.get(stage.health.remote()) for stage in chain.stages]
        assert [stage.label for stage in before] == [stage.label for stage in spec.plan.stages]
        os.kill(before[1].pid, 9)
        _until(lambda: ray.get(chain.stages[1].health.remote(), timeout=10).pid != before[1].pid)
        assert ray.get(chain.stages[1].ready.remote()) == before[1].label
        new = ray.get(chain.stages[1].health.remote()).pid
        log = Path(f"/proc/{new}/fd/2").read_text()  # its standard error is a file
        assert re.search(r"has a new process, because the one before ended: \S.*OOM", log), log
        assert end_of_last_process(chain.stages[0]._actor_id.hex()) is None
        assert "new process" not in Path(f"/proc/{before[0].pid}/fd/2").read_text()
