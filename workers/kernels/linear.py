"""Products of hidden states and weights, also where the processor has no arithmetic for the weights' dtype.

Shape letters: T tokens, K inputs, N outputs of a matrix, B rows of it at a time.
"""

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Elements that are made float at a time: what a core's cache holds, or what keeps a GPU busy.
BLOCK_ELEMENTS = {"cpu": 2**20, "cuda": 2**24}
# So few tokens wait for the weights to come from memory, whatever is done with them.
FEW_TOKENS = 3
# So many tokens are multiplied faster as W x^T than as x W^T by several threads: among them the longer side is shared out.
WEIGHTS_FIRST = range(12, 128)


class Linear(nn.Linear):
    """x W^T in the dtype of both.

    A CPU without instructions for 16-bit floats (AVX2) multiplies them six times slower than float32: there the weights
    go through float32, a block of rows at a time, unless tokens are few.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x_TK: Tensor) -> Tensor:
        if self.weight.is_mkldnn:
            return prepacked_linear(x_TK, self.weight)
        if len(x_TK) <= FEW_TOKENS or has_native_matmul(x_TK.device.type, x_TK.dtype):
            return F.linear(x_TK, self.weight)
        return blockwise_linear(x_TK, self.weight, torch.float32)


@cache
def has_native_matmul(device: str, dtype: torch.dtype) -> bool:
    """Whether torch multiplies this dtype about as fast as the device can."""
    if device != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return True
    known = torch.ops.mkldnn
    supported = known._is_mkldnn_bf16_supported if dtype == torch.bfloat16 else known._is_mkldnn_fp16_supported
    return bool(supported())


def prepack_weight(weight_NK: Tensor) -> Tensor:
    """The weight in the order in which oneDNN reads it, put there once instead of at every product; or as it is.

    Only float32 on CPUs: there it was measured. The memory is the same.
    """
    if weight_NK.device.type != "cpu" or weight_NK.dtype != torch.float32 or not _has_onednn():
        return weight_NK
    packed_NK: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_NK)
    return packed_NK


def _has_onednn() -> bool:
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def prepacked_linear(x_TK: Tensor, packed_NK: Tensor) -> Tensor:
    """x W^T. oneDNN keeps code and buffers for every number of tokens that it meets, half a MiB each: it meets few."""
    num_tokens = len(x_TK)
    missing = padded_len(num_tokens) - num_tokens
    padded_PK = F.pad(x_TK, (0, 0, 0, missing)) if missing else x_TK  # F.pad copies also where nothing is missing
    out_PN: Tensor = torch.ops.mkldnn._linear_pointwise(padded_PK, packed_NK, None, "none", [], "")
    return out_PN[:num_tokens]


def padded_len(num_tokens: int) -> int:
    """Up to 8 as it is, up to 64 in steps of 8, beyond of 32: 7, 9 -> 16, 64, 65 -> 96. 29 lengths up to 512."""
    step = 1 if num_tokens <= 8 else 8 if num_tokens <= 64 else 32
    return -(-num_tokens // step) * step


def blockwise_linear(x_TK: Tensor, weight_NK: Tensor, dtype: torch.dtype, scale_N: Tensor | None = None) -> Tensor:
    """x (W scale)^T computed in ``dtype``, which so many rows of W as fit a cache are given at a time."""
    num_tokens, num_rows = len(x_TK), len(weight_NK)
    weights_first = num_tokens in WEIGHTS_FIRST and x_TK.device.type == "cpu" and torch.get_num_threads() > 1
    out_NT = torch.empty(num_rows, num_tokens, dtype=dtype, device=x_TK.device) if weights_first else None
    out_TN = torch.empty(num_tokens, num_rows, dtype=dtype, device=x_TK.device) if out_NT is None else out_NT.T
    scales_weights = scale_N is not None and dtype == torch.float16  # in which sums of unscaled numbers may be too large
    blocks = list(row_blocks(weight_NK.shape, weight_NK.device))
    floats_BK = torch.empty(weight_NK[blocks[0]].shape, dtype=dtype, device=x_TK.device)
    like_TK = x_TK.to(dtype)
    for rows in blocks:
        block_BK = convert_into(weight_NK[rows], floats_BK[: len(weight_NK[rows])])
        if scales_weights and scale_N is not None:
            block_BK.mul_(scale_N[rows, None])
        if out_NT is None:
            torch.mm(like_TK, block_BK.T, out=out_TN[:, rows])
        else:
            torch.mm(block_BK, like_TK.T, out=out_NT[rows])
    if scale_N is not None and not scales_weights:
        out_TN.mul_(scale_N)
    return out_TN.to(x_TK.dtype) if out_NT is None else x_TK.new_empty(num_tokens, num_rows).copy_(out_TN)


def convert_into(numbers_BK: Tensor, floats_BK: Tensor) -> Tensor:
    """``floats_BK`` with these numbers. torch takes 50 times as long for fp8 as for int8 on a CPU: there its bits are moved.

    4 exponent bits (less 7) and 3 mantissa bits become the lower ones of float16's 5 (less 15) and the upper of its 10, and the
    float 2**8 times too small: 1.5 is 0 0111 100 -> 0 00111 1000000000 = 1.5 * 2**-8. Not for NaN, which no weight is.
    """
    if numbers_BK.dtype != torch.float8_e4m3fn or numbers_BK.device.type != "cpu":
        return floats_BK.copy_(numbers_BK)
    bits_BK = numbers_BK.view(torch.int8).to(torch.int16)  # the sign in all upper bits
    bits_BK.bitwise_left_shift_(7).bitwise_and_(~(1 << 14))
    return floats_BK.copy_(
        bits_BK.view(torch.float16).float().mul_(2**8)
    )  # from float32 to bfloat16 is fast, from float16 is not


def row_blocks(shape: torch.Size, device: torch.device) -> Iterator[slice]:
    """Ranges of rows. [5, 2**19] on a CPU: rows 0 and 1, 2 and 3, 4."""
    num_rows, width = shape
    step = max(BLOCK_ELEMENTS[device.type] // width, 1)
    for start in range(0, num_rows, step):
        yield slice(start, start + step)
