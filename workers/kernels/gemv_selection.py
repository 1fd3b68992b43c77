"""Choice of a kernel for the products of one and of two tokens on a GPU: the library's, or Triton's with some block size.

Each shape of a model's matrices is timed by itself, with as many of its matrices as no cache holds together.
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from tramontane.workers.device.kernel_selection import Clock, Compute, cuda_seconds, select_fastest
from tramontane.workers.kernels.linear import Linear

TOKENS = (1, 2)  # with three a library's tile of eight rows is faster
OUT_OF_CACHE = 2**28  # bytes of matrices that are multiplied in turn
MIN_GAIN = 1.03  # by which a block size must be faster than the library to replace it

Product = Callable[[Tensor, Tensor], Tensor]  # of x [T, K] and W [N, K]


@torch.inference_mode()
def select_gemv(layers: Iterable[Linear], clock: Clock = cuda_seconds) -> None:
    """Set ``Linear.few_token_products`` of matrices on a GPU, in 16 bits. Logs one line for each shape and number of tokens."""
    by_shape: dict[torch.Size, list[Linear]] = {}
    for layer in layers:
        if layer.weight.element_size() == 2:
            by_shape.setdefault(layer.weight.shape, []).append(layer)
    for alike in by_shape.values():
        chosen = {num_tokens: _select([layer.weight for layer in alike], num_tokens, clock) for num_tokens in TOKENS}
        for layer in alike:
            layer.few_token_products = {number: product for number, product in chosen.items() if isinstance(product, partial)}


def _select(weights: list[Tensor], num_tokens: int, clock: Clock) -> Product:
    try:
        from tramontane.workers.kernels.triton_gemv import BLOCKS, gemv  # Triton is not on every platform
    except ImportError:
        return F.linear
    weights = weights[: OUT_OF_CACHE // weights[0].nbytes + 2]
    x_TK = torch.randn(num_tokens, weights[0].shape[1], device=weights[0].device).to(weights[0].dtype)
    kernels: dict[str, Product] = {"the library": F.linear, **{str(block): partial(gemv, block=block) for block in BLOCKS}}

    def prepare(product: Product) -> Compute:
        return lambda: product(x_TK, weights[0])

    def prepare_timed(product: Product) -> Compute:
        return lambda: [product(x_TK, weight) for weight in weights][-1]

    shape = " x ".join(map(str, weights[0].shape))
    job = f"{len(weights)} products of {num_tokens} token(s) and {shape}"
    return select_fastest(job, kernels, prepare, prepare_timed, F.linear(x_TK, weights[0]), clock, MIN_GAIN) or F.linear
