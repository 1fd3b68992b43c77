"""Linear layers, also for processors without arithmetic for the dtype of the weights.

Shape letters: T tokens, K inputs, N outputs of a matrix, B rows of it at a time.
"""

from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Elements that are converted to float at a time: as many as a core's cache holds, or as keep a GPU
# busy.
BLOCK_ELEMENTS = {"cpu": 2**20, "cuda": 2**24}
# Up to this number of tokens, reading the weights is the bottleneck of any multiplication.
FEW_TOKENS = 3


class Linear(nn.Linear):
    """Linear layer without bias: x W^T in the dtype of x. A W in another dtype is converted, a
    block of rows at a time.

    On a CPU it is used only without a C compiler, see ``packed_linear.py``. A CPU without
    instructions for 16-bit floats (AVX2 only) multiplies them six times slower than float32. There
    the weights are converted to float32, a block of rows at a time, unless tokens are few. If set,
    ``product`` replaces all this: see ``RowProducts.linear``. So do ``small_batch_products``: the
    largest number of tokens, in rising order, with the name of a product, and the product; see
    ``select_products``.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.product: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None
        self.small_batch_products: tuple[
            tuple[int, str, Callable[[Tensor, Tensor], Tensor]], ...
        ] = ()

    def forward(self, x_TK: Tensor) -> Tensor:
        """Compute x W^T."""
        if self.product is not None:
            return self.product(x_TK, self.weight, None)
        for max_tokens, _, product in self.small_batch_products:
            if len(x_TK) <= max_tokens and x_TK.dtype == self.weight.dtype:
                return product(x_TK, self.weight)
        if x_TK.dtype != self.weight.dtype:
            return blockwise_linear(x_TK, self.weight, x_TK.dtype)
        if len(x_TK) <= FEW_TOKENS or has_native_matmul(x_TK.device.type, x_TK.dtype):
            return F.linear(x_TK, self.weight)
        return blockwise_linear(x_TK, self.weight, torch.float32)


@cache
def has_native_matmul(device: str, dtype: torch.dtype) -> bool:
    """Return whether torch multiplies this dtype about as fast as the device can."""
    if device != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return True
    mkldnn = torch.ops.mkldnn
    supported = (
        mkldnn._is_mkldnn_bf16_supported
        if dtype == torch.bfloat16
        else mkldnn._is_mkldnn_fp16_supported
    )
    return bool(supported())


@torch.no_grad()  # products are written into their place, which no gradient could follow
def blockwise_linear(
    x_TK: Tensor, weight_NK: Tensor, dtype: torch.dtype, scale_N: Tensor | None = None
) -> Tensor:
    """Compute x (W scale)^T in ``dtype``, to which W is converted a block of rows at a time; return
    the dtype of x.
    """
    out_TN = torch.empty(len(x_TK), len(weight_NK), dtype=dtype, device=x_TK.device)
    # In float16 sums of unscaled numbers may overflow: there the weights are scaled instead of the
    # output.
    weight_scale_N, out_scale_N = (scale_N, None) if dtype == torch.float16 else (None, scale_N)
    blocks = list(row_blocks(weight_NK.shape, weight_NK.device))
    buffer_BK = torch.empty(weight_NK[blocks[0]].shape, dtype=dtype, device=x_TK.device)
    converted_TK = x_TK.to(dtype)
    for rows in blocks:
        block_BK = convert_into(weight_NK[rows], buffer_BK[: len(weight_NK[rows])])
        if weight_scale_N is not None:
            block_BK.mul_(weight_scale_N[rows, None])
        torch.mm(converted_TK, block_BK.T, out=out_TN[:, rows])
    if out_scale_N is not None:
        out_TN.mul_(out_scale_N)
    return out_TN.to(x_TK.dtype)


def convert_into(numbers_BK: Tensor, floats_BK: Tensor) -> Tensor:
    """Convert numbers into the buffer ``floats_BK`` and return it.

    On a CPU torch converts fp8 50 times slower than int8, so its bits are shifted instead: 4
    exponent bits (bias 7) and 3 mantissa bits become the lower exponent bits (bias 15) and the
    upper mantissa bits of a float16, which is then 2**8 times too small: 1.5 is 0 0111 100 -> 0
    00111 1000000000 = 1.5 * 2**-8. Wrong for NaN, which no weight is.
    """
    if numbers_BK.dtype != torch.float8_e4m3fn or numbers_BK.device.type != "cpu":
        return floats_BK.copy_(numbers_BK)
    # sign extension: the sign is in all upper bits
    bits_BK = numbers_BK.view(torch.int8).to(torch.int16)
    bits_BK.bitwise_left_shift_(7).bitwise_and_(~(1 << 14))
    # Through float32, because converting float16 to bfloat16 directly is slow.
    return floats_BK.copy_(bits_BK.view(torch.float16).float().mul_(2**8))


def row_blocks(shape: torch.Size, device: torch.device) -> Iterator[slice]:
    """Yield ranges of rows of ``BLOCK_ELEMENTS`` each. [5, 2**19] on a CPU: rows 0 and 1, 2 and 3,
    4.
    """
    num_rows, width = shape
    step = max(BLOCK_ELEMENTS[device.type] // width, 1)
    for start in range(0, num_rows, step):
        yield slice(start, start + step)
