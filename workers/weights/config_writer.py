"""Writers of checkpoint configurations, in either layout: the inverse of the readers in
``proto``.
"""

import math
from dataclasses import asdict
from typing import Any

from tramontane.proto.errors import ConfigError
from tramontane.proto.hf_config import LARGE_4, LATENT, MIXTRAL
from tramontane.proto.model_args import ModelArgs, MoeArgs, SparseArgs, YarnScaling

LARGE_4_ROPE_KEYS = frozenset(
    {
        "rope_type",
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
    }
)
# where they are not the name of the class in lower case
MODEL_TYPES = {"DeepseekV3ForCausalLM": "deepseek_v3"}


def to_hf_config(args: ModelArgs) -> dict[str, Any]:
    """Return the configuration of ``args`` as transformers 5 writes it."""
    architecture = _architecture(args)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": args.rope_theta}
    if (scaling := args.rope_scaling) is not None:
        rope |= {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "attention_factor": scaling.attention_factor,
            "llama_4_scaling_beta": scaling.llama4_beta,
        }
        if args.latent:
            rope |= {"mscale_all_dim": _mscale_all_dim(scaling)}
            rope |= {
                "partial_rotary_factor": args.latent.qk_rope_head_dim / args.latent.qk_head_dim
            }
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": MODEL_TYPES.get(
            architecture, architecture.removesuffix("ForCausalLM").lower()
        ),
        "hidden_size": args.dim,
        "num_hidden_layers": args.n_layers,
        "head_dim": args.head_dim,
        "intermediate_size": args.hidden_dim,
        "hidden_act": "silu",
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_kv_heads,
        "rms_norm_eps": args.norm_eps,
        "vocab_size": args.vocab_size,
        "rope_parameters": rope,
        "max_position_embeddings": args.max_seq_len,
        "sliding_window": max((w for w in args.windows if w), default=None),
        "tie_word_embeddings": args.tied_embeddings,
        "dtype": args.dtype,
        "bos_token_id": 1,
        "eos_token_id": list(args.eos_token_ids) or None,
    }
    if args.moe:
        config |= (
            _hf_experts(args.moe) if args.latent else {"num_local_experts": args.moe.num_experts}
        )
        config["num_experts_per_tok"] = args.moe.num_experts_per_tok
    if args.latent:
        config |= asdict(args.latent)
        config |= {
            "head_dim": args.latent.qk_head_dim,
            "num_key_value_heads": args.n_heads,
            "rope_interleave": True,
        }
    if args.quantization:
        config["quantization_config"] = {
            "quant_method": args.quantization.value,
            "activation_scheme": "dynamic",
            "weight_block_size": None,
            "modules_to_not_convert": ["lm_head"],
        }
    if args.sparse:
        return _wrap_large_4(config, args, args.sparse)
    if len(args.window_classes) > 1:
        config["layer_types"] = [
            "full_attention" if w is None else "sliding_attention" for w in args.windows
        ]
    return config


def _wrap_large_4(config: dict[str, Any], args: ModelArgs, sparse: SparseArgs) -> dict[str, Any]:
    """Return the configuration of the only transformers class for such a model, which also has a
    vision encoder.
    """
    for key in (
        "architectures",
        "q_lora_rank",
        "norm_topk_prob",
        "rope_interleave",
        "sliding_window",
    ):
        del config[key]
    rope = {
        key: value for key, value in config["rope_parameters"].items() if key in LARGE_4_ROPE_KEYS
    }
    text = config | {
        "model_type": "mistral_large4_text",
        "rope_parameters": rope,
        "no_rope_layers": [int(has_rope) for has_rope in sparse.rope_layers],
        "kv_source_layers": list(sparse.kv_source_layers),
        "indexer_types": [
            "full" if source == n else "shared"
            for n, source in enumerate(sparse.index_source_layers)
        ],
        "index_n_heads": sparse.index_n_heads,
        "index_head_dim": sparse.index_head_dim,
        "index_topk": sparse.index_topk,
        "final_logit_softcapping": args.final_logit_softcapping,
    }
    wrapper = {
        "architectures": ["MistralLarge4ForConditionalGeneration"],
        "model_type": "mistral_large4",
        "text_config": text,
    }
    shared = ("tie_word_embeddings", "dtype", "eos_token_id", "quantization_config")
    return wrapper | {key: config[key] for key in shared if key in config}


def _hf_experts(moe: MoeArgs) -> dict[str, Any]:
    return {
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.n_shared_experts,
        "moe_intermediate_size": moe.expert_dim,
        "first_k_dense_replace": moe.first_k_dense_replace,
        "n_group": moe.n_group,
        "topk_group": moe.topk_group,
        "norm_topk_prob": moe.norm_topk_prob,
        "routed_scaling_factor": moe.routed_scaling_factor,
    }


def _mscale_all_dim(scaling: YarnScaling) -> float:
    """Return the weight for which ``score_factor`` is the square of YaRN's magnitude. 1.4852 ** 2
    with a factor of 128: 1.
    """
    return (
        (math.sqrt(scaling.score_factor) - 1) / (0.1 * math.log(scaling.factor))
        if scaling.factor > 1
        else 0.0
    )


def _architecture(args: ModelArgs) -> str:
    """Return the class of transformers that runs this geometry."""
    if args.sparse:
        return LARGE_4
    if args.latent:
        return next(
            name for name, scores in LATENT.items() if args.moe and args.moe.scores is scores
        )
    if args.moe:
        return MIXTRAL
    if args.rope_scaling:
        return "Ministral3ForCausalLM"
    return "MistralForCausalLM" if len(args.window_classes) == 1 else "MinistralForCausalLM"


def to_mistral_params(args: ModelArgs) -> dict[str, Any]:
    """Return the ``params.json`` of ``args``. Raises ConfigError if that cannot describe it."""
    if args.sparse:
        raise ConfigError(
            "Mistral's own layout does not describe sparse attention; use the layout of Hugging"
            " Face"
        )
    params: dict[str, Any] = {
        "dim": args.dim,
        "n_layers": args.n_layers,
        "head_dim": args.head_dim,
        "hidden_dim": args.hidden_dim,
        "n_heads": args.n_heads,
        "n_kv_heads": args.n_kv_heads,
        "norm_eps": args.norm_eps,
        "vocab_size": args.vocab_size,
        "rope_theta": args.rope_theta,
        "max_seq_len": args.max_seq_len,
        "tied_embeddings": args.tied_embeddings,
        "dtype": args.dtype,
    }
    if any(args.windows):
        params["sliding_window"] = (
            args.windows[0] if len(args.window_classes) == 1 else list(args.windows)
        )
    if args.moe:
        params["moe"] = {
            "num_experts": args.moe.num_experts,
            "num_experts_per_tok": args.moe.num_experts_per_tok,
        }
        params["moe"] |= _mistral_experts(args.moe) if args.latent else {}
    if args.latent:
        params |= asdict(args.latent) | {
            "head_dim": args.latent.qk_head_dim,
            "n_kv_heads": args.n_heads,
        }
    if args.quantization:
        params["quantization"] = {"qformat_weight": "fp8_e4m3", "qscheme_act": "NO_SCALES"}
    if (scaling := args.rope_scaling) is not None:
        params["yarn"] = {
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
            "beta": scaling.beta_fast,
            "alpha": scaling.beta_slow,
            "apply_scale": (scaling.attention_factor, scaling.score_factor) != (1.0, 1.0),
        }
        if scaling.llama4_beta:
            original = scaling.original_max_seq_len
            params["llama_4_scaling"] = {
                "original_max_position_embeddings": original,
                "beta": scaling.llama4_beta,
            }
    return params


def _mistral_experts(moe: MoeArgs) -> dict[str, Any]:
    return {
        "expert_hidden_dim": moe.expert_dim,
        "num_shared_experts": moe.n_shared_experts,
        "first_k_dense_replace": moe.first_k_dense_replace,
        "num_expert_groups": moe.n_group,
        "num_expert_groups_per_tok": moe.topk_group,
        "routed_scale": moe.routed_scaling_factor,
    }
