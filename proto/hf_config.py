"""Reader and writer of ``config.json``, as transformers 4 and 5 write it."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tramontane.proto.errors import CheckpointError, InvalidModelConfigError
from tramontane.proto.model_args import DTYPE_BYTES, ModelArgs, MoeArgs, Quantization, YarnScaling, check_num_layers

MIXTRAL = "MixtralForCausalLM"
WRAPPER = "Mistral3ForConditionalGeneration"  # a text model with an encoder of images, which is not used
SUPPORTED_ARCHITECTURES = ("MistralForCausalLM", MIXTRAL, "MinistralForCausalLM", "Ministral3ForCausalLM", WRAPPER)
WRAPPED_MODELS = {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"}  # by the text model's type
# Of the wrapper, besides the text model's own.
TIED = "tie_word_embeddings"
WRAPPER_KEYS = ("dtype", "torch_dtype", TIED, "quantization_config", "eos_token_id")


def from_hf_config(config: Mapping[str, Any], source: str = "config.json") -> ModelArgs:
    """Translate into ``ModelArgs``. Raises CheckpointError, naming ``source``, for what is missing, malformed or unsupported.

    Of a model with an encoder of images it is the text model's.
    """
    with checkpoint_errors(source):
        if _architecture_of(config) == WRAPPER:
            return _translate(_unwrap(config, source), f"{source}, text_config")
        return _translate(config, source)


@contextmanager
def checkpoint_errors(source: str) -> Iterator[None]:
    """Turn whatever a malformed configuration causes inside the block into a ``CheckpointError`` that names ``source``."""
    try:
        yield
    except InvalidModelConfigError as error:
        raise CheckpointError(f"{source}: {error}") from error
    except KeyError as error:
        raise CheckpointError(f"{source} lacks the key {error}") from error
    except (TypeError, ValueError, AttributeError, ZeroDivisionError, IndexError, OverflowError) as error:
        raise CheckpointError(f"{source} holds a value of the wrong type: {error}") from error


def to_hf_config(args: ModelArgs) -> dict[str, Any]:
    """Return the configuration of ``args`` as transformers 5 writes it."""
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
    config: dict[str, Any] = {
        "architectures": [_architecture(args)],
        "model_type": _architecture(args).removesuffix("ForCausalLM").lower(),
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
        config |= {"num_local_experts": args.moe.num_experts, "num_experts_per_tok": args.moe.num_experts_per_tok}
    if args.quantization:
        config["quantization_config"] = {
            "quant_method": args.quantization.value,
            "activation_scheme": "dynamic",
            "weight_block_size": None,
            "modules_to_not_convert": ["lm_head"],
        }
    if len(args.window_classes) > 1:
        config["layer_types"] = ["full_attention" if w is None else "sliding_attention" for w in args.windows]
    return config


def _architecture(args: ModelArgs) -> str:
    """Return the class of transformers that runs this geometry."""
    if args.moe:
        return MIXTRAL
    if args.rope_scaling:
        return "Ministral3ForCausalLM"
    return "MistralForCausalLM" if len(args.window_classes) == 1 else "MinistralForCausalLM"


def _translate(config: Mapping[str, Any], source: str) -> ModelArgs:
    """Translate without defaults: those of transformers differ by class, and a wrong one would be a wrong model."""
    architecture = _architecture_of(config)
    _check_supported(config, architecture, source)
    heads, scaling = config["num_attention_heads"], _rope_scaling(config, source)
    return ModelArgs(
        dim=config["hidden_size"],
        n_layers=config["num_hidden_layers"],
        head_dim=config["hidden_size"] // heads if config.get("head_dim") is None else config["head_dim"],
        hidden_dim=config["intermediate_size"],
        n_heads=heads,
        n_kv_heads=config["num_key_value_heads"],
        norm_eps=float(config["rms_norm_eps"]),
        vocab_size=config["vocab_size"],
        rope_theta=float(_rope_parameters(config).get("rope_theta") or config["rope_theta"]),
        max_seq_len=config["max_position_embeddings"],
        windows=_windows(config, source),
        moe=MoeArgs(config["num_local_experts"], config["num_experts_per_tok"]) if architecture == MIXTRAL else None,
        tied_embeddings=parse_bool(config, "tie_word_embeddings"),
        dtype=parse_dtype(config, source),
        eos_token_ids=parse_eos_token_ids(config.get("eos_token_id")),
        rope_scaling=scaling,
        quantization=parse_quantization(config.get("quantization_config"), source),
    )


def _architecture_of(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures") or ["nothing"]
    return str(architectures if isinstance(architectures, str) else architectures[0])


def _unwrap(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the configuration of the text model, with what the wrapper says of it.

    The text model's own values come first, but embeddings are tied if either says so: transformers writes both, and its
    wrapper's default is true.
    """
    text = {key: value for key, value in config["text_config"].items() if value is not None}
    if (kind := text.get("model_type")) not in WRAPPED_MODELS:
        raise CheckpointError(
            f"{source} describes a {WRAPPER} with a text model of type {kind!r}; supported: {', '.join(WRAPPED_MODELS)}"
        )
    outer = {key: config[key] for key in WRAPPER_KEYS if config.get(key) is not None}
    own: dict[str, Any] = {"architectures": [WRAPPED_MODELS[kind]]}
    if outer.get(TIED) is True:  # of either; which of the two is right, the tensors show
        own[TIED] = True
    return {"sliding_window": None} | outer | text | own


def parse_quantization(given: Mapping[str, Any] | None, source: str) -> Quantization | None:
    """Return the format of a checkpoint's matrices. Raises CheckpointError, with what is needed, for those not supported."""
    if not given:
        return None
    method, block = given.get("quant_method"), given.get("weight_block_size") or ()
    if method == "fp8" and not block:
        return Quantization.FP8
    name = f"FP8 with a scale for each block of {' x '.join(map(str, block))} numbers" if method == "fp8" else repr(method)
    if formats := {group.get("format") for group in (given.get("config_groups") or {}).values()} | {given.get("format")}:
        name += "".join(f" ({each})" for each in sorted(filter(None, formats)))
    raise unsupported_quantization(name, source)


def unsupported_quantization(name: str, source: str) -> CheckpointError:
    """Return the error for a checkpoint that is quantized in an unknown format."""
    return CheckpointError(
        f"{source}: weights quantized as {name} are not supported, which need kernels of their own; supported are "
        "FP8 with one scale for each matrix, as Mistral publishes it, and weights in bfloat16, float16 or float32"
    )


def _check_supported(config: Mapping[str, Any], architecture: str, source: str) -> None:
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise CheckpointError(f"{source} describes {architecture}; supported: {', '.join(SUPPORTED_ARCHITECTURES)}")
    if config.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{source}: activation {config['hidden_act']!r} is not supported, only silu")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise CheckpointError(f"{source}: {key} is set, and layers with biases are not supported")


def _rope_parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rotary settings: ``rope_parameters`` of transformers 5, ``rope_scaling`` of transformers 4."""
    rope: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return rope


def _rope_scaling(config: Mapping[str, Any], source: str) -> YarnScaling | None:
    rope = _rope_parameters(config)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "yarn":
        raise CheckpointError(f"{source}: rotary scaling of type {kind!r} is not supported, only 'yarn'")
    if rope.get("truncate") is False or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(f"{source}: yarn with truncate = false or a partial_rotary_factor is not supported")
    if missing := [key for key in ("factor", "original_max_position_embeddings") if key not in rope]:
        raise CheckpointError(f"{source}: rotary scaling of type 'yarn' lacks {', '.join(missing)}")
    factor = float(rope["factor"])
    return YarnScaling(
        factor=factor,
        original_max_seq_len=rope["original_max_position_embeddings"],
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        attention_factor=_attention_factor(rope, factor),
        llama4_beta=float(rope.get("llama_4_scaling_beta") or 0.0),
    )


def _attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    """Return ``attention_factor`` if it is given, else compute it, weighted by ``mscale`` and ``mscale_all_dim``."""
    if (given := rope.get("attention_factor")) is not None:
        return float(given)
    mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return yarn_attention_factor(factor, float(mscale)) / yarn_attention_factor(factor, float(mscale_all_dim))
    return yarn_attention_factor(factor)


def yarn_attention_factor(factor: float, weight: float = 1.0) -> float:
    """Compute 0.1 * weight * ln(factor) + 1 (YaRN, equation 22). Factor 16: 0.1 * ln 16 + 1 = 1.277."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _windows(config: Mapping[str, Any], source: str) -> tuple[int | None, ...]:
    check_num_layers(config["num_hidden_layers"])
    by_kind = {"sliding_attention": config["sliding_window"], "full_attention": None}
    kinds = config.get("layer_types") or ["sliding_attention"] * config["num_hidden_layers"]
    if config.get("layer_types") and "sliding_attention" in kinds and config["sliding_window"] is None:
        raise CheckpointError(f"{source} has layers of type 'sliding_attention' but no sliding_window")
    if unknown := set(kinds) - set(by_kind):
        raise CheckpointError(f"{source}: layers of type {', '.join(map(repr, sorted(unknown)))} are not supported")
    return tuple(by_kind[kind] for kind in kinds)


def parse_bool(config: Mapping[str, Any], key: str) -> bool:
    """Return the boolean ``config[key]``, False if it is missing. Raises TypeError for others, such as the text "false"."""
    value = config.get(key)
    if value not in (None, False, True):
        raise TypeError(f"{key} is {value!r}")
    return bool(value)


def parse_dtype(config: Mapping[str, Any], source: str) -> str:
    """Return the dtype of the weights, bfloat16 if none is given. Raises CheckpointError if it is not supported."""
    name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise CheckpointError(f"{source}: weights of type {name} are not supported; supported: {', '.join(DTYPE_BYTES)}")
    return name


def parse_eos_token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Return the end-of-sequence tokens of a configuration: one, several or none. Raises TypeError for anything else."""
    ids = () if value is None else (value,) if isinstance(value, int) else tuple(value)
    if not all(isinstance(i, int) for i in ids):
        raise TypeError(f"eos_token_id is {value!r}")
    return ids
