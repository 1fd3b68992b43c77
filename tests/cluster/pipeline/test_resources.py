"""What a full cluster says: which resources are missing, by how much, and what holds them."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from small_cluster import small_cluster
from tiny_models import tiny_args, tiny_plan

from tramontane.cluster.actors.pipeline_spec import PipelineSpec
from tramontane.cluster.pipeline import resources
from tramontane.cluster.pipeline.resources import (
    ClusterResources,
    Holder,
    Node,
    WaitDescriber,
    check_placeable,
    describe_missing,
    describe_needs,
    describe_shortage,
    describe_wait,
    describe_wait_of,
    no_room_error,
    read_resources,
)
from tramontane.proto.errors import PlanError

OPTIONS = "use fewer --stages or --threads-per-stage"


def _spec(threads: int = 1, num_stages: int = 2, **more: object) -> PipelineSpec:
    plan = tiny_plan(tiny_args(n_layers=4), num_stages)
    return replace(PipelineSpec("new", plan, Path("model"), threads, use_gpus=False), **more)  # type: ignore[arg-type]


def _cpus(*free_of: tuple[float, float], holders: tuple[Holder, ...] = ()) -> ClusterResources:
    """Return a cluster with nodes "0", "1" and so on, of which so many CPUs of so many are free."""
    nodes = (
        Node(str(i), {"CPU": total, "memory": 1e9}, {"CPU": free})
        for i, (free, total) in enumerate(free_of)
    )
    return ClusterResources(tuple(nodes), holders)


def test_bundles_that_are_alike_are_counted() -> None:
    assert describe_needs(_spec()) == "2 stages (2 x {CPU: 1})"
    assert (
        describe_needs(_spec(4, use_gpus=True), num_pipelines=3)
        == "6 stages (6 x {CPU: 4, GPU: 1})"
    )
    of_three = _spec(1, 3, use_gpus=True, stages_per_gpu=2, nodes=(("0",), ("0",)))
    assert (
        describe_needs(of_three)
        == "3 stages, 2 to a GPU (1 x {CPU: 2, GPU: 1} and 1 x {CPU: 1, GPU: 1}) on the nodes that"
        " they are planned for"
    )


def test_where_there_is_room_nothing_is_missing() -> None:
    assert describe_shortage(_spec(), _cpus((2, 2))) == ""
    assert describe_shortage(_spec(), _cpus((1, 4), (1, 1))) == ""
    assert describe_shortage(_spec(2), _cpus((2, 2), (2, 2))) == ""
    assert describe_shortage(_spec(), _cpus((2 - 1e-9, 2))) == "", "Ray's sums are rounded"


def test_what_is_missing_is_counted_without_its_holders() -> None:
    assert describe_missing(_spec(), _cpus((2, 2))) == ""
    assert describe_missing(_spec(), _cpus((1, 1))) == "1 of 2 stages: 1 CPU, offered by no node"
    assert describe_missing(_spec(), _cpus((0, 2))) == "2 of 2 stages: 1 CPU, free on no node"
    holder = Holder("actor Trainer (secret)", "0", {"CPU": 2.0})
    assert "Trainer" not in describe_missing(_spec(), _cpus((0, 2), holders=(holder,)))
    on_gpus = _spec(4, use_gpus=True, stages_per_gpu=2)
    assert describe_missing(on_gpus, _cpus((8, 8))) == (
        "1 of 1 bundles: 8 CPU and 1 GPU, offered by no node"
    )


@pytest.mark.parametrize(
    ("state", "on", "text"),
    [
        ("PENDING", {0: "", 1: ""}, "waiting for 2 of 2 stages: 1 CPU, free on no node"),
        ("RESCHEDULING", {0: "0", 1: ""}, "waiting for 1 of 2 stages: 1 CPU, free on no node"),
        ("RESCHEDULING", {0: "0", 1: "dead"}, "waiting for 1 of 2 stages: 1 CPU, free on no node"),
        ("CREATED", {0: "0", 1: "1"}, ""),
    ],
)
def test_a_pipeline_waits_for_what_has_no_node(
    state: str, on: dict[int, str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = {"state": state, "bundles_to_node_id": on}
    monkeypatch.setattr(resources, "get_placement_group", lambda name: name)
    monkeypatch.setattr(resources, "placement_group_table", lambda name: group)
    monkeypatch.setattr(resources, "read_resources", lambda: _cpus((0, 2)))
    assert describe_wait_of(_spec()) == text


def test_a_health_check_does_not_wait_for_a_head_node_that_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers, is_away = iter(["waiting for a stage", ""]), threading.Event()

    def describe(_spec: PipelineSpec) -> str:
        is_away.wait()
        return next(answers)

    monkeypatch.setattr(resources, "describe_wait_of", describe)
    monkeypatch.setattr(resources, "HEAD_ANSWER_TIMEOUT_S", 0.01)

    async def scenario() -> list[str]:
        describer = WaitDescriber(_spec())
        before = [await describer.describe() for _ in range(3)]
        is_away.set()
        while not (text := await describer.describe()):
            await asyncio.sleep(0)
        monkeypatch.setattr(resources, "WAIT_REPORT_INTERVAL_S", 0.0)
        while (last := await describer.describe()) == text:
            await asyncio.sleep(0)
        return [*before, text, last]

    assert asyncio.run(scenario()) == ["", "", "", "waiting for a stage", ""]


def test_what_is_missing_is_named_with_its_holders_the_largest_first() -> None:
    holders = (
        Holder("actor Trainer (t)", "0", {"CPU": 1, "GPU": 1}),
        Holder("pipeline a", "0", {"CPU": 1.0}),
        Holder("pipeline a", "1", {"CPU": 1.0}),
        Holder("actor Idle", "1", {}),
        Holder("actor Stage", "1", {"CPU_group_1f": 1.0}),
    )
    full = _cpus((0, 2), (0.5, 2), holders=holders)
    assert (
        describe_shortage(_spec(), full)
        == "free are 0.5 of 4 CPU; pipeline a has 2 CPU, actor Trainer (t) has 1 CPU, tasks have"
        " 0.5 CPU"
    )


def test_many_holders_are_not_all_named() -> None:
    holders = tuple(Holder(f"actor A{number}", "0", {"CPU": 10 - number}) for number in range(7))
    shortage = describe_shortage(_spec(), _cpus((0, 49), holders=holders))
    assert shortage.endswith("actor A2 has 8 CPU, actor A3 has 7 CPU, 3 more have the rest")


def test_enough_in_sum_is_not_enough_on_single_nodes() -> None:
    assert (
        describe_shortage(_spec(2), _cpus((1, 2), (3, 3)))
        == "free are 4 of 5 CPU, with room for 1 of 2 on single nodes; tasks have 1 CPU"
    )


def test_of_unlike_bundles_all_together_must_fit() -> None:
    """Each kind would fit alone: 1 x {CPU: 2} and 1 x {CPU: 1} on 2 CPUs."""
    spec = _spec(1, 3, use_gpus=True, stages_per_gpu=2)
    both = {"CPU": 2.0, "GPU": 2.0}
    assert (
        describe_shortage(spec, ClusterResources((Node("0", both, both),)))
        == "free are 2 of 2 CPU and 2 of 2 GPU"
    )


def test_only_nodes_that_are_planned_for_count() -> None:
    spec = _spec(num_stages=1, nodes=(("1",),))
    holders = (Holder("actor Here", "1", {"CPU": 2}), Holder("actor There", "0", {"CPU": 2}))
    assert describe_shortage(spec, _cpus((0, 2), (2, 2), holders=holders[1:])) == ""
    assert (
        describe_shortage(spec, _cpus((2, 2), (0, 2), holders=holders))
        == "free are 0 of 2 CPU; actor Here has 2 CPU"
    )
    gone = _spec(num_stages=1, nodes=(("7",),))
    with pytest.raises(
        PlanError, match=r"on the nodes that they are planned for: it has 0 CPU in all"
    ):
        check_placeable(gone, _cpus((2, 2)))


def test_a_cluster_that_could_not_hold_the_pipeline_even_if_it_were_empty() -> None:
    check_placeable(_spec(2), _cpus((0, 2), (0, 2)))
    check_placeable(_spec(1), _cpus((0, 2)), num_pipelines=1)
    for spec, cluster, pipelines, message in (
        (_spec(2), _cpus((3, 3)), 1, f"2 stages (2 x {{CPU: 2}}): it has 3 CPU in all; {OPTIONS}"),
        (
            _spec(2),
            _cpus((3, 3), (1, 1)),
            1,
            f"it has 4 CPU in all, with room for 1 of 2 on single nodes; {OPTIONS}",
        ),
        (
            _spec(1),
            _cpus((2, 2)),
            2,
            "4 stages (4 x {CPU: 1}): it has 2 CPU in all; use fewer --replicas, --stages or",
        ),
    ):
        with pytest.raises(PlanError) as error:
            check_placeable(spec, cluster, pipelines)
        assert message in str(error.value)
        assert str(error.value).startswith("the cluster is too small for ")
        assert str(error.value).endswith(", or add nodes")


def test_a_cluster_to_which_nodes_may_be_added_is_not_too_small() -> None:
    small = replace(_cpus((1, 1)), may_grow=True)
    check_placeable(_spec(2), small)
    shortage = "free are 1 of 1 CPU; Ray's autoscaler may add nodes"
    assert describe_shortage(_spec(2), small) == shortage
    assert (
        describe_wait(_spec(2), 65.2, shortage)
        == f"waiting up to 65 s for 2 stages (2 x {{CPU: 2}}): {shortage}"
    )
    assert (
        str(no_room_error(_spec(2), small, waited_s=65.2))
        == f"the cluster has no room for 2 stages (2 x {{CPU: 2}}) after 65 s: {shortage};"
        f" {OPTIONS}, or wait longer (placement_timeout in a --config file); ray status shows"
        " which nodes are added"
    )


def test_nodes_that_are_added_do_not_help_a_pipeline_that_is_planned_for_others() -> None:
    spec = _spec(num_stages=1, nodes=(("1",),))
    small = replace(_cpus((2, 2), (0, 0)), may_grow=True)
    with pytest.raises(PlanError, match="the cluster is too small"):
        check_placeable(spec, small)
    assert describe_shortage(spec, small) == "free are 0 of 0 CPU"
    assert str(no_room_error(spec, small)).endswith("or end what holds them")


def test_what_only_ray_finds_is_an_error_too() -> None:
    assert (
        str(no_room_error(_spec(), _cpus((2, 2)), waited_s=65.2))
        == "the cluster has no room for 2 stages (2 x {CPU: 1}) after 65 s: Ray cannot place them; "
        f"{OPTIONS}, or end what holds them"
    )


def test_an_error_names_the_options_that_the_pipeline_has() -> None:
    with_experts: Any = SimpleNamespace(plan=SimpleNamespace(experts=object()))
    assert resources._options(with_experts, 1) == "--stages, --expert-actors or --threads-per-stage"


def test_tables_of_ray_become_nodes_and_holders(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group whose supervisor lives is a pipeline; groups that wait hold nothing, and dead nodes
    have nothing.
    """

    def actor(class_name: str, name: str, **held: float) -> SimpleNamespace:
        return SimpleNamespace(
            class_name=class_name,
            name=name,
            address=SimpleNamespace(node_id=b"\x0a"),
            required_resources=held,
        )

    def group(name: str, state: str, **bundle: float) -> dict[str, object]:
        ids = {
            "placement_group_id": "0123456789",
            "bundles_to_node_id": {0: "0a"},
            "bundles": {0: bundle},
        }
        return {"name": name, "state": state, **ids}

    groups = [
        group("a", "CREATED", CPU=1.0),
        group("b", "PENDING", CPU=1.0),
        group("", "CREATED", CPU=2.0),
    ]
    groups += [
        group("c", "PREPARED", CPU=0.25),
        group("d", "RESCHEDULING", CPU=0.25),
        group("e", "REMOVED", CPU=1.0),
    ]
    nodes = [
        {"NodeID": "0a", "Alive": True, "Resources": {"CPU": 5.0}},
        {"NodeID": "0b", "Alive": True, "Resources": {"CPU": 1.0}},
        {"NodeID": "0c", "Alive": False, "Resources": {"CPU": 9.0}},
    ]
    fake = SimpleNamespace(
        nodes=lambda: nodes,
        util=SimpleNamespace(placement_group_table=lambda: dict(enumerate(groups))),
    )
    actors = [actor("Supervisor", "a-supervisor"), actor("Trainer", "", CPU=1.5)]
    for name, value in (
        ("ray", fake),
        ("free_resources", lambda: {"0a": {"CPU": 0.5}}),
        ("living_actors", lambda: actors),
    ):
        monkeypatch.setattr(resources, name, value)
    monkeypatch.setattr(resources, "has_autoscaler", lambda: True)
    found = read_resources()
    assert found.may_grow
    assert found.nodes == (Node("0a", {"CPU": 5.0}, {"CPU": 0.5}), Node("0b", {"CPU": 1.0}, {}))
    assert [
        (holder.label, holder.node_id, holder.held) for holder in found.holders if holder.held
    ] == [
        ("pipeline a", "0a", {"CPU": 1.0}),
        ("placement group 01234567", "0a", {"CPU": 2.0}),
        ("placement group c", "0a", {"CPU": 0.25}),
        ("placement group d", "0a", {"CPU": 0.25}),
        ("actor Trainer", "0a", {"CPU": 1.5}),
    ]


# ---- a cluster that is full


@ray.remote(num_cpus=1)
class Trainer:
    """Another user's actor."""

    def ready(self) -> None:
        """Return when it runs."""


@pytest.fixture(scope="module")
def full() -> Iterator[str]:
    """Return the address of a cluster of two CPUs, which an actor and a placement group hold."""
    with small_cluster(num_cpus=2):
        trainer = Trainer.options(name="of another user").remote()  # type: ignore[attr-defined]
        group = placement_group([{"CPU": 1}], name="theirs")
        ray.get([trainer.ready.remote(), group.ready()])
        yield ray.get_runtime_context().gcs_address
        remove_placement_group(group)


FREE = (
    "free are 0 of 2 CPU; placement group theirs has 1 CPU, actor Trainer (of another user) has"
    " 1 CPU"
)


def _generate(address: str, folder: Path, *options: str) -> tuple[int, list[str]]:
    """Run ``tramontane generate``, which waits for a second and for the first attempt of five."""
    config = folder / "config.yaml"
    config.write_text("placement_timeout: 1\n")
    code = "from tramontane.cluster.cli.main import main; main()"
    command = [
        sys.executable,
        "-c",
        code,
        "generate",
        "The",
        "--address",
        address,
        "--config",
        str(config),
        *options,
    ]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr.splitlines()


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")
def test_a_full_cluster_is_reported_at_once_with_what_holds_it(full: str, tmp_path: Path) -> None:
    code, lines = _generate(full, tmp_path, "--threads-per-stage", "1")
    waiting = [line for line in lines if line.startswith("waiting")]
    assert waiting == [f"waiting up to 6 s for 2 stages (2 x {{CPU: 1}}): {FREE} ..."], "and once"
    assert (
        lines.index(waiting[0])
        == lines.index(next(line for line in lines if line.startswith("loading"))) + 1
    )
    assert code == 2
    assert lines[-1].startswith("error: the cluster has no room for 2 stages (2 x {CPU: 1}) after ")
    assert lines[-1].endswith(f" s: {FREE}; {OPTIONS}, or end what holds them")


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")
def test_a_cluster_that_is_too_small_is_reported_before_anything_is_placed(
    full: str, tmp_path: Path
) -> None:
    code, lines = _generate(full, tmp_path, "--stages", "3", "--threads-per-stage", "1")
    assert code == 2
    assert (
        lines[-1]
        == "error: the cluster is too small for 3 stages (3 x {CPU: 1}): it has 2 CPU in all;"
        f" {OPTIONS}, or add nodes"
    )
    assert not any(line.startswith(("loading", "waiting")) for line in lines)
