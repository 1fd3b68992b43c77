"""Linear layers of quantized matrices, by the best kernel that a device has.
``weights/quantize.py`` describes the format.

Shape letters: T tokens, K inputs, N outputs of a matrix.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from tramontane.workers.device.self_test import assert_close_norm, try_or_reason
from tramontane.workers.kernels.linear import blockwise_linear, has_native_matmul

logger = logging.getLogger(__name__)

# (x_TK, numbers_NK, scale_N) -> x (numbers scale)^T in the dtype of x
Product = Callable[[Tensor, Tensor, Tensor], Tensor]

GPU_STEP = 16  # GPU kernels need both dimensions of a matrix to be multiples of it
FUSED_TOKENS = 64  # at most, for the fused kernel
# up to this number reading the weights is the bottleneck: fp8 activations would cost another kernel
# and gain no speed
FEW_TOKENS = 16
MAX_FP8 = 448
FP8_CAPABILITY = (8, 9)  # the first of GPUs that convert and multiply fp8 (e4m3)
MAX_DIFFERENCE = 0.05  # in self tests, relative, by norms: fp8 activations cause half of it
# sides of the matrices in self tests: a multiple of 16, and of no kernel's block size
TEST_SIZE = 272


class QuantizedLinear(nn.Module):
    """Linear layer with a quantized weight: x W^T in the dtype of x.

    ``int8_activations``: x may be rounded to int8, which ``PackedLinear`` does. ``product``: see
    ``RowProducts.linear``.
    """

    weight: Tensor
    scale: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        number_dtype: torch.dtype,
        int8_activations: bool = False,
    ) -> None:
        super().__init__()
        self.int8_activations = int8_activations
        self.product: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None
        self.register_buffer("weight", torch.zeros(out_features, in_features, dtype=number_dtype))
        self.register_buffer("scale", torch.ones(out_features))

    def forward(self, x_TK: Tensor) -> Tensor:
        """Compute x W^T with a kernel for quantized numbers, or else by converting a block of rows
        at a time to float.
        """
        if self.product is not None:
            return self.product(x_TK, self.weight, self.scale)
        product = dequantized_linear if x_TK.device.type == "cpu" else self._gpu_product(x_TK)
        return product(x_TK, self.weight, self.scale)

    def _gpu_product(self, x_TK: Tensor) -> Product:
        if any(size % GPU_STEP for size in self.weight.shape):
            return dequantized_linear
        return probe_kernels(x_TK.device, self.weight.dtype, x_TK.dtype).choose(len(x_TK))


def dequantized_linear(x_TK: Tensor, numbers_NK: Tensor, scale_N: Tensor) -> Tensor:
    """Compute x (numbers scale)^T by converting a block of rows at a time to float in memory."""
    dtype = x_TK.dtype if has_native_matmul(x_TK.device.type, x_TK.dtype) else torch.float32
    return blockwise_linear(x_TK, numbers_NK, dtype, scale_N)


def fp8_linear(x_TK: Tensor, numbers_NK: Tensor, scale_N: Tensor) -> Tensor:
    """Compute x (numbers scale)^T with fp8 arithmetic; activations are quantized to fp8 here, with
    one scale per token.
    """
    return _scaled(*quantize_rows_fp8(x_TK), numbers_NK, scale_N, x_TK.dtype)


def quantize_rows_fp8(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each token to fp8 numbers with a maximum of 448; return the numbers and the scales
    [T, 1].
    """
    largest_T1 = torch.linalg.vector_norm(x_TK, math.inf, dim=1, keepdim=True, dtype=torch.float32)
    # a token of zeros needs a scale too
    scale_T1 = (largest_T1 / MAX_FP8).clamp_(min=torch.finfo(torch.float32).tiny)
    return (x_TK / scale_T1).to(torch.float8_e4m3fn), scale_T1


def _scaled(
    numbers_TK: Tensor, scale_T1: Tensor, numbers_NK: Tensor, scale_N: Tensor, dtype: torch.dtype
) -> Tensor:
    return torch._scaled_mm(
        numbers_TK, numbers_NK.T, scale_a=scale_T1, scale_b=scale_N[None], out_dtype=dtype
    )


def _fused_fp8_product(x_TK: Tensor, numbers_NK: Tensor, scale_N: Tensor) -> Tensor:
    """Compute ``fp8_linear`` with one kernel instead of five for the activations."""
    # only torch for CUDA brings Triton
    from tramontane.workers.kernels.triton_linear import quantize_rows_fp8

    return _scaled(*quantize_rows_fp8(x_TK, MAX_FP8), numbers_NK, scale_N, x_TK.dtype)


def _fused_product(x_TK: Tensor, numbers_NK: Tensor, scale_N: Tensor) -> Tensor:
    from tramontane.workers.kernels.triton_linear import quantized_gemv  # as above

    return quantized_gemv(x_TK, numbers_NK, scale_N)


@dataclass(frozen=True, slots=True)
class QuantizedKernels:
    """Kernels of a GPU for quantized matrices: one for up to ``FUSED_TOKENS`` tokens, and one for
    any number.
    """

    fused: Product | None
    fp8: Product | None

    def choose(self, num_tokens: int) -> Product:
        """Choose by size alone, which is fixed in a captured graph.

        16 tokens: fused; 17 in fp8: fp8; 17 in int8: fused; 65 in int8: blocks of rows.
        """
        if self.fused and num_tokens <= (FEW_TOKENS if self.fp8 else FUSED_TOKENS):
            return self.fused
        return self.fp8 or dequantized_linear


@cache
def probe_kernels(
    device: torch.device, number_dtype: torch.dtype, dtype: torch.dtype
) -> QuantizedKernels:
    """Test once which kernels work on this device for these dtypes. Float32 uses no kernels, to
    keep its precision.

    Compiles kernels and waits for the device, so the first call must not be inside a graph capture.
    """
    if dtype == torch.float32:
        return QuantizedKernels(None, None)
    dtypes = (number_dtype, dtype)
    few, several, many = (1,), (FEW_TOKENS + 1, FUSED_TOKENS), (FUSED_TOKENS + 1,)
    converting = "kernel that converts them to float while it reads them"
    fused = (
        _fused_product
        if _self_test(_fused_product, converting, device, dtypes, (*few, *several))
        else None
    )
    if number_dtype != torch.float8_e4m3fn:
        return QuantizedKernels(fused, None)
    lengths = (*several, *many) if fused else (*few, *several, *many)
    if not _self_test(fp8_linear, "fp8 arithmetic", device, dtypes, lengths):
        return QuantizedKernels(fused, None)
    is_fused = _self_test(
        _fused_fp8_product, "kernel that quantizes activations to fp8", device, dtypes, lengths
    )
    return QuantizedKernels(fused, _fused_fp8_product if is_fused else fp8_linear)


def _self_test(
    product: Product,
    name: str,
    device: torch.device,
    dtypes: tuple[torch.dtype, torch.dtype],
    lengths: Sequence[int],
) -> bool:
    """Return whether the product is correct for these numbers of tokens; log a warning with the
    reason if it is not.

    ``dtypes``: of the numbers and the activations.
    """
    number_dtype, dtype = dtypes
    generator = torch.Generator(device).manual_seed(0)
    numbers_NK = (
        torch.randn(TEST_SIZE, TEST_SIZE, device=device, generator=generator)
        .mul_(40)
        .clamp_(-127, 127)
        .to(number_dtype)
    )
    scale_N = torch.arange(1, TEST_SIZE + 1, device=device) / TEST_SIZE

    def attempt() -> None:
        for num_tokens in lengths:
            x_TK = torch.randn(num_tokens, TEST_SIZE, device=device, generator=generator).to(dtype)
            expected_TN = x_TK.float() @ (numbers_NK.float() * scale_N[:, None]).T
            assert_close_norm(product(x_TK, numbers_NK, scale_N), expected_TN, MAX_DIFFERENCE)

    if reason := try_or_reason(attempt):
        logger.warning(
            "weights in %s on %s: the %s fails its self test (%s)",
            number_dtype,
            device,
            name,
            reason,
        )
    return not reason


def warm_up_kernels(model: nn.Module, dtype: torch.dtype) -> None:
    """Test, before the first step, which kernels the device has for the quantized matrices of a
    model.
    """
    for module in model.modules():
        if isinstance(module, QuantizedLinear) and module.weight.device.type != "cpu":
            probe_kernels(module.weight.device, module.weight.dtype, dtype)
