"""Geometries of published models, by name: for plans, random checkpoints and benchmarks."""

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from types import MappingProxyType

from tramontane.proto.errors import ConfigError, did_you_mean
from tramontane.proto.model_args import (
    GateScores,
    LatentArgs,
    ModelArgs,
    MoeArgs,
    SparseArgs,
    YarnScaling,
    check_sizes,
)
from tramontane.proto.weight_format import Quantization

_7B_V1 = ModelArgs(
    dim=4096,
    n_layers=32,
    head_dim=128,
    hidden_dim=14336,
    n_heads=32,
    n_kv_heads=8,
    norm_eps=1e-5,
    vocab_size=32_000,
    rope_theta=10_000.0,
    max_seq_len=32_768,
    windows=(4096,) * 32,
    eos_token_ids=(2,),
)
_7B_V2 = replace(_7B_V1, rope_theta=1e6, windows=(None,) * 32)

_FULL = (None,)  # a window for each layer that attends to all positions
_24B = replace(
    _7B_V1,
    dim=5120,
    n_layers=40,
    hidden_dim=32_768,
    vocab_size=131_072,
    rope_theta=1e8,
    windows=_FULL * 40,
)
_24B_128K = replace(_24B, rope_theta=1e9, max_seq_len=131_072)
_123B = replace(
    _7B_V2,
    dim=12_288,
    n_layers=88,
    hidden_dim=28_672,
    n_heads=96,
    vocab_size=32_768,
    max_seq_len=131_072,
    windows=_FULL * 88,
)
_MINISTRAL_3 = replace(
    _7B_V2,
    n_layers=34,
    vocab_size=131_072,
    max_seq_len=262_144,
    windows=_FULL * 34,
    rope_scaling=YarnScaling(factor=16.0, original_max_seq_len=16_384, llama4_beta=0.1),
    quantization=Quantization.FP8,
)
# The magnitude of YaRN is applied: params.json of both says apply_scale, config.json an
# mscale_all_dim of 0.
_YARN_64 = YarnScaling(
    factor=64.0, original_max_seq_len=4096, beta_fast=4.0, attention_factor=0.1 * math.log(64.0) + 1
)
_123B_YARN = replace(
    _123B,
    vocab_size=131_072,
    max_seq_len=262_144,
    rope_scaling=_YARN_64,
    quantization=Quantization.FP8,
)

_LATENT_GATE = MoeArgs(
    num_experts=128,
    num_experts_per_tok=4,
    expert_dim=2048,
    n_shared_experts=1,
    scores=GateScores.SOFTMAX,
)
_SMALL_4 = ModelArgs(
    dim=4096,
    n_layers=36,
    head_dim=320,
    hidden_dim=12_288,
    n_heads=32,
    n_kv_heads=1,
    norm_eps=1e-6,
    vocab_size=131_072,
    rope_theta=10_000.0,
    max_seq_len=1_048_576,
    windows=_FULL * 36,
    moe=_LATENT_GATE,
    eos_token_ids=(2,),
    rope_scaling=YarnScaling(factor=128.0, original_max_seq_len=8192, llama4_beta=0.1),
    latent=LatentArgs(
        q_lora_rank=1024, kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=128
    ),
    quantization=Quantization.FP8,
)

# The defaults of transformers' configuration: every fourth layer has no rotary embedding, and every
# layer has its own indexer.
_LARGE_4 = replace(
    _SMALL_4,
    dim=6144,
    n_layers=72,
    head_dim=576,
    hidden_dim=24_576,
    n_heads=64,
    norm_eps=1e-5,
    vocab_size=204_800,
    rope_theta=1e4,
    max_seq_len=1_048_576,
    windows=_FULL * 72,
    moe=replace(_LATENT_GATE, expert_dim=6144, first_k_dense_replace=1, float32_gate=True),
    rope_scaling=YarnScaling(factor=2048.0, original_max_seq_len=512),
    latent=LatentArgs(
        q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=128
    ),
    sparse=SparseArgs(
        rope_layers=(True, True, True, False) * 18,
        kv_source_layers=tuple(range(72)),
        index_source_layers=tuple(range(72)),
        index_n_heads=32,
        index_head_dim=128,
        index_topk=2048,
    ),
    final_logit_softcapping=30.0,
    quantization=None,
)

# Language models. Models since Mistral Small 3.1 are published with a vision encoder, which is not
# counted here.
PRESETS: Mapping[str, ModelArgs] = MappingProxyType(
    {
        "mistral-7b-v0.1": _7B_V1,
        "mistral-7b-v0.2": _7B_V2,
        "mistral-7b-v0.3": replace(_7B_V2, vocab_size=32_768),
        "mixtral-8x7b": replace(_7B_V2, moe=MoeArgs(num_experts=8, num_experts_per_tok=2)),
        "mixtral-8x22b": replace(
            _7B_V2,
            dim=6144,
            n_layers=56,
            hidden_dim=16_384,
            n_heads=48,
            max_seq_len=65_536,
            windows=(None,) * 56,
            moe=MoeArgs(num_experts=8, num_experts_per_tok=2),
        ),
        "mistral-nemo-12b": replace(
            _7B_V2,
            dim=5120,
            n_layers=40,
            vocab_size=131_072,
            max_seq_len=128_000,
            windows=(None,) * 40,
        ),
        "ministral-8b": replace(
            _7B_V2,
            n_layers=36,
            hidden_dim=12_288,
            vocab_size=131_072,
            rope_theta=1e8,
            max_seq_len=131_072,
            windows=(None, 32_768, 32_768, 32_768) * 9,
        ),
        "codestral-22b": replace(
            _7B_V2,
            dim=6144,
            n_layers=56,
            hidden_dim=16_384,
            n_heads=48,
            vocab_size=32_768,
            windows=_FULL * 56,
        ),
        "mistral-large-2-123b": _123B,
        "mistral-small-24b": _24B,
        "mistral-small-3.1-24b": _24B_128K,
        "mistral-small-3.2-24b": _24B_128K,
        "devstral-small-24b": _24B_128K,
        "ministral-3-3b": replace(
            _MINISTRAL_3,
            dim=3072,
            n_layers=26,
            hidden_dim=9216,
            windows=_FULL * 26,
            tied_embeddings=True,
        ),
        "ministral-3-8b": _MINISTRAL_3,
        "ministral-3-14b": replace(
            _MINISTRAL_3,
            dim=5120,
            n_layers=40,
            hidden_dim=16_384,
            windows=_FULL * 40,
            rope_theta=1e9,
        ),
        "devstral-small-2-24b": replace(
            _24B,
            max_seq_len=393_216,
            rope_scaling=YarnScaling(factor=48.0, original_max_seq_len=8192, llama4_beta=0.1),
            quantization=Quantization.FP8,
        ),
        "devstral-2-123b": _123B_YARN,
        "mistral-medium-3.5-128b": _123B_YARN,
        "mistral-small-4-119b": _SMALL_4,
        "mistral-large-3-675b": replace(
            _SMALL_4,
            dim=7168,
            n_layers=61,
            head_dim=576,
            hidden_dim=16_384,
            n_heads=128,
            max_seq_len=294_912,
            windows=_FULL * 61,
            moe=replace(_LATENT_GATE, expert_dim=4096, first_k_dense_replace=3),
            rope_scaling=YarnScaling(factor=36.0, original_max_seq_len=8192, llama4_beta=0.1),
            latent=LatentArgs(
                q_lora_rank=1536,
                kv_lora_rank=512,
                qk_nope_head_dim=128,
                qk_rope_head_dim=64,
                v_head_dim=128,
            ),
        ),
        "mistral-large-4-1t": _LARGE_4,
    }
)


def preset(name: str) -> ModelArgs:
    """Return a published geometry by name. Raises ConfigError, with the known names, if it does not
    exist or cannot be served.
    """
    if name not in PRESETS:
        likely = did_you_mean(name.lower(), PRESETS)
        raise ConfigError(
            f"{name!r} is no published geometry{likely}; there are {', '.join(PRESETS)}"
        )
    return PRESETS[name]


DEFAULT_CONTEXT_LEN = 32_768  # the shortest of the models published in Mistral's layout


def context_len(args: ModelArgs, *stated: int) -> int:
    """Return the context length of a model: the largest value in its files, or YaRN's factor times
    the original context.

    Without any value it is the context length of the published model with these sizes, or 32,768.
    The same applies if layers have different windows and the stated value does not exceed them:
    programs that support one window state it as the context. The files of Ministral 8B state
    32,768, its window. The files of Yarn-Mistral 128k state 32,768, too, and 16 * 8,192 = 131,072.
    """
    for length in stated:
        check_sizes({"max_seq_len": length})
    yarn = (
        int(args.rope_scaling.factor * args.rope_scaling.original_max_seq_len)
        if args.rope_scaling
        else 0
    )
    longest = max(*stated, yarn, 0)
    window = max(filter(None, args.windows)) if len(args.window_classes) > 1 else 0
    return (
        longest
        if longest > window
        else max(longest, _published_context_len(args) or 0) or DEFAULT_CONTEXT_LEN
    )


def _published_context_len(args: ModelArgs) -> int | None:
    """Return the context of the published model with these sizes, the shortest of several;
    fine-tunes change the vocabulary.
    """
    sizes = ("dim", "n_layers", "head_dim", "hidden_dim", "n_heads", "n_kv_heads")
    known = [
        each
        for each in PRESETS.values()
        if all(getattr(each, name) == getattr(args, name) for name in sizes)
    ]
    known = [
        each
        for each in known
        if (each.moe and each.moe.num_experts) == (args.moe and args.moe.num_experts)
    ]
    exact = [
        each for each in known if (each.rope_theta, each.windows) == (args.rope_theta, args.windows)
    ]
    return min((each.max_seq_len for each in exact or known), default=None)


def tiny_variant(args: ModelArgs) -> ModelArgs:
    """Shrink a geometry with the same ratios: 1/8 of the heads, of their width and of the layers,
    1/256 of the windows.

    The context and YaRN's original one become 1/64.

    Mistral 7B: 4 query heads and 1 key head of 16, dim 64, hidden_dim 224, 4 layers, window 16,
    context 512.
    """
    n_layers = args.n_layers // 8
    windows = (None if window is None else window // 256 for window in args.windows[:n_layers])
    latent = args.latent and LatentArgs(
        **{key: width and width // 8 for key, width in asdict(args.latent).items()}
    )
    sparse = args.sparse and _tiny_sparse(args.sparse, n_layers)
    yarn = args.rope_scaling
    return replace(
        args,
        dim=args.dim // 64,
        n_layers=n_layers,
        head_dim=args.head_dim // 8,
        hidden_dim=args.hidden_dim // 64,
        n_heads=args.n_heads // 8,
        n_kv_heads=max(args.n_kv_heads // 8, 1),
        vocab_size=args.vocab_size // 32,
        max_seq_len=args.max_seq_len // 64,
        windows=tuple(windows),
        moe=args.moe and replace(args.moe, expert_dim=args.moe.expert_dim // 64),
        rope_scaling=yarn and replace(yarn, original_max_seq_len=yarn.original_max_seq_len // 64),
        latent=latent,
        sparse=sparse,
    )


def _tiny_sparse(sparse: SparseArgs, n_layers: int) -> SparseArgs:
    """Shrink the indexer: 1/4 of the heads, 1/8 of their width, 1/64 of the keys, like the
    context.
    """
    names = ("rope_layers", "kv_source_layers", "index_source_layers")
    return replace(
        sparse,
        **{name: getattr(sparse, name)[:n_layers] for name in names},
        index_n_heads=sparse.index_n_heads // 4,
        index_head_dim=sparse.index_head_dim // 8,
        index_topk=sparse.index_topk // 64,
    )
