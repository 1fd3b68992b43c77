"""Products of int8 weights and activations that are rounded to int8, in C: exact integers, one
scale per row and per output.
"""

import os
from collections.abc import Iterator

import pytest
import torch
from native_attention import AVX512
from tiny_models import tiny_args, tiny_plan
from torch import Tensor

from tramontane.proto.model_folder import RandomWeights
from tramontane.proto.weight_format import Quantization
from tramontane.workers.device.native_library import CompilerError, compile_library
from tramontane.workers.kernels import packed_linear
from tramontane.workers.kernels.packed_linear import PackedLinear, PackedMatmul
from tramontane.workers.stage.stage_worker import StageWorker

# of the result, relative, by norms
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
SHAPES = [(1, 1), (5, 3), (33, 31), (100, 75), (64, 256), (7, 1027)]
THREADS = torch.get_num_threads()


# By name: compiler options of processors that add up two or four products with one instruction, and
# of one that does not.
PROCESSORS = {
    "this one": "",
    "SSE": "-mno-avx",
    "AVX-512": AVX512,
    "AVX-512 with products of int16": f"{AVX512} -D__AVX512BW__",
    "AVX-512 with products of int8": f"{AVX512} -D__AVX512VNNI__",
}


@pytest.fixture(params=PROCESSORS)
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile for a processor."""
    monkeypatch.setenv("CC", f"{os.environ.get('CC', 'cc')} {PROCESSORS[request.param]}")
    compile_library.cache_clear()
    yield
    compile_library.cache_clear()


@pytest.fixture(params=list(ROUNDING), ids=str)
def matmul(request: pytest.FixtureRequest, processor: None) -> PackedMatmul:
    try:
        return PackedMatmul(request.param, torch.int8, int8_activations=True)
    except CompilerError as error:
        pytest.skip(f"the kernel in C needs a compiler: {error}")


def _case(
    shape: tuple[int, int], num_tokens: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Activations that are integers times a power of two, the largest of a row 127; weights with
    all numbers; scales.
    """
    generator = torch.Generator().manual_seed(shape[0] * shape[1] + num_tokens)
    x = torch.randint(-127, 128, (num_tokens, shape[1]), generator=generator).float()
    x[torch.arange(num_tokens), torch.randint(shape[1], (num_tokens,), generator=generator)] = 127
    x *= 2.0 ** torch.randint(-3, 4, (num_tokens, 1), generator=generator)
    weight = torch.randint(-127, 128, shape, generator=generator).to(torch.int8)
    return x.to(dtype), weight, (torch.rand(shape[0], generator=generator) + 0.1) / 2**8


def _exact(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return (x.double() @ weight.double().T) * scale.double()


def _off(out: Tensor, expected: Tensor) -> float:
    return float(((out.double() - expected).norm(dim=1) / expected.norm(dim=1)).max())


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 30, 300])
def test_integers_are_multiplied_exactly(matmul: PackedMatmul, num_tokens: int) -> None:
    for shape in SHAPES:
        x, weight, scale = _case(shape, num_tokens, matmul.dtype)
        out = matmul.multiply(x, matmul.pack(weight), shape[0], scale)
        assert out.dtype == matmul.dtype
        expected = _exact(x, weight, scale)
        visible = expected.norm(dim=1) > 0
        assert _off(out[visible], expected[visible]) < ROUNDING[matmul.dtype], shape


def test_the_largest_numbers_do_not_overflow(matmul: PackedMatmul) -> None:
    """With 127 * 127 * 8192 a sum of 16 bits, or of products that saturate, would be wrong."""
    x, weight = (
        torch.ones(3, 8192, dtype=matmul.dtype),
        torch.full((2, 8192), 127, dtype=torch.int8),
    )
    weight[1] = -127
    out = matmul.multiply(x, matmul.pack(weight), 2, torch.full((2,), 2**-20))
    assert out[:, 0].tolist() == pytest.approx([127 * 8192 / 2**20] * 3, rel=5e-3)
    assert torch.equal(out[:, 1], -out[:, 0])


def test_activations_are_rounded_to_the_nearest_of_255_numbers(matmul: PackedMatmul) -> None:
    """Weights that are the identity show the numbers themselves: off by half a step at most, and by
    about that for some.
    """
    x = torch.randn(20, 300, generator=torch.Generator().manual_seed(0)).to(matmul.dtype)
    identity = torch.eye(300, dtype=torch.int8)
    steps = x.double().abs().amax(dim=1, keepdim=True) / 127
    off = (
        matmul.multiply(x, matmul.pack(identity), 300, torch.ones(300)).double() - x.double()
    ).abs() / steps
    rounding = 127 * torch.finfo(matmul.dtype).eps  # of the result
    assert 0.45 < off.max() < 0.5 + rounding


def test_a_row_depends_on_no_other_row_and_on_no_number_of_threads(matmul: PackedMatmul) -> None:
    x, weight, scale = _case((100, 75), 40, matmul.dtype)
    packed = matmul.pack(weight)
    together = matmul.multiply(x, packed, 100, scale)
    try:
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            for rows in (slice(0, 1), slice(3, 10), slice(20, 40)):
                assert torch.equal(matmul.multiply(x[rows], packed, 100, scale), together[rows])
    finally:
        torch.set_num_threads(THREADS)


def test_a_row_that_is_no_number_is_not_hidden_and_alone(matmul: PackedMatmul) -> None:
    x, weight, scale = _case((100, 75), 6, matmul.dtype)
    weight[:, 0] = 0  # infinity times 0
    expected = matmul.multiply(x, matmul.pack(weight), 100, scale)
    x[1, 74], x[3, 0], x[4] = torch.nan, -torch.inf, 0
    out = matmul.multiply(x, matmul.pack(weight), 100, scale)
    assert out[[1, 3]].isnan().all()
    assert (out[4] == 0).all()
    assert torch.equal(out[[0, 2, 5]], expected[[0, 2, 5]])


def test_rows_too_small_for_a_scale_are_zeros(matmul: PackedMatmul) -> None:
    if matmul.dtype == torch.float16:
        pytest.skip("float16 has no numbers below 1e-30")
    x = torch.full((1, 4), 1e-38, dtype=matmul.dtype)
    assert (
        matmul.multiply(x, matmul.pack(torch.ones(3, 4, dtype=torch.int8)), 3, torch.ones(3)) == 0
    ).all()


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("moe", [False, True])
def test_a_stage_multiplies_integers_if_it_is_quantized_so(moe: bool, dtype: torch.dtype) -> None:
    if packed_linear.packed_matmul(dtype, torch.int8, True) is None:
        pytest.skip("the kernel in C needs a compiler")
    name = str(dtype).removeprefix("torch.")
    for quantize in (Quantization.W8A8, Quantization.INT8):
        plan = tiny_plan(tiny_args(n_layers=1, moe=moe), 1, dtype=name, quantize=quantize).stages[0]
        model = StageWorker.load(plan, RandomWeights()).model
        layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
        matrix_dtype = getattr(torch, plan.weight_format.matrix_dtype)
        assert layers
        wanted = packed_linear.packed_matmul(dtype, torch.int8, quantize is Quantization.W8A8)
        assert {layer.matmul for layer in layers} - {wanted} <= {
            packed_linear.packed_matmul(dtype, matrix_dtype)
        }
        assert sum(layer.matmul is wanted for layer in layers) > 2
