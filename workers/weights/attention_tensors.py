"""Tensors of a layer's attention, by its kind."""

from collections.abc import Iterator
from dataclasses import replace

from tramontane.proto.model_args import ModelArgs, SparseArgs
from tramontane.proto.model_folder import Layout
from tramontane.workers.weights.tensor_names import names_of
from tramontane.workers.weights.tensor_spec import TensorSpec, matrix_spec


def attention_tensors(args: ModelArgs, layer: int, layout: Layout) -> Iterator[TensorSpec]:
    """Yield the tensors of the attention that the model has, of one layer."""
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
