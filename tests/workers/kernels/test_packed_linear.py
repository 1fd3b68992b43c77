"""Products with packed weights are those of the definition, and a row's do not depend on what else
is computed.
"""

import logging
import platform
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import torch
from native_attention import AVX512
from tiny_models import loaded_state, tiny_args, tiny_plan
from torch import Tensor, nn

from tramontane.proto.model_folder import RandomWeights
from tramontane.proto.weight_format import Quantization
from tramontane.workers.device.native_library import CompilerError, compile_library
from tramontane.workers.device.probe import panel_rows
from tramontane.workers.kernels import packed_linear
from tramontane.workers.kernels.linear import Linear
from tramontane.workers.kernels.packed_linear import (
    PackedLinear,
    PackedMatmul,
    pack_linears,
    packed_matmul,
)
from tramontane.workers.kernels.quantized_linear import QuantizedLinear
from tramontane.workers.stage.stage_worker import StageWorker

INT8, FP8 = torch.int8, torch.float8_e4m3fn
# relative, of one number
ROUNDING = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}
KINDS = [(dtype, weight_dtype) for dtype in ROUNDING for weight_dtype in (dtype, INT8, FP8)]
KINDS.append((torch.float32, torch.bfloat16))
SHAPES = [(1, 1), (5, 31), (31, 5), (33, 75), (75, 33), (64, 64), (100, 1), (3, 1300), (40, 257)]
LONG = (3, 4500)  # inputs are converted in several chunks


@pytest.fixture(autouse=True)
def _tested_anew() -> Iterator[None]:
    packed_matmul.cache_clear()
    yield
    packed_matmul.cache_clear()
    compile_library.cache_clear()


@pytest.fixture(
    params=KINDS, ids=lambda kind: "-".join(str(dtype).removeprefix("torch.") for dtype in kind)
)
def matmul(request: pytest.FixtureRequest) -> PackedMatmul:
    try:
        return PackedMatmul(*request.param)
    except CompilerError as error:
        pytest.skip(str(error))


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _weight(matmul: PackedMatmul, num_outputs: int, num_inputs: int) -> Tensor:
    spread = 1 if matmul.weight_dtype.itemsize > 1 else 40
    return _random(num_outputs, num_inputs).mul_(spread).clamp_(-127, 127).to(matmul.weight_dtype)


def _scale(matmul: PackedMatmul, num_outputs: int) -> Tensor | None:
    return None if matmul.weight_dtype.itemsize > 1 else torch.linspace(0.01, 0.03, num_outputs)


def _assert_is_product(
    out_TN: Tensor, x_TK: Tensor, weight_NK: Tensor, scale_N: Tensor | None
) -> None:
    """Up to the sum's rounding in float32 and one rounding of the output, to the nearest."""
    exact_NK = (
        weight_NK.double() if scale_N is None else weight_NK.double() * scale_N.double()[:, None]
    )
    exact_TN, magnitude_TN = x_TK.double() @ exact_NK.T, x_TK.double().abs() @ exact_NK.abs().T
    smallest = (
        torch.finfo(torch.float16).smallest_normal * 2**-11
        if out_TN.dtype == torch.float16
        else 0.0
    )
    most_TN = exact_TN.abs() * ROUNDING[out_TN.dtype] + magnitude_TN * 2**-20 + smallest
    assert out_TN.shape == exact_TN.shape
    assert out_TN.dtype == x_TK.dtype
    assert ((out_TN.double() - exact_TN).abs() <= most_TN).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_those_in_float64(matmul: PackedMatmul, shape: tuple[int, int]) -> None:
    """Also of outputs and inputs that fill no last panel or unit, and of tiles of every size."""
    weight_NK, scale_N = _weight(matmul, *shape), _scale(matmul, shape[0])
    packed_PUCS = matmul.pack(weight_NK)
    for num_tokens in range(41):
        x_TK = _random(num_tokens, shape[1], seed=1).to(matmul.dtype)
        _assert_is_product(
            matmul.multiply(x_TK, packed_PUCS, shape[0], scale_N), x_TK, weight_NK, scale_N
        )


@pytest.mark.parametrize("num_inputs", [75, 1000, 10_000])
def test_more_rows_than_a_block_has(matmul: PackedMatmul, num_inputs: int) -> None:
    """Blocks of the most rows, of as many as the cache holds, and of the fewest."""
    weight_NK, scale_N = _weight(matmul, 37, num_inputs), _scale(matmul, 37)
    packed_PUCS, block_rows = matmul.pack(weight_NK), matmul.block_rows(num_inputs)
    for num_tokens in (block_rows - 1, block_rows, block_rows + 1, 2 * block_rows + 5):
        x_TK = _random(num_tokens, num_inputs, seed=1).to(matmul.dtype)
        _assert_is_product(
            matmul.multiply(x_TK, packed_PUCS, 37, scale_N), x_TK, weight_NK, scale_N
        )


def test_memory_of_a_block_is_freed_and_its_lack_is_an_error(
    matmul: PackedMatmul, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight_NK, scale_N, before = _weight(matmul, 3, 4096), _scale(matmul, 3), 0
    packed_PUCS, x_TK = matmul.pack(weight_NK), _random(128, 4096, seed=1).to(matmul.dtype)
    for number in range(200):  # of 1 or 2 MiB each
        matmul.multiply(x_TK, packed_PUCS, 3, scale_N)
        if number == 50:
            before = psutil.Process().memory_info().rss
    assert psutil.Process().memory_info().rss - before < 64 * 2**20
    assert matmul.multiply(x_TK[:0], packed_PUCS, 3, scale_N).shape == (0, 3)
    layer = PackedLinear(matmul, Linear(4096, 3))
    for name in ("_multiply", "_multiply_groups"):
        monkeypatch.setattr(matmul, name, lambda *_: 0)
    with pytest.raises(MemoryError, match="there is no memory for the inputs of a matrix product"):
        matmul.multiply(x_TK, packed_PUCS, 3, scale_N)
    with pytest.raises(MemoryError, match="there is no memory for the inputs of a matrix product"):
        matmul.multiply_groups(x_TK, [layer], [128])


def test_blocks_are_whole_tiles_that_the_cache_holds(matmul: PackedMatmul) -> None:
    rows = [
        matmul.block_rows(num_inputs) for num_inputs in (1, 75, 1000, 2000, 4096, 10_000, 10**6)
    ]
    assert rows == sorted(rows, reverse=True)
    assert rows[0] == 252
    assert rows[-1] in (24, 48)
    assert all(num_rows % (rows[-1] // 4) == 0 for num_rows in rows)
    _, units, _, _ = matmul.packed_shape(1, 10_000)
    assert 2**21 * 0.8 < rows[5] * units * 4 <= 2**21


def test_a_row_depends_on_no_other_row_and_on_no_number_of_threads(matmul: PackedMatmul) -> None:
    weight_NK, scale_N = _weight(matmul, 75, 300), _scale(matmul, 75)
    packed_PUCS, x_TK = matmul.pack(weight_NK), _random(600, 300, seed=1).to(matmul.dtype)
    together_TN, threads = matmul.multiply(x_TK, packed_PUCS, 75, scale_N), torch.get_num_threads()
    try:
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            assert torch.equal(
                matmul.pack(weight_NK).view(torch.uint8), packed_PUCS.view(torch.uint8)
            )
            for start, stop in (
                (0, 600),
                *pairwise(range(41)),
                (5, 34),
                (8, 20),
                (90, 460),
                (599, 600),
            ):
                out_TN = matmul.multiply(x_TK[start:stop], packed_PUCS, 75, scale_N)
                assert torch.equal(out_TN, together_TN[start:stop]), (start, stop)
    finally:
        torch.set_num_threads(threads)


def test_an_output_depends_on_no_other_output(matmul: PackedMatmul) -> None:
    weight_NK, x_TK = _weight(matmul, 75, 300), _random(20, 300, seed=1).to(matmul.dtype)
    together_TN = matmul.multiply(x_TK, matmul.pack(weight_NK), 75)
    for outputs in (slice(0, 1), slice(33, 50), slice(7, 75)):
        own_NK = weight_NK[outputs]
        assert torch.equal(
            matmul.multiply(x_TK, matmul.pack(own_NK), len(own_NK)), together_TN[:, outputs]
        )


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_in_its_row(matmul: PackedMatmul, bad: float) -> None:
    weight_NK, x_TK = _weight(matmul, 75, 33), _random(40, 33, seed=1).to(matmul.dtype)
    packed_PUCS = matmul.pack(weight_NK)
    before_TN = matmul.multiply(x_TK, packed_PUCS, 75)
    for column in (0, 31, 32):
        bad_TK = x_TK.clone()
        bad_TK[17, column] = bad
        out_TN = matmul.multiply(bad_TK, packed_PUCS, 75)
        others = torch.arange(40) != 17
        assert torch.equal(out_TN[others], before_TN[others])
        reached_N = weight_NK[:, column].float() != 0
        assert not out_TN[17, reached_N].isfinite().any()


# ---- weights


def test_weights_are_stored_as_the_docstrings_say(matmul: PackedMatmul) -> None:
    """Output n and input k at [n // C, k // S, position(n % C), k % S], and zeros elsewhere,
    whatever was there.
    """
    weight_NK = _weight(matmul, 70, 5)
    num_panels, num_units, columns, step = matmul.packed_shape(70, 5)
    expected = torch.zeros(num_panels * columns, num_units * step, dtype=matmul.weight_dtype)
    expected[:70, :5] = weight_NK
    positions = [matmul.position(column) for column in range(columns)]
    assert sorted(positions) == list(range(columns))
    in_order_PUCS = expected.view(num_panels, columns, num_units, step).transpose(1, 2)
    expected_PUCS = torch.empty_like(in_order_PUCS)
    expected_PUCS[:, :, positions] = in_order_PUCS
    packed_PUCS = matmul.allocate(70, 5)
    packed_PUCS.view(torch.uint8).fill_(1)
    matmul.pack_rows(weight_NK, 0, 70, packed_PUCS)
    assert torch.equal(packed_PUCS.float(), expected_PUCS.float())
    assert packed_PUCS.nbytes == num_panels * num_units * columns * step * weight_NK.itemsize
    assert num_panels == -(-70 // columns)
    assert num_units == -(-5 // step)
    matmul._columns, matmul._step = 32, 2
    assert matmul.packed_shape(70, 5) == (3, 3, 32, 2)
    assert matmul.packed_shape(64, 4) == (2, 2, 32, 2)


@pytest.mark.parametrize("num_inputs", [5, 700])
def test_weights_can_be_packed_in_pieces(matmul: PackedMatmul, num_inputs: int) -> None:
    """Wherever these begin and end, and in another dtype or order in memory."""
    weight_NK = _weight(matmul, 70, num_inputs)
    whole_PUCS = matmul.pack(weight_NK).float()
    for ends in ((0, 70), (0, 1, 70), (0, 10, 37, 48, 64, 70), (0, 32, 64, 69, 70)):
        packed_PUCS = matmul.allocate(70, num_inputs)
        packed_PUCS.view(torch.uint8).fill_(1)
        for start, stop in pairwise(ends):
            matmul.pack_rows(weight_NK[start:stop], start, 70, packed_PUCS)
        assert torch.equal(packed_PUCS.float(), whole_PUCS), ends
    assert torch.equal(matmul.pack(weight_NK.float()).float(), whole_PUCS)
    assert torch.equal(matmul.pack(weight_NK.T.contiguous().T).float(), whole_PUCS)


def test_a_piece_leaves_the_other_rows_alone(matmul: PackedMatmul) -> None:
    packed_PUCS = matmul.allocate(70, 5)
    packed_PUCS.view(torch.uint8).fill_(1)
    before = packed_PUCS.clone().float()
    matmul.pack_rows(_weight(matmul, 3, 5), 20, 70, packed_PUCS)
    _, _, columns, _ = packed_PUCS.shape
    changed = (packed_PUCS.float() != before).nonzero()
    found = {(panel, position) for panel, _, position, _ in changed.tolist()}
    assert found == {(row // columns, matmul.position(row % columns)) for row in (20, 21, 22)}


def test_inputs_that_lie_anywhere_in_memory(matmul: PackedMatmul) -> None:
    weight_NK = _weight(matmul, 9, 64)
    packed_PUCS = matmul.pack(weight_NK)
    numbers = _random(4 * 64 + 3, seed=1).to(matmul.dtype)
    for x_TK in (
        numbers[3:].view(4, 64),
        numbers[:256].view(64, 4).T,
        _random(4, 128).to(matmul.dtype)[:, ::2],
    ):
        _assert_is_product(matmul.multiply(x_TK, packed_PUCS, 9), x_TK, weight_NK, None)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("weight_dtype", [INT8, FP8], ids=str)
def test_every_number_of_eight_bits_is_converted_exactly(
    dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    """Subnormal ones too."""
    weight_N1 = torch.arange(256, dtype=torch.uint8).view(weight_dtype)[:, None]
    weight_N1 = weight_N1[weight_N1[:, 0].float().isfinite()]
    assert len(weight_N1) == (256 if weight_dtype == INT8 else 254)
    matmul = PackedMatmul(dtype, weight_dtype)
    for factor in (1, -2):
        out_1N = matmul.multiply(
            torch.tensor([[factor]], dtype=dtype), matmul.pack(weight_N1), len(weight_N1)
        )
        assert torch.equal(out_1N[0].float(), weight_N1[:, 0].float() * factor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_number_of_sixteen_bits_is_converted_exactly(dtype: torch.dtype) -> None:
    """Subnormal ones of float16 too; an instruction for bfloat16 may take those for 0."""
    weight_N1 = (
        torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)[:, None]
    )
    smallest = torch.finfo(dtype).smallest_normal if dtype == torch.bfloat16 else 0
    weight_N1 = weight_N1[weight_N1[:, 0].isfinite() & (weight_N1[:, 0].abs() >= smallest)]
    matmul = PackedMatmul(dtype, dtype)
    out_1N = matmul.multiply(torch.ones(1, 1, dtype=dtype), matmul.pack(weight_N1), len(weight_N1))
    assert torch.equal(out_1N[0], weight_N1[:, 0])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_weights_in_bfloat16_are_multiplied_like_those_in_float32(shape: tuple[int, int]) -> None:
    """To the last bit, for few and many rows."""
    as_stored, wide = (
        PackedMatmul(torch.float32, torch.bfloat16),
        PackedMatmul(torch.float32, torch.float32),
    )
    weight_NK = _random(*shape).bfloat16()
    packed_PUCS, wide_PUCS = as_stored.pack(weight_NK), wide.pack(weight_NK.float())
    assert 2 * packed_PUCS.nbytes == wide_PUCS.nbytes
    for num_tokens in (1, 2, 6, 7, 13, 300):
        x_TK = _random(num_tokens, shape[1], seed=1)
        out_TN, expected_TN = (
            as_stored.multiply(x_TK, packed_PUCS, shape[0]),
            wide.multiply(x_TK, wide_PUCS, shape[0]),
        )
        assert torch.equal(out_TN, expected_TN)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_outputs_are_rounded_to_the_nearest_number_and_halves_to_the_even_one(
    dtype: torch.dtype,
) -> None:
    """Sums of a number and half a step, or a little more or less."""
    numbers_N = torch.linspace(1, 2, 65).to(dtype).repeat(3)
    half = torch.finfo(dtype).eps / 2
    steps_N = torch.tensor([half, half * 1.125, half * 0.875]).repeat_interleave(65).to(dtype)
    weight_N2 = torch.stack((numbers_N, steps_N), 1)
    matmul = PackedMatmul(dtype, dtype)
    for sign in (1, -1):
        out_1N = matmul.multiply(
            torch.full((1, 2), sign, dtype=dtype), matmul.pack(weight_N2), len(weight_N2)
        )
        assert torch.equal(out_1N[0], (sign * (numbers_N.float() + steps_N.float())).to(dtype))


F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
AVX512_BF16 = f"{AVX512} -D__AVX512BF16__"
# Compiler options, dtypes of activations and weights, and how many columns and inputs a unit has
OTHER_PROCESSORS = [
    *(("-mno-avx", kind, (8, 1)) for kind in [(F32, F32), (F32, BF16), (BF16, BF16), (F16, FP8)]),
    *(("-mavx -mno-avx2", kind, (16, 1)) for kind in [(F32, BF16), (F32, INT8), (F16, F16)]),
    *(
        (AVX512, kind, (32, 1))
        for kind in [(F32, F32), (F32, BF16), (F32, INT8), (F16, FP8), (F16, F16)]
    ),
    *((AVX512_BF16, kind, (32, 2)) for kind in [(BF16, BF16), (BF16, INT8), (BF16, FP8)]),
]


@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the options are of compilers for x86-64"
)
@pytest.mark.parametrize(("options", "kind", "unit"), OTHER_PROCESSORS)
def test_other_processors(
    options: str,
    kind: tuple[torch.dtype, torch.dtype],
    unit: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compile_library.cache_clear()
    monkeypatch.setenv("CC", f"cc {options}")
    matmul = PackedMatmul(*kind)
    assert matmul.packed_shape(1, 1)[2:] == unit
    assert panel_rows() == unit[0], "planned"
    for shape in (*SHAPES, LONG):
        weight_NK, scale_N = _weight(matmul, *shape), _scale(matmul, shape[0])
        packed_PUCS = matmul.pack(weight_NK)
        for num_tokens in (1, 6, 7, 13, 30, 300):
            x_TK = _random(num_tokens, shape[1], seed=1).to(matmul.dtype)
            _assert_is_product(
                matmul.multiply(x_TK, packed_PUCS, shape[0], scale_N), x_TK, weight_NK, scale_N
            )


# ---- layers


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain, self.quantized = Linear(33, 70), QuantizedLinear(33, 70, INT8)
        self.inner = nn.Sequential(Linear(5, 3), nn.Linear(5, 3, bias=False))
        self.embedding, self.norm = nn.Embedding(4, 5), nn.RMSNorm(5)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_linear_layers_are_packed_and_nothing_else(dtype: torch.dtype) -> None:
    """On the meta device, as models are made; the gate of experts is a linear layer too."""
    with torch.device("meta"):
        model, args = Model(), tiny_args(n_layers=1)
    kinds = {
        name: type(module) for name, module in model.named_modules() if name and name != "inner"
    }
    packed = pack_linears(model, dtype, dtype)
    assert {name: matmul.weight_dtype for name, matmul in packed.items()} == {
        "plain.weight": dtype,
        "quantized.weight": INT8,
        "inner.0.weight": dtype,
    }
    for name, kind in kinds.items():
        layer = model.get_submodule(name)
        assert type(layer) is (PackedLinear if f"{name}.weight" in packed else kind)
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    assert model.plain.scale is None
    assert model.quantized.scale is not None
    worker = StageWorker.load(tiny_plan(args).stages[0], RandomWeights())
    names = {
        name for name, module in worker.model.named_modules() if isinstance(module, PackedLinear)
    }
    experts = {f"experts.layers.0.{expert}.{w}" for expert in range(4) for w in ("w13", "w2")}
    assert names == {
        "layers.0.attention.wqkv",
        "layers.0.attention.wo",
        "layers.0.gate.scores",
        "output",
        *experts,
    }


# of w8a8 see test_integer_products.py
@pytest.mark.parametrize("quantize", [None, Quantization.INT8, Quantization.FP8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_layers_multiply_by_the_weights_that_are_loaded(
    dtype: str, quantize: Quantization | None
) -> None:
    worker = StageWorker.load(
        tiny_plan(tiny_args(n_layers=1), dtype=dtype, quantize=quantize).stages[0], RandomWeights()
    )
    state = loaded_state(worker)
    for name in ("layers.0.attention.wqkv", "layers.0.gate.scores", "experts.layers.0.2.w13"):
        layer = worker.model.get_submodule(name)
        assert isinstance(layer, PackedLinear)
        x_TK = _random(7, layer.in_features).to(getattr(torch, dtype))
        weight_NK = state[f"{name}.weight"]
        _assert_is_product(layer(x_TK), x_TK, weight_NK, state.get(f"{name}.scale"))
        assert torch.equal(layer.matmul.pack(weight_NK).float(), layer.weight.float()), (
            "zeros where no weight is"
        )
        with pytest.raises(AssertionError):
            layer(x_TK[:, 1:])
        with pytest.raises(AssertionError):
            layer(x_TK.double())


@pytest.mark.parametrize("quantize", [None, *Quantization])
@pytest.mark.parametrize("sizes", [[2, 0, 3, 1], [0, 0, 0, 4], [1, 0, 0, 0], [300, 1, 0, 7]])
def test_groups_are_multiplied_as_each_alone(
    sizes: list[int], quantize: Quantization | None
) -> None:
    worker = StageWorker.load(
        tiny_plan(tiny_args(n_layers=1), quantize=quantize).stages[0], RandomWeights()
    )
    layers = [worker.model.get_submodule(f"experts.layers.0.{expert}.w2") for expert in range(4)]
    packed = [layer for layer in layers if isinstance(layer, PackedLinear)]
    x_CK = _random(sum(sizes), packed[0].in_features)
    alone = torch.cat(
        [
            layer(rows_BK)
            for layer, rows_BK in zip(packed, x_CK.split(sizes), strict=True)
            if len(rows_BK)
        ]
    )
    assert torch.equal(packed[0].matmul.multiply_groups(x_CK, packed, sizes), alone)
    with pytest.raises(AssertionError):
        packed[0].matmul.multiply_groups(x_CK[1:], packed, sizes)


# ---- where they cannot be used

LINE = (
    "products of torch.float32 and weights in torch.float32 are computed by PyTorch, more slowly: "
)


def _assert_stays_as_it_is(why: str, caplog: pytest.LogCaptureFixture) -> None:
    with torch.device("meta"):
        model = nn.Sequential(Linear(5, 3), Linear(5, 3))
    with caplog.at_level(logging.INFO, logger=packed_linear.__name__):
        for _ in range(2):
            assert pack_linears(model, torch.float32, torch.float32) == {}
    assert [type(layer) for layer in model] == [Linear, Linear]
    (line,) = caplog.messages
    assert line.startswith(LINE + why)
    assert "\n" not in line


def test_without_a_compiler_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compile_library.cache_clear()
    monkeypatch.setenv("CC", "/no/such")
    _assert_stays_as_it_is("there is no C compiler /no/such", caplog)


@pytest.mark.parametrize("num_wrong", [1, 30])
def test_products_that_are_wrong_are_not_used(
    num_wrong: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if they are for some numbers of tokens only."""
    multiply = PackedMatmul.multiply

    def wrong(self: PackedMatmul, x_TK: Tensor, *rest: object) -> Tensor:
        return multiply(self, x_TK, *rest) * (1.02 if len(x_TK) == num_wrong else 1)  # type: ignore[arg-type]

    monkeypatch.setattr(PackedMatmul, "multiply", wrong)
    _assert_stays_as_it_is("differs by 0.02", caplog)


@pytest.mark.parametrize("quantize", [None, *Quantization])
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_a_stage_without_a_compiler_computes_the_same(
    quantize: Quantization | None, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tiny_plan(replace(tiny_args(n_layers=1), dtype=stored), quantize=quantize).stages[0]
    packed = StageWorker.load(plan, RandomWeights())
    monkeypatch.setattr(packed_linear, "packed_matmul", lambda *_: None)
    plain = StageWorker.load(plan, RandomWeights())
    assert not any(isinstance(module, PackedLinear) for module in plain.model.modules())
    state = loaded_state(packed)
    assert plain.model.state_dict().keys() == state.keys()
    assert all(
        torch.equal(tensor, state[name]) for name, tensor in plain.model.state_dict().items()
    )
    hidden_TD = _random(7, 32)
    with torch.inference_mode():
        expected, tolerance = (
            plain.model.head(hidden_TD),
            3e-2 if quantize is Quantization.W8A8 else 1e-5,
        )
        torch.testing.assert_close(
            packed.model.head(hidden_TD), expected, rtol=tolerance, atol=tolerance
        )


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="this system has no large pages",
)
def test_large_pages_are_requested_for_weights() -> None:
    packed = PackedMatmul(torch.float32, torch.float32).allocate(1024, 4096)
    middle, flags, is_inside = packed.data_ptr() + packed.nbytes // 2, "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if region := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_inside = int(region[1], 16) <= middle < int(region[2], 16)
        elif is_inside and line.startswith("VmFlags:"):
            flags = line
    assert " hg" in flags
