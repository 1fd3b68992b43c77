"""Which tensors of a checkpoint a stage owns, and which parameter each becomes.

Pure arithmetic on the model's geometry: no torch, so that a plan can be made
and a checkpoint checked without loading anything.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from tramontane.proto.model_args import DTYPE_BYTES, ModelArgs, Quantization
from tramontane.proto.model_folder import Layout
from tramontane.proto.plan import ExpertId

# Hears of every tensor that is there now its bytes in the checkpoint (0: it was made) and in memory.
ProgressCallback = Callable[[int, int], None]
TensorsOf = Callable[[Layout], Iterable["TensorSpec"]]  # what is wanted of a checkpoint, in its spelling

MAX_CHUNK_ELEMENTS = 2**24  # elements that are in memory as they are stored, beside what a stage holds


@dataclass(frozen=True, slots=True)
class CheckpointNames:
    """One layout's spelling; ``{}`` stands for the layer, and for the expert in ``expert``."""

    embedding: str
    norm: str
    head: str
    attention_norm: str
    ffn_norm: str
    attention: Mapping[str, str]
    feed_forward: Mapping[str, str]
    gate: str
    expert: str


NAMES = {
    Layout.HUGGING_FACE: CheckpointNames(
        embedding="model.embed_tokens.weight",
        norm="model.norm.weight",
        head="lm_head.weight",
        attention_norm="model.layers.{}.input_layernorm.weight",
        ffn_norm="model.layers.{}.post_attention_layernorm.weight",
        attention={w: f"model.layers.{{}}.self_attn.{w[1]}_proj.weight" for w in ("wq", "wk", "wv", "wo")},
        feed_forward={
            w: f"model.layers.{{}}.mlp.{name}_proj.weight" for w, name in (("w1", "gate"), ("w2", "down"), ("w3", "up"))
        },
        gate="model.layers.{}.block_sparse_moe.gate.weight",
        expert="model.layers.{}.block_sparse_moe.experts.{}",
    ),
    Layout.MISTRAL: CheckpointNames(
        embedding="tok_embeddings.weight",
        norm="norm.weight",
        head="output.weight",
        attention_norm="layers.{}.attention_norm.weight",
        ffn_norm="layers.{}.ffn_norm.weight",
        attention={w: f"layers.{{}}.attention.{w}.weight" for w in ("wq", "wk", "wv", "wo")},
        feed_forward={w: f"layers.{{}}.feed_forward.{w}.weight" for w in ("w1", "w2", "w3")},
        gate="layers.{}.feed_forward.gate.weight",
        expert="layers.{}.feed_forward.experts.{}",
    ),
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """``name`` and ``shape`` in the checkpoint; ``parameter`` in ``StageModel``, and from which of its rows on.

    Matrices that multiply the same hidden states are one parameter: ``parameter_rows`` of it, where that is more than the
    tensor has. 0..1023 of wqkv are wq, 1024..1279 wk, 1280..1535 wv: wk begins at ``first_row`` 1024 of 1536.
    ``interleaved_heads``: the rows of that many heads are stored as rotary pairs side
    by side, and have to be sorted into halves; 0 where they are in the order they are used in.
    ``quantizable``: a matrix that hidden states are multiplied by. Not the gate's: choosing experts is a
    yes or no, and the gate is small.
    """

    name: str
    parameter: str
    shape: tuple[int, ...]
    interleaved_heads: int = 0
    quantizable: bool = False
    first_row: int = 0
    parameter_rows: int = 0

    @property
    def parameter_shape(self) -> tuple[int, ...]:
        return (self.parameter_rows or self.shape[0], *self.shape[1:])

    @property
    def rows(self) -> slice:
        """Where it is in its parameter."""
        return slice(self.first_row, self.first_row + self.shape[0])

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def row_chunks(self) -> list[range]:
        """Its rows, so many at a time that a piece is small beside a stage; all of them where heads have to be sorted.

        [131072, 5120], 2**24 elements at the most: rows 0 to 3275, 3276 to 6551, ...
        """
        num_rows = self.shape[0]
        step = num_rows if self.interleaved_heads else max(MAX_CHUNK_ELEMENTS * num_rows // self.num_elements, 1)
        return [range(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]

    @property
    def scale_parameter(self) -> str:
        """Where the scales of its rows are, if it is quantised."""
        return self.parameter.removesuffix("weight") + "scale"

    def num_bytes(self, dtype: str, quantize: Quantization | None = None) -> int:
        """In a stage's memory: a byte per element and a scale per row, or everything in ``dtype``."""
        if quantize and self.quantizable:
            return self.num_elements + self.shape[0] * DTYPE_BYTES[quantize.scale_dtype(dtype)]
        return self.num_elements * DTYPE_BYTES[dtype]


def layer_tensors(
    args: ModelArgs, layer: int, layout: Layout = Layout.HUGGING_FACE, with_experts: bool = True
) -> Iterator[TensorSpec]:
    """Attention of one layer, and its feed-forward network or its gate and experts."""
    names, here = NAMES[layout], f"layers.{layer}"
    q_width, kv_width = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
    interleaved = layout is Layout.MISTRAL
    yield TensorSpec(names.attention_norm.format(layer), f"{here}.attention_norm.weight", (args.dim,))
    yield TensorSpec(names.ffn_norm.format(layer), f"{here}.ffn_norm.weight", (args.dim,))
    for w, num_rows, first_row, rotary_heads in (
        ("wq", q_width, 0, args.n_heads),
        ("wk", kv_width, q_width, args.n_kv_heads),
        ("wv", kv_width, q_width + kv_width, 0),
    ):
        yield TensorSpec(
            names.attention[w].format(layer),
            f"{here}.attention.wqkv.weight",
            (num_rows, args.dim),
            rotary_heads if interleaved else 0,
            quantizable=True,
            first_row=first_row,
            parameter_rows=q_width + 2 * kv_width,
        )
    yield TensorSpec(names.attention["wo"].format(layer), f"{here}.attention.wo.weight", (args.dim, q_width), quantizable=True)
    if args.moe is None:
        dense = {w: name.format(layer) for w, name in names.feed_forward.items()}
        yield from _swiglu(args, dense, f"{here}.feed_forward")
        return
    gate_shape = (args.moe.num_experts, args.dim)
    yield TensorSpec(names.gate.format(layer), f"{here}.gate.scores.weight", gate_shape)
    for expert in range(args.moe.num_experts if with_experts else 0):
        yield from expert_tensors(args, layer, expert, layout)


def expert_tensors(args: ModelArgs, layer: int, expert: int, layout: Layout = Layout.HUGGING_FACE) -> Iterator[TensorSpec]:
    """One expert of one layer."""
    prefix = NAMES[layout].expert.format(layer, expert)
    own = {w: f"{prefix}.{w}.weight" for w in ("w1", "w2", "w3")}
    yield from _swiglu(args, own, f"experts.layers.{layer}.{expert}")


def _swiglu(args: ModelArgs, names: dict[str, str], parameter: str) -> Iterator[TensorSpec]:
    for w, first_row in (("w1", 0), ("w3", args.hidden_dim)):
        yield TensorSpec(
            names[w],
            f"{parameter}.w13.weight",
            (args.hidden_dim, args.dim),
            quantizable=True,
            first_row=first_row,
            parameter_rows=2 * args.hidden_dim,
        )
    yield TensorSpec(names["w2"], f"{parameter}.w2.weight", (args.dim, args.hidden_dim), quantizable=True)


def stage_tensors(
    args: ModelArgs, layers: range, layout: Layout = Layout.HUGGING_FACE, with_experts: bool = True
) -> Iterator[TensorSpec]:
    """Everything the stage with these global layers reads."""
    if layers.start == 0:
        yield embedding_tensor(args, layout)
    for layer in layers:
        yield from layer_tensors(args, layer, layout, with_experts)
    if layers.stop == args.n_layers:
        yield from head_tensors(args, layout)


def tensors_of_experts(args: ModelArgs, held: Iterable[ExpertId], layout: Layout = Layout.HUGGING_FACE) -> Iterator[TensorSpec]:
    """Everything an actor with these experts reads."""
    for layer, expert in held:
        yield from expert_tensors(args, layer, expert, layout)


def embedding_tensor(args: ModelArgs, layout: Layout = Layout.HUGGING_FACE) -> TensorSpec:
    return TensorSpec(NAMES[layout].embedding, "tok_embeddings.weight", (args.vocab_size, args.dim))


def head_tensors(args: ModelArgs, layout: Layout = Layout.HUGGING_FACE) -> Iterator[TensorSpec]:
    names = NAMES[layout]
    yield TensorSpec(names.norm, "norm.weight", (args.dim,))
    head = names.embedding if args.tied_embeddings else names.head
    yield TensorSpec(head, "output.weight", (args.vocab_size, args.dim), quantizable=True)


def largest_first(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """The order to load in: a tensor's source is in memory beside it for a moment, and must not come on top of all the others.

    Sizes 1, 4, 2, each with its source: 1+1, 5+4, 7+2, so 9 at most; largest first 4+4, 6+2, 7+1, so 8.
    """
    return sorted(specs, key=lambda spec: spec.num_elements, reverse=True)
