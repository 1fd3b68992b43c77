"""Busy shares and overlaps from intervals."""

import pytest
from stage_overlap import overlap_share

from tramontane.proto.step import ExpertTiming, StageTiming, StepResult
from tramontane.router.engine.stats import HopTime, UsageMeter, hop_times


def test_shares_add_up() -> None:
    meter = UsageMeter(2)
    meter.observe(
        StepResult(0, 0, (), (StageTiming(0, 10.0, 2.0, 5), StageTiming(1, 12.0, 2.0, 5)))
    )
    meter.observe(
        StepResult(0, 1, (1,), (StageTiming(0, 12.0, 1.0, 1), StageTiming(1, 14.0, 1.0, 1)))
    )
    assert meter.span_s == 5.0
    assert [meter.busy_share(0), meter.busy_share(1)] == [0.6, 0.6]
    assert meter.bubble == pytest.approx(0.4)
    assert meter.tokens_per_s == pytest.approx(0.2)
    assert [(s.num_tokens, s.num_batches) for s in meter.stages] == [(6, 2), (6, 2)]


def test_nothing_observed_is_no_division_by_zero() -> None:
    meter = UsageMeter(2)
    assert (meter.span_s, meter.busy_share(1), meter.bubble, meter.tokens_per_s) == (
        0.0,
        0.0,
        0.0,
        0.0,
    )


@pytest.mark.parametrize(
    ("intervals", "share"),
    [
        ([(0, 2), (1, 2)], 1 / 3),
        ([(0, 2), (2, 2)], 0.0),
        ([(0, 3), (0, 3), (0, 3)], 1.0),
        ([(0, 1), (5, 2), (6, 2)], 1 / 4),
        ([], 0.0),
    ],
)
def test_overlap(intervals: list[tuple[float, float]], share: float) -> None:
    timings = [StageTiming(i, start, busy, 1) for i, (start, busy) in enumerate(intervals)]
    assert overlap_share(timings) == pytest.approx(share)


def test_hops_are_from_a_stages_end_to_the_next_stages_beginning() -> None:
    def step(*intervals: tuple[float, float]) -> list[StageTiming]:
        return [StageTiming(i, start, busy, 1) for i, (start, busy) in enumerate(intervals)]

    steps = [
        step((0, 2), (3, 1), (4, 1)),
        step((4, 1), (7, 1), (8.5, 1)),
        step((9, 1), (14, 1), (18, 1)),
    ]
    assert hop_times(steps) == (HopTime(1.0, 2.0), HopTime(0.0, 0.5))
    assert hop_times([step((0, 2))]) == ()
    assert hop_times([]) == ()


def test_the_exposed_wait_is_what_no_open_micro_batch_could_use() -> None:
    """Open 0..3 and 1..4, of which 2 s and 1 s were work: 4 s open, 1 s with nothing to do. Then
    nothing is open for 1 s.
    """
    meter = UsageMeter(1)
    steps = [(0.0, 2.0, 3.0), (1.0, 1.0, 3.0), (5.0, 1.0, 1.0)]
    for number, (start, busy, is_open) in enumerate(steps):
        experts = (
            (ExpertTiming(0, 0.5, 4), ExpertTiming(1, 0.25, 2))
            if number < 2
            else (ExpertTiming(1, 0.5, 1),)
        )
        meter.observe(
            StepResult(0, number, (), (StageTiming(0, start, busy, 3, is_open, 1.5, 0.5, experts),))
        )
    (stage,) = meter.stages
    assert (stage.open_s, stage.busy_s, stage.exposed_wait_s, stage.expert_wait_s) == (
        5.0,
        4.0,
        1.0,
        4.5,
    )
    assert meter.experts == (ExpertTiming(0, 1.0, 8), ExpertTiming(1, 1.0, 5))
    assert meter.share(stage.exposed_wait_s) == pytest.approx(1 / 6)
