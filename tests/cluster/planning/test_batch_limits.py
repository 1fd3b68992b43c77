"""How many tokens and sequences the planner chooses on GPUs where the user leaves it open."""

from typing import Any

import pytest
from tiny_models import tiny_args

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.cluster.pipeline.engine import make_scheduler
from tramontane.cluster.planning.batch_limits import MAX_RUNTIME_SHARE, ROOM, matrix_tflops
from tramontane.cluster.planning.capacity import max_length_in_slots, plan_as_data
from tramontane.cluster.planning.hardware import Gpu, Hardware
from tramontane.cluster.planning.plan_search import plan_pipeline, search_plan
from tramontane.cluster.planning.runtime_memory import config_runtime
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.plan import PipelinePlan
from tramontane.proto.presets import PRESETS
from tramontane.proto.units import GIB

MISTRAL, H100 = PRESETS["mistral-7b-v0.3"], "NVIDIA H100 80GB HBM3"


def _planned(
    args: ModelArgs, gpu: str, gib: float, num_gpus: int = 1, **settings: Any
) -> PipelinePlan:
    gpus = tuple(Gpu(gpu, int(gib * GIB), index=index) for index in range(num_gpus))
    return plan_pipeline(EngineConfig(**settings), args, Hardware((16,), (64 * GIB,), gpus))


def _limits(plan: PipelinePlan) -> tuple[int, int]:
    return plan.max_num_batched_tokens, plan.max_num_seqs


@pytest.mark.parametrize(
    ("gpu", "gib", "settings", "limits"),
    [
        (H100, 79, {}, (4096, 256)),  # 8192 tokens would take 0.2 s
        (H100, 79, {"stages": 2, "stages_per_gpu": 2}, (4096, 256)),  # as long, on the same GPU
        (H100, 79, {"stages": 1, "stages_per_gpu": 2}, (4096, 160)),  # the only one there
        (H100, 79, {"max_model_len": 512}, (4096, 256)),
        ("NVIDIA A100-SXM4-80GB", 79, {}, (2048, 256)),
        ("NVIDIA L4", 22, {}, (2048, 64)),
        ("a GPU of next year", 79, {}, (8192, 256)),  # by memory alone
        ("a GPU of next year", 24, {}, (2048, 64)),
        ("a GPU of next year", 40, {}, (8192, 160)),
        ("a GPU of next year", 30, {}, (4096, 96)),
    ],
)
def test_the_limits_follow_from_the_speed_and_the_memory(
    gpu: str, gib: int, settings: dict[str, Any], limits: tuple[int, int]
) -> None:
    plan = _planned(MISTRAL, gpu, gib, **settings)
    assert _limits(plan) == limits
    assert {choice.key: choice.value for choice in plan.chosen} == {
        "max_num_batched_tokens": limits[0],
        "max_num_seqs": limits[1],
    }


def test_a_larger_model_has_smaller_micro_batches() -> None:
    """Of 4096 tokens of Mistral Nemo one would take 0.18 s."""
    assert _limits(_planned(PRESETS["mistral-nemo-12b"], H100, 79, max_model_len=4096)) == (
        2048,
        256,
    )


def test_two_gpus_compute_twice_as_much_in_the_time() -> None:
    assert _limits(_planned(MISTRAL, H100, 79, num_gpus=2)) == (8192, 256)


@pytest.mark.parametrize(
    "name", ["mistral-7b-v0.3", "mixtral-8x7b", "mistral-nemo-12b", "ministral-8b"]
)
@pytest.mark.parametrize("gib", [32, 48, 80, 141])
@pytest.mark.parametrize("stages_per_gpu", [1, 2])
def test_what_is_chosen_has_room(name: str, gib: int, stages_per_gpu: int) -> None:
    """Where more is chosen than without a GPU, sequences have room, and the process takes no more
    than its share.
    """
    gpus = tuple(Gpu("unknown", gib * GIB, index=index) for index in range(4))
    config = EngineConfig(stages_per_gpu=stages_per_gpu, max_model_len=4096)
    plan = plan_pipeline(config, PRESETS[name], Hardware((16,), (64 * GIB,), gpus))
    assert plan.max_num_seqs >= 64
    runtime = config_runtime(
        config, PRESETS[name], "bfloat16", plan.max_num_seqs, plan.max_num_batched_tokens
    ).total
    memory = gib * GIB // stages_per_gpu
    if plan.max_num_seqs > 64:
        assert max_length_in_slots(plan) >= ROOM
        assert runtime <= MAX_RUNTIME_SHARE * memory
    assert max(stage.packed_bytes + stage.cache_bytes for stage in plan.stages) <= memory - runtime


def test_what_the_user_gave_is_never_changed() -> None:
    both = _planned(MISTRAL, H100, 79, max_num_batched_tokens=700, max_num_seqs=9)
    assert (_limits(both), both.chosen) == ((700, 9), ())
    tokens = _planned(MISTRAL, H100, 79, max_num_batched_tokens=700)
    assert (_limits(tokens), [choice.key for choice in tokens.chosen]) == (
        (700, 256),
        ["max_num_seqs"],
    )
    sequences = _planned(MISTRAL, H100, 79, max_num_seqs=9)
    assert (_limits(sequences), [choice.key for choice in sequences.chosen]) == (
        (4096, 9),
        ["max_num_batched_tokens"],
    )


@pytest.mark.parametrize("settings", [{}, {"stages": 1}, {"max_num_seqs": 7}])
def test_without_a_gpu_nothing_is_chosen(settings: dict[str, Any]) -> None:
    plan = plan_pipeline(EngineConfig(**settings), tiny_args(), Hardware((8,), (8 * GIB,)))
    assert (_limits(plan), plan.chosen) == ((512, settings.get("max_num_seqs", 64)), ())


def test_a_model_that_fits_only_with_the_least_is_planned_as_before() -> None:
    least = {"max_num_batched_tokens": 512, "max_num_seqs": 64, "max_model_len": 4096}
    gib = next(n / 4 for n in range(56, 80) if _fits(n / 4, least))
    plan = _planned(MISTRAL, "unknown", gib, max_model_len=4096)
    assert _limits(plan) == (512, _planned(MISTRAL, "unknown", gib, **least).max_num_seqs)
    assert plan.cache == _planned(MISTRAL, "unknown", gib, **least).cache


def _fits(gib: float, settings: dict[str, Any]) -> bool:
    try:
        _planned(MISTRAL, "unknown", gib, **settings)
    except Exception:
        return False
    return True


def test_it_is_said_why() -> None:
    found = [choice.describe() for choice in _planned(MISTRAL, H100, 79).chosen]
    assert found == [
        (
            "the planner has chosen --max-num-batched-tokens 4096: 8192 tokens would take 0.2 s,"
            " and sequences that decode next to them wait as long"
        ),
        (
            "the planner has chosen --max-num-seqs 256: each of 256 sequences has room for 1840"
            " tokens, and more are never chosen"
        ),
    ]
    small = [choice.reason for choice in _planned(MISTRAL, "unknown", 24).chosen]
    assert small == [
        (
            "larger micro-batches would leave too little memory for the cache; the speed of the GPU"
            " is not known"
        ),
        "each of 64 sequences has room for 1024 tokens, and for more there is too little memory",
    ]
    (most, _) = _planned(MISTRAL, "unknown", 80).chosen
    assert most.reason == "larger micro-batches are never chosen; the speed of the GPU is not known"


def test_choices_are_in_the_plans_json() -> None:
    config = EngineConfig()
    hardware = Hardware((16,), (64 * GIB,), (Gpu(H100, 79 * GIB),))
    plan, slots = search_plan(config, MISTRAL, hardware)
    data = plan_as_data(plan, tuple(slot.budget for slot in slots), [1.0])
    assert (data["max_num_batched_tokens"], data["max_num_seqs"]) == (4096, 256)
    assert data["chosen"] == [
        {"key": each.key, "value": each.value, "reason": each.reason} for each in plan.chosen
    ]


@pytest.mark.parametrize(("given", "used"), [(None, 4096), (333, 333)])
def test_the_scheduler_has_the_limits_of_the_plan(given: int | None, used: int) -> None:
    """A pipeline that is adopted was planned by another configuration: what is given now counts."""
    plan = _planned(MISTRAL, H100, 79)
    limits = make_scheduler(EngineConfig(max_num_batched_tokens=given), plan).limits
    assert (limits.max_num_batched_tokens, limits.max_num_seqs) == (used, 256)


@pytest.mark.parametrize(
    ("names", "tflops"),
    [
        ([H100], 989),
        (["NVIDIA H100 PCIe"], 756),
        (["NVIDIA GH200 480GB"], 989),
        (["NVIDIA A10"], 125),
        (["NVIDIA A100-PCIE-40GB"], 312),
        (["NVIDIA L40S"], 362),
        (["NVIDIA A10G"], 70),
        (["NVIDIA RTX A4000"], None),
        ([H100, "NVIDIA L4"], 121),
        ([H100, "unknown"], None),
        ([], None),
    ],
)
def test_the_rate_is_that_of_the_slowest_gpu(names: list[str], tflops: int | None) -> None:
    assert matrix_tflops(names) == tflops


@pytest.mark.parametrize(("rows", "kept"), [(1, 1), (64, 64), (65, None)])
def test_a_run_of_few_prompts_has_no_more_slots(rows: int, kept: int | None) -> None:
    assert EngineConfig().sized_for(rows).max_num_seqs == kept
    assert EngineConfig(max_num_seqs=10).sized_for(rows).max_num_seqs == min(10, rows)
