"""Splits over stages that are not alike, against every split there is."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_models import tiny_args

from tramontane.cluster.config.measurements import StageTime
from tramontane.cluster.planning.capacity import relative_times
from tramontane.cluster.planning.planner import (
    PlanRequest,
    StageBudget,
    is_splittable,
    layer_costs,
    make_plan,
    split_layers,
)
from tramontane.proto.errors import ConfigError, PlanError

repeatable = settings(derandomize=True, deadline=None)
Case = tuple[list[int], list[int], list[int]]


def _every_split(num_layers: int, num_stages: int) -> Iterator[list[range]]:
    for cuts in itertools.combinations(range(1, num_layers), num_stages - 1):
        ends = (*cuts, num_layers)
        yield [range(start, end) for start, end in zip((0, *ends), ends, strict=False)]


@repeatable
@given(st.data())
def test_it_is_known_without_the_best_split_whether_there_is_any(data: st.DataObject) -> None:
    """Room for weights of layers, with more on the first and on the last, as embedding and head
    are.
    """
    weights = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=7))
    ends = data.draw(st.tuples(st.integers(0, 9), st.integers(0, 9)))
    limits = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=len(weights)))

    def fits(stage: int, span: range) -> bool:
        own = (
            sum(weights[i] for i in span)
            + ends[0] * (span.start == 0)
            + ends[1] * (span.stop == len(weights))
        )
        return own <= limits[stage]

    any_split = any(
        all(map(fits, itertools.count(), spans))
        for spans in _every_split(len(weights), len(limits))
    )
    assert is_splittable(len(weights), len(limits), fits) == any_split


@st.composite
def _cases(draw: st.DrawFn) -> Case:
    """Costs of layers, speeds of stages, and how many layers each stage has room for."""
    costs = draw(st.lists(st.integers(1, 12), min_size=1, max_size=8))
    speeds = draw(st.lists(st.integers(1, 6), min_size=1, max_size=len(costs)))
    limits = [draw(st.integers(0, 5)) for _ in speeds]
    return costs, speeds, limits


@repeatable
@given(_cases())
@example(([5, 5, 5, 5], [1, 3], [3, 1]))  # the fast stage has no room
def test_no_split_that_fits_has_a_faster_slowest_stage_or_is_more_even(case: Case) -> None:
    costs, speeds, limits = case

    def times(spans: list[range]) -> list[Fraction]:
        return [
            Fraction(sum(costs[i] for i in span), speed)
            for span, speed in zip(spans, speeds, strict=True)
        ]

    def rank(spans: list[range]) -> tuple[Fraction, Fraction]:
        return max(times(spans)), sum((t**2 for t in times(spans)), Fraction(0))

    fitting = [
        spans
        for spans in _every_split(len(costs), len(speeds))
        if all(len(span) <= limit for span, limit in zip(spans, limits, strict=True))
    ]
    found = split_layers(costs, speeds, lambda stage, span: len(span) <= limits[stage])
    if not fitting:
        assert found is None
    else:
        assert found in fitting
        assert rank(found) == min(map(rank, fitting))


def test_the_documented_splits() -> None:
    assert split_layers([2, 1, 1, 1, 3], [1, 1]) == [range(0, 3), range(3, 5)]
    assert split_layers([2, 1, 1, 1, 3], [3, 1]) == [range(0, 4), range(4, 5)]


ARGS = tiny_args(n_layers=6, windows=[None, 24, 24] * 2, max_seq_len=300)


@repeatable
@given(st.lists(st.tuples(st.integers(50_000, 600_000), st.integers(1, 4)), min_size=1, max_size=4))
@example([(90_000, 1), (600_000, 1)])  # an even split does not fit, another one does
def test_uneven_stages_keep_to_their_memory_and_are_refused_only_if_nothing_fits(
    given_limits: list[tuple[int, int]],
) -> None:
    limits = tuple(StageBudget(memory, speed) for memory, speed in given_limits)
    request = PlanRequest(limits, "float32", max_model_len=300, max_num_seqs=8, page_size=16)
    roomy = PlanRequest(
        (StageBudget(2**30),), "float32", max_model_len=300, max_num_seqs=1, page_size=16
    )

    def least(span: range) -> int:
        """Weights and one sequence, layer by layer, from plans of the span alone."""
        whole = make_plan(ARGS, roomy).stages[0]
        parts = make_plan(ARGS, PlanRequest(roomy.budgets * 6, "float32", 300, 1, 16)).stages
        assert sum(part.weight_bytes for part in parts) == whole.weight_bytes
        return sum(parts[layer].weight_bytes + parts[layer].cache_bytes for layer in span)

    fitting = [
        spans
        for spans in _every_split(6, len(limits))
        if all(least(span) <= limit.usable for span, limit in zip(spans, limits, strict=True))
    ]
    try:
        plan = make_plan(ARGS, request)
    except PlanError:
        assert not fitting
        return
    costs = layer_costs(ARGS)
    for stage, limit in zip(plan.stages, limits, strict=True):
        assert stage.weight_bytes + stage.cache_bytes <= limit.usable
    slowest = max(
        sum(costs[i] for i in s.layers) / limit.speed
        for s, limit in zip(plan.stages, limits, strict=True)
    )
    best = min(
        max(
            sum(costs[i] for i in span) / limit.speed
            for span, limit in zip(spans, limits, strict=True)
        )
        for spans in fitting
    )
    assert slowest == best


def test_the_cost_of_the_head_is_what_busy_times_say() -> None:
    """As in the docstring: stages of 3 and 2 layers are busy for 60 % and 50 %, so the head takes
    as long as half a layer.
    """
    args = tiny_args(n_layers=5, moe=False)
    (layer, *_) = layer_costs(args)
    costs = layer_costs(args, stage_times=(StageTime(0, 2, 0.6), StageTime(3, 4, 0.5)))
    assert costs == [layer] * 4 + [layer + layer // 2]
    many = layer_costs(
        args, stage_times=(StageTime(0, 0, 2), StageTime(1, 2, 6), StageTime(3, 4, 9))
    )
    assert many[-1] - layer == round(9 * 3 / 8 * layer) - 2 * layer, (
        "a layer takes 8/3 on average of those before the last stage"
    )


def test_a_last_stage_that_is_faster_than_its_layers_gives_the_head_no_cost() -> None:
    args = tiny_args(n_layers=4, moe=False)
    assert (
        len(set(layer_costs(args, stage_times=(StageTime(0, 1, 0.6), StageTime(2, 3, 0.5))))) == 1
    )


def test_busy_times_of_another_model_are_refused() -> None:
    times = (StageTime(0, 1, 0.6), StageTime(2, 4, 0.5))
    with pytest.raises(ConfigError, match="--stage-times is of 5 layers, and the model has 4"):
        layer_costs(tiny_args(n_layers=4), stage_times=times)


def test_a_plan_by_busy_times_moves_layers_to_where_time_is_left() -> None:
    """The head takes as long as 4 layers: of 8, the last of two stages has 2."""
    args = tiny_args(n_layers=8, moe=False)
    budgets = (StageBudget(2**30),) * 2
    request = PlanRequest(budgets, "float32", max_model_len=64, max_num_seqs=4, page_size=16)
    measured = replace(request, stage_times=(StageTime(0, 3, 0.4), StageTime(4, 7, 0.8)))
    assert [len(stage.layers) for stage in make_plan(args, request).stages] == [4, 4]
    plan = make_plan(args, measured)
    assert [len(stage.layers) for stage in plan.stages] == [6, 2]
    assert relative_times(layer_costs(args, stage_times=measured.stage_times), plan, budgets) == [
        1.0,
        1.0,
    ]


def test_times_of_stages_are_relative_to_their_mean() -> None:
    plan = make_plan(
        tiny_args(n_layers=3), PlanRequest((StageBudget(2**30),) * 2, "float32", 64, 4, 16)
    )
    ends = [stage.last_layer for stage in plan.stages]
    fast = (StageBudget(1), StageBudget(1, speed=2))
    costs = [2, 2, 5] if ends == [2, 3] else [4, 2, 3]
    assert relative_times(costs, plan, fast) == pytest.approx([4 / 3.25, 2.5 / 3.25])
