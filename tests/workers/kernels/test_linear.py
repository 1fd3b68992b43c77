"""Products by way of float32 blocks are those of the definition, whatever the processor can do
itself.
"""

import pytest
import torch
from torch import Tensor

from tramontane.workers.kernels import linear
from tramontane.workers.kernels.linear import (
    FEW_TOKENS,
    Linear,
    blockwise_linear,
    has_native_matmul,
)

# of numbers near one, rounded once at the end
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def _random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _linear(out_features: int, in_features: int, dtype: torch.dtype) -> Linear:
    layer = Linear(in_features, out_features)
    layer.weight = torch.nn.Parameter(
        _random(out_features, in_features, dtype=dtype) * in_features**-0.5
    )
    return layer


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("with_scale", [False, True])
@pytest.mark.parametrize(
    "shape", [(1, 1), (3, 8), (64, 16), (65, 16), (200, 16), (5, 2000)], ids=str
)
def test_blocks_together_are_the_product(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], with_scale: bool, dtype: torch.dtype
) -> None:
    """Of 1024 elements: 64 rows of 16, with a last one that is full, or not, or a row that is
    longer than a block.
    """
    monkeypatch.setattr(linear, "BLOCK_ELEMENTS", {"cpu": 1024})
    weight_NK = _random(*shape, dtype=dtype) * shape[1] ** -0.5
    scale_N = torch.linspace(1, 2, shape[0]) if with_scale else None
    exact_NK = (
        weight_NK.double() * scale_N.double()[:, None]
        if scale_N is not None
        else weight_NK.double()
    )
    for tokens in (0, 1, 9, 70):
        x_TK = _random(tokens, shape[1], dtype=dtype, seed=1)
        out_TN = blockwise_linear(x_TK, weight_NK, torch.float32, scale_N)
        assert out_TN.dtype == dtype
        assert out_TN.is_contiguous()
        torch.testing.assert_close(
            out_TN.double(),
            x_TK.double() @ exact_NK.T,
            rtol=TOLERANCES[dtype],
            atol=TOLERANCES[dtype],
        )


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("can", [False, True])
def test_both_ways_multiply(monkeypatch: pytest.MonkeyPatch, can: bool, dtype: torch.dtype) -> None:
    went_in_blocks: list[int] = []

    def watched(x_TK: Tensor, weight_NK: Tensor, dtype: torch.dtype) -> Tensor:
        went_in_blocks.append(len(x_TK))
        return blockwise_linear(x_TK, weight_NK, dtype)

    monkeypatch.setattr(linear, "has_native_matmul", lambda _device, _dtype: can)
    monkeypatch.setattr(linear, "blockwise_linear", watched)
    layer = _linear(48, 32, dtype)
    lengths = (1, FEW_TOKENS, FEW_TOKENS + 1, 70)
    with torch.inference_mode():
        for tokens in lengths:
            x_TK = _random(tokens, 32, dtype=dtype, seed=1)
            out_TN = layer(x_TK)
            assert out_TN.dtype == dtype
            expected = x_TK.double() @ layer.weight.double().T
            torch.testing.assert_close(
                out_TN.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype]
            )
    assert went_in_blocks == ([] if can else [FEW_TOKENS + 1, 70])


@pytest.mark.parametrize("can", [False, True])
def test_weights_are_multiplied_as_they_are_made(
    monkeypatch: pytest.MonkeyPatch, can: bool
) -> None:
    """Outside of inference mode, where a new layer's weights require gradients: the same on every
    processor.
    """
    monkeypatch.setattr(linear, "has_native_matmul", lambda _device, _dtype: can)
    layer, x_TK = _linear(48, 32, torch.bfloat16), _random(70, 32, dtype=torch.bfloat16, seed=1)
    assert layer.weight.requires_grad
    with torch.no_grad():
        expected_TN = layer(x_TK)
    assert torch.equal(layer(x_TK), expected_TN)
    assert torch.equal(
        layer(x_TK.float()), blockwise_linear(x_TK.float(), layer.weight.detach(), torch.float32)
    )


def test_float32_and_gpus_need_no_help() -> None:
    assert has_native_matmul("cpu", torch.float32)
    assert all(has_native_matmul("cuda", dtype) for dtype in TOLERANCES)
