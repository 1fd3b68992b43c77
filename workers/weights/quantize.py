"""Quantized matrices: one-byte numbers, and a scale per row, which is an output channel.

Shape letters: K inputs, N outputs of a matrix, B rows of it at a time.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from tramontane.proto.errors import CheckpointError
from tramontane.proto.weight_format import Quantization, WeightFormat
from tramontane.workers.kernels.linear import row_blocks
from tramontane.workers.kernels.packed_linear import PackedMatmul
from tramontane.workers.kernels.quantized_linear import QuantizedLinear
from tramontane.workers.weights.tensor_specs import TensorSpec

NUMBER_DTYPES = {
    Quantization.INT8: torch.int8,
    Quantization.W8A8: torch.int8,
    Quantization.FP8: torch.float8_e4m3fn,
}
MAX_MAGNITUDE = {Quantization.INT8: 127, Quantization.W8A8: 127, Quantization.FP8: 448}


def load_tensor(
    state: dict[str, Tensor],
    spec: TensorSpec,
    pieces: Iterable[Tensor],
    weights: WeightFormat,
    device: str | torch.device,
    packed: Mapping[str, PackedMatmul],
    stored_scale: float = 1.0,
) -> int:
    """Write one tensor to its rows of its parameter in ``state``, on the device, in its dtype or as
    numbers and scales.

    ``pieces`` are its rows in order; they need not be in memory together. Returns their bytes.
    Parameters in ``packed`` are packed for these products. A tensor that is quantized in the
    checkpoint has fp8 pieces, to be multiplied by ``stored_scale``; in an fp8 parameter they stay
    unchanged.

    Raises:
        CheckpointError: if the tensor has infinite or NaN elements, for which there is no scale, or
            is not of the dtype that matrices of the checkpoint have.
    """
    quantize, dtype = spec.quantized_as(weights), getattr(torch, spec.dtype(weights))
    matmul, shape = packed.get(spec.parameter), spec.parameter_shape
    if spec.parameter not in state:  # the first tensor of this parameter
        number_dtype = NUMBER_DTYPES[quantize] if quantize else dtype
        state[spec.parameter] = (
            matmul.allocate(*shape)
            if matmul
            else torch.empty(shape, dtype=number_dtype, device=device)
        )
    may_not_change = not (quantize or spec.is_float32) and spec.dtype(weights) != weights.dtype
    scale_N = _scales(state, spec, device) if quantize else None
    num_read = 0
    for rows, piece in _row_ranges(pieces, spec.first_row):
        numbers = piece
        if may_not_change and piece.dtype != dtype:
            raise CheckpointError(
                f"tensor {spec.name} is {piece.dtype}, and the plan is for {dtype}, as of another"
                " checkpoint"
            )
        if quantize and scale_N is not None:
            if spec.scale and quantize is Quantization.FP8:
                scale_N[rows] = stored_scale
            else:
                weight = piece.float() * stored_scale if spec.scale else piece
                numbers, scale_N[rows] = quantize_weight(weight, quantize, torch.device(device))
        if matmul:
            matmul.pack_rows(numbers, rows.start, shape[0], state[spec.parameter])
        else:
            state[spec.parameter][rows] = numbers
        num_read += piece.nbytes
    if scale_N is not None and not scale_N[spec.rows].isfinite().all():
        raise CheckpointError(
            f"tensor {spec.name} has elements that are infinite or not a number; it cannot be"
            " quantized"
        )
    return num_read


def _scales(state: dict[str, Tensor], spec: TensorSpec, device: str | torch.device) -> Tensor:
    """Return the scales of a parameter's rows, which are allocated for its first tensor."""
    if spec.scale_parameter not in state:
        state[spec.scale_parameter] = torch.empty(
            spec.parameter_shape[0], dtype=torch.float32, device=device
        )
    return state[spec.scale_parameter]


def _row_ranges(pieces: Iterable[Tensor], first_row: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield each piece with its range of rows: lengths [3, 2] from row 10 on are rows 10 to 12 and
    13 to 14.
    """
    start = first_row
    for piece in pieces:
        yield slice(start, start + len(piece)), piece
        start += len(piece)


def quantize_weight(
    weight_NK: Tensor, quantize: Quantization, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Compute numbers q and scales s, a block of rows at a time, without a second copy of the
    matrix.

    int8 and w8a8: |w - q * s| <= s / 2. fp8: |w - q * s| <= the larger of |w| / 16 and s / 1024,
    because a number has three bits after the first, and numbers below 2**-6 have the step 2**-9. s
    = largest / 127 or / 448, in float32.
    """
    largest = MAX_MAGNITUDE[quantize]
    numbers_NK = torch.empty(weight_NK.shape, dtype=NUMBER_DTYPES[quantize], device=device)
    scale_N = torch.empty(weight_NK.shape[0], dtype=torch.float32, device=device)
    for rows in row_blocks(weight_NK.shape, device):
        block_BK = weight_NK[rows].to(device, torch.float32)
        smallest = torch.finfo(torch.float32).tiny  # a row of zeros needs a scale too
        scale_N[rows] = (block_BK.abs().amax(dim=1) / largest).clamp(min=smallest)
        scaled_BK = block_BK / scale_N[rows, None]
        numbers_NK[rows] = (
            scaled_BK.clamp_(-largest, largest)
            if quantize is Quantization.FP8
            else scaled_BK.round_()
        )
    return numbers_NK, scale_N


def quantize_linears(model: nn.Module, specs: Iterable[TensorSpec], weights: WeightFormat) -> None:
    """Replace the layer of every quantized matrix by a ``QuantizedLinear``, whose numbers are
    loaded later.
    """
    for spec in specs:
        if quantize := spec.quantized_as(weights):
            out_features, in_features = spec.parameter_shape
            is_w8a8 = quantize is Quantization.W8A8
            linear = QuantizedLinear(
                in_features, out_features, NUMBER_DTYPES[quantize], int8_activations=is_w8a8
            )
            model.set_submodule(spec.parameter.removesuffix(".weight"), linear)
