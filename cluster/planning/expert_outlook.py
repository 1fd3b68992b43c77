"""What a plan of expert actors promises: how evenly they share the work. Pure arithmetic."""

from dataclasses import dataclass, replace

from tramontane.cluster.planning.expert_planner import ExpertRequest, plan_experts
from tramontane.cluster.planning.planner import StageRoom
from tramontane.proto.expert_plan import ExpertId, ExpertPlan
from tramontane.proto.model_args import ModelArgs


@dataclass(frozen=True, slots=True)
class ExpertOutlook:
    """``shares``: what each actor does, as a multiple of the mean of all; where no load was measured, of load that is even.

    ``busiest_if_even``: under the measured load, the busiest actor of the plan that assumes even load; None without one.
    """

    plan: ExpertPlan
    rooms: tuple[StageRoom, ...]
    shares: tuple[float, ...]
    busiest_if_even: float | None

    @property
    def busiest(self) -> float:
        return max(self.shares)

    @property
    def num_copies(self) -> dict[ExpertId, int]:
        """Of each expert: 1 where it has no replicas."""
        return {each: len(holders) for each, holders in self.plan.holders.items()}

    @property
    def num_replicated(self) -> int:
        """Experts that are on more than one actor."""
        return sum(copies > 1 for copies in self.num_copies.values())

    def as_data(self) -> dict[str, object]:
        """Memory in bytes; every expert as its layer and its number there."""
        return {
            "load": "even" if self.busiest_if_even is None else "measured",
            "busiest": self.busiest,
            "busiest_if_even": self.busiest_if_even,
            "num_experts": len(self.num_copies),
            "num_replicated": self.num_replicated,
            "actors": [
                {
                    "memory": room.memory,
                    "usable": room.usable,
                    "weight_bytes": actor.weight_bytes,
                    "share": share,
                    "experts": [list(each) for each in actor.experts],
                }
                for actor, room, share in zip(self.plan.actors, self.rooms, self.shares, strict=True)
            ],
        }


def outlook(args: ModelArgs, request: ExpertRequest) -> ExpertOutlook:
    """Raises as ``plan_experts`` does."""
    plan = plan_experts(args, request)
    if request.loads is None:
        return ExpertOutlook(plan, request.rooms, _shares(plan, dict.fromkeys(plan.holders, 1.0)), None)
    assumed = plan_experts(args, replace(request, loads=None))
    return ExpertOutlook(plan, request.rooms, _shares(plan, request.loads), max(_shares(assumed, request.loads)))


def _shares(plan: ExpertPlan, loads: dict[ExpertId, float]) -> tuple[float, ...]:
    tokens = plan.loads(loads)
    return tuple(each * len(tokens) / sum(tokens) for each in tokens)
