"""Tensors of a checkpoint that a stage or an expert actor owns, and the parameter that each becomes.

Pure arithmetic on the model's geometry, without torch, so that plans and checks of checkpoints load nothing.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod

from tramontane.proto.model_args import DTYPE_BYTES, ModelArgs, Quantization, WeightFormat
from tramontane.proto.model_folder import Layout
from tramontane.workers.weights.tensor_names import NAMES, scale_name

# Called for every loaded tensor with its bytes in the checkpoint (0 for random weights) and in memory.
ProgressCallback = Callable[[int, int], None]
TensorsOf = Callable[[Layout], Iterable["TensorSpec"]]  # the tensors to load, with the names of a layout

MAX_CHUNK_ELEMENTS = 2**24  # that are read at a time, in addition to what a stage holds


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of a checkpoint and its place in a parameter.

    Matrices that multiply the same hidden states are one parameter. Rows 0..1023 of wqkv are wq, 1024..1279 wk,
    1280..1535 wv: wk has ``first_row`` 1024 and ``parameter_rows`` 1536.

    Attributes:
        name: name in the checkpoint.
        parameter: name in ``StageModel``.
        shape: shape in the checkpoint.
        interleaved_heads: the rows of so many heads are stored as adjacent rotary pairs and have to be sorted into halves;
            0 if they are in the order of use.
        quantizable: whether it is a matrix that hidden states are multiplied by. The gate is not: it is small, and
            rounding would change which experts it chooses.
        first_row: row of the parameter at which the tensor begins.
        parameter_rows: rows of the parameter, 0 if the tensor is all of it.
        scale: name of the number in the checkpoint by which all of the tensor's are multiplied, if it is quantized there.
        is_head: whether it is the output head, which quantized checkpoints leave as it was.
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

    @property
    def parameter_shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return (self.parameter_rows or self.shape[0], *self.shape[1:])

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
        """Ranges of rows to read at a time, up to ``MAX_CHUNK_ELEMENTS``; a single one if heads have to be sorted.

        [131072, 5120], 2**24 elements at most: rows 0 to 3275, 3276 to 6551, ...
        """
        num_rows = self.shape[0]
        step = num_rows if self.interleaved_heads else max(MAX_CHUNK_ELEMENTS * num_rows // self.num_elements, 1)
        return [range(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]

    @property
    def scale_parameter(self) -> str:
        """Name of the parameter with the scales of its rows, if it is quantized."""
        return self.parameter.removesuffix("weight") + "scale"

    def quantized_as(self, weights: WeightFormat) -> Quantization | None:
        """Return the format in a stage's memory, None if it has a dtype instead."""
        return weights.quantize if self.quantizable and (weights.quantize_head or not self.is_head) else None

    def stored_bytes(self, dtype: str) -> int:
        """Return the bytes in a checkpoint whose tensors have ``dtype`` unless they are quantized, the scale included."""
        return self.num_elements + DTYPE_BYTES["float32"] if self.scale else self.num_elements * DTYPE_BYTES[dtype]

    def dtype(self, weights: WeightFormat) -> str:
        """Return the dtype in a stage's memory, unless quantized."""
        return weights.matrix_dtype if len(self.shape) > 1 else weights.dtype

    def num_bytes(self, weights: WeightFormat) -> int:
        """Return the bytes in a stage's memory: one per element and 4 per row if quantized, else those of the dtype."""
        if self.quantized_as(weights):
            return self.num_elements + self.shape[0] * DTYPE_BYTES["float32"]
        return self.num_elements * DTYPE_BYTES[self.dtype(weights)]

    def padding_bytes(self, weights: WeightFormat, panel_rows: int) -> int:
        """Return the bytes that fill up the last panel of a packed matrix, for the tensor that has the parameter's last rows.

        70 rows of 5 bfloat16 in panels of 32: 26 rows of 10 bytes.
        """
        num_rows = self.parameter_shape[0]
        if len(self.shape) == 1 or self.rows.stop != num_rows:
            return 0
        size = 1 if self.quantized_as(weights) else DTYPE_BYTES[self.dtype(weights)]
        return -num_rows % panel_rows * self.shape[1] * size


def layer_tensors(
    args: ModelArgs, layer: int, layout: Layout = Layout.HUGGING_FACE, with_experts: bool = True
) -> Iterator[TensorSpec]:
    """Yield the attention of one layer, and its feed-forward network or its gate and experts."""
    names, prefix = NAMES[layout], f"layers.{layer}"
    q_width, kv_width = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
    interleaved = layout is Layout.MISTRAL
    yield TensorSpec(names.attention_norm.format(layer), f"{prefix}.attention_norm.weight", (args.dim,))
    yield TensorSpec(names.ffn_norm.format(layer), f"{prefix}.ffn_norm.weight", (args.dim,))
    for w, num_rows, first_row, rotary_heads in (
        ("wq", q_width, 0, args.n_heads),
        ("wk", kv_width, q_width, args.n_kv_heads),
        ("wv", kv_width, q_width + kv_width, 0),
    ):
        yield _matrix(
            args,
            layout,
            names.attention[w].format(layer),
            f"{prefix}.attention.wqkv.weight",
            (num_rows, args.dim),
            interleaved_heads=rotary_heads if interleaved else 0,
            first_row=first_row,
            parameter_rows=q_width + 2 * kv_width,
        )
    yield _matrix(args, layout, names.attention["wo"].format(layer), f"{prefix}.attention.wo.weight", (args.dim, q_width))
    if args.moe is None:
        dense = {w: name.format(layer) for w, name in names.feed_forward.items()}
        yield from _swiglu(args, layout, dense, f"{prefix}.feed_forward")
        return
    gate_shape = (args.moe.num_experts, args.dim)
    yield TensorSpec(names.gate.format(layer), f"{prefix}.gate.scores.weight", gate_shape)
    for expert in range(args.moe.num_experts if with_experts else 0):
        yield from expert_tensors(args, layer, expert, layout)


def expert_tensors(args: ModelArgs, layer: int, expert: int, layout: Layout = Layout.HUGGING_FACE) -> Iterator[TensorSpec]:
    """Yield the matrices of one expert of one layer."""
    prefix = NAMES[layout].expert.format(layer, expert)
    names = {w: f"{prefix}.{w}.weight" for w in ("w1", "w2", "w3")}
    yield from _swiglu(args, layout, names, f"experts.layers.{layer}.{expert}")


def _swiglu(args: ModelArgs, layout: Layout, names: dict[str, str], parameter: str) -> Iterator[TensorSpec]:
    """Yield the matrices of a feed-forward network: w1 and w3 are one parameter."""
    shape, rows = (args.hidden_dim, args.dim), 2 * args.hidden_dim
    for w, first_row in (("w1", 0), ("w3", args.hidden_dim)):
        yield _matrix(args, layout, names[w], f"{parameter}.w13.weight", shape, first_row=first_row, parameter_rows=rows)
    yield _matrix(args, layout, names["w2"], f"{parameter}.w2.weight", (args.dim, args.hidden_dim))


def _matrix(
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
    return TensorSpec(name, parameter, shape, interleaved_heads, True, first_row, parameter_rows, scale)


def stage_tensors(
    args: ModelArgs, layers: range, layout: Layout = Layout.HUGGING_FACE, with_experts: bool = True
) -> Iterator[TensorSpec]:
    """Yield all tensors of the stage with these global layers."""
    if layers.start == 0:
        yield embedding_tensor(args, layout)
    for layer in layers:
        yield from layer_tensors(args, layer, layout, with_experts)
    if layers.stop == args.n_layers:
        yield from head_tensors(args, layout)


def embedding_tensor(args: ModelArgs, layout: Layout = Layout.HUGGING_FACE) -> TensorSpec:
    """Return the token embeddings."""
    return TensorSpec(NAMES[layout].embedding, "tok_embeddings.weight", (args.vocab_size, args.dim))


def head_tensors(args: ModelArgs, layout: Layout = Layout.HUGGING_FACE) -> Iterator[TensorSpec]:
    """Yield the last norm and the output head, which is the embeddings if they are tied."""
    names = NAMES[layout]
    yield TensorSpec(names.norm, "norm.weight", (args.dim,))
    head = names.embedding if args.tied_embeddings else names.head
    yield TensorSpec(head, "output.weight", (args.vocab_size, args.dim), quantizable=True, is_head=True)


def largest_first(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Sort tensors for loading. While one is loaded its source is in memory too, which costs least before the others are.

    Sizes 1, 4, 2, each with its source: 1+1, 5+4, 7+2, so 9 at most; largest first 4+4, 6+2, 7+1, so 8.
    """
    return sorted(specs, key=lambda spec: spec.num_elements, reverse=True)
