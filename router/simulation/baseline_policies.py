"""Three published policies with their published defaults, as baselines for ours.

They only decide the size of micro-batches; admission, pages and order of arrival are the scheduler's for all policies.
"""

from collections.abc import Sequence

from tramontane.proto.step import StageTiming
from tramontane.router.scheduling.policy import BatchBudget, BatchWork, SchedulerState


class _StaticPolicy:
    """Learns nothing; as many micro-batches in flight as there are stages."""

    overlaps_chunks = True

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages

    def observe(self, budget: BatchBudget, work: BatchWork, timings: Sequence[StageTiming]) -> None:
        """Learn nothing."""


class VllmPolicy(_StaticPolicy):
    """vLLM: every micro-batch may have the whole budget, decodes first.

    v1/core/sched/scheduler.py, v1/engine/core.py step_with_batch_queue; max_num_batched_tokens 2048.
    """

    def __init__(self, num_stages: int, max_tokens: int = 2048) -> None:
        super().__init__(num_stages)
        self._max_tokens = max_tokens

    def choose_budget(self, state: SchedulerState) -> BatchBudget | None:
        """See ``Policy``."""
        if state.num_in_flight >= self._num_stages:
            return None
        decodes = min(state.num_ready, self._max_tokens)
        return BatchBudget(decodes, self._max_tokens - decodes)


class SarathiPolicy(VllmPolicy):
    """Sarathi-Serve (arXiv 2403.02310): stall-free batches of one small size; a prompt's chunks one after the other.

    sarathi_scheduler.py; chunk size 512 as in its evaluation.
    """

    overlaps_chunks = False

    def __init__(self, num_stages: int, max_tokens: int = 512) -> None:
        super().__init__(num_stages, max_tokens)


class GllmPolicy(_StaticPolicy):
    """gLLM (arXiv 2504.14775, gllm/scheduler.py): decodes in even parts, prompts by waiting tokens and free pages.

    Its reserve for running decodes is left out: with the caches of the simulation nothing is ever preempted.
    """

    def __init__(self, num_stages: int, iterations: int = 8, min_prefill: int = 32, max_prefill: int = 8192) -> None:
        super().__init__(num_stages)
        self._iterations, self._min_prefill, self._max_prefill = iterations, min_prefill, max_prefill
        self._turn = 0

    def choose_budget(self, state: SchedulerState) -> BatchBudget | None:
        """See ``Policy``."""
        if state.num_in_flight >= self._num_stages:
            return None
        decodes = max((state.num_decoding + self._turn) // self._num_stages, 1)
        self._turn = (self._turn + 1) % self._num_stages
        waiting = state.pending_tokens + state.waiting_tokens
        prefill = min(max(waiting // self._iterations, self._min_prefill), round(self._max_prefill * state.free_share))
        return BatchBudget(min(decodes, state.num_ready), prefill)
