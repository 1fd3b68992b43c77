"""Keys and values in 8 bits: each vector of a head is float8_e4m3fn numbers times a scale of its
own, in float32.

A scale is a 448th of the vector's largest magnitude (times float32's 1/448, as GPUs divide by a
constant), so it needs no calibration and does not depend on other tokens. A vector with an element
that is not finite is NaN throughout. Kernels that quantize give the same bits as ``quantize``.

Shape letters: ... any shape of vectors, N rows of a cache, G key/value heads, d head_dim.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

FP8 = torch.float8_e4m3fn
PER_LARGEST = 1 / torch.finfo(FP8).max  # of FP8, 448
# of zeros, and of vectors that would need a smaller scale
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class RowScales:
    """Scales of the rows of keys and values, [N, G] each, and the dtype in which they are read."""

    k_NG: Tensor
    v_NG: Tensor
    dtype: torch.dtype


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return numbers [..., d] and scales [...]. (896, 2, -1): the scale is 2, and the numbers are
    448, 1 and -0.5.
    """
    largest = x.float().abs().amax(dim=-1)
    scales = torch.where(
        largest.isfinite(), (largest * PER_LARGEST).clamp(min=SMALLEST_SCALE), torch.nan
    )
    return (x.float() / scales[..., None]).to(FP8), scales


def dequantize(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return vectors [..., d], rounded to this dtype once."""
    return (numbers.float() * scales[..., None]).to(dtype)


def gather_numbers(numbers_NGd: Tensor, rows: Tensor) -> Tensor:
    """Return rows, of any shape. PyTorch gathers bytes, not FP8."""
    return (
        F.embedding(rows, numbers_NGd.view(torch.uint8).flatten(1))
        .view(FP8)
        .view(*rows.shape, *numbers_NGd.shape[1:])
    )


def put_numbers(numbers_NGd: Tensor, rows_W: Tensor, numbers_WGd: Tensor) -> None:
    """Overwrite rows [W]."""
    numbers_NGd.view(torch.uint8).index_copy_(0, rows_W, numbers_WGd.view(torch.uint8))
