"""Tiny checkpoints of the models that Mistral has published since March 2025, made by transformers'
own classes.

With the encoder of images, in ``bfloat16`` or in FP8, in both layouts; and the logits that
transformers computes from them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    Ministral3Config,
    Ministral3ForCausalLM,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    PreTrainedModel,
)

from tramontane.proto.model_folder import Layout, read_model_args
from tramontane.workers.model.rotary import interleave_rows
from tramontane.workers.weights.config_writer import to_mistral_params
from tramontane.workers.weights.tensor_specs import stage_tensors

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 512,
}
VISION = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "image_size": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
}
YARN |= {"beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
LOUDER = {**YARN, "factor": 64.0, "beta_fast": 4.0, "mscale_all_dim": 0.0}  # with YaRN's magnitude
MAX_FP8 = 448.0
PLAIN = {"rope_type": "default", "rope_theta": 1e6}


@dataclass(frozen=True)
class Shape:
    """What distinguishes one published model from the others: its rotary embedding, and whether it
    has an encoder of images.
    """

    rope: Mapping[str, Any] = field(default_factory=lambda: YARN)
    has_vision: bool = True
    tied: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the text model is transformers' ``mistral``."""
        return self.rope["rope_type"] == "default"


SHAPES = {
    "mistral-small-3.1": Shape(rope={**PLAIN, "rope_theta": 1e9}),
    "magistral-2509": Shape(rope={**PLAIN, "rope_theta": 1e9}, tied=True),
    "ministral-3-8b": Shape(),
    "devstral-small-2": Shape(rope={**YARN, "factor": 48.0, "rope_theta": 1e8}),
    "devstral-2-123b": Shape(rope={**LOUDER, "llama_4_scaling_beta": 0.0}, has_vision=False),
    "mistral-medium-3.5": Shape(rope=LOUDER),
}


def make_model(shape: Shape) -> PreTrainedModel:
    """Return a random model, its weights rounded to bfloat16."""
    config: dict[str, Any] = {
        **SIZES,
        "rms_norm_eps": 1e-3,
        "sliding_window": None,
        "tie_word_embeddings": shape.tied,
    }
    config |= {"rope_parameters": dict(shape.rope), "attn_implementation": "eager"}
    text = (MistralConfig if shape.is_plain else Ministral3Config)(**config)
    torch.manual_seed(0)
    if shape.has_vision:
        whole = Mistral3Config(
            vision_config=VISION, text_config=text.to_dict(), tie_word_embeddings=shape.tied
        )
        model: PreTrainedModel = Mistral3ForConditionalGeneration(whole)
        model.set_attn_implementation("eager")
    else:
        assert isinstance(text, Ministral3Config)
        model = Ministral3ForCausalLM(text)
    with torch.no_grad():
        # norms differ from one, or swapping two of them would not show
        for parameter in model.parameters():
            parameter.normal_(1.0, 0.3) if parameter.dim() == 1 else parameter.normal_(
                0.0, 1.5 * parameter.shape[-1] ** -0.5
            )
    return model.to(torch.bfloat16).eval()


@dataclass(frozen=True)
class Published:
    """A folder, and the model as transformers computes it, in float32."""

    folder: Path
    model: PreTrainedModel

    def logits(self, prompt: list[int]) -> Tensor:
        """Compute the logits [T, V] after each token of a prompt."""
        with torch.inference_mode():
            logits: Tensor = self.model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]
        return logits


def publish(
    folder: Path, shape: Shape, *, fp8: bool, scheme: str = "static", max_shard_size: str = "5GB"
) -> Published:
    """Write a model as transformers writes it, and as FP8 as Mistral publishes it: one scale for
    each matrix of a layer.
    """
    made = make_model(shape)
    made.save_pretrained(folder, max_shard_size=max_shard_size)
    # Read again, because rounding the model rounded the frequencies of its rotary embedding, too.
    model = (
        type(made).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    )
    if not fp8:
        return Published(folder, model)
    _round_model(model)
    for path in folder.glob("*.safetensors"):
        save_file(_quantized(load_file(path), scheme), path, metadata={"format": "pt"})
    if (index := folder / "model.safetensors.index.json").exists():
        names = {
            name: path.name for path in folder.glob("*.safetensors") for name in load_file(path)
        }
        index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "activation_scheme": scheme,
        "dequantize": False,
        "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
        "quant_method": "fp8",
        "weight_block_size": None,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return Published(folder, model)


def to_fp8(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return numbers and the scale, which is a number in bfloat16: w = numbers * scale."""
    scale = (weight_NK.float().abs().max() / MAX_FP8 * 1.01).to(torch.bfloat16)
    return (weight_NK.float() / scale.float()).to(torch.float8_e4m3fn), scale


def _is_quantized(name: str) -> bool:
    return (
        ".layers." in name
        and "language_model" in name + "language_model" * name.startswith("model.layers")
        and "proj" in name
    )


def _quantized(tensors: dict[str, Tensor], scheme: str) -> dict[str, Tensor]:
    stored = {}
    for name, tensor in tensors.items():
        if not _is_quantized(name):
            stored[name] = tensor
            continue
        stored[name], stored[f"{name}_scale_inv"] = to_fp8(tensor)
        if scheme == "static":
            stored[name.replace("weight", "activation_scale")] = torch.tensor(
                0.01, dtype=torch.bfloat16
            )
    return stored


def _round_model(model: nn.Module) -> None:
    """Replace the matrices of the text model's layers by ``numbers.float() * scale``."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if _is_quantized(name):
                numbers, scale = to_fp8(parameter)
                parameter.copy_(numbers.float() * scale.float())


def to_mistral_layout(folder: Path, target: Path) -> None:
    """Write a folder's text model in Mistral's layout, with tensors that have the names of an
    encoder of images.
    """
    args = read_model_args(folder)
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= {
            name.removeprefix("language_model."): tensor for name, tensor in load_file(path).items()
        }
    layers = range(args.n_layers)
    stored = {
        "vision_encoder.ln_pre.weight": torch.ones(4),
        "patch_merger.merging_layer.weight": torch.ones(4, 4),
    }
    for theirs, ours in zip(
        stage_tensors(args, layers), stage_tensors(args, layers, Layout.MISTRAL), strict=True
    ):
        tensor, heads = tensors[theirs.name], ours.interleaved_heads
        stored[ours.name] = interleave_rows(tensor, heads) if heads else tensor
        if ours.scale:
            stored[ours.scale] = tensors[theirs.scale]
            stored[ours.scale.replace("qscale_weight", "qscale_act")] = torch.tensor(0.01)
    target.mkdir()
    save_file(stored, target / "consolidated.safetensors", metadata={"format": "pt"})
    params = to_mistral_params(args) | {"vision_encoder": {"hidden_size": 4}}
    if args.quantization:
        params["quantization"] = {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}
    (target / "params.json").write_text(json.dumps(params))
