"""Weight-only int8: a matrix as whole numbers from -127 to 127, and a scale per row, which is an output channel.

Shape letters: T tokens, K inputs, N outputs of a matrix, B rows of it at a time.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from tramontane.proto.errors import CheckpointError
from tramontane.proto.model_args import SCALE_DTYPES, Quantization
from tramontane.workers.linear import has_products, packed, product_in_blocks, row_blocks
from tramontane.workers.tensor_names import TensorSpec

LARGEST = 127
# torch's CPU kernel reads rows 16 numbers at a time, with loads that need 32-byte borders. It checks neither.
KERNEL_STEP, KERNEL_BORDER = 16, 32
KERNEL_TOKENS = 16  # up to which it is as fast as blocks of float32, without AVX-512


def hold(
    state: dict[str, Tensor],
    spec: TensorSpec,
    pieces: Iterable[Tensor],
    dtype: str,
    device: str | torch.device,
    quantize: Quantization | None,
) -> None:
    """Put one tensor into its rows of its parameter: in the stage's dtype on its device, or as numbers and scales.

    ``pieces`` are its rows, in order; they need not be in memory together. A parameter's tensors come in the order of its
    rows: with the last of them the matrix is complete, and is packed while there is room for a copy.
    Raises CheckpointError for a tensor that no scale can span.
    """

    def place(parameter: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Made by whichever of the tensors in it comes first; no memory is used before it is written to."""
        if parameter not in state:
            state[parameter] = torch.empty(shape, dtype=dtype, device=device)
        return state[parameter][spec.rows]

    if not (quantize and spec.quantizable):
        whole = place(spec.parameter, spec.parameter_shape, getattr(torch, dtype))
        for rows, piece in _placed(pieces):
            whole[rows] = piece
        if spec.quantizable and spec.rows.stop == spec.parameter_shape[0]:
            state[spec.parameter] = packed(state[spec.parameter])
        return
    scale_dtype, device = getattr(torch, SCALE_DTYPES[dtype]), torch.device(device)
    numbers_NK = place(spec.parameter, spec.parameter_shape, torch.int8)
    scale_N = place(spec.scale_parameter, spec.parameter_shape[:1], scale_dtype)
    for rows, piece in _placed(pieces):
        numbers_NK[rows], scale_N[rows] = quantized(piece, scale_dtype, device)
    if not scale_N.isfinite().all():
        raise CheckpointError(f"tensor {spec.name} holds numbers that are infinite or none; it cannot be quantised")


def _placed(pieces: Iterable[Tensor]) -> Iterator[tuple[slice, Tensor]]:
    """Which rows each piece is: lengths [3, 2] are rows 0 to 2 and 3 to 4."""
    start = 0
    for piece in pieces:
        yield slice(start, start + len(piece)), piece
        start += len(piece)


def quantized(weight_NK: Tensor, scale_dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Numbers q and scales s with |w - q * s| <= s / 2, made a block of rows at a time: no second copy of the matrix.

    s = largest / 127, rounded to its dtype before q is made, so that q makes up for the rounding: bfloat16 has 8
    bits, so that largest / s is at most 127 * (1 + 2**-8) = 127.496, which still rounds to 127.
    """
    numbers_NK = torch.empty(weight_NK.shape, dtype=torch.int8, device=device)
    scale_N = torch.empty(weight_NK.shape[0], dtype=scale_dtype, device=device)
    for rows in row_blocks(weight_NK.shape, device):
        block_BK = weight_NK[rows].to(device, torch.float32)
        smallest = torch.finfo(torch.float32).tiny  # a row of zeros has a scale too
        scale_N[rows] = (block_BK.abs().amax(dim=1) / LARGEST).clamp(min=smallest)
        numbers_NK[rows] = (block_BK / scale_N[rows].float()[:, None]).round_()
    return numbers_NK, scale_N


class Int8Linear(nn.Module):
    """x W^T for a quantised W, in the dtype of x."""

    weight: Tensor
    scale: Tensor

    def __init__(self, in_features: int, out_features: int, scale_dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(out_features, in_features, dtype=torch.int8))
        self.register_buffer("scale", torch.ones(out_features, dtype=scale_dtype))

    def forward(self, x_TK: Tensor) -> Tensor:
        """By torch's kernel where it is fast (and safe); elsewhere by making a block of rows at a time float again."""
        is_fast = len(x_TK) <= KERNEL_TOKENS or has_products(x_TK.device.type, x_TK.dtype)
        if is_fast and x_TK.device.type == "cpu" and x_TK.dtype == torch.bfloat16 and x_TK.shape[1] % KERNEL_STEP == 0:
            out_TN: Tensor = torch.ops.aten._weight_int8pack_mm(_on_border(x_TK), self.weight, self.scale)
            return out_TN
        return self._blockwise(x_TK)

    def _blockwise(self, x_TK: Tensor) -> Tensor:
        dtype = x_TK.dtype if has_products(x_TK.device.type, x_TK.dtype) else torch.float32
        return product_in_blocks(x_TK, self.weight, dtype, self.scale)


def quantize_linears(model: nn.Module, specs: Iterable[TensorSpec], dtype: str) -> None:
    """Put an ``Int8Linear`` in the place of every quantisable matrix; their numbers are loaded after."""
    for spec in specs:
        if spec.quantizable:
            out_features, in_features = spec.parameter_shape
            linear = Int8Linear(in_features, out_features, getattr(torch, SCALE_DTYPES[dtype]))
            model.set_submodule(spec.parameter.removesuffix(".weight"), linear)


def _on_border(x_TK: Tensor) -> Tensor:
    fits = x_TK.is_contiguous() and x_TK.data_ptr() % KERNEL_BORDER == 0
    return x_TK if fits else x_TK.clone(memory_format=torch.contiguous_format)
