"""What a stage's process takes of a GPU besides weights and cache. Pure arithmetic.

What is not the size of a tensor was measured on one H100 on 28 November 2026: two stages of a model of 668 KiB took 820 and
840 MiB each. A stage with half of Mistral 7B took 2.73 GiB besides weights and cache after 64 requests, in micro-batches of
4096 tokens.

What CUDA keeps for a graph is an estimate.

Shape letters: D model width, F feed-forward width, H query heads, k experts of a token, V vocabulary.
"""

from dataclasses import dataclass

from tramontane.cluster.config.engine_config import EngineConfig
from tramontane.proto.model_args import DTYPE_BYTES, ModelArgs

MIB = 2**20
CONTEXT_BYTES = 800 * MIB  # of a process: CUDA's context, the code of kernels, and what torch keeps for itself
WORKSPACE_BYTES = 32 * MIB  # of cuBLAS on Hopper, for each stream: that of the steps, and that on which graphs are recorded
NUM_STREAMS = 2
# Of a step's activations, what torch's allocator holds in the end, as micro-batches differ in size: 4.5 times, as measured.
HELD_TIMES, HELD_SHARE = 9, 2
LOGIT_BYTES = 4  # in float32
SAMPLING_BYTES = 48  # of a logit while its row is sampled, where PyTorch sorts it: its weight, its token and sums; or scored
GRAPH_BYTES = 2**16  # of CUDA's own for a graph of some ten kernels
MAX_PIECE_TOKENS, PIECE_STEP = 512, 64  # the most tokens of a step of graphs of pieces, and of what sizes are multiples
PROMPT_LOGITS = 2**22  # of prompts, computed at a time where their log-probabilities are asked for


@dataclass(frozen=True, slots=True)
class RuntimeMemory:
    """Bytes of one stage. ``graphs`` is the memory of all CUDA graphs; ``logits`` is what the last stage needs."""

    context: int
    workspaces: int
    activations: int
    graphs: int
    logits: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.context + self.workspaces + self.activations + self.graphs + self.logits

    def as_data(self) -> dict[str, int]:
        """Return them for JSON."""
        names = ("context", "workspaces", "activations", "graphs", "logits", "total")
        return {name: getattr(self, name) for name in names}


def config_runtime(
    config: EngineConfig, args: ModelArgs, dtype: str, num_seqs: int, num_tokens: int, *, experts_inside: bool = True
) -> RuntimeMemory:
    """Return ``gpu_runtime`` with an engine's settings, up to ``num_seqs`` sequences and micro-batches of ``num_tokens``."""
    drafts = config.speculative_config
    num_sampled = num_seqs * (1 + (drafts.num_speculative_tokens if drafts else 0))
    return gpu_runtime(args, dtype, num_tokens, num_seqs, num_sampled=num_sampled, experts_inside=experts_inside)


def gpu_runtime(
    args: ModelArgs,
    dtype: str,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    *,
    num_sampled: int,
    experts_inside: bool = True,
) -> RuntimeMemory:
    """Return what a stage of this model needs; any stage may be the last one, which samples up to ``num_sampled`` tokens.

    Mistral 7B in bfloat16, micro-batches of 4096 tokens, 128 sequences: a token has 3 x 4096 + 3 x 14336 = 55296 numbers at
    once, which are 432 MiB of all tokens, held 4.5 times; graphs of 128 tokens have 13.5 MiB, and their logits 15.6. Graphs of
    pieces take 84.5 MiB, see ``_pieces``.
    """
    token_bytes = widest_activations(args, experts_inside) * DTYPE_BYTES[dtype]
    graph_rows = padded_rows(max_num_seqs)
    num_logits = min(num_sampled, max_num_batched_tokens) * args.vocab_size
    return RuntimeMemory(
        context=CONTEXT_BYTES,
        workspaces=NUM_STREAMS * WORKSPACE_BYTES,
        activations=token_bytes * max_num_batched_tokens * HELD_TIMES // HELD_SHARE,
        graphs=graph_rows * (token_bytes + args.vocab_size * LOGIT_BYTES)
        + (_pieces(args, dtype, max_num_batched_tokens, token_bytes) if experts_inside and not args.sparse else 0),
        logits=num_logits * (LOGIT_BYTES + SAMPLING_BYTES) + PROMPT_LOGITS * (LOGIT_BYTES + SAMPLING_BYTES),
    )


def _pieces(args: ModelArgs, dtype: str, max_num_batched_tokens: int, token_bytes: int) -> int:
    """Return the bytes of graphs of pieces, of a stage with all layers.

    Mistral 7B in bfloat16: 8 sizes of 33 graphs are 16.5 MiB. 512 tokens have 54 MiB within a piece, and 14 between pieces:
    hidden states, queries, keys, values, what attention returns (4096 + 4096 + 2 x 1024 + 4096 numbers) and two of 8 bytes.
    """
    num_rows, num_sizes = piece_sizes(max_num_batched_tokens)
    values = args.latent.kv_lora_rank if args.latent else args.head_dim
    between = args.dim + (args.n_heads + args.n_kv_heads * (1 if args.latent else 2)) * args.head_dim + args.n_heads * values
    return num_rows * (token_bytes + between * DTYPE_BYTES[dtype] + 2 * 8) + num_sizes * (args.n_layers + 1) * GRAPH_BYTES


def piece_sizes(max_num_batched_tokens: int) -> tuple[int, int]:
    """Return the most tokens of a step of pieces, with padding, and how many sizes there are; see ``piecewise_graphs``.

    100 tokens are padded to 128, the second size.
    """
    num_sizes = -(-min(max_num_batched_tokens, MAX_PIECE_TOKENS) // PIECE_STEP)
    return num_sizes * PIECE_STEP, num_sizes


def padded_rows(num_seqs: int) -> int:
    """Return the most decodes of a CUDA graph: a multiple of 16, or 8 at least, of 9 or more; see ``cuda_graphs``."""
    return -(-num_seqs // 16) * 16


def widest_activations(args: ModelArgs, experts_inside: bool) -> int:
    """Return how many numbers one token has at once, at most, in any layer: hidden states, and those of one of its parts.

    Each part has what it was given, what it computes, and what it makes of that.
    """
    dense = 3 * args.hidden_dim
    if args.moe is not None:
        chosen = args.moe.num_experts_per_tok * (3 * args.dim + 3 * args.expert_dim) if experts_inside else 0
        dense = max(dense * (args.moe.first_k_dense_replace > 0), chosen + 3 * args.moe.n_shared_experts * args.expert_dim)
    return 3 * args.dim + max(dense, _attention_numbers(args))


def _attention_numbers(args: ModelArgs) -> int:
    """Return the numbers of queries, keys and values, once more rotated, and of the result. Mistral 7B: 15360."""
    if args.latent is None:
        return (3 * args.n_heads + 3 * args.n_kv_heads) * args.head_dim
    latent = args.latent
    return args.n_heads * (latent.qk_head_dim + latent.kv_lora_rank + 2 * latent.cached_dim) + 2 * latent.cached_dim
