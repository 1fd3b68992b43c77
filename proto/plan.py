"""Plan of a pipeline: all settings that are fixed for its life.

A ``PipelinePlan`` defines the layers of each stage (one ``StagePlan`` each), the division of caches
into pages (``CachePlan``), and the experts of each actor if they are outside the stages
(``ExpertPlan``).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from tramontane.proto.errors import ConfigError
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.units import format_bytes
from tramontane.proto.weight_format import DTYPE_BYTES, Quantization, WeightFormat

Link = Literal["object-store", "direct"]  # transport of hidden states from stage to stage
# Of keys and values in the cache: auto is the dtype of activations, fp8 float8_e4m3fn numbers with
# a scale for each vector.
KvCacheDtype = Literal["auto", "fp8"]

SCALE_BYTES = 4  # of a key's or value's scale, in float32


# ---- caches


@dataclass(frozen=True, slots=True)
class WindowClass:
    """Layers that have the same attention window. They share page ids: an id means the same rows in
    each of these layers.
    """

    window: int | None  # how many positions a token sees, itself included, or None for all of them
    ring_pages: int  # entries of a sequence's page ring (see ``ring_pages``)
    num_pages: int  # in the pool, the same in all stages

    def pages_for(self, num_positions: int, page_size: int) -> int:
        """Return how many pages a sequence of ``num_positions`` cached positions holds."""
        return min(-(-num_positions // page_size), self.ring_pages)

    def new_pages(self, start: int, end: int, page_size: int) -> range:
        """Return the indices of the pages that a sequence gains with the positions from ``start``
        up to ``end``.

        Page n of a sequence has its positions nP to nP + P - 1, and takes the entry n mod R from
        page n - R. P = 16, R = 5: positions 10 to 69 begin pages 1 to 4, position 80 page 5, and 83
        none. Positions 0 to 699 are on the pages 0 to 43, of which the last five remain.
        """
        total = -(-end // page_size)
        return range(max(-(-start // page_size), total - self.ring_pages), total)

    def first_written(self, start: int, end: int, page_size: int) -> int:
        """Return the first position that a chunk from ``start`` up to ``end`` leaves in the cache:
        all that fit into the ring.

        P = 16, R = 5: of positions 0 to 79 all remain, of positions 0 to 699 the positions from 624
        on, which are pages 39 to 43.
        """
        return max(start, (-(-end // page_size) - self.ring_pages) * page_size)


@dataclass(frozen=True, slots=True)
class CachePlan:
    """Layout of the key/value cache: one class per distinct window, in the order of
    ``ModelArgs.window_classes``.

    ``num_drafts``: maximum after a sequence's last known token, for which page rings have room.
    """

    page_size: int
    classes: tuple[WindowClass, ...]
    num_drafts: int = 0

    def class_of(self, window: int | None) -> int:
        """Return the index of a window's class in ``classes``."""
        return [c.window for c in self.classes].index(window)


def ring_pages(window: int | None, page_size: int, max_model_len: int, num_drafts: int = 0) -> int:
    """Compute the entries of a page ring: R = ceil((W-1+D)/P) + 1, or enough pages to never wrap
    around.

    W = 64, P = 16: ceil(63/16) + 1 = 5 pages, 80 rows. While position 79 is written over position
    -1 (entry 4, row 15), positions 16..79 are the window; 0..15 are stale. W = 3, P = 1: 3 pages,
    the plain ring of the Mistral paper.

    D drafts after a token are written before that token reads its window. D = 2: ceil(65/16) + 1 =
    6 pages. Position 94 sees 31..94 on the pages 1 to 5, while its drafts 95 and 96 are written,
    which begins page 6: of 5 entries it would take page 1's.
    """
    all_pages = -(-max_model_len // page_size)
    if window is None:
        return all_pages
    return min(-(-(window - 1 + num_drafts) // page_size) + 1, all_pages)


def kv_bytes_per_position(
    args: ModelArgs, dtype: str, layer: int = 0, kv_cache_dtype: KvCacheDtype = "auto"
) -> int:
    """Return the bytes that one position takes in a layer's cache. All layers are alike, unless
    attention is sparse.

    Mistral 7B, keys and values of 8 heads of 128: 4096 in bfloat16, and with fp8 2048 for numbers
    and 16 * 4 for scales: 2112.
    """
    numbers = args.cached_numbers(layer)
    if kv_cache_dtype == "auto":
        return numbers * DTYPE_BYTES[dtype]
    assert args.latent is None, "see check_kv_cache_dtype"
    return numbers + numbers // args.head_dim * SCALE_BYTES


def check_kv_cache_dtype(args: ModelArgs, dtype: str, kv_cache_dtype: KvCacheDtype) -> None:
    """Raise ConfigError for a cache that a model with activations of this dtype cannot have."""
    if kv_cache_dtype == "auto":
        return
    refused = f"--kv-cache-dtype {kv_cache_dtype} is not for"
    if args.latent is not None:
        raise ConfigError(
            f"{refused} models with latent attention, which cache one small vector per token; leave"
            " it out"
        )
    if dtype == "float16":
        raise ConfigError(
            f"{refused} activations in float16, which has too few exponents for a value's scale;"
            " give --dtype bfloat16 too"
        )


# ---- speculation

MAX_DRAFTED_STEPS = 8  # maximum number of micro-batches with drafts of one sequence in flight
MAX_INDEXED_TOKENS = 16_384  # n-grams of a sequence in its index
NGRAM_BYTES = 340  # of an n-gram with four positions, without its tokens; measured


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """The drafting method, with vLLM's names: by n-grams of the text so far, or by a draft model.

    ``num_speculative_tokens``: maximum drafts of a sequence in one micro-batch.
    ``prompt_lookup_min``, ``prompt_lookup_max``: how many of the last tokens must be found earlier
    in the text, and up to how many are compared to choose between several occurrences. ``model``:
    the draft model's folder.
    """

    num_speculative_tokens: int
    prompt_lookup_min: int
    prompt_lookup_max: int
    method: Literal["ngram", "draft_model"] = "ngram"
    model: str = ""

    def max_drafts(self, num_stages: int = MAX_DRAFTED_STEPS) -> int:
        """Return the most drafts of a sequence in flight: 5 after the last known token, 6 in each
        of 7 more micro-batches: 47.
        """
        return min(MAX_DRAFTED_STEPS, num_stages) * (self.num_speculative_tokens + 1) - 1

    def index_bytes(self, num_seqs: int, max_model_len: int) -> int:
        """Return the maximum size of the router's n-gram indexes in bytes; a text with few
        repetitions takes half of that.

        N-grams of 2 tokens, 64 sequences of 16,384 tokens or more: 64 * 16,384 * (340 + 8 * 2)
        bytes, or 356 MiB.
        """
        num_ngrams = num_seqs * min(max_model_len, MAX_INDEXED_TOKENS)
        return (
            num_ngrams * (NGRAM_BYTES + 8 * self.prompt_lookup_min) if self.method == "ngram" else 0
        )


# ---- experts outside the stages


class ExpertId(NamedTuple):
    """One expert of one layer. ``layer`` is a global number, so the id does not depend on how
    layers are split into stages.
    """

    layer: int
    expert: int


@dataclass(frozen=True, slots=True)
class ExpertActorPlan:
    """The experts of one actor, which take ``weight_bytes`` of its ``memory`` (bytes)."""

    actor_id: int
    num_actors: int
    experts: tuple[ExpertId, ...]
    weight_bytes: int
    memory: int

    @property
    def label(self) -> str:
        """Name for people, counted from one: ``Experts 1/4``."""
        return f"Experts {self.actor_id + 1}/{self.num_actors}"


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """Placement of every expert on one or several actors. An expert on several actors has
    *replicas*; a call needs one of them.
    """

    args: ModelArgs
    dtype: str
    quantize: Quantization | None  # as requested by the user; see weight_format
    # of every expert, as requested by the user; None: only the busiest experts are replicated
    replicas: int | None
    expert_bytes: int  # of one expert
    actors: tuple[ExpertActorPlan, ...]
    batch_invariant: bool | None = None  # see StagePlan

    @property
    def weight_format(self) -> WeightFormat:
        """Format of the weights in memory."""
        return WeightFormat.of(self.args, self.dtype, self.quantize)

    def with_assignment(self, experts_by_actor: Sequence[Collection[ExpertId]]) -> "ExpertPlan":
        """Return a plan with the same actors and another assignment of experts."""
        pairs = zip(self.actors, experts_by_actor, strict=True)
        actors = (
            replace(a, experts=tuple(sorted(e)), weight_bytes=len(e) * self.expert_bytes)
            for a, e in pairs
        )
        return replace(self, actors=tuple(actors))

    @property
    def placement(self) -> dict[ExpertId, tuple[int, ...]]:
        """Ids of the actors that hold each expert, in ascending order."""
        placement: dict[ExpertId, tuple[int, ...]] = {}
        for actor in self.actors:
            for expert in actor.experts:
                placement[expert] = (*placement.get(expert, ()), actor.actor_id)
        return placement

    def tokens_per_actor(self, tokens: dict[ExpertId, float]) -> list[float]:
        """Return the tokens of each actor, if an expert's tokens are shared evenly by its
        replicas.
        """
        placement = self.placement
        return [
            sum(tokens[expert] / len(placement[expert]) for expert in actor.experts)
            for actor in self.actors
        ]


# ---- stages


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The complete specification of one stage."""

    args: ModelArgs
    stage_id: int
    num_stages: int
    first_layer: int  # global number
    last_layer: int  # global number after its last layer
    # of activations, cache (see kv_cache_dtype) and norms; of matrices see weight_format
    dtype: str
    quantize: Quantization | None  # as requested by the user
    cache: CachePlan
    max_num_seqs: int
    max_num_batched_tokens: int  # of a micro-batch, at most
    weight_bytes: int
    # whether the stage holds the experts of its layers; else expert actors hold them
    experts_inside: bool = True
    padding_bytes: int = 0  # added to ``weight_bytes`` by packing on a CPU
    # Whether a token's bits must not depend on the other tokens of a micro-batch. None: not on
    # GPUs, and on CPUs where possible.
    batch_invariant: bool | None = None
    kv_cache_dtype: KvCacheDtype = "auto"

    @property
    def weight_format(self) -> WeightFormat:
        """Format of the weights in memory."""
        return WeightFormat.of(self.args, self.dtype, self.quantize)

    @property
    def layers(self) -> range:
        """Global numbers of the stage's layers."""
        return range(self.first_layer, self.last_layer)

    @property
    def is_first(self) -> bool:
        """Whether the stage has the embeddings."""
        return self.stage_id == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage has the output head, and samples."""
        return self.stage_id == self.num_stages - 1

    @property
    def label(self) -> str:
        """Name for people, counted from one: ``Stage 1/4 layers 0-7``."""
        return (
            f"Stage {self.stage_id + 1}/{self.num_stages} layers"
            f" {self.first_layer}-{self.last_layer - 1}"
        )

    @property
    def packed_bytes(self) -> int:
        """Bytes of the weights in memory, including packing on a CPU."""
        return self.weight_bytes + self.padding_bytes

    @property
    def cache_bytes(self) -> int:
        """Bytes of the key/value cache of all layers of the stage."""
        return self.cache.page_size * sum(
            self.cache.classes[self.cache.class_of(self.args.windows[layer])].num_pages
            * kv_bytes_per_position(self.args, self.dtype, layer, self.kv_cache_dtype)
            for layer in self.layers
        )


class LimitChoice(NamedTuple):
    """A limit that the planner has chosen, as the user left it open: the key of the configuration,
    its value, and the reason.
    """

    key: str
    value: int
    reason: str

    def describe(self) -> str:
        """Return a readable sentence."""
        return f"the planner has chosen --{self.key.replace('_', '-')} {self.value}: {self.reason}"


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """The stages of one pipeline, and its experts if they are outside the stages."""

    stages: tuple[StagePlan, ...]
    max_model_len: int
    max_concurrent_stages: int  # stages for which there are processors at the same time
    experts: ExpertPlan | None = None
    chosen: tuple[LimitChoice, ...] = ()  # on GPUs
    on_gpus: bool = False

    @property
    def is_oversubscribed(self) -> bool:
        """Whether stages have to share processors."""
        return self.max_concurrent_stages < len(self.stages)

    @property
    def args(self) -> ModelArgs:
        """Geometry of the model."""
        return self.stages[0].args

    @property
    def cache(self) -> CachePlan:
        """Layout of the key/value cache, the same in all stages."""
        return self.stages[0].cache

    @property
    def max_num_seqs(self) -> int:
        """Slots for running sequences, the same number in all stages."""
        return self.stages[0].max_num_seqs

    @property
    def max_num_batched_tokens(self) -> int:
        """The most tokens of a micro-batch, which passes through all stages."""
        return self.stages[0].max_num_batched_tokens

    def describe_memory(self, num_pipelines: int = 1) -> str:
        """Return ``541 MiB of weights, up to 1 GiB of key/value cache per stage
        (--kv-cache-memory)``, for messages.
        """
        experts = sum(actor.weight_bytes for actor in self.experts.actors) if self.experts else 0
        weights = num_pipelines * (sum(stage.packed_bytes for stage in self.stages) + experts)
        return f"{format_bytes(weights)} of weights, {self.describe_cache()}"

    def describe_cache(self) -> str:
        """Return ``up to 1 GiB of key/value cache per stage (--kv-cache-memory)``, for messages."""
        cache = max(stage.cache_bytes for stage in self.stages)
        return f"up to {format_bytes(cache)} of key/value cache per stage (--kv-cache-memory)"
