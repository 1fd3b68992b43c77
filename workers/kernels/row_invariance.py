"""Check whether the product of a token and a matrix has the same bits regardless of other tokens in
the batch.

Shape letters: T tokens, K inputs of a matrix.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tramontane.proto.errors import ConfigError
from tramontane.proto.weight_format import Quantization, WeightFormat
from tramontane.workers.device.self_test import assert_close_norm, one_line
from tramontane.workers.kernels.linear import Linear
from tramontane.workers.kernels.packed_linear import PackedLinear
from tramontane.workers.kernels.quantized_linear import QuantizedLinear

if TYPE_CHECKING:
    from tramontane.workers.kernels.triton_linear import Tile

# Products that compute each row separately, in place of a library's, for stages on GPUs.
#
# Shape letters: C rows, E experts, N outputs and K inputs of a matrix.

# in self tests, relative, by norms: more than rounding the output to 16 bits causes
MAX_DIFFERENCE = 1e-2
# experts, outputs and inputs that fill no last tile
TEST_SHAPE, TEST_NUM_ROWS = (3, 100, 275), (1, 70)

Dtypes = tuple[torch.dtype, torch.dtype]  # of rows and of a matrix


@dataclass(frozen=True, slots=True)
class RowProducts:
    """Products of one matrix, and of consecutive groups of rows with a matrix each.

    ``linear`` takes x [C, K], a matrix [N, K] and, if that is quantized, scales [N]. ``grouped``
    takes x, matrices [E, N, K], the ends of the groups [E] (int32) and, if the matrices are
    quantized, scales [E, N]; it does not wait for the device. ``edges`` returns the numbers of rows
    before and after each change of the kernel, in rising order, for rows of a dtype and matrices
    [E, N, K].
    """

    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    grouped: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    edges: Callable[[torch.dtype, Tensor], tuple[int, ...]] = lambda _dtype, _weight_ENK: ()


def triton_products(device: torch.device, weights: WeightFormat) -> RowProducts:
    """Compile and try the products for weights of this format. Raises errors of any kind where they
    cannot be used.
    """
    dtype = getattr(torch, weights.dtype)
    # some gates are in float32
    pairs = {(dtype, getattr(torch, weights.matrix_dtype)), (torch.float32, torch.float32)}
    if weights.quantize:
        pairs.add(
            (dtype, torch.float8_e4m3fn if weights.quantize == Quantization.FP8 else torch.int8)
        )
    products = TiledProducts({pair: equal_tiles(device, *pair) for pair in pairs})
    return RowProducts(products.linear, products.grouped, products.edges)


@dataclass(frozen=True, slots=True)
class TiledProducts:
    """Products by tiles, which depend on the dtypes of rows and matrix. All tiles give the same
    bits and differ only in speed.
    """

    # they change no bits: not part of the name
    tiles: "dict[Dtypes, tuple[Tile, ...]]" = field(repr=False)

    def linear(self, x_CK: Tensor, weight_NK: Tensor, scale_N: Tensor | None) -> Tensor:
        """Compute ``RowProducts.linear``."""
        from tramontane.workers.kernels import row_tiles, triton_linear  # Triton is not everywhere

        tile = row_tiles.choose_tile(
            self.tiles[x_CK.dtype, weight_NK.dtype], len(x_CK), len(weight_NK)
        )
        return triton_linear.tiled_linear(x_CK, weight_NK, scale_N, tile=tile)

    def grouped(
        self, x_CK: Tensor, weight_ENK: Tensor, ends_E: Tensor, scale_EN: Tensor | None
    ) -> Tensor:
        """Compute ``RowProducts.grouped``."""
        from tramontane.workers.kernels import row_tiles, triton_linear  # as above

        num_experts, num_outputs, _ = weight_ENK.shape
        tile = row_tiles.choose_tile(
            self.tiles[x_CK.dtype, weight_ENK.dtype], len(x_CK), num_outputs, num_experts
        )
        return triton_linear.tiled_grouped_linear(x_CK, weight_ENK, ends_E, scale_EN, tile=tile)

    def edges(self, dtype: torch.dtype, weight_ENK: Tensor) -> tuple[int, ...]:
        """Compute ``RowProducts.edges``."""
        from tramontane.workers.kernels import row_tiles  # as above

        num_experts, num_outputs, _ = weight_ENK.shape
        return row_tiles.edges(self.tiles[dtype, weight_ENK.dtype], num_outputs, num_experts)


def set_row_products(model: nn.Module, products: RowProducts | None) -> None:
    """Use these products in every linear layer, or the layers' own if None."""
    for module in model.modules():
        if isinstance(module, Linear | QuantizedLinear):
            module.product = None if products is None else products.linear


def equal_tiles(
    device: torch.device, dtype: torch.dtype, weight_dtype: torch.dtype
) -> "tuple[Tile, ...]":
    """Return the tiles that run on this device and give the same bits as the first of them; logs
    the other tiles.

    Raises ArithmeticError if a tile is not correct, and the error of the last tile if no tile runs.
    """
    from tramontane.workers.kernels.row_tiles import WIDE_CAPABILITY, tiles_for

    capability = (
        torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else WIDE_CAPABILITY
    )
    what, equal, expected = (
        f"products of {dtype} and {weight_dtype}".replace("torch.", ""),
        [],
        None,
    )
    failure: Exception | None = None
    for tile in tiles_for(dtype.itemsize, capability):
        try:
            out_CN = _try_tile(tile, device, dtype, weight_dtype)
        except ArithmeticError:
            raise
        # compilers and drivers raise errors of any kind, such as for too much shared memory
        except Exception as error:
            failure = error
            logger.info(
                "%s: tiles %s do not run on this GPU: %s",
                what,
                "x".join(map(str, tile)),
                one_line(error),
            )
            continue
        expected = out_CN if expected is None else expected
        if torch.equal(out_CN, expected):
            equal.append(tile)
        else:
            others = "x".join(map(str, equal[0]))
            text = (
                "%s: tiles %s have other bits than tiles %s on this GPU and are not used; products"
                " are slower without them"
            )
            logger.warning(text, what, "x".join(map(str, tile)), others)
    if failure is not None and not equal:
        raise failure
    return tuple(equal)


@torch.inference_mode()
def _try_tile(
    tile: "Tile", device: torch.device, dtype: torch.dtype, weight_dtype: torch.dtype
) -> Tensor:
    """Return products of some rows, one after the other and in groups. Raises ArithmeticError if
    PyTorch's in float32 differ.
    """
    from tramontane.workers.kernels import triton_linear  # Triton is not everywhere

    generator = torch.Generator().manual_seed(0)
    weight_ENK = (
        torch.randn(TEST_SHAPE, generator=generator)
        .mul_(40)
        .clamp_(-127, 127)
        .to(device, weight_dtype)
    )
    scale_EN = torch.rand(TEST_SHAPE[:2], generator=generator).to(device)
    is_quantized, outs = weight_dtype.itemsize == 1, []
    for num_rows in TEST_NUM_ROWS:
        x_CK = torch.randn(num_rows, TEST_SHAPE[2], generator=generator).to(device, dtype)
        expected_CN = (x_CK.float().cpu() @ weight_ENK[2].float().cpu().T).to(device)
        if is_quantized:
            expected_CN = expected_CN * scale_EN[2]
        outs.append(
            triton_linear.tiled_linear(
                x_CK, weight_ENK[2], scale_EN[2] if is_quantized else None, tile=tile
            )
        )
        ends_E = torch.tensor(
            [num_rows // 3, num_rows // 3, num_rows], dtype=torch.int32, device=device
        )
        scales = scale_EN if is_quantized else None
        outs.append(triton_linear.tiled_grouped_linear(x_CK, weight_ENK, ends_E, scales, tile=tile))
        own = slice(num_rows // 3, None)
        for out_CN in (outs[-2], outs[-1][own]):
            assert_close_norm(out_CN, expected_CN[-len(out_CN) :], MAX_DIFFERENCE)
    return torch.cat(outs)


logger = logging.getLogger(__name__)

Matrix = Linear | QuantizedLinear | PackedLinear
NUM_TOKENS = 67  # several tiles of a product, the last of which is not full
ROW_COUNTS = (1, 3, 8, 20)


def try_invariance(
    label: str, wanted: bool | None, device: torch.device, find_dependence: Callable[[], str]
) -> bool:
    """Return whether the stage is batch-invariant: ``find_dependence`` returns "". If invariance is
    not needed, it is not called, and the result is False.

    ``wanted``: see ``StagePlan.batch_invariant``. Raises ConfigError if invariance is required and
    a dependence is found.
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
    """Return the error of a stage or of experts that cannot be batch-invariant as required."""
    return ConfigError(
        f"{label} cannot be batch-invariant: {problem}; start without --batch-invariant"
    )


def triton_refusal(label: str, error: Exception) -> ConfigError:
    """Return the error for Triton kernels that do not run or are not correct."""
    return refusal(label, f"Triton's kernels cannot be used ({one_line(error)})")


def find_row_dependence(
    model: nn.Module, dtype: torch.dtype, device: torch.device, products: RowProducts | None = None
) -> str:
    """Try every shape of the model's matrices; return the product that has other bits with fewer
    tokens, or "".

    With ``products`` of the model, token counts at both sides of a change of kernels are tried,
    too.
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
    """Return for how many tokens the grouped product has other bits than the product of each group,
    or "".
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
    """Return how many of the first or last tokens have other results without the remaining tokens,
    or 0.
    """
    whole = compute(x_TK)
    for count in counts:
        is_equal = torch.equal(compute(x_TK[:count]), whole[:count]) and torch.equal(
            compute(x_TK[-count:]), whole[-count:]
        )
        if not is_equal:
            return count
    return 0


def _input_dtype(layer: Matrix, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a matrix's inputs: the model's, unless the matrix alone is in float32."""
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
