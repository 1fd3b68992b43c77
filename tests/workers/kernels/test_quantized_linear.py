"""What GPUs do with quantized matrices, as far as it can be seen without one; where there is one,
on it.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from tiny_models import tiny_args, tiny_plan
from torch import Tensor

from tramontane.proto.model_folder import RandomWeights
from tramontane.proto.weight_format import Quantization
from tramontane.workers.kernels import quantized_linear
from tramontane.workers.kernels.quantized_linear import (
    FEW_TOKENS,
    FUSED_TOKENS,
    TEST_SIZE,
    Product,
    QuantizedKernels,
    QuantizedLinear,
    _fused_product,
    dequantized_linear,
    fp8_linear,
    probe_kernels,
    warm_up_kernels,
)
from tramontane.workers.stage.stage_worker import StageWorker
from tramontane.workers.weights import loader as weights
from tramontane.workers.weights.quantize import NUMBER_DTYPES, quantize_weight

INT8, FP8, CPU = Quantization.INT8, Quantization.FP8, torch.device("cpu")
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def _tried_anew() -> Iterator[None]:
    probe_kernels.cache_clear()
    yield
    probe_kernels.cache_clear()


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _linear(
    out_features: int, in_features: int, quantize: Quantization, device: torch.device = CPU
) -> QuantizedLinear:
    linear = QuantizedLinear(in_features, out_features, NUMBER_DTYPES[quantize])
    linear.weight, linear.scale = quantize_weight(
        _random(out_features, in_features).to(device), quantize, device
    )
    return linear


def _exact(x_TK: Tensor, linear: QuantizedLinear) -> Tensor:
    return x_TK.double() @ (linear.weight.double() * linear.scale.double()[:, None]).T


# ---- activations in fp8, too


def _has_fp8_rows_on_cpus() -> bool:
    try:
        fp8_linear(torch.ones(2, 16), torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16))
    except RuntimeError:
        return False
    return True


with_fp8_rows = pytest.mark.skipif(
    not _has_fp8_rows_on_cpus(), reason="this torch has scales per row on GPUs only"
)


@with_fp8_rows
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", [(16, 16), (48, 64), (32, 272)], ids=str)
def test_the_product_in_fp8_is_that_of_the_rounded_activations(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Each token has a scale of its own: one that is 2**20 times as large as its neighbors takes
    nothing from them.
    """
    linear = _linear(*shape, FP8)
    for tokens in (1, 2, 17, 40):
        sizes_T1 = 2.0 ** torch.tensor([0, 3, 10, -10])[torch.arange(tokens) % 4][:, None]
        x_TK = (_random(tokens, shape[1], seed=1) * sizes_T1).to(dtype)
        rounded_TK, scale_T = quantize_weight(x_TK, FP8, CPU)
        out_TN = fp8_linear(x_TK, linear.weight, linear.scale)
        assert out_TN.dtype == dtype
        wanted_TN = _exact(rounded_TK.double() * scale_T.double()[:, None], linear)
        torch.testing.assert_close(
            out_TN / sizes_T1, wanted_TN / sizes_T1, rtol=1e-2, atol=0.2, check_dtype=False
        )
        off_T = (out_TN.double() - _exact(x_TK, linear)).norm(dim=1) / _exact(x_TK, linear).norm(
            dim=1
        )
        assert (off_T < 0.1).all()


@with_fp8_rows
def test_tokens_of_nothing_stay_nothing() -> None:
    x_TK = torch.zeros(18, 32, dtype=torch.bfloat16)
    x_TK[3] = 1
    linear = _linear(16, 32, FP8)
    out_TN = fp8_linear(x_TK, linear.weight, linear.scale)
    assert out_TN.isfinite().all()
    assert out_TN.any(dim=1).nonzero().tolist() == [[3]]


# ---- what is chosen


def _right(x_TK: Tensor, numbers_NK: Tensor, scale_N: Tensor) -> Tensor:
    return (x_TK.float() @ (numbers_NK.float() * scale_N[:, None]).T).to(x_TK.dtype)


def _wrong(x_TK: Tensor, numbers_NK: Tensor, scale_N: Tensor) -> Tensor:
    return _right(x_TK, numbers_NK.roll(1, dims=1), scale_N)  # weights and inputs do not meet


def _missing(x_TK: Tensor, numbers_NK: Tensor, scale_N: Tensor) -> Tensor:
    raise RuntimeError("at 1:2 of the kernel\n  x = y\nthis device has no such thing\n")


@pytest.mark.parametrize(
    ("fused", "fp8", "few", "several", "many"),
    [
        (_right, _missing, "fused", "fp8", "fp8"),
        (_right, None, "fused", "fused", "blocks"),
        (None, _missing, "fp8", "fp8", "fp8"),
        (None, None, "blocks", "blocks", "blocks"),
    ],
)
def test_the_way_depends_on_sizes_alone(
    fused: Product | None, fp8: Product | None, few: str, several: str, many: str
) -> None:
    names: dict[Product | None, str] = {
        _right: "fused",
        _missing: "fp8",
        dequantized_linear: "blocks",
    }
    chosen = [
        names[QuantizedKernels(fused, fp8).choose(n)]
        for n in (1, FEW_TOKENS, FEW_TOKENS + 1, FUSED_TOKENS, FUSED_TOKENS + 1)
    ]
    assert chosen == [few, few, several, several, many]


@pytest.mark.parametrize(
    ("product", "why"), [(_missing, "this device has no such thing"), (_wrong, "differs by ")]
)
@pytest.mark.parametrize("quantize", Quantization)
def test_what_does_not_work_is_said_in_one_line_and_done_without(
    product: Product,
    why: str,
    quantize: Quantization,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(quantized_linear, "_fused_product", product)
    monkeypatch.setattr(quantized_linear, "fp8_linear", product)
    monkeypatch.setattr(quantized_linear, "_fused_fp8_product", product)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert probe_kernels(CPU, NUMBER_DTYPES[quantize], torch.bfloat16) == QuantizedKernels(
                None, None
            )
    assert len(caplog.messages) == (2 if quantize is FP8 else 1)
    assert all(why in message and "\n" not in message for message in caplog.messages)
    linear, x_TK = _linear(32, 48, quantize), _random(20, 48).bfloat16()
    assert linear._gpu_product(x_TK) is dequantized_linear


@with_fp8_rows
@pytest.mark.parametrize("fused_fp8", [_right, _wrong])
def test_what_works_is_used(fused_fp8: Product, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_linear, "_fused_product", _right)
    monkeypatch.setattr(quantized_linear, "_fused_fp8_product", fused_fp8)
    of_many = _right if fused_fp8 is _right else fp8_linear
    few_TK, many_TK = _random(FEW_TOKENS, 48).bfloat16(), _random(FEW_TOKENS + 1, 48).bfloat16()
    fp8, int8 = _linear(32, 48, FP8), _linear(32, 48, INT8)
    assert [fp8._gpu_product(x_TK) for x_TK in (few_TK, many_TK)] == [_right, of_many]
    assert [int8._gpu_product(x_TK) for x_TK in (few_TK, many_TK)] == [_right, _right]
    for linear in (fp8, int8):  # float32 requests its precision
        assert linear._gpu_product(many_TK.float()) is dequantized_linear
    for shape in ((24, 48), (32, 40)):
        assert (
            _linear(*shape, FP8)._gpu_product(_random(40, shape[1]).bfloat16())
            is dequantized_linear
        )


def test_what_works_is_found_out_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured graph could not wait for it."""
    tried: list[tuple[object, ...]] = []
    monkeypatch.setattr(quantized_linear, "probe_kernels", lambda *kind: tried.append(kind))
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), _linear(16, 16, FP8)).to("meta")
    warm_up_kernels(model, torch.bfloat16)
    assert tried == [(torch.device("meta"), torch.float8_e4m3fn, torch.bfloat16)]
    requested: list[torch.dtype] = []
    monkeypatch.setattr(weights, "warm_up_kernels", lambda _model, dtype: requested.append(dtype))
    StageWorker.load(
        tiny_plan(tiny_args(n_layers=1), dtype="bfloat16", quantize=FP8).stages[0], RandomWeights()
    )
    assert requested == [torch.bfloat16]


@pytest.mark.parametrize("quantize", Quantization)
def test_what_is_tried_has_the_dtypes_that_steps_have(
    quantize: Quantization, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton compiles a kernel for each combination: one that is not tried would be compiled in a
    step.
    """
    used: set[tuple[torch.dtype, ...]] = set()

    def watched(x_TK: Tensor, numbers_NK: Tensor, scale_N: Tensor) -> Tensor:
        used.add((x_TK.dtype, numbers_NK.dtype, scale_N.dtype))
        return _right(x_TK, numbers_NK, scale_N)

    for name in ("_fused_product", "fp8_linear", "_fused_fp8_product"):
        monkeypatch.setattr(quantized_linear, name, watched)
    plan = tiny_plan(tiny_args(n_layers=1), dtype="bfloat16", quantize=quantize).stages[0]
    model = StageWorker.load(plan, RandomWeights()).model
    matrices = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    x_TK = torch.zeros(1, TEST_SIZE, dtype=torch.bfloat16)
    for matrix in matrices:
        assert matrix._gpu_product(x_TK) is watched
    assert used == {
        (torch.bfloat16, matrix.weight.dtype, matrix.scale.dtype) for matrix in matrices
    }


# ---- the kernels

INTERPRETED = """
import triton_on_cpu  # before Triton
import torch
from tramontane.proto.weight_format import Quantization
from tramontane.workers.kernels import quantized_linear, triton_linear
from tramontane.workers.weights.quantize import quantize_weight
torch.manual_seed(0)
for quantize in Quantization:
    for tokens, width, rows in (
        *((1, 64, 48), (3, 272, 16), (16, 16, 80)),
        *((17, 320, 33), (33, 80, 64), (64, 1040, 48)),
    ):
        x_TK, weight_NK = torch.randn(tokens, width).half(), torch.randn(rows, width)
        numbers_NK, scale_N = quantize_weight(weight_NK, quantize, torch.device("cpu"))
        # behind the matrix: fp8 that is no number
        bits = torch.full((rows * width + 4096,), 127, dtype=torch.uint8)
        numbers_NK = bits.view(numbers_NK.dtype)[: rows * width].view(rows, width).copy_(numbers_NK)
        behind = torch.full((tokens * width + 4096,), torch.nan).half()
        x_TK = behind[: tokens * width].view(tokens, width).copy_(x_TK)
        exact_TN = x_TK.double() @ (numbers_NK.double() * scale_N.double()[:, None]).T
        for like_TK in (x_TK, x_TK.T.contiguous().T):
            out_TN = triton_linear.quantized_gemv(like_TK, numbers_NK, scale_N)
            assert out_TN.dtype == torch.float16
            assert (out_TN.double() - exact_TN).norm() / exact_TN.norm() < 1e-3
    empty_NK = torch.empty(48, 64).to(numbers_NK.dtype)
    nothing_TN = triton_linear.quantized_gemv(torch.empty(0, 64).half(), empty_NK, scale_N)
    assert nothing_TN.shape == (0, 48)
fp8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
fp8 = fp8[fp8.isfinite()]
for tokens, width in ((0, 64), (1, 16), (5, 272), (3, 9200)):
    exact_TK = fp8[torch.randint(len(fp8), (tokens, width))]
    exact_TK[:, -1:] = 448
    for rounds, x_TK in ((False, exact_TK), (True, torch.randn(tokens, width))):
        x_TK = x_TK * 2.0 ** torch.arange(tokens)[:, None]
        x_TK[1:2] = 0
        for like_TK in (x_TK, x_TK.bfloat16(), x_TK.T.contiguous().T):
            numbers_TK, scale_T1 = triton_linear.quantize_rows_fp8(like_TK, 448)
            wanted_TK, wanted_T1 = quantized_linear.quantize_rows_fp8(like_TK)
            assert torch.equal(scale_T1, wanted_T1)
            # the interpreter rounds otherwise than GPUs do: numbers are compared where there is
            # nothing to round
            assert rounds or torch.equal(numbers_TK.float(), wanted_TK.float())
"""

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tramontane.workers.kernels import triton_linear

def compiled(kernel, types, sizes, aligned, capability, options):
    signature = dict(zip(kernel.arg_names, types, strict=True))
    source = ASTSource(kernel, signature, sizes, dict.fromkeys(aligned, [["tt.divisibility", 16]]))
    made = triton.compile(source, GPUTarget("cuda", capability, 32), options)
    # what a processor of 8.6 has for one program
    assert made.metadata.shared <= 99 * 1024, made.metadata.shared

for capability, numbers in ((80, "i8"), (89, "i8"), (89, "fp8e4nv"), (90, "i8"), (90, "fp8e4nv")):
    for block in triton_linear.TOKEN_BLOCKS:
        types = ("*bf16", f"*{numbers}", "*fp32", "*bf16", "i32", "i32", "i32", *("constexpr",) * 3)
        sizes = {(7,): block, (8,): triton_linear.ROWS, (9,): triton_linear.X_BLOCK // block}
        options = {"num_stages": triton_linear.STAGES}
        aligned = [(i,) for i in (0, 1, 2, 3, 5, 6)]
        compiled(triton_linear._quantized_gemv_kernel, types, sizes, aligned, capability, options)
for capability in (89, 90):
    types = ("*bf16", "*fp8e4nv", "*fp32", "i32", "fp32", "fp32", "constexpr")
    sizes = {(6,): triton_linear.K_BLOCK}
    options = {"num_warps": triton_linear.WARPS}
    aligned = [(i,) for i in range(4)]
    compiled(triton_linear._quantize_kernel, types, sizes, aligned, capability, options)
"""


@pytest.mark.parametrize("script", [INTERPRETED, COMPILED], ids=["interpreted", "compiled"])
def test_the_kernels_without_a_gpu(script: str) -> None:
    """Run by Triton's interpreter (which has no bfloat16), and compiled for GPUs that are not
    there.
    """
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


# ---- with a GPU

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("quantize", Quantization)
def test_every_way_is_close_on_a_gpu(quantize: Quantization, dtype: torch.dtype) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    for shape in ((6144, 4096), (4096, 14336), (80, 272)):
        linear = _linear(*shape, quantize, device)
        for tokens in (1, 3, 16, 17, 33, 64, 65, 300):
            x_TK = _random(tokens, shape[1], seed=1).to(device, dtype)
            exact_TN = _exact(x_TK, linear)
            way = linear._gpu_product(x_TK)
            off = ((linear(x_TK).double() - exact_TN).norm() / exact_TN.norm()).item()
            assert off < (5e-3 if way in (dequantized_linear, _fused_product) else 0.05), (
                shape,
                tokens,
                way,
            )


@on_gpu
def test_both_ways_to_fp8_are_alike_on_a_gpu() -> None:
    """But for what lies halfway between two numbers, where a division is off by its last bit."""
    from tramontane.workers.kernels import triton_linear

    x_TK = (_random(40, 14336) * 2.0 ** torch.arange(-20, 20)[:, None]).cuda().bfloat16()
    ours_TK, ours_T1 = triton_linear.quantize_rows_fp8(x_TK, 448)
    theirs_TK, theirs_T1 = quantized_linear.quantize_rows_fp8(x_TK)
    torch.testing.assert_close(ours_T1, theirs_T1, rtol=1e-6, atol=0)
    assert (ours_TK.float() == theirs_TK.float()).float().mean() > 0.999


@on_gpu
@pytest.mark.parametrize("tokens", [1, 16, 40, 100])
@pytest.mark.parametrize("quantize", Quantization)
def test_it_can_be_captured_in_a_graph(quantize: Quantization, tokens: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    linear, x_TK = (
        _linear(96, 64, quantize, device),
        torch.zeros(tokens, 64, device=device, dtype=torch.bfloat16),
    )
    warm_up_kernels(linear, torch.bfloat16)
    run: Callable[[], Tensor] = lambda: linear(x_TK)  # noqa: E731
    run()  # cuBLAS makes its workspace
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_TN = run()
    x_TK.copy_(_random(tokens, 64))
    graph.replay()
    torch.testing.assert_close(out_TN, run())
