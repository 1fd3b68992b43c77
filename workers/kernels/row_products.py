"""Products in which each row is computed apart from the others, in the place of a library's, for
stages on GPUs.

Shape letters: C rows, E experts, N outputs and K inputs of a matrix.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tramontane.proto.model_args import Quantization, WeightFormat
from tramontane.workers.device.self_test import assert_close_norm, one_line
from tramontane.workers.kernels.linear import Linear
from tramontane.workers.kernels.quantized_linear import QuantizedLinear

if TYPE_CHECKING:  # Triton is not everywhere
    from tramontane.workers.kernels.triton_linear import Tile

logger = logging.getLogger(__name__)

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
    on both sides of which another kernel computes, in rising order, for rows of a dtype and
    matrices [E, N, K].
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
    """Products by tiles, which are by the dtypes of rows and matrix. All give the same bits: they
    differ in speed alone.
    """

    # which change no bits: not part of the name
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
    """Use these products in every linear layer, or what the layers have themselves."""
    for module in model.modules():
        if isinstance(module, Linear | QuantizedLinear):
            module.product = None if products is None else products.linear


def equal_tiles(
    device: torch.device, dtype: torch.dtype, weight_dtype: torch.dtype
) -> "tuple[Tile, ...]":
    """Return the tiles that run on this device and give the same bits as the first of them; logs
    which do not.

    Raises ArithmeticError if one is wrong, and what the last one raises if none runs.
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
