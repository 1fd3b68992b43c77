"""Triton kernels for the experts of a few rows: three per layer, without sorting the choices by
expert.

A grouped GEMM makes tiles of rows, and would use one or two rows of each, and too few tiles to keep
a large GPU's memory busy; the kernels that sort rows and add results take half as long again. Here
each program computes some outputs of one row or token and sums in float32. Programs of the same
outputs are adjacent, so that rows of the same expert find its weights in the cache.

Shape letters: T tokens, k experts of each, C = T * k choices, E experts, D model width, F
feed-forward width; in a kernel t, e, j (of a token's choices), n (of outputs) and i (of inputs) of
a block.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# per program: of Mixtral 8x7B 1792 gate_up programs per choice, 1024 down programs per token
OUTPUTS, DOWN_OUTPUTS = 8, 4
INPUTS = 512  # per iteration of a gate_up program, which reads two matrices
TOKENS = 16  # up to this number of tokens, one compiled kernel chooses the experts
DOWN_INPUTS = 1024  # per iteration of a down program, of all experts of a token: 512 of each of 2


def choose_experts(
    logits_TE: Tensor,
    top_k: int,
    dtype: torch.dtype,
    is_padding_T: Tensor | None,
    total_ends_E: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the ids [T, k] of the highest logits, in falling order, and their softmax [T, k] in
    this dtype.

    Of equal logits the lowest id comes first. The ids of padding are E. Adds to ``total_ends_E``
    (int64) where the groups of the experts would end: to e the number of ids up to e, see
    ``ExpertTokenCounter``. Made for a few tokens: one program.
    """
    num_tokens, num_experts = logits_TE.shape
    expert_ids_Tk = torch.empty(num_tokens, top_k, dtype=torch.int64, device=logits_TE.device)
    weights_Tk = torch.empty(num_tokens, top_k, dtype=dtype, device=logits_TE.device)
    has_padding = is_padding_T is not None
    pointers = (
        logits_TE.contiguous(),
        is_padding_T if has_padding else logits_TE,
        expert_ids_Tk,
        weights_Tk,
        total_ends_E,
    )
    blocks = (
        triton.next_power_of_2(each) for each in (max(num_tokens, TOKENS), num_experts, top_k)
    )
    # Triton launches on the current device
    with torch.cuda.device_of(logits_TE):  # type: ignore[no-untyped-call]
        _choose_kernel[(1,)](*pointers, num_tokens, num_experts, top_k, has_padding, *blocks)
    return expert_ids_Tk, weights_Tk


def gate_up_gemv(
    x_TD: Tensor, w13_E2FD: Tensor, expert_ids_Tk: Tensor, scale_E2F: Tensor | None = None
) -> Tensor:
    """Compute silu(w1 x) * w3 x of each choice by its expert, [C, F]. Choices without an expert (E
    or more) are undefined.

    ``scale_E2F``: of quantized matrices, for each row.
    """
    (num_choices, top_k), (num_experts, twice, width) = (
        (expert_ids_Tk.numel(), expert_ids_Tk.shape[1]),
        w13_E2FD.shape,
    )
    out_CF = torch.empty(num_choices, twice // 2, dtype=x_TD.dtype, device=x_TD.device)
    grid = num_choices, triton.cdiv(twice // 2, OUTPUTS)
    pointers = (
        x_TD.contiguous(),
        w13_E2FD,
        w13_E2FD if scale_E2F is None else scale_E2F,
        expert_ids_Tk,
        out_CF,
    )
    sizes = twice // 2, width, num_experts, top_k, scale_E2F is not None
    with torch.cuda.device_of(out_CF):  # type: ignore[no-untyped-call]  # as above
        _gate_up_kernel[grid](*pointers, *sizes, OUTPUTS, INPUTS)
    return out_CF


def down_gemv(
    rows_CF: Tensor,
    w2_EDF: Tensor,
    expert_ids_Tk: Tensor,
    weights_Tk: Tensor,
    scale_ED: Tensor | None = None,
) -> Tensor:
    """Compute the sum of w2 x of each token's choices, by their experts and times their weights,
    [T, D].

    Sums and weights are in float32 up to the result. Choices without an expert (E or more) add 0,
    whatever their rows contain. ``scale_ED``: of quantized matrices, for each row.
    """
    (num_tokens, top_k), (num_experts, num_outputs, width) = expert_ids_Tk.shape, w2_EDF.shape
    out_TD = torch.empty(num_tokens, num_outputs, dtype=rows_CF.dtype, device=rows_CF.device)
    grid = num_tokens, triton.cdiv(num_outputs, DOWN_OUTPUTS)
    pointers = (
        rows_CF,
        w2_EDF,
        w2_EDF if scale_ED is None else scale_ED,
        expert_ids_Tk,
        weights_Tk.contiguous(),
        out_TD,
    )
    sizes = num_outputs, width, num_experts, top_k, scale_ED is not None
    with torch.cuda.device_of(out_TD):  # type: ignore[no-untyped-call]  # as above
        _down_kernel[grid](*pointers, *sizes, *down_blocks(top_k))
    return out_TD


def down_blocks(top_k: int) -> tuple[int, int, int]:
    """Return how many choices, outputs and inputs an iteration of a down program takes."""
    choices = triton.next_power_of_2(top_k)
    return choices, DOWN_OUTPUTS, DOWN_INPUTS // choices


@triton.jit(do_not_specialize=["num_tokens"])  # type: ignore[untyped-decorator]
def _choose_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations itself
    logits_TE,
    is_padding_T,
    expert_ids_Tk,
    weights_Tk,
    total_ends_E,
    num_tokens,
    num_experts: tl.constexpr,
    top_k: tl.constexpr,
    has_padding: tl.constexpr,
    t_block: tl.constexpr,
    e_block: tl.constexpr,
    j_block: tl.constexpr,
):
    """Take the highest remaining logit k times. NaN is as low as -inf; a token with only such
    logits has weights of NaN.
    """
    t, e, j = (
        tl.arange(0, t_block)[:, None],
        tl.arange(0, e_block)[None, :],
        tl.arange(0, j_block)[None, :],
    )
    is_token_t = t < num_tokens
    is_left_te = (e < num_experts) & is_token_t
    logits_te = tl.load(logits_TE + t * num_experts + e, mask=is_left_te, other=float("-inf")).to(
        tl.float32
    )
    logits_te = tl.where(logits_te == logits_te, logits_te, float("-inf"))
    is_own_t = is_token_t
    if has_padding:
        is_own_t = is_token_t & (tl.load(is_padding_T + t, mask=is_token_t, other=1) == 0)
    highest_t = tl.max(logits_te, axis=1)[:, None]
    ids_tj = tl.full((t_block, j_block), num_experts, dtype=tl.int32)
    weights_tj = tl.zeros((t_block, j_block), dtype=tl.float32)
    ends_e = tl.zeros((1, e_block), dtype=tl.int32)
    for choice in tl.static_range(top_k):
        logit_t = tl.max(tl.where(is_left_te, logits_te, float("-inf")), axis=1)[:, None]
        id_t = tl.min(tl.where(is_left_te & (logits_te == logit_t), e, num_experts), axis=1)[
            :, None
        ]
        is_left_te = is_left_te & (e != id_t)
        id_t = tl.where(is_own_t, id_t, num_experts)
        ends_e += tl.sum((id_t <= e).to(tl.int32), axis=0)[None, :]
        ids_tj = tl.where(j == choice, id_t, ids_tj)
        weights_tj = tl.where(j == choice, tl.exp(logit_t - highest_t), weights_tj)
    weights_tj = weights_tj / tl.sum(weights_tj, axis=1)[:, None]
    is_choice_tj = is_token_t & (j < top_k)
    tl.store(expert_ids_Tk + t * top_k + j, ids_tj.to(tl.int64), mask=is_choice_tj)
    tl.store(
        weights_Tk + t * top_k + j, weights_tj.to(weights_Tk.dtype.element_ty), mask=is_choice_tj
    )
    total_e = tl.load(total_ends_E + e, mask=e < num_experts, other=0)
    tl.store(total_ends_E + e, total_e + ends_e, mask=e < num_experts)


@triton.jit  # type: ignore[untyped-decorator]
def _gate_up_kernel(  # type: ignore[no-untyped-def]  # as above
    x_TD,
    w13_E2FD,
    scale_E2F,
    expert_ids_C,
    out_CF,
    num_outputs,
    width,
    num_experts: tl.constexpr,
    top_k: tl.constexpr,
    has_scale: tl.constexpr,
    n_block: tl.constexpr,
    i_block: tl.constexpr,
):
    """Compute some outputs of one choice. Of two experts for each token, choice 5 is token 2's."""
    choice = tl.program_id(0)
    expert = tl.load(expert_ids_C + choice)
    if expert < num_experts:
        n = tl.program_id(1) * n_block + tl.arange(0, n_block)[:, None]
        # 8 of 28672 by 4096 are nearly 2**30 elements; w3's rows follow w1's.
        matrix = w13_E2FD + expert.to(tl.int64) * (2 * num_outputs * width)
        gate_ni = tl.zeros((n_block, i_block), dtype=tl.float32)
        up_ni = tl.zeros((n_block, i_block), dtype=tl.float32)
        for start in range(0, width, i_block):
            i = start + tl.arange(0, i_block)[None, :]
            inside = (n < num_outputs) & (i < width)
            x_i = tl.load(x_TD + choice // top_k * width + i, mask=i < width, other=0.0).to(
                tl.float32
            )
            elements = matrix + n * width + i
            gate_ni += x_i * tl.load(elements, mask=inside, other=0.0).to(tl.float32)
            up_ni += x_i * tl.load(elements + num_outputs * width, mask=inside, other=0.0).to(
                tl.float32
            )
        gate_n, up_n = tl.sum(gate_ni, axis=1), tl.sum(up_ni, axis=1)
        n_flat = tl.program_id(1) * n_block + tl.arange(0, n_block)
        if has_scale:
            scales = scale_E2F + expert * (2 * num_outputs) + n_flat
            gate_n *= tl.load(scales, mask=n_flat < num_outputs, other=0.0)
            up_n *= tl.load(scales + num_outputs, mask=n_flat < num_outputs, other=0.0)
        out_n = gate_n * tl.sigmoid(gate_n) * up_n
        tl.store(
            out_CF + choice * num_outputs + n_flat,
            out_n.to(out_CF.dtype.element_ty),
            mask=n_flat < num_outputs,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _down_kernel(  # type: ignore[no-untyped-def]  # as above
    rows_CF,
    w2_EDF,
    scale_ED,
    expert_ids_Tk,
    weights_Tk,
    out_TD,
    num_outputs,
    width,
    num_experts: tl.constexpr,
    top_k: tl.constexpr,
    has_scale: tl.constexpr,
    j_block: tl.constexpr,
    n_block: tl.constexpr,
    i_block: tl.constexpr,
):
    """Compute some outputs of one token, with all its experts at once, so that more loads are in
    flight.
    """
    token = tl.program_id(0)
    j = tl.arange(0, j_block)
    choices = token * top_k + j
    expert_j = tl.load(expert_ids_Tk + choices, mask=j < top_k, other=num_experts)
    is_own_j = expert_j < num_experts
    weight_j = tl.load(weights_Tk + choices, mask=is_own_j, other=0.0).to(tl.float32)
    n = (tl.program_id(1) * n_block + tl.arange(0, n_block))[None, :, None]
    rows = rows_CF + (choices * width)[:, None, None]
    matrix_rows = w2_EDF + (expert_j.to(tl.int64) * num_outputs * width)[:, None, None] + n * width
    is_own_jn = is_own_j[:, None, None] & (n < num_outputs)
    sums_jni = tl.zeros((j_block, n_block, i_block), dtype=tl.float32)
    # padding reads no weights
    for start in range(0, tl.where(tl.max(is_own_j.to(tl.int32)) > 0, width, 0), i_block):
        i = (start + tl.arange(0, i_block))[None, None, :]
        x_ji = tl.load(rows + i, mask=is_own_j[:, None, None] & (i < width), other=0.0).to(
            tl.float32
        )
        sums_jni += x_ji * tl.load(matrix_rows + i, mask=is_own_jn & (i < width), other=0.0).to(
            tl.float32
        )
    sums_jn = tl.sum(sums_jni, axis=2)
    n_flat = tl.program_id(1) * n_block + tl.arange(0, n_block)
    if has_scale:
        scales = scale_ED + (expert_j * num_outputs)[:, None] + n_flat[None, :]
        sums_jn *= tl.load(
            scales, mask=is_own_j[:, None] & (n_flat < num_outputs)[None, :], other=0.0
        )
    out_n = tl.sum(sums_jn * weight_j[:, None], axis=0)
    tl.store(
        out_TD + token * num_outputs + n_flat,
        out_n.to(out_TD.dtype.element_ty),
        mask=n_flat < num_outputs,
    )
