"""Reader of ``params.json``, which Mistral publishes next to ``consolidated.safetensors``."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from tramontane.proto.errors import CheckpointError
from tramontane.proto.hf_config import (
    checkpoint_errors,
    parse_bool,
    parse_dtype,
    yarn_attention_factor,
)
from tramontane.proto.model_args import (
    GateScores,
    LatentArgs,
    ModelArgs,
    MoeArgs,
    YarnScaling,
    check_num_layers,
)
from tramontane.proto.presets import context_len
from tramontane.proto.quantization_config import (
    describe_quantization,
    parse_quantization,
    unsupported_quantization,
)
from tramontane.proto.weight_format import Quantization

EOS_TOKEN_ID = 2  # in every tokenizer that Mistral has published
# rope_theta if it is not given, by Mistral's own rule (mistral-inference, transformer.py).
THETA_WITH_WINDOW, THETA_WITHOUT_WINDOW = 10_000.0, 1_000_000.0
CONTEXT_KEYS = ("max_seq_len", "max_position_embeddings")
# Keys that change the arithmetic in a way that is not implemented. Empty values have no effect.
UNSUPPORTED_KEYS = (
    *("lora", "use_biases"),
    *("rope_scaling", "use_scaled_rope", "attention_sinks", "causal_conv", "mamba"),
)
# Of models with latent attention.
LATENT_KEYS = tuple(field.name for field in fields(LatentArgs))
LATENT_MOE_KEYS = (
    "num_shared_experts",
    "first_k_dense_replace",
    "expert_hidden_dim",
    "num_expert_groups",
)


def from_mistral_params(params: Mapping[str, Any], source: str = "params.json") -> ModelArgs:
    """Translate into ``ModelArgs``. Raises CheckpointError, naming ``source``, for missing,
    malformed or unsupported values.
    """
    with checkpoint_errors(source):
        _check_supported(params, source)
        return _translate(params, source)


def _check_supported(params: Mapping[str, Any], source: str) -> None:
    kind = params.get("model_type") or "transformer"
    if kind != "transformer":
        raise CheckpointError(
            f"{source} describes a model of type {kind!r}; only transformers are supported"
        )
    if (activation := params.get("activation") or "silu") != "silu":
        raise CheckpointError(f"{source}: activation {activation!r} is not supported, only silu")
    moe = params.get("moe") or {}
    used = [key for key in UNSUPPORTED_KEYS if params.get(key)]
    if not _has_latent_attention(params):
        used += [key for key in LATENT_KEYS if params.get(key)] + [
            f"moe.{key}" for key in LATENT_MOE_KEYS if moe.get(key)
        ]
    if (every := moe.get("route_every_n", 1)) != 1:
        used.append(f"moe.route_every_n = {every}")
    # of sound
    used += ["multimodal.whisper_model_args"] * bool(
        (params.get("multimodal") or {}).get("whisper_model_args")
    )
    if used:
        raise CheckpointError(f"{source}: {', '.join(used)} is set, and that is not supported")
    key, yarn = "original_max_position_embeddings", params.get("yarn") or {}
    if (llama4 := params.get("llama_4_scaling")) and llama4[key] != yarn.get(key):
        raise CheckpointError(
            f"{source}: llama_4_scaling is not that of the yarn block, and that is not supported"
        )


def _has_latent_attention(params: Mapping[str, Any]) -> bool:
    return bool(params.get("kv_lora_rank"))


def _translate(params: Mapping[str, Any], source: str) -> ModelArgs:
    windows = windows_of(params)
    widths: dict[str, Any] = {key: params.get(key) for key in LATENT_KEYS}
    latent = LatentArgs(**widths) if _has_latent_attention(params) else None
    args = ModelArgs(
        dim=params["dim"],
        n_layers=params["n_layers"],
        head_dim=latent.cached_dim if latent else params["head_dim"],
        hidden_dim=params["hidden_dim"],
        n_heads=params["n_heads"],
        n_kv_heads=1 if latent else params["n_kv_heads"],
        norm_eps=float(params["norm_eps"]),
        vocab_size=params["vocab_size"],
        rope_theta=float(
            params.get("rope_theta")
            or (THETA_WITH_WINDOW if any(windows) else THETA_WITHOUT_WINDOW)
        ),
        max_seq_len=1,  # computed from the other values
        windows=windows,
        moe=_moe(params["moe"], latent is not None) if params.get("moe") else None,
        tied_embeddings=parse_bool(params, "tied_embeddings"),
        dtype=parse_dtype(params, source),
        eos_token_ids=(EOS_TOKEN_ID,),
        rope_scaling=_rope_scaling(params),
        latent=latent,
        quantization=_quantization(params, source),
    )
    return replace(args, max_seq_len=context_len(args, *stated_context_lens(params)))


def stated_context_lens(params: Mapping[str, Any]) -> list[int]:
    """Return the file's values for the context length: one number, several or none."""
    return [params[key] for key in CONTEXT_KEYS if params.get(key) is not None]


def _moe(moe: Mapping[str, Any], has_latent_attention: bool) -> MoeArgs:
    if not has_latent_attention:
        return MoeArgs(moe["num_experts"], moe["num_experts_per_tok"])
    return MoeArgs(
        moe["num_experts"],
        moe["num_experts_per_tok"],
        expert_dim=moe["expert_hidden_dim"],
        n_shared_experts=moe.get("num_shared_experts", 0),
        first_k_dense_replace=moe.get("first_k_dense_replace", 0),
        scores=GateScores.SOFTMAX,
        n_group=moe.get("num_expert_groups", 1),
        topk_group=moe.get("num_expert_groups_per_tok", 1),
        routed_scaling_factor=float(moe.get("routed_scale", 1.0)),
    )


def _quantization(params: Mapping[str, Any], source: str) -> Quantization | None:
    """Return the format of a checkpoint's matrices. Raises CheckpointError, with the required
    format, for unsupported formats.

    ``qscheme_act``, the scales of activations, has no effect: each token gets its own. Formats
    other than Mistral's FP8 are described as in Hugging Face's layout.
    """
    given = params.get("quantization")
    if not given:
        return parse_quantization(params.get("quantization_config"), source)
    if given.get("qformat_weight") == "fp8_e4m3" and given.get("qscheme_act") in (
        None,
        "TENSOR",
        "NO_SCALES",
    ):
        return Quantization.FP8
    if given.get("quant_method"):
        raise unsupported_quantization(describe_quantization(given), source)
    raise unsupported_quantization(
        ", ".join(f"{key} {value}" for key, value in given.items())[:200], source
    )


def stated_window(params: Mapping[str, Any]) -> object:
    """Return the file's window or windows, None if it has none."""
    given = params.get("sliding_window")
    return params.get("_sliding_window") if given is None else given


def windows_of(params: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return the window of each layer from one number for all of them, or from a pattern that
    repeats.

    [null, 32768, 32768, 32768] over 36 layers: layers 0, 4, 8, ... have no window. The file of
    Ministral 8B spells the key with a leading underscore.
    """
    n_layers: int = params["n_layers"]
    check_num_layers(n_layers)
    given = stated_window(params)
    pattern = given if isinstance(given, list) else [given]
    if not pattern:
        raise ValueError("sliding_window has no entries")
    if n_layers % len(pattern):
        raise ValueError(f"sliding_window has {len(pattern)} entries for {n_layers} layers")
    return tuple(pattern) * (n_layers // len(pattern))


def _rope_scaling(params: Mapping[str, Any]) -> YarnScaling | None:
    """Return YaRN's scaling. With latent attention its magnitude, if it is applied, scales all
    scores (squared) rather than keys.

    vLLM does the same (deepseek_v2.py, with an ``mscale_all_dim`` of 1).
    """
    yarn = params.get("yarn")
    if not yarn:
        return None
    attention_factor, score_factor = magnitudes(params)
    return YarnScaling(
        factor=float(yarn["factor"]),
        original_max_seq_len=yarn["original_max_position_embeddings"],
        beta_fast=float(yarn.get("beta", 32.0)),
        beta_slow=float(yarn.get("alpha", 1.0)),
        attention_factor=attention_factor,
        llama4_beta=float((params.get("llama_4_scaling") or {}).get("beta", 0.0)),
        score_factor=score_factor,
    )


def magnitudes(params: Mapping[str, Any]) -> tuple[float, float]:
    """Return ``attention_factor`` and ``score_factor`` of the file's YaRN block; of latent
    attention the magnitude is squared.
    """
    yarn = params["yarn"]
    magnitude = (
        yarn_attention_factor(float(yarn["factor"])) if yarn.get("apply_scale", True) else 1.0
    )
    return (1.0, magnitude**2) if _has_latent_attention(params) else (magnitude, 1.0)
