"""Matrices of a byte per element: numbers, and a scale per row, which is an output channel.

Shape letters: K inputs, N outputs of a matrix, B rows of it at a time.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from tramontane.proto.errors import CheckpointError
from tramontane.proto.model_args import Quantization
from tramontane.workers.kernels.linear import prepack_weight, row_blocks
from tramontane.workers.kernels.quantized_linear import QuantizedLinear
from tramontane.workers.weights.tensor_specs import TensorSpec

NUMBER_DTYPES = {Quantization.INT8: torch.int8, Quantization.FP8: torch.float8_e4m3fn}
MAX_MAGNITUDE = {Quantization.INT8: 127, Quantization.FP8: 448}


def load_tensor(
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
        for rows, piece in _row_ranges(pieces):
            whole[rows] = piece
        if spec.quantizable and spec.rows.stop == spec.parameter_shape[0]:
            state[spec.parameter] = prepack_weight(state[spec.parameter])
        return
    scale_dtype, device = getattr(torch, quantize.scale_dtype(dtype)), torch.device(device)
    numbers_NK = place(spec.parameter, spec.parameter_shape, NUMBER_DTYPES[quantize])
    scale_N = place(spec.scale_parameter, spec.parameter_shape[:1], scale_dtype)
    for rows, piece in _row_ranges(pieces):
        numbers_NK[rows], scale_N[rows] = quantize_weight(piece, quantize, scale_dtype, device)
    if not scale_N.isfinite().all():
        raise CheckpointError(f"tensor {spec.name} holds numbers that are infinite or none; it cannot be quantised")


def _row_ranges(pieces: Iterable[Tensor]) -> Iterator[tuple[slice, Tensor]]:
    """Which rows each piece is: lengths [3, 2] are rows 0 to 2 and 3 to 4."""
    start = 0
    for piece in pieces:
        yield slice(start, start + len(piece)), piece
        start += len(piece)


def quantize_weight(
    weight_NK: Tensor, quantize: Quantization, scale_dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Numbers q and scales s, made a block of rows at a time: no second copy of the matrix.

    int8: |w - q * s| <= s / 2. fp8: |w - q * s| <= the larger of |w| / 16 and s / 1024, as three bits follow a number's first
    one, and those below 2**-6 have the step 2**-9.

    s = largest / 127 or / 448, rounded to its dtype before q is made, so that q makes up for the rounding: bfloat16 has 8
    bits, so that largest / s is at most 127 * (1 + 2**-8) = 127.496, which still rounds to 127.
    """
    largest = MAX_MAGNITUDE[quantize]
    numbers_NK = torch.empty(weight_NK.shape, dtype=NUMBER_DTYPES[quantize], device=device)
    scale_N = torch.empty(weight_NK.shape[0], dtype=scale_dtype, device=device)
    for rows in row_blocks(weight_NK.shape, device):
        block_BK = weight_NK[rows].to(device, torch.float32)
        smallest = torch.finfo(torch.float32).tiny  # a row of zeros has a scale too
        scale_N[rows] = (block_BK.abs().amax(dim=1) / largest).clamp(min=smallest)
        scaled_BK = block_BK / scale_N[rows].float()[:, None]
        numbers_NK[rows] = scaled_BK.round_() if quantize is Quantization.INT8 else scaled_BK.clamp_(-largest, largest)
    return numbers_NK, scale_N


def quantize_linears(model: nn.Module, specs: Iterable[TensorSpec], dtype: str, quantize: Quantization) -> None:
    """Put a ``QuantizedLinear`` in the place of every quantisable matrix; their numbers are loaded after."""
    for spec in specs:
        if spec.quantizable:
            out_features, in_features = spec.parameter_shape
            scale_dtype = getattr(torch, quantize.scale_dtype(dtype))
            linear = QuantizedLinear(in_features, out_features, NUMBER_DTYPES[quantize], scale_dtype)
            model.set_submodule(spec.parameter.removesuffix(".weight"), linear)
