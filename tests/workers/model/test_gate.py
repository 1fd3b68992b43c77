"""The gate of a mixture of experts: its weights are computed in float32 and rounded once."""

import pytest
import torch

from tramontane.proto.model_args import MoeArgs
from tramontane.workers.model.layers import Gate

# The softmax of these in float16 differs from that in float32, rounded, in the last place of one
# number.
ROUNDED_APART = [
    [4.41015625, -0.406494140625, 2.06640625, 3.357421875],
    [2.53515625, -0.00860595703125, 3.07421875, -6.05859375],
]


def _gate(num_experts: int, top_k: int, dtype: torch.dtype) -> Gate:
    """Return a gate whose scores are its input."""
    gate = Gate(num_experts, MoeArgs(num_experts, top_k)).to(dtype)
    with torch.no_grad():
        gate.scores.weight.copy_(torch.eye(num_experts))
    return gate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_weights_are_the_softmax_in_float32_of_the_chosen_scores(
    dtype: torch.dtype, top_k: int
) -> None:
    random = torch.randn(500, 4, generator=torch.Generator().manual_seed(0)) * 3
    scores = torch.cat([torch.tensor(ROUNDED_APART), random]).to(dtype)
    with torch.inference_mode():
        expert_ids, weights = _gate(4, top_k, dtype)(scores)
    assert weights.dtype == dtype
    best = scores.float().sort(dim=-1, descending=True, stable=True)
    assert torch.equal(scores.float().gather(1, expert_ids), best.values[:, :top_k])
    assert torch.equal(weights, torch.softmax(best.values[:, :top_k], dim=-1).to(dtype))
