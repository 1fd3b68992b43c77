"""Linear layers on CPUs by ``packed_matmul.c``, which stores weights in the order in which it reads
them.

Shape letters: T tokens, K inputs, N outputs of a matrix; packed weights are P panels of C columns,
in U units of S inputs.
"""

import ctypes
import logging
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor, nn

from tramontane.workers.device.native_library import CompilerError, compile_library
from tramontane.workers.device.self_test import assert_close_norm
from tramontane.workers.kernels.linear import Linear
from tramontane.workers.kernels.quantized_linear import QuantizedLinear

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("packed_matmul.c")
POINTER, SIZE = ctypes.c_void_p, ctypes.c_int64
# WEIGHT in the source, for weights whose dtype differs from the activations'
WEIGHTS = {torch.int8: 1, torch.float8_e4m3fn: 2, torch.bfloat16: 4}
INTEGER_PRODUCTS = 3  # WEIGHT, too
NO_MEMORY = "there is no memory for the inputs of a matrix product"
# relative, by norms: more than rounding the output causes, and the activations to int8
MAX_DIFFERENCE = 1e-2
# few and many tiles; outputs and inputs that fill no last panel or unit
TEST_SHAPE, TEST_NUM_TOKENS = (100, 75), (1, 30, 61)


class PackedMatmul:
    """The functions of ``packed_matmul.c`` for activations and weights of these dtypes. Raises
    CompilerError.

    With ``int8_activations`` each row of x is quantized to int8, with its own scale, and multiplied
    by int8 weights.
    """

    def __init__(
        self, dtype: torch.dtype, weight_dtype: torch.dtype, int8_activations: bool = False
    ) -> None:
        weight = (
            INTEGER_PRODUCTS
            if int8_activations
            else 0
            if weight_dtype == dtype
            else WEIGHTS[weight_dtype]
        )
        library = compile_library(SOURCE, str(dtype).removeprefix("torch."), WEIGHT=weight)
        self.dtype, self.weight_dtype, self.int8_activations = dtype, weight_dtype, int8_activations
        self._columns, self._step = (
            ctypes.CFUNCTYPE(SIZE)((name, library))() for name in ("panel_columns", "unit_numbers")
        )
        # of a column in its panel
        self.position = ctypes.CFUNCTYPE(SIZE, SIZE)(("position", library))
        self.block_rows = ctypes.CFUNCTYPE(SIZE, SIZE)(("block_rows", library))
        self._use_large_pages = ctypes.CFUNCTYPE(None, POINTER, SIZE)(("use_large_pages", library))
        self._pack = ctypes.CFUNCTYPE(None, *[POINTER] * 2, *[SIZE] * 4, ctypes.c_int)(
            ("pack", library)
        )
        self._multiply = ctypes.CFUNCTYPE(SIZE, *[POINTER] * 4, *[SIZE] * 3, ctypes.c_int)(
            ("multiply", library)
        )
        self._multiply_groups = ctypes.CFUNCTYPE(SIZE, *[POINTER] * 5, *[SIZE] * 3, ctypes.c_int)(
            ("multiply_groups", library)
        )

    def packed_shape(self, num_outputs: int, num_inputs: int) -> tuple[int, int, int, int]:
        """Return P, U, C and S. 70 outputs of 5 inputs, with C = 32 and S = 2: [3, 3, 32, 2]."""
        return (
            -(-num_outputs // self._columns),
            -(-num_inputs // self._step),
            self._columns,
            self._step,
        )

    def allocate(self, num_outputs: int, num_inputs: int) -> Tensor:
        """Allocate packed weights [P, U, C, S], to be filled by ``pack_rows``."""
        packed_PUCS = torch.empty(
            self.packed_shape(num_outputs, num_inputs), dtype=self.weight_dtype
        )
        self._use_large_pages(packed_PUCS.data_ptr(), packed_PUCS.nbytes)
        return packed_PUCS

    def pack_rows(
        self, rows_BK: Tensor, first_row: int, num_outputs: int, packed_PUCS: Tensor
    ) -> None:
        """Pack rows of a matrix of ``num_outputs``, from ``first_row`` on. The last row completes
        the last panel.
        """
        rows_BK = rows_BK.to(self.weight_dtype).contiguous()
        pointers = (rows_BK.data_ptr(), packed_PUCS.data_ptr())
        self._pack(
            *pointers,
            first_row,
            len(rows_BK),
            num_outputs,
            rows_BK.shape[1],
            torch.get_num_threads(),
        )

    def pack(self, weight_NK: Tensor) -> Tensor:
        """Return a whole matrix as [P, U, C, S], with columns at their ``position``."""
        packed_PUCS = self.allocate(*weight_NK.shape)
        self.pack_rows(weight_NK, 0, len(weight_NK), packed_PUCS)
        return packed_PUCS

    def multiply(
        self, x_TK: Tensor, packed_PUCS: Tensor, num_outputs: int, scale_N: Tensor | None = None
    ) -> Tensor:
        """Compute x W^T, [T, N], or x (W scale)^T with float32 scales."""
        x_TK = x_TK.contiguous()
        num_tokens, num_inputs = x_TK.shape
        out_TN = x_TK.new_empty(num_tokens, num_outputs)
        scales = None if scale_N is None else scale_N.data_ptr()
        pointers = (x_TK.data_ptr(), packed_PUCS.data_ptr(), scales, out_TN.data_ptr())
        if not self._multiply(
            *pointers, num_tokens, num_outputs, num_inputs, torch.get_num_threads()
        ):
            raise MemoryError(NO_MEMORY)
        return out_TN

    def multiply_groups(
        self, x_CK: Tensor, layers: Sequence["PackedLinear"], sizes: Sequence[int]
    ) -> Tensor:
        """Compute x W^T for consecutive groups of rows, of ``sizes``, each with the W of its layer:
        [C, N].

        Sizes 2, 0 and 1: rows 0 and 1 are multiplied by the first matrix, row 2 by the third.
        """
        x_CK = x_CK.contiguous()
        (num_outputs,), (num_inputs,) = (
            {getattr(layer, f"{side}_features") for layer in layers} for side in ("out", "in")
        )
        assert x_CK.dtype == self.dtype
        assert x_CK.shape == (sum(sizes), num_inputs)
        out_CN = x_CK.new_empty(len(x_CK), num_outputs)
        scales = (None if layer.scale is None else layer.scale.data_ptr() for layer in layers)
        weights = (layer.weight.data_ptr() for layer in layers)
        addresses, ends = POINTER * len(layers), (SIZE * len(layers))(*accumulate(sizes))
        pointers = (
            x_CK.data_ptr(),
            addresses(*weights),
            addresses(*scales),
            out_CN.data_ptr(),
            ends,
        )
        if not self._multiply_groups(
            *pointers, len(layers), num_outputs, num_inputs, torch.get_num_threads()
        ):
            raise MemoryError(NO_MEMORY)
        return out_CN


class PackedLinear(nn.Module):
    """Linear layer with packed weights in place of the weights of ``layer``: x W^T in the dtype of
    x. They are loaded later.
    """

    weight: Tensor
    scale: Tensor | None

    def __init__(self, matmul: PackedMatmul, layer: Linear | QuantizedLinear) -> None:
        super().__init__()
        self.matmul = matmul
        self.out_features, self.in_features = layer.weight.shape
        shape = matmul.packed_shape(*layer.weight.shape)
        self.register_buffer("weight", layer.weight.new_empty(shape, dtype=matmul.weight_dtype))
        self.register_buffer("scale", layer.scale if isinstance(layer, QuantizedLinear) else None)

    def forward(self, x_TK: Tensor) -> Tensor:
        """Compute x W^T."""
        assert x_TK.dtype == self.matmul.dtype
        assert x_TK.shape[1] == self.in_features
        return self.matmul.multiply(x_TK, self.weight, self.out_features, self.scale)


def pack_linears(
    model: nn.Module, dtype: torch.dtype, matrix_dtype: torch.dtype
) -> dict[str, PackedMatmul]:
    """Replace the linear layers of a model by packed ones, whose weights are loaded later, or log
    once why they are not replaced.

    ``matrix_dtype``: of weights that are not quantized. Layers that a module lists in
    ``not_packed`` are not replaced, and layers in ``in_float32`` have weights and inputs in
    float32.

    Returns, by name, the weights that have to be packed while they are loaded.
    """
    packed: dict[str, PackedMatmul] = {}
    for name, layer in list(model.named_modules()):
        parent, _, own_name = name.rpartition(".")
        owner = model.get_submodule(parent)
        is_packed = own_name not in getattr(owner, "not_packed", ())
        if is_packed and isinstance(layer, (Linear, QuantizedLinear)):
            if isinstance(layer, QuantizedLinear):
                matmul = packed_matmul(dtype, layer.weight.dtype, layer.int8_activations)
            elif own_name in getattr(owner, "in_float32", ()):
                matmul = packed_matmul(torch.float32, torch.float32)
            else:
                matmul = packed_matmul(dtype, matrix_dtype)
            if matmul is not None:
                model.set_submodule(name, PackedLinear(matmul, layer))
                packed[f"{name}.weight"] = matmul
    return packed


@cache
def packed_matmul(
    dtype: torch.dtype, weight_dtype: torch.dtype, int8_activations: bool = False
) -> PackedMatmul | None:
    """Return the functions for these dtypes, or None and log why they cannot be used."""
    try:
        matmul = PackedMatmul(dtype, weight_dtype, int8_activations)
        _self_test(matmul)
    except (CompilerError, ArithmeticError) as error:
        logger.info(
            "products of %s and weights in %s are computed by PyTorch, more slowly: %s",
            dtype,
            weight_dtype,
            error,
        )
        return None
    return matmul


def _self_test(matmul: PackedMatmul) -> None:
    """Compare with PyTorch in float32. Raises ArithmeticError."""
    generator = torch.Generator().manual_seed(0)
    weight_NK = (
        torch.randn(TEST_SHAPE, generator=generator)
        .mul_(40)
        .clamp_(-127, 127)
        .to(matmul.weight_dtype)
    )
    scale_N = torch.rand(len(weight_NK), generator=generator)
    packed_PUCS = matmul.pack(weight_NK)
    for num_tokens in TEST_NUM_TOKENS:
        x_TK = torch.randn(num_tokens, weight_NK.shape[1], generator=generator).to(matmul.dtype)
        expected_TN = x_TK.float() @ (weight_NK.float() * scale_N[:, None]).T
        assert_close_norm(
            matmul.multiply(x_TK, packed_PUCS, len(weight_NK), scale_N), expected_TN, MAX_DIFFERENCE
        )
    layer = PackedLinear(matmul, Linear(weight_NK.shape[1], len(weight_NK)))  # without scales
    layer.weight.copy_(packed_PUCS)
    sizes = (len(x_TK) // 3, len(x_TK) - len(x_TK) // 3)
    assert_close_norm(
        matmul.multiply_groups(x_TK, [layer, layer], sizes),
        x_TK.float() @ weight_NK.float().T,
        MAX_DIFFERENCE,
    )
