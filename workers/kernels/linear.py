"""Linear layers, also for processors that have no arithmetic for the dtype of the weights.

Shape letters: T tokens, K inputs, N outputs of a matrix, B rows of it at a time.
"""

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Elements that are converted to float at a time: as many as a core's cache holds, or as keep a GPU busy.
BLOCK_ELEMENTS = {"cpu": 2**20, "cuda": 2**24}
# With so few tokens the product is bound by reading the weights, however they are multiplied.
FEW_TOKENS = 3
# With so many tokens W x^T is faster than x W^T on several threads, which share the longer side.
TRANSPOSED_TOKENS = range(12, 128)


class Linear(nn.Linear):
    """Linear layer without bias: x W^T in the dtype of both.

    A CPU without instructions for 16-bit floats (AVX2 only) multiplies them six times slower than float32. There the
    weights are converted to float32, a block of rows at a time, unless tokens are few.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x_TK: Tensor) -> Tensor:
        """Compute x W^T."""
        if self.weight.is_mkldnn:
            return prepacked_linear(x_TK, self.weight)
        if len(x_TK) <= FEW_TOKENS or has_native_matmul(x_TK.device.type, x_TK.dtype):
            return F.linear(x_TK, self.weight)
        return blockwise_linear(x_TK, self.weight, torch.float32)


@cache
def has_native_matmul(device: str, dtype: torch.dtype) -> bool:
    """Return whether torch multiplies this dtype about as fast as the device can."""
    if device != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return True
    mkldnn = torch.ops.mkldnn
    supported = mkldnn._is_mkldnn_bf16_supported if dtype == torch.bfloat16 else mkldnn._is_mkldnn_fp16_supported
    return bool(supported())


def prepack_weight(weight_NK: Tensor) -> Tensor:
    """Reorder a weight for oneDNN once instead of in every product, where that helps; else return it unchanged.

    Measured to help on CPUs, for dtypes that they multiply natively. It takes no additional memory.
    """
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if weight_NK.device.type != "cpu" or not has_onednn or not has_native_matmul("cpu", weight_NK.dtype):
        return weight_NK
    packed_NK: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_NK)
    return packed_NK


def prepacked_linear(x_TK: Tensor, packed_NK: Tensor) -> Tensor:
    """Compute x W^T with a prepacked weight.

    Tokens are padded to few lengths, because oneDNN keeps code and buffers, half a MiB, for every length that it meets.
    """
    num_tokens = len(x_TK)
    missing = padded_len(num_tokens) - num_tokens
    padded_PK = F.pad(x_TK, (0, 0, 0, missing)) if missing else x_TK  # F.pad copies even if nothing is missing
    out_PN: Tensor = torch.ops.mkldnn._linear_pointwise(padded_PK, packed_NK, None, "none", [], "")
    return out_PN[:num_tokens]


def padded_len(num_tokens: int) -> int:
    """Round up to a multiple of 1 up to 8, of 8 up to 64, of 32 beyond: 7, 9 -> 16, 64, 65 -> 96. 29 lengths up to 512."""
    step = 1 if num_tokens <= 8 else 8 if num_tokens <= 64 else 32
    return -(-num_tokens // step) * step


def blockwise_linear(x_TK: Tensor, weight_NK: Tensor, dtype: torch.dtype, scale_N: Tensor | None = None) -> Tensor:
    """Compute x (W scale)^T in ``dtype``, into which a block of rows of W is converted at a time; return the dtype of x."""
    num_tokens, num_rows = len(x_TK), len(weight_NK)
    is_transposed = num_tokens in TRANSPOSED_TOKENS and x_TK.device.type == "cpu" and torch.get_num_threads() > 1
    out_NT = torch.empty(num_rows, num_tokens, dtype=dtype, device=x_TK.device) if is_transposed else None
    out_TN = torch.empty(num_tokens, num_rows, dtype=dtype, device=x_TK.device) if out_NT is None else out_NT.T
    # In float16 sums of unscaled numbers may overflow: there the weights are scaled instead of the output.
    weight_scale_N, out_scale_N = (scale_N, None) if dtype == torch.float16 else (None, scale_N)
    blocks = list(row_blocks(weight_NK.shape, weight_NK.device))
    buffer_BK = torch.empty(weight_NK[blocks[0]].shape, dtype=dtype, device=x_TK.device)
    converted_TK = x_TK.to(dtype)
    for rows in blocks:
        block_BK = convert_into(weight_NK[rows], buffer_BK[: len(weight_NK[rows])])
        if weight_scale_N is not None:
            block_BK.mul_(weight_scale_N[rows, None])
        if out_NT is None:
            torch.mm(converted_TK, block_BK.T, out=out_TN[:, rows])
        else:
            torch.mm(block_BK, converted_TK.T, out=out_NT[rows])
    if out_scale_N is not None:
        out_TN.mul_(out_scale_N)
    return out_TN.to(x_TK.dtype) if out_NT is None else x_TK.new_empty(num_tokens, num_rows).copy_(out_TN)


def convert_into(numbers_BK: Tensor, floats_BK: Tensor) -> Tensor:
    """Convert numbers into the buffer ``floats_BK`` and return it.

    On a CPU torch converts fp8 50 times slower than int8, so its bits are shifted instead: 4 exponent bits (bias 7) and
    3 mantissa bits become the lower exponent bits (bias 15) and the upper mantissa bits of a float16, which is then
    2**8 times too small: 1.5 is 0 0111 100 -> 0 00111 1000000000 = 1.5 * 2**-8. Wrong for NaN, which no weight is.
    """
    if numbers_BK.dtype != torch.float8_e4m3fn or numbers_BK.device.type != "cpu":
        return floats_BK.copy_(numbers_BK)
    bits_BK = numbers_BK.view(torch.int8).to(torch.int16)  # sign extension: the sign is in all upper bits
    bits_BK.bitwise_left_shift_(7).bitwise_and_(~(1 << 14))
    # By way of float32, because converting float16 to bfloat16 directly is slow.
    return floats_BK.copy_(bits_BK.view(torch.float16).float().mul_(2**8))


def row_blocks(shape: torch.Size, device: torch.device) -> Iterator[slice]:
    """Yield ranges of rows of ``BLOCK_ELEMENTS`` each. [5, 2**19] on a CPU: rows 0 and 1, 2 and 3, 4."""
    num_rows, width = shape
    step = max(BLOCK_ELEMENTS[device.type] // width, 1)
    for start in range(0, num_rows, step):
        yield slice(start, start + step)
