"""All experts of a layer as one grouped product: how their weights lie in memory, and where torch has a kernel for it.

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

# Elsewhere torch reads the sizes of the groups on the host and multiplies one after the other.
KERNEL_CAPABILITIES = (9, 10)  # the first number of it: Hopper and Blackwell
KERNEL_STEP = 8  # bfloat16 numbers in the 16 bytes that rows must begin at
MAX_SMALL_BATCH_ROWS = 8  # up to which each row reads its expert's weights by itself; not measured yet
CLOSE = 2e-2  # of bfloat16 products added in another order, by relative norm


class StackedExperts(NamedTuple):
    """The weights of all experts of one layer. ``for_few``: the kernels of ``few_rows`` do up to ``FEW_ROWS`` rows."""

    w13_E2FD: Tensor
    w2_EDF: Tensor
    has_small_batch_kernel: bool = False

    def run(self, rows_CD: Tensor, ends_E: Tensor, gated: Callable[[Tensor], Tensor] = EAGER.silu_and_mul) -> Tensor:
        """Each expert on its group of rows, [C, D]; those with none are not read. ``ends_E`` (int32) stays on the device.
        ``gated``: as of ``FusedOps``.

        Rows after the last group are nobody's: what comes out there is whatever was in memory.
        """
        if self.has_small_batch_kernel and len(rows_CD) <= MAX_SMALL_BATCH_ROWS:
            return self.run_small_batch(rows_CD, ends_E)
        both_C2F = F.grouped_mm(rows_CD, self.w13_E2FD.transpose(1, 2), offs=ends_E)
        return F.grouped_mm(gated(both_C2F), self.w2_EDF.transpose(1, 2), offs=ends_E)

    def run_small_batch(self, rows_CD: Tensor, ends_E: Tensor) -> Tensor:
        """The same, by kernels that read an expert's weights for each of its rows."""
        from tramontane.workers.kernels.triton_moe import down_gemv, gate_up_gemv  # Triton comes with torch for CUDA only

        return down_gemv(gate_up_gemv(rows_CD, self.w13_E2FD, ends_E), self.w2_EDF, ends_E)


def enable_small_batch_kernel(stacks: Mapping[int, StackedExperts]) -> dict[int, StackedExperts]:
    """The same, for few rows too where that works, which is tried with the first: it compiles, and waits for the device."""
    first = next(iter(stacks.values()), None)
    if first is None or not _is_on_gpu(first):
        return dict(stacks)
    if why := try_or_reason(lambda: _try(first)):
        logger.warning("experts on %s: no kernel for few rows (%s)", first.w13_E2FD.device, why)
        return dict(stacks)
    return {layer: stack._replace(has_small_batch_kernel=True) for layer, stack in stacks.items()}


def _is_on_gpu(stack: StackedExperts) -> bool:
    return stack.w13_E2FD.device.type == "cuda"


@torch.inference_mode()
def _try(stack: StackedExperts) -> None:
    """Groups of 0, 1, 1, ... rows: of 8 rows and 8 experts the last row is nobody's, of one row expert 1 has it."""
    num_experts, _, width = stack.w13_E2FD.shape
    like = stack.w13_E2FD
    for num_rows in (1, MAX_SMALL_BATCH_ROWS):
        rows_CD = torch.randn(num_rows, width, dtype=like.dtype, device=like.device)
        ends_E = torch.arange(num_experts, dtype=torch.int32, device=like.device).clamp(max=num_rows)
        own = slice(min(num_rows, num_experts - 1))
        assert_close_norm(stack.run_small_batch(rows_CD, ends_E)[own], stack.run(rows_CD, ends_E)[own], CLOSE)


def as_stacked_view(weights: Sequence[Tensor]) -> Tensor | None:
    """These matrices as one tensor [E, N, K] in the memory where they are, if they lie one after the other there.

    Three of [2, 4] in one block, from its numbers 8, 16 and 24 on: strides 8, 4, 1 from 8 on.
    """
    if not weights or any(each.is_mkldnn for each in weights):  # packed ones have no such memory
        return None
    first, size = weights[0], weights[0].numel()
    for number, each in enumerate(weights):
        is_alike = each.shape == first.shape and each.dtype == first.dtype and each.is_contiguous()
        is_beside = each.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (is_alike and is_beside and each.storage_offset() == first.storage_offset() + number * size):
            return None
    return first.detach().as_strided((len(weights), *first.shape), (size, *first.stride()), first.storage_offset())
