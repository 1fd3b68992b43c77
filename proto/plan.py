"""What is fixed for the life of a deployment: who holds which layers, and how caches are cut into pages.

Which actor holds which experts, where they do not sit inside the stages.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from tramontane.proto.model_args import DTYPE_BYTES, ModelArgs, Quantization


class ExpertId(NamedTuple):
    """``layer`` is a global number: the same expert has the same id in every split."""

    layer: int
    expert: int


@dataclass(frozen=True, slots=True)
class ExpertActorPlan:
    """What one actor loads; ``weight_bytes`` is all that it keeps, of the ``memory`` (bytes) that is there."""

    actor_id: int
    num_actors: int
    experts: tuple[ExpertId, ...]
    weight_bytes: int
    memory: int

    @property
    def label(self) -> str:
        """As people see it, counted from one: ``Experts 1/4``."""
        return f"Experts {self.actor_id + 1}/{self.num_actors}"


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """Every expert is on at least one actor; those that are on several have *replicas*, of which a call needs one.

    ``replicas``: how many of every expert were asked for; None: of those that have most to do.
    """

    args: ModelArgs
    dtype: str
    quantize: Quantization | None
    replicas: int | None
    expert_bytes: int  # of one
    actors: tuple[ExpertActorPlan, ...]

    def with_assignment(self, held: Sequence[Collection[ExpertId]]) -> "ExpertPlan":
        """The same actors with these experts."""
        size = self.expert_bytes
        pairs = zip(self.actors, held, strict=True)
        actors = (replace(actor, experts=tuple(sorted(own)), weight_bytes=len(own) * size) for actor, own in pairs)
        return replace(self, actors=tuple(actors))

    @property
    def placement(self) -> dict[ExpertId, tuple[int, ...]]:
        """The actors that hold each expert, in order."""
        found: dict[ExpertId, tuple[int, ...]] = {}
        for actor in self.actors:
            for each in actor.experts:
                found[each] = (*found.get(each, ()), actor.actor_id)
        return found

    def tokens_per_actor(self, tokens: dict[ExpertId, float]) -> list[float]:
        """Tokens of each actor, if an expert's are shared evenly by its replicas."""
        holders = self.placement
        return [sum(tokens[each] / len(holders[each]) for each in actor.experts) for actor in self.actors]


Link = Literal["object-store", "direct"]  # how hidden states travel from stage to stage


def ring_pages(window: int | None, page_size: int, max_model_len: int) -> int:
    """Entries of a page ring: R = ceil((W-1)/P) + 1, or enough pages to never wrap.

    W = 64, P = 16: ceil(63/16) + 1 = 5 pages, 80 rows. While position 79 is written
    over position -1 (entry 4, row 15), positions 16..79 are the window; 0..15 are stale.
    W = 3, P = 1: 3 pages, the plain ring of the Mistral paper.
    """
    whole = -(-max_model_len // page_size)
    if window is None:
        return whole
    return min(-(-(window - 1) // page_size) + 1, whole)


@dataclass(frozen=True, slots=True)
class WindowClass:
    """Layers with the same window share page numbers: a page id means the same rows in each of them."""

    window: int | None
    ring_pages: int
    num_pages: int  # pages in the pool, all stages alike

    def pages_for(self, num_positions: int, page_size: int) -> int:
        """Pages that a sequence of ``num_positions`` cached positions holds."""
        return min(-(-num_positions // page_size), self.ring_pages)


@dataclass(frozen=True, slots=True)
class CachePlan:
    page_size: int
    classes: tuple[WindowClass, ...]  # one per distinct window, in ModelArgs.window_classes order

    def class_of(self, window: int | None) -> int:
        return [c.window for c in self.classes].index(window)


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Everything one stage needs to know; ``last_layer`` is exclusive."""

    args: ModelArgs
    stage_id: int
    num_stages: int
    first_layer: int
    last_layer: int
    dtype: str
    quantize: Quantization | None
    cache: CachePlan
    max_num_seqs: int
    weight_bytes: int
    experts_inside: bool = True  # of models that have experts; else they are on actors of their own

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.last_layer)

    @property
    def is_first(self) -> bool:
        return self.stage_id == 0

    @property
    def is_last(self) -> bool:
        return self.stage_id == self.num_stages - 1

    @property
    def label(self) -> str:
        """As people see it, counted from one: ``Stage 1/4 layers 0-7``."""
        return f"Stage {self.stage_id + 1}/{self.num_stages} layers {self.first_layer}-{self.last_layer - 1}"

    @property
    def cache_bytes(self) -> int:
        page_bytes = kv_bytes_per_position(self.args, self.dtype) * self.cache.page_size
        pages = (self.cache.classes[self.cache.class_of(self.args.windows[layer])].num_pages for layer in self.layers)
        return sum(pages) * page_bytes


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """One pipeline. ``stages_at_once``: how many of its stages there are processors for at the same time.

    ``experts``: who holds them, where they are not inside the stages.
    """

    stages: tuple[StagePlan, ...]
    max_model_len: int
    max_concurrent_stages: int
    experts: ExpertPlan | None = None

    @property
    def is_oversubscribed(self) -> bool:
        return self.max_concurrent_stages < len(self.stages)

    @property
    def args(self) -> ModelArgs:
        return self.stages[0].args

    @property
    def cache(self) -> CachePlan:
        return self.stages[0].cache

    @property
    def max_num_seqs(self) -> int:
        return self.stages[0].max_num_seqs


def kv_bytes_per_position(args: ModelArgs, dtype: str) -> int:
    """Key and value bytes of one position in one layer."""
    return 2 * args.n_kv_heads * args.head_dim * DTYPE_BYTES[dtype]
