"""Checks of Triton's product of a few tokens and a matrix."""

from functools import partial

import torch
from interpreted_checks import Check

from tramontane.workers.kernels.triton_linear import MAX_TOKENS, GemvBlock, gemv

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3}  # relative, by norms


def check_product(
    num_outputs: int, num_inputs: int, block: GemvBlock, dtype: torch.dtype, device: str
) -> None:
    """Compare with float64, for every number of tokens."""
    generator = torch.Generator().manual_seed(0)
    weight_NK = torch.randn(num_outputs, num_inputs, generator=generator).to(dtype)
    for num_tokens in range(1, MAX_TOKENS + 1):
        x_TK = torch.randn(num_tokens, num_inputs, generator=generator).to(dtype)
        out_TN = gemv(x_TK.to(device), weight_NK.to(device), block)
        expected_TN = x_TK.double() @ weight_NK.double().T
        assert out_TN.dtype == dtype
        difference = float((out_TN.cpu().double() - expected_TN).norm() / expected_TN.norm())
        assert difference < TOLERANCE[dtype], difference


CHECKS: dict[str, Check] = {
    f"{num_outputs} x {num_inputs} in {dtype} by {block.outputs} x {block.inputs}": partial(
        check_product, num_outputs, num_inputs, block, dtype
    )
    for num_outputs, num_inputs in ((40, 512), (33, 600))
    for block in (GemvBlock(8, 256, 4), GemvBlock(4, 512, 2))
    for dtype in (torch.float32, torch.bfloat16)
}
