"""Products with a matrix for each head: of quantized matrices, whose scales are those of inputs or
of outputs.
"""

import pytest
import torch
from torch import Tensor

from tramontane.workers.kernels import head_products
from tramontane.workers.kernels.head_products import HeadProducts

HEADS, TOKENS, OUTPUTS, INPUTS = 3, 5, 32, 16


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "PyTorch"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("scaled", ["inputs", "outputs"])
def test_quantized_matrices(
    scaled: str, dtype: torch.dtype, is_packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, and on a CPU without a C compiler, matrices are in the dtype of the activations."""
    if not is_packed:
        monkeypatch.setattr(head_products, "packed_matmul", lambda *_: None)
    weight_HNK = (_random(HEADS, OUTPUTS, INPUTS, seed=0) * 20).round().to(dtype)
    scale_HN, scale_HK = (
        _random(HEADS, OUTPUTS, seed=1).abs() + 0.1,
        _random(HEADS, INPUTS, seed=2).abs() + 0.1,
    )
    if scaled == "inputs":
        products = HeadProducts(weight_HNK, torch.float32, input_scale_HK=scale_HK)
        floats_HNK = weight_HNK.float() * scale_HK[:, None, :]
    else:
        products = HeadProducts(weight_HNK, torch.float32, output_scale_HN=scale_HN)
        floats_HNK = weight_HNK.float() * scale_HN[:, :, None]
    x_THK = _random(TOKENS, HEADS, INPUTS, seed=3)
    torch.testing.assert_close(
        products(x_THK), torch.einsum("thk,hnk->thn", x_THK, floats_HNK), rtol=1e-5, atol=1e-4
    )
