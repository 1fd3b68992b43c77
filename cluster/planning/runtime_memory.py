"""The GPU memory of a stage's process besides weights and cache. Pure arithmetic.

Memory other than tensors was measured on one H100 on 28 November 2026: two stages of a model of 668
KiB took 820 and 840 MiB each. A stage with half of Mistral 7B took 2.73 GiB besides weights and
cache after 64 requests, in micro-batches of 4096 tokens.

CUDA's own memory for a graph is an estimate.

Shape letters: D model width, F feed-forward width, H query heads, k experts of a token, V
vocabulary.
"""

from dataclasses import dataclass

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.weight_format import DTYPE_BYTES, Quantization, WeightFormat

MIB = 2**20
# memory of a process for CUDA's context, the code of kernels, and torch itself
CONTEXT_BYTES = 800 * MIB
# workspace of cuBLAS on Hopper for each of two streams: steps run on one stream, graphs are
# recorded on the other
WORKSPACE_BYTES = 32 * MIB
NUM_STREAMS = 2
# Torch's allocator holds 4.5 times the activations of a step in the end, as measured, because
# micro-batches differ in size.
HELD_TIMES, HELD_SHARE = 9, 2
LOGIT_BYTES = 4  # in float32
# memory for a logit while penalties are applied to its row; the kernel that samples needs at most
# two copies
SAMPLING_BYTES = 28
# memory for a logit that is sorted: for log-probabilities, or by PyTorch where no kernel samples
SORTING_BYTES = 48
SORTED_LOGITS = 2**22  # logits that are sorted at a time
COUNT_BYTES = 5  # per token of the vocabulary, for the counts of a sequence with penalties
FIRST_COUNTS = 4  # rows of counts at first; their number doubles
BLOCK_NUMBERS = 2**24  # numbers of a quantized matrix that are converted at a time for many tokens
# vectors of unfinished results of attention, in float32; each vector has two numbers more
KEPT_BYTES = 64 * MIB
GRAPH_BYTES = 2**16  # CUDA's own memory for a graph of some ten kernels
# the most tokens of a step of piecewise graphs; sizes of steps are multiples of the second number
MAX_PIECE_TOKENS, PIECE_STEP = 512, 64


@dataclass(frozen=True, slots=True)
class RuntimeMemory:
    """Bytes of one stage. ``graphs``: all CUDA graphs. ``logits``: logits and sampling in the last
    stage.

    ``workspaces``: the workspaces of cuBLAS, unfinished results of attention, and converted blocks
    of quantized matrices.
    """

    context: int
    workspaces: int
    activations: int
    graphs: int
    logits: int

    @property
    def total(self) -> int:
        """The sum of all."""
        return self.context + self.workspaces + self.activations + self.graphs + self.logits

    def as_data(self) -> dict[str, int]:
        """Return the bytes by name, and their sum, for JSON."""
        names = ("context", "workspaces", "activations", "graphs", "logits", "total")
        return {name: getattr(self, name) for name in names}


def config_runtime(
    config: EngineConfig,
    args: ModelArgs,
    dtype: str,
    num_seqs: int,
    num_tokens: int,
    *,
    experts_inside: bool = True,
) -> RuntimeMemory:
    """Return ``gpu_runtime`` with an engine's settings, up to ``num_seqs`` sequences and
    micro-batches of ``num_tokens``.
    """
    # Decodes and their drafts are ``num_seqs`` rows at most, and each chunk may end a prompt.
    num_sampled = num_seqs * (2 if config.speculative_config else 1)
    is_invariant = config.batch_invariant is True
    return gpu_runtime(
        args,
        dtype,
        num_tokens,
        num_seqs,
        num_sampled=num_sampled,
        experts_inside=experts_inside,
        batch_invariant=is_invariant,
        quantize=config.quantize,
    )


def gpu_runtime(
    args: ModelArgs,
    dtype: str,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    *,
    num_sampled: int,
    experts_inside: bool = True,
    batch_invariant: bool = False,
    quantize: Quantization | None = None,
) -> RuntimeMemory:
    """Return the memory that a stage of this model needs. Any stage may be the last one, which
    samples up to ``num_sampled`` tokens.

    Unfinished results of attention and converted blocks are counted twice: graphs have memory of
    their own.

    Mistral 7B in bfloat16, micro-batches of 4096 tokens, 128 sequences: a token has 3 x 4096 + 3 x
    14336 = 55296 numbers at once, which are 432 MiB for all tokens, held 4.5 times; graphs of 128
    tokens have 13.5 MiB, and their logits 15.6 MiB. Piecewise graphs take 84.5 MiB: see
    ``_pieces``.
    """
    token_bytes = widest_activations(args, experts_inside) * DTYPE_BYTES[dtype]
    graph_rows, kept = padded_rows(max_num_seqs), kept_bytes(args, batch_invariant)
    if WeightFormat.of(args, dtype, quantize).quantize is not None:
        kept += BLOCK_NUMBERS * DTYPE_BYTES[dtype]
    num_logits = min(num_sampled, max_num_batched_tokens) * args.vocab_size
    return RuntimeMemory(
        context=CONTEXT_BYTES,
        workspaces=NUM_STREAMS * WORKSPACE_BYTES + kept,
        activations=token_bytes * max_num_batched_tokens * HELD_TIMES // HELD_SHARE,
        graphs=graph_rows * (token_bytes + args.vocab_size * LOGIT_BYTES)
        + kept
        + (
            _pieces(args, dtype, max_num_batched_tokens, token_bytes)
            if experts_inside and not args.sparse
            else 0
        ),
        logits=num_logits * (LOGIT_BYTES + SAMPLING_BYTES)
        + count_rows(max_num_seqs) * args.vocab_size * COUNT_BYTES
        + SORTED_LOGITS * (LOGIT_BYTES + SORTING_BYTES),
    )


def _pieces(args: ModelArgs, dtype: str, max_num_batched_tokens: int, token_bytes: int) -> int:
    """Return the bytes of piecewise graphs of a stage with all layers.

    Mistral 7B in bfloat16: 8 sizes of 33 graphs are 16.5 MiB. 512 tokens have 54 MiB within a
    piece, and 14 MiB between pieces: hidden states, queries, keys, values, the result of attention
    (4096 + 4096 + 2 x 1024 + 4096 numbers) and two numbers of 8 bytes.
    """
    num_rows, num_sizes = piece_sizes(max_num_batched_tokens)
    values = args.latent.kv_lora_rank if args.latent else args.head_dim
    between = (
        args.dim
        + (args.n_heads + args.n_kv_heads * (1 if args.latent else 2)) * args.head_dim
        + args.n_heads * values
    )
    return (
        num_rows * (token_bytes + between * DTYPE_BYTES[dtype] + 2 * 8)
        + num_sizes * (args.n_layers + 1) * GRAPH_BYTES
    )


def piece_sizes(max_num_batched_tokens: int) -> tuple[int, int]:
    """Return the most tokens of a step of piecewise graphs, with padding, and the number of sizes:
    see ``piecewise_graphs``.

    100 tokens are padded to 128, the second size.
    """
    num_sizes = -(-min(max_num_batched_tokens, MAX_PIECE_TOKENS) // PIECE_STEP)
    return num_sizes * PIECE_STEP, num_sizes


def kept_bytes(args: ModelArgs, batch_invariant: bool) -> int:
    """Return the most bytes of unfinished results of attention, where programs share the keys of a
    token: see KEPT_BYTES.

    Other kernels keep at most some MiB. Mistral 7B: 65 MiB with batch invariance, as vectors of 128
    have 130 numbers.
    """
    if args.latent is None and not batch_invariant:
        return 0
    width = args.head_dim if args.latent is None else args.latent.kv_lora_rank
    return KEPT_BYTES * (width + 2) // width


def count_rows(num_seqs: int) -> int:
    """Return the rows that counts of tokens grow to: 4 for 3 sequences, 8 for 5, 256 for 129."""
    return max(FIRST_COUNTS, 1 << (num_seqs - 1).bit_length())


def padded_rows(num_seqs: int) -> int:
    """Return the number of decodes of the largest CUDA graph, a multiple of 16 (see
    ``cuda_graphs``): 128 for 128 sequences, 144 for 129.
    """
    return -(-num_seqs // 16) * 16


def widest_activations(args: ModelArgs, experts_inside: bool) -> int:
    """Return the most numbers that one token has at once in any layer: hidden states, and the
    numbers of attention or of the feed-forward part.

    Each part has its inputs, its intermediate results and its outputs.
    """
    dense = 3 * args.hidden_dim
    if args.moe is not None:
        chosen = (
            args.moe.num_experts_per_tok * (3 * args.dim + 3 * args.expert_dim)
            if experts_inside
            else 0
        )
        dense = max(
            dense * (args.moe.first_k_dense_replace > 0),
            chosen + 3 * args.moe.n_shared_experts * args.expert_dim,
        )
    return 3 * args.dim + max(dense, _attention_numbers(args))


def _attention_numbers(args: ModelArgs) -> int:
    """Return the numbers of queries, keys and values, of the same after rotation, and of the
    result. Mistral 7B: 15360.
    """
    if args.latent is None:
        return (3 * args.n_heads + 3 * args.n_kv_heads) * args.head_dim
    latent = args.latent
    return (
        args.n_heads * (latent.qk_head_dim + latent.kv_lora_rank + 2 * latent.cached_dim)
        + 2 * latent.cached_dim
    )
