"""Selection of expert kernels when a stage loads: the kernels that run on its GPU and are correct,
and the fastest of them.

Shape letters: E experts, T tokens, k experts of each, C choices (rows sorted by expert), N outputs
and K inputs of one matrix.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tramontane.workers.device.kernel_selection import MAX_DIFFERENCE, Compute, KernelSelector
from tramontane.workers.device.kernel_table import LARGE
from tramontane.workers.device.self_test import assert_close_norm, try_or_reason
from tramontane.workers.kernels.fused_ops import EAGER
from tramontane.workers.kernels.quantized_linear import FP8_CAPABILITY, MAX_FP8, dequantized_linear

# All experts of a layer as one grouped product: their weights as stacks in memory, and the kernels
# for small batches.
#
# Shape letters: E experts, T tokens, k experts of each, C choices (rows sorted by expert), D model
# width, F feed-forward width, N rows and K columns of one expert's matrix.

# Of rows [C, K], matrices [E, N, K], ends of groups [E] and, if the matrices are quantized, scales
# [E, N].
GroupedProduct = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]

# On other GPUs torch reads the sizes of the groups on the host and multiplies one group after the
# other.
KERNEL_CAPABILITIES = (9, 10)  # major compute capability: Hopper and Blackwell
KERNEL_STEP = 8  # bfloat16 numbers in 16 bytes, the alignment of rows
# Up to this number of choices, each choice reads its expert's weights separately. For Mixtral 8x7B
# on an H200, 8 choices took 0.77 of the time of sorting them for torch's grouped product, and 16
# took 1.7 times the time of the fastest tiles, without the sort.
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
    from tramontane.workers.kernels.triton_linear import quantize_rows_fp8

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
    choices. The products of both matrices are torch's, kernels selected by the number of rows, or
    ``RowProducts.grouped``. Quantized matrices have scales, and never torch's products.
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
        """Whether the matrices are one-byte numbers, with a scale for each row."""
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

    def mix_small(self, x_TD: Tensor, expert_ids_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, [T, D], with kernels that read an
        expert's weights for each choice.

        Choices of nonexistent experts, which padding has, add 0.
        """
        # Triton comes with torch for CUDA only
        from tramontane.workers.kernels.triton_moe import down_gemv, gate_up_gemv

        rows_CF = gate_up_gemv(x_TD, self.w13_E2FD, expert_ids_Tk, self.w13_scale_E2F)
        return down_gemv(rows_CF, self.w2_EDF, expert_ids_Tk, weights_Tk, self.w2_scale_ED)


def as_stacked_view(weights: Sequence[Tensor]) -> Tensor | None:
    """Return matrices or their scales as one tensor [E, N, K] or [E, N] without a copy, or None if
    they are not contiguous.

    Three matrices of [2, 4] in one block, at its elements 8, 16 and 24: strides 8, 4, 1 from 8 on.
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


logger = logging.getLogger(__name__)

# up to each number of rows, the fastest product for the second number is used
ROW_CLASSES = {64: 64, 128: 128, 512: 256}
NUM_MANY_ROWS = 2048  # the product of more rows is timed with this number, where torch has none
# on 10.3 torch's scaled product ends the process (pytorch/pytorch issue 187095)
TORCH_FP8_CAPABILITY = (9, 0)
ADVANTAGE = 1.05  # another product must be this many times as fast as torch's


def select_gpu_kernels(
    stacks: Mapping[int, StackedExperts], dtype: torch.dtype, selector: KernelSelector
) -> dict[int, StackedExperts]:
    """Attach small-batch kernels to all layers' experts, and choose grouped products by timing them
    on the first layer.

    ``dtype``: of the rows. Compiles and times kernels, and synchronizes with the device. No effect
    on CPUs. Quantized experts that no product can compute are left out: they run one by one.
    """
    first = next(iter(stacks.values()), None)
    if first is None or not _is_on_gpu(first):
        return {layer: stack for layer, stack in stacks.items() if not stack.is_quantized}
    w13_product = select_product("w13", first.w13_E2FD, dtype, first.w13_scale_E2F, selector)
    w2_product = select_product("w2", first.w2_EDF, dtype, first.w2_scale_ED, selector)
    if w13_product is None or w2_product is None:
        return {}
    has_small_batch_kernel = small_batch_kernel_works(
        first._replace(w13_product=w13_product, w2_product=w2_product), dtype
    )
    return {
        layer: stack._replace(
            has_small_batch_kernel=has_small_batch_kernel,
            w13_product=w13_product,
            w2_product=w2_product,
        )
        for layer, stack in stacks.items()
    }


def _is_on_gpu(stack: StackedExperts) -> bool:
    return stack.w13_E2FD.device.type == "cuda"


def small_batch_kernel_works(stack: StackedExperts, dtype: torch.dtype) -> bool:
    """Return whether the kernels for small batches pass a self test; if not, log the reason in one
    line.
    """
    reason = try_or_reason(lambda: _test_small_batch_kernel(stack, dtype))
    if reason:
        logger.warning(
            "The small-batch kernels for experts on %s are disabled: %s",
            stack.w13_E2FD.device,
            reason,
        )
    return not reason


@torch.inference_mode()
def _test_small_batch_kernel(stack: StackedExperts, dtype: torch.dtype) -> None:
    """Compare the kernels with PyTorch's operations, for one token and for the maximum number, of
    which one is padding.

    They keep rows in 16 bits, and so do the products that they are compared with, whichever are
    used for more rows.
    """
    # Triton comes with torch for CUDA only
    from tramontane.workers.kernels.triton_moe import choose_experts

    reference = stack
    if stack.is_quantized:
        reference = stack._replace(
            w13_product=dequantized_grouped_linear, w2_product=dequantized_grouped_linear
        )
    num_experts, _, width = stack.w13_E2FD.shape
    device, top_k = stack.w13_E2FD.device, min(2, num_experts)
    for num_tokens in (1, MAX_SMALL_BATCH_ROWS // top_k):
        x_TD = torch.randn(num_tokens, width, dtype=dtype, device=device)
        logits_TE = torch.randn(num_tokens, num_experts, device=device)
        is_padding_T = torch.arange(num_tokens, device=device) == 1
        total_ends_E = torch.zeros(num_experts, dtype=torch.int64, device=device)
        expert_ids_Tk, weights_Tk = choose_experts(
            logits_TE, top_k, dtype, is_padding_T, total_ends_E
        )
        logits_Tk, expected_Tk = logits_TE.topk(top_k, dim=-1)
        expected_Tk = expected_Tk.masked_fill(is_padding_T[:, None], num_experts)
        ends_E = (expected_Tk.reshape(-1, 1) <= torch.arange(num_experts, device=device)).sum(0)
        if not (torch.equal(expert_ids_Tk, expected_Tk) and torch.equal(total_ends_E, ends_E)):
            raise ArithmeticError("other experts are chosen or counted")
        assert_close_norm(weights_Tk, torch.softmax(logits_Tk, dim=-1), MAX_DIFFERENCE)
        expected_TD = _mix_sorted(reference, x_TD, expected_Tk, weights_Tk, ends_E.int())
        assert_close_norm(
            stack.mix_small(x_TD, expert_ids_Tk, weights_Tk), expected_TD, MAX_DIFFERENCE
        )


def _mix_sorted(
    stack: StackedExperts, x_TD: Tensor, expert_ids_Tk: Tensor, weights_Tk: Tensor, ends_E: Tensor
) -> Tensor:
    """Return the weighted sum of each token's experts, [T, D], by grouped products."""
    order_C = expert_ids_Tk.flatten().argsort()
    done_CD = stack.run(x_TD[order_C // expert_ids_Tk.shape[1]], ends_E)
    by_choice_CD = torch.empty_like(done_CD)
    by_choice_CD[order_C] = done_CD
    by_choice_TkD = by_choice_CD.view(*expert_ids_Tk.shape, -1).float() * weights_Tk[..., None]
    return torch.where((expert_ids_Tk < len(ends_E))[..., None], by_choice_TkD, 0).sum(1)


def candidates(
    weight_dtype: torch.dtype = torch.bfloat16,
    dtype: torch.dtype = torch.bfloat16,
    capability: tuple[int, int] = (0, 0),
) -> dict[str, GroupedProduct]:
    """Return the grouped products by name. Torch's, if it exists, or the products that keep the
    rows in 16 bits come first.

    ``capability``: of the GPU. Products that quantize the rows need fp8 matrices, rows in 16 bits
    and a GPU that multiplies fp8. Raises ImportError without Triton.
    """
    # as above
    from tramontane.workers.kernels.triton_fp8_linear import FP8_TILES, fp8_grouped_linear
    from tramontane.workers.kernels.triton_linear import (
        FEW_ROWS_TILES,
        MANY_ROWS_TILE,
        tiled_grouped_linear,
    )

    is_quantized = weight_dtype.itemsize == 1
    tiles = (*FEW_ROWS_TILES, MANY_ROWS_TILE) if is_quantized else FEW_ROWS_TILES
    named: dict[str, GroupedProduct] = {
        "x".join(map(str, tile)): partial(tiled_grouped_linear, tile=tile) for tile in tiles
    }
    if not is_quantized:
        return {"torch": torch_grouped_linear, **named}
    if weight_dtype != torch.float8_e4m3fn or dtype == torch.float32 or capability < FP8_CAPABILITY:
        return named
    named |= {
        f"fp8 {'x'.join(map(str, tile))}": partial(fp8_grouped_linear, tile=tile)
        for tile in FP8_TILES
    }
    return named | (
        {"fp8 torch": torch_scaled_grouped_linear} if capability == TORCH_FP8_CAPABILITY else {}
    )


@torch.inference_mode()
def select_product(
    job: str,
    weight_ENK: Tensor,
    dtype: torch.dtype,
    scale_EN: Tensor | None,
    selector: KernelSelector,
) -> GroupedProduct | None:
    """Return torch's grouped product, or the fastest by the number of rows; log one line for each
    class of row counts.

    Quantized matrices have ``scale_EN``, and Triton's products only; None if these do not work.
    """
    try:
        capability = (
            torch.cuda.get_device_capability(weight_ENK.device) if weight_ENK.is_cuda else (0, 0)
        )
        products = candidates(weight_ENK.dtype, dtype, capability)
    except ImportError as error:
        computed = "torch's grouped product" if scale_EN is None else "PyTorch one by one"
        logger.warning(
            "Experts are computed by %s, because Triton cannot be imported (%s)", computed, error
        )
        return torch_grouped_linear if scale_EN is None else None
    found = {}
    for num_rows in (*ROW_CLASSES.values(), *((NUM_MANY_ROWS,) if scale_EN is not None else ())):
        name = _fastest_product(job, products, weight_ENK, dtype, scale_EN, num_rows, selector)
        if name is None and scale_EN is not None:
            return None
        found[num_rows] = name or "torch"
    small = tuple(
        (max_rows, found[num_rows], products[found[num_rows]])
        for max_rows, num_rows in ROW_CLASSES.items()
    )
    if scale_EN is None:
        return ProductBySize(small)
    return ProductBySize(small, products[found[NUM_MANY_ROWS]], found[NUM_MANY_ROWS])


def _fastest_product(
    job: str,
    products: Mapping[str, GroupedProduct],
    weight_ENK: Tensor,
    dtype: torch.dtype,
    scale_EN: Tensor | None,
    num_rows: int,
    selector: KernelSelector,
) -> str | None:
    """Return the name of the fastest product for this number of rows, or None if no product is
    correct.
    """
    rows_CK = _fp8_rows(num_rows, weight_ENK.shape[2]).to(weight_ENK.device, dtype)
    ends_E = uneven_ends(num_rows, len(weight_ENK)).to(weight_ENK.device)

    def prepare(name: str) -> Compute:
        return lambda: products[name](rows_CK, weight_ENK, ends_E, scale_EN)

    reference = torch_grouped_linear if scale_EN is None else dequantized_grouped_linear
    expected_CN = reference(rows_CK, weight_ENK, ends_E, scale_EN)
    what, names = f"{job} of experts for {num_rows} rows", {name: name for name in products}
    shapes = f"{' x '.join(map(str, weight_ENK.shape))} in {weight_ENK.dtype}, rows in {dtype}"
    is_large = weight_ENK.dtype == dtype == torch.bfloat16 and weight_ENK[0].numel() >= LARGE
    row = (f"experts of {num_rows} rows", f"{len(weight_ENK)} large") if is_large else None
    given = what, shapes, names, prepare, lambda: prepare, expected_CN, ADVANTAGE
    return selector.fastest(*given, row)


def _fp8_rows(num_rows: int, width: int) -> Tensor:
    """Return random rows [C, K] that quantization to fp8 does not change, scaled by powers of two
    up to 8.

    So all products agree on them, whether they quantize rows or not, unless they lose the scales.
    The largest number of a row is the maximum of fp8, so the scale of row 3 is 1, and the scale of
    row 6 is 8: 448 * 8 is still a float16.
    """
    numbers_CK = torch.randn(num_rows, width).mul_(100).clamp_(-MAX_FP8, MAX_FP8)
    numbers_CK[:, 0] = MAX_FP8
    return (
        numbers_CK.to(torch.float8_e4m3fn).float()
        * torch.exp2(torch.arange(num_rows) % 7 - 3)[:, None]
    )


def dequantized_grouped_linear(
    rows_CK: Tensor, weight_ENK: Tensor, ends_E: Tensor, scale_EN: Tensor | None
) -> Tensor:
    """Compute x (W scale)^T by each row's expert, [C, N], one expert after the other. Waits for the
    device.
    """
    assert scale_EN is not None
    groups = rows_CK.tensor_split(ends_E[:-1].cpu().long())
    return torch.cat(
        [dequantized_linear(*each) for each in zip(groups, weight_ENK, scale_EN, strict=True)]
    )


def uneven_ends(num_rows: int, num_experts: int) -> Tensor:
    """Return where the groups of experts end if each row is given to one at random, always the
    same, [E] (int32).
    """
    experts_C = torch.randint(
        num_experts, (num_rows,), generator=torch.Generator().manual_seed(num_rows)
    )
    return torch.bincount(experts_C, minlength=num_experts).cumsum(0).int()
