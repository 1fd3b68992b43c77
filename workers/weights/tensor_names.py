"""Names of the tensors in a checkpoint, by its layout, with the prefixes and tensors of a wrapper
with a vision encoder.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tramontane.proto.model_args import ModelArgs
from tramontane.proto.model_folder import Layout


@dataclass(frozen=True, slots=True)
class CheckpointNames:
    """Names of tensors in one layout; ``{}`` stands for the layer, and in the names of ``experts``
    also for the expert.
    """

    embedding: str
    norm: str
    head: str
    attention_norm: str
    ffn_norm: str
    attention: Mapping[str, str]
    feed_forward: Mapping[str, str]
    gate: str
    experts: Mapping[str, str]
    scale: str  # of a quantized matrix, instead of "weight"
    activation_scale: str
    shared_experts: Mapping[str, str] = field(default_factory=dict)
    gate_bias: str = ""
    # tensors of all experts of a layer
    stacked_experts: Mapping[str, str] = field(default_factory=dict)
    rotary_alpha: str = ""  # of the rotary embedding of all layers


PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}  # by Mistral's names

NAMES = {
    Layout.HUGGING_FACE: CheckpointNames(
        embedding="model.embed_tokens.weight",
        norm="model.norm.weight",
        head="lm_head.weight",
        attention_norm="model.layers.{}.input_layernorm.weight",
        ffn_norm="model.layers.{}.post_attention_layernorm.weight",
        attention={
            w: f"model.layers.{{}}.self_attn.{w[1]}_proj.weight" for w in ("wq", "wk", "wv", "wo")
        },
        feed_forward={w: f"model.layers.{{}}.mlp.{name}.weight" for w, name in PROJECTIONS.items()},
        gate="model.layers.{}.block_sparse_moe.gate.weight",
        experts={
            w: f"model.layers.{{}}.block_sparse_moe.experts.{{}}.{w}.weight"
            for w in ("w1", "w2", "w3")
        },
        scale="weight_scale_inv",
        activation_scale="activation_scale",
    ),
    Layout.MISTRAL: CheckpointNames(
        embedding="tok_embeddings.weight",
        norm="norm.weight",
        head="output.weight",
        attention_norm="layers.{}.attention_norm.weight",
        ffn_norm="layers.{}.ffn_norm.weight",
        attention={w: f"layers.{{}}.attention.{w}.weight" for w in ("wq", "wk", "wv", "wo")},
        feed_forward={w: f"layers.{{}}.feed_forward.{w}.weight" for w in ("w1", "w2", "w3")},
        gate="layers.{}.feed_forward.gate.weight",
        experts={
            w: f"layers.{{}}.feed_forward.experts.{{}}.{w}.weight" for w in ("w1", "w2", "w3")
        },
        scale="qscale_weight",
        activation_scale="qscale_act",
    ),
}

# Of models with latent attention.
LATENT_NAMES = {
    Layout.HUGGING_FACE: replace(
        NAMES[Layout.HUGGING_FACE],
        attention={
            w: f"model.layers.{{}}.self_attn.{name}.weight"
            for w, name in {
                "wq": "q_proj",
                "wq_a": "q_a_proj",
                "q_a_norm": "q_a_layernorm",
                "wq_b": "q_b_proj",
                "wkv_a": "kv_a_proj_with_mqa",
                "kv_a_norm": "kv_a_layernorm",
                "wkv_b": "kv_b_proj",
                "wo": "o_proj",
            }.items()
        },
        gate="model.layers.{}.mlp.gate.weight",
        gate_bias="model.layers.{}.mlp.gate.e_score_correction_bias",
        experts={
            w: f"model.layers.{{}}.mlp.experts.{{}}.{name}.weight"
            for w, name in PROJECTIONS.items()
        },
        shared_experts={
            w: f"model.layers.{{}}.mlp.shared_experts.{name}.weight"
            for w, name in PROJECTIONS.items()
        },
        stacked_experts={
            "w13": "model.layers.{}.mlp.experts.gate_up_proj",
            "w2": "model.layers.{}.mlp.experts.down_proj",
        },
    ),
    Layout.MISTRAL: replace(
        NAMES[Layout.MISTRAL],
        attention={
            w: f"layers.{{}}.attention.{name}.weight"
            for w, name in {
                **{w: w for w in ("wq", "wq_a", "q_a_norm", "wq_b", "kv_a_norm", "wkv_b", "wo")},
                "wkv_a": "wkv_a_with_mqa",
            }.items()
        },
        gate="layers.{}.gate.weight",
        gate_bias="layers.{}.gate.bias",
        experts={w: f"layers.{{}}.experts.{{}}.{w}.weight" for w in PROJECTIONS},
        shared_experts={w: f"layers.{{}}.shared_experts.{w}.weight" for w in PROJECTIONS},
    ),
}

INDEXER_PARTS = (
    *(
        "q_input_norm.weight",
        "q_input_norm.bias",
        "wq_b.weight",
        "wk.weight",
        "k_norm.weight",
        "k_norm.bias",
    ),
    *("weights_proj.weight", "ssmax_scaling.s", "ssmax_scaling.b"),
)
# Of models with sparse attention: Mistral's in both layouts (transformers, conversion_mapping.py).
SPARSE_NAMES = replace(
    LATENT_NAMES[Layout.MISTRAL],
    attention={
        **LATENT_NAMES[Layout.MISTRAL].attention,
        **{
            part: f"layers.{{}}.attention.{part}" for part in ("ssmax_scaling.s", "ssmax_scaling.b")
        },
        **{f"indexer.{part}": f"layers.{{}}.attention.indexer.{part}" for part in INDEXER_PARTS},
    },
    rotary_alpha="lerope.alpha",
)

# Of the text model inside ``Mistral3ForConditionalGeneration``, in its published form and in its
# in-memory form.
WRAPPED_NAMES = (("language_model.", ""), ("model.language_model.", "model."))
# Of AutoFP8, the program, and by which name transformers has the same number: a weight is its FP8
# number times the scale.
AUTO_FP8_SCALES = ((".weight_scale", ".weight_scale_inv"), (".input_scale", ".activation_scale"))
# Of a key/value cache in FP8, which there is not: keys and values keep the model's dtype.
CACHE_SCALE = re.compile(
    r"model\.layers\.\d+\.self_attn\.(kv_scale|([kv]|attn\.[kv])_scale|[kv]_proj\.output_scale)"
)
# Encoder of images and its projector, in both layouts.
VISION_PREFIXES = (
    *(
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    ),
    *("vision_encoder.", "vision_language_adapter.", "pre_mm_projector_norm.", "patch_merger."),
)
DRAFT_PREFIX = "mtp_dspark."  # of a network that drafts tokens, which is not used
# Old versions of transformers stored it, although it is computed.
ROTARY_BUFFER = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def names_of(args: ModelArgs, layout: Layout) -> CheckpointNames:
    """Return the names of a model's tensors."""
    if args.sparse:
        return SPARSE_NAMES
    return (LATENT_NAMES if args.latent else NAMES)[layout]


def canonical_name(name: str) -> str:
    """Return the name in a checkpoint without a wrapper; for a scale, the name that transformers
    writes.

    ``language_model.model.norm.weight`` is ``model.norm.weight``, ``o_proj.weight_scale`` is
    ``o_proj.weight_scale_inv``.
    """
    for wrapped, plain in WRAPPED_NAMES:
        if name.startswith(wrapped):
            name = plain + name.removeprefix(wrapped)
            break
    for own, other in AUTO_FP8_SCALES:
        if name.endswith(own):
            return name.removesuffix(own) + other
    return name


def scale_name(name: str, layout: Layout) -> str:
    """Return the name of a quantized matrix's scale: ``layers.0.attention.wq.qscale_weight``."""
    return name.removesuffix("weight") + NAMES[layout].scale


def stack_scale_name(name: str) -> str:
    """Return the name of the scales of all experts' matrices:
    ``model.layers.0.mlp.experts.gate_up_proj_scale_inv``.
    """
    return f"{name}_scale_inv"


def is_vision(name: str) -> bool:
    """Return whether a tensor belongs to the vision encoder or its projector, which are never
    read.
    """
    return name.startswith(VISION_PREFIXES)


def is_unused(name: str, layout: Layout) -> bool:
    """Return whether a text model's tensor is unused.

    Unused are scales of activations (each token gets its own), scales of a cache, and a network
    that drafts tokens.
    """
    scale = NAMES[layout].activation_scale
    if name.startswith(DRAFT_PREFIX) or CACHE_SCALE.fullmatch(name):
        return True
    return (
        name.endswith((f".{scale}", f"_proj_{scale}")) or ROTARY_BUFFER.fullmatch(name) is not None
    )
