"""Experts on actors of their own: every one has a place, work is even, memory is enough. No cluster
needed.
"""

import random
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import GIB, tiny_args

from tramontane.cluster.planning.expert_planner import (
    ExpertRequest,
    plan_experts,
    plan_moves,
    replan,
)
from tramontane.cluster.planning.planner import StageBudget
from tramontane.proto.errors import ConfigError, PlanError
from tramontane.proto.model_args import ModelArgs, MoeArgs
from tramontane.proto.plan import ExpertId, ExpertPlan
from tramontane.proto.presets import PRESETS
from tramontane.proto.weight_format import Quantization, WeightFormat
from tramontane.workers.weights.tensor_specs import expert_tensors, stage_tensors

MIXTRAL_8X22B = PRESETS["mixtral-8x22b"]
UNEQUAL = (20, 24, 32, 40) * 4  # GiB, where an even share is 15.75 GiB of weights


def _args(n_layers: int) -> ModelArgs:
    return replace(tiny_args(n_layers=n_layers), moe=MoeArgs(num_experts=8, num_experts_per_tok=2))


def _ids(args: ModelArgs) -> list[ExpertId]:
    assert args.moe is not None
    return [ExpertId(*pair) for pair in product(range(args.n_layers), range(args.moe.num_experts))]


def _size(args: ModelArgs, dtype: str, quantize: Quantization | None = None) -> int:
    return sum(
        spec.num_bytes(WeightFormat(dtype, stored=args.dtype, quantize=quantize))
        for spec in expert_tensors(args, 0, 0)
    )


def _busiest(plan: ExpertPlan, loads: dict[ExpertId, float]) -> float:
    """Of the mean."""
    found = plan.tokens_per_actor(loads)
    return max(found) * len(found) / sum(found)


def _check_memory(plan: ExpertPlan, request: ExpertRequest) -> None:
    size = _size(plan.args, request.dtype, request.quantize)
    for actor, budget in zip(plan.actors, request.budgets, strict=True):
        assert actor.weight_bytes == len(actor.experts) * size <= budget.usable


@pytest.mark.parametrize("seed", range(5))
def test_8x22b_on_16_actors_of_unequal_memory(seed: int) -> None:
    rng = random.Random(seed)
    memories = rng.sample(UNEQUAL, len(UNEQUAL))
    request = ExpertRequest(tuple(StageBudget(memory * GIB) for memory in memories), "bfloat16")
    assumed = plan_experts(MIXTRAL_8X22B, request)
    assert _busiest(assumed, dict.fromkeys(_ids(MIXTRAL_8X22B), 1.0)) <= 1.1
    assert all(len(holders) == 1 for holders in assumed.placement.values()), (
        "where all are alike none is hot"
    )
    measured = {each: rng.lognormvariate(0, 0.7) for each in _ids(MIXTRAL_8X22B)}
    again = plan_experts(MIXTRAL_8X22B, replace(request, loads=measured))
    assert _busiest(again, measured) <= 1.1 < _busiest(assumed, measured)
    for plan in (assumed, again):
        _check_memory(plan, request)


@pytest.mark.parametrize("seed", range(3))
def test_128_experts_on_8_actors(seed: int) -> None:
    """Assumed to be chosen equally often, and as measured. The layers without experts have none
    anywhere.
    """
    args = replace(PRESETS["mistral-large-3-675b"], quantization=None)
    assert args.moe is not None
    ids = [ExpertId(*pair) for pair in product(args.moe_layers, range(args.moe.num_experts))]
    request = ExpertRequest((StageBudget(200 * GIB),) * 8, "bfloat16")
    plan = plan_experts(args, request)
    assert sorted(plan.placement) == ids
    assert _busiest(plan, dict.fromkeys(ids, 1.0)) <= 1.1
    for actor in plan.actors:
        assert {
            sum(each.layer == layer for each in actor.experts) for layer in args.moe_layers
        } == {16}
    rng = random.Random(seed)
    measured = {each: rng.lognormvariate(0, 0.7) for each in ids}
    again = plan_experts(args, replace(request, loads=measured))
    assert _busiest(again, measured) <= 1.1
    _check_memory(again, request)


def test_a_layers_experts_work_side_by_side() -> None:
    """8 experts of a layer on 4 actors: two on each, in every layer."""
    args = _args(6)
    plan = plan_experts(args, ExpertRequest((StageBudget(GIB),) * 4, "float32"))
    for actor in plan.actors:
        assert [sum(each.layer == layer for each in actor.experts) for layer in range(6)] == [2] * 6


@pytest.mark.parametrize("num_actors", [2, 4, 8])
def test_hot_experts_get_replicas(num_actors: int) -> None:
    """A gate that chooses the same two experts in every layer but the last: what the plan assumed
    is far off without replicas.
    """
    args = _args(5)
    loads = {each: 100.0 if each.expert < 2 and each.layer < 4 else 1.0 for each in _ids(args)}
    request = ExpertRequest((StageBudget(GIB),) * num_actors, "float32", replicas=1)
    apart = plan_experts(args, request)
    plan = plan_experts(args, replace(request, replicas=None, loads=loads))
    for layer in range(4):
        own = {each: load if each.layer == layer else 0.0 for each, load in loads.items()}
        assert _busiest(plan, own) <= 1.5
        assert num_actors == 2 or _busiest(apart, own) > 1.8
    assert all(len(plan.placement[each]) == 1 for each in _ids(args) if loads[each] == 1.0)


def test_replicas_are_as_many_as_were_requested_or_fit() -> None:
    args = _args(2)
    loads = {each: 9.0 if each.expert == 0 else 1.0 for each in _ids(args)}
    budget = StageBudget(-(-10 * _size(args, "float32") * 10 // 9))  # ten experts each: 20 for 16
    plan = plan_experts(args, ExpertRequest((budget,) * 2, "float32", loads=loads))
    assert {each: len(holders) for each, holders in plan.placement.items() if len(holders) > 1} == {
        ExpertId(0, 0): 2,
        ExpertId(1, 0): 2,
    }
    twice = plan_experts(args, ExpertRequest((StageBudget(GIB),) * 3, "float32", replicas=2))
    assert {len(set(holders)) for holders in twice.placement.values()} == {2}


def test_room_that_only_holds_what_is_there_already_gives_no_replica() -> None:
    """One actor has room for all and one more, the other for none: the hot expert cannot be on
    two.
    """
    args = _args(1)
    budgets = tuple(StageBudget(-(-count * _size(args, "float32") * 10 // 9)) for count in (0, 9))
    loads = {each: float(each.expert == 7) for each in _ids(args)}
    plan = plan_experts(args, ExpertRequest(budgets, "float32", None, None, loads))
    assert [len(actor.experts) for actor in plan.actors] == [0, 8]


@given(st.data())
def test_whatever_fits_is_placed(data: st.DataObject) -> None:
    """With no place to spare as well: every copy on another actor, none over its memory."""
    args = _args(data.draw(st.integers(1, 4)))
    size, num_experts = _size(args, "float32"), len(_ids(args))
    counts = data.draw(st.lists(st.integers(0, num_experts + 3), min_size=1, max_size=5))
    replicas = data.draw(st.none() | st.integers(1, len(counts)))
    loads = data.draw(
        st.none()
        | st.fixed_dictionaries({each: st.sampled_from([0.0, 1.0, 7.0]) for each in _ids(args)})
    )
    request = ExpertRequest(
        tuple(StageBudget(-(-count * size * 10 // 9)) for count in counts),
        "float32",
        None,
        replicas,
        loads,
    )
    if sum(min(count, num_experts) for count in counts) < (replicas or 1) * num_experts:
        with pytest.raises(PlanError, match="too little memory"):
            plan_experts(args, request)
        return
    plan = plan_experts(args, request)
    _check_memory(plan, request)
    assert plan.placement.keys() == set(_ids(args))
    for holders in plan.placement.values():
        assert len(set(holders)) == len(holders)
        assert replicas is None or len(holders) == replicas


def test_requests_that_make_no_sense_are_refused() -> None:
    args, budgets = _args(2), (StageBudget(GIB),) * 2
    with pytest.raises(ConfigError, match="models of several experts"):
        plan_experts(tiny_args(n_layers=2, moe=False), ExpertRequest(budgets, "float32"))
    with pytest.raises(
        ConfigError, match="--expert-replicas is 3; it can be at most --expert-actors, 2"
    ):
        plan_experts(args, ExpertRequest(budgets, "float32", replicas=3))
    with pytest.raises(
        ConfigError,
        match="is of 1 layers with 1 experts each, and the model has 2 layers with 8 experts each",
    ):
        plan_experts(args, ExpertRequest(budgets, "float32", loads={ExpertId(0, 0): 1.0}))
    small = ExpertRequest((StageBudget(3 * _size(MIXTRAL_8X22B, "bfloat16")),) * 2, "bfloat16")
    with pytest.raises(
        PlanError, match=r"448 experts of 576 MiB on 2 expert actors, which may hold 2, 2; use more"
    ):
        plan_experts(MIXTRAL_8X22B, small)


@pytest.mark.parametrize("quantize", Quantization)
def test_a_quantized_expert_takes_less(quantize: Quantization) -> None:
    budgets = (StageBudget(20 * GIB),) * 8
    with pytest.raises(PlanError, match="too little memory"):
        plan_experts(MIXTRAL_8X22B, ExpertRequest(budgets, "bfloat16"))
    plan = plan_experts(MIXTRAL_8X22B, ExpertRequest(budgets, "bfloat16", quantize))
    experts = {
        spec.name for each in _ids(MIXTRAL_8X22B) for spec in expert_tensors(MIXTRAL_8X22B, *each)
    }
    weights = WeightFormat("bfloat16", stored="bfloat16", quantize=quantize)
    of_all = (spec for spec in stage_tensors(MIXTRAL_8X22B, range(56)) if spec.name in experts)
    assert sum(actor.weight_bytes for actor in plan.actors) == sum(
        s.num_bytes(weights) for s in of_all
    )


@given(st.data())
def test_experts_move_from_any_plan_to_any_other_within_memory_and_are_held_throughout(
    data: st.DataObject,
) -> None:
    args = _args(n_layers=2)
    size, num_actors = _size(args, "float32"), data.draw(st.integers(2, 4))
    spare = data.draw(st.integers(1, 4))
    num_slots = -(-16 // num_actors) + spare
    budget = StageBudget(-(-num_slots * size * 10 // 9) + 1)
    seeds = data.draw(st.tuples(st.integers(0, 99), st.integers(0, 99)))
    loads = [{each: random.Random(seed).random() for each in _ids(args)} for seed in seeds]
    old = plan_experts(args, ExpertRequest((budget,) * num_actors, "float32", loads=loads[0]))
    new = replan(old, loads[1])
    before = [set(actor.experts) for actor in old.actors]
    for plan in plan_moves(old, new):
        after = [set(actor.experts) for actor in plan.actors]
        assert plan.placement.keys() == set(_ids(args))
        for was, now in zip(before, after, strict=True):
            assert len(was | now) * size <= budget.usable
        before = after
    assert before == [set(actor.experts) for actor in new.actors]


def test_two_full_actors_exchange_experts_by_way_of_a_third() -> None:
    args = _args(n_layers=1)
    budget = StageBudget(-(-3 * _size(args, "float32") * 10 // 9) + 1)
    plan = plan_experts(args, ExpertRequest((budget,) * 3, "float32"))
    old = plan.with_assignment(
        [[ExpertId(0, e) for e in held] for held in ((0, 1, 2), (3, 4, 5), (6, 7))]
    )
    new = plan.with_assignment(
        [[ExpertId(0, e) for e in held] for held in ((0, 1, 3), (2, 4, 5), (6, 7))]
    )
    way = plan_moves(old, new)
    assert way[-1] == new
    assert all(len(actor.experts) <= 3 for step in way for actor in step.actors)
    assert all(len(step.placement) == 8 for step in way)


def test_experts_cannot_move_where_no_actor_has_room_for_one_more() -> None:
    args = _args(n_layers=1)
    budget = StageBudget(-(-4 * _size(args, "float32") * 10 // 9) + 1)
    plan = plan_experts(args, ExpertRequest((budget, budget), "float32"))
    other = plan.with_assignment(
        [[ExpertId(0, e) for e in range(4)], [ExpertId(0, e) for e in range(4, 8)]]
    )
    assert other != plan
    assert plan_moves(plan, plan) == []
    with pytest.raises(PlanError, match="no expert actor has memory for one more"):
        plan_moves(plan, other)
