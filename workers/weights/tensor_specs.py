"""Tensors of a checkpoint that a stage or an expert actor owns, and the parameter that each
becomes.

Pure arithmetic on the model's geometry, without torch, so that plans and checks of checkpoints load
nothing.
"""

from collections.abc import Iterator
from dataclasses import replace

from tramontane.proto.model_args import GateScores, ModelArgs
from tramontane.proto.model_folder import Layout
from tramontane.workers.weights.attention_tensors import attention_tensors
from tramontane.workers.weights.tensor_names import names_of
from tramontane.workers.weights.tensor_spec import Stack, TensorSpec, matrix_spec


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
    """Yield what every stage has: factors of the rotary frequencies, if the model has them."""
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
