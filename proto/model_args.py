"""Geometry of one model, independent of the layout of its checkpoint. Field names follow Mistral's
``params.json``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from tramontane.proto.errors import InvalidModelConfigError, PlanError
from tramontane.proto.weight_format import Quantization

MAX_DIM, MAX_EXPERTS = 2**31 - 1, 1024  # a larger number can only come from a damaged file


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Scaling of the rotary embedding to a longer context (YaRN, arXiv 2309.00071, section 3)."""

    factor: float  # ratio of the context to ``original_max_seq_len``
    original_max_seq_len: int  # the context of pretraining
    # pairs of elements that rotate more often than this within it keep their frequency
    beta_fast: float = 32.0
    # pairs that rotate less often are slowed down by ``factor``; between the two is a linear ramp
    beta_slow: float = 1.0
    attention_factor: float = 1.0  # multiplies the rotated numbers of keys and queries
    # Queries past the original context are multiplied by 1 + llama4_beta * ln(1 + floor(position /
    # original_max_seq_len)).
    llama4_beta: float = 0.0
    # multiplies all attention scores, in some models with latent attention
    score_factor: float = 1.0

    def __post_init__(self) -> None:
        check_sizes({"original_max_seq_len": self.original_max_seq_len})
        for name in ("factor", "beta_fast", "beta_slow", "attention_factor", "score_factor"):
            check_positive(name, getattr(self, name))
        if not (math.isfinite(self.llama4_beta) and self.llama4_beta >= 0):
            raise InvalidModelConfigError(
                f"the model's llama4_beta is {self.llama4_beta}; it must not be negative"
            )


@dataclass(frozen=True, slots=True)
class LatentArgs:
    """Latent attention, MLA (DeepSeek-V2, arXiv 2405.04434, section 2.1); field names follow the
    configurations.

    Its cache holds one vector per token and layer: ``kv_lora_rank`` numbers from which every head
    computes a key and a value, and a rotated part of the key, ``qk_rope_head_dim`` numbers, which
    is the same for all heads.
    """

    # rank of the query projection of all heads; None: queries are computed from the hidden states
    # directly
    q_lora_rank: int | None
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
            raise InvalidModelConfigError(
                f"qk_rope_head_dim is {self.qk_rope_head_dim}; rotary embedding needs an even one"
            )

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
        """The widths of a layer without rotary embedding; queries and keys keep their width. 64 +
        64 become 128 + 0.
        """
        return replace(self, qk_nope_head_dim=self.qk_head_dim, qk_rope_head_dim=0)


@dataclass(frozen=True, slots=True)
class SparseArgs:
    """Sparse latent attention of Mistral Large 4 (transformers, modeling_mistral_large4.py); an
    entry for each layer.

    A token attends to the ``index_topk`` earlier ones that an *indexer* finds the most relevant, to
    all while they are fewer. Layers can use the choice, and also the cache, of an earlier layer.
    Queries are scaled by head and position, and the rotary frequencies by numbers of the
    checkpoint.
    """

    rope_layers: tuple[bool, ...]  # whether its queries and keys are rotated
    kv_source_layers: tuple[int, ...]  # the layer whose cache it attends to, often its own number
    # the layer whose indexer selects keys for it, often its own number
    index_source_layers: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int

    def __post_init__(self) -> None:
        names = ("index_n_heads", "index_head_dim", "index_topk")
        check_sizes({name: getattr(self, name) for name in names})
        for name in ("kv_source_layers", "index_source_layers"):
            sources = getattr(self, name)
            if len(sources) != len(self.rope_layers):
                raise InvalidModelConfigError(
                    f"{name} has {len(sources)} entries for {len(self.rope_layers)} layers"
                )
            for layer, source in enumerate(sources):
                if not (0 <= source <= layer and sources[source] == source):
                    raise InvalidModelConfigError(
                        f"layer {layer} cannot use layer {source} ({name}): it must be itself, or"
                        " an earlier one that uses itself"
                    )
        for layer, source in enumerate(self.kv_source_layers):
            if self.rope_layers[layer] != self.rope_layers[source]:
                raise InvalidModelConfigError(
                    f"layer {layer} cannot use the cache of layer {source}: only one of them has"
                    " rotary embedding"
                )
        self._check_latest_sources()

    def _check_latest_sources(self) -> None:
        """Raise InvalidModelConfigError where transformers would use another cache than
        ``kv_source_layers``.

        transformers keeps one shared cache for layers with rotary embedding, and one for layers
        without: always the latest.
        """
        used = {source for layer, source in enumerate(self.kv_source_layers) if source != layer}
        latest: dict[bool, int] = {}
        for layer, source in enumerate(self.kv_source_layers):
            has_rope = self.rope_layers[layer]
            if layer in used:
                latest[has_rope] = layer
            if source != layer and latest[has_rope] != source:
                raise InvalidModelConfigError(
                    f"layer {layer} cannot use the cache of layer {source}: that of layer"
                    f" {latest[has_rope]}, which later layers use, too, has taken its place"
                )

    @property
    def stage_starts(self) -> frozenset[int]:
        """Layers with which a stage can begin: they and later layers use no earlier layer's cache
        or key selection.

        Sources 0 1 1 3 3: layers 0, 1 and 3. Layers 2 and 4 have to be in the stages of their
        sources.
        """
        oldest, starts = len(self.rope_layers), []
        for layer in reversed(range(len(self.rope_layers))):
            oldest = min(oldest, self.kv_source_layers[layer], self.index_source_layers[layer])
            starts += [layer] * (oldest == layer)
        return frozenset(starts)


class GateScores(StrEnum):
    """The function that a gate applies to its logits before it selects experts."""

    # identity; weights are the softmax of the selected logits (Mixtral, arXiv 2401.04088, section
    # 2.1)
    LOGITS = "logits"
    SOFTMAX = "softmax"  # the softmax of all logits (Mistral Small 4)
    # with a bias for each expert, used only for the selection (DeepSeek-V3, arXiv 2412.19437, eq.
    # 12-16)
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True)
class MoeArgs:
    """Mixture of experts: each token uses ``num_experts_per_tok`` of ``num_experts``.

    Experts form ``n_group`` groups of consecutive experts. A token's experts are selected from the
    ``topk_group`` groups whose two highest scores have the greatest sum.
    """

    num_experts: int
    num_experts_per_tok: int
    expert_dim: int = 0  # feed-forward width of an expert; 0: the model's ``hidden_dim``
    # experts that compute every token, in addition to the selected ones; together they are one
    # network
    n_shared_experts: int = 0
    # layers at the start of the model that have one feed-forward network instead
    first_k_dense_replace: int = 0
    scores: GateScores = GateScores.LOGITS
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True  # whether the weights of a token's experts are divided by their sum
    routed_scaling_factor: float = 1.0  # multiplies the weights of a token's experts
    # whether logits of experts are computed in float32, regardless of the model's dtype
    float32_gate: bool = False

    def __post_init__(self) -> None:
        numbers = ("num_experts", "num_experts_per_tok", "n_group", "topk_group")
        check_sizes({name: getattr(self, name) for name in numbers}, MAX_EXPERTS)
        optional = ("expert_dim", "n_shared_experts", "first_k_dense_replace")
        check_sizes({name: getattr(self, name) for name in optional if getattr(self, name) != 0})
        check_positive("routed_scaling_factor", self.routed_scaling_factor)
        if self.num_experts % self.n_group or (
            self.n_group > 1 and self.num_experts < 2 * self.n_group
        ):
            raise InvalidModelConfigError(
                f"{self.num_experts} experts cannot form {self.n_group} groups of two or more"
            )
        if self.topk_group > self.n_group:
            raise InvalidModelConfigError(
                f"{self.topk_group} groups of experts cannot be chosen from {self.n_group}"
            )
        eligible = self.num_experts // self.n_group * self.topk_group
        if self.num_experts_per_tok > eligible:
            raise InvalidModelConfigError(
                f"{self.num_experts_per_tok} experts per token cannot be chosen from {eligible}"
            )


def check_sizes(sizes: Mapping[str, object], max_size: int = MAX_DIM) -> None:
    """Raise InvalidModelConfigError, with the name, for a value that is not a positive whole number
    or is too large.
    """
    for name, value in sizes.items():
        if type(value) is not int or value < 1:
            raise InvalidModelConfigError(
                f"the model's {name} is {value!r}; it must be a positive whole number"
            )
        if value > max_size:
            raise InvalidModelConfigError(
                f"the model's {name} is {value}; it must be at most {max_size}"
            )


def check_positive(name: str, value: float) -> None:
    """Raise InvalidModelConfigError for a value that is not a positive number."""
    if not (math.isfinite(value) and value > 0):
        raise InvalidModelConfigError(
            f"the model's {name} is {value}; it must be a positive number"
        )


MAX_LAYERS = 1024  # a larger number can only come from a damaged file


@dataclass(frozen=True, slots=True)
class ModelArgs:
    """Geometry of one model. Raises InvalidModelConfigError if the numbers are not a valid model.

    ``n_kv_heads`` and ``head_dim`` describe the cache. With latent attention it has one head, of
    ``LatentArgs.cached_dim``.
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
    # of each *global* layer: how many positions a token sees, itself included; None: all
    windows: tuple[int | None, ...]
    moe: MoeArgs | None = None
    tied_embeddings: bool = False
    dtype: str = "bfloat16"
    eos_token_ids: tuple[int, ...] = ()
    rope_scaling: YarnScaling | None = None
    latent: LatentArgs | None = None
    sparse: SparseArgs | None = None  # of latent attention
    final_logit_softcapping: float | None = None  # c: logits x become c tanh(x / c)
    # Of the checkpoint's matrices in layers, with one scale for each; the embeddings and the head
    # have ``dtype``.
    quantization: Quantization | None = None

    def __post_init__(self) -> None:
        check_num_layers(self.n_layers)
        names = (
            "dim",
            "head_dim",
            "hidden_dim",
            "n_heads",
            "n_kv_heads",
            "vocab_size",
            "max_seq_len",
        )
        check_sizes({name: getattr(self, name) for name in names})
        if self.n_heads % self.n_kv_heads:
            raise InvalidModelConfigError(
                f"{self.n_heads} query heads cannot share {self.n_kv_heads} key heads evenly"
            )
        if self.latent and (self.n_kv_heads, self.head_dim) != (1, self.latent.cached_dim):
            raise InvalidModelConfigError(
                f"the cache of latent attention has one head of {self.latent.cached_dim} numbers"
            )
        if self.latent is None and self.head_dim % 2:
            raise InvalidModelConfigError(
                f"head_dim is {self.head_dim}; rotary embedding needs an even one"
            )
        for name in ("norm_eps", "rope_theta"):
            check_positive(name, getattr(self, name))
        if self.final_logit_softcapping is not None:
            check_positive("final_logit_softcapping", self.final_logit_softcapping)
        if len(self.windows) != self.n_layers:
            raise InvalidModelConfigError(
                f"{len(self.windows)} attention windows are given for {self.n_layers} layers"
            )
        if self.sparse:
            self._check_sparse(self.sparse)
        check_sizes(
            {f"window of layer {layer}": w for layer, w in enumerate(self.windows) if w is not None}
        )
        if outside := [i for i in self.eos_token_ids if not 0 <= i < self.vocab_size]:
            raise InvalidModelConfigError(
                f"the end-of-sequence token {outside[0]} is not in the vocabulary of"
                f" {self.vocab_size}"
            )

    def _check_sparse(self, sparse: SparseArgs) -> None:
        if self.latent is None or self.latent.q_lora_rank is not None or any(self.windows):
            raise InvalidModelConfigError(
                "sparse attention is latent, without windows, and makes queries of hidden states"
            )
        if len(sparse.rope_layers) != self.n_layers:
            raise InvalidModelConfigError(
                f"{len(sparse.rope_layers)} layers of sparse attention are given for"
                f" {self.n_layers}"
            )
        if self.latent.qk_rope_head_dim > sparse.index_head_dim:
            raise InvalidModelConfigError(
                f"qk_rope_head_dim is {self.latent.qk_rope_head_dim}; index_head_dim,"
                f" {sparse.index_head_dim}, must not be less"
            )

    @property
    def rotary_dim(self) -> int:
        """Numbers of a query and key that are rotated."""
        return self.latent.qk_rope_head_dim if self.latent else self.head_dim

    def latent_of(self, layer: int) -> LatentArgs:
        """Return the widths of latent attention in a layer. Only layers without rotary embedding
        differ from the model's widths.
        """
        assert self.latent is not None
        return (
            self.latent
            if self.sparse is None or self.sparse.rope_layers[layer]
            else self.latent.without_rotary
        )

    def kv_source(self, layer: int) -> int:
        """Return the layer whose cache a layer attends to."""
        return self.sparse.kv_source_layers[layer] if self.sparse else layer

    def index_source(self, layer: int) -> int | None:
        """Return the layer whose indexer selects a layer's keys, None if it attends to all keys in
        its window.
        """
        return self.sparse.index_source_layers[layer] if self.sparse else None

    @property
    def layer_groups(self) -> tuple[range, ...]:
        """Runs of layers that have to be in the same stage: one layer each, unless layers use the
        cache or key selection of others.

        Where stages can begin with layers 0, 1 and 3 of 5: 0, 1-2, 3-4.
        """
        starts = sorted(self.sparse.stage_starts) if self.sparse else list(range(self.n_layers))
        return tuple(
            range(start, end)
            for start, end in zip(starts, [*starts[1:], self.n_layers], strict=True)
        )

    def check_num_stages(self, num_stages: int, what: str) -> None:
        """Raise PlanError, beginning with ``what``, if the layers cannot be divided into this
        number of stages.
        """
        groups = self.layer_groups
        if num_stages <= len(groups):
            return
        if len(groups) == self.n_layers:
            raise PlanError(
                f"{what}, but the model has only {self.n_layers} layers; no stage may be empty"
            )
        largest, stages = max(groups, key=len), f"{len(groups)} stage{'s' * (len(groups) > 1)}"
        raise PlanError(
            f"{what}, but the model's {self.n_layers} layers can form only {stages}: those that use"
            " the key/value cache or the indexer of another layer must be in its stage, such as"
            f" layers {largest.start} to {largest.stop - 1}"
        )

    def cached_numbers(self, layer: int) -> int:
        """Return the numbers that a layer caches per token.

        Mistral 7B: keys and values of 8 heads of 128. Mistral Large 4: a latent vector of 576, and
        128 of the indexer's key.
        """
        keys_and_values = (
            (1 if self.latent else 2)
            * self.n_kv_heads
            * self.head_dim
            * (self.kv_source(layer) == layer)
        )
        index = (
            self.sparse.index_head_dim if self.sparse and self.index_source(layer) == layer else 0
        )
        return keys_and_values + index

    @property
    def moe_layers(self) -> range:
        """Layers that have experts."""
        return (
            range(min(self.moe.first_k_dense_replace, self.n_layers), self.n_layers)
            if self.moe
            else range(0)
        )

    @property
    def expert_dim(self) -> int:
        """Feed-forward width of an expert."""
        return (self.moe.expert_dim if self.moe else 0) or self.hidden_dim

    @property
    def num_parameters(self) -> int:
        """Parameters of the model; the parameters of a tied head are counted once."""
        return self._count_parameters(self.moe.num_experts if self.moe else 0)

    @property
    def num_active_parameters(self) -> int:
        """Parameters that compute a token: without the experts that are not selected."""
        return self._count_parameters(self.moe.num_experts_per_tok if self.moe else 0)

    def _count_parameters(self, num_experts: int) -> int:
        """Count the parameters with this number of experts per MoE layer. Mixtral 8x7B: 46.7
        billion with 8, and 12.9 with 2.
        """
        layers = sum(
            self._attention_parameters(layer) + 2 * self.dim for layer in range(self.n_layers)
        )
        layers += (self.n_layers - len(self.moe_layers)) * 3 * self.dim * self.hidden_dim
        if self.moe:
            experts = 3 * self.dim * self.expert_dim * (num_experts + self.moe.n_shared_experts)
            biases = self.moe.num_experts if self.moe.scores is GateScores.SIGMOID else 0
            layers += len(self.moe_layers) * (experts + self.dim * self.moe.num_experts + biases)
        frequencies = self.rotary_dim // 2 if self.sparse else 0
        return (
            layers
            + (1 if self.tied_embeddings else 2) * self.vocab_size * self.dim
            + self.dim
            + frequencies
        )

    def _attention_parameters(self, layer: int) -> int:
        if self.latent is None:
            return 2 * self.dim * self.head_dim * (self.n_heads + self.n_kv_heads)
        latent = self.latent_of(layer)
        rank, q_width = latent.q_lora_rank, self.n_heads * latent.qk_head_dim
        queries = self.dim * q_width if rank is None else self.dim * rank + rank + rank * q_width
        keys = (self.dim * latent.cached_dim + latent.kv_lora_rank) * (
            self.kv_source(layer) == layer
        )
        heads = self.n_heads * (latent.qk_nope_head_dim + latent.v_head_dim) * latent.kv_lora_rank
        total = queries + keys + heads + self.dim * self.n_heads * latent.v_head_dim
        return total + (2 * self.n_heads + self._indexer_parameters(layer) if self.sparse else 0)

    def _indexer_parameters(self, layer: int) -> int:
        if self.sparse is None or self.index_source(layer) != layer:
            return 0
        heads, width = self.sparse.index_n_heads, self.sparse.index_head_dim
        return self.dim * (heads * width + width + heads) + 2 * (self.dim + width + heads)

    @property
    def window_classes(self) -> tuple[int | None, ...]:
        """Distinct windows, in the order in which layers first use them."""
        return tuple(dict.fromkeys(self.windows))


def check_num_layers(n_layers: object) -> None:
    """Raise InvalidModelConfigError for an impossible number of layers, before any object is built
    per layer.
    """
    check_sizes({"n_layers": n_layers}, MAX_LAYERS)
