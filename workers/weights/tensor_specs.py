"""Tensors of a checkpoint that a stage or an expert actor owns, and the parameters that they
become.

Pure arithmetic on the model's geometry, without torch, so that plans and checks of checkpoints do
not import it.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

from tramontane.proto.model_args import GateScores, ModelArgs, SparseArgs
from tramontane.proto.model_folder import Layout
from tramontane.proto.weight_format import DTYPE_BYTES, Quantization, WeightFormat
from tramontane.workers.weights.tensor_names import names_of, scale_name

# A tensor of a checkpoint, and the parameter of a stage or an expert actor that it becomes.

# Called for every loaded tensor with its bytes in the checkpoint (0 for random weights) and in
# memory.
ProgressCallback = Callable[[int, int], None]
# the tensors to load, with the names of a layout
TensorsOf = Callable[[Layout], Iterable["TensorSpec"]]

MAX_CHUNK_ELEMENTS = 2**24  # read at a time, in addition to a stage's memory


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
        interleaved_heads: the rows of this number of heads are stored as adjacent rotary pairs and
            have to be sorted into halves; 0 if they are in the order of use.
        plain_rows: rows of each of these heads that come first and are not rotated. The plain rows
            of all heads are sorted to the front.
        quantizable: whether it is a matrix that multiplies hidden states. The gate is not: it is
            small, and rounding would change its choice of experts.
        first_row: row of the parameter at which the tensor begins.
        parameter_rows: rows of the parameter, 0 if the tensor is all of it.
        scale: name of the checkpoint's scale that multiplies all of the tensor's numbers, if it is
            quantized there.
        is_head: whether it is the output head, which quantized checkpoints do not quantize.
        stack: its location if the checkpoint has no tensor ``name``.
        packed_as: number, rows and columns of the matrices made of it for packed products, if it is
            not packed itself.
        is_float32: whether it is in float32 in a stage's memory, regardless of the model's dtype.
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
        """Return the bytes in a checkpoint: of tensors in ``dtype``, or of quantized numbers and
        their scale.
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
        """Return the bytes in a stage's memory: one per element and 4 per row if quantized, else by
        the dtype.
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
    """Sort tensors for loading. While a tensor is loaded, its source is in memory too, which costs
    least before other tensors are loaded.

    Sizes 1, 4, 2, each with its source: 1+1, 5+4, 7+2, so 9 at most; largest first 4+4, 6+2, 7+1,
    so 8.
    """
    return sorted(specs, key=lambda spec: spec.num_elements, reverse=True)


# Tensors of a layer's attention, by its kind.


def attention_tensors(args: ModelArgs, layer: int, layout: Layout) -> Iterator[TensorSpec]:
    """Yield the tensors of one layer's attention, of the model's kind."""
    yield from (_latent_attention if args.latent else _grouped_query_attention)(args, layer, layout)


def _grouped_query_attention(args: ModelArgs, layer: int, layout: Layout) -> Iterator[TensorSpec]:
    names, prefix = names_of(args, layout).attention, f"layers.{layer}.attention"
    q_width, kv_width = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
    interleaved = layout is Layout.MISTRAL
    for w, num_rows, first_row, rotary_heads in (
        ("wq", q_width, 0, args.n_heads),
        ("wk", kv_width, q_width, args.n_kv_heads),
        ("wv", kv_width, q_width + kv_width, 0),
    ):
        yield matrix_spec(
            args,
            layout,
            names[w].format(layer),
            f"{prefix}.wqkv.weight",
            (num_rows, args.dim),
            interleaved_heads=rotary_heads if interleaved else 0,
            first_row=first_row,
            parameter_rows=q_width + 2 * kv_width,
        )
    yield matrix_spec(
        args, layout, names["wo"].format(layer), f"{prefix}.wo.weight", (args.dim, q_width)
    )


def _latent_attention(args: ModelArgs, layer: int, layout: Layout) -> Iterator[TensorSpec]:
    """Yield the tensors of latent attention, whose rotary pairs are adjacent in both layouts."""
    latent, names, prefix = (
        args.latent_of(layer),
        names_of(args, layout).attention,
        f"layers.{layer}.attention",
    )
    q_width, rank, own_keys = (
        args.n_heads * latent.qk_head_dim,
        latent.q_lora_rank,
        args.kv_source(layer) == layer,
    )
    # of the matrix that multiplies hidden states
    rows_a = (rank or q_width) + own_keys * latent.cached_dim

    def matrix(
        w: str, parameter: str, shape: tuple[int, int], plain_rows: int = 0, **where: int
    ) -> TensorSpec:
        spec = matrix_spec(
            args, layout, names[w].format(layer), f"{prefix}.{parameter}.weight", shape, **where
        )
        return replace(spec, plain_rows=plain_rows)

    is_rotated = latent.qk_rope_head_dim > 0
    heads = {"interleaved_heads": args.n_heads * is_rotated, "plain_rows": latent.qk_nope_head_dim}
    if rank is None:
        yield matrix("wq", "wqkv_a", (q_width, args.dim), parameter_rows=rows_a, **heads)
    else:
        yield matrix("wq_a", "wqkv_a", (rank, args.dim), parameter_rows=rows_a)
        yield TensorSpec(names["q_a_norm"].format(layer), f"{prefix}.q_a_norm.weight", (rank,))
        yield matrix("wq_b", "wq_b", (q_width, rank), **heads)
    if own_keys:
        keys = {"interleaved_heads": int(is_rotated), "plain_rows": latent.kv_lora_rank}
        first_row = rows_a - latent.cached_dim
        yield matrix(
            "wkv_a",
            "wqkv_a",
            (latent.cached_dim, args.dim),
            first_row=first_row,
            parameter_rows=rows_a,
            **keys,
        )
        yield TensorSpec(
            names["kv_a_norm"].format(layer), f"{prefix}.kv_a_norm.weight", (latent.kv_lora_rank,)
        )
    rank, nope, value = latent.kv_lora_rank, latent.qk_nope_head_dim, latent.v_head_dim
    wkv_b = matrix("wkv_b", "wkv_b", (args.n_heads * (nope + value), rank))
    yield replace(wkv_b, packed_as=((args.n_heads, rank, nope), (args.n_heads, value, rank)))
    yield matrix("wo", "wo", (args.dim, args.n_heads * latent.v_head_dim))
    if args.sparse:
        yield from _sparse_attention(args, args.sparse, layer, layout)


def _sparse_attention(
    args: ModelArgs, sparse: SparseArgs, layer: int, layout: Layout
) -> Iterator[TensorSpec]:
    """Yield the scaling of a layer's queries, and its indexer if it has one."""
    names, prefix = names_of(args, layout).attention, f"layers.{layer}.attention"
    heads, width = sparse.index_n_heads, sparse.index_head_dim

    def vector(part: str, parameter: str, length: int) -> TensorSpec:
        return TensorSpec(names[part].format(layer), f"{prefix}.{parameter}", (length,))

    def matrix(
        part: str, parameter: str, num_rows: int, first_row: int = 0, parameter_rows: int = 0
    ) -> TensorSpec:
        # not quantized: rounding would change the choice
        name, shape = names[part].format(layer), (num_rows, args.dim)
        return TensorSpec(
            name,
            f"{prefix}.{parameter}.weight",
            shape,
            first_row=first_row,
            parameter_rows=parameter_rows,
        )

    yield vector("ssmax_scaling.s", "head_scaling.scale", args.n_heads)
    yield vector("ssmax_scaling.b", "head_scaling.bias", args.n_heads)
    if args.index_source(layer) != layer:
        return
    yield vector("indexer.q_input_norm.weight", "indexer.q_norm.weight", args.dim)
    yield vector("indexer.q_input_norm.bias", "indexer.q_norm.bias", args.dim)
    yield matrix("indexer.wq_b.weight", "indexer.wq", heads * width)
    yield matrix("indexer.wk.weight", "indexer.wk_weights", width, parameter_rows=width + heads)
    yield matrix("indexer.weights_proj.weight", "indexer.wk_weights", heads, width, width + heads)
    yield vector("indexer.k_norm.weight", "indexer.k_norm.weight", width)
    yield vector("indexer.k_norm.bias", "indexer.k_norm.bias", width)
    yield vector("indexer.ssmax_scaling.s", "indexer.head_scaling.scale", heads)
    yield vector("indexer.ssmax_scaling.b", "indexer.head_scaling.bias", heads)


def layer_tensors(
    args: ModelArgs, layer: int, layout: Layout = Layout.HUGGING_FACE, with_experts: bool = True
) -> Iterator[TensorSpec]:
    """Yield the attention of one layer, and its feed-forward network or its gate and experts."""
    names, prefix = names_of(args, layout), f"layers.{layer}"
    yield TensorSpec(
        names.attention_norm.format(layer), f"{prefix}.attention_norm.weight", (args.dim,)
    )
    yield TensorSpec(names.ffn_norm.format(layer), f"{prefix}.ffn_norm.weight", (args.dim,))
    yield from attention_tensors(args, layer, layout)
    if layer not in args.moe_layers:
        dense = {w: name.format(layer) for w, name in names.feed_forward.items()}
        yield from _swiglu(args, layout, dense, f"{prefix}.feed_forward", args.hidden_dim)
        return
    assert args.moe is not None
    gate_shape = (args.moe.num_experts, args.dim)
    is_float32 = args.moe.float32_gate
    yield TensorSpec(
        names.gate.format(layer), f"{prefix}.gate.scores.weight", gate_shape, is_float32=is_float32
    )
    if args.moe.scores is GateScores.SIGMOID:
        yield TensorSpec(
            names.gate_bias.format(layer),
            f"{prefix}.gate.bias",
            gate_shape[:1],
            is_float32=is_float32,
        )
    if args.moe.n_shared_experts:
        shared = {w: name.format(layer) for w, name in names.shared_experts.items()}
        yield from _swiglu(
            args,
            layout,
            shared,
            f"{prefix}.shared_experts",
            args.moe.n_shared_experts * args.expert_dim,
        )
    for expert in range(args.moe.num_experts if with_experts else 0):
        yield from expert_tensors(args, layer, expert, layout)


def expert_tensors(
    args: ModelArgs, layer: int, expert: int, layout: Layout = Layout.HUGGING_FACE
) -> Iterator[TensorSpec]:
    """Yield the matrices of one expert of one layer."""
    names = names_of(args, layout)
    own = {w: name.format(layer, expert) for w, name in names.experts.items()}
    for spec in _swiglu(args, layout, own, f"experts.layers.{layer}.{expert}", args.expert_dim):
        matrix = spec.parameter.split(".")[-2]
        if stack := names.stacked_experts.get(matrix):
            assert args.moe is not None
            num_rows, width = spec.parameter_shape
            shape = (args.moe.num_experts, num_rows, width)
            yield replace(spec, stack=Stack(stack.format(layer), shape, expert, spec.first_row))
        else:
            yield spec


def _swiglu(
    args: ModelArgs, layout: Layout, names: dict[str, str], parameter: str, width: int
) -> Iterator[TensorSpec]:
    """Yield the matrices of a feed-forward network of this width: w1 and w3 are one parameter."""
    for w, first_row in (("w1", 0), ("w3", width)):
        shape = (width, args.dim)
        yield matrix_spec(
            args,
            layout,
            names[w],
            f"{parameter}.w13.weight",
            shape,
            first_row=first_row,
            parameter_rows=2 * width,
        )
    yield matrix_spec(args, layout, names["w2"], f"{parameter}.w2.weight", (args.dim, width))


def stage_tensors(
    args: ModelArgs, layers: range, layout: Layout = Layout.HUGGING_FACE, with_experts: bool = True
) -> Iterator[TensorSpec]:
    """Yield all tensors of the stage with these global layers."""
    if layers.start == 0:
        yield embedding_tensor(args, layout)
    yield from common_tensors(args, layout)
    for layer in layers:
        yield from layer_tensors(args, layer, layout, with_experts)
    if layers.stop == args.n_layers:
        yield from head_tensors(args, layout)


def common_tensors(args: ModelArgs, layout: Layout = Layout.HUGGING_FACE) -> Iterator[TensorSpec]:
    """Yield the tensors of every stage: factors of the rotary frequencies, if the model has
    them.
    """
    if args.sparse:
        yield TensorSpec(
            names_of(args, layout).rotary_alpha,
            "rotary_alpha",
            (args.rotary_dim // 2,),
            is_float32=True,
        )


def embedding_tensor(args: ModelArgs, layout: Layout = Layout.HUGGING_FACE) -> TensorSpec:
    """Return the token embeddings."""
    return TensorSpec(
        names_of(args, layout).embedding, "tok_embeddings.weight", (args.vocab_size, args.dim)
    )


def head_tensors(args: ModelArgs, layout: Layout = Layout.HUGGING_FACE) -> Iterator[TensorSpec]:
    """Yield the last norm and the output head, which is the embeddings if they are tied."""
    names = names_of(args, layout)
    yield TensorSpec(names.norm, "norm.weight", (args.dim,))
    head = names.embedding if args.tied_embeddings else names.head
    yield TensorSpec(
        head, "output.weight", (args.vocab_size, args.dim), quantizable=True, is_head=True
    )
