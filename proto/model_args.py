"""Geometry of one model, independent of the layout of its checkpoint. Field names are those of Mistral's ``params.json``."""

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum

from tramontane.proto.errors import InvalidModelConfigError

MAX_DIM, MAX_LAYERS, MAX_EXPERTS = 2**31 - 1, 1024, 1024  # a larger number can only come from a damaged file
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Quantization(StrEnum):
    """Format of a stage's matrices instead of the model's dtype: one byte per element, and one float32 scale per row."""

    INT8 = "int8"  # integers
    W8A8 = "w8a8"  # integers, and on CPUs activations are rounded to integers, too, with a scale per token
    FP8 = "fp8"  # floats of 4 exponent and 3 mantissa bits, the largest 448 (torch's float8_e4m3fn)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Format of a stage's weights. Norms have ``dtype``, like activations; matrices ``matrix_dtype``, or ``quantize``."""

    dtype: str
    _: KW_ONLY
    stored: str  # dtype of the checkpoint's matrices that are not quantized there
    quantize: Quantization | None = None
    quantize_head: bool = True  # a quantized checkpoint's own head is not

    @classmethod
    def of(cls, args: "ModelArgs", dtype: str, quantize: Quantization | None) -> "WeightFormat":
        """Return the format for activations in ``dtype``; without ``quantize`` a quantized checkpoint stays as it is."""
        return cls(dtype, stored=args.dtype, quantize=quantize or args.quantization, quantize_head=quantize is not None)

    @property
    def matrix_dtype(self) -> str:
        """Dtype of matrices that are not quantized.

        Under activations in float32 those in bfloat16 remain as they are stored: float32 would be the same numbers in twice the
        memory.
        """
        return "bfloat16" if (self.stored, self.dtype) == ("bfloat16", "float32") else self.dtype


@dataclass(frozen=True, slots=True)
class MoeArgs:
    """Mixture of experts: each token uses ``num_experts_per_tok`` of ``num_experts``."""

    num_experts: int
    num_experts_per_tok: int

    def __post_init__(self) -> None:
        _check_sizes({"num_experts": self.num_experts, "num_experts_per_tok": self.num_experts_per_tok}, MAX_EXPERTS)
        if self.num_experts_per_tok > self.num_experts:
            raise InvalidModelConfigError(
                f"{self.num_experts_per_tok} experts per token cannot be chosen from {self.num_experts}"
            )


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Scaling of the rotary embedding to a longer context (YaRN, arXiv 2309.00071, section 3)."""

    factor: float  # how many times longer the context is than ``original_max_seq_len``
    original_max_seq_len: int  # the context of pretraining
    beta_fast: float = 32.0  # pairs of elements that rotate more often than this within it keep their frequency
    beta_slow: float = 1.0  # pairs that rotate less often are slowed down by ``factor``; between the two is a linear ramp
    attention_factor: float = 1.0  # multiplies keys and queries
    # Queries past the original context are multiplied by 1 + llama4_beta * ln(1 + floor(position / original_max_seq_len)).
    llama4_beta: float = 0.0

    def __post_init__(self) -> None:
        _check_sizes({"original_max_seq_len": self.original_max_seq_len})
        for name in ("factor", "beta_fast", "beta_slow", "attention_factor"):
            _check_positive(name, getattr(self, name))
        if not (math.isfinite(self.llama4_beta) and self.llama4_beta >= 0):
            raise InvalidModelConfigError(f"the model's llama4_beta is {self.llama4_beta}; it must not be negative")


@dataclass(frozen=True, slots=True)
class ModelArgs:
    """Geometry of one model. Raises InvalidModelConfigError if the numbers describe no model."""

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
    windows: tuple[int | None, ...]  # of each *global* layer: how many positions a token sees, itself included; None: all
    moe: MoeArgs | None = None
    tied_embeddings: bool = False
    dtype: str = "bfloat16"
    eos_token_ids: tuple[int, ...] = ()
    rope_scaling: YarnScaling | None = None
    # Of the checkpoint's matrices in layers, with one scale for each; the embeddings and the head have ``dtype``.
    quantization: Quantization | None = None

    def __post_init__(self) -> None:
        check_num_layers(self.n_layers)
        names = ("dim", "head_dim", "hidden_dim", "n_heads", "n_kv_heads", "vocab_size", "max_seq_len")
        _check_sizes({name: getattr(self, name) for name in names})
        if self.n_heads % self.n_kv_heads:
            raise InvalidModelConfigError(f"{self.n_heads} query heads cannot share {self.n_kv_heads} key heads evenly")
        if self.head_dim % 2:
            raise InvalidModelConfigError(f"head_dim is {self.head_dim}; rotary embedding needs an even one")
        for name in ("norm_eps", "rope_theta"):
            _check_positive(name, getattr(self, name))
        if len(self.windows) != self.n_layers:
            raise InvalidModelConfigError(f"{len(self.windows)} attention windows are given for {self.n_layers} layers")
        _check_sizes({f"window of layer {layer}": w for layer, w in enumerate(self.windows) if w is not None})
        if outside := [i for i in self.eos_token_ids if not 0 <= i < self.vocab_size]:
            raise InvalidModelConfigError(f"the end-of-sequence token {outside[0]} is not in the vocabulary of {self.vocab_size}")

    @property
    def num_parameters(self) -> int:
        """Parameters of the model; those of a tied head are counted once."""
        return self._count_parameters(self.moe.num_experts if self.moe else 1)

    @property
    def num_active_parameters(self) -> int:
        """Parameters that compute a token: without the experts that it does not choose."""
        return self._count_parameters(self.moe.num_experts_per_tok if self.moe else 1)

    def _count_parameters(self, num_experts: int) -> int:
        """Count with so many experts per layer. Mixtral 8x7B: 46.7 billion with 8, and 12.9 with 2."""
        attention = 2 * self.dim * self.head_dim * (self.n_heads + self.n_kv_heads)
        gate = self.dim * self.moe.num_experts if self.moe else 0
        layer = attention + gate + 3 * self.dim * self.hidden_dim * num_experts + 2 * self.dim
        return self.n_layers * layer + (1 if self.tied_embeddings else 2) * self.vocab_size * self.dim + self.dim

    @property
    def window_classes(self) -> tuple[int | None, ...]:
        """Distinct windows, in the order in which layers first use them."""
        return tuple(dict.fromkeys(self.windows))


def check_num_layers(n_layers: object) -> None:
    """Raise InvalidModelConfigError for an impossible number of layers, before anything is built once per layer."""
    _check_sizes({"n_layers": n_layers}, MAX_LAYERS)


def _check_sizes(sizes: Mapping[str, object], max_size: int = MAX_DIM) -> None:
    for name, value in sizes.items():
        if type(value) is not int or value < 1:
            raise InvalidModelConfigError(f"the model's {name} is {value!r}; it must be a positive whole number")
        if value > max_size:
            raise InvalidModelConfigError(f"the model's {name} is {value}; it must be at most {max_size}")


def _check_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise InvalidModelConfigError(f"the model's {name} is {value}; it must be a positive number")
