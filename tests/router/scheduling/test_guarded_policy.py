"""A defect of the policy: sequences continue with a simple one, and the log says so once."""

import logging
import math
from collections.abc import Sequence

import pytest
from fake_pipeline import FakePipeline, new_cache, new_sequence

from tramontane.proto.plan import SpeculativeConfig
from tramontane.proto.step import StageTiming
from tramontane.router.scheduling.balanced_policy import BalancedPolicy
from tramontane.router.scheduling.policy import (
    BatchBudget,
    BatchWork,
    FixedInFlightPolicy,
    GuardedPolicy,
    SchedulerState,
)
from tramontane.router.scheduling.scheduler import Scheduler
from tramontane.router.scheduling.waiting_queue import SchedulerLimits

WAITING = SchedulerState(0, 4, 400, 4, [100] * 4, 0, 0, 0, 0.5)


class DefectivePolicy(BalancedPolicy):
    """A policy one of whose methods has a defect from its n-th call on."""

    def __init__(self, method: str, first: int = 1) -> None:
        super().__init__(2, 64)
        self._method, self._calls_left = method, first

    def choose_budget(self, state: SchedulerState) -> BatchBudget | None:
        self._fail_in("choose_budget")
        return super().choose_budget(state)

    def observe(self, budget: BatchBudget, work: BatchWork, timings: Sequence[StageTiming]) -> None:
        self._fail_in("observe")
        super().observe(budget, work, timings)

    def restart(self) -> None:
        self._fail_in("restart")

    def seconds(self, work: BatchWork) -> float:
        self._fail_in("seconds")
        return super().seconds(work)

    def draft_break_even(self, state: SchedulerState) -> float:
        self._fail_in("draft_break_even")
        return super().draft_break_even(state)

    def lookahead_break_even(self, state: SchedulerState) -> float:
        self._fail_in("lookahead_break_even")
        return super().lookahead_break_even(state)

    def _fail_in(self, method: str) -> None:
        self._calls_left -= method == self._method
        if self._calls_left <= 0:
            raise ZeroDivisionError("planted")


class Budgets(FixedInFlightPolicy):
    """A policy that always gives one budget."""

    def __init__(self, budget: BatchBudget | None) -> None:
        super().__init__(3, 64)
        self._budget = budget

    def choose_budget(self, state: SchedulerState) -> BatchBudget | None:
        return self._budget


def _pipeline(policy: FixedInFlightPolicy | BalancedPolicy) -> FakePipeline:
    limits = SchedulerLimits(8, 64, 256, 1000, speculative=SpeculativeConfig(3, 1, 3))
    pipeline = FakePipeline(
        Scheduler(new_cache(16, 8, None, num_drafts=3), limits, policy), num_stages=2
    )
    for seq_id in range(6):
        pipeline.scheduler.add(new_sequence(seq_id, 20, 60))
    return pipeline


@pytest.mark.parametrize("first", [1, 2, 30])
@pytest.mark.parametrize(
    "method", ["choose_budget", "observe", "draft_break_even", "lookahead_break_even"]
)
def test_every_sequence_ends_with_all_of_its_tokens(
    method: str, first: int, policy_failures: list[logging.LogRecord]
) -> None:
    """Also where the first micro-batches are in flight with budgets of the policy that failed."""
    pipeline = _pipeline(DefectivePolicy(method, first))
    pipeline.drain()
    assert [len(pipeline.tokens_of(seq_id)) for seq_id in range(6)] == [60] * 6
    (record,) = policy_failures
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError
    assert "DefectivePolicy failed with a defect; no request ends" in record.getMessage()
    assert "3 micro-batches" in record.getMessage()
    assert pipeline.scheduler.policy.failure == "ZeroDivisionError: planted"
    policy_failures.clear()


def test_routing_asks_for_seconds_and_a_fence_restarts_whatever_fails(
    policy_failures: list[logging.LogRecord],
) -> None:
    for method in ("seconds", "restart"):
        scheduler = _pipeline(DefectivePolicy(method)).scheduler
        scheduler.restart(7)
        assert scheduler.policy.seconds(BatchWork(3, 3, 1, 1)) == pytest.approx(0.004)
        assert len(policy_failures) == 1
        policy_failures.clear()


@pytest.mark.parametrize(
    "budget", [None, BatchBudget(0, 0), BatchBudget(0, 64), BatchBudget(-1, 64)]
)
def test_a_budget_with_which_nothing_would_ever_run_is_a_defect(
    budget: BatchBudget | None, policy_failures: list[logging.LogRecord]
) -> None:
    guarded = GuardedPolicy(Budgets(budget), 64)
    assert guarded.choose_budget(WAITING) == FixedInFlightPolicy(3, 64).choose_budget(WAITING)
    assert len(policy_failures) == 1
    assert guarded.failure.startswith("AssertionError")
    policy_failures.clear()


@pytest.mark.parametrize(
    ("num_in_flight", "num_lookahead", "num_ready"), [(1, 0, 4), (0, 1, 4), (0, 0, 0)]
)
def test_a_policy_may_wait_for_what_is_in_flight_or_is_to_come(
    num_in_flight: int, num_lookahead: int, num_ready: int
) -> None:
    state = SchedulerState(
        num_in_flight, 4, 400, num_ready, [100] * num_ready, 0, 0, 0, 0.5, num_lookahead
    )
    guarded = GuardedPolicy(Budgets(None), 64)
    assert guarded.choose_budget(state) is None
    assert not guarded.failure


def test_times_that_are_no_numbers_end_no_sequence(
    monkeypatch: pytest.MonkeyPatch, policy_failures: list[logging.LogRecord]
) -> None:
    """NaN of a stage would stay in the cost model for good."""
    pipeline = _pipeline(BalancedPolicy(2, 64))
    nan = tuple(StageTiming(stage, 0.0, math.nan, 1) for stage in range(2))
    monkeypatch.setattr(pipeline, "_timings", lambda _batch: nan)
    pipeline.drain()
    assert [len(pipeline.tokens_of(seq_id)) for seq_id in range(6)] == [60] * 6
    policy_failures.clear()


def test_a_failure_of_the_fallback_is_raised(
    monkeypatch: pytest.MonkeyPatch, policy_failures: list[logging.LogRecord]
) -> None:
    guarded = GuardedPolicy(DefectivePolicy("choose_budget"), 64)

    def fail(*_: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(FixedInFlightPolicy, "choose_budget", fail)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            guarded.choose_budget(WAITING)
    assert len(policy_failures) == 1
    policy_failures.clear()
