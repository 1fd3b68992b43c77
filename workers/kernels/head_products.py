"""Products in which every head has its own matrix, as in latent attention.

Shape letters: T tokens, H heads, N outputs and K inputs of a head's matrix.
"""

import torch
from torch import Tensor, nn

from tramontane.workers.kernels.linear import Linear, convert_into
from tramontane.workers.kernels.packed_linear import PackedLinear, PackedMatmul, packed_matmul
from tramontane.workers.kernels.row_invariance import RowProducts


class HeadProducts(nn.Module):
    """The product of each head's row x_h with its matrix: W_h (s_h x_h), [T, H, K] to [T, H, N].

    Quantized matrices have one-byte numbers, and float32 scales of their inputs or outputs.
    """

    input_scale_HK: Tensor | None

    def __init__(
        self,
        weight_HNK: Tensor,
        dtype: torch.dtype,
        *,
        input_scale_HK: Tensor | None = None,
        output_scale_HN: Tensor | None = None,
        products: RowProducts | None = None,
    ) -> None:
        super().__init__()
        matmul = packed_matmul(dtype, weight_HNK.dtype) if weight_HNK.device.type == "cpu" else None
        self.layers, self.weight_HNK, self._products = nn.ModuleList(), None, products
        if matmul is None:
            self.weight_HNK = _dequantize(weight_HNK, input_scale_HK, output_scale_HN, dtype)
            self.register_buffer("input_scale_HK", None)
        else:
            scales = [None] * len(weight_HNK) if output_scale_HN is None else list(output_scale_HN)
            self.layers.extend(
                _packed(matmul, weight, scale)
                for weight, scale in zip(weight_HNK, scales, strict=True)
            )
            self.register_buffer(
                "input_scale_HK", None if input_scale_HK is None else input_scale_HK.clone()
            )

    def forward(self, x_THK: Tensor) -> Tensor:
        """Compute [T, H, N]. A row's result does not depend on the other rows where packed or
        row-wise products compute it.
        """
        if self.input_scale_HK is not None:
            x_THK = x_THK * self.input_scale_HK.to(x_THK.dtype)
        num_tokens, num_heads, _ = x_THK.shape
        x_HTK = x_THK.transpose(0, 1)
        if self.weight_HNK is None:
            layers = [layer for layer in self.layers if isinstance(layer, PackedLinear)]
            rows_CK = x_HTK.reshape(num_heads * num_tokens, -1)
            out_CN = layers[0].matmul.multiply_groups(rows_CK, layers, [num_tokens] * num_heads)
            return out_CN.view(num_heads, num_tokens, -1).transpose(0, 1)
        if self._products is None:
            return torch.bmm(x_HTK, self.weight_HNK.transpose(1, 2)).transpose(0, 1)
        ends_H = torch.arange(1, num_heads + 1, dtype=torch.int32, device=x_THK.device) * num_tokens
        out_CN = self._products.grouped(
            x_HTK.reshape(num_heads * num_tokens, -1), self.weight_HNK, ends_H, None
        )
        return out_CN.view(num_heads, num_tokens, -1).transpose(0, 1)


def _packed(matmul: PackedMatmul, weight_NK: Tensor, scale_N: Tensor | None) -> PackedLinear:
    num_outputs, num_inputs = weight_NK.shape
    with torch.device("meta"):
        layer = PackedLinear(matmul, Linear(num_inputs, num_outputs))
    layer.weight, layer.scale = matmul.pack(weight_NK), None if scale_N is None else scale_N.clone()
    return layer


def _dequantize(
    weight_HNK: Tensor,
    input_scale_HK: Tensor | None,
    output_scale_HN: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    if weight_HNK.dtype == dtype:
        return weight_HNK
    floats_HNK = convert_into(
        weight_HNK, torch.empty(weight_HNK.shape, dtype=torch.float32, device=weight_HNK.device)
    )
    if input_scale_HK is not None:
        floats_HNK = floats_HNK * input_scale_HK[:, None, :]
    if output_scale_HN is not None:
        floats_HNK = floats_HNK * output_scale_HN[:, :, None]
    return floats_HNK.to(dtype)
