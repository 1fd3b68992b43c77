"""Which tensors of a Hugging Face checkpoint a stage owns, and which parameter each becomes.

Pure arithmetic on the model's geometry: no torch, so that a plan can be made
and a checkpoint checked without loading anything.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from tramontane.proto.model_args import ModelArgs

EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """``name`` in the checkpoint, ``parameter`` in ``StageModel``, and the shape of both."""

    name: str
    parameter: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


def layer_tensors(args: ModelArgs, layer: int) -> Iterator[TensorSpec]:
    here, there = f"layers.{layer}", f"model.layers.{layer}"
    q_width, kv_width = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
    yield TensorSpec(f"{there}.input_layernorm.weight", f"{here}.attention_norm.weight", (args.dim,))
    yield TensorSpec(f"{there}.post_attention_layernorm.weight", f"{here}.ffn_norm.weight", (args.dim,))
    yield TensorSpec(f"{there}.self_attn.q_proj.weight", f"{here}.attention.wq.weight", (q_width, args.dim))
    yield TensorSpec(f"{there}.self_attn.k_proj.weight", f"{here}.attention.wk.weight", (kv_width, args.dim))
    yield TensorSpec(f"{there}.self_attn.v_proj.weight", f"{here}.attention.wv.weight", (kv_width, args.dim))
    yield TensorSpec(f"{there}.self_attn.o_proj.weight", f"{here}.attention.wo.weight", (args.dim, q_width))
    if args.moe is None:
        names = {"w1": "mlp.gate_proj", "w2": "mlp.down_proj", "w3": "mlp.up_proj"}
        yield from _swiglu(args, {w: f"{there}.{name}" for w, name in names.items()}, f"{here}.feed_forward")
        return
    gate_shape = (args.moe.num_experts, args.dim)
    yield TensorSpec(f"{there}.block_sparse_moe.gate.weight", f"{here}.gate.scores.weight", gate_shape)
    for expert in range(args.moe.num_experts):
        prefix = f"{there}.block_sparse_moe.experts.{expert}"
        yield from _swiglu(args, {w: f"{prefix}.{w}" for w in ("w1", "w2", "w3")}, f"experts.layers.{layer}.{expert}")


def _swiglu(args: ModelArgs, names: dict[str, str], parameter: str) -> Iterator[TensorSpec]:
    up, down = (args.hidden_dim, args.dim), (args.dim, args.hidden_dim)
    for w, shape in (("w1", up), ("w2", down), ("w3", up)):
        yield TensorSpec(f"{names[w]}.weight", f"{parameter}.{w}.weight", shape)


def stage_tensors(args: ModelArgs, layers: range) -> Iterator[TensorSpec]:
    """Everything the stage with these global layers reads."""
    if layers.start == 0:
        yield TensorSpec(EMBEDDING, "tok_embeddings.weight", (args.vocab_size, args.dim))
    for layer in layers:
        yield from layer_tensors(args, layer)
    if layers.stop == args.n_layers:
        head = EMBEDDING if args.tied_embeddings else "lm_head.weight"
        yield TensorSpec("model.norm.weight", "norm.weight", (args.dim,))
        yield TensorSpec(head, "output.weight", (args.vocab_size, args.dim))
