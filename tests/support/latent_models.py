"""Tiny checkpoints of models with latent attention, made by transformers' own classes, and the
logits that it computes.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from published_models import MAX_FP8, VISION, Published, to_fp8
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Mistral4Config,
    Mistral4ForCausalLM,
    PreTrainedModel,
)
from transformers.models.mistral4.modeling_mistral4 import Mistral4Attention

from tramontane.proto.model_folder import Layout, read_model_args
from tramontane.workers.weights.config_writer import to_mistral_params
from tramontane.workers.weights.tensor_names import canonical_name, is_vision
from tramontane.workers.weights.tensor_specs import TensorSpec, stage_tensors

YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 16.0,
    "original_max_position_embeddings": 32,
}
YARN |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
LLAMA_4 = {"llama_4_scaling_beta": 0.1}
# as in Mistral's own configuration
NO_MAGNITUDE = {"mscale": 0.0, "mscale_all_dim": 0.0, "attention_factor": 1.0}
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
    "moe_intermediate_size": 24,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def widths(
    heads: int, q: int | None, kv: int, nope: int, rope: int, v: int
) -> dict[str, int | None]:
    """Return the widths of latent attention."""
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        **dict(zip(names, (q, kv, nope, rope, v), strict=True)),
    }


# Two with the ratios of published models, and others with odd ones.
SHAPES: Mapping[str, dict[str, Any]] = {
    "small-4": {**widths(4, 32, 16, 8, 8, 16), "rope_parameters": YARN | LLAMA_4},
    "louder scores": {
        **widths(4, 32, 16, 8, 8, 16),
        "rope_parameters": YARN | LLAMA_4 | {"mscale": 0.5, "attention_factor": 1.0},
    },
    "large-3": {
        **widths(8, 24, 32, 8, 4, 8),
        "rope_parameters": YARN | LLAMA_4 | NO_MAGNITUDE | {"factor": 4.0},
        "first_k_dense_replace": 3,
        "num_experts_per_tok": 4,
    },
    "odd": {
        **widths(3, 20, 18, 6, 10, 14),
        "rope_parameters": YARN | LLAMA_4 | {"mscale": 0.7, "mscale_all_dim": 1.3},
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.7,
        "first_k_dense_replace": 1,
        "rms_norm_eps": 0.1,  # not of the norms inside attention
    },
    "queries of hidden states": {
        **widths(4, None, 24, 8, 4, 12),
        "rope_parameters": YARN | LLAMA_4 | NO_MAGNITUDE,
    },
    "deepseek": {
        **widths(4, 24, 16, 12, 8, 12),
        "rope_parameters": YARN,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_mtp_layers": 0,
        "routed_scaling_factor": 2.5,
    },
}


def make_model(name: str, *, wrapped: bool = False) -> PreTrainedModel:
    """Make a random model, all of whose parts count; ``wrapped``: with an encoder of images."""
    settings = SIZES | SHAPES[name]
    text = DeepseekV3Config(**settings) if name == "deepseek" else Mistral4Config(**settings)
    torch.manual_seed(0)
    if wrapped:
        whole = Mistral3Config(
            text_config=text.to_dict(), vision_config=VISION, tie_word_embeddings=False
        )
        model: PreTrainedModel = Mistral3ForConditionalGeneration(whole)
    else:
        model = (
            DeepseekV3ForCausalLM(text)
            if isinstance(text, DeepseekV3Config)
            else Mistral4ForCausalLM(text)
        )
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(1, 0.1)
            else:
                parameter.normal_(
                    0, 1.0 if "embed_tokens" in parameter_name else 1.2 / parameter.shape[-1] ** 0.5
                )
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.3)
    return model


def publish(
    folder: Path, name: str, *, wrapped: bool = False, scales_per_expert: int = 0
) -> Published:
    """Write a model as transformers writes it; with ``scales_per_expert`` in FP8, with a scale for
    each matrix or two of them.
    """
    made = make_model(name, wrapped=wrapped)
    made.to(torch.bfloat16 if scales_per_expert else torch.float32).save_pretrained(folder)
    settings = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = type(made).from_pretrained(folder, dtype=torch.float32, **settings).eval()
    if name == "small-4":  # the one with equal weights
        _take_magnitude_away(model)
    if not scales_per_expert:
        return Published(folder, model)
    path, stored = folder / "model.safetensors", {}
    for key, tensor in load_file(path).items():
        if "layers" not in key or "_proj" not in key or is_vision(key):
            stored[key] = tensor
        elif tensor.dim() == 2:
            stored[key], stored[f"{key}_scale_inv"] = to_fp8(tensor)
        else:
            stored[key], stored[f"{key}_scale_inv"] = _stack_to_fp8(
                tensor, scales_per_expert if "gate_up" in key else 1
            )
            stored[f"{key}_activation_scale"] = torch.ones(len(tensor))
    save_file(stored, path, metadata={"format": "pt"})
    parameters = {
        canonical_name(key).replace("language_model.", ""): value
        for key, value in model.named_parameters()
    }
    with torch.no_grad():
        for key in [key for key in stored if key.endswith("_scale_inv")]:
            weight, scale = stored[key.removesuffix("_scale_inv")].float(), stored[key].float()
            if weight.dim() == 3:
                scale = scale.repeat_interleave(weight.shape[1] // scale.shape[1], dim=1)
            parameters[canonical_name(key.removesuffix("_scale_inv"))].copy_(weight * scale)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "weight_block_size": None,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return Published(folder, model)


def _take_magnitude_away(model: PreTrainedModel) -> None:
    """Set the factor of scores to what ``apply_scale: false`` of Mistral's own file means:
    transformers 5.24 has YaRN's.
    """
    layers = [module for module in model.modules() if isinstance(module, Mistral4Attention)]
    assert layers
    for layer in layers:
        assert layer.scaling == pytest.approx(
            layer.qk_head_dim**-0.5 * (0.1 * math.log(YARN["factor"]) + 1) ** 2
        )
        layer.scaling = layer.qk_head_dim**-0.5


def _stack_to_fp8(stack_ENK: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """Return numbers, and scales [E, parts, 1] of consecutive rows of each expert's matrix."""
    pieces = stack_ENK.float().unflatten(1, (parts, -1))
    scales_EP1 = (pieces.abs().amax(dim=(2, 3)) / MAX_FP8 * 1.01)[..., None]
    return (pieces / scales_EP1[..., None]).flatten(1, 2).to(torch.float8_e4m3fn), scales_EP1


def to_mistral_layout(folder: Path, target: Path) -> None:
    """Write a folder's model in Mistral's layout, in which pairs of rows are as in Hugging
    Face's.
    """
    args = read_model_args(folder)
    tensors = load_file(folder / "model.safetensors")
    layers = range(args.n_layers)
    stored = {}
    for theirs, ours in zip(
        stage_tensors(args, layers), stage_tensors(args, layers, Layout.MISTRAL), strict=True
    ):
        stored[ours.name] = _tensor(tensors, theirs)
    target.mkdir()
    save_file(stored, target / "consolidated.safetensors", metadata={"format": "pt"})
    (target / "params.json").write_text(json.dumps(to_mistral_params(args)))


def _tensor(tensors: Mapping[str, Tensor], spec: TensorSpec) -> Tensor:
    if spec.name in tensors:
        return tensors[spec.name]
    assert spec.stack is not None
    first = spec.stack.first_row
    return tensors[spec.stack.name][spec.stack.index, first : first + spec.shape[0]].contiguous()
