"""Geometry of what some models' layers have: YaRN, latent and sparse attention, mixtures of experts."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from tramontane.proto.errors import InvalidModelConfigError

MAX_DIM, MAX_EXPERTS = 2**31 - 1, 1024  # a larger number can only come from a damaged file


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Scaling of the rotary embedding to a longer context (YaRN, arXiv 2309.00071, section 3)."""

    factor: float  # how many times longer the context is than ``original_max_seq_len``
    original_max_seq_len: int  # the context of pretraining
    beta_fast: float = 32.0  # pairs of elements that rotate more often than this within it keep their frequency
    beta_slow: float = 1.0  # pairs that rotate less often are slowed down by ``factor``; between the two is a linear ramp
    attention_factor: float = 1.0  # multiplies the rotated numbers of keys and queries
    # Queries past the original context are multiplied by 1 + llama4_beta * ln(1 + floor(position / original_max_seq_len)).
    llama4_beta: float = 0.0
    score_factor: float = 1.0  # multiplies all scores of attention, as some models with latent attention have it

    def __post_init__(self) -> None:
        check_sizes({"original_max_seq_len": self.original_max_seq_len})
        for name in ("factor", "beta_fast", "beta_slow", "attention_factor", "score_factor"):
            check_positive(name, getattr(self, name))
        if not (math.isfinite(self.llama4_beta) and self.llama4_beta >= 0):
            raise InvalidModelConfigError(f"the model's llama4_beta is {self.llama4_beta}; it must not be negative")


@dataclass(frozen=True, slots=True)
class LatentArgs:
    """Latent attention, MLA (DeepSeek-V2, arXiv 2405.04434, section 2.1); field names are those of configurations.

    Its cache holds one vector per token and layer: ``kv_lora_rank`` numbers of which every head makes a key and a value, and
    a rotated part of the key, ``qk_rope_head_dim`` numbers, which is the same for all heads.
    """

    q_lora_rank: int | None  # numbers of which the queries of all heads are made; None: they are made of the hidden states
    kv_lora_rank: int
    qk_nope_head_dim: int  # numbers of a query and key that are not rotated
    qk_rope_head_dim: int  # and that are; 0 in layers without rotary embedding
    v_head_dim: int

    def __post_init__(self) -> None:
        names = ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
        check_sizes({name: getattr(self, name) for name in names})
        if self.qk_rope_head_dim != 0:
            check_sizes({"qk_rope_head_dim": self.qk_rope_head_dim})
        if self.q_lora_rank is not None:
            check_sizes({"q_lora_rank": self.q_lora_rank})
        if self.qk_rope_head_dim % 2:
            raise InvalidModelConfigError(f"qk_rope_head_dim is {self.qk_rope_head_dim}; rotary embedding needs an even one")

    @property
    def qk_head_dim(self) -> int:
        """Numbers of a query and key. Mistral Small 4: 64 + 64."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cached_dim(self) -> int:
        """Numbers in the cache, per token and layer. Mistral Small 4: 256 + 64."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def without_rotary(self) -> "LatentArgs":
        """The widths of a layer without rotary embedding, whose queries and keys are as wide. 64 + 64 become 128 + 0."""
        return replace(self, qk_nope_head_dim=self.qk_head_dim, qk_rope_head_dim=0)


@dataclass(frozen=True, slots=True)
class SparseArgs:
    """Sparse latent attention, as Mistral Large 4 has it (transformers, modeling_mistral_large4.py); an entry for each layer.

    A token attends to the ``index_topk`` earlier ones that an *indexer* finds the most relevant, to all while they are fewer.
    Layers can use the choice, and also the cache, of an earlier layer. Queries are scaled by head and position, and the rotary
    frequencies by numbers of the checkpoint.
    """

    rope_layers: tuple[bool, ...]  # whether its queries and keys are rotated
    kv_source_layers: tuple[int, ...]  # the layer whose cache it attends to, often its own number
    index_source_layers: tuple[int, ...]  # the layer whose indexer chooses for it, often its own number
    index_n_heads: int
    index_head_dim: int
    index_topk: int

    def __post_init__(self) -> None:
        names = ("index_n_heads", "index_head_dim", "index_topk")
        check_sizes({name: getattr(self, name) for name in names})
        for name in ("kv_source_layers", "index_source_layers"):
            sources = getattr(self, name)
            if len(sources) != len(self.rope_layers):
                raise InvalidModelConfigError(f"{name} has {len(sources)} entries for {len(self.rope_layers)} layers")
            for layer, source in enumerate(sources):
                if not (0 <= source <= layer and sources[source] == source):
                    raise InvalidModelConfigError(
                        f"layer {layer} cannot use layer {source} ({name}): it must be itself, or an earlier one that uses itself"
                    )
        for layer, source in enumerate(self.kv_source_layers):
            if self.rope_layers[layer] != self.rope_layers[source]:
                raise InvalidModelConfigError(
                    f"layer {layer} cannot use the cache of layer {source}: only one of them has rotary embedding"
                )
        self._check_latest_sources()

    def _check_latest_sources(self) -> None:
        """Raise InvalidModelConfigError where transformers would use another cache than ``kv_source_layers`` says.

        It keeps one cache that others use for layers with rotary embedding, and one for those without: always the latest.
        """
        used = {source for layer, source in enumerate(self.kv_source_layers) if source != layer}
        latest: dict[bool, int] = {}
        for layer, source in enumerate(self.kv_source_layers):
            has_rope = self.rope_layers[layer]
            if layer in used:
                latest[has_rope] = layer
            if source != layer and latest[has_rope] != source:
                raise InvalidModelConfigError(
                    f"layer {layer} cannot use the cache of layer {source}: that of layer {latest[has_rope]}, which later layers "
                    "use, too, has taken its place"
                )

    @property
    def stage_starts(self) -> frozenset[int]:
        """Layers with which a stage can begin: neither they nor later ones use an earlier layer's cache or choice.

        Sources 0 1 1 3 3: layers 0, 1 and 3. Layer 2 and layer 4 have to be where their sources are.
        """
        oldest, starts = len(self.rope_layers), []
        for layer in reversed(range(len(self.rope_layers))):
            oldest = min(oldest, self.kv_source_layers[layer], self.index_source_layers[layer])
            starts += [layer] * (oldest == layer)
        return frozenset(starts)


class GateScores(StrEnum):
    """What a gate makes of its logits before experts are chosen by them."""

    LOGITS = "logits"  # nothing; weights are the softmax of the chosen logits (Mixtral, arXiv 2401.04088, section 2.1)
    SOFTMAX = "softmax"  # the softmax of all logits (Mistral Small 4)
    SIGMOID = "sigmoid"  # with a bias for each expert, by which they are chosen only (DeepSeek-V3, arXiv 2412.19437, eq. 12-16)


@dataclass(frozen=True, slots=True)
class MoeArgs:
    """Mixture of experts: each token uses ``num_experts_per_tok`` of ``num_experts``.

    Experts form ``n_group`` groups of consecutive ones. A token's are chosen from the ``topk_group`` groups whose two highest
    scores have the greatest sum.
    """

    num_experts: int
    num_experts_per_tok: int
    expert_dim: int = 0  # feed-forward width of an expert; 0: the model's ``hidden_dim``
    n_shared_experts: int = 0  # that compute every token, in addition to those that are chosen; together they are one network
    first_k_dense_replace: int = 0  # layers at the start of the model that have one feed-forward network instead
    scores: GateScores = GateScores.LOGITS
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True  # whether the weights of a token's experts are divided by their sum
    routed_scaling_factor: float = 1.0  # multiplies the weights of a token's experts
    float32_gate: bool = False  # whether logits of experts are computed in float32 whatever the dtype of the model

    def __post_init__(self) -> None:
        numbers = ("num_experts", "num_experts_per_tok", "n_group", "topk_group")
        check_sizes({name: getattr(self, name) for name in numbers}, MAX_EXPERTS)
        optional = ("expert_dim", "n_shared_experts", "first_k_dense_replace")
        check_sizes({name: getattr(self, name) for name in optional if getattr(self, name) != 0})
        check_positive("routed_scaling_factor", self.routed_scaling_factor)
        if self.num_experts % self.n_group or (self.n_group > 1 and self.num_experts < 2 * self.n_group):
            raise InvalidModelConfigError(f"{self.num_experts} experts cannot form {self.n_group} groups of two or more")
        if self.topk_group > self.n_group:
            raise InvalidModelConfigError(f"{self.topk_group} groups of experts cannot be chosen from {self.n_group}")
        eligible = self.num_experts // self.n_group * self.topk_group
        if self.num_experts_per_tok > eligible:
            raise InvalidModelConfigError(f"{self.num_experts_per_tok} experts per token cannot be chosen from {eligible}")


def check_sizes(sizes: Mapping[str, object], max_size: int = MAX_DIM) -> None:
    """Raise InvalidModelConfigError, with the name, for what is not a positive whole number or is too large."""
    for name, value in sizes.items():
        if type(value) is not int or value < 1:
            raise InvalidModelConfigError(f"the model's {name} is {value!r}; it must be a positive whole number")
        if value > max_size:
            raise InvalidModelConfigError(f"the model's {name} is {value}; it must be at most {max_size}")


def check_positive(name: str, value: float) -> None:
    """Raise InvalidModelConfigError for what is not a positive number."""
    if not (math.isfinite(value) and value > 0):
        raise InvalidModelConfigError(f"the model's {name} is {value}; it must be a positive number")
