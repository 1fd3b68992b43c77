"""Products of hidden states and weights, also where the processor has no arithmetic for the weights' dtype.

Shape letters: T tokens, K inputs, N outputs of a matrix, B rows of it at a time.
"""

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Elements that are made float at a time: what a core's cache holds, or what keeps a GPU busy.
BLOCK = {"cpu": 2**20, "cuda": 2**24}
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

    def pack(self) -> None:
        """Put the weight into the order in which oneDNN reads it, once instead of at every product (float32: 1.3-2 times).

        To be called when the weight is loaded; where nothing is gained it stays as it is. The memory is the same.
        """
        if self.weight.device.type == "cpu" and torch._C._has_mkldnn and has_products("cpu", self.weight.dtype):
            packed_NK = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach())
            self.weight = nn.Parameter(packed_NK, requires_grad=False)

    def forward(self, x_TK: Tensor) -> Tensor:
        if self.weight.is_mkldnn:
            out_TN: Tensor = torch.ops.mkldnn._linear_pointwise(x_TK, self.weight, None, "none", [], "")
            return out_TN
        if len(x_TK) <= FEW_TOKENS or has_products(x_TK.device.type, x_TK.dtype):
            return F.linear(x_TK, self.weight)
        return product_in_blocks(x_TK, self.weight, torch.float32)


@cache
def has_products(device: str, dtype: torch.dtype) -> bool:
    """Whether torch multiplies this dtype about as fast as the device can."""
    if device != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return True
    known = torch.ops.mkldnn
    supported = known._is_mkldnn_bf16_supported if dtype == torch.bfloat16 else known._is_mkldnn_fp16_supported
    return bool(supported())


def pack_linears(model: nn.Module) -> None:
    """``Linear.pack`` for every one in the model, one matrix after the other."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.pack()


def product_in_blocks(x_TK: Tensor, weight_NK: Tensor, dtype: torch.dtype, scale_N: Tensor | None = None) -> Tensor:
    """x (W scale)^T computed in ``dtype``, which so many rows of W as fit a cache are given at a time."""
    num_tokens, num_rows = len(x_TK), len(weight_NK)
    weights_first = num_tokens in WEIGHTS_FIRST and x_TK.device.type == "cpu" and torch.get_num_threads() > 1
    out_NT = torch.empty(num_rows, num_tokens, dtype=dtype, device=x_TK.device) if weights_first else None
    out_TN = torch.empty(num_tokens, num_rows, dtype=dtype, device=x_TK.device) if out_NT is None else out_NT.T
    blocks = list(row_blocks(weight_NK.shape, weight_NK.device))
    floats_BK = torch.empty(weight_NK[blocks[0]].shape, dtype=dtype, device=x_TK.device)
    like_TK = x_TK.to(dtype)
    for rows in blocks:
        block_BK = floats_BK[: len(weight_NK[rows])].copy_(weight_NK[rows])
        if scale_N is not None:
            block_BK.mul_(scale_N[rows, None])
        if out_NT is None:
            torch.mm(like_TK, block_BK.T, out=out_TN[:, rows])
        else:
            torch.mm(block_BK, like_TK.T, out=out_NT[rows])
    return out_TN.to(x_TK.dtype) if out_NT is None else x_TK.new_empty(num_tokens, num_rows).copy_(out_TN)


def row_blocks(shape: torch.Size, device: torch.device) -> Iterator[slice]:
    """Ranges of rows. [5, 2**19] on a CPU: rows 0 and 1, 2 and 3, 4."""
    num_rows, width = shape
    step = max(BLOCK[device.type] // width, 1)
    for start in range(0, num_rows, step):
        yield slice(start, start + step)
