"""All experts of a layer as one grouped product: their weights as stacks in memory, and the kernels
for small batches.

Shape letters: E experts, T tokens, k experts of each, C choices (rows sorted by expert), D model
width, F feed-forward width, N rows and K columns of one expert's matrix.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tramontane.workers.kernels.fused_ops import EAGER
from tramontane.workers.kernels.quantized_linear import MAX_FP8

# Of rows [C, K], matrices [E, N, K], ends of groups [E] and, if the matrices are quantized, scales
# [E, N].
GroupedProduct = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]

# On other GPUs torch reads the sizes of the groups on the host and multiplies one group after the
# other.
KERNEL_CAPABILITIES = (9, 10)  # major compute capability: Hopper and Blackwell
KERNEL_STEP = 8  # bfloat16 numbers in 16 bytes, the alignment of rows
# Up to so many choices each reads its expert's weights separately. Of Mixtral 8x7B on an H200 8
# took 0.77 of the time of sorting them for torch's grouped product, and 16 took 1.7 times that of
# the fastest tiles, without the sort.
MAX_SMALL_BATCH_ROWS = 8


def torch_grouped_linear(
    rows_CK: Tensor, weight_ENK: Tensor, ends_E: Tensor, scale_EN: Tensor | None = None
) -> Tensor:
    """Compute x W^T by each row's expert, [C, N], with torch's grouped product. Rows after the last
    group are undefined.
    """
    assert scale_EN is None, (
        "torch has no grouped product with quantized matrices and rows in 16 bits"
    )
    return F.grouped_mm(rows_CK, weight_ENK.transpose(1, 2), offs=ends_E)


def torch_scaled_grouped_linear(
    rows_CK: Tensor, weight_ENK: Tensor, ends_E: Tensor, scale_EN: Tensor | None = None
) -> Tensor:
    """Compute x (W scale)^T by each row's expert, [C, N], with torch's fp8 product; rows are
    quantized to fp8 here.

    Rows after the last group are undefined. For bfloat16 and Hopper; groups may begin at any row,
    as rows have whole 16 bytes.
    """
    # Triton comes with torch for CUDA only
    from tramontane.workers.kernels.triton_quant import quantize_rows_fp8

    assert scale_EN is not None
    numbers_CK, scale_C1 = quantize_rows_fp8(rows_CK, MAX_FP8)
    matrices_EKN, scale_C = weight_ENK.transpose(1, 2), scale_C1.squeeze(1)
    return torch._scaled_grouped_mm(
        numbers_CK, matrices_EKN, scale_C, scale_EN, offs=ends_E, out_dtype=rows_CK.dtype
    )


@dataclass(frozen=True, slots=True)
class ProductBySize:
    """A grouped product by the number of rows: the first that is for as many, or ``large``.

    ``small``: for up to how many rows, in rising order, the name of a product, and the product.
    ``large_name``: of ``large``, if it has been chosen.
    """

    small: tuple[tuple[int, str, GroupedProduct], ...]
    large: GroupedProduct = torch_grouped_linear
    large_name: str = ""

    def __call__(
        self, rows_CK: Tensor, weight_ENK: Tensor, ends_E: Tensor, scale_EN: Tensor | None = None
    ) -> Tensor:
        """Compute x W^T, or x (W scale)^T, by each row's expert, [C, N]."""
        for max_rows, _, product in self.small:
            if len(rows_CK) <= max_rows:
                return product(rows_CK, weight_ENK, ends_E, scale_EN)
        return self.large(rows_CK, weight_ENK, ends_E, scale_EN)

    @property
    def name(self) -> str:
        """The names, as ``16x128x128 to 128 rows, torch to 512 rows``."""
        names = [f"{name} to {max_rows} rows" for max_rows, name, _ in self.small]
        return ", ".join([*names, f"{self.large_name} for more"] if self.large_name else names)


class StackedExperts(NamedTuple):
    """The weights of all experts of one layer.

    ``has_small_batch_kernel``: the kernels of ``triton_moe`` compute up to ``MAX_SMALL_BATCH_ROWS``
    choices. The products of both matrices are torch's, others by the number of rows, or those of
    ``RowProducts.grouped``. Quantized matrices have scales, and products of others than torch.
    """

    w13_E2FD: Tensor
    w2_EDF: Tensor
    has_small_batch_kernel: bool = False
    w13_product: GroupedProduct = torch_grouped_linear
    w2_product: GroupedProduct = torch_grouped_linear
    w13_scale_E2F: Tensor | None = None
    w2_scale_ED: Tensor | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether the matrices are numbers of one byte, with a scale for each row."""
        return self.w13_scale_E2F is not None

    def run(
        self,
        rows_CD: Tensor,
        ends_E: Tensor,
        silu_and_mul: Callable[[Tensor], Tensor] = EAGER.silu_and_mul,
    ) -> Tensor:
        """Run each expert on its group of rows, [C, D]. Experts without rows are not read.

        ``ends_E`` (int32) says where each group ends, and stays on the device. ``silu_and_mul`` is
        as in ``FusedOps``. Results for rows after the last group are undefined.
        """
        gate_up_C2F = self.w13_product(rows_CD, self.w13_E2FD, ends_E, self.w13_scale_E2F)
        return self.w2_product(silu_and_mul(gate_up_C2F), self.w2_EDF, ends_E, self.w2_scale_ED)

    def mix_few(self, x_TD: Tensor, expert_ids_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, [T, D], with kernels that read an
        expert's weights for each choice.

        Choices of experts that do not exist, as padding has them, add nothing.
        """
        # Triton comes with torch for CUDA only
        from tramontane.workers.kernels.triton_moe import down_gemv, gate_up_gemv

        rows_CF = gate_up_gemv(x_TD, self.w13_E2FD, expert_ids_Tk, self.w13_scale_E2F)
        return down_gemv(rows_CF, self.w2_EDF, expert_ids_Tk, weights_Tk, self.w2_scale_ED)


def as_stacked_view(weights: Sequence[Tensor]) -> Tensor | None:
    """Return matrices or their scales as one tensor [E, N, K] or [E, N] without a copy, or None if
    they are not contiguous.

    Three of [2, 4] in one block, from its numbers 8, 16 and 24 on: strides 8, 4, 1 from 8 on.
    """
    if not weights:
        return None
    first, size = weights[0], weights[0].numel()
    for index, each in enumerate(weights):
        is_same_kind = (
            each.shape == first.shape and each.dtype == first.dtype and each.is_contiguous()
        )
        is_same_block = each.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (
            is_same_kind
            and is_same_block
            and each.storage_offset() == first.storage_offset() + index * size
        ):
            return None
    return first.detach().as_strided(
        (len(weights), *first.shape), (size, *first.stride()), first.storage_offset()
    )
