"""Selection of kernels for the products of up to 64 tokens on a GPU: the library's, or Triton's, by
speed.

With so few tokens, reading a matrix is the bottleneck. A library's tiles are too few to read a
small matrix fast, and where it splits sums among programs, a second kernel adds them up. Each shape
of a model's matrices is timed by itself, with more of its matrices than fit into a cache, unless
the table has its kernels.
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from tramontane.workers.device.kernel_selection import Compute, KernelSelector
from tramontane.workers.device.kernel_table import LARGE, MATRIX
from tramontane.workers.kernels.linear import Linear

# largest number of tokens of each class, with which it is timed; above the last the library's
# product is used
CLASSES = (1, 2, 16, 64)
MAX_GEMV_TOKENS = 2  # with three a tile of sixteen rows is faster
OUT_OF_CACHE = 2**28  # bytes of matrices that are multiplied in turn
MIN_GAIN = 1.03  # by which another kernel must be faster than the library's to replace it

Product = Callable[[Tensor, Tensor], Tensor]  # of x [T, K] and W [N, K]


@torch.inference_mode()
def select_products(layers: Iterable[Linear], selector: KernelSelector) -> None:
    """Set ``Linear.small_batch_products`` of matrices on a GPU, in 16 bits. Logs one line for each
    shape and class.
    """
    by_shape: dict[torch.Size, list[Linear]] = {}
    for layer in layers:
        if layer.weight.element_size() == 2:
            by_shape.setdefault(layer.weight.shape, []).append(layer)
    for alike in by_shape.values():
        weights = [layer.weight for layer in alike[: OUT_OF_CACHE // alike[0].weight.nbytes + 2]]
        chosen = tuple(
            (num_tokens, *_select(weights, num_tokens, selector)) for num_tokens in CLASSES
        )
        for layer in alike:
            layer.small_batch_products = chosen


def _select(
    weights: list[Tensor], num_tokens: int, selector: KernelSelector
) -> tuple[str, Product]:
    """Return the name of the fastest kernel, and the kernel."""
    kernels = {"the library": F.linear, **_candidates(num_tokens)}
    x_TK = torch.randn(num_tokens, weights[0].shape[1], device=weights[0].device).to(
        weights[0].dtype
    )

    def prepare(name: str) -> Compute:
        return lambda: kernels[name](x_TK, weights[0])

    def prepare_timed(name: str) -> Compute:
        return lambda: [kernels[name](x_TK, weight) for weight in weights][-1]

    shape = " x ".join(map(str, weights[0].shape))
    job = f"{len(weights)} products of {num_tokens} token(s) and {shape}"
    names, expected_TN = {name: name for name in kernels}, F.linear(x_TK, weights[0])
    shapes = f"{shape} in {x_TK.dtype}"
    is_large = x_TK.dtype == torch.bfloat16 and weights[0].numel() >= LARGE
    row = (f"product of {num_tokens}", MATRIX) if is_large else None
    given = job, shapes, names, prepare, lambda: prepare_timed, expected_TN, MIN_GAIN
    name = selector.fastest(*given, row) or "the library"
    return name, kernels[name]


def _candidates(num_tokens: int) -> dict[str, Product]:
    """Return Triton's kernels for this number of tokens, by name; empty if Triton is not
    installed.
    """
    try:
        from tramontane.workers.kernels.triton_linear import (
            BLOCKS,
            SMALL_BATCH_TILES,
            gemv,
            tiled_linear,
        )
    except ImportError:
        return {}
    if num_tokens <= MAX_GEMV_TOKENS:
        return {f"gemv {'x'.join(map(str, block))}": partial(gemv, block=block) for block in BLOCKS}
    tiles = SMALL_BATCH_TILES[num_tokens]
    return {f"tiles {'x'.join(map(str, tile))}": partial(tiled_linear, tile=tile) for tile in tiles}
