"""The policy as the scheduler calls it: a defect of it makes micro-batches less well cut, and ends
no request.
"""

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from tramontane.proto.step import StageTiming
from tramontane.router.scheduling.policy import (
    BatchBudget,
    BatchWork,
    FixedInFlightPolicy,
    Policy,
    SchedulerState,
)

T = TypeVar("T")

logger = logging.getLogger(__name__)


class GuardedPolicy:
    """Calls a policy until it raises or leaves the pipeline idle; from then on a
    ``FixedInFlightPolicy`` decides.

    It keeps as many micro-batches in flight as the policy did when this was made, which is before
    it has measured anything. It decides for as long as the scheduler exists: what a policy that has
    failed has learned cannot be trusted, and to ask it again would fail again. Tests fail on the
    one message that is logged (``conftest.py``).
    """

    def __init__(self, policy: Policy, max_tokens: int) -> None:
        self.policy = policy
        self.overlaps_chunks = policy.overlaps_chunks
        self.failure = ""  # what the policy raised; "" while it works
        self._fallback = FixedInFlightPolicy(policy.max_in_flight, max_tokens)

    @property
    def max_in_flight(self) -> int:
        """See ``Policy``."""
        return self.policy.max_in_flight

    def choose_budget(self, state: SchedulerState) -> BatchBudget | None:
        """See ``Policy``."""
        return self._call(lambda policy: _checked(policy.choose_budget(state), state))

    def observe(self, budget: BatchBudget, work: BatchWork, timings: Sequence[StageTiming]) -> None:
        """See ``Policy``."""
        self._call(lambda policy: policy.observe(budget, work, timings))

    def restart(self) -> None:
        """See ``Policy``."""
        self._call(lambda policy: policy.restart())

    def seconds(self, work: BatchWork) -> float:
        """See ``Policy``."""
        return self._call(lambda policy: policy.seconds(work))

    def draft_break_even(self, state: SchedulerState) -> float:
        """See ``Policy``."""
        return self._call(lambda policy: policy.draft_break_even(state))

    def lookahead_break_even(self, state: SchedulerState) -> float:
        """See ``Policy``."""
        return self._call(lambda policy: policy.lookahead_break_even(state))

    def _call(self, ask: Callable[[Policy], T]) -> T:
        try:
            return ask(self.policy)
        except Exception as error:
            if self.policy is self._fallback:  # nothing is left to fall back on
                raise
            self.failure = f"{type(error).__name__}: {error}"
            logger.exception(
                "the scheduling policy %s failed with a defect; no request ends, but until this"
                " router is restarted %d micro-batches are kept in flight and cut without predicted"
                " times, which may cost throughput",
                type(self.policy).__name__,
                self._fallback.max_in_flight,
            )
            self.policy = self._fallback
        return ask(self.policy)


def _checked(budget: BatchBudget | None, state: SchedulerState) -> BatchBudget | None:
    """Assert that the budget has counts, and that something is in flight or will be if there is
    anything to do.
    """
    decodes, prefill_tokens = (budget.decodes, budget.prefill_tokens) if budget else (0, 0)
    assert min(decodes, prefill_tokens) >= 0, (
        f"a budget of {decodes} decodes and {prefill_tokens} prompt tokens"
    )
    is_idle = not (state.num_in_flight or state.num_lookahead)
    may_run = (state.num_ready and decodes) or (state.pending_tokens and prefill_tokens)
    assert may_run or not is_idle or not (state.num_ready or state.pending_tokens), (
        f"nothing is to run of {state}"
    )
    return budget
