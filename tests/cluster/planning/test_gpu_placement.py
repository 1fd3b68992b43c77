"""Stages over GPUs that are not alike: no GPU over its memory, the plan as fast as can be, and
every pipeline its share.
"""

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_models import tiny_args

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.config.measurements import StageTime
from tramontane.cluster.pipeline.engine import local_devices
from tramontane.cluster.planning.gpu_placement import (
    GpuSlot,
    expert_slots,
    gpu_choices,
    partition_gpus,
    placement_candidates,
    stage_speeds,
)
from tramontane.cluster.planning.hardware import Gpu, Hardware
from tramontane.cluster.planning.plan_search import plan_pipeline, search_plan
from tramontane.cluster.planning.planner import MEMORY_SHARE, StageBudget, layer_costs
from tramontane.proto.errors import ConfigError, PlanError
from tramontane.proto.plan import kv_bytes_per_position, ring_pages
from tramontane.proto.units import GIB
from tramontane.workers.weights.tensor_specs import stage_tensors

A = [Gpu("A100", 80 * GIB, "a", index, speed=2) for index in range(2)]
B = [Gpu("L4", 24 * GIB, "b", index) for index in range(3)]
C = [Gpu("A100", 80 * GIB - 2**20, "c", index, speed=2) for index in range(1)]
BIG = GpuSlot(StageBudget(80 * GIB - 2**20, 2), ("a", "c"))
SMALL = GpuSlot(StageBudget(24 * GIB), ("b",))


def _hardware(gpus: Sequence[Gpu]) -> Hardware:
    return Hardware(node_cpus=(8,), node_memory=(GIB,), gpus=tuple(gpus))


def _config(**settings: object) -> EngineConfig:
    return EngineConfig.build(None, settings)


# ---- places


def test_the_roomiest_kind_comes_first_and_stages_of_a_kind_stand_together() -> None:
    """Nodes a and c are of one kind: a megabyte makes no other GPU."""
    assert gpu_choices([*B, *A, *C], 6, 1) == [(BIG,) * 3 + (SMALL,) * 3]
    assert gpu_choices([*B, *A, *C], 4, 1) == [(BIG,) * n + (SMALL,) * (4 - n) for n in (3, 2, 1)]


def test_of_equally_roomy_kinds_the_fastest_comes_first() -> None:
    slow, fast = Gpu("A40", 48 * GIB, "slow", speed=696), Gpu("L40S", 48 * GIB, "fast", speed=864)
    assert [[slot.nodes for slot in choice] for choice in gpu_choices([slow, fast], 2, 1)] == [
        [("fast",), ("slow",)]
    ]


def test_where_all_are_alike_stages_are_tied_to_no_node() -> None:
    assert gpu_choices([*A, *C], 3, 1) == [(GpuSlot(StageBudget(80 * GIB - 2**20)),) * 3]


def test_on_a_node_of_unlike_gpus_each_counts_as_the_poorest() -> None:
    """Ray chooses among them. Their speeds as well: the 24 GiB could be the faster ones."""
    mixed = [Gpu("A100", 80 * GIB, "m", 0, speed=20), Gpu("L4", 24 * GIB, "m", 1, speed=30)]
    big, poorest = (
        GpuSlot(StageBudget(80 * GIB, 2), ("a",)),
        GpuSlot(StageBudget(24 * GIB, 20), ("m",)),
    )
    assert gpu_choices([*mixed, *A], 4, 1) == [(big,) * 2 + (poorest,) * 2]
    assert gpu_choices(mixed, 2, 1) == [(GpuSlot(StageBudget(24 * GIB)),) * 2]


@pytest.mark.parametrize("num_experts", [1, 2, 3])
def test_experts_and_stages_keep_to_the_kinds_that_they_were_planned_for(num_experts: int) -> None:
    """All GPUs that are left to either may be alike. Ray may take any GPU of a kind, for whatever
    it was meant.
    """
    hardware, config = _hardware([*B, *A, *C]), _config(stages=2, expert_actors=num_experts)
    for_stages, for_experts = partition_gpus(config, hardware)
    assert {gpu.name for gpu in for_experts.gpus} == {"A100"}
    assert (
        expert_slots(config, 2, for_experts, hardware)
        == (GpuSlot(StageBudget(BIG.budget.memory), BIG.nodes),) * num_experts
    )
    choices = placement_candidates(config, 8, for_stages, hardware)
    if num_experts == 3:  # no A100 is left
        assert choices == [(GpuSlot(StageBudget(SMALL.budget.memory), SMALL.nodes),) * 2]
    else:
        assert choices == [
            (BIG,) * n + (SMALL,) * (2 - n) for n in range(min(2, 3 - num_experts), -1, -1)
        ]


def test_in_a_cluster_of_one_kind_experts_and_stages_go_anywhere() -> None:
    hardware, config = _hardware([*A, *C]), _config(stages=1, expert_actors=2)
    for_stages, for_experts = partition_gpus(config, hardware)
    assert {slot.nodes for slot in expert_slots(config, 1, for_experts, hardware)} == {()}
    assert {slot.nodes for slot in placement_candidates(config, 8, for_stages, hardware)[0]} == {()}


def test_pipelines_share_each_kind_evenly() -> None:
    """Three big and three small for two pipelines: one of each. If they need all six, all count as
    small.
    """
    assert gpu_choices([*A, *B, *C], 2, 2) == [(BIG, SMALL)]
    assert gpu_choices([*A, *B, *C], 3, 2) == [(GpuSlot(StageBudget(24 * GIB)),) * 3]


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(1, 3), st.integers(1, 6))
def test_all_pipelines_find_their_gpus(
    counts: list[int], num_pipelines: int, num_stages: int
) -> None:
    """However nodes of a kind are filled: no kind is used more often than it exists."""
    gpus = [
        Gpu(f"kind {n % 3}", (1 + n % 3) * GIB, f"node {n}", i)
        for n, count in enumerate(counts)
        for i in range(count)
    ]
    if num_stages * num_pipelines > len(gpus):
        return
    choices = gpu_choices(gpus, num_stages, num_pipelines)
    assert choices
    assert len(set(choices)) == len(choices)
    for slots in choices:
        assert len(slots) == num_stages
        for slot in set(slots):
            there = [gpu for gpu in gpus if gpu.node in slot.nodes or not slot.nodes]
            assert slots.count(slot) * num_pipelines <= len(there)
            assert all(
                slot.budget.memory <= gpu.memory and slot.budget.speed <= (gpu.speed or 1)
                for gpu in there
            )


# ---- what is given


def test_a_given_size_is_that_stages_and_never_more_than_its_gpu_has() -> None:
    hardware = _hardware([*A, *B])
    slots = placement_candidates(_config(gpu_memory="20GiB,90GiB,20GiB"), 8, hardware)[0]
    assert [(slot.budget.memory // GIB, slot.nodes) for slot in slots] == [
        (20, ("a",)),
        (80, ("a",)),
        (20, ("b",)),
    ]
    assert {
        slot.budget.memory // GIB
        for slot in placement_candidates(_config(gpu_memory="30GiB"), 8, hardware)[0]
    } == {30, 24}


def test_given_speeds_are_those_of_the_stages_in_order() -> None:
    slots = placement_candidates(_config(gpu_speed="1,5"), 8, _hardware([*A, *B]))[0]
    assert [(slot.budget.speed, slot.nodes) for slot in slots] == [(1, ("a",)), (5, ("a",))]
    assert {
        slot.budget.speed
        for slot in placement_candidates(_config(gpu_speed=[7]), 8, _hardware([*A, *B]))[0]
    } == {7}


@pytest.mark.parametrize("local", [False, True])
def test_without_a_gpu_a_given_size_is_what_a_stage_may_use(local: bool) -> None:
    hardware = Hardware(node_cpus=(8,), node_memory=(4 * GIB,))
    (slots,) = placement_candidates(
        _config(gpu_memory=["1GiB", 2**29, "3GiB"], local=local), 8, hardware
    )
    assert [slot.budget.memory for slot in slots] == [GIB, 2**29, 4 * GIB // 3]


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        (
            {"stages": 2, "gpu_memory": "1GiB,1GiB,1GiB"},
            "--stages is for 2 stages and --gpu-memory is for 3 stages; give one",
        ),
        (
            {"gpu_speed": "1,2", "gpu_memory": "1GiB,1GiB,1GiB"},
            "--gpu-memory is for 3 stages and --gpu-speed is for 2 stages",
        ),
        ({"gpu_memory": "1GiB,much"}, "--gpu-memory has 'much'; it must be a size such as 24GiB"),
        ({"gpu_memory": ["1GiB", -1]}, "--gpu-memory has '-1'"),
        ({"gpu_speed": "1,0"}, "--gpu-speed has '0'; it must be whole numbers"),
        ({"gpu_speed": [1, 2.5]}, "--gpu-speed has '2.5'"),
    ],
)
def test_what_does_not_go_together_is_named(settings_: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        placement_candidates(_config(**settings_), 8, _hardware([*A, *B]))
    assert message in str(refused.value)


def test_more_stages_than_gpus_are_refused_also_if_sizes_are_given_for_them() -> None:
    with pytest.raises(PlanError, match="6 stages need a GPU each, and there are 5"):
        placement_candidates(
            _config(gpu_memory="1GiB,1GiB,1GiB", replicas=2), 8, _hardware([*A, *B])
        )


# ---- several stages on a GPU


def test_stages_of_a_gpu_are_neighbors_with_equal_shares() -> None:
    """Of what the GPU has, or is said to have; and of each kind as many GPUs as there are."""
    (slots, *_) = placement_candidates(_config(stages_per_gpu=2, stages=7), 8, _hardware([*A, *B]))
    assert [(slot.nodes[0], slot.budget.memory // GIB) for slot in slots] == [("a", 40)] * 4 + [
        ("b", 12)
    ] * 3
    given = _config(stages_per_gpu=2, gpu_memory="24GiB,60GiB", gpu_speed="1,3")
    slots = placement_candidates(given, 8, _hardware(A))[0]
    assert [(slot.budget.memory // GIB, slot.budget.speed) for slot in slots] == [
        (12, 1),
        (12, 1),
        (30, 3),
        (30, 3),
    ]
    (slots,) = placement_candidates(
        _config(stages_per_gpu=2, gpu_memory="1GiB", stages=3), 8, Hardware((8,), (30 * GIB,))
    )
    assert [slot.budget.memory for slot in slots] == [GIB] * 3, "without a GPU, of the stage"


@pytest.mark.parametrize(("stages", "shares"), [(2, 2), (3, 2), (4, 2), (5, 4), (9, 6)])
def test_in_one_process_gpus_take_turns_at_groups_of_stages(stages: int, shares: int) -> None:
    """5 stages, 2 together, on 2 GPUs: 0 and 1 on the first, 2 and 3 on the second, 4 on the first,
    so parts of a fourth.
    """
    (slots,) = placement_candidates(
        _config(stages_per_gpu=2, stages=stages, local=True), 16, _hardware(B[:2])
    )
    assert {slot.budget.memory for slot in slots} == {24 * GIB // shares}
    devices = local_devices(2, 2)
    used = Counter(devices[stage_id % len(devices)] for stage_id in range(stages))
    assert max(used.values()) <= shares
    assert local_devices(0, 2) == ["cpu"]


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        (
            {"stages": 5, "gpu_memory": "9GiB,9GiB"},
            "--stages is for 3 GPUs and --gpu-memory is for 2 GPUs; give one value",
        ),
        (
            {"stages": 12},
            "12 stages, 2 to a GPU, need 6 GPUs, and there are 5; use fewer --stages or --replicas",
        ),
        ({"stages": 5, "replicas": 2}, "10 stages, 2 to a GPU, need 6 GPUs, and there are 5"),
    ],
)
def test_too_many_stages_to_a_gpu_are_refused_with_both_numbers(
    settings_: dict[str, object], message: str
) -> None:
    with pytest.raises((ConfigError, PlanError)) as refused:
        placement_candidates(_config(stages_per_gpu=2, **settings_), 16, _hardware([*A, *B]))
    assert message in str(refused.value)


# ---- whole plans

ARGS = tiny_args(n_layers=6, windows=[None, 24, 24] * 2, max_seq_len=300)
CONFIG = _config(dtype="float32", max_num_seqs=8, page_size=16)


def _least(span: range) -> int:
    """Weights of these layers, and one sequence of full length, counted here once more."""
    weights = sum(spec.num_elements for spec in stage_tensors(ARGS, span)) * 4
    pages = sum(ring_pages(ARGS.windows[layer], 16, 300) for layer in span)
    return weights + pages * 16 * kv_bytes_per_position(ARGS, "float32")


def _slowest(
    spans: Sequence[range],
    budgets: Sequence[StageBudget],
    measured: tuple[StageTime, ...] | None = None,
) -> Fraction:
    costs = layer_costs(ARGS, stage_times=measured)
    return max(
        Fraction(sum(costs[layer] for layer in span), budget.speed)
        for span, budget in zip(spans, budgets, strict=True)
    )


def _best(
    budgets: Sequence[StageBudget], measured: tuple[StageTime, ...] | None = None
) -> Fraction | None:
    """The slowest stage of the best split that there is."""
    found = []
    for cuts in itertools.combinations(range(1, 6), len(budgets) - 1):
        spans = [range(start, end) for start, end in itertools.pairwise((0, *cuts, 6))]
        if all(
            _least(span) <= budget.memory * MEMORY_SHARE
            for span, budget in zip(spans, budgets, strict=True)
        ):
            found.append(_slowest(spans, budgets, measured))
    return min(found, default=None)


@pytest.mark.usefixtures("bare_gpus")
@settings(derandomize=True, deadline=None)
@given(
    st.lists(st.tuples(st.integers(50_000, 600_000), st.integers(1, 4)), min_size=1, max_size=4),
    st.integers(1, 4),
    st.booleans(),
)
@example([(600_000, 1), (90_000, 1)], 2, False)  # an even split does not fit, another one does
@example([(600_000, 1), (600_000, 4)], 2, True)
@example([(600_000, 1), (500_000, 4)], 1, False)  # the roomiest is not the fastest
# the fastest is too small
@example([(600_000, 1), (200_000, 4), (500_000, 3), (400_000, 3)], 2, False)
def test_plans_keep_to_every_gpus_memory_and_are_as_fast_as_the_best_there_is(
    kinds: list[tuple[int, int]], num_stages: int, speed_given: bool
) -> None:
    """Against every choice of so many GPUs and every split. Speeds are measured, or given for each
    stage in order.
    """
    num_stages = min(num_stages, len(kinds))
    gpus = [
        Gpu(f"gpu {n}", memory, f"node {n}", speed=speed) for n, (memory, speed) in enumerate(kinds)
    ]
    speeds = [speed for _, speed in kinds[:num_stages]]
    config = _config(
        **CONFIG.model_dump(include={"dtype", "max_num_seqs", "page_size"}),
        stages=num_stages,
        gpu_speed=speeds if speed_given else None,
    )
    roomiest_first = sorted(gpus, key=lambda gpu: (-gpu.memory, -gpu.speed))
    choices = [
        [
            StageBudget(gpu.memory, speed if speed_given else gpu.speed)
            for gpu, speed in zip(chosen, speeds, strict=True)
        ]
        for chosen in itertools.combinations(roomiest_first, num_stages)
    ]
    best = min((time for budgets in choices if (time := _best(budgets)) is not None), default=None)
    if best is None:
        with pytest.raises(PlanError):
            plan_pipeline(config, ARGS, _hardware(gpus))
        return
    plan, slots = search_plan(config, ARGS, _hardware(gpus))
    budgets = [slot.budget for slot in slots]
    by_node = {gpu.node: gpu for gpu in gpus}
    if len(kinds) > 1:
        assert len({slot.nodes for slot in slots}) == num_stages, "no GPU twice"
    assert all(slot.budget.memory == by_node[node].memory for slot in slots for node in slot.nodes)
    for stage, budget in zip(plan.stages, budgets, strict=True):
        assert stage.weight_bytes + stage.cache_bytes <= budget.memory * MEMORY_SHARE
    assert _slowest([stage.layers for stage in plan.stages], budgets) == best


# ---- measured times


@pytest.mark.usefixtures("bare_gpus")
def test_gpus_are_chosen_for_the_head_that_was_measured() -> None:
    times, rng, num_planned = (StageTime(0, 2, 0.2), StageTime(3, 5, 0.8)), random.Random(0), 0
    keys = CONFIG.model_dump(include={"dtype", "max_num_seqs", "page_size"})
    for _ in range(150):
        gpus = [
            Gpu(f"gpu {i}", rng.randrange(150_000, 600_000), f"node {i}", speed=rng.randint(1, 4))
            for i in range(4)
        ]
        by_memory = [
            StageBudget(gpu.memory, gpu.speed)
            for gpu in sorted(gpus, key=lambda gpu: (-gpu.memory, -gpu.speed))
        ]
        possible = [
            best
            for two in itertools.combinations(by_memory, 2)
            if (best := _best(two, times)) is not None
        ]
        if possible:
            plan, slots = search_plan(
                _config(**keys, stages=2, stage_times=times), ARGS, _hardware(gpus)
            )
            assert _slowest(
                [stage.layers for stage in plan.stages], [slot.budget for slot in slots], times
            ) == min(possible)
            num_planned += 1
    assert num_planned > 50


@pytest.mark.parametrize(
    ("settings", "devices", "speeds"),
    [
        ({}, ["A100", "L4"], (2, None)),  # L4 was not measured
        ({}, ["A100", "A100"], (2, 2)),
        ({}, ["another", "L4"], (None, None)),
        ({"gpu_speed": "3,1"}, ["A100", "L4"], (3, 1)),
        ({"gpu_speed": "3"}, ["A100", "L4"], (3, 3)),
        ({"gpu_speed": "1,3", "stages_per_gpu": 2}, ["L4", "L4", "A100"], (1, 1, 3)),
    ],
)
def test_speeds_of_stages_are_those_of_their_devices(
    settings: dict[str, object], devices: list[str], speeds: tuple[int | None, ...]
) -> None:
    assert stage_speeds(_config(**settings), _hardware([*A, *B]), devices) == speeds


def test_speeds_that_are_given_are_those_of_stages_where_no_gpu_is() -> None:
    config = _config(gpu_speed="1,3", stages_per_gpu=2)
    assert stage_speeds(config, _hardware([]), ["EPYC", "EPYC"]) == (1, 3)
    assert stage_speeds(_config(), _hardware([]), ["EPYC", "EPYC"]) == (None, None)
