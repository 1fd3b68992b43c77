"""Configurations of the Mistral family as published, and of what other programs make of it, for
small folders without weights.

Where numbers come from: sizes are those of ``proto/presets.py``; spelling and remaining keys are
those that the configuration classes of transformers 4 and 5 write (``LEGACY`` and
``rope_parameters``), and for ``params.json`` what vLLM's reader of it names
(transformers_utils/configs/mistral.py). They are no copies of the published files, which were not
at hand, but for the list of layers of Ministral 3's FP8, and Large 3's (llm-compressor,
docs/key-models/mistral-large-3), AutoFP8's keys (quantize.py there), AutoAWQ's ``quant_config``,
AutoGPTQ's ``quantize_config`` (their READMEs) and modelopt's ``hf_quant_config.json``.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Configuration:
    """The files of a folder, and what is said of it: nothing where it can be loaded.

    Attributes:
        files: JSON files by name.
        refused: words of the refusal; "" if there is none.
        empty: names of files of which only the names count.
        twin: of ``params.json``: the configuration of the same model for transformers, which cannot
            read this file.
        expected: values that transformers' configuration does not derive, by name, with which ours
            are compared instead.
    """

    files: Mapping[str, Json]
    refused: str = ""
    empty: tuple[str, ...] = ()
    twin: str = ""
    expected: Mapping[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """Write the folder."""
        folder.mkdir()
        for name, content in self.files.items():
            (folder / name).write_text(json.dumps(content))
        for name in self.empty:
            (folder / name).touch()
        return folder


def _index(*names: str) -> dict[str, Any]:
    return {"metadata": {}, "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}


# ---- config.json

LEGACY = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
MIXTRAL = LEGACY | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
LARGE_SIZES = {
    "hidden_size": 12288,
    "intermediate_size": 28672,
    "num_attention_heads": 96,
    "num_hidden_layers": 88,
}
SIZES_24B = {
    "hidden_size": 5120,
    "intermediate_size": 32768,
    "num_hidden_layers": 40,
    "head_dim": 128,
    "vocab_size": 131072,
}
SIZES_22B = {
    "hidden_size": 6144,
    "intermediate_size": 16384,
    "num_attention_heads": 48,
    "num_hidden_layers": 56,
}
VISION = {
    "model_type": "pixtral",
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 1540,
}
YARN = {
    "rope_type": "yarn",
    "type": "yarn",
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
YARN |= {"llama_4_scaling_beta": 0.1}
# The list is that of Ministral 3 3B.
FP8 = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
FP8 |= {"modules_to_not_convert": ["vision_tower", "multi_modal_projector", "lm_head"]}
AUTO_FP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}


def _yarn(factor: float, original: int, theta: float = 1e6, **others: float) -> dict[str, Any]:
    return (
        YARN
        | {"rope_theta": theta, "factor": factor, "original_max_position_embeddings": original}
        | others
    )


def _text(model_type: str, **keys: Any) -> dict[str, Any]:  # JSON values
    """Return the text model's part of a wrapper, which has neither an architecture nor ids of its
    own.
    """
    plain = {
        key: LEGACY[key]
        for key in ("hidden_act", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")
    }
    return plain | {"model_type": model_type, "sliding_window": None} | keys


def _wrapper(text: Json, **keys: Any) -> dict[str, Any]:  # JSON values
    outer = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "dtype": "bfloat16",
    }
    return (
        outer | {"tie_word_embeddings": False, "text_config": text, "vision_config": VISION} | keys
    )


SMALL_3_1 = _text("mistral", **SIZES_24B, max_position_embeddings=131072, rope_theta=1e9)
MINISTRAL_3 = {"head_dim": 128, "vocab_size": 131072, "max_position_embeddings": 262144}
LATENT = {
    "rope_interleave": True,
    "n_routed_experts": 128,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "n_group": 1,
}
LATENT |= {
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
SMALL_4 = LATENT | {
    "kv_lora_rank": 256,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 64,
    "moe_intermediate_size": 2048,
}
SMALL_4 |= {
    "first_k_dense_replace": 0,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
}
SMALL_4 |= {
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": 131072,
    "max_position_embeddings": 1048576,
}
SMALL_4 |= {"rope_parameters": _yarn(128.0, 8192, 1e4, partial_rotary_factor=0.5)}
LARGE_3 = LATENT | {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "moe_intermediate_size": 4096,
}
LARGE_3 |= {
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 16384,
    "num_hidden_layers": 61,
}
LARGE_3 |= {
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 131072,
}
LARGE_3 |= {
    "max_position_embeddings": 294912,
    "rope_parameters": _yarn(36.0, 8192, 1e4, partial_rotary_factor=64 / 192),
}


def _config(*parts: Json, **keys: Any) -> Configuration:  # JSON values
    merged: dict[str, Any] = {}
    for part in parts:
        merged |= part
    return Configuration({"config.json": merged | keys})


MEDIUM_3_5 = _text(
    "ministral3", **LARGE_SIZES | {"num_attention_heads": 96}, head_dim=128, vocab_size=131072
)
MEDIUM_3_5 |= {"max_position_embeddings": 262144}
MEDIUM_3_5 |= {
    "rope_parameters": _yarn(
        64.0, 4096, beta_fast=4.0, mscale_all_dim=0.0, llama_4_scaling_beta=0.0
    )
}
GENERATION = {"bos_token_id": 1, "eos_token_id": 2}

# The file of Ministral 8B for transformers 4 has no layers of two kinds, and the shorter context.
MINISTRAL_8B = LEGACY | {
    "num_hidden_layers": 36,
    "intermediate_size": 12288,
    "head_dim": 128,
    "vocab_size": 131072,
}
MINISTRAL_8B |= {"rope_theta": 1e8, "sliding_window": 32768}
PARAMS = {
    "dim": 4096,
    "n_layers": 32,
    "head_dim": 128,
    "hidden_dim": 14336,
    "n_heads": 32,
    "n_kv_heads": 8,
    "norm_eps": 1e-5,
}
PARAMS_MINISTRAL_8B = PARAMS | {
    "n_layers": 36,
    "hidden_dim": 12288,
    "rope_theta": 1e8,
    "vocab_size": 131072,
}
PARAMS_MINISTRAL_8B |= {"_sliding_window": [None, 32768, 32768, 32768]}

HUGGING_FACE = {
    "mistral-7b-v0.1": _config(LEGACY, rope_theta=1e4, sliding_window=4096),
    "mistral-7b-v0.2": _config(LEGACY),
    "mistral-7b-v0.3": _config(LEGACY, vocab_size=32768),
    "mixtral-8x7b": _config(MIXTRAL),
    "mixtral-8x22b": _config(MIXTRAL, SIZES_22B, max_position_embeddings=65536),
    "mathstral-7b": _config(LEGACY, vocab_size=32768, head_dim=128),
    "mistral-nemo-12b": _config(
        LEGACY,
        hidden_size=5120,
        num_hidden_layers=40,
        head_dim=128,
        vocab_size=131072,
        max_position_embeddings=128000,
    ),
    "ministral-8b, transformers 5": _config(
        MINISTRAL_8B,
        architectures=["MinistralForCausalLM"],
        model_type="ministral",
        max_position_embeddings=131072,
        layer_types=["full_attention", *["sliding_attention"] * 3] * 9,
    ),
    "codestral-22b": _config(LEGACY, SIZES_22B, vocab_size=32768),
    "mistral-large-2-123b": _config(
        LEGACY, LARGE_SIZES, vocab_size=32768, max_position_embeddings=131072
    ),
    "mistral-small-24b": _config(LEGACY, SIZES_24B, rope_theta=1e8),
    "devstral-small-24b": _config(
        LEGACY, SIZES_24B, rope_theta=1e9, max_position_embeddings=131072
    ),
    "mistral-small-3.1-24b": Configuration(
        {"config.json": _wrapper(SMALL_3_1), "generation_config.json": GENERATION}
    ),
    "mistral-small-3.2-24b": Configuration(
        {"config.json": _wrapper(SMALL_3_1), "generation_config.json": GENERATION}
    ),
    "magistral-2509": Configuration(
        {"config.json": _wrapper(SMALL_3_1), "generation_config.json": GENERATION}
    ),
    "mistral-small-3.1, without generation_config.json": _config(_wrapper(SMALL_3_1)),
    "ministral-3-3b": _config(
        _wrapper(
            _text(
                "ministral3",
                **MINISTRAL_3,
                hidden_size=3072,
                intermediate_size=9216,
                num_hidden_layers=26,
                rope_parameters=_yarn(16.0, 16384),
            ),
            quantization_config=FP8,
            tie_word_embeddings=True,
        )
    ),
    "ministral-3-8b": _config(
        _wrapper(
            _text(
                "ministral3",
                **MINISTRAL_3,
                hidden_size=4096,
                intermediate_size=14336,
                num_hidden_layers=34,
                rope_parameters=_yarn(16.0, 16384),
            ),
            quantization_config=FP8,
        )
    ),
    "ministral-3-14b": _config(
        _wrapper(
            _text(
                "ministral3",
                **MINISTRAL_3,
                hidden_size=5120,
                intermediate_size=16384,
                num_hidden_layers=40,
                rope_parameters=_yarn(16.0, 16384, 1e9),
            ),
            quantization_config=FP8,
        )
    ),
    "devstral-small-2-24b": _config(
        _wrapper(
            _text(
                "ministral3",
                **SIZES_24B,
                max_position_embeddings=393216,
                rope_parameters=_yarn(48.0, 8192, 1e8),
            ),
            quantization_config=FP8,
        )
    ),
    "devstral-2-123b": _config(
        {key: value for key, value in LEGACY.items() if key != "rope_theta"},
        LARGE_SIZES,
        architectures=["Ministral3ForCausalLM"],
        model_type="ministral3",
        head_dim=128,
        vocab_size=131072,
        max_position_embeddings=262144,
        rope_parameters=_yarn(64.0, 4096, beta_fast=4.0, llama_4_scaling_beta=0.0),
        quantization_config=FP8,
    ),
    "mistral-medium-3.5-128b": Configuration(
        {
            "config.json": _wrapper(MEDIUM_3_5, quantization_config=FP8),
            "generation_config.json": GENERATION,
        }
    ),
    "mistral-small-4-119b": Configuration(
        {
            "config.json": _wrapper(_text("mistral4", **SMALL_4), quantization_config=FP8),
            "generation_config.json": GENERATION,
        }
    ),
    "mistral-large-3-675b in bfloat16": _config(
        LARGE_3,
        architectures=["Mistral4ForCausalLM"],
        model_type="mistral4",
        hidden_act="silu",
        tie_word_embeddings=False,
        eos_token_id=2,
    ),
    # Fine-tunes
    "zephyr-7b-beta": _config(LEGACY, rope_theta=1e4, sliding_window=4096),
    "openhermes-2.5 (ChatML)": Configuration(
        {
            "config.json": (
                LEGACY
                | {
                    "rope_theta": 1e4,
                    "sliding_window": 4096,
                    "vocab_size": 32002,
                    "eos_token_id": 32000,
                }
            ),
            "tokenizer_config.json": {"eos_token": "<|im_end|>"},
        }
    ),
    "a ChatML fine-tune whose config.json keeps 2": Configuration(
        {
            "config.json": (
                LEGACY | {"rope_theta": 1e4, "sliding_window": 4096, "vocab_size": 32002}
            ),
            "tokenizer_config.json": {
                "eos_token": "<|im_end|>",
                "added_tokens_decoder": {"32000": {"content": "<|im_end|>"}},
            },
            "tokenizer.json": {
                "added_tokens": [{"id": 32000, "content": "<|im_end|>", "special": True}]
            },
        },
        expected={"end ids": {2, 32000}},
    ),
    "yarn-mistral-7b-128k": Configuration(
        {
            "config.json": (
                LEGACY
                | {"rope_theta": 1e4, "sliding_window": 131072}
                | {
                    "rope_scaling": {
                        "type": "yarn",
                        "factor": 16.0,
                        "original_max_position_embeddings": 8192,
                        "finetuned": True,
                    }
                }
            )
        },
        expected={"context": 131072},  # the model's name, and factor times the original context
    ),
    "ministral-8b without consolidated*": Configuration(
        {"config.json": MINISTRAL_8B, "params.json": PARAMS_MINISTRAL_8B},
        twin="ministral-8b, transformers 5",
    ),
    "several ends in generation_config.json": Configuration(
        {"config.json": LEGACY, "generation_config.json": {"eos_token_id": [2, 1000]}}
    ),
    # Quantized as this server reads it
    "mistral-7b by AutoFP8": _config(LEGACY, quantization_config=AUTO_FP8),
    "mixtral-8x7b by AutoFP8": _config(
        MIXTRAL,
        quantization_config=AUTO_FP8
        | {
            "ignored_layers": [
                "lm_head",
                *(f"model.layers.{layer}.block_sparse_moe.gate" for layer in range(32)),
            ]
        },
    ),
}

# ---- params.json

PARAMS_24B = PARAMS | {"dim": 5120, "n_layers": 40, "hidden_dim": 32768, "vocab_size": 131072}
PARAMS_22B = PARAMS | {
    "dim": 6144,
    "n_layers": 56,
    "hidden_dim": 16384,
    "n_heads": 48,
    "vocab_size": 32000,
}
OF_8 = {"num_experts": 8, "num_experts_per_tok": 2}
QFORMAT = {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}
PARAMS_MOE = {
    "num_experts": 128,
    "num_experts_per_tok": 4,
    "num_shared_experts": 1,
    "num_expert_groups": 1,
}
PARAMS_MOE |= {"num_expert_groups_per_tok": 1, "routed_scale": 1.0, "route_every_n": 1}
PARAMS_LARGE_3 = {
    **{
        "dim": 7168,
        "n_layers": 61,
        "head_dim": 192,
        "hidden_dim": 16384,
        "n_heads": 128,
        "n_kv_heads": 128,
        "norm_eps": 1e-6,
    },
    **{
        "vocab_size": 131072,
        "rope_theta": 1e4,
        "max_position_embeddings": 294912,
        "tied_embeddings": False,
    },
    **{
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    "moe": PARAMS_MOE | {"expert_hidden_dim": 4096, "first_k_dense_replace": 3},
    "yarn": {
        "factor": 36,
        "original_max_position_embeddings": 8192,
        "beta": 32,
        "alpha": 1,
        "apply_scale": False,
    },
    "llama_4_scaling": {"original_max_position_embeddings": 8192, "beta": 0.1},
}
BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
LARGE_3_FP8 = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "FP8_BLOCK": {"targets": ["Linear"], "weights": BLOCKS, "format": "float-quantized"}
    },
    "ignore": [
        "model.embed_tokens",
        "re:vision_encoder.*",
        "re:.*kv_a_proj_with_mqa$",
        "re:.*q_a_proj$",
        "re:.*gate$",
        "lm_head",
    ],
}


def _params(params: Json, twin: str, **keys: Any) -> Configuration:  # JSON values
    return Configuration({"params.json": {**params, **keys}}, twin=twin)


MISTRALS_OWN = {
    "params of mistral-7b-v0.1": _params(
        PARAMS, "mistral-7b-v0.1", sliding_window=4096, vocab_size=32000
    ),
    "params of mistral-7b-v0.2": _params(
        PARAMS, "mistral-7b-v0.2", rope_theta=1e6, vocab_size=32000
    ),
    "params of mistral-7b-v0.3": _params(
        PARAMS, "mistral-7b-v0.3", rope_theta=1e6, vocab_size=32768
    ),
    "params of mixtral-8x7b": _params(PARAMS, "mixtral-8x7b", vocab_size=32000, moe=OF_8),
    "params of mixtral-8x22b": _params(PARAMS_22B, "mixtral-8x22b", rope_theta=1e6, moe=OF_8),
    "params of mixtral-8x22b-instruct": _params(
        PARAMS_22B, "mixtral-8x22b", rope_theta=1e6, moe=OF_8, vocab_size=32768
    ),
    "params of codestral-22b": _params(
        PARAMS_22B, "codestral-22b", rope_theta=1e6, vocab_size=32768
    ),
    "params of mistral-nemo-12b": _params(
        PARAMS,
        "mistral-nemo-12b",
        dim=5120,
        n_layers=40,
        vocab_size=131072,
        rope_theta=1e6,
        max_seq_len=128000,
    ),
    "params of ministral-8b": _params(PARAMS_MINISTRAL_8B, "ministral-8b, transformers 5"),
    "params of mistral-small-24b": _params(
        PARAMS_24B, "mistral-small-24b", rope_theta=1e8, max_seq_len=32768
    ),
    "params of mistral-small-3.1-24b": _params(
        PARAMS_24B,
        "mistral-small-3.1-24b",
        rope_theta=1e9,
        max_seq_len=131072,
        vision_encoder={"hidden_size": 1024},
    ),
    "params of ministral-3-8b": _params(
        PARAMS,
        "ministral-3-8b",
        n_layers=34,
        vocab_size=131072,
        rope_theta=1e6,
        max_position_embeddings=262144,
        yarn={
            "factor": 16,
            "original_max_position_embeddings": 16384,
            "beta": 32,
            "alpha": 1,
            "apply_scale": False,
        },
        llama_4_scaling={"original_max_position_embeddings": 16384, "beta": 0.1},
        quantization=QFORMAT,
    ),
    "params of mistral-large-3-675b in bfloat16": _params(
        PARAMS_LARGE_3, "mistral-large-3-675b in bfloat16"
    ),
}

# ---- what is refused

AWQ = {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}
GPTQ = {
    "bits": 4,
    "group_size": 128,
    "damp_percent": 0.01,
    "desc_act": True,
    "sym": True,
    "true_sequential": True,
}
MODELOPT = {"producer": {"name": "modelopt", "version": "0.29.0"}}
MLX = {"group_size": 64, "bits": 4}
LAYER = "model.layers.0.self_attn.q_proj"
EAGLE_LAYER = "model.layers.0.self_attn.q_proj.weight"


def _refused(words: str, *empty: str, config: Json = LEGACY, **files: Json) -> Configuration:
    """Return a folder with ``config.json``, an ``index`` of weights, and files such as
    ``quant_config``, with ``.json``.
    """
    named = {"config.json": config} if config else {}
    for name, content in files.items():
        named["model.safetensors.index.json" if name == "index" else f"{name}.json"] = content
    return Configuration(named, words, empty)


def _quantized(words: str, **given: Any) -> Configuration:  # JSON values
    return _refused(
        f"config.json: weights quantized as {words}", config=LEGACY | {"quantization_config": given}
    )


REFUSED = {
    "AWQ": _quantized(
        "AWQ (4 bits) are not supported",
        quant_method="awq",
        bits=4,
        group_size=128,
        version="gemm",
        zero_point=True,
    ),
    "AWQ in a file of its own": _refused(
        "quant_config.json: weights quantized as AWQ (4 bits)", quant_config=AWQ
    ),
    "AWQ by its tensors": _refused(
        "as AWQ or GPTQ, as the tensor", index=_index(f"{LAYER}.qweight", f"{LAYER}.qzeros")
    ),
    "GPTQ": _quantized("GPTQ (4 bits) are not supported", quant_method="gptq", **GPTQ),
    "GPTQ in a file of its own": _refused(
        "quantize_config.json: weights quantized as GPTQ (4 bits)",
        "gptq_model-4bit-128g.safetensors",
        quantize_config=GPTQ,
    ),
    "GPTQ by its tensors": _refused(
        "as GPTQ, as the tensor", index=_index(f"{LAYER}.qweight", f"{LAYER}.g_idx")
    ),
    "modelopt, NVFP4": _quantized(
        "modelopt (NVFP4)", quant_method="modelopt", quant_algo="NVFP4", **MODELOPT
    ),
    "modelopt, NVFP4 in a file of its own": _refused(
        "hf_quant_config.json: weights quantized as modelopt (NVFP4)",
        hf_quant_config=MODELOPT
        | {
            "quantization": {
                "quant_algo": "NVFP4",
                "group_size": 16,
                "exclude_modules": ["lm_head"],
            }
        },
    ),
    "modelopt, FP8 in a file of its own": _refused(
        "hf_quant_config.json: weights quantized as modelopt (FP8)",
        hf_quant_config=MODELOPT
        | {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
    ),
    "modelopt by its tensors": _refused(
        "as modelopt (NVFP4), as the tensor", index=_index(f"{LAYER}.weight_scale_2")
    ),
    "MLX": _refused(
        "config.json: weights quantized as MLX (4 bits)", config=LEGACY | {"quantization": MLX}
    ),
    "MLX, by both keys": _refused(
        "config.json: weights quantized as MLX (4 bits)",
        config=LEGACY | {"quantization": MLX, "quantization_config": MLX},
    ),
    "MLX by its tensors": _refused(
        "as MLX, as the tensor", index=_index(f"{LAYER}.scales", f"{LAYER}.biases")
    ),
    "bitsandbytes, NF4": _quantized(
        "bitsandbytes (4 bits)", quant_method="bitsandbytes", load_in_4bit=True
    ),
    "bitsandbytes of old": _quantized("bitsandbytes (8 bits)", load_in_8bit=True),
    "bitsandbytes by its tensors": _refused(
        "as bitsandbytes, as the tensor", index=_index(f"{LAYER}.weight.absmax")
    ),
    "compressed-tensors, W4A16": _quantized(
        "compressed-tensors (pack-quantized)",
        quant_method="compressed-tensors",
        format="pack-quantized",
    ),
    "FP8 in blocks": _quantized(
        "FP8 with a scale for each block of 128 x 128 numbers",
        quant_method="fp8",
        weight_block_size=[128, 128],
    ),
    "FP8 of some layers": _refused(
        "ignored_layers names model.layers.0.mlp.down_proj; layers of which only some are"
        " quantized",
        config=LEGACY
        | {
            "quantization_config": (
                AUTO_FP8 | {"ignored_layers": ["lm_head", "model.layers.0.mlp.down_proj"]}
            )
        },
    ),
    "FP8 that no configuration names": _refused(
        "no configuration says how", index=_index(f"{LAYER}.weight_scale")
    ),
    "exllama": _quantized("exl2 (4.0 bits)", quant_method="exl2", bits=4.0),
    "mistral-large-3-675b as published": Configuration(
        {"params.json": PARAMS_LARGE_3 | {"quantization_config": LARGE_3_FP8}},
        "params.json: weights quantized as compressed-tensors (float-quantized, with a scale for"
        " each block of 128 x 128",
    ),
    "mistral-large-3-675b, by the other key": Configuration(
        {"params.json": PARAMS_LARGE_3 | {"quantization": LARGE_3_FP8}},
        "params.json: weights quantized as compressed-tensors (float-quantized, with a scale for"
        " each block of 128 x 128",
    ),
    "pickles": _refused(
        "has only pytorch_model.bin for weights; pickles are never opened", "pytorch_model.bin"
    ),
    "pickles in parts": _refused(
        "has only pytorch_model-00001", "pytorch_model-00001-of-00002.bin"
    ),
    "an index of pickles": Configuration(
        {"config.json": LEGACY, "pytorch_model.bin.index.json": {"weight_map": {}}},
        "whose weights are .bin files",
    ),
    "Mistral's first layout": Configuration(
        {"params.json": {**PARAMS, "vocab_size": 32000, "sliding_window": 4096}},
        "has only consolidated.00.pth for weights; pickles are never opened",
        ("consolidated.00.pth", "tokenizer.model"),
    ),
    "GGUF": _refused(
        "has only mistral-7b.Q4_K_M.gguf for weights; GGUF", "mistral-7b.Q4_K_M.gguf", config={}
    ),
    "GGUF with config.json": _refused(
        "has only mistral-7b.Q4_K_M.gguf for weights; GGUF", "mistral-7b.Q4_K_M.gguf"
    ),
    "MLX of old": _refused("has only weights.npz for weights", "weights.npz"),
    "weights by other names": _refused(
        "has only consolidated.safetensors for weights", "consolidated.safetensors"
    ),
    "EAGLE": _refused(
        "describes a draft head (EagleMistralForCausalLM)",
        config=LEGACY | {"architectures": ["EagleMistralForCausalLM"], "num_hidden_layers": 1},
    ),
    "EAGLE 3": _refused(
        "describes a draft head (LlamaForCausalLMEagle3)",
        config=LEGACY | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1},
    ),
    "EAGLE with a model's name": _refused(
        "describes a draft head (fc.weight)",
        config=LEGACY | {"num_hidden_layers": 1},
        index=_index("fc.weight", EAGLE_LAYER),
    ),
    "Medusa": _refused(
        "describes a draft head (MedusaModel)",
        config={"architectures": ["MedusaModel"], "medusa_num_heads": 3},
    ),
    "Medusa without a name": _refused(
        "describes a draft head (medusa_num_heads)", config={"medusa_num_heads": 3}
    ),
    "another architecture": _refused(
        "describes LlamaForCausalLM", config=LEGACY | {"architectures": ["LlamaForCausalLM"]}
    ),
}

CONFIGURATIONS: Mapping[str, Configuration] = {**HUGGING_FACE, **MISTRALS_OWN, **REFUSED}
