"""All experts of a layer as one grouped product: their weights as stacks in memory, and the kernel for small batches.

Shape letters: E experts, C choices (rows sorted by expert), D model width, F feed-forward width, N rows and K columns of
one expert's matrix.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tramontane.workers.device.self_test import assert_close_norm, try_or_reason
from tramontane.workers.kernels.fused_ops import EAGER

logger = logging.getLogger(__name__)

# On other GPUs torch reads the sizes of the groups on the host and multiplies one group after the other.
KERNEL_CAPABILITIES = (9, 10)  # major compute capability: Hopper and Blackwell
KERNEL_STEP = 8  # bfloat16 numbers in 16 bytes, the alignment of rows
MAX_SMALL_BATCH_ROWS = 8  # up to this many, each row reads its expert's weights separately; not measured yet
MAX_RELATIVE_ERROR = 2e-2  # by norm, of bfloat16 products added in another order


class StackedExperts(NamedTuple):
    """The weights of all experts of one layer.

    ``has_small_batch_kernel``: the kernels of ``triton_moe`` compute up to ``MAX_SMALL_BATCH_ROWS`` rows. ``product`` computes
    any number of rows instead where it is set: see ``RowProducts.grouped``.
    """

    w13_E2FD: Tensor
    w2_EDF: Tensor
    has_small_batch_kernel: bool = False
    product: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None

    def run(self, rows_CD: Tensor, ends_E: Tensor, silu_and_mul: Callable[[Tensor], Tensor] = EAGER.silu_and_mul) -> Tensor:
        """Run each expert on its group of rows, [C, D]. Experts without rows are not read.

        ``ends_E`` (int32) says where each group ends, and stays on the device. ``silu_and_mul`` is as in ``FusedOps``. Results
        for rows after the last group are undefined.
        """
        if self.product is not None:
            return self.product(silu_and_mul(self.product(rows_CD, self.w13_E2FD, ends_E)), self.w2_EDF, ends_E)
        if self.has_small_batch_kernel and len(rows_CD) <= MAX_SMALL_BATCH_ROWS:
            return self.run_small_batch(rows_CD, ends_E)
        gate_up_C2F = F.grouped_mm(rows_CD, self.w13_E2FD.transpose(1, 2), offs=ends_E)
        return F.grouped_mm(silu_and_mul(gate_up_C2F), self.w2_EDF.transpose(1, 2), offs=ends_E)

    def run_small_batch(self, rows_CD: Tensor, ends_E: Tensor) -> Tensor:
        """Compute the same as ``run`` with kernels that read an expert's weights for each of its rows."""
        from tramontane.workers.kernels.triton_moe import down_gemv, gate_up_gemv  # Triton comes with torch for CUDA only

        return down_gemv(gate_up_gemv(rows_CD, self.w13_E2FD, ends_E), self.w2_EDF, ends_E)


def enable_small_batch_kernel(stacks: Mapping[int, StackedExperts]) -> dict[int, StackedExperts]:
    """Return the stacks with the small-batch kernel enabled if it passes a self test on the first stack.

    The test compiles the kernel and synchronizes with the device.
    """
    first = next(iter(stacks.values()), None)
    if first is None or not _is_on_gpu(first):
        return dict(stacks)
    if reason := try_or_reason(lambda: _test_small_batch_kernel(first)):
        logger.warning("The small-batch kernel for experts on %s is disabled: %s", first.w13_E2FD.device, reason)
        return dict(stacks)
    return {layer: stack._replace(has_small_batch_kernel=True) for layer, stack in stacks.items()}


def _is_on_gpu(stack: StackedExperts) -> bool:
    return stack.w13_E2FD.device.type == "cuda"


@torch.inference_mode()
def _test_small_batch_kernel(stack: StackedExperts) -> None:
    """Compare the kernel with the grouped product, for groups of 0, 1, 1, ... rows.

    Of 8 rows and 8 experts the last row is in no group; a single row is expert 1's.
    """
    num_experts, _, width = stack.w13_E2FD.shape
    like = stack.w13_E2FD
    for num_rows in (1, MAX_SMALL_BATCH_ROWS):
        rows_CD = torch.randn(num_rows, width, dtype=like.dtype, device=like.device)
        ends_E = torch.arange(num_experts, dtype=torch.int32, device=like.device).clamp(max=num_rows)
        own = slice(min(num_rows, num_experts - 1))
        assert_close_norm(stack.run_small_batch(rows_CD, ends_E)[own], stack.run(rows_CD, ends_E)[own], MAX_RELATIVE_ERROR)


def as_stacked_view(weights: Sequence[Tensor]) -> Tensor | None:
    """Return these matrices as one tensor [E, N, K] without a copy, or None if they are not contiguous in memory.

    Three of [2, 4] in one block, from its numbers 8, 16 and 24 on: strides 8, 4, 1 from 8 on.
    """
    if not weights:
        return None
    first, size = weights[0], weights[0].numel()
    for index, each in enumerate(weights):
        is_same_kind = each.shape == first.shape and each.dtype == first.dtype and each.is_contiguous()
        is_same_block = each.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (is_same_kind and is_same_block and each.storage_offset() == first.storage_offset() + index * size):
            return None
    return first.detach().as_strided((len(weights), *first.shape), (size, *first.stride()), first.storage_offset())
