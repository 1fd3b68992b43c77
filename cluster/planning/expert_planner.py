"""Which expert actor gets which experts: by load, within memory. Pure arithmetic.

All experts are equally large, so memory is a number of places. What an actor does is the load of its experts, assumed
to be alike or as it was measured; a replica takes its share.

What a plan of expert actors promises: how evenly they share the work. Pure arithmetic.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tramontane.cluster.planning.planner import StageBudget
from tramontane.proto.byte_size import format_bytes
from tramontane.proto.errors import ConfigError, PlanError
from tramontane.proto.model_args import ModelArgs, Quantization
from tramontane.proto.plan import ExpertActorPlan, ExpertId, ExpertPlan
from tramontane.workers.weights.tensor_specs import expert_tensors

BROADLY = 8  # how much more it counts what an actor does in all than what it does in one layer
HOT = 1.5  # times what the experts of its layer do on average: such an expert gets replicas, if nobody says how many


@dataclass(frozen=True, slots=True)
class ExpertRequest:
    """``replicas``: of every expert; None: of the hot ones, as there is room. ``loads``: tokens that each expert was given."""

    budgets: tuple[StageBudget, ...]  # of the actors, in order
    dtype: str
    quantize: Quantization | None = None
    replicas: int | None = None
    loads: dict[ExpertId, float] | None = None


def plan_experts(args: ModelArgs, request: ExpertRequest) -> ExpertPlan:
    """Raises ConfigError where the model or the request has no such experts or actors, PlanError where they do not fit."""
    experts = _experts(args, request)
    loads = request.loads or dict.fromkeys(experts, 1.0)
    size = sum(spec.num_bytes(request.dtype, request.quantize) for spec in expert_tensors(args, *experts[0]))
    places = [room.usable // size for room in request.budgets]
    num_actors, least = len(places), request.replicas or 1
    if sum(min(count, len(experts)) for count in places) < least * len(experts):
        raise PlanError(
            f"too little memory for {least * len(experts)} experts of {format_bytes(size)} on {num_actors} expert actors, "
            f"which may hold {', '.join(map(str, places))}; use more --expert-actors, fewer --expert-replicas or --quantize int8"
        )
    spare = sum(places) - least * len(experts)
    copies = dict.fromkeys(experts, least) if request.replicas else _replicas(loads, num_actors, spare)
    held = _assign(loads, copies, places) or _assign_by_memory(copies, places)
    while held is None:  # what is spare may be where it is of no use: an actor holds an expert once
        copies = _replicas(loads, num_actors, sum(copies.values()) - len(experts) - 1)
        held = _assign(loads, copies, places) or _assign_by_memory(copies, places)
    empty = (ExpertActorPlan(actor, num_actors, (), 0, room.memory) for actor, room in enumerate(request.budgets))
    plan = ExpertPlan(args, request.dtype, request.quantize, request.replicas, size, tuple(empty))
    return plan.with_assignment(held)


def replan(plan: ExpertPlan, loads: dict[ExpertId, float]) -> ExpertPlan:
    """For the same actors, by another load. Raises as ``plan_experts`` does."""
    rooms = tuple(StageBudget(actor.memory) for actor in plan.actors)
    return plan_experts(plan.args, ExpertRequest(rooms, plan.dtype, plan.quantize, plan.replicas, loads))


def plan_moves(old: ExpertPlan, new: ExpertPlan) -> list[ExpertPlan]:
    """The plans to follow one after the other, the last of them ``new``: of each, actors have room for what it adds to the one
    before, as what an actor no longer needs is forgotten only after; and every expert is held throughout.

    Two actors of two places, A: 0 and 1, B: 2, that are to become A: 0 and 2, B: 1: at first B gets 1 (A has no place for 2),
    so that A can forget it; then A gets 2. Raises PlanError where there is no place to begin with.
    """
    places = [StageBudget(actor.memory).usable // new.expert_bytes for actor in new.actors]
    wanted = [set(actor.experts) for actor in new.actors]
    held = [set(actor.experts) for actor in old.actors]
    plans: list[ExpertPlan] = []
    while held != wanted:
        room = zip(held, wanted, places, strict=True)
        fuller = [own | set(sorted(goal - own)[: most - len(own)]) for own, goal, most in room]
        settled = set().union(*(own & goal for own, goal in zip(fuller, wanted, strict=True)))  # are where they belong
        after = [{each for each in own if each in goal or each not in settled} for own, goal in zip(fuller, wanted, strict=True)]
        if after == held:
            after = _staging_plan(held, wanted, places)
        held = after
        plans.append(new.with_assignment(held))
    return plans


def _staging_plan(held: Sequence[set[ExpertId]], wanted: Sequence[set[ExpertId]], places: Sequence[int]) -> list[set[ExpertId]]:
    """One expert that is in the way of what its actor is to get goes to an actor that has a place to spare."""
    for actor, (own, goal) in enumerate(zip(held, wanted, strict=True)):
        in_the_way = sorted(own - goal)
        for other, (its, most) in enumerate(zip(held, places, strict=True)):
            guests = [each for each in in_the_way if each not in its]
            if goal - own and guests and other != actor and len(its | wanted[other]) < most:
                moved = [set(each) for each in held]
                moved[actor].remove(guests[0])
                moved[other].add(guests[0])
                return moved
    raise PlanError("experts cannot move: no expert actor has room for one more; start anew with --expert-load instead")


def _experts(args: ModelArgs, request: ExpertRequest) -> list[ExpertId]:
    if args.moe is None:
        raise ConfigError("--expert-actors is for models of several experts per layer; this one has none")
    if request.replicas is not None and request.replicas > len(request.budgets):
        raise ConfigError(f"--expert-replicas is {request.replicas}; it can be at most --expert-actors, {len(request.budgets)}")
    experts = [ExpertId(layer, expert) for layer in range(args.n_layers) for expert in range(args.moe.num_experts)]
    if request.loads is not None and request.loads.keys() != set(experts):
        raise ConfigError(
            f"--expert-load is of {_shape(request.loads)}, and the model has {args.n_layers} layers with "
            f"{args.moe.num_experts} experts each; it must be of the same model"
        )
    return experts


def _shape(loads: dict[ExpertId, float]) -> str:
    """``2 layers with 8 experts each``, or ``2 layers with 7 or 8 experts each``."""
    by_layer = Counter(each.layer for each in loads)
    return f"{len(by_layer)} layers with {' or '.join(map(str, sorted(set(by_layer.values())))) or 0} experts each"


def _replicas(loads: dict[ExpertId, float], num_actors: int, spare: int) -> dict[ExpertId, int]:
    """Copies of each expert: one more for whichever has most to do per copy, while that is hot and there is room.

    Nothing is gained by copies that do less than an actor's even share of the layer. 8 experts on 4 actors, of which two do
    half each: the mean is 1/8, hot is above 3/16, an even share 1/4, so both get 2 copies, which do 1/4 each.
    """
    num_experts = Counter(each.layer for each in loads)
    totals = _layer_loads(loads)
    enough = {layer: max(total / num_actors, HOT * total / num_experts[layer]) for layer, total in totals.items()}
    copies = dict.fromkeys(loads, 1)
    for _ in range(spare):
        able = [each for each in loads if copies[each] < num_actors]
        hottest = max(able, key=lambda each: loads[each] / copies[each] - enough[each.layer], default=None)
        if hottest is None or loads[hottest] / copies[hottest] <= enough[hottest.layer]:
            break
        copies[hottest] += 1
    return copies


def _assign(loads: dict[ExpertId, float], copies: dict[ExpertId, int], places: Sequence[int]) -> list[list[ExpertId]] | None:
    """The heaviest first, each to the actors that have least to do so far: in all, and in its layer, whose experts work at the
    same time. None if that leaves a copy without an actor that has room and not the same expert already.
    """
    totals, num_actors = _layer_loads(loads), len(places)
    whole = sum(totals.values()) or 1.0
    held: list[list[ExpertId]] = [[] for _ in places]
    busy = [0.0] * num_actors  # shares of all work
    busy_in = {layer: [0.0] * num_actors for layer in totals}  # and of the layer's
    for each in sorted(loads, key=lambda each: (-loads[each] / copies[each], each)):
        free = [actor for actor in range(num_actors) if len(held[actor]) < places[actor]]
        if len(free) < copies[each]:
            return None
        here = busy_in[each.layer]
        free.sort(key=lambda actor: (busy[actor] * BROADLY + here[actor], len(held[actor]) - places[actor]))
        for actor in free[: copies[each]]:
            held[actor].append(each)
            busy[actor] += loads[each] / copies[each] / whole
            here[actor] += loads[each] / copies[each] / (totals[each.layer] or 1.0)
    return held


def _assign_by_memory(copies: dict[ExpertId, int], places: Sequence[int]) -> list[list[ExpertId]] | None:
    """To the actors with most room left: finds a place for all copies wherever that is possible. None if it is not."""
    held: list[list[ExpertId]] = [[] for _ in places]
    for each, count in sorted(copies.items(), key=lambda pair: (-pair[1], pair[0])):
        roomiest = sorted(range(len(places)), key=lambda actor: len(held[actor]) - places[actor])[:count]
        if any(len(held[actor]) >= places[actor] for actor in roomiest):
            return None
        for actor in roomiest:
            held[actor].append(each)
    return held


def _layer_loads(loads: dict[ExpertId, float]) -> dict[int, float]:
    totals: dict[int, float] = {}
    for each, load in loads.items():
        totals[each.layer] = totals.get(each.layer, 0.0) + load
    return totals


@dataclass(frozen=True, slots=True)
class ExpertPlanReport:
    """``shares``: what each actor does, as a multiple of the mean of all; where no load was measured, of load that is even.

    ``busiest_if_even``: under the measured load, the busiest actor of the plan that assumes even load; None without one.
    """

    plan: ExpertPlan
    budgets: tuple[StageBudget, ...]
    shares: tuple[float, ...]
    busiest_if_even: float | None

    @property
    def busiest(self) -> float:
        return max(self.shares)

    @property
    def num_copies(self) -> dict[ExpertId, int]:
        """Of each expert: 1 where it has no replicas."""
        return {each: len(holders) for each, holders in self.plan.placement.items()}

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
                for actor, room, share in zip(self.plan.actors, self.budgets, self.shares, strict=True)
            ],
        }


def report(args: ModelArgs, request: ExpertRequest) -> ExpertPlanReport:
    """Raises as ``plan_experts`` does."""
    plan = plan_experts(args, request)
    if request.loads is None:
        return ExpertPlanReport(plan, request.budgets, _shares(plan, dict.fromkeys(plan.placement, 1.0)), None)
    assumed = plan_experts(args, replace(request, loads=None))
    return ExpertPlanReport(plan, request.budgets, _shares(plan, request.loads), max(_shares(assumed, request.loads)))


def _shares(plan: ExpertPlan, loads: dict[ExpertId, float]) -> tuple[float, ...]:
    tokens = plan.tokens_per_actor(loads)
    return tuple(each * len(tokens) / sum(tokens) for each in tokens)
