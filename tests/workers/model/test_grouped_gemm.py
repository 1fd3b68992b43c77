"""Experts as grouped products: the same as one after the other, without a look at the sizes, and
only where there is a kernel.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness import PROMPTS, run_in_process
from tiny_models import (
    experts_together,
    groups_of,
    loaded_state,
    random_model,
    split_model,
    tiny_args,
    tiny_plan,
    write_checkpoint,
)
from torch import Tensor

from tramontane.proto.model_args import ModelArgs, MoeArgs
from tramontane.proto.model_folder import Layout, RandomWeights, WeightSource
from tramontane.proto.weight_format import Quantization
from tramontane.workers.model import moe
from tramontane.workers.model.expert_kernels import as_stacked_view
from tramontane.workers.model.moe import ExpertPermutation, LocalExperts
from tramontane.workers.model.rotary import RotaryTables, rotary_tables
from tramontane.workers.model.transformer import StageModel
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.weights import loader
from tramontane.workers.weights.loader import load_module, supports_grouped_gemm
from tramontane.workers.weights.tensor_specs import stage_tensors

ARGS = tiny_args(n_layers=4)
LAYER = 2
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def _experts(dtype: torch.dtype, together: bool) -> LocalExperts:
    model = random_model(ARGS)
    made = experts_together(model, dtype) if together else model.to(dtype)
    assert isinstance(made.experts, LocalExperts)
    made.finalize_weights(torch.device("cpu"))
    assert made.experts.is_graph_safe == together
    return made.experts


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    "sizes", [[2, 0, 5, 1], [0, 0, 7, 0], [0, 1, 0, 0], [3, 3, 3, 3], [0, 0, 0, 64]], ids=str
)
def test_grouped_products_are_those_of_each_expert(dtype: torch.dtype, sizes: list[int]) -> None:
    """Against each other, and against the definition in double precision."""
    rows_CD = torch.randn(sum(sizes), ARGS.dim, generator=torch.Generator().manual_seed(1)).to(
        dtype
    )
    with torch.inference_mode():
        grouped, each = (
            _experts(dtype, together)(LAYER, rows_CD, groups_of(sizes))
            for together in (True, False)
        )
    assert grouped.dtype == dtype
    torch.testing.assert_close(grouped, each, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    defined = _by_definition(dtype, rows_CD, sizes)
    torch.testing.assert_close(
        grouped.double(), defined, rtol=2 * TOLERANCES[dtype], atol=2 * TOLERANCES[dtype]
    )


def _by_definition(dtype: torch.dtype, rows_CD: Tensor, sizes: Sequence[int]) -> Tensor:
    state = random_model(ARGS).to(dtype).double().state_dict()
    done, start = [], 0
    for expert, size in enumerate(sizes):
        x = rows_CD[start : start + size].double()
        gate, up = (x @ state[f"experts.layers.{LAYER}.{expert}.w13.weight"].T).chunk(2, dim=-1)
        done.append(
            (torch.nn.functional.silu(gate) * up)
            @ state[f"experts.layers.{LAYER}.{expert}.w2.weight"].T
        )
        start += size
    return torch.cat(done)


@pytest.mark.parametrize("together", [True, False])
def test_rows_after_the_last_group_disturb_nothing(together: bool) -> None:
    rows_CD = torch.randn(9, ARGS.dim)
    experts, groups = _experts(torch.float32, together), groups_of([2, 0, 3, 1])
    with torch.inference_mode():
        expected = experts(LAYER, rows_CD[:6], groups)
        rows_CD[6:] = torch.nan
        assert torch.equal(experts(LAYER, rows_CD, groups)[:6], expected)


def test_choices_are_sorted_by_expert() -> None:
    """The example of ``ExpertPermutation``, and padding."""
    by_expert = ExpertPermutation.of(torch.tensor([[1, 0], [1, 2], [0, 1]]), 3)
    assert by_expert.order_C.tolist() == [1, 4, 0, 2, 5, 3]
    assert by_expert.offsets_E.tolist() == [2, 5, 6]
    assert by_expert.offsets_E.dtype == torch.int32
    assert by_expert.sizes == [2, 3, 1]
    padded = ExpertPermutation.of(torch.tensor([[1, 0], [4, 4], [0, 3]]), 4)
    assert padded.order_C.tolist() == [1, 4, 0, 5, 2, 3]
    assert padded.sizes == [2, 1, 0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_of_three_experts_has_the_same_sum_among_others(dtype: torch.dtype) -> None:
    """With three the order of addition matters."""
    generator = torch.Generator().manual_seed(0)
    expert_ids_Tk = torch.rand(9, 5, generator=generator).argsort(-1)[:, :3]
    weights_Tk = torch.rand(9, 3, generator=generator).to(dtype)
    outs_TkD = torch.randn(9, 3, 70, generator=generator).to(dtype)

    def combined(tokens: slice) -> Tensor:
        groups = ExpertPermutation.of(expert_ids_Tk[tokens], 5)
        return groups.combine(outs_TkD[tokens].flatten(0, 1)[groups.order_C], weights_Tk[tokens])

    together_TD = combined(slice(None))
    for count in (1, 2, 3, 8):
        for first in range(9 - count):
            tokens = slice(first, first + count)
            assert torch.equal(combined(tokens), together_TD[tokens])


def test_matrices_are_a_stack_where_they_lie_evenly_in_one_block() -> None:
    block = torch.arange(40.0)
    views = [block[start : start + 8].view(2, 4) for start in (8, 16, 24)]
    stack = as_stacked_view(views)
    assert stack is not None
    assert torch.equal(stack, block[8:32].view(3, 2, 4))
    assert stack.data_ptr() == views[0].data_ptr()
    others: list[list[Tensor]] = [
        [],
        [views[0], views[2]],
        [views[1], views[0], views[2]],
        [views[0], block[16:24].view(4, 2)],
        [views[0], block[16:24].view(4, 2).T],
        [block[:8].view(2, 4), torch.zeros(16)[8:].view(2, 4)],
    ]
    assert [as_stacked_view(each) for each in others] == [None] * len(others)


@pytest.mark.parametrize("quantize", [None, Quantization.INT8, Quantization.FP8])
@pytest.mark.parametrize("made", [True, False])
def test_experts_are_loaded_together_without_a_copy(
    tmp_path: Path, made: bool, quantize: Quantization | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, whose matrices are not packed."""
    monkeypatch.setattr(loader, "pack_linears", lambda *_: {})
    monkeypatch.setattr(moe, "select_gpu_kernels", lambda stacks, *_: stacks)
    weights: WeightSource = RandomWeights() if made else write_checkpoint(tmp_path / "model", ARGS)
    apart, together = (
        _loaded(weights, experts_together, quantize) for experts_together in (False, True)
    )
    experts = together.model.experts
    assert isinstance(experts, LocalExperts)
    assert experts.is_graph_safe
    assert not apart.model.experts.is_graph_safe  # type: ignore[union-attr]
    state = loaded_state(together)
    for name, tensor in loaded_state(apart).items():
        assert torch.equal(state[name], tensor), name
    stack = experts._stacks[LAYER]
    ends = state[f"experts.layers.{LAYER}.3.w2.weight"]
    assert stack.w2_EDF[3].data_ptr() == ends.data_ptr(), "or there are two copies"
    assert ends.untyped_storage().nbytes() == 4 * ends.nbytes
    assert stack.is_quantized == (quantize is not None)
    if stack.w13_scale_E2F is not None:
        assert torch.equal(stack.w13_scale_E2F[1], state[f"experts.layers.{LAYER}.1.w13.scale"])
        assert len(stack.w13_scale_E2F.unique()) > len(stack.w13_scale_E2F), "each row has its own"


def _loaded(
    weights: WeightSource, experts_together: bool, quantize: Quantization | None
) -> StageWorker:
    plan = tiny_plan(ARGS, dtype="bfloat16", quantize=quantize).stages[0]

    def tensors_of(layout: Layout) -> list:  # type: ignore[type-arg]
        return list(stage_tensors(ARGS, plan.layers, layout))

    def make() -> StageModel:
        return StageModel(ARGS, plan.layers)

    model = load_module(
        make, tensors_of, plan, weights, "cpu", lambda _read, _loaded: None, experts_together
    )
    return StageWorker(plan, model)


@pytest.mark.parametrize("num_stages", [1, 4])
def test_same_tokens_and_the_same_count_of_them(num_stages: int) -> None:
    plan, model = tiny_plan(ARGS, num_stages), random_model(ARGS)
    apart, together = (
        split_model(model, plan),
        [_worker_together(worker) for worker in split_model(model, plan)],
    )
    assert run_in_process(plan, together, PROMPTS[:24]) == run_in_process(plan, apart, PROMPTS[:24])
    load = [layer for worker in together for layer in worker.model.expert_load.items()]
    assert load == [layer for worker in apart for layer in worker.model.expert_load.items()]
    assert [layer for layer, _ in load] == [*range(ARGS.n_layers)]
    assert {sum(tokens) for _, tokens in load} == {sum(load[0][1])}
    assert sum(load[0][1]) > 2 * sum(map(len, PROMPTS[:24]))


def _worker_together(worker: StageWorker) -> StageWorker:
    return StageWorker(worker.plan, experts_together(worker.model))


def _attend(_layer: int, q_THd: Tensor, _k: Tensor, _v: Tensor) -> Tensor:
    return q_THd


def _rotary(
    num_tokens: int, args: ModelArgs, dtype: torch.dtype, device: str = "cpu"
) -> RotaryTables:
    return rotary_tables(torch.arange(num_tokens, device=device), args, dtype)


@pytest.mark.parametrize("together", [True, False])
def test_padding_is_given_to_no_expert_and_not_counted(together: bool) -> None:
    model = experts_together(random_model(ARGS)) if together else random_model(ARGS)
    hidden_TD = torch.randn(5, ARGS.dim, generator=torch.Generator().manual_seed(1))
    is_padding_T = torch.tensor([False, True, False, False, True])
    with torch.inference_mode():
        rotary = _rotary(5, ARGS, torch.float32)
        alone = model(hidden_TD, rotary, _attend)
        before = model.expert_load
        hidden_TD[is_padding_T] = torch.nan  # as uninitialized memory may be
        padded = model(hidden_TD, rotary, _attend, None, is_padding_T)
    torch.testing.assert_close(padded[~is_padding_T], alone[~is_padding_T])
    after = model.expert_load
    assert {layer: sum(after[layer]) - sum(before[layer]) for layer in before} == dict.fromkeys(
        range(4), 3 * 2
    )


class _Dirty(LocalExperts):
    """Leaves in memory what multiplies to nothing good."""

    def forward(self, layer: int, rows_CD: Tensor, groups: ExpertPermutation) -> Tensor:
        done_CD = torch.full_like(rows_CD, torch.nan)
        own = slice(sum(groups.sizes))
        done_CD[own] = super().forward(layer, rows_CD, groups)[own]
        return done_CD


def test_what_experts_make_of_padding_is_nothing() -> None:
    model = random_model(ARGS)
    model.experts = _Dirty(ARGS, range(ARGS.n_layers))
    for is_padding in ([False, True, True], [True, True, True]):
        is_padding_T = torch.tensor(is_padding)
        with torch.inference_mode():
            out_TD = model(
                torch.randn(3, ARGS.dim),
                _rotary(3, ARGS, torch.float32),
                _attend,
                None,
                is_padding_T,
            )
        assert out_TD.isfinite().all()


@pytest.mark.parametrize("with_padding", [False, True])
def test_nothing_is_read_on_the_host(with_padding: bool) -> None:
    """Tensors on the meta device have shapes and no numbers: reading one fails."""
    args = replace(ARGS, moe=MoeArgs(8, 2))
    with torch.device("meta"):
        model = StageModel(args, range(2, 4)).to(torch.bfloat16)
        model._expert_tokens.to_device(torch.device("meta"))
        experts = model.experts
        assert isinstance(experts, LocalExperts)
        hidden_TD = torch.empty(5, args.dim, dtype=torch.bfloat16)
        is_padding_T = torch.empty(5, dtype=torch.bool) if with_padding else None
        with torch.inference_mode():
            rotary = _rotary(5, args, torch.bfloat16, "meta")
            with pytest.raises(RuntimeError, match="no data"):
                model(hidden_TD, rotary, _attend, None, is_padding_T)
            for layer, own in experts.layers.items():
                _share_a_block(list(own.children()))
                assert not experts.is_graph_safe, layer
            experts.finalize_weights(torch.bfloat16)
            assert experts.is_graph_safe
            assert model(hidden_TD, rotary, _attend, None, is_padding_T).shape == (5, args.dim)
        with pytest.raises(NotImplementedError, match="meta"):
            _ = model.expert_load


def _share_a_block(experts: list[torch.nn.Module]) -> None:
    for name in ("w13", "w2"):
        linears = [expert.get_submodule(name) for expert in experts]
        block = torch.empty(len(linears), *linears[0].weight.shape, dtype=torch.bfloat16)  # type: ignore[arg-type, call-overload]
        for each, place in zip(linears, block, strict=True):
            each.weight = torch.nn.Parameter(place)


def _plan_of(**changes: object) -> Callable[[], bool]:
    plan = replace(tiny_plan(ARGS).stages[0], **{"dtype": "bfloat16", **changes})  # type: ignore[arg-type]
    return lambda: supports_grouped_gemm(plan, "cuda:0")


@pytest.mark.parametrize(
    ("query", "capability", "why"),
    [
        (_plan_of(), (9, 0), ""),
        (_plan_of(), (10, 3), ""),
        (_plan_of(), (8, 9), "capability is 8.9"),
        (_plan_of(), (12, 0), "capability is 12.0"),
        (_plan_of(dtype="float16"), (9, 0), "activations are float16, not bfloat16"),
        (_plan_of(quantize="int8"), (8, 0), ""),
        (_plan_of(quantize="fp8", dtype="float16"), (9, 0), ""),
        (_plan_of(quantize="int8", dtype="float32"), (9, 0), "activations are float32"),
        (_plan_of(args=replace(ARGS, hidden_dim=44)), (9, 0), "widths 32 and 44"),
    ],
)
def test_only_where_torch_has_a_kernel(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    query: Callable[[], bool],
    capability: tuple[int, int],
    why: str,
) -> None:
    """A GPU that goes without says so, once."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with caplog.at_level(logging.WARNING):
        assert query() == (not why)
    assert len(caplog.records) == bool(why)
    assert why in caplog.text


def test_stages_without_experts_and_processors_do_without_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = tiny_plan(ARGS).stages[0]
    dense = tiny_plan(tiny_args(moe=False)).stages[0]
    assert not any(
        (
            supports_grouped_gemm(stage, "cpu"),
            supports_grouped_gemm(dense, "cuda:0"),
            supports_grouped_gemm(replace(stage, experts_inside=False), "cuda:0"),
        )
    )
    assert not caplog.records
    assert LocalExperts(dense.args, dense.layers).is_graph_safe, "there is nothing to wait for"
