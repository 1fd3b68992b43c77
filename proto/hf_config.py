"""Reader of ``config.json``, as transformers 4 and 5 write it."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

from tramontane.proto.errors import CheckpointError, InvalidModelConfigError
from tramontane.proto.model_args import (
    GateScores,
    LatentArgs,
    ModelArgs,
    MoeArgs,
    SparseArgs,
    YarnScaling,
    check_num_layers,
)
from tramontane.proto.presets import context_len
from tramontane.proto.quantization_config import parse_quantization
from tramontane.proto.weight_format import DTYPE_BYTES

MIXTRAL = "MixtralForCausalLM"
# Models with latent attention, and the score function of their gates.
MISTRAL_4 = "Mistral4ForCausalLM"
LATENT = {MISTRAL_4: GateScores.SOFTMAX, "DeepseekV3ForCausalLM": GateScores.SIGMOID}
LARGE_4 = "MistralLarge4TextModel"
# Keys that other programs read in such configurations, but not transformers' classes, and the only
# supported values.
GATE_VALUES = {"moe_layer_freq": 1, "topk_method": "noaux_tc"}
# Text models with an encoder of images, which is not used: classes of the text model, by its type.
WRAPPERS = {
    "Mistral3ForConditionalGeneration": {
        "mistral": "MistralForCausalLM",
        "ministral3": "Ministral3ForCausalLM",
        "mistral4": "Mistral4ForCausalLM",
        "deepseek_v3": "DeepseekV3ForCausalLM",
    },
    "MistralLarge4ForConditionalGeneration": {"mistral_large4_text": LARGE_4},
}
SUPPORTED_ARCHITECTURES = (
    "MistralForCausalLM",
    MIXTRAL,
    "MinistralForCausalLM",
    "Ministral3ForCausalLM",
    *LATENT,
    *WRAPPERS,
)
# Of the wrapper, besides the text model's own.
TIED, EOS = "tie_word_embeddings", "eos_token_id"
WRAPPER_KEYS = ("dtype", "torch_dtype", TIED, "quantization_config", EOS)
# End-of-sequence tokens of configurations without an entry: the default of transformers' classes.
DEFAULT_EOS, OTHER_EOS = 2, {"DeepseekV3ForCausalLM": 1}


def from_hf_config(config: Mapping[str, Any], source: str = "config.json") -> ModelArgs:
    """Translate into ``ModelArgs``. Raises CheckpointError, naming ``source``, for missing,
    malformed or unsupported values.

    For a model with a vision encoder, the result is the text model's.
    """
    with checkpoint_errors(source):
        is_wrapper = _architecture_of(config) in WRAPPERS
        return _translate(
            text_config(config, source), f"{source}, text_config" if is_wrapper else source
        )


@contextmanager
def checkpoint_errors(source: str) -> Iterator[None]:
    """Turn any error of a malformed configuration inside the block into a ``CheckpointError`` that
    names ``source``.
    """
    try:
        yield
    except InvalidModelConfigError as error:
        raise CheckpointError(f"{source}: {error}") from error
    except KeyError as error:
        raise CheckpointError(f"{source} lacks the key {error}") from error
    except (
        TypeError,
        ValueError,
        AttributeError,
        ZeroDivisionError,
        IndexError,
        OverflowError,
    ) as error:
        raise CheckpointError(f"{source} holds a value of the wrong type: {error}") from error


def _translate(config: Mapping[str, Any], source: str) -> ModelArgs:
    """Translate without defaults: transformers' defaults differ by class, and a wrong default would
    be a wrong model.
    """
    architecture = _architecture_of(config)
    _check_supported(config, architecture, source)
    heads, latent = (
        config["num_attention_heads"],
        _latent(config, source) if architecture in (*LATENT, LARGE_4) else None,
    )
    scaling = _rope_scaling(config, latent, source)
    head_dim = (
        config["hidden_size"] // heads if config.get("head_dim") is None else config["head_dim"]
    )
    args = ModelArgs(
        dim=config["hidden_size"],
        n_layers=config["num_hidden_layers"],
        head_dim=latent.cached_dim if latent else head_dim,
        hidden_dim=config["intermediate_size"],
        n_heads=heads,
        n_kv_heads=1 if latent else config["num_key_value_heads"],
        norm_eps=float(config["rms_norm_eps"]),
        vocab_size=config["vocab_size"],
        rope_theta=_rope_theta(config, source),
        max_seq_len=config["max_position_embeddings"],
        windows=_windows(config, source),
        moe=_moe(config, architecture, source),
        tied_embeddings=parse_bool(config, "tie_word_embeddings"),
        dtype=parse_dtype(config, source),
        eos_token_ids=_eos_token_ids(config, architecture),
        rope_scaling=scaling,
        latent=latent,
        sparse=_sparse(config, source) if architecture == LARGE_4 else None,
        final_logit_softcapping=(
            float(config["final_logit_softcapping"]) if architecture == LARGE_4 else None
        ),
        quantization=parse_quantization(config.get("quantization_config"), source),
    )
    return replace(args, max_seq_len=context_len(args, args.max_seq_len))


def _architecture_of(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures") or ["nothing"]
    return str(architectures if isinstance(architectures, str) else architectures[0])


def _unwrap(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the configuration of the text model, completed by the wrapper's values.

    The text model's own values have precedence, but embeddings are tied if either says so:
    transformers writes both, and its wrapper's default is true.
    """
    # Without a q_lora_rank queries are computed from the hidden states directly; other keys that
    # are null count as missing.
    text = {
        key: value
        for key, value in config["text_config"].items()
        if value is not None or key == "q_lora_rank"
    }
    wrapper = _architecture_of(config)
    if (kind := text.get("model_type")) not in WRAPPERS[wrapper]:
        raise CheckpointError(
            f"{source} describes a {wrapper} with a text model of type {kind!r}; supported:"
            f" {', '.join(WRAPPERS[wrapper])}"
        )
    outer = {key: config[key] for key in WRAPPER_KEYS if config.get(key) is not None}
    own: dict[str, Any] = {"architectures": [WRAPPERS[wrapper][kind]]}
    if outer.get(TIED) is True:  # of either; the tensors show which of the two is right
        own[TIED] = True
    # of both; null in the text model's means that there is none
    if EOS in config["text_config"] or EOS in outer:
        own[EOS] = [*parse_eos_token_ids(outer.get(EOS)), *parse_eos_token_ids(text.get(EOS))]
    return {"sliding_window": None} | outer | text | own


def text_config(config: Mapping[str, Any], source: str = "config.json") -> Mapping[str, Any]:
    """Return the configuration of the text model: the wrapped one of a wrapper, otherwise the
    whole.
    """
    return _unwrap(config, source) if _architecture_of(config) in WRAPPERS else config


def _eos_token_ids(config: Mapping[str, Any], architecture: str) -> tuple[int, ...]:
    """Return the end-of-sequence tokens, the class's default without an entry; null means that
    there is none.
    """
    return parse_eos_token_ids(
        config[EOS] if EOS in config else OTHER_EOS.get(architecture, DEFAULT_EOS)
    )


def _check_supported(config: Mapping[str, Any], architecture: str, source: str) -> None:
    if architecture not in (*SUPPORTED_ARCHITECTURES, LARGE_4):
        raise CheckpointError(
            f"{source} describes {architecture}; supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    if config.get("hidden_act", "silu") != "silu":
        raise CheckpointError(
            f"{source}: activation {config['hidden_act']!r} is not supported, only silu"
        )
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise CheckpointError(
                f"{source}: {key} is set, and layers with biases are not supported"
            )
    if architecture not in (*LATENT, LARGE_4):
        return
    values = GATE_VALUES | {"scoring_func": LATENT.get(architecture, GateScores.SOFTMAX).value}
    used = [
        f"{key} = {config[key]!r}"
        for key, value in values.items()
        if config.get(key) not in (None, value)
    ]
    if beta := (
        _rope_parameters(config).get("llama_4_scaling_beta") if architecture != MISTRAL_4 else None
    ):
        used.append(f"llama_4_scaling_beta = {beta!r}")
    if used:
        raise CheckpointError(f"{source}: {', '.join(used)} is not supported for {architecture}")


def _rope_parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rotary settings: ``rope_parameters`` of transformers 5, ``rope_scaling`` of
    transformers 4.
    """
    rope: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return rope


def _rope_theta(config: Mapping[str, Any], source: str) -> float:
    """Return the base of rotary frequencies. Raises CheckpointError if two keys contradict each
    other.

    transformers 4 and 5 have other keys, and a file can have both.
    """
    old, new = config.get("rope_scaling") or {}, config.get("rope_parameters") or {}
    for key in old.keys() & new.keys():
        if old[key] != new[key]:
            raise CheckpointError(
                f"{source}: {key} is {old[key]!r} in rope_scaling and {new[key]!r} in"
                " rope_parameters"
            )
    nested, outer = _rope_parameters(config).get("rope_theta"), config.get("rope_theta")
    if nested and outer and nested != outer:
        raise CheckpointError(
            f"{source}: rope_theta is {outer!r}, and {nested!r} in the rotary settings; one of them"
            " is wrong"
        )
    return float(nested or config["rope_theta"])


def _latent(config: Mapping[str, Any], source: str) -> LatentArgs:
    """Return the widths of latent attention. Raises CheckpointError if its rotated rows are not
    stored as pairs.
    """
    if not config.get("rope_interleave", True):
        raise CheckpointError(
            f"{source}: rope_interleave is false, and that is not supported, only true"
        )
    if _architecture_of(config) == LARGE_4:
        config = {**config, "q_lora_rank": None}
    return LatentArgs(**{field.name: config[field.name] for field in fields(LatentArgs)})


def _sparse(config: Mapping[str, Any], source: str) -> SparseArgs:
    """Return the sparse attention of Mistral Large 4. Raises CheckpointError for layers of another
    kind.

    A "shared" indexer is the one of the last preceding layer with a "full" indexer: full, shared,
    shared, full is 0 0 0 3.
    """
    n_layers: int = config["num_hidden_layers"]
    check_num_layers(n_layers)
    if unknown := {*(config.get("layer_types") or ())} - {"indexed_attention"}:
        raise CheckpointError(
            f"{source}: layers of type {', '.join(map(repr, sorted(unknown)))} are not supported"
        )
    kinds = config["indexer_types"]
    if len(kinds) != n_layers:
        raise CheckpointError(
            f"{source}: indexer_types has {len(kinds)} entries for {n_layers} layers"
        )
    if unknown := {*kinds} - {"full", "shared"}:
        raise CheckpointError(
            f"{source}: indexers of type {', '.join(map(repr, sorted(unknown)))} are not supported"
        )
    if kinds[0] != "full":
        raise CheckpointError(
            f"{source}: the first layer's indexer is {kinds[0]!r}, and there is none before it to"
            " share"
        )
    sources: list[int] = []
    for layer, kind in enumerate(kinds):
        sources.append(layer if kind == "full" else sources[-1])
    return SparseArgs(
        # 1 if it has, despite the name
        rope_layers=tuple(bool(has_rope) for has_rope in config["no_rope_layers"][:n_layers]),
        kv_source_layers=tuple(config["kv_source_layers"]),
        index_source_layers=tuple(sources),
        **{name: config[name] for name in ("index_n_heads", "index_head_dim", "index_topk")},
    )


def _moe(config: Mapping[str, Any], architecture: str, source: str) -> MoeArgs | None:
    if architecture == MIXTRAL:
        return MoeArgs(config["num_local_experts"], config["num_experts_per_tok"])
    if architecture not in (*LATENT, LARGE_4):
        return None
    first, is_large_4 = config["first_k_dense_replace"], architecture == LARGE_4
    if (kinds := config.get("mlp_layer_types")) and is_large_4:
        first = kinds.index("sparse") if "sparse" in kinds else len(kinds)
        if kinds != ["dense"] * first + ["sparse"] * (config["num_hidden_layers"] - first):
            raise CheckpointError(
                f"{source}: mlp_layer_types must be 'dense' for the first layers, and 'sparse' for"
                " all others"
            )
    return MoeArgs(
        config["n_routed_experts"],
        config["num_experts_per_tok"],
        expert_dim=config["moe_intermediate_size"],
        n_shared_experts=config["n_shared_experts"],
        first_k_dense_replace=first,
        scores=LATENT.get(architecture, GateScores.SOFTMAX),
        n_group=config["n_group"],
        topk_group=config["topk_group"],
        # no default
        norm_topk_prob=is_large_4
        or parse_bool({"norm_topk_prob": config["norm_topk_prob"]}, "norm_topk_prob"),
        routed_scaling_factor=float(config["routed_scaling_factor"]),
        float32_gate=architecture != MISTRAL_4,
    )


def _rope_scaling(
    config: Mapping[str, Any], latent: LatentArgs | None, source: str
) -> YarnScaling | None:
    rope = _rope_parameters(config)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "yarn":
        raise CheckpointError(
            f"{source}: rotary scaling of type {kind!r} is not supported, only 'yarn'"
        )
    # With latent attention the widths define the rotated share of a head.
    rotated_shares = {1.0, latent.qk_rope_head_dim / latent.qk_head_dim} if latent else {1.0}
    if (
        rope.get("truncate") is False
        or rope.get("partial_rotary_factor", 1.0) not in rotated_shares
    ):
        raise CheckpointError(
            f"{source}: yarn with truncate = false or a partial_rotary_factor is not supported"
        )
    if missing := [
        key for key in ("factor", "original_max_position_embeddings") if key not in rope
    ]:
        raise CheckpointError(f"{source}: rotary scaling of type 'yarn' lacks {', '.join(missing)}")
    factor = float(rope["factor"])
    return YarnScaling(
        factor=factor,
        original_max_seq_len=rope["original_max_position_embeddings"],
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        attention_factor=_attention_factor(rope, factor),
        llama4_beta=float(rope.get("llama_4_scaling_beta") or 0.0),
        score_factor=_score_factor(rope, factor, _architecture_of(config)) if latent else 1.0,
    )


def _score_factor(rope: Mapping[str, Any], factor: float, architecture: str) -> float:
    """Return the factor of latent attention's scores: the square of YaRN's magnitude, weighted by
    ``mscale_all_dim``.

    In configurations of Mistral 4, equal weights correspond to ``apply_scale: false`` of Mistral's
    own files: no magnitude at all. vLLM and SGLang compute these models that way; transformers
    multiplies by the square as for DeepSeek. Small 4's scores would be (0.1 ln 128 + 1)^2 = 2.2058
    times too large.
    """
    weight = float(rope.get("mscale_all_dim") or 0.0)
    if architecture == MISTRAL_4 and weight == float(rope.get("mscale") or 0.0):
        return 1.0
    return yarn_attention_factor(factor, weight) ** 2


def has_magnitude(config: Mapping[str, Any]) -> bool:
    """Return whether the configuration of a text model defines the use of YaRN's magnitude."""
    return any(
        _rope_parameters(config).get(key) is not None
        for key in ("attention_factor", "mscale", "mscale_all_dim")
    )


def _attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    """Return ``attention_factor`` if it is given, else compute it, weighted by ``mscale`` and
    ``mscale_all_dim``.
    """
    if (given := rope.get("attention_factor")) is not None:
        return float(given)
    mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return yarn_attention_factor(factor, float(mscale)) / yarn_attention_factor(
            factor, float(mscale_all_dim)
        )
    return yarn_attention_factor(factor)


def yarn_attention_factor(factor: float, weight: float = 1.0) -> float:
    """Compute 0.1 * weight * ln(factor) + 1 (YaRN, equation 22). Factor 16: 0.1 * ln 16 + 1 =
    1.277.
    """
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _windows(config: Mapping[str, Any], source: str) -> tuple[int | None, ...]:
    check_num_layers(config["num_hidden_layers"])
    n_layers: int = config["num_hidden_layers"]
    if _architecture_of(config) in (*LATENT, LARGE_4):
        return (None,) * n_layers
    by_kind = {"sliding_attention": config["sliding_window"], "full_attention": None}
    kinds = config.get("layer_types") or ["sliding_attention"] * n_layers
    if (
        config.get("layer_types")
        and "sliding_attention" in kinds
        and config["sliding_window"] is None
    ):
        raise CheckpointError(
            f"{source} has layers of type 'sliding_attention' but no sliding_window"
        )
    if unknown := set(kinds) - set(by_kind):
        raise CheckpointError(
            f"{source}: layers of type {', '.join(map(repr, sorted(unknown)))} are not supported"
        )
    return tuple(by_kind[kind] for kind in kinds)


def parse_bool(config: Mapping[str, Any], key: str) -> bool:
    """Return the boolean ``config[key]``, False if it is missing. Raises TypeError for other
    values, such as the text "false".
    """
    value = config.get(key)
    if value not in (None, False, True):
        raise TypeError(f"{key} is {value!r}")
    return bool(value)


def parse_dtype(config: Mapping[str, Any], source: str) -> str:
    """Return the dtype of the weights, bfloat16 if none is given. Raises CheckpointError if it is
    not supported.
    """
    name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix(
        "torch."
    )
    if name not in DTYPE_BYTES:
        raise CheckpointError(
            f"{source}: weights of type {name} are not supported; supported:"
            f" {', '.join(DTYPE_BYTES)}"
        )
    return name


def parse_eos_token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Return the end-of-sequence tokens of a configuration: one, several or none. Raises TypeError
    for other values.
    """
    ids = () if value is None else (value,) if isinstance(value, int) else tuple(value)
    if not all(isinstance(i, int) for i in ids):
        raise TypeError(f"eos_token_id is {value!r}")
    return tuple(dict.fromkeys(ids))
