"""Which actor holds which experts, where they do not sit inside the stages."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tramontane.proto.model_args import ModelArgs, Quantization


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

    def holding(self, held: Sequence[Collection[ExpertId]]) -> "ExpertPlan":
        """The same actors with these experts."""
        size = self.expert_bytes
        pairs = zip(self.actors, held, strict=True)
        actors = (replace(actor, experts=tuple(sorted(own)), weight_bytes=len(own) * size) for actor, own in pairs)
        return replace(self, actors=tuple(actors))

    @property
    def holders(self) -> dict[ExpertId, tuple[int, ...]]:
        """The actors that hold each expert, in order."""
        found: dict[ExpertId, tuple[int, ...]] = {}
        for actor in self.actors:
            for each in actor.experts:
                found[each] = (*found.get(each, ()), actor.actor_id)
        return found

    def loads(self, tokens: dict[ExpertId, float]) -> list[float]:
        """Tokens of each actor, if an expert's are shared evenly by its replicas."""
        holders = self.holders
        return [sum(tokens[each] / len(holders[each]) for each in actor.experts) for actor in self.actors]
