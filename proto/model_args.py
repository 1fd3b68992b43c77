"""What a checkpoint's configuration says about its model.

Field names are Mistral's own (``params.json``); ``from_hf_config`` translates
the Hugging Face spelling. Nothing here reads weights or needs torch.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tramontane.proto.errors import CheckpointError

SUPPORTED_ARCHITECTURES = ("MistralForCausalLM", "MixtralForCausalLM")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class MoeArgs:
    """Sparse experts: each token uses ``num_experts_per_tok`` of ``num_experts``."""

    num_experts: int
    num_experts_per_tok: int

    def __post_init__(self) -> None:
        _check_sizes({"num_experts": self.num_experts, "num_experts_per_tok": self.num_experts_per_tok})
        if self.num_experts_per_tok > self.num_experts:
            raise CheckpointError(f"{self.num_experts_per_tok} experts per token cannot be chosen from {self.num_experts}")


@dataclass(frozen=True, slots=True)
class ModelArgs:
    """One model's geometry.

    ``windows`` has one entry per *global* layer: how many positions a token of
    that layer sees, itself included, or None for all of them.
    """

    dim: int
    n_layers: int
    head_dim: int
    hidden_dim: int
    n_heads: int
    n_kv_heads: int
    norm_eps: float
    vocab_size: int
    rope_theta: float
    max_seq_len: int
    windows: tuple[int | None, ...]
    moe: MoeArgs | None = None
    tied_embeddings: bool = False
    dtype: str = "bfloat16"
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        names = ("dim", "n_layers", "head_dim", "hidden_dim", "n_heads", "n_kv_heads", "vocab_size", "max_seq_len")
        _check_sizes({name: getattr(self, name) for name in names})
        if self.n_heads % self.n_kv_heads:
            raise CheckpointError(f"{self.n_heads} query heads cannot share {self.n_kv_heads} key heads evenly")
        if self.head_dim % 2:
            raise CheckpointError(f"head_dim is {self.head_dim}; rotary embedding needs an even one")
        for name in ("norm_eps", "rope_theta"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise CheckpointError(f"the model's {name} is {getattr(self, name)}; it must be a positive number")
        if len(self.windows) != self.n_layers:
            raise CheckpointError(f"{len(self.windows)} attention windows are given for {self.n_layers} layers")
        _check_sizes({f"window of layer {layer}": w for layer, w in enumerate(self.windows) if w is not None})

    @property
    def window_classes(self) -> tuple[int | None, ...]:
        """The distinct windows, in the order in which layers first use them."""
        return tuple(dict.fromkeys(self.windows))

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Read ``config.json`` of a checkpoint in the Hugging Face layout."""
        path = folder / "config.json"
        try:
            if not folder.is_dir():
                raise CheckpointError(f"model folder {folder} does not exist; --model takes a downloaded checkpoint's folder")
            if not path.is_file():
                raise CheckpointError(f"{folder} has no config.json; --model takes a checkpoint in the Hugging Face layout")
            config = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(f"model folder {str(folder)[:200]} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise CheckpointError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(config, dict):
            raise CheckpointError(f"{path} holds no JSON object")
        return cls.from_hf_config(config, source=str(path))

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any], source: str = "config.json") -> Self:
        """Translate a Hugging Face configuration, as transformers 4 or 5 writes it."""
        try:
            return cls._translate(config, source)
        except KeyError as error:
            raise CheckpointError(f"{source} lacks the key {error}") from error
        except (TypeError, ValueError, AttributeError, ZeroDivisionError, IndexError) as error:
            raise CheckpointError(f"{source} holds a value of the wrong type: {error}") from error

    @classmethod
    def _translate(cls, config: Mapping[str, Any], source: str) -> Self:
        architecture = (config.get("architectures") or ["nothing"])[0]
        if architecture not in SUPPORTED_ARCHITECTURES:
            raise CheckpointError(f"{source} describes {architecture}; supported: {', '.join(SUPPORTED_ARCHITECTURES)}")
        if config.get("hidden_act", "silu") != "silu":
            raise CheckpointError(f"{source}: activation {config['hidden_act']!r} is not supported, only silu")
        for key in ("attention_bias", "mlp_bias"):
            if config.get(key):
                raise CheckpointError(f"{source}: {key} is set, and layers with biases are not supported")
        if config.get("quantization_config"):
            raise CheckpointError(f"{source}: quantised checkpoints are not supported; use the original weights")
        heads = config["num_attention_heads"]
        is_moe = architecture == "MixtralForCausalLM"
        return cls(
            dim=config["hidden_size"],
            n_layers=config["num_hidden_layers"],
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            hidden_dim=config["intermediate_size"],
            n_heads=heads,
            n_kv_heads=config["num_key_value_heads"],
            norm_eps=float(config["rms_norm_eps"]),
            vocab_size=config["vocab_size"],
            rope_theta=_rope_theta(config, source),
            max_seq_len=config["max_position_embeddings"],
            windows=_windows(config, source),
            moe=MoeArgs(config["num_local_experts"], config["num_experts_per_tok"]) if is_moe else None,
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            dtype=_dtype(config, source),
            eos_token_ids=_ids(config.get("eos_token_id")),
        )


def _check_sizes(sizes: Mapping[str, object]) -> None:
    for name, value in sizes.items():
        if type(value) is not int or value < 1:
            raise CheckpointError(f"the model's {name} is {value!r}; it must be a positive whole number")


def _rope_theta(config: Mapping[str, Any], source: str) -> float:
    """transformers 5 writes ``rope_parameters``; 4 wrote ``rope_theta`` and ``rope_scaling``."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default":
        raise CheckpointError(f"{source}: rotary scaling of type {kind!r} is not supported")
    return float(rope.get("rope_theta") or config["rope_theta"])


def _windows(config: Mapping[str, Any], source: str) -> tuple[int | None, ...]:
    """No defaults here or above: transformers' differ by class, and a wrong guess would be a wrong model."""
    by_kind = {"sliding_attention": config["sliding_window"], "full_attention": None}
    kinds = config.get("layer_types") or ["sliding_attention"] * config["num_hidden_layers"]
    if config.get("layer_types") and "sliding_attention" in kinds and config["sliding_window"] is None:
        raise CheckpointError(f"{source} has layers of type 'sliding_attention' but no sliding_window")
    if unknown := set(kinds) - set(by_kind):
        raise CheckpointError(f"{source}: layers of type {', '.join(map(repr, sorted(unknown)))} are not supported")
    return tuple(by_kind[kind] for kind in kinds)


def _dtype(config: Mapping[str, Any], source: str) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise CheckpointError(f"{source}: weights of type {name} are not supported; supported: {', '.join(DTYPE_BYTES)}")
    return name


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    ids = () if value is None else (value,) if isinstance(value, int) else tuple(value)
    if not all(isinstance(i, int) for i in ids):
        raise TypeError(f"eos_token_id is {value!r}")
    return ids
