"""Which actor holds which experts, where they do not sit inside the stages."""

from dataclasses import dataclass
from typing import NamedTuple

from tramontane.proto.model_args import ModelArgs, Quantization


class ExpertId(NamedTuple):
    """``layer`` is a global number: the same expert has the same id in every split."""

    layer: int
    expert: int


@dataclass(frozen=True, slots=True)
class ExpertActorPlan:
    """What one actor loads; ``weight_bytes`` is all that it keeps."""

    actor_id: int
    num_actors: int
    experts: tuple[ExpertId, ...]
    weight_bytes: int

    @property
    def label(self) -> str:
        """As people see it, counted from one: ``Experts 1/4``."""
        return f"Experts {self.actor_id + 1}/{self.num_actors}"


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """Every expert is on at least one actor; those that are on several have *replicas*, of which a call needs one."""

    args: ModelArgs
    dtype: str
    quantize: Quantization | None
    actors: tuple[ExpertActorPlan, ...]

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
