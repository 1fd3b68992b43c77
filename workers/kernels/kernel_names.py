"""Names of the kernels that compute a model: two workers with the same names compute the same bits
for the same work.
"""

from dataclasses import fields, is_dataclass
from pathlib import Path

import torch
from torch import nn

from tramontane.workers.device.native_library import source_digest
from tramontane.workers.kernels import fused_ops, packed_linear
from tramontane.workers.kernels.fused_ops import EAGER, FusedOps
from tramontane.workers.kernels.linear import Linear
from tramontane.workers.kernels.packed_linear import PackedLinear
from tramontane.workers.kernels.quantized_linear import QuantizedLinear, probe_kernels
from tramontane.workers.kernels.row_invariance import Matrix

PYTORCH = "PyTorch"
PARAMETERS = ("NAME",)  # of xformers' operators, which are classes


def name_kernels(
    model: nn.Module, ops: FusedOps, device: torch.device, dtype: torch.dtype
) -> dict[str, str]:
    """Return the names of the kernels for each kind of matrix of a model, and for the operations
    between products, by part.
    """
    norms = (
        PYTORCH
        if ops is EAGER
        else _name_gpu_ops(ops)
        if device.type == "cuda"
        else name_in_c(fused_ops.SOURCE)
    )
    kinds = {_kind(layer): layer for layer in model.modules() if isinstance(layer, Matrix)}
    small = sorted(
        {_name_small_batches(layer) for layer in model.modules() if isinstance(layer, Linear)}
        - {""}
    )
    named = {"products of small batches": "; ".join(small)} if small else {}
    return {
        "norms": norms,
        **{f"products of {kind}": _name_product(layer, dtype) for kind, layer in kinds.items()},
        **named,
    }


def _name_gpu_ops(ops: FusedOps) -> str:
    return "Triton and PyTorch" if ops.cos_sin is EAGER.cos_sin else "torch.compile and Triton"


def _name_small_batches(layer: Linear) -> str:
    """Return ``4096x4096: gemv 8x512x4 to 1`` and so on for a matrix that has products for small
    batches.
    """
    products = ", ".join(
        f"{name} to {max_tokens}" for max_tokens, name, _ in layer.small_batch_products
    )
    return f"{'x'.join(map(str, layer.weight.shape))}: {products}" if products else ""


def _kind(layer: Matrix) -> str:
    """Return the data type of a matrix, and of activations that are rounded before the product:
    ``int8 and int8``.
    """
    source = layer.matmul if isinstance(layer, PackedLinear) else layer
    activations = " and int8" if getattr(source, "int8_activations", False) else ""
    return f"{layer.weight.dtype}{activations}".removeprefix("torch.")


def _name_product(layer: Matrix, dtype: torch.dtype) -> str:
    if isinstance(layer, PackedLinear):
        return name_in_c(packed_linear.SOURCE)
    if layer.product is not None:
        # the owner of a method
        return describe_kernel(getattr(layer.product, "__self__", layer.product))
    if isinstance(layer, QuantizedLinear) and layer.weight.device.type != "cpu":
        return describe_kernel(probe_kernels(layer.weight.device, layer.weight.dtype, dtype))
    return PYTORCH


def name_in_c(source: Path) -> str:
    """Name kernels in C that were compiled from this source."""
    return f"C {source_digest(source)}"


def describe_kernel(kernel: object) -> str:
    """Return the name of a kernel with the parameters in its ``repr``: ``PackedPrefill(FwOp(NAME
    fa2F))``.
    """
    if is_dataclass(kernel) and not isinstance(kernel, type):
        parameters = [
            describe_kernel(getattr(kernel, field.name)) for field in fields(kernel) if field.repr
        ]
        return f"{type(kernel).__name__}({', '.join(parameters)})"
    if isinstance(kernel, tuple):
        return f"({', '.join(map(describe_kernel, kernel))})"
    if isinstance(kernel, type):
        parameters = [
            f"{name} {getattr(kernel, name)}" for name in PARAMETERS if hasattr(kernel, name)
        ]
        return f"{kernel.__name__}({', '.join(parameters)})"
    return getattr(kernel, "__name__", None) or (
        str(kernel) if isinstance(kernel, int | None) else type(kernel).__name__
    )
