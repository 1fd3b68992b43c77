"""How many micro-batches are in flight: as many as keep the slowest stage busy, up to a limit."""

from collections.abc import Sequence

import pytest

from tramontane.proto.step import StageTiming
from tramontane.router.scheduling.balanced_policy import BalancedPolicy
from tramontane.router.scheduling.round_times import ADJUST_EVERY, InFlightTuner


class Pipeline:
    """A tuner, and the stages that it observes: each works for its seconds in every micro-batch,
    and then waits.
    """

    def __init__(self, num_stages: int, limit: int = 99, *, has_more_to_do: bool = True) -> None:
        self.tuner = InFlightTuner(num_stages, limit)
        self.tuner.has_more_to_do = has_more_to_do
        self._now = [100.0] * num_stages  # when each stage has ended its last wait

    def run(self, count: int, busy_s: Sequence[float], wait_s: Sequence[float]) -> int:
        """Run so many micro-batches; return M after them."""
        for _ in range(count):
            timings = [
                StageTiming(stage, now, busy, 8)
                for stage, (now, busy) in enumerate(zip(self._now, busy_s, strict=True))
            ]
            self._now = [
                timing.ended_at + wait for timing, wait in zip(timings, wait_s, strict=True)
            ]
            self.tuner.observe(timings)
        return self.tuner.max_in_flight


@pytest.mark.parametrize(
    ("num_stages", "limit", "first"), [(1, 2, 2), (4, 8, 5), (4, 5, 5), (4, 2, 2), (1, 1, 1)]
)
def test_it_begins_with_one_more_than_there_are_stages(
    num_stages: int, limit: int, first: int
) -> None:
    assert InFlightTuner(num_stages, limit).max_in_flight == first


def test_a_pipeline_is_saturated_as_soon_as_its_last_stage_does_not_wait() -> None:
    """Not before anything was measured, and the waits of other stages do not count."""
    pipeline = Pipeline(2)
    assert not pipeline.tuner.is_saturated
    pipeline.run(2, (0.001, 0.001), (0.5, 0.0))
    assert pipeline.tuner.is_saturated
    pipeline.run(2, (0.001, 0.001), (0.0, 0.5))
    assert not pipeline.tuner.is_saturated


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({}, 8),
        ({"stages_at_once": 4}, 8),
        ({"stages_at_once": 3}, 3),
        ({"stages_at_once": 1}, 1),
        ({"open_per_stage": 1}, 4),
        ({"open_per_stage": 3, "stages_at_once": 2}, 12),
    ],
)
def test_the_limit_is_what_can_work_at_once(options: dict[str, int], limit: int) -> None:
    """Twice the stages, unless stages share processors, or wait for experts with several
    micro-batches open.
    """
    policy = BalancedPolicy(4, 512, None, **options)
    tuner = policy._in_flight_tuner
    tuner.has_more_to_do = True
    pipeline = Pipeline(4)
    pipeline.tuner = tuner
    assert (
        pipeline.run(20 * ADJUST_EVERY * 4, [1.0] * 4, [1.0] * 4) == policy.max_in_flight == limit
    )


@pytest.mark.parametrize(("wait_s", "grows"), [(0.035, True), (0.034, False)])
def test_another_one_is_allowed_where_the_slowest_stage_waits_three_percent(
    wait_s: float, grows: bool
) -> None:
    """Eight micro-batches of 1 s have seven waits between them: 3 % of 8 s are 7 of 0.0343 s."""
    pipeline = Pipeline(2)
    assert pipeline.run(ADJUST_EVERY * 2 - 1, [0.5, 1.0], [0.5, wait_s]) == 3, (
        "it is decided every four micro-batches per stage"
    )
    assert pipeline.run(1, [0.5, 1.0], [0.5, wait_s]) == (4 if grows else 3)


def test_each_decision_is_about_the_time_since_the_last_one() -> None:
    pipeline = Pipeline(1, 9)
    assert pipeline.run(ADJUST_EVERY, [1.0], [9.0]) == 3
    assert pipeline.run(ADJUST_EVERY, [1.0], [0.0]) == 4, "the wait of 9 s before the first of them"
    assert pipeline.run(ADJUST_EVERY, [1.0], [0.0]) == 4
    assert pipeline.run(ADJUST_EVERY * 99, [1.0], [1.0]) == 9


def test_a_wait_for_work_that_does_not_exist_does_not_count() -> None:
    assert Pipeline(1, has_more_to_do=False).run(99, [1.0], [1.0]) == 2


def test_where_several_are_open_only_time_without_work_is_a_wait() -> None:
    """Every micro-batch takes 2 s, and one ends each second."""
    assert Pipeline(1).run(99, [2.0], [-1.0]) == 2


@pytest.mark.parametrize(("wait_s", "is_saturated"), [(0.10, True), (0.12, False)])
def test_a_pipeline_is_saturated_where_its_last_stage_works_nine_tenths_of_the_time(
    wait_s: float, is_saturated: bool
) -> None:
    pipeline = Pipeline(2)
    assert not pipeline.tuner.is_saturated, "before anything has run"
    pipeline.run(500, [0.1, 1.0], [0.9, wait_s])
    assert pipeline.tuner.is_saturated is is_saturated


def test_saturation_is_forgotten_by_two_percent_a_micro_batch() -> None:
    """After many without a wait the busy time is 1 / 0.02 = 50 s. With waits of 0.2 s the idle time
    is 10 (1 - 0.98^n) s, which is a tenth of the sum, 5.56 s, between n = 40 and 41. The wait after
    the last one is seen with the next.
    """
    pipeline = Pipeline(1)
    pipeline.run(2000, [1.0], [0.0])
    pipeline.run(1 + 40, [1.0], [0.2])
    assert pipeline.tuner.is_saturated
    pipeline.run(1, [1.0], [0.2])
    assert not pipeline.tuner.is_saturated
