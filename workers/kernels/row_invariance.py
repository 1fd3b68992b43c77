"""Check whether the product of a token and a matrix has the same bits whatever other tokens are multiplied at the same time.

Shape letters: T tokens, K inputs of a matrix.
"""

import logging
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from tramontane.proto.errors import ConfigError
from tramontane.workers.device.self_test import one_line
from tramontane.workers.kernels.linear import Linear
from tramontane.workers.kernels.packed_linear import PackedLinear
from tramontane.workers.kernels.quantized_linear import QuantizedLinear

logger = logging.getLogger(__name__)

Matrix = Linear | QuantizedLinear | PackedLinear
NUM_TOKENS = 67  # several tiles of a product, the last of which is not full
ROW_COUNTS = (1, 3, 8, 20)


def try_invariance(label: str, wanted: bool | None, device: torch.device, find_dependence: Callable[[], str]) -> bool:
    """Return whether ``find_dependence`` finds nothing. It is not called where invariance need not be: False then.

    ``wanted``: see ``StagePlan.batch_invariant``. Raises ConfigError where it is required and something is found.
    """
    if wanted is False or (wanted is None and device.type != "cpu"):
        return False
    with torch.inference_mode():
        problem = find_dependence()
    if problem and wanted:
        raise refusal(label, problem)
    if problem:
        logger.warning("%s: a request's tokens may depend on what else is computed at the same time: %s", label, problem)
    return not problem


def refusal(label: str, problem: str) -> ConfigError:
    """Return the error of a stage or of experts that cannot be what is required."""
    return ConfigError(f"{label} cannot be batch-invariant: {problem}; start without --batch-invariant")


def triton_refusal(label: str, error: Exception) -> ConfigError:
    """Return the error where Triton's kernels do not run or are not correct."""
    return refusal(label, f"Triton's kernels cannot be used ({one_line(error)})")


def find_row_dependence(model: nn.Module, dtype: torch.dtype, device: torch.device) -> str:
    """Try every shape of the model's matrices; return which product has other bits among fewer tokens, or nothing."""
    for layer in _one_of_each_shape(model):
        num_outputs, num_inputs = _shape(layer)
        x_TK = torch.randn(NUM_TOKENS, num_inputs, generator=torch.Generator().manual_seed(0)).to(
            device, _input_dtype(layer, dtype)
        )
        if count := differing_row_count(layer, x_TK):
            matrix = f"a matrix of {num_outputs} x {num_inputs}"
            return f"the product of {count} of {len(x_TK)} tokens and {matrix} has other bits than among all of them"
    return ""


def differing_row_count(compute: Callable[[Tensor], Tensor], x_TK: Tensor) -> int:
    """Return how many of the first or last tokens have other results without the rest, or 0."""
    whole = compute(x_TK)
    for count in ROW_COUNTS:
        is_equal = torch.equal(compute(x_TK[:count]), whole[:count]) and torch.equal(compute(x_TK[-count:]), whole[-count:])
        if not is_equal:
            return count
    return 0


def _input_dtype(layer: Matrix, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of what a matrix multiplies: the model's, unless the matrix alone is in float32."""
    matrix_dtype = layer.matmul.dtype if isinstance(layer, PackedLinear) else layer.weight.dtype
    return torch.float32 if matrix_dtype == torch.float32 else dtype


def _one_of_each_shape(model: nn.Module) -> Iterator[Matrix]:
    seen = set()
    for layer in model.modules():
        if isinstance(layer, Matrix) and (kind := (type(layer), layer.weight.dtype, _shape(layer))) not in seen:
            seen.add(kind)
            yield layer


def _shape(layer: Matrix) -> tuple[int, int]:
    """Return the outputs and inputs of a matrix."""
    if isinstance(layer, PackedLinear):
        return layer.out_features, layer.in_features
    num_outputs, num_inputs = layer.weight.shape
    return num_outputs, num_inputs
