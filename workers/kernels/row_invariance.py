"""Check whether the product of a token and a matrix has the same bits whatever other tokens are
multiplied at the same time.

Shape letters: T tokens, K inputs of a matrix.
"""

import logging
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from tramontane.proto.errors import ConfigError
from tramontane.workers.device.self_test import one_line
from tramontane.workers.kernels.linear import Linear
from tramontane.workers.kernels.packed_linear import PackedLinear
from tramontane.workers.kernels.quantized_linear import QuantizedLinear
from tramontane.workers.kernels.row_products import RowProducts

logger = logging.getLogger(__name__)

Matrix = Linear | QuantizedLinear | PackedLinear
NUM_TOKENS = 67  # several tiles of a product, the last of which is not full
ROW_COUNTS = (1, 3, 8, 20)


def try_invariance(
    label: str, wanted: bool | None, device: torch.device, find_dependence: Callable[[], str]
) -> bool:
    """Return whether ``find_dependence`` finds nothing. It is not called where invariance need not
    be: False then.

    ``wanted``: see ``StagePlan.batch_invariant``. Raises ConfigError where it is required and
    something is found.
    """
    if wanted is False or (wanted is None and device.type != "cpu"):
        return False
    with torch.inference_mode():
        problem = find_dependence()
    if problem and wanted:
        raise refusal(label, problem)
    if problem:
        logger.warning(
            "%s: a request's tokens may depend on what else is computed at the same time: %s",
            label,
            problem,
        )
    return not problem


def refusal(label: str, problem: str) -> ConfigError:
    """Return the error of a stage or of experts that cannot be what is required."""
    return ConfigError(
        f"{label} cannot be batch-invariant: {problem}; start without --batch-invariant"
    )


def triton_refusal(label: str, error: Exception) -> ConfigError:
    """Return the error where Triton's kernels do not run or are not correct."""
    return refusal(label, f"Triton's kernels cannot be used ({one_line(error)})")


def find_row_dependence(
    model: nn.Module, dtype: torch.dtype, device: torch.device, products: RowProducts | None = None
) -> str:
    """Try every shape of the model's matrices; return which product has other bits among fewer
    tokens, or nothing.

    With ``products`` of the model also as many tokens as are computed in another way than one more.
    """
    for layer in _one_of_each_shape(model):
        (num_outputs, num_inputs), input_dtype = _shape(layer), _input_dtype(layer, dtype)
        is_packed = isinstance(layer, PackedLinear)
        edges = (
            () if products is None or is_packed else products.edges(input_dtype, layer.weight[None])
        )
        num_tokens = max((NUM_TOKENS, *edges))
        x_TK = torch.randn(num_tokens, num_inputs, generator=torch.Generator().manual_seed(0)).to(
            device, input_dtype
        )
        if count := differing_row_count(layer, x_TK, (*ROW_COUNTS, *edges)):
            matrix = f"a matrix of {num_outputs} x {num_inputs}"
            return (
                f"the product of {count} of {len(x_TK)} tokens and {matrix} has other bits than"
                " among all of them"
            )
    return ""


def find_group_dependence(
    weight_ENK: Tensor, scale_EN: Tensor | None, dtype: torch.dtype, products: RowProducts
) -> str:
    """Return for how many tokens the product by groups has other bits than the product of each
    group, or nothing.
    """
    num_groups, num_outputs, num_inputs = weight_ENK.shape
    for num_tokens in (*ROW_COUNTS, *products.edges(dtype, weight_ENK)):
        x_TK = torch.randn(num_tokens, num_inputs, generator=torch.Generator().manual_seed(0)).to(
            weight_ENK.device, dtype
        )
        # of 20, four: 1, 5, 11, 20
        ends = [num_tokens * (group + 1) ** 2 // num_groups**2 for group in range(num_groups)]
        grouped_TN = products.grouped(
            x_TK, weight_ENK, torch.tensor(ends, dtype=torch.int32, device=x_TK.device), scale_EN
        )
        for group in (0, num_groups - 1):
            own = slice(ends[group - 1] if group else 0, ends[group])
            scale_N = None if scale_EN is None else scale_EN[group]
            if not torch.equal(
                grouped_TN[own], products.linear(x_TK[own], weight_ENK[group], scale_N)
            ):
                matrices = f"{num_groups} matrices of {num_outputs} x {num_inputs}"
                return (
                    f"the product of {num_tokens} tokens in groups and {matrices} has other bits"
                    " than that of each group"
                )
    return ""


def differing_row_count(
    compute: Callable[[Tensor], Tensor], x_TK: Tensor, counts: Sequence[int] = ROW_COUNTS
) -> int:
    """Return how many of the first or last tokens have other results without the rest, or 0."""
    whole = compute(x_TK)
    for count in counts:
        is_equal = torch.equal(compute(x_TK[:count]), whole[:count]) and torch.equal(
            compute(x_TK[-count:]), whole[-count:]
        )
        if not is_equal:
            return count
    return 0


def _input_dtype(layer: Matrix, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of what a matrix multiplies: the model's, unless the matrix alone is in
    float32.
    """
    matrix_dtype = layer.matmul.dtype if isinstance(layer, PackedLinear) else layer.weight.dtype
    return torch.float32 if matrix_dtype == torch.float32 else dtype


def _one_of_each_shape(model: nn.Module) -> Iterator[Matrix]:
    seen = set()
    for layer in model.modules():
        if (
            isinstance(layer, Matrix)
            and (kind := (type(layer), layer.weight.dtype, _shape(layer))) not in seen
        ):
            seen.add(kind)
            yield layer


def _shape(layer: Matrix) -> tuple[int, int]:
    """Return the outputs and inputs of a matrix."""
    if isinstance(layer, PackedLinear):
        return layer.out_features, layer.in_features
    num_outputs, num_inputs = layer.weight.shape
    return num_outputs, num_inputs
