"""Quantized matrices: numbers of one byte, and a scale per row, which is an output channel.

Shape letters: K inputs, N outputs of a matrix, B rows of it at a time.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from tramontane.proto.errors import CheckpointError
from tramontane.proto.model_args import Quantization
from tramontane.workers.kernels.linear import row_blocks
from tramontane.workers.kernels.quantized_linear import QuantizedLinear
from tramontane.workers.weights.tensor_specs import TensorSpec

NUMBER_DTYPES = {Quantization.INT8: torch.int8, Quantization.W8A8: torch.int8, Quantization.FP8: torch.float8_e4m3fn}
MAX_MAGNITUDE = {Quantization.INT8: 127, Quantization.W8A8: 127, Quantization.FP8: 448}


def load_tensor(
    state: dict[str, Tensor],
    spec: TensorSpec,
    pieces: Iterable[Tensor],
    dtype: str,
    device: str | torch.device,
    quantize: Quantization | None,
) -> int:
    """Write one tensor to its rows of its parameter in ``state``: in ``dtype`` on the device, or as numbers and scales.

    ``pieces`` are its rows in order; they need not be in memory together. Returns their bytes.

    Raises:
        CheckpointError: if the tensor has infinite or NaN elements, for which there is no scale.
    """

    def rows_of(parameter: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the tensor's rows of a parameter, which the first of its tensors allocates."""
        if parameter not in state:
            state[parameter] = torch.empty(shape, dtype=dtype, device=device)
        return state[parameter][spec.rows]

    num_read = 0
    if not (quantize and spec.quantizable):
        target = rows_of(spec.parameter, spec.parameter_shape, getattr(torch, dtype))
        for rows, piece in _row_ranges(pieces):
            target[rows] = piece
            num_read += piece.nbytes
        return num_read
    scale_dtype, device = getattr(torch, quantize.scale_dtype(dtype)), torch.device(device)
    numbers_NK = rows_of(spec.parameter, spec.parameter_shape, NUMBER_DTYPES[quantize])
    scale_N = rows_of(spec.scale_parameter, spec.parameter_shape[:1], scale_dtype)
    for rows, piece in _row_ranges(pieces):
        numbers_NK[rows], scale_N[rows] = quantize_weight(piece, quantize, scale_dtype, device)
        num_read += piece.nbytes
    if not scale_N.isfinite().all():
        raise CheckpointError(f"tensor {spec.name} has elements that are infinite or not a number; it cannot be quantized")
    return num_read


def _row_ranges(pieces: Iterable[Tensor]) -> Iterator[tuple[slice, Tensor]]:
    """Yield each piece with its range of rows: lengths [3, 2] are rows 0 to 2 and 3 to 4."""
    start = 0
    for piece in pieces:
        yield slice(start, start + len(piece)), piece
        start += len(piece)


def quantize_weight(
    weight_NK: Tensor, quantize: Quantization, scale_dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Compute numbers q and scales s, a block of rows at a time, without a second copy of the matrix.

    int8 and w8a8: |w - q * s| <= s / 2. fp8: |w - q * s| <= the larger of |w| / 16 and s / 1024, because a number has three bits
    after the first, and numbers below 2**-6 have the step 2**-9.

    s = largest / 127 or / 448, rounded to its dtype before q is computed, so that q compensates for the rounding:
    bfloat16 has 8 bits, so largest / s is at most 127 * (1 + 2**-8) = 127.496, which still rounds to 127.
    """
    largest = MAX_MAGNITUDE[quantize]
    numbers_NK = torch.empty(weight_NK.shape, dtype=NUMBER_DTYPES[quantize], device=device)
    scale_N = torch.empty(weight_NK.shape[0], dtype=scale_dtype, device=device)
    for rows in row_blocks(weight_NK.shape, device):
        block_BK = weight_NK[rows].to(device, torch.float32)
        smallest = torch.finfo(torch.float32).tiny  # a row of zeros needs a scale too
        scale_N[rows] = (block_BK.abs().amax(dim=1) / largest).clamp(min=smallest)
        scaled_BK = block_BK / scale_N[rows].float()[:, None]
        numbers_NK[rows] = scaled_BK.clamp_(-largest, largest) if quantize is Quantization.FP8 else scaled_BK.round_()
    return numbers_NK, scale_N


def quantize_linears(model: nn.Module, specs: Iterable[TensorSpec], dtype: str, quantize: Quantization) -> None:
    """Replace the layer of every quantizable matrix by a ``QuantizedLinear``, whose numbers are loaded later."""
    for spec in specs:
        if spec.quantizable:
            out_features, in_features = spec.parameter_shape
            scale_dtype = getattr(torch, quantize.scale_dtype(dtype))
            dtypes = NUMBER_DTYPES[quantize], scale_dtype
            linear = QuantizedLinear(in_features, out_features, *dtypes, int8_activations=quantize is Quantization.W8A8)
            model.set_submodule(spec.parameter.removesuffix(".weight"), linear)
