"""Our policy, called directly."""

import pytest

from tramontane.proto.step import StageTiming
from tramontane.router.scheduling.balanced_policy import MIN_CHUNK, BalancedPolicy
from tramontane.router.scheduling.policy import BatchBudget, BatchWork, SchedulerState


def _experienced(policy: BalancedPolicy, num_stages: int) -> BalancedPolicy:
    """After micro-batches that took a millisecond, and 0.1 ms per token, in every stage."""
    now = 0.0
    for number in range(64):
        work = BatchWork(prefill_tokens=16 * (number % 3), decodes=8 + number % 5, decode_keys=800)
        busy_s = 1e-3 + 1e-4 * (work.prefill_tokens + work.decodes)
        timings = [StageTiming(stage, now + stage * busy_s, busy_s, 8) for stage in range(num_stages)]
        policy.observe(BatchBudget(8, 0), work, timings)
        now += busy_s
    return policy


@pytest.mark.parametrize("pending", [1, 3, 7, MIN_CHUNK, 100])
def test_a_prompt_advances_however_tight_the_target_is(pending: int) -> None:
    """Also where decodes alone just keep it."""
    for tenths_of_ms in range(100):
        policy = _experienced(BalancedPolicy(2, 512, itl_target_s=tenths_of_ms * 1e-4), 2)
        share = policy.choose_budget(SchedulerState(0, 16, 1600, 16, [100] * 16, pending, 0, 0, 0.5))
        assert share is not None
        assert share.prefill_tokens >= min(pending, MIN_CHUNK)
