"""Tiny checkpoints of models with sparse latent attention (Mistral Large 4), made by transformers'
own class.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from latent_models import SIZES, widths
from published_models import VISION, Published
from transformers import (
    MistralLarge4Config,
    MistralLarge4ForConditionalGeneration,
    MistralLarge4TextConfig,
)

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 16.0,
    "original_max_position_embeddings": 32,
}
YARN |= {"beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.0}
# Enough heads of the indexer that few keys have the score 0 in all of them: of equal scores
# transformers takes any.
INDEXER = {
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 24,
    "rope_parameters": YARN,
    "first_k_dense_replace": 1,
}

SHAPES: Mapping[str, dict[str, Any]] = {
    # A layer in four without rotary embedding, and an indexer in every layer, as in transformers'
    # defaults.
    "defaults": {**widths(4, None, 32, 8, 8, 16), "no_rope_layers": [1, 1, 1, 0]},
    # Layers that use the cache of others, or the choice, or both; odd widths. Stages can begin with
    # layers 0, 2, 4 and 6.
    "shared": {
        **widths(3, None, 18, 6, 10, 14),
        "num_hidden_layers": 7,
        "no_rope_layers": [1, 1, 0, 0, 1, 1, 1],
        "kv_source_layers": [0, 0, 2, 2, 4, 5, 6],
        "indexer_types": ["full", "full", "full", "shared", "full", "shared", "full"],
        "index_head_dim": 20,
        "index_topk": 17,
        "first_k_dense_replace": 2,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
        "final_logit_softcapping": 3.0,
        "rms_norm_eps": 0.1,  # also of the norm inside attention
    },
    # Layers of both kinds share a cache of their own kind, in turn.
    "interleaved": {
        **widths(2, None, 24, 8, 4, 12),
        "num_hidden_layers": 6,
        "no_rope_layers": [1, 0, 1, 0, 1, 0],
        "kv_source_layers": [0, 1, 0, 1, 0, 1],
        "indexer_types": ["full", "shared", "full", "shared", "shared", "shared"],
        "index_topk": 9,
    },
}


def text_config(name: str) -> MistralLarge4TextConfig:
    """Return the configuration of the text model."""
    return MistralLarge4TextConfig(**(SIZES | INDEXER | SHAPES[name]))


def make_sparse_model(name: str) -> MistralLarge4ForConditionalGeneration:
    """Make a random model, all of whose parts count."""
    torch.manual_seed(0)
    whole = MistralLarge4Config(
        text_config=text_config(name).to_dict(), vision_config=VISION, tie_word_embeddings=False
    )
    model = MistralLarge4ForConditionalGeneration(whole)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("softmax_scaling.scale", "rotary_emb.alpha", "norm.bias")):
                parameter.normal_(0, 0.2)
            elif parameter.dim() == 1:
                parameter.normal_(1, 0.1)
            else:
                parameter.normal_(
                    0, 1.0 if "embed_tokens" in parameter_name else 1.2 / parameter.shape[-1] ** 0.5
                )
    return model


def publish_sparse(folder: Path, name: str) -> Published:
    """Write a model as transformers writes it, with an encoder of images."""
    made = make_sparse_model(name)
    made.to(torch.float32).save_pretrained(folder)
    settings = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return Published(
        folder, type(made).from_pretrained(folder, dtype=torch.float32, **settings).eval()
    )
