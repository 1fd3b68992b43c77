"""Plans: layers split by cost, pages counted by memory, and the configuration that requests
them.
"""

import itertools
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import typer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_models import GIB, loaded_state, tiny_args, tiny_plan

from tramontane.cluster.cli import main as cli
from tramontane.cluster.config.engine_config import DEMO_MODEL, EngineConfig
from tramontane.cluster.config.measurements import StageTime
from tramontane.cluster.console.run_summary import cache_note
from tramontane.cluster.pipeline.engine import make_scheduler
from tramontane.cluster.planning import planner
from tramontane.cluster.planning.capacity import suggest_fixes
from tramontane.cluster.planning.expert_planner import replan
from tramontane.cluster.planning.hardware import Gpu, Hardware, probe_local
from tramontane.cluster.planning.plan_search import plan_pipeline
from tramontane.cluster.planning.planner import (
    MEMORY_SHARE,
    PlanRequest,
    StageBudget,
    is_feasible,
    layer_costs,
    make_plan,
    split_layers,
)
from tramontane.proto.errors import ConfigError, PlanError, RequestError
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.model_folder import RandomWeights
from tramontane.proto.plan import PipelinePlan, SpeculativeConfig, kv_bytes_per_position, ring_pages
from tramontane.proto.presets import PRESETS
from tramontane.proto.units import format_bytes
from tramontane.proto.weight_format import DTYPE_BYTES, Quantization, WeightFormat
from tramontane.router.scheduling.balanced_policy import BalancedPolicy
from tramontane.workers.kernels.linear import Linear
from tramontane.workers.kernels.packed_linear import PackedLinear
from tramontane.workers.kernels.quantized_linear import QuantizedLinear
from tramontane.workers.model.transformer import StageModel
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.weights.quantize import quantize_linears
from tramontane.workers.weights.tensor_specs import TensorSpec, layer_tensors, stage_tensors

repeatable = settings(derandomize=True, deadline=None)


# ---- layers


@st.composite
def _costs_and_stages(draw: st.DrawFn) -> tuple[list[int], int]:
    costs = draw(st.lists(st.integers(1, 12), min_size=1, max_size=8))
    return costs, draw(st.integers(1, len(costs)))


def _groups(costs: Sequence[int], ends: Sequence[int]) -> list[int]:
    return [sum(costs[start:end]) for start, end in zip((0, *ends), ends, strict=False)]


def _all_groups(costs: Sequence[int], num_stages: int) -> list[list[int]]:
    """The group costs of every partition into consecutive, non-empty groups."""
    cuts = itertools.combinations(range(1, len(costs)), num_stages - 1)
    return [_groups(costs, (*cut, len(costs))) for cut in cuts]


def _squares(groups: Sequence[int]) -> int:
    return sum(cost**2 for cost in groups)


@repeatable
@given(_costs_and_stages())
def test_no_partition_has_a_cheaper_worst_stage(case: tuple[list[int], int]) -> None:
    costs, num_stages = case
    spans = split_layers(costs, [1] * num_stages)
    assert [layer for span in spans for layer in span] == list(range(len(costs))), (
        "all layers, in order"
    )
    assert len(spans) == num_stages
    assert all(len(span) > 0 for span in spans)
    worst = max(_groups(costs, [span.stop for span in spans]))
    assert worst == min(max(groups) for groups in _all_groups(costs, num_stages))


@repeatable
@given(_costs_and_stages())
@example(([1, 8, 3, 4, 9], 4))  # [1, 8], [3], [4], [9] is more even than [1], [8], [3, 4], [9]
def test_no_partition_with_that_worst_stage_is_more_even(case: tuple[list[int], int]) -> None:
    costs, num_stages = case
    groups = _groups(costs, [span.stop for span in split_layers(costs, [1] * num_stages)])
    as_good = [other for other in _all_groups(costs, num_stages) if max(other) == max(groups)]
    assert _squares(groups) == min(map(_squares, as_good))


def test_the_documented_split() -> None:
    assert split_layers([2, 1, 1, 1, 3], [1] * 2) == [range(0, 3), range(3, 5)]


def test_equal_layers_are_spread_evenly() -> None:
    for num_stages in range(1, 33):
        sizes = [len(span) for span in split_layers([7] * 32, [1] * num_stages)]
        assert max(sizes) - min(sizes) <= 1


def test_the_head_weighs_on_the_last_layer_and_the_embedding_on_none() -> None:
    """A token that one is sampled from, every third, uses all of the head, and any token one row of
    the embedding.
    """
    small = tiny_args(n_layers=6, moe=False)
    costs = layer_costs(small)
    assert costs[:-1] == [costs[0]] * 5
    assert costs[-1] - costs[0] == small.vocab_size * small.dim // 3
    large = ModelArgs(
        **{name: getattr(small, name) for name in small.__slots__}
        | {"vocab_size": 12 * costs[1] // small.dim}
    )
    assert [len(span) for span in split_layers(layer_costs(large), [1] * 3)] == [2, 3, 1]


def test_only_the_experts_that_a_token_uses_weigh() -> None:
    dense, mixture = tiny_args(moe=False), tiny_args(moe=True)
    assert mixture.moe is not None
    expert, gate = 3 * dense.dim * dense.hidden_dim, mixture.moe.num_experts * dense.dim
    gap = (mixture.moe.num_experts_per_tok - 1) * expert + gate
    assert [m - d for m, d in zip(layer_costs(mixture), layer_costs(dense), strict=True)] == [
        gap
    ] * 8


@pytest.mark.parametrize("stored_as", [None, Quantization.FP8])
@pytest.mark.parametrize("quantize", [None, *Quantization])
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@pytest.mark.parametrize(
    ("moe", "tied"), [(False, False), (True, False), (False, True), (True, True)]
)
def test_weight_bytes_are_those_of_the_real_stages(
    moe: bool, tied: bool, dtype: str, quantize: Quantization | None, stored_as: Quantization | None
) -> None:
    args = replace(tiny_args(n_layers=5, moe=moe, tied=tied), quantization=stored_as)
    for num_stages in (1, 2, 3, 5):
        plan = make_plan(args, _request(args, num_stages, dtype=dtype, quantize=quantize))
        for stage in plan.stages:
            with torch.device("meta"):
                model = StageModel(args, stage.layers).to(getattr(torch, dtype))
                quantize_linears(model, stage_tensors(args, stage.layers), stage.weight_format)
            assert stage.weight_bytes == sum(
                tensor.nbytes for tensor in model.state_dict().values()
            )


@pytest.mark.parametrize("stored", DTYPE_BYTES)
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@pytest.mark.parametrize("quantize", [None, Quantization.INT8])
def test_a_plan_has_the_bytes_that_a_stage_loads(
    stored: str, dtype: str, quantize: Quantization | None
) -> None:
    """Matrices in bfloat16 remain so where activations are in float32."""
    args = replace(tiny_args(n_layers=3), dtype=stored)
    for stage in make_plan(args, _request(args, 2, dtype=dtype, quantize=quantize)).stages:
        state = loaded_state(StageWorker.load(stage, RandomWeights()))
        assert stage.weight_bytes == sum(tensor.nbytes for tensor in state.values())
        stays = (stored, dtype) == ("bfloat16", "float32")
        found = {
            tensor.dtype
            for tensor in state.values()
            if tensor.ndim > 1 and tensor.dtype != torch.int8
        }
        assert found == {getattr(torch, stored if stays else dtype)}


# multiples of 32
FILLED = replace(
    tiny_args(n_layers=2, head_dim=32, moe=False), dim=128, hidden_dim=256, vocab_size=320
)
NOT_FILLED = replace(
    tiny_args(n_layers=2, head_dim=26, n_kv_heads=1), dim=104, hidden_dim=148, vocab_size=290
)


@pytest.mark.parametrize("quantize", [None, *Quantization])
@pytest.mark.parametrize(
    ("stored", "dtype"), [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")]
)
@pytest.mark.parametrize("geometry", [FILLED, NOT_FILLED], ids=["filled", "not filled"])
def test_a_plan_has_the_bytes_that_packed_stages_hold(
    geometry: ModelArgs, stored: str, dtype: str, quantize: Quantization | None
) -> None:
    """Counted in the memory of stages that are loaded as an actor loads them, whether or not
    matrices fill their last panel.
    """
    args = replace(geometry, dtype=stored)
    request = _request(args, 2, dtype=dtype, quantize=quantize, panel_rows=probe_local().panel_rows)
    for stage in make_plan(args, request).stages:
        model = StageWorker.load(stage, RandomWeights()).model
        packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
        unpacked = [
            module for module in model.modules() if isinstance(module, Linear | QuantizedLinear)
        ]
        assert packed
        assert not unpacked
        assert stage.packed_bytes == _bytes_held(model.state_dict().values())
        assert (stage.padding_bytes > 0.02 * stage.weight_bytes) == (geometry is NOT_FILLED), (
            "it makes a difference"
        )


def _bytes_held(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the memory behind these tensors, each once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors
    }
    return sum(storages.values())


def test_padding_is_what_completes_the_last_panel() -> None:
    """70 rows of 5 bfloat16, and of 5 int8, in panels of 32: 26 more. Of tensors that share a
    parameter the last has it.
    """
    half, int8 = (
        WeightFormat("bfloat16", stored="bfloat16", quantize=q) for q in (None, Quantization.INT8)
    )
    whole = TensorSpec("w", "w", (70, 5), quantizable=True)
    first, last = (
        TensorSpec("w", "w", (35, 5), first_row=row, parameter_rows=70, quantizable=True)
        for row in (0, 35)
    )
    assert [
        spec.padding_bytes(half, 32) for spec in (whole, first, last, TensorSpec("n", "n", (70,)))
    ] == [260, 0, 260, 0]
    assert [whole.padding_bytes(int8, rows) for rows in (1, 7, 32, 64, 70)] == [
        0,
        0,
        130,
        58 * 5,
        0,
    ]


def test_a_plan_for_this_machine_counts_its_panels_and_one_for_gpus_none() -> None:
    args = NOT_FILLED
    here = Hardware(node_cpus=(2,), node_memory=(GIB,), panel_rows=16)
    on_gpus = replace(here, gpus=(Gpu("L4", 4 * GIB),) * 2)
    plans = [plan_pipeline(EngineConfig(stages=2), args, hardware) for hardware in (here, on_gpus)]
    assert [stage.padding_bytes > 0 for plan in plans for stage in plan.stages] == [
        True,
        True,
        False,
        False,
    ]
    assert len({stage.weight_bytes for plan in plans for stage in plan.stages[:1]}) == 1, (
        "what is loaded is the same"
    )


def test_a_stage_that_fits_only_without_its_padding_is_refused() -> None:
    args = NOT_FILLED
    (stage,) = make_plan(args, _request(args, panel_rows=32)).stages
    needed = stage.packed_bytes + _sequence_bytes(args, _request(args), stage.layers)
    for memory, panel_rows, fits in (
        (needed, 32, True),
        (needed - stage.padding_bytes, 32, False),
        (needed - stage.padding_bytes, 1, True),
    ):
        request = _request(args, stage_memory=-(-memory * 10 // 9), panel_rows=panel_rows)
        with nullcontext() if fits else pytest.raises(PlanError, match="too little memory"):
            make_plan(args, request)


def test_a_quantized_plan_has_the_bytes_that_its_weights_leave() -> None:
    """Mistral 7B, by hand: 7,241,732,096 parameters, the embedding's and 65 norms' in bfloat16; the
    rest have a scale of 4 bytes per row.
    """
    args, wanted = PRESETS["mistral-7b-v0.1"], (None, *Quantization)
    half, int8, w8a8, fp8 = (
        make_plan(args, _request(args, stage_memory=80 * GIB, dtype="bfloat16", quantize=q))
        for q in wanted
    )
    rows = 32 * (4096 + 1024 + 1024 + 4096 + 14336 + 4096 + 14336) + 32_000
    kept = 32_000 * 4096 + 65 * 4096
    assert half.stages[0].weight_bytes == 2 * 7_241_732_096
    assert int8.stages[0].weight_bytes == 7_241_732_096 + kept + 4 * rows
    assert fp8.stages[0].weight_bytes == w8a8.stages[0].weight_bytes == int8.stages[0].weight_bytes


def test_weights_that_are_published_in_fp8_are_not_to_be_quantized_once_more() -> None:
    """int8 would make only the head smaller."""
    args = PRESETS["ministral-3-8b"]
    request = _request(args, dtype="bfloat16", max_model_len=1024, max_num_seqs=1)
    sizes = (
        replace(request, budgets=(StageBudget(size),))
        for size in range(8 * GIB, 12 * GIB, GIB // 16)
    )
    scarce = next(
        each for each in sizes if is_feasible(args, replace(each, quantize=Quantization.INT8))
    )
    assert not is_feasible(args, scarce)
    assert "--quantize" not in suggest_fixes(args, scarce)
    assert suggest_fixes(replace(args, quantization=None), scarce).endswith("--quantize int8")


def test_a_refused_plan_looks_at_the_tensors_of_a_layer_once_for_each_format(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # a model that nothing has planned
    args, seen = replace(PRESETS["mixtral-8x22b"], rope_theta=12345.0), []

    def record(args: ModelArgs, layer: int, *, with_experts: bool = True) -> Iterable[TensorSpec]:
        seen.append(layer)
        return layer_tensors(args, layer, with_experts=with_experts)

    monkeypatch.setattr(planner, "layer_tensors", record)
    scarce = PlanRequest((StageBudget(24 * GIB),) * 4, "bfloat16", 32768, 64, 16)
    assert "or 4 GPUs of" in suggest_fixes(args, scarce)
    assert sorted(seen) == sorted([*range(args.n_layers)] * 2), "bfloat16 and int8"


def test_a_plan_says_who_holds_what() -> None:
    plan = tiny_plan(tiny_args(n_layers=8), 4)
    assert [stage.label for stage in plan.stages] == [
        "Stage 1/4 layers 0-1",
        "Stage 2/4 layers 2-3",
        "Stage 3/4 layers 4-5",
        "Stage 4/4 layers 6-7",
    ]
    assert [(s.is_first, s.is_last) for s in plan.stages] == [
        (True, False),
        (False, False),
        (False, False),
        (False, True),
    ]
    assert {s.cache for s in plan.stages} == {plan.cache}


# ---- pages


def _request(
    args: ModelArgs, num_stages: int = 1, stage_memory: int = GIB, **changes: Any
) -> PlanRequest:
    fields: dict[str, Any] = {
        "budgets": (StageBudget(stage_memory),) * num_stages,
        "dtype": "float32",
        "max_model_len": args.max_seq_len,
        "max_num_seqs": 64,
        "page_size": 16,
    }
    return PlanRequest(**fields | changes)


def _rings(args: ModelArgs, request: PlanRequest) -> list[int]:
    return [
        ring_pages(window, request.page_size, request.max_model_len)
        for window in args.window_classes
    ]


def _sequence_bytes(args: ModelArgs, request: PlanRequest, layers: range) -> int:
    """Cache of one sequence of full length on a stage, counted layer by layer."""
    per_page = kv_bytes_per_position(args, request.dtype) * request.page_size
    return sum(
        ring_pages(args.windows[i], request.page_size, request.max_model_len) * per_page
        for i in layers
    )


WINDOWS = st.one_of(st.none(), st.integers(1, 200))


@st.composite
def _geometry(draw: st.DrawFn) -> tuple[ModelArgs, int]:
    windows = draw(st.lists(WINDOWS, min_size=1, max_size=5))
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    args = tiny_args(
        n_layers=len(windows),
        windows=windows,
        n_kv_heads=kv_heads,
        moe=draw(st.booleans()),
        max_seq_len=300,
    )
    return args, draw(st.integers(1, len(windows)))


@repeatable
@given(
    geometry=_geometry(),
    page_size=st.sampled_from([1, 2, 3, 16, 64, 512]),
    max_num_seqs=st.integers(1, 100),
    stage_memory=st.integers(0, 4 * 2**20),
    kv_cache_memory=st.one_of(st.none(), st.integers(0, 2 * 2**20)),
)
def test_a_plan_keeps_to_the_memory_or_is_refused(
    geometry: tuple[ModelArgs, int],
    page_size: int,
    max_num_seqs: int,
    stage_memory: int,
    kv_cache_memory: int | None,
) -> None:
    args, num_stages = geometry
    request = _request(
        args,
        num_stages,
        stage_memory=stage_memory,
        kv_cache_memory=kv_cache_memory,
        page_size=page_size,
        max_num_seqs=max_num_seqs,
        max_model_len=250,
    )
    usable = int(stage_memory * MEMORY_SHARE)
    roomy = make_plan(args, _request(args, num_stages))
    needed = [_sequence_bytes(args, request, stage.layers) for stage in roomy.stages]
    cache_room = [
        usable - s.weight_bytes if kv_cache_memory is None else kv_cache_memory
        for s in roomy.stages
    ]
    fits = all(
        budget >= need and stage.weight_bytes + max(need, kv_cache_memory or 0) <= usable
        for stage, need, budget in zip(roomy.stages, needed, cache_room, strict=True)
    )
    if not fits:
        with pytest.raises(PlanError):
            make_plan(args, request)
        return
    plan = make_plan(args, request)
    num_seqs = min(
        Fraction(max_num_seqs), *(Fraction(r, n) for r, n in zip(cache_room, needed, strict=True))
    )
    assert [stage.layers for stage in plan.stages] == [stage.layers for stage in roomy.stages]
    for stage, budget in zip(plan.stages, cache_room, strict=True):
        assert stage.cache_bytes <= budget
        assert stage.weight_bytes + stage.cache_bytes <= usable
    for window_class, ring in zip(plan.cache.classes, _rings(args, request), strict=True):
        assert window_class.ring_pages == ring
        assert ring <= window_class.num_pages <= ring * max_num_seqs, (
            "at least one whole sequence, at most all"
        )
        assert window_class.num_pages == int(ring * num_seqs), "as the poorest stage allows"


@pytest.mark.parametrize(("window", "page_size"), [(24, 2), (200, 1), (None, 1), (None, 16)])
def test_no_page_that_fits_is_lost(window: int | None, page_size: int) -> None:
    args = tiny_args(n_layers=2, window=window, max_seq_len=300)
    page_bytes = 2 * kv_bytes_per_position(args, "float32") * page_size
    ring = ring_pages(window, page_size, 300)
    requested = range(ring, 12 * ring)
    plans = [
        make_plan(args, _request(args, kv_cache_memory=n * page_bytes, page_size=page_size))
        for n in requested
    ]
    assert [plan.cache.classes[0].num_pages for plan in plans] == list(requested)


def test_pages_are_for_max_num_seqs_where_memory_is_plenty() -> None:
    args = tiny_args(windows=(24, None) * 4, max_seq_len=1000)
    plan = make_plan(args, _request(args, 2, max_num_seqs=7))
    assert [(c.window, c.ring_pages, c.num_pages) for c in plan.cache.classes] == [
        (24, 3, 21),
        (None, 63, 441),
    ]


@pytest.mark.parametrize(("num_pages", "max_num_seqs"), [(63, 63), (64, 64), (65, 64)])
def test_there_are_no_more_sequences_than_pages(num_pages: int, max_num_seqs: int) -> None:
    """Each holds at least a page: more rows in the stages' page tables would never be used."""
    args = tiny_args(n_layers=1, window=None, max_seq_len=320, moe=False)
    page_bytes = kv_bytes_per_position(args, "float32") * 16
    plan = make_plan(args, _request(args, max_num_seqs=64, kv_cache_memory=num_pages * page_bytes))
    assert plan.cache.classes[0].num_pages == num_pages
    assert plan.max_num_seqs == plan.stages[0].max_num_seqs == max_num_seqs


def test_the_poorest_stage_counts_the_pages() -> None:
    """Three layers in two stages: the stage with two of them can hold half as many pages, and all
    stages have its number.
    """
    args = tiny_args(n_layers=3, window=24, moe=False)
    page_bytes = kv_bytes_per_position(args, "float32") * 16
    plan = make_plan(args, _request(args, 2, kv_cache_memory=60 * page_bytes))
    assert sorted(len(stage.layers) for stage in plan.stages) == [1, 2]
    assert plan.cache.classes[0].num_pages == 30
    assert sorted(stage.cache_bytes for stage in plan.stages) == [30 * page_bytes, 60 * page_bytes]


def test_a_stage_with_heavy_weights_is_the_poorest() -> None:
    """Without --kv-cache-memory the cache takes what the weights leave, on the stage where that is
    least.
    """
    args = tiny_args(n_layers=2, window=None, max_seq_len=320)
    roomy = make_plan(args, _request(args, 2))
    heaviest = max(stage.weight_bytes for stage in roomy.stages)
    one_sequence = _sequence_bytes(args, _request(args), range(1))
    memory = -(-(heaviest + 5 * one_sequence) * 10 // 9)
    plan = make_plan(args, _request(args, 2, stage_memory=memory))
    assert plan.cache.classes[0].num_pages == 5 * 20
    assert heaviest + max(stage.cache_bytes for stage in plan.stages) <= memory * MEMORY_SHARE


def test_a_window_holds_eight_times_less_than_full_attention() -> None:
    """The headline of design.md: 32k tokens, a window of 4,096."""
    windowed, full = (tiny_args(window=window, max_seq_len=32768) for window in (4096, None))
    pages = [
        make_plan(a, _request(a, max_num_seqs=1)).cache.classes[0].num_pages
        for a in (windowed, full)
    ]
    assert pages == [257, 2048]


# ---- refusals


@pytest.mark.usefixtures("bare_gpus")
def test_too_little_memory_is_refused_with_the_numbers() -> None:
    """The message names the first stage that does not fit and all that it is made of."""
    args = tiny_args(n_layers=4, window=None, max_seq_len=1024)
    plan = make_plan(args, _request(args, 2))
    weights, sequence = (
        plan.stages[0].weight_bytes,
        _sequence_bytes(args, _request(args), plan.stages[0].layers),
    )
    memory = weights + sequence // 2
    with pytest.raises(PlanError) as refusal:
        make_plan(args, _request(args, 2, stage_memory=memory))
    assert (
        str(refusal.value)
        == f"too little memory for stage 1/2 (layers 0-1): it needs {format_bytes(weights)} for"
        f" weights and {format_bytes(sequence)} of cache (one sequence of 1024 positions takes"
        f" {format_bytes(sequence)}) and may use {format_bytes(int(memory * MEMORY_SHARE))}"
    )
    hardware = Hardware(node_cpus=(8,), node_memory=(2 * memory,))
    with pytest.raises(PlanError) as refusal:
        plan_pipeline(EngineConfig(stages=2), args, hardware)
    first, second = re.findall(
        r"possible: (\d+) GiB of free memory for each of 2 stages, or --max-model-len (\d+)",
        str(refusal.value),
    )[0]
    plan_pipeline(
        EngineConfig(stages=2), args, replace(hardware, node_memory=(2 * int(first) * GIB,))
    )
    plan_pipeline(EngineConfig(stages=2, max_model_len=int(second)), args, hardware)
    on_gpus = Hardware((8,), (GIB,), gpus=(Gpu("H200", memory),) * 2)
    with pytest.raises(PlanError, match=r"; possible: 4 GPUs of"):
        plan_pipeline(EngineConfig(stages=2), args, on_gpus)


def test_the_last_stage_may_be_the_one_that_does_not_fit() -> None:
    """One window class only on the last layers: their stage is the one that is named."""
    args = tiny_args(n_layers=4, windows=(1, 1, None, None), max_seq_len=1024)
    with pytest.raises(PlanError, match=r"stage 2/2 \(layers 2-3\)"):
        make_plan(args, _request(args, 2, kv_cache_memory=2**16))


@pytest.mark.parametrize("max_model_len", [1, 50, 1000, 30_000])
def test_the_least_cache_that_is_named_is_enough(max_model_len: int) -> None:
    """The second stage needs more than the first; sizes are rounded up."""
    args = tiny_args(n_layers=3, windows=(24, None, None), max_seq_len=30_000)
    fields = {"stage_memory": 64 * GIB, "max_model_len": max_model_len, "page_size": 1}
    with pytest.raises(
        PlanError, match=r"--kv-cache-memory is 0B, .* give --kv-cache-memory .* or more"
    ) as refusal:
        make_plan(args, _request(args, 3, kv_cache_memory=0, **fields))
    named = str(refusal.value).split("give --kv-cache-memory ")[1].split(" ")[0]
    least = EngineConfig.build(None, {"kv_cache_memory": named}).kv_cache_memory
    assert least is not None
    plan = make_plan(args, _request(args, 3, kv_cache_memory=least, **fields))
    assert all(c.num_pages >= c.ring_pages for c in plan.cache.classes)
    with pytest.raises(PlanError):
        make_plan(args, _request(args, 3, kv_cache_memory=least * 9 // 10 - 1, **fields))


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(PlanError, match="--stages is 9, but the model has only 8 layers"):
        tiny_plan(tiny_args(n_layers=8), 9)
    assert len(tiny_plan(tiny_args(n_layers=8), 8).stages) == 8


def test_a_context_past_the_checkpoints_is_refused() -> None:
    args = tiny_args(max_seq_len=100)
    assert make_plan(args, _request(args, max_model_len=99)).max_model_len == 99
    with pytest.raises(
        ConfigError, match="--max-model-len is 101; the checkpoint's context is 100 positions"
    ):
        make_plan(args, _request(args, max_model_len=101))


# ---- machines


def test_stages_follow_the_hardware_unless_given() -> None:
    args, config = tiny_args(n_layers=4), EngineConfig()
    cpu = Hardware(node_cpus=(8,), node_memory=(GIB,))
    gpus = Hardware(node_cpus=(8,), node_memory=(GIB,), gpus=(Gpu("A100", 8 * GIB),) * 3)
    many = Hardware(node_cpus=(8,), node_memory=(GIB,), gpus=(Gpu("A100", 8 * GIB),) * 16)
    assert [
        len(plan_pipeline(config, args, hardware).stages) for hardware in (cpu, gpus, many)
    ] == [2, 3, 4]
    assert len(plan_pipeline(EngineConfig(stages=4, local=True), args, gpus).stages) == 4
    with pytest.raises(PlanError, match="4 stages need a GPU each, and there are 3"):
        plan_pipeline(EngineConfig(stages=4), args, gpus)
    assert len(plan_pipeline(config, tiny_args(n_layers=1), cpu).stages) == 1, (
        "no stage may be empty"
    )
    assert plan_pipeline(config, args, cpu).stages[0].quantize is None
    assert (
        plan_pipeline(EngineConfig.build(None, {"quantize": "int8"}), args, cpu).stages[0].quantize
        == "int8"
    )


@pytest.mark.parametrize("wanted", [None, True, False])
def test_stages_and_expert_actors_are_as_batch_invariant_as_wanted(wanted: bool | None) -> None:
    cpu = Hardware(node_cpus=(8,), node_memory=(8 * GIB,))
    plan = plan_pipeline(EngineConfig(batch_invariant=wanted, expert_actors=2), tiny_args(), cpu)
    assert {stage.batch_invariant for stage in plan.stages} == {wanted}
    assert plan.experts is not None
    assert plan.experts.batch_invariant is wanted
    assert (
        replan(plan.experts, dict.fromkeys(plan.experts.placement, 1.0)).batch_invariant is wanted
    )


def test_stages_share_the_smallest_node_or_own_a_gpu() -> None:
    nodes = Hardware(node_cpus=(7, 9), node_memory=(1200, 900))
    assert [nodes.stage_memory(n) for n in (1, 2, 3, 4, 5)] == [900, 900, 450, 450, 300]
    assert [nodes.threads_per_stage(n) for n in (1, 2, 3, 5, 40)] == [7, 7, 3, 2, 1]
    assert [nodes.stages_at_once(4, threads) for threads in (1, 2, 4, 5, 9, 12)] == [
        4,
        4,
        3,
        2,
        1,
        1,
    ]
    assert nodes.stages_at_once(4, threads=4, num_pipelines=2) == 1
    assert replace(nodes, gpus=(Gpu("H200", 141),)).stages_at_once(4, threads=9) == 4
    roomy = replace(nodes, node_memory=(GIB, GIB))
    assert plan_pipeline(EngineConfig(stages=4), tiny_args(), roomy).max_concurrent_stages == 4
    assert (
        plan_pipeline(
            EngineConfig(stages=4, threads_per_stage=4), tiny_args(), roomy
        ).max_concurrent_stages
        == 3
    )


def test_stages_that_share_cores_get_one_micro_batch() -> None:
    node, config = Hardware((2,), (GIB,)), EngineConfig(stages=2, threads_per_stage=2)
    plan = plan_pipeline(config, tiny_args(), node)
    assert plan.is_oversubscribed
    policy = make_scheduler(config, plan).policy.policy
    assert isinstance(policy, BalancedPolicy)
    assert policy.max_in_flight == 1
    apart = plan_pipeline(EngineConfig(stages=2), tiny_args(), node)
    assert not apart.is_oversubscribed
    assert make_scheduler(config, apart).policy.max_in_flight == 3
    gpus = (Gpu("A100", 77), Gpu("A100", 99))
    assert [Hardware((7,), (1200,), gpus).stage_memory(n) for n in (2, 3)] == [77, 38]


def test_stages_that_share_a_gpu_get_equal_parts_of_it() -> None:
    args, gpus = tiny_args(n_layers=8), (Gpu("A100", 77 * GIB, "a"), Gpu("A100", 99 * GIB, "b", 0))
    two_nodes = Hardware(node_cpus=(8, 8), node_memory=(GIB, GIB), gpus=gpus)
    plan = plan_pipeline(EngineConfig(stages_per_gpu=3), args, two_nodes)
    assert (len(plan.stages), plan.max_concurrent_stages) == (6, 2)
    assert make_scheduler(EngineConfig(), plan).policy.max_in_flight == 2
    assert (
        plan_pipeline(
            EngineConfig(stages_per_gpu=3, stages=4), args, two_nodes
        ).max_concurrent_stages
        == 2
    )
    assert len(plan_pipeline(EngineConfig(stages_per_gpu=5), args, two_nodes).stages) == 8, (
        "no stage may be empty"
    )
    assert plan_pipeline(EngineConfig(stages_per_gpu=8), args, two_nodes).max_concurrent_stages == 1
    assert [two_nodes.threads_per_stage(n, 4) for n in (1, 4, 6, 8, 9)] == [
        8,
        2,
        2,
        2,
        1,
    ], "those of a GPU are on one node"
    on_cpu = replace(two_nodes, gpus=())
    assert plan_pipeline(EngineConfig(stages_per_gpu=3), args, on_cpu) == plan_pipeline(
        EngineConfig(), args, on_cpu
    )


def test_a_stage_may_have_the_cores_of_the_largest_node() -> None:
    nodes = Hardware(node_cpus=(7, 9), node_memory=(GIB, GIB))
    assert (
        len(plan_pipeline(EngineConfig(threads_per_stage=9, stages=4), tiny_args(), nodes).stages)
        == 4
    )
    with pytest.raises(
        PlanError,
        match="--threads-per-stage is 10, but no machine here has more cores than 9; use at most 9",
    ):
        plan_pipeline(EngineConfig(threads_per_stage=10), tiny_args(), nodes)


# ---- the configuration

# As in section 13 of the design, for what exists so far. None: chosen from the model and the
# machines.
DEFAULTS = {
    "model": DEMO_MODEL,
    "load_format": "auto",
    "stages": None,
    "local": False,
    "json": False,
    "address": None,
    "dtype": "auto",
    "quantize": None,
    "batch_invariant": None,
    "max_model_len": None,
    "max_num_seqs": None,
    "max_num_batched_tokens": None,
    "enable_prefix_caching": True,
    "async_scheduling": True,
    "speculative_config": None,
    "share_prefixes": False,
    "itl_target_ms": None,
    "page_size": 16,
    "kv_cache_memory": None,
    "kv_cache_dtype": "auto",
    "threads_per_stage": None,
    "stages_per_gpu": 1,
    "gpu_memory": None,
    "gpu_speed": None,
    "link": "object-store",
    "inline_hidden_states_below": None,
    "step_timeout": 30.0,
    "expert_actors": 0,
    "expert_replicas": 1,
    "expert_memory": None,
    "expert_load": None,
    "stage_times": None,
    "expert_micro_batches": 2,
    "seed": 0,
    "served_model_name": None,
    "host": "127.0.0.1",
    "port": 8000,
    "grpc_port": 9000,
    "replicas": 1,
    "max_replicas": None,
    "autoscale_load": 0.75,
    "autoscale_tokens": None,
    "upscale_delay": 30.0,
    "downscale_delay": 600.0,
    "max_queued_requests": 256,
    "max_queued_tokens": 2**17,
    "drain_timeout": None,
    "slow_client_timeout": 60.0,
    "dashboard": False,
    "move_experts": False,
    "public_metrics": False,
    "strict_requests": False,
    "allowed_origins": (),
    "log_format": "text",
    "log_level": "warning",
    "tracing_exporter": None,
    "tracing_sampling_ratio": 0.01,
    "api_key": (),
    "api_key_file": None,
    "jobs_database": None,
    "jobs_storage": None,
    "jobs_concurrency": None,
    "jobs_retention": 30,
    "jobs_max_open": 1000,
    "jobs_max_lines": 2**24,
    "jobs_max_bytes": 2**36,
    "jobs_url_prefixes": (),
}
SWITCHES = {  # flag and key: attribute
    "local": "local",
    "json": "json_output",
    "batch_invariant": "batch_invariant",
    "enable_prefix_caching": "enable_prefix_caching",
    "async_scheduling": "async_scheduling",
}
# For a file only: rarely needed, or (max_in_flight) measured later and set by hand until then.
KEYS_WITHOUT_FLAG = {
    "placement_timeout",
    "max_in_flight",
    "ingress_replicas",
    "max_body_bytes",
    "stream_writes_per_s",
}
FLAGS_OF_ONE_RUN = {
    "prompts",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "config",
    "show_experts",
    "folder",
}
OF_GENERATE = {"local", "seed"}  # serve has no use for them: every request brings its seed
OF_SERVE = {
    "served_model_name",
    "host",
    "port",
    "grpc_port",
    "replicas",
    "max_replicas",
    "autoscale_load",
    "autoscale_tokens",
    "upscale_delay",
    "downscale_delay",
    "max_queued_requests",
    "max_queued_tokens",
    "share_prefixes",
    "drain_timeout",
    "slow_client_timeout",
    "dashboard",
    "move_experts",
    "public_metrics",
    "strict_requests",
    "allowed_origins",
    "log_format",
    "log_level",
    "tracing_exporter",
    "tracing_sampling_ratio",
}
OF_SERVE |= {"api_key", "api_key_file"}
OF_SERVE |= {
    "jobs_database",
    "jobs_storage",
    "jobs_concurrency",
    "jobs_retention",
    "jobs_url_prefixes",
}
OF_SERVE |= {"jobs_max_open", "jobs_max_lines", "jobs_max_bytes"}


def test_a_scheduler_caches_prefixes_as_configured() -> None:
    plan = make_plan(
        PRESETS["mistral-7b-v0.1"], PlanRequest((StageBudget(80 * GIB),), "bfloat16", 4096, 64, 16)
    )
    limits = make_scheduler(EngineConfig(), plan, model="a mark").limits
    assert (limits.enable_prefix_caching, limits.share_prefixes, limits.model) == (
        True,
        False,
        "a mark",
    )
    changed = make_scheduler(
        EngineConfig(enable_prefix_caching=False, share_prefixes=True), plan
    ).limits
    assert (changed.enable_prefix_caching, changed.share_prefixes) == (False, True)


@pytest.mark.parametrize(
    ("settings", "is_async"),
    [
        ({}, True),
        ({"async_scheduling": False}, False),
        ({"local": True}, False),
        ({"max_in_flight": 2}, False),
        ({"speculative_config": '{"num_speculative_tokens": 3}'}, False),
        ({"stages": 2}, False),
        ({"stages": 2, "threads_per_stage": 1}, False),
        # one has all cores, then the other, and the router between them
        ({"stages": 2, "threads_per_stage": 8}, False),
        ({"stages": 3, "threads_per_stage": 4}, False),
    ],
)
def test_one_stage_is_scheduled_asynchronously_unless_that_is_impossible(
    settings: dict[str, Any], is_async: bool
) -> None:
    config = EngineConfig.build(None, {"stages": 1} | settings)
    plan = plan_pipeline(
        config, PRESETS["mistral-7b-v0.1"], Hardware(node_cpus=(8,), node_memory=(80 * GIB,))
    )
    scheduler = make_scheduler(config, plan)
    assert scheduler.limits.async_scheduling == is_async
    assert getattr(scheduler.policy.policy, "_async_scheduling", False) == is_async


@pytest.mark.parametrize(
    ("stages", "per_gpu", "num_gpus", "is_async"),
    [(2, 2, 1, True), (4, 2, 2, False), (2, 1, 2, False)],
)
def test_stages_that_share_one_gpu_are_scheduled_asynchronously(
    stages: int, per_gpu: int, num_gpus: int, is_async: bool
) -> None:
    gpus = tuple(Gpu("H100", 80 * GIB, index=index) for index in range(num_gpus))
    config = EngineConfig(stages=stages, stages_per_gpu=per_gpu)
    plan = plan_pipeline(config, PRESETS["mistral-7b-v0.1"], Hardware((16,), (80 * GIB,), gpus))
    scheduler = make_scheduler(config, plan)
    assert scheduler.limits.async_scheduling == is_async
    assert scheduler.policy.policy.max_in_flight == (
        2 if is_async else min(num_gpus, stages) + (num_gpus == stages)
    )  # type: ignore[attr-defined]


def test_a_stage_with_expert_actors_is_not_scheduled_asynchronously() -> None:
    """Its step begins before the one before it has sampled."""
    config = EngineConfig(stages=1, expert_actors=1)
    plan = plan_pipeline(
        config, PRESETS["mixtral-8x7b"], Hardware(node_cpus=(8,), node_memory=(200 * GIB,))
    )
    assert plan.experts
    assert config.async_scheduling
    assert not make_scheduler(config, plan).limits.async_scheduling


def test_a_scheduler_drafts_as_configured_and_rings_have_room_for_it() -> None:
    config = EngineConfig.build(None, {"speculative_config": '{"num_speculative_tokens": 17}'})
    here = Hardware(node_cpus=(8,), node_memory=(80 * GIB,))
    plans = [
        plan_pipeline(each, PRESETS["mistral-7b-v0.1"], here) for each in (EngineConfig(), config)
    ]
    assert [plan.cache.classes[0].ring_pages for plan in plans] == [
        257,
        266,
    ], "4095 and 4238 positions before a token's own page"
    assert [
        make_scheduler(each, plans[1]).limits.speculative for each in (EngineConfig(), config)
    ] == [
        None,
        SpeculativeConfig(17, 2, 5),
    ]


def test_defaults_are_the_designs() -> None:
    config = EngineConfig()
    assert {name: getattr(config, SWITCHES.get(name, name)) for name in DEFAULTS} == DEFAULTS


def test_the_demo_keeps_its_name_by_whatever_path(tmp_path: Path) -> None:
    """Replicas see the folder with its links resolved; the command that names the model may not."""
    link = tmp_path / "link"
    link.symlink_to(DEMO_MODEL)
    assert EngineConfig(model=link).model_name == EngineConfig().model_name == "demo"
    assert EngineConfig(model=tmp_path).model_name == tmp_path.name


@pytest.mark.parametrize(("name", "others"), [("generate", OF_SERVE), ("serve", OF_GENERATE)])
def test_every_key_is_a_flag_and_every_flag_a_key(name: str, others: set[str]) -> None:
    command = typer.main.get_command(cli.app).commands[name]  # type: ignore[attr-defined]
    flags = {
        p.name: p.opts for p in command.params if p.name not in FLAGS_OF_ONE_RUN and not p.hidden
    }
    assert EngineConfig.key_names() - KEYS_WITHOUT_FLAG == DEFAULTS.keys()
    assert flags.keys() == DEFAULTS.keys() - others
    assert all(opts == [f"--{name.replace('_', '-')}"] for name, opts in flags.items())
    assert all(p.default is None for p in command.params if p.name in flags), (
        "or a flag that was not given would hide a key"
    )


LOAD_FILE = Path(__file__).parents[2] / "support" / "expert_load.json"
TIMES_FILE = LOAD_FILE.with_name("stage_times.json")
# flag, its text, and what the configuration holds then
SETTINGS: list[tuple[str, str, object]] = [
    ("model", "some/folder", Path("some/folder")),
    ("load-format", "dummy", "dummy"),
    ("stages", "3", 3),
    ("stages-per-gpu", "4", 4),
    ("address", "10.0.0.1:6379", "10.0.0.1:6379"),
    ("dtype", "float16", "float16"),
    ("quantize", "int8", "int8"),
    ("max-model-len", "77", 77),
    ("max-num-seqs", "5", 5),
    ("max-num-batched-tokens", "33", 33),
    ("itl-target-ms", "40", 40.0),
    ("speculative-config", '{"num_speculative_tokens": 3}', SpeculativeConfig(3, 2, 5)),
    ("page-size", "8", 8),
    ("kv-cache-memory", "512MiB", 512 * 2**20),
    ("kv-cache-dtype", "fp8", "fp8"),
    ("threads-per-stage", "2", 2),
    ("gpu-memory", "24GiB,80GiB", (24 * GIB, 80 * GIB)),
    ("gpu-speed", "1,3", (1, 3)),
    ("step-timeout", "7.5", 7.5),
    ("link", "direct", "direct"),
    ("inline-hidden-states-below", "2MiB", 2 * 2**20),
    ("expert-actors", "4", 4),
    ("expert-replicas", "auto", "auto"),
    ("expert-replicas", "2", 2),
    ("expert-memory", "4GiB,8GiB", (4 * GIB, 8 * GIB)),
    ("expert-load", str(LOAD_FILE), ((1, 2), (3, 4))),
    ("stage-times", str(TIMES_FILE), (StageTime(0, 8, 0.9), StageTime(9, 15, 0.85))),
    ("expert-micro-batches", "3", 3),
    ("seed", "-7", -7),
]


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs ``tramontane generate`` up to the point where its configuration is complete; returns
    that and the sampling.
    """

    def run(*arguments: str) -> tuple[EngineConfig, Any]:
        seen: list[tuple[EngineConfig, Any]] = []

        async def stop(
            config: EngineConfig,
            _prompts: object,
            sampling: object,
            _display: object,
            _show: object,
        ) -> NoReturn:
            seen.append((config, sampling))
            raise RequestError("seen enough")

        monkeypatch.setattr("tramontane.cluster.cli.generate.run_generate", stop)
        monkeypatch.setattr(sys, "argv", ["tramontane", "generate", *arguments, "The"])
        with pytest.raises(SystemExit):
            cli.main()
        return seen[0]

    return run


@pytest.mark.parametrize(("flag", "text", "value"), SETTINGS)
def test_a_flag_and_a_key_say_the_same(
    configured: Any, tmp_path: Path, flag: str, text: str, value: object
) -> None:
    key = flag.replace("-", "_")
    by_flag, _ = configured(f"--{flag}={text}")
    assert getattr(by_flag, key) == value
    for spelling in (flag, key):
        (tmp_path / "file.yaml").write_text(f"{spelling}: {text}\n")
        by_key, _ = configured("--config", str(tmp_path / "file.yaml"))
        assert by_key == by_flag


def test_all_settings_are_tried() -> None:
    assert {
        flag.replace("-", "_") for flag, _, _ in SETTINGS
    } | SWITCHES.keys() == DEFAULTS.keys() - OF_SERVE


@pytest.mark.parametrize("flag", list(SWITCHES))
def test_switches(configured: Any, tmp_path: Path, flag: str) -> None:
    changed = not DEFAULTS[flag]
    (tmp_path / "file.yaml").write_text(f"{flag}: {str(changed).lower()}\n")
    assert (
        getattr(
            configured(f"--{'' if changed else 'no-'}{flag.replace('_', '-')}")[0], SWITCHES[flag]
        )
        is changed
    )
    assert (
        getattr(configured("--config", str(tmp_path / "file.yaml"))[0], SWITCHES[flag]) is changed
    )


def test_a_flag_wins_over_the_file(configured: Any, tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text("stages: 3\nseed: 5\n")
    config, sampling = configured("--config", str(tmp_path / "file.yaml"), "--stages", "1")
    assert (config.stages, config.seed) == (1, 5)
    assert sampling.seed == 5


def test_an_empty_file_changes_nothing(configured: Any, tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text("# nothing yet\n")
    assert configured("--config", str(tmp_path / "file.yaml"))[0] == EngineConfig()


def test_sampling_flags_and_their_defaults(configured: Any) -> None:
    _, sampling = configured()
    assert (
        sampling.max_tokens,
        sampling.temperature,
        sampling.top_p,
        sampling.top_k,
        sampling.seed,
    ) == (128, 0.8, 1.0, 0, 0)
    _, sampling = configured(
        "--max-tokens=3", "--temperature=0", "--top-p=0.5", "--top-k=9", "--seed=4"
    )
    assert (
        sampling.max_tokens,
        sampling.temperature,
        sampling.top_p,
        sampling.top_k,
        sampling.seed,
    ) == (3, 0.0, 0.5, 9, 4)


def test_a_plan_is_frozen() -> None:
    plan: PipelinePlan = tiny_plan(tiny_args())
    with pytest.raises(AttributeError):
        plan.max_model_len = 1  # type: ignore[misc]


def test_memory_is_described_with_its_option() -> None:
    budgets = (StageBudget(24 * GIB),) * 2
    plan = make_plan(
        PRESETS["mistral-7b-v0.1"],
        PlanRequest(budgets, "bfloat16", 4096, 64, 16, kv_cache_memory=GIB // 2),
    )
    cache = "up to 512 MiB of key/value cache per stage (--kv-cache-memory)"
    assert plan.describe_memory() == f"13.5 GiB of weights, {cache}"
    assert plan.describe_memory(num_pipelines=3) == f"40.5 GiB of weights, {cache}"
    assert cache_note(plan) == f"{cache}, 4096 positions per sequence (--max-model-len)"
