"""A tensor of a checkpoint, and the parameter of a stage or an expert actor that it becomes."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod

from tramontane.proto.model_args import DTYPE_BYTES, ModelArgs, Quantization, WeightFormat
from tramontane.proto.model_folder import Layout
from tramontane.workers.weights.tensor_names import scale_name

# Called for every loaded tensor with its bytes in the checkpoint (0 for random weights) and in
# memory.
ProgressCallback = Callable[[int, int], None]
# the tensors to load, with the names of a layout
TensorsOf = Callable[[Layout], Iterable["TensorSpec"]]

MAX_CHUNK_ELEMENTS = 2**24  # that are read at a time, in addition to what a stage holds


@dataclass(frozen=True, slots=True)
class Stack:
    """A tensor with one matrix of every expert, [experts, rows, columns], in which a matrix is
    stored, and where.

    Of 4 experts with 2 x 16 rows of gate and up, the up rows of expert 3 are rows 16 to 31 of
    matrix 3.
    """

    name: str
    shape: tuple[int, int, int]
    index: int
    first_row: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of a checkpoint and its place in a parameter.

    Matrices that multiply the same hidden states are one parameter. Rows 0..1023 of wqkv are wq,
    1024..1279 wk, 1280..1535 wv: wk has ``first_row`` 1024 and ``parameter_rows`` 1536.

    Attributes:
        name: name in the checkpoint.
        parameter: name in ``StageModel``.
        shape: shape in the checkpoint.
        interleaved_heads: the rows of so many heads are stored as adjacent rotary pairs and have to
            be sorted into halves; 0 if they are in the order of use.
        plain_rows: rows of each of these heads that come first and are not rotated. Those of all
            heads are sorted to the front.
        quantizable: whether it is a matrix that hidden states are multiplied by. The gate is not:
            it is small, and rounding would change which experts it chooses.
        first_row: row of the parameter at which the tensor begins.
        parameter_rows: rows of the parameter, 0 if the tensor is all of it.
        scale: name of the number in the checkpoint by which all of the tensor's are multiplied, if
            it is quantized there.
        is_head: whether it is the output head, which quantized checkpoints leave as it was.
        stack: where it is if the checkpoint has no tensor ``name``.
        packed_as: how many matrices of which rows and columns are made of it for packed products,
            if it is not packed itself.
        is_float32: whether it is in float32 in a stage's memory, whatever the dtype of the model.
    """

    name: str
    parameter: str
    shape: tuple[int, ...]
    interleaved_heads: int = 0
    quantizable: bool = False
    first_row: int = 0
    parameter_rows: int = 0
    scale: str = ""
    is_head: bool = False
    plain_rows: int = 0
    stack: Stack | None = None
    packed_as: tuple[tuple[int, int, int], ...] = ()
    is_float32: bool = False

    @property
    def parameter_shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return (self.parameter_rows or self.shape[0], *self.shape[1:])

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the tensor in the checkpoint that has it, of all experts if it is a stack."""
        return self.stack.shape if self.stack else self.shape

    @property
    def rows(self) -> slice:
        """Rows of the parameter that the tensor becomes."""
        return slice(self.first_row, self.first_row + self.shape[0])

    @property
    def num_elements(self) -> int:
        """Elements of the tensor."""
        return prod(self.shape)

    @property
    def row_chunks(self) -> list[range]:
        """Ranges of rows to read at a time, up to ``MAX_CHUNK_ELEMENTS``; a single one if heads
        have to be sorted.

        [131072, 5120], 2**24 elements at most: rows 0 to 3275, 3276 to 6551, ...
        """
        num_rows = self.shape[0]
        step = (
            num_rows
            if self.interleaved_heads
            else max(MAX_CHUNK_ELEMENTS * num_rows // self.num_elements, 1)
        )
        return [range(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]

    @property
    def scale_parameter(self) -> str:
        """Name of the parameter with the scales of its rows, if it is quantized."""
        return self.parameter.removesuffix("weight") + "scale"

    def quantized_as(self, weights: WeightFormat) -> Quantization | None:
        """Return the format in a stage's memory, None if it has a dtype instead."""
        return (
            weights.quantize
            if self.quantizable and (weights.quantize_head or not self.is_head)
            else None
        )

    def stored_bytes(self, dtype: str) -> int:
        """Return the bytes in a checkpoint whose tensors have ``dtype`` unless they are quantized,
        the scale included.
        """
        return (
            self.num_elements + DTYPE_BYTES["float32"]
            if self.scale
            else self.num_elements * DTYPE_BYTES[dtype]
        )

    def dtype(self, weights: WeightFormat) -> str:
        """Return the dtype in a stage's memory, unless quantized."""
        if self.is_float32:
            return "float32"
        return weights.matrix_dtype if len(self.shape) > 1 else weights.dtype

    def num_bytes(self, weights: WeightFormat) -> int:
        """Return the bytes in a stage's memory: one per element and 4 per row if quantized, else
        those of the dtype.
        """
        if self.quantized_as(weights):
            return self.num_elements + self.shape[0] * DTYPE_BYTES["float32"]
        return self.num_elements * DTYPE_BYTES[self.dtype(weights)]

    def padding_bytes(self, weights: WeightFormat, panel_rows: int) -> int:
        """Return the bytes that fill up the last panel of a packed matrix, for the tensor that has
        the parameter's last rows.

        70 rows of 5 bfloat16 in panels of 32: 26 rows of 10 bytes.
        """
        num_rows = self.parameter_shape[0]
        if len(self.shape) == 1 or self.rows.stop != num_rows:
            return 0
        size = 1 if self.quantized_as(weights) else DTYPE_BYTES[self.dtype(weights)]
        matrices = self.packed_as or ((1, num_rows, self.shape[1]),)
        return (
            sum(count * (-rows % panel_rows) * columns for count, rows, columns in matrices) * size
        )


def matrix_spec(
    args: ModelArgs,
    layout: Layout,
    name: str,
    parameter: str,
    shape: tuple[int, int],
    *,
    interleaved_heads: int = 0,
    first_row: int = 0,
    parameter_rows: int = 0,
) -> TensorSpec:
    """Return a matrix of a layer, with the name of its scale if the checkpoint is quantized."""
    scale = scale_name(name, layout) if args.quantization else ""
    return TensorSpec(
        name, parameter, shape, interleaved_heads, True, first_row, parameter_rows, scale
    )


def largest_first(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Sort tensors for loading. While one is loaded its source is in memory too, which costs least
    before the others are.

    Sizes 1, 4, 2, each with its source: 1+1, 5+4, 7+2, so 9 at most; largest first 4+4, 6+2, 7+1,
    so 8.
    """
    return sorted(specs, key=lambda spec: spec.num_elements, reverse=True)
