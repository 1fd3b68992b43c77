"""Formats of weights: dtypes, and one byte per element with a scale per row."""

from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tramontane.proto.model_args import ModelArgs

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Quantization(StrEnum):
    """Format of a stage's matrices instead of the model's dtype: one byte per element, and one
    float32 scale per row.
    """

    INT8 = "int8"  # integers
    # integers, and on CPUs activations are rounded to integers, too, with a scale per token
    W8A8 = "w8a8"
    FP8 = "fp8"  # floats of 4 exponent and 3 mantissa bits, the largest 448 (torch's float8_e4m3fn)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Format of a stage's weights. Norms have ``dtype``, like activations; matrices
    ``matrix_dtype``, or ``quantize``.
    """

    dtype: str
    _: KW_ONLY
    stored: str  # dtype of the checkpoint's matrices that are not quantized there
    quantize: Quantization | None = None
    quantize_head: bool = True  # a quantized checkpoint's own head is not

    @classmethod
    def of(cls, args: "ModelArgs", dtype: str, quantize: Quantization | None) -> "WeightFormat":
        """Return the format for activations in ``dtype``; without ``quantize`` a quantized
        checkpoint keeps its format.
        """
        return cls(
            dtype,
            stored=args.dtype,
            quantize=quantize or args.quantization,
            quantize_head=quantize is not None,
        )

    @property
    def matrix_dtype(self) -> str:
        """Dtype of matrices that are not quantized.

        With float32 activations, bfloat16 matrices keep their stored dtype: float32 would be the
        same numbers in twice the memory.
        """
        return "bfloat16" if (self.stored, self.dtype) == ("bfloat16", "float32") else self.dtype
