"""Products in which each row is computed apart from the others, in the place of a library's, for stages on GPUs.

Shape letters: C rows, E experts, N outputs and K inputs of a matrix.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tramontane.proto.model_args import Quantization, WeightFormat
from tramontane.workers.device.self_test import assert_close_norm
from tramontane.workers.kernels.linear import Linear
from tramontane.workers.kernels.quantized_linear import QuantizedLinear

MAX_DIFFERENCE = 1e-2  # in self tests, relative, by norms: more than rounding the output to 16 bits causes
TEST_SHAPE, TEST_NUM_ROWS = (3, 100, 75), (1, 130)  # experts, outputs and inputs that fill no last tile


@dataclass(frozen=True, slots=True)
class RowProducts:
    """Products of one matrix, and of consecutive groups of rows with a matrix each.

    ``linear`` takes x [C, K], a matrix [N, K] and, if that is quantized, scales [N]. ``grouped`` takes x, matrices [E, N, K], the
    ends of the groups [E] (int32) and, if the matrices are quantized, scales [E, N]; it does not wait for the device.
    """

    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    grouped: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def triton_products(device: torch.device, weights: WeightFormat) -> RowProducts:
    """Compile and try the products for weights of this format. Raises errors of any kind where they cannot be used."""
    from tramontane.workers.kernels.triton_linear import tiled_grouped_linear, tiled_linear  # Triton is not everywhere

    products = RowProducts(tiled_linear, tiled_grouped_linear)
    dtype, matrix_dtype = getattr(torch, weights.dtype), getattr(torch, weights.matrix_dtype)
    _self_test(products, device, dtype, matrix_dtype)
    if weights.quantize:
        is_fp8 = weights.quantize == Quantization.FP8
        _self_test(products, device, dtype, torch.float8_e4m3fn if is_fp8 else torch.int8)
    return products


def set_row_products(model: nn.Module, products: RowProducts | None) -> None:
    """Use these products in every linear layer, or what the layers have themselves."""
    for module in model.modules():
        if isinstance(module, Linear | QuantizedLinear):
            module.product = None if products is None else products.linear


@torch.inference_mode()
def _self_test(products: RowProducts, device: torch.device, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    """Compare with PyTorch in float32. Raises ArithmeticError."""
    generator = torch.Generator().manual_seed(0)
    weight_ENK = torch.randn(TEST_SHAPE, generator=generator).mul_(40).clamp_(-127, 127).to(device, weight_dtype)
    scale_EN = torch.rand(TEST_SHAPE[:2], generator=generator).to(device)
    is_quantized = weight_dtype.itemsize == 1
    for num_rows in TEST_NUM_ROWS:
        x_CK = torch.randn(num_rows, TEST_SHAPE[2], generator=generator).to(device, dtype)
        expected_CN = (x_CK.float().cpu() @ weight_ENK[2].float().cpu().T).to(device)
        if is_quantized:
            expected_CN = expected_CN * scale_EN[2]
        out_CN = products.linear(x_CK, weight_ENK[2], scale_EN[2] if is_quantized else None)
        assert_close_norm(out_CN, expected_CN, MAX_DIFFERENCE)
        ends_E = torch.tensor([num_rows // 3, num_rows // 3, num_rows], dtype=torch.int32, device=device)
        own = slice(num_rows // 3, None)
        out_CN = products.grouped(x_CK, weight_ENK, ends_E, scale_EN if is_quantized else None)
        assert_close_norm(out_CN[own], expected_CN[own], MAX_DIFFERENCE)
