"""Quantized matrices: how far the numbers may be off, the product for every shape, and the same
tokens in every split.
"""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import PROMPTS, random_ids, run_in_process
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from stage_driver import Driver
from tiny_models import (
    SINGLE_NAME,
    loaded_state,
    random_model,
    tiny_args,
    tiny_plan,
    write_checkpoint,
)

from tramontane.proto.errors import CheckpointError
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.model_folder import RandomWeights
from tramontane.proto.presets import PRESETS, tiny_variant
from tramontane.proto.weight_format import Quantization, WeightFormat
from tramontane.workers.kernels.linear import blockwise_linear
from tramontane.workers.kernels.quantized_linear import QuantizedLinear
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.weights import quantize as quantize_module
from tramontane.workers.weights import tensor_specs
from tramontane.workers.weights.quantize import (
    MAX_MAGNITUDE,
    NUMBER_DTYPES,
    load_tensor,
    quantize_weight,
)
from tramontane.workers.weights.random_checkpoint import random_parameter
from tramontane.workers.weights.tensor_specs import TensorSpec, stage_tensors

INT8, FP8, CPU = Quantization.INT8, Quantization.FP8, torch.device("cpu")
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def _steps(scaled_NK: torch.Tensor, quantize: Quantization) -> torch.Tensor:
    """From one number that the format has to the next, where these are, in scales. fp8: 2**-9 up to
    2**-5, 1/8 at 1.9.
    """
    if quantize is not FP8:
        return torch.ones_like(scaled_NK)
    return 2.0 ** (scaled_NK.abs().clamp(min=2**-6).log2().floor() - 3)


@pytest.mark.parametrize("quantize", Quantization)
@settings(derandomize=True, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 9),
    width=st.integers(1, 40),
    size=st.integers(-30, 30),
)
def test_a_weight_is_off_by_half_a_step_at_most(
    quantize: Quantization, seed: int, rows: int, width: int, size: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # also too small for fp8's three bits
    magnitudes_NK = 2.0 ** torch.randint(-12, 1, (rows, width), generator=generator)
    weight_NK = torch.randn(rows, width, generator=generator) * magnitudes_NK * 2.0**size
    numbers_NK, scale_N = quantize_weight(weight_NK, quantize, CPU)
    assert numbers_NK.dtype == NUMBER_DTYPES[quantize]
    assert scale_N.dtype == torch.float32
    assert numbers_NK.float().abs().amax() <= MAX_MAGNITUDE[quantize]
    weight_NK, scale_N1 = weight_NK.double(), scale_N.double()[:, None]
    off_NK = (weight_NK - numbers_NK.double() * scale_N1).abs()
    assert (off_NK <= scale_N1 * _steps(weight_NK / scale_N1, quantize) / 2 * (1 + 1e-6)).all()
    # and no scale is too large
    assert (
        scale_N1[:, 0] <= weight_NK.abs().amax(1) / MAX_MAGNITUDE[quantize] * (1 + 2**-22)
    ).all()
    if quantize is FP8:  # as the docstring has it
        assert (off_NK <= torch.maximum(weight_NK.abs() / 16, scale_N1 / 1024) * (1 + 1e-6)).all()


def test_numbers_that_fp8_has_stay_as_they_are() -> None:
    """All 254 of them, the largest of which gives the scale 1."""
    every_1K = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every_1K = every_1K[every_1K.isfinite()][None]
    numbers_1K, scale_1 = quantize_weight(every_1K, FP8, CPU)
    assert scale_1.item() == 1
    assert torch.equal(numbers_1K.float(), every_1K)


@pytest.mark.parametrize("quantize", Quantization)
def test_every_scale_that_rounds_down_keeps_its_largest_number(quantize: Quantization) -> None:
    """65,536 magnitudes between two powers of two: none of them may round to 128, which int8 does
    not have, or past 448.
    """
    weight_NK = torch.linspace(1, 2, 2**16)[:, None]
    numbers_NK, _ = quantize_weight(torch.cat((weight_NK, -weight_NK), 1), quantize, CPU)
    largest = MAX_MAGNITUDE[quantize]
    assert numbers_NK.float().unique().tolist() == [-largest, largest]


@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-38])
@pytest.mark.parametrize("quantize", Quantization)
def test_rows_of_nothing_stay_nothing(quantize: Quantization, size: float) -> None:
    weight_NK = torch.tensor([[0.0, 0.0], [1.0, -0.5], [size, -size]])
    numbers_NK, scale_N = quantize_weight(weight_NK, quantize, CPU)
    back_NK = numbers_NK.float() * scale_N[:, None]
    assert (scale_N > 0).all(), "0 / 0 is no number"
    assert back_NK.isfinite().all()
    assert (back_NK[0] == 0).all()
    assert (back_NK[2].abs() <= 2 * size).all()


@pytest.mark.parametrize("quantize", Quantization)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_tensor_that_no_scale_spans_is_named(
    bad: float, quantize: Quantization, tmp_path: Path
) -> None:
    args = tiny_args(n_layers=1)
    folder = write_checkpoint(tmp_path / "model", args)
    tensors = load_file(folder / SINGLE_NAME)
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors[name][3, 5] = bad
    save_file(tensors, folder / SINGLE_NAME)
    with pytest.raises(
        CheckpointError, match=f"tensor {name} has elements that are infinite or not a number"
    ):
        StageWorker.load(tiny_plan(args, quantize=quantize).stages[0], folder)


# ---- the product


def _linear(out_features: int, in_features: int, quantize: Quantization) -> QuantizedLinear:
    linear = QuantizedLinear(in_features, out_features, NUMBER_DTYPES[quantize])
    weight_NK = (
        torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(0))
        * in_features**-0.5
    )
    linear.weight, linear.scale = quantize_weight(weight_NK, quantize, CPU)
    return linear


def _exact(x_TK: torch.Tensor, linear: QuantizedLinear) -> torch.Tensor:
    return x_TK.double() @ (linear.weight.double() * linear.scale.double()[:, None]).T


@pytest.mark.pairwise
@pytest.mark.parametrize("quantize", Quantization)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("in_features", [1, 2, 7, 15, 16, 17, 24, 32, 33, 40, 48, 100, 208])
@pytest.mark.parametrize("out_features", [1, 2, 3, 5, 16, 31])
def test_it_multiplies(
    dtype: torch.dtype, in_features: int, out_features: int, quantize: Quantization
) -> None:
    linear = _linear(out_features, in_features, quantize)
    for tokens in (0, 1, 2, 3, 4, 5, 9, 17):
        x_TK = torch.randn(tokens, in_features, generator=torch.Generator().manual_seed(tokens)).to(
            dtype
        )
        out_TN = linear(x_TK)
        assert out_TN.dtype == dtype
        assert out_TN.shape == (tokens, out_features)
        torch.testing.assert_close(
            out_TN.double(), _exact(x_TK, linear), rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype]
        )


@pytest.mark.parametrize("quantize", Quantization)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_matrices_of_several_blocks(dtype: torch.dtype, quantize: Quantization) -> None:
    """5 rows of 2**19: blocks of 2, 2 and 1, for quantization and for multiplying."""
    linear = _linear(5, 2**19, quantize)
    whole_NK = torch.randn(5, 2**19, generator=torch.Generator().manual_seed(0)) * 2**-9.5
    scale_N1 = linear.scale[:, None]
    off = (whole_NK - linear.weight.float() * scale_N1).abs()
    assert (off <= scale_N1 * _steps(whole_NK / scale_N1, quantize) / 2 * (1 + 1e-3)).all()
    x_TK = torch.randn(2, 2**19, generator=torch.Generator().manual_seed(1)).to(dtype)
    torch.testing.assert_close(linear(x_TK).double(), _exact(x_TK, linear), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("quantize", Quantization)
def test_small_rows_keep_their_precision_in_float16(quantize: Quantization) -> None:
    """Their scales would be lost in float16, and products of unscaled numbers would overflow it."""
    x_TK = torch.full((2, 4096), 100.0, dtype=torch.float16)
    linear = QuantizedLinear(4096, 1, NUMBER_DTYPES[quantize])
    linear.weight, linear.scale = quantize_weight(torch.full((1, 4096), 1e-4), quantize, CPU)
    for dtype in (torch.float16, torch.float32):  # whichever of them this CPU multiplies
        out_TN = blockwise_linear(x_TK, linear.weight, dtype, linear.scale)
        torch.testing.assert_close(out_TN.float(), torch.full((2, 1), 40.96), rtol=2e-3, atol=0)


# ---- a stage


def _loaded(folder: Path, args: ModelArgs, num_stages: int, quantize: Quantization) -> Driver:
    plan = tiny_plan(args, num_stages, quantize=quantize)
    return Driver(plan, [StageWorker.load(stage, folder) for stage in plan.stages])


@pytest.mark.parametrize("quantize", Quantization)
@pytest.mark.parametrize(("moe", "tied"), [(False, False), (True, False), (False, True)])
def test_matrices_are_quantized_and_nothing_else(
    moe: bool, tied: bool, quantize: Quantization, tmp_path: Path
) -> None:
    """Of tied embeddings the head is quantized, and the table that tokens are looked up in is
    not.
    """
    args = tiny_args(n_layers=2, moe=moe, tied=tied)
    folder = write_checkpoint(tmp_path / "model", args)
    worker = StageWorker.load(tiny_plan(args, quantize=quantize).stages[0], folder)
    state = loaded_state(worker)
    kept = {
        name
        for name, tensor in state.items()
        if tensor.dtype != NUMBER_DTYPES[quantize] and not name.endswith("scale")
    }
    norms = {
        f"layers.{i}.{norm}.weight" for i in range(2) for norm in ("attention_norm", "ffn_norm")
    }
    gates = {f"layers.{i}.gate.scores.weight" for i in range(2)} if moe else set()
    assert kept == {"tok_embeddings.weight", "norm.weight", *norms, *gates}
    whole = random_model(args).state_dict()
    assert all(torch.equal(state[name], whole[name]) for name in kept)


@pytest.mark.parametrize("quantize", Quantization)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_same_tokens_at_1_2_and_4_stages(
    dtype: str, quantize: Quantization, tmp_path: Path
) -> None:
    """In bfloat16 prompts run one by one: what is packed together differs with the number of
    stages, and rounds differently.
    """
    args = tiny_args(n_layers=4)
    folder = write_checkpoint(tmp_path / "model", args)
    outputs = []
    for num_stages in (1, 2, 4):
        plan = tiny_plan(args, num_stages, dtype=dtype, quantize=quantize)
        workers = [StageWorker.load(stage, folder) for stage in plan.stages]
        outputs.append(run_in_process(plan, workers, PROMPTS[:8], together=dtype == "float32"))
    assert outputs[0] == outputs[1] == outputs[2]
    assert len({tuple(tokens) for tokens in outputs[0]}) == 8


@pytest.mark.parametrize("quantize", Quantization)
def test_logits_do_not_depend_on_how_prompts_are_packed(
    quantize: Quantization, tmp_path: Path
) -> None:
    args = tiny_args(n_layers=4)
    folder = write_checkpoint(tmp_path / "model", args)
    prompts = [random_ids(n, seed=n) for n in (100, 37, 3)]
    whole = _loaded(folder, args, 1, quantize).run(prompts, [[100], [37], [3]])
    cut = _loaded(folder, args, 2, quantize).run(
        prompts, [[5, 1, 15, 16, 17, 1, 33, 12], [30, *[1] * 7], [3]]
    )
    for one, other in zip(whole, cut, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("quantize", "most"), [(INT8, 0.05), (Quantization.W8A8, 0.05), (FP8, 0.15)]
)
def test_logits_stay_close_to_those_of_the_checkpoint(
    quantize: Quantization, most: float, tmp_path: Path
) -> None:
    """And are not the same: it is the quantized weights that run."""
    args = tiny_args(n_layers=4, moe=False)
    folder = write_checkpoint(tmp_path / "model", args)
    prompt = random_ids(60, seed=1)
    plan = tiny_plan(args)
    (exact,) = Driver(plan, [StageWorker.load(plan.stages[0], folder)]).run([prompt], [[60]])
    (rounded,) = _loaded(folder, args, 1, quantize).run([prompt], [[60]])
    assert 1e-4 < (exact - rounded).norm() / exact.norm() < most


@pytest.mark.parametrize("quantize", Quantization)
def test_a_stage_is_quantized_piece_by_piece(
    quantize: Quantization, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one piece is quantized nothing else is there as it was stored, and the outcome is that
    of the whole.
    """
    args = tiny_args(n_layers=2)
    folder = write_checkpoint(tmp_path / "model", args)
    plan = tiny_plan(args, quantize=quantize).stages[0]
    whole = loaded_state(StageWorker.load(plan, folder))
    made = loaded_state(StageWorker.load(plan, RandomWeights()))
    pieces: list[weakref.ref[torch.Tensor]] = []

    def watched(piece: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        assert not any(earlier() is not None for earlier in pieces)
        pieces.append(weakref.ref(piece))
        return quantize_weight(piece, *rest)

    monkeypatch.setattr(quantize_module, "quantize_weight", watched)
    monkeypatch.setattr(tensor_specs, "MAX_CHUNK_ELEMENTS", 500)
    cut = loaded_state(StageWorker.load(plan, folder))
    assert len(pieces) > 2 * sum(spec.quantizable for spec in stage_tensors(args, range(2)))
    assert all(torch.equal(cut[name], whole[name]) for name in whole)
    assert StageWorker.load(plan, RandomWeights()).model.state_dict().keys() == made.keys()


@pytest.mark.parametrize("quantize", Quantization)
def test_random_weights_can_be_quantized_as_they_are_made(quantize: Quantization) -> None:
    args = tiny_variant(PRESETS["mixtral-8x7b"])
    specs = list(stage_tensors(args, range(args.n_layers)))
    assert any(spec.quantizable for spec in specs)
    for spec in specs:
        made = random_parameter(spec, "bfloat16")
        state: dict[str, torch.Tensor] = {}
        load_tensor(
            state,
            spec,
            [made],
            WeightFormat("bfloat16", stored="bfloat16", quantize=quantize),
            "cpu",
            {},
        )
        held = sum(tensor[spec.rows].nbytes for tensor in state.values())
        assert held == spec.num_bytes(
            WeightFormat("bfloat16", stored="bfloat16", quantize=quantize)
        )
        assert all(tensor.data_ptr() != made.data_ptr() for tensor in state.values())


def test_a_float_tensor_is_copied_into_the_dtype() -> None:
    spec = TensorSpec("norm", "norm.weight", (3,))
    stored = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)
    for wanted in (None, *Quantization):
        state: dict[str, torch.Tensor] = {}
        load_tensor(
            state,
            spec,
            [stored],
            WeightFormat("float32", stored="bfloat16", quantize=wanted),
            "cpu",
            {},
        )
        assert state.keys() == {"norm.weight"}
        assert state["norm.weight"].dtype == torch.float32
        assert state["norm.weight"].tolist() == [1.0, 2.0, 3.0]
