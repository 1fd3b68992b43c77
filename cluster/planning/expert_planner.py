"""Assignment of experts to expert actors, by load and within memory, and a report of how evenly
the actors share the work. Pure arithmetic.

All experts are equally large, so the capacity of an actor's memory is a number of experts. An
actor's work is the load of its experts, assumed to be even or as measured; the copies of an expert
share the expert's load.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tramontane.cluster.planning.planner import StageBudget
from tramontane.proto.errors import ConfigError, PlanError
from tramontane.proto.model_args import ModelArgs
from tramontane.proto.plan import ExpertActorPlan, ExpertId, ExpertPlan
from tramontane.proto.units import format_bytes
from tramontane.proto.weight_format import Quantization, WeightFormat
from tramontane.workers.weights.tensor_specs import expert_tensors

# weight of an actor's load in all layers, relative to its load in one layer
TOTAL_LOAD_WEIGHT = 8
# an expert with this multiple of its layer's mean load gets replicas, unless their number is
# configured
HOT_EXPERT_RATIO = 1.5


@dataclass(frozen=True, slots=True)
class ExpertRequest:
    """The experts to assign: ``replicas`` copies of every expert; if None, further copies of hot
    experts while memory is left.

    ``loads``: tokens that each expert has received; None assumes even load.
    """

    budgets: tuple[StageBudget, ...]  # one per actor, in order
    dtype: str
    quantize: Quantization | None = None
    replicas: int | None = None
    loads: dict[ExpertId, float] | None = None
    batch_invariant: bool | None = None  # see StagePlan


@dataclass(frozen=True, slots=True)
class ExpertPlanReport:
    """An expert plan and how evenly its actors share the work.

    ``shares``: each actor's load as a multiple of the mean, under the measured load or else under
    even load. ``busiest_if_even``: under the measured load, the largest share of the plan that
    assumes even load; None if no load was measured.
    """

    plan: ExpertPlan
    budgets: tuple[StageBudget, ...]
    shares: tuple[float, ...]
    busiest_if_even: float | None

    @property
    def busiest(self) -> float:
        """The largest share."""
        return max(self.shares)

    @property
    def num_copies(self) -> dict[ExpertId, int]:
        """Copies of each expert; 1 means that it has no replicas."""
        return {each: len(holders) for each, holders in self.plan.placement.items()}

    @property
    def num_replicated(self) -> int:
        """The number of experts that are on more than one actor."""
        return sum(copies > 1 for copies in self.num_copies.values())

    def as_data(self) -> dict[str, object]:
        """Return the report for JSON: memory in bytes, every expert as its layer and its number
        there.
        """
        return {
            "load": "even" if self.busiest_if_even is None else "measured",
            "busiest": self.busiest,
            "busiest_if_even": self.busiest_if_even,
            "num_experts": len(self.num_copies),
            "num_replicated": self.num_replicated,
            "actors": [
                {
                    "memory": budget.memory,
                    "usable": budget.usable,
                    "weight_bytes": actor.weight_bytes,
                    "share": share,
                    "experts": [list(each) for each in actor.experts],
                }
                for actor, budget, share in zip(
                    self.plan.actors, self.budgets, self.shares, strict=True
                )
            ],
        }


def plan_experts(args: ModelArgs, request: ExpertRequest) -> ExpertPlan:
    """Assign experts to actors.

    Raises ConfigError if the request does not match the model, PlanError if the experts do not fit.
    """
    experts = _experts(args, request)
    loads = request.loads or dict.fromkeys(experts, 1.0)
    weights = WeightFormat.of(args, request.dtype, request.quantize)
    size = sum(spec.num_bytes(weights) for spec in expert_tensors(args, *experts[0]))
    capacities = [budget.usable // size for budget in request.budgets]
    num_actors, min_copies = len(capacities), request.replicas or 1
    if sum(min(capacity, len(experts)) for capacity in capacities) < min_copies * len(experts):
        raise PlanError(
            f"too little memory for {min_copies * len(experts)} experts of {format_bytes(size)} on"
            f" {num_actors} expert actors, which may hold {', '.join(map(str, capacities))}; use"
            " more --expert-actors, fewer --expert-replicas or --quantize int8"
        )
    spare = sum(capacities) - min_copies * len(experts)
    copies = (
        dict.fromkeys(experts, min_copies)
        if request.replicas
        else _replicas(loads, num_actors, spare)
    )
    assignment = _assign(loads, copies, capacities) or _assign_by_memory(copies, capacities)
    # not all spare memory can be used: an actor holds at most one copy of an expert
    while assignment is None:
        copies = _replicas(loads, num_actors, sum(copies.values()) - len(experts) - 1)
        assignment = _assign(loads, copies, capacities) or _assign_by_memory(copies, capacities)
    empty = (
        ExpertActorPlan(actor, num_actors, (), 0, budget.memory)
        for actor, budget in enumerate(request.budgets)
    )
    plan = ExpertPlan(
        args,
        request.dtype,
        request.quantize,
        request.replicas,
        size,
        tuple(empty),
        batch_invariant=request.batch_invariant,
    )
    return plan.with_assignment(assignment)


def replan(plan: ExpertPlan, loads: dict[ExpertId, float]) -> ExpertPlan:
    """Assign the experts to the same actors by another load. Raises as ``plan_experts`` does."""
    budgets = tuple(StageBudget(actor.memory) for actor in plan.actors)
    request = ExpertRequest(
        budgets, plan.dtype, plan.quantize, plan.replicas, loads, plan.batch_invariant
    )
    return plan_experts(plan.args, request)


def plan_moves(old: ExpertPlan, new: ExpertPlan) -> list[ExpertPlan]:
    """Return the plans to follow one after the other; the last plan is ``new``.

    Actors load the new experts of a plan before they unload old experts, and have memory for both.
    So every expert stays loaded on some actor throughout.

    Two actors that hold two experts each, A: 0 and 1, B: 2, become A: 0 and 2, B: 1: first B loads
    1 (A has no memory for 2), so that A can unload it; then A loads 2. Raises PlanError if no actor
    has memory for a first move.
    """
    capacities = [StageBudget(actor.memory).usable // new.expert_bytes for actor in new.actors]
    wanted = [set(actor.experts) for actor in new.actors]
    held = [set(actor.experts) for actor in old.actors]
    plans: list[ExpertPlan] = []
    while held != wanted:
        actors = zip(held, wanted, capacities, strict=True)
        loaded = [
            own | set(sorted(goal - own)[: capacity - len(own)]) for own, goal, capacity in actors
        ]
        # experts that are loaded where the new plan has them
        settled = set().union(*(own & goal for own, goal in zip(loaded, wanted, strict=True)))
        after = [
            {each for each in own if each in goal or each not in settled}
            for own, goal in zip(loaded, wanted, strict=True)
        ]
        if after == held:
            after = _staging_plan(held, wanted, capacities)
        held = after
        plans.append(new.with_assignment(held))
    return plans


def _staging_plan(
    held: Sequence[set[ExpertId]], wanted: Sequence[set[ExpertId]], capacities: Sequence[int]
) -> list[set[ExpertId]]:
    """Move one expert that blocks its actor to an actor with spare memory."""
    for actor, (own, goal) in enumerate(zip(held, wanted, strict=True)):
        blocking = sorted(own - goal)
        for other, (held_there, capacity) in enumerate(zip(held, capacities, strict=True)):
            movable = [each for each in blocking if each not in held_there]
            if (
                goal - own
                and movable
                and other != actor
                and len(held_there | wanted[other]) < capacity
            ):
                moved = [set(each) for each in held]
                moved[actor].remove(movable[0])
                moved[other].add(movable[0])
                return moved
    raise PlanError(
        "experts cannot move: no expert actor has memory for one more; restart with --expert-load"
        " instead"
    )


def report(args: ModelArgs, request: ExpertRequest) -> ExpertPlanReport:
    """Assign experts and report how evenly the actors share the work. Raises as ``plan_experts``
    does.
    """
    plan = plan_experts(args, request)
    if request.loads is None:
        return ExpertPlanReport(
            plan, request.budgets, _shares(plan, dict.fromkeys(plan.placement, 1.0)), None
        )
    assumed = plan_experts(args, replace(request, loads=None))
    return ExpertPlanReport(
        plan, request.budgets, _shares(plan, request.loads), max(_shares(assumed, request.loads))
    )


def _shares(plan: ExpertPlan, loads: dict[ExpertId, float]) -> tuple[float, ...]:
    tokens = plan.tokens_per_actor(loads)
    return tuple(each * len(tokens) / sum(tokens) for each in tokens)


def _experts(args: ModelArgs, request: ExpertRequest) -> list[ExpertId]:
    if args.moe is None:
        raise ConfigError(
            "--expert-actors is for models of several experts per layer; this one has none"
        )
    if request.replicas is not None and request.replicas > len(request.budgets):
        raise ConfigError(
            f"--expert-replicas is {request.replicas}; it can be at most --expert-actors,"
            f" {len(request.budgets)}"
        )
    experts = [
        ExpertId(layer, expert)
        for layer in args.moe_layers
        for expert in range(args.moe.num_experts)
    ]
    if request.loads is not None and request.loads.keys() != set(experts):
        raise ConfigError(
            f"--expert-load is of {_shape(request.loads)}, and the model has {len(args.moe_layers)}"
            f" layers with {args.moe.num_experts} experts each; it must be of the same model"
        )
    return experts


def _shape(loads: dict[ExpertId, float]) -> str:
    """Return ``2 layers with 8 experts each``, or ``2 layers with 7 or 8 experts each``."""
    by_layer = Counter(each.layer for each in loads)
    return (
        f"{len(by_layer)} layers with {' or '.join(map(str, sorted(set(by_layer.values())))) or 0}"
        " experts each"
    )


def _replicas(loads: dict[ExpertId, float], num_actors: int, spare: int) -> dict[ExpertId, int]:
    """Return the number of copies of each expert: the expert with most load per copy gets one more,
    while it is hot and memory is spare.

    Copies with less than an actor's even share of the layer gain nothing. 8 experts on 4 actors,
    two experts with half of the load each: the mean is 1/8, hot is above 3/16, an even share is
    1/4, so both get 2 copies with 1/4 each.
    """
    num_experts = Counter(each.layer for each in loads)
    totals = _layer_loads(loads)
    enough = {
        layer: max(total / num_actors, HOT_EXPERT_RATIO * total / num_experts[layer])
        for layer, total in totals.items()
    }
    copies = dict.fromkeys(loads, 1)
    for _ in range(spare):
        candidates = [each for each in loads if copies[each] < num_actors]
        hottest = max(
            candidates,
            key=lambda each: loads[each] / copies[each] - enough[each.layer],
            default=None,
        )
        if hottest is None or loads[hottest] / copies[hottest] <= enough[hottest.layer]:
            break
        copies[hottest] += 1
    return copies


def _assign(
    loads: dict[ExpertId, float], copies: dict[ExpertId, int], capacities: Sequence[int]
) -> list[list[ExpertId]] | None:
    """Assign experts in order of load, each to the actors with the least load so far, in all layers
    and in the expert's layer.

    The experts of a layer work at the same time. Returns None if a copy is left over: all actors
    are full or hold the same expert already.
    """
    totals, num_actors = _layer_loads(loads), len(capacities)
    total = sum(totals.values()) or 1.0
    held: list[list[ExpertId]] = [[] for _ in capacities]
    busy = [0.0] * num_actors  # shares of the load of all layers
    busy_in = {layer: [0.0] * num_actors for layer in totals}  # shares of each layer's load
    for each in sorted(loads, key=lambda each: (-loads[each] / copies[each], each)):
        free = [actor for actor in range(num_actors) if len(held[actor]) < capacities[actor]]
        if len(free) < copies[each]:
            return None
        in_layer = busy_in[each.layer]
        free.sort(
            key=lambda actor: (
                busy[actor] * TOTAL_LOAD_WEIGHT + in_layer[actor],
                len(held[actor]) - capacities[actor],
            )
        )
        for actor in free[: copies[each]]:
            held[actor].append(each)
            busy[actor] += loads[each] / copies[each] / total
            in_layer[actor] += loads[each] / copies[each] / (totals[each.layer] or 1.0)
    return held


def _assign_by_memory(
    copies: dict[ExpertId, int], capacities: Sequence[int]
) -> list[list[ExpertId]] | None:
    """Assign each copy to an actor with most memory left. This finds an assignment if one exists,
    else returns None.
    """
    held: list[list[ExpertId]] = [[] for _ in capacities]
    for each, count in sorted(copies.items(), key=lambda pair: (-pair[1], pair[0])):
        emptiest = sorted(
            range(len(capacities)), key=lambda actor: len(held[actor]) - capacities[actor]
        )[:count]
        if any(len(held[actor]) >= capacities[actor] for actor in emptiest):
            return None
        for actor in emptiest:
            held[actor].append(each)
    return held


def _layer_loads(loads: dict[ExpertId, float]) -> dict[int, float]:
    totals: defaultdict[int, float] = defaultdict(float)
    for each, load in loads.items():
        totals[each.layer] += load
    return totals
