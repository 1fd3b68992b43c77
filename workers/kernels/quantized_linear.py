"""Products with quantised matrices, by the best way that a device has. See ``quantize`` for what they hold.

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

# torch's CPU kernel reads rows 16 numbers at a time, with loads that need 32-byte borders. It checks neither.
KERNEL_STEP, KERNEL_BORDER = 16, 32
KERNEL_TOKENS = 16  # up to which it is as fast as blocks of float32, without AVX-512
GPU_STEP = 16  # both sides of a matrix have to be multiples of it, or its weights are made float
FUSED_TOKENS = 64  # as many as the fused product takes
FEW_TOKENS = 16  # so few wait for the weights only: activations in fp8, too, would cost another kernel and win nothing
MAX_FP8 = 448
MAX_DIFFERENCE = 0.05  # of a product that is tried, relative, by norms: activations in fp8 make half of it
TEST_SIZE = 272  # of the matrices that are tried: a multiple of 16, and of nothing that a kernel has for a block


class QuantizedLinear(nn.Module):
    """x W^T for a quantised W, in the dtype of x."""

    weight: Tensor
    scale: Tensor

    def __init__(self, in_features: int, out_features: int, number_dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(out_features, in_features, dtype=number_dtype))
        self.register_buffer("scale", torch.ones(out_features, dtype=scale_dtype))

    def forward(self, x_TK: Tensor) -> Tensor:
        """By a kernel for such numbers where there is one; elsewhere by making a block of rows at a time float again."""
        product = _cpu_product(x_TK, self.weight) if x_TK.device.type == "cpu" else self._gpu_product(x_TK)
        return product(x_TK, self.weight, self.scale)

    def _gpu_product(self, x_TK: Tensor) -> Product:
        if any(size % GPU_STEP for size in self.weight.shape):
            return dequantized_linear
        return probe_kernels(x_TK.device, self.weight.dtype, self.scale.dtype, x_TK.dtype).choose(len(x_TK))


def _cpu_product(x_TK: Tensor, numbers_NK: Tensor) -> Product:
    is_fast = len(x_TK) <= KERNEL_TOKENS or has_native_matmul("cpu", x_TK.dtype)
    fits = (x_TK.dtype, numbers_NK.dtype) == (torch.bfloat16, torch.int8) and x_TK.shape[1] % KERNEL_STEP == 0
    return _cpu_kernel if is_fast and fits else dequantized_linear


def _cpu_kernel(x_TK: Tensor, numbers_NK: Tensor, scale_N: Tensor) -> Tensor:
    fits = x_TK.is_contiguous() and x_TK.data_ptr() % KERNEL_BORDER == 0
    fitting_TK = x_TK if fits else x_TK.clone(memory_format=torch.contiguous_format)
    out_TN: Tensor = torch.ops.aten._weight_int8pack_mm(fitting_TK, numbers_NK, scale_N)
    return out_TN


def dequantized_linear(x_TK: Tensor, numbers_NK: Tensor, scale_N: Tensor) -> Tensor:
    """The weights made float in memory, a block of rows at a time."""
    dtype = x_TK.dtype if has_native_matmul(x_TK.device.type, x_TK.dtype) else torch.float32
    return blockwise_linear(x_TK, numbers_NK, dtype, scale_N)


def fp8_linear(x_TK: Tensor, numbers_NK: Tensor, scale_N: Tensor) -> Tensor:
    """By arithmetic for fp8, with activations as fp8, too, of a scale per token that is computed here."""
    return _scaled(*quantize_rows_fp8(x_TK), numbers_NK, scale_N, x_TK.dtype)


def quantize_rows_fp8(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers, and a scale per token, [T, 1], with which the largest of them is 448."""
    largest_T1 = torch.linalg.vector_norm(x_TK, math.inf, dim=1, keepdim=True, dtype=torch.float32)
    scale_T1 = (largest_T1 / MAX_FP8).clamp_(min=torch.finfo(torch.float32).tiny)  # nothing has a scale, too
    return (x_TK / scale_T1).to(torch.float8_e4m3fn), scale_T1


def _scaled(numbers_TK: Tensor, scale_T1: Tensor, numbers_NK: Tensor, scale_N: Tensor, dtype: torch.dtype) -> Tensor:
    return torch._scaled_mm(numbers_TK, numbers_NK.T, scale_a=scale_T1, scale_b=scale_N[None], out_dtype=dtype)


def _fused_fp8_product(x_TK: Tensor, numbers_NK: Tensor, scale_N: Tensor) -> Tensor:
    """``fp8_linear`` with one kernel instead of five for activations."""
    from tramontane.workers.kernels.triton_quant import quantize_rows_fp8  # Triton comes with torch for CUDA only

    return _scaled(*quantize_rows_fp8(x_TK, MAX_FP8), numbers_NK, scale_N, x_TK.dtype)


def _fused_product(x_TK: Tensor, numbers_NK: Tensor, scale_N: Tensor) -> Tensor:
    from tramontane.workers.kernels.triton_quant import quantized_gemv  # likewise

    return quantized_gemv(x_TK, numbers_NK, scale_N)


@dataclass(frozen=True, slots=True)
class QuantizedKernels:
    """What a GPU has for quantised matrices: for up to ``FUSED_TOKENS`` tokens, and for any number of them."""

    fused: Product | None
    fp8: Product | None

    def choose(self, num_tokens: int) -> Product:
        """By sizes alone, which a captured graph keeps. 16 tokens: fused; 17: in fp8; 17 of int8: fused; 65 of int8: blocks."""
        if self.fused and num_tokens <= (FEW_TOKENS if self.fp8 else FUSED_TOKENS):
            return self.fused
        return self.fp8 or dequantized_linear


@cache
def probe_kernels(
    device: torch.device, number_dtype: torch.dtype, scale_dtype: torch.dtype, dtype: torch.dtype
) -> QuantizedKernels:
    """What works on this device, tried once: that compiles, for these very dtypes, and waits for the device, so never first in a
    captured graph.

    Not for float32, which asks for its precision.
    """
    if dtype == torch.float32:
        return QuantizedKernels(None, None)
    kind = (device, number_dtype, scale_dtype, dtype)
    few, several, many = (1,), (FEW_TOKENS + 1, FUSED_TOKENS), (FUSED_TOKENS + 1,)
    has_fused = _self_test(_fused_product, "kernel that makes them float as it reads them", *kind, (*few, *several))
    fused = _fused_product if has_fused else None
    if number_dtype != torch.float8_e4m3fn:
        return QuantizedKernels(fused, None)
    lengths = (*several, *many) if fused else (*few, *several, *many)
    if not _self_test(fp8_linear, "arithmetic for fp8", *kind, lengths):
        return QuantizedKernels(fused, None)
    is_fused = _self_test(_fused_fp8_product, "kernel that makes activations fp8", *kind, lengths)
    return QuantizedKernels(fused, _fused_fp8_product if is_fused else fp8_linear)


def _self_test(
    product: Product,
    name: str,
    device: torch.device,
    number_dtype: torch.dtype,
    scale_dtype: torch.dtype,
    dtype: torch.dtype,
    lengths: Sequence[int],
) -> bool:
    """Whether it gets products of so many tokens right: those for which it has kernels of their own."""
    generator = torch.Generator(device).manual_seed(0)
    numbers_NK = torch.randn(TEST_SIZE, TEST_SIZE, device=device, generator=generator).mul_(40).clamp_(-127, 127).to(number_dtype)
    scale_N = (torch.arange(1, TEST_SIZE + 1, device=device) / TEST_SIZE).to(scale_dtype)

    def attempt() -> None:
        for num_tokens in lengths:
            x_TK = torch.randn(num_tokens, TEST_SIZE, device=device, generator=generator).to(dtype)
            expected_TN = x_TK.float() @ (numbers_NK.float() * scale_N[:, None]).T
            assert_close_norm(product(x_TK, numbers_NK, scale_N), expected_TN, MAX_DIFFERENCE)

    if why := try_or_reason(attempt):
        logger.warning("weights in %s on %s: no %s (%s)", number_dtype, device, name, why)
    return not why


def warm_up_kernels(model: nn.Module, dtype: torch.dtype) -> None:
    """Find out, before the first step, what the device has for the quantised matrices of a model, if it has any."""
    for module in model.modules():
        if isinstance(module, QuantizedLinear) and module.weight.device.type != "cpu":
            probe_kernels(module.weight.device, module.weight.dtype, module.scale.dtype, dtype)
