"""Checks of Triton's kernels for the experts of few rows: they choose, count and compute what
PyTorch's operations do.

Shape letters: T tokens, k experts of each, E experts, D model width, F feed-forward width.
"""

from functools import partial

import torch
from interpreted_checks import Check
from torch import Tensor

from tramontane.workers.kernels.fused_ops import EAGER
from tramontane.workers.kernels.triton_moe import choose_experts, down_gemv, gate_up_gemv

# tokens, k, experts
SIZES = ((1, 2, 8), (4, 2, 8), (2, 3, 5), (2, 8, 20), (6, 1, 3), (1, 1, 1), (3, 4, 40))
# D and F: ragged blocks of outputs and of inputs; the last is for few choices
WIDTHS, LONG = ((20, 12), (520, 4)), (12, 536)
Matrices = tuple[Tensor, Tensor | None, Tensor]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # relative, by norms


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _padding(num_tokens: int) -> Tensor:
    return torch.arange(num_tokens) % 3 == 1


def check_choice(num_tokens: int, top_k: int, num_experts: int, device: str) -> None:
    """Compare with a stable sort, which puts the lowest of equal logits first; twice, so that
    counts are added up.
    """
    logits_TE = (_random(num_tokens, num_experts) * 2).round() / 2  # many are equal
    total_ends_E, expected_E = (
        torch.full((num_experts,), 7, device=device),
        torch.full((num_experts,), 7),
    )
    for is_padding_T in (None, _padding(num_tokens)):
        for dtype in (torch.float32, torch.bfloat16):
            on_device = None if is_padding_T is None else is_padding_T.to(device)
            ids_Tk, weights_Tk = choose_experts(
                logits_TE.to(device, dtype), top_k, dtype, on_device, total_ends_E
            )
            ordered = torch.sort(logits_TE, dim=1, descending=True, stable=True)
            expected_Tk = ordered.indices[:, :top_k].clone()
            if is_padding_T is not None:
                expected_Tk[is_padding_T] = num_experts
            assert torch.equal(ids_Tk.cpu(), expected_Tk)
            assert weights_Tk.dtype == dtype
            torch.testing.assert_close(
                weights_Tk.cpu().float(),
                ordered.values[:, :top_k].softmax(-1),
                rtol=TOLERANCE[dtype],
                atol=1e-6,
            )
            expected_E += (expected_Tk.reshape(-1, 1) <= torch.arange(num_experts)).sum(0)
            assert torch.equal(total_ends_E.cpu(), expected_E)


def check_no_numbers(device: str) -> None:
    """Experts that exist are chosen, and none twice, where logits are infinite or no numbers;
    padding counts nothing.
    """
    logits_TE = torch.full((4, 6), -torch.inf)
    logits_TE[1], logits_TE[2], logits_TE[3, 4] = torch.nan, torch.nan, 1
    is_padding_T, total_ends_E = (
        torch.tensor([False, False, True, False]).to(device),
        torch.zeros(6, dtype=torch.int64),
    )
    total_ends_E = total_ends_E.to(device)
    ids_Tk, weights_Tk = choose_experts(
        logits_TE.to(device), 2, torch.float32, is_padding_T, total_ends_E
    )
    assert ids_Tk.tolist() == [[0, 1], [0, 1], [6, 6], [4, 0]]
    assert weights_Tk.isnan().any(-1).tolist() == [True, True, True, False]
    torch.testing.assert_close(weights_Tk[3].cpu(), torch.tensor([1.0, 0.0]))
    assert total_ends_E.tolist() == [3, 5, 5, 5, 6, 6]


def _matrices(
    shape: tuple[int, int, int], quantized: torch.dtype | None, dtype: torch.dtype, seed: int
) -> Matrices:
    """Return matrices as they are stored, their scales if they are quantized, and what both mean in
    float64.
    """
    plain_ENK = _random(*shape, seed=seed) / shape[2] ** 0.5
    if quantized is None:
        return plain_ENK.to(dtype), None, plain_ENK.to(dtype).double()
    scale_EN = torch.rand(shape[:2], generator=torch.Generator().manual_seed(seed)) / 40 + 0.001
    numbers_ENK = (plain_ENK / scale_EN[..., None]).clamp(-127, 127).to(quantized)
    return numbers_ENK, scale_EN, numbers_ENK.double() * scale_EN.double()[..., None]


def check_experts(
    num_tokens: int,
    top_k: int,
    num_experts: int,
    dtype: torch.dtype,
    quantized: torch.dtype | None,
    device: str,
) -> None:
    """Compare with float64, expert by expert; padding, whose rows and weights are no numbers, gets
    0.
    """
    for dim, hidden in (*WIDTHS, LONG) if num_tokens * top_k <= 2 else WIDTHS:
        w13_E2FD, scale_E2F, wide_E2FD = _matrices(
            (num_experts, 2 * hidden, dim), quantized, dtype, seed=0
        )
        w2_EDF, scale_ED, wide_EDF = _matrices((num_experts, dim, hidden), quantized, dtype, seed=1)
        x_TD, is_padding_T = _random(num_tokens, dim, seed=2).to(dtype), _padding(num_tokens)
        weights_Tk = torch.rand(num_tokens, top_k, generator=torch.Generator().manual_seed(3)).to(
            dtype
        )
        ids_Tk = _random(num_tokens, num_experts, seed=4).argsort(-1)[:, :top_k].contiguous()
        expected_TD = torch.zeros(num_tokens, dim, dtype=torch.float64)
        for token, choice in (
            (t, j) for t in range(num_tokens) if not is_padding_T[t] for j in range(top_k)
        ):
            expert, x_1D = ids_Tk[token, choice], x_TD[token : token + 1].double()
            row_1F = EAGER.silu_and_mul(x_1D @ wide_E2FD[expert].T)
            expected_TD[token] += (
                weights_Tk[token, choice].double() * (row_1F @ wide_EDF[expert].T)[0]
            )
        ids_Tk[is_padding_T], x_TD[is_padding_T], weights_Tk[is_padding_T] = (
            num_experts,
            torch.nan,
            torch.nan,
        )
        ids_Tk, weights_Tk = ids_Tk.to(device), weights_Tk.to(device)
        scales = [None if each is None else each.to(device) for each in (scale_E2F, scale_ED)]
        rows_CF = gate_up_gemv(x_TD.to(device), w13_E2FD.to(device), ids_Tk, scales[0])
        assert rows_CF.shape == (num_tokens * top_k, hidden)
        rows_CF[ids_Tk.flatten() == num_experts] = torch.nan
        out_TD = down_gemv(rows_CF, w2_EDF.to(device), ids_Tk, weights_Tk, scales[1]).cpu()
        assert out_TD.dtype == dtype
        difference = float((out_TD.double() - expected_TD).norm() / expected_TD.norm())
        assert difference < TOLERANCE[dtype], (dim, hidden, difference)
        assert not out_TD[is_padding_T].any()


CHECKS: dict[str, Check] = {
    **{
        f"choice of {k} of {experts} for {tokens}": partial(check_choice, tokens, k, experts)
        for tokens, k, experts in (*SIZES, (16, 1, 3), (17, 4, 200))
    },
    "choice where there are no numbers": check_no_numbers,
    **{
        f"{k} of {experts} experts of {tokens} in {dtype}": partial(
            check_experts, tokens, k, experts, dtype, None
        )
        for dtype in TOLERANCE
        for tokens, k, experts in (SIZES if dtype == torch.float32 else SIZES[:1])
    },
    **{
        f"{k} of {experts} experts of {tokens} in {number}": partial(
            check_experts, tokens, k, experts, torch.float32, number
        )
        for number in (torch.int8, torch.float8_e4m3fn)
        for tokens, k, experts in SIZES[:4]
    },
}
