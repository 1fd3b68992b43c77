"""Comparison of policies: the same requests on the same modelled pipeline, under ours and three
published ones.

Policies decide only the size of micro-batches; admission, pages and order of arrival are the
scheduler's for all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tramontane.cluster.bench.simulator import PipelineModel, SimRequest, SimTrace, simulate
from tramontane.proto.plan import CachePlan, WindowClass, ring_pages
from tramontane.router.scheduling.balanced_policy import BalancedPolicy
from tramontane.router.scheduling.policy import (
    BatchBudget,
    FixedInFlightPolicy,
    Policy,
    SchedulerState,
)
from tramontane.router.scheduling.scheduler import Scheduler
from tramontane.router.scheduling.waiting_queue import SchedulerLimits

PAGE_SIZE, WINDOW = 16, 4096
PERCENTILES = (50, 90, 99)
# share of the time with a backlog, skipped at the start: pipelines fill, and our policy learns
WARMUP_SHARE = 0.1


class VllmPolicy(FixedInFlightPolicy):
    """vLLM: every micro-batch may have the whole budget, decodes first. The number in flight is the
    number of stages.

    v1/core/sched/scheduler.py, v1/engine/core.py step_with_batch_queue; max_num_batched_tokens
    2048.
    """

    def __init__(self, num_stages: int, max_tokens: int = 2048) -> None:
        super().__init__(num_stages, max_tokens)

    def choose_budget(self, state: SchedulerState) -> BatchBudget | None:
        """See ``Policy``."""
        if state.num_in_flight >= self._max_in_flight:
            return None
        decodes = min(state.num_ready, self._max_tokens)
        return BatchBudget(decodes, self._max_tokens - decodes)


class SarathiPolicy(VllmPolicy):
    """Sarathi-Serve (arXiv 2403.02310): stall-free batches of one small size; a prompt's chunks one
    after the other.

    sarathi_scheduler.py; chunk size 512 as in its evaluation.
    """

    overlaps_chunks = False

    def __init__(self, num_stages: int, max_tokens: int = 512) -> None:
        super().__init__(num_stages, max_tokens)


class GllmPolicy(FixedInFlightPolicy):
    """gLLM (arXiv 2504.14775, gllm/scheduler.py): decodes in even parts, prompts by waiting tokens
    and free pages.

    Its reserve for running decodes is left out: with the caches of the simulation no sequence is
    ever preempted.
    """

    def __init__(
        self, num_stages: int, iterations: int = 8, min_prefill: int = 32, max_prefill: int = 8192
    ) -> None:
        super().__init__(num_stages, max_prefill)
        self._iterations, self._min_prefill = iterations, min_prefill
        self._turn = 0

    def choose_budget(self, state: SchedulerState) -> BatchBudget | None:
        """See ``Policy``."""
        if state.num_in_flight >= self._max_in_flight:
            return None
        decodes = max((state.num_decoding + self._turn) // self._max_in_flight, 1)
        self._turn = (self._turn + 1) % self._max_in_flight
        waiting = state.pending_tokens + state.waiting_tokens
        prefill = min(
            max(waiting // self._iterations, self._min_prefill),
            round(self._max_tokens * state.free_share),
        )
        return BatchBudget(min(decodes, state.num_ready), prefill)


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    """A policy, created anew for every run, and the most tokens that it puts into a micro-batch."""

    name: str
    make: Callable[[int], Policy]  # from the number of stages
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one run; times by percentile (50, 90, 99)."""

    name: str
    # the stages' idle share while requests waited for a slot, or over the whole run if none did
    bubble: float
    tokens_per_s: float
    ttft_s: tuple[float, ...]
    itl_s: tuple[float, ...]
    e2e_s: tuple[float, ...]  # from arrival to the end


def all_policies(max_tokens: int, itl_target_s: float | None = None) -> list[PolicyEntry]:
    """Return our policy with these settings, and the published policies with their own."""
    return [
        PolicyEntry(
            "tramontane",
            lambda stages: BalancedPolicy(stages, max_tokens, itl_target_s),
            max_tokens,
        ),
        PolicyEntry("full budget (vLLM)", VllmPolicy, 2048),
        PolicyEntry("uniform budget (Sarathi-Serve)", SarathiPolicy, 512),
        PolicyEntry("token throttling (gLLM)", GllmPolicy, 8192),
    ]


def compare(
    entries: Sequence[PolicyEntry],
    pipeline: PipelineModel,
    num_stages: int,
    arrivals: Sequence[SimRequest],
    max_num_seqs: int,
    on_done: Callable[[], None] = lambda: None,
) -> list[tuple[Summary, SimTrace]]:
    """Simulate all policies, one after the other; ``on_done`` is called after each."""
    outcomes = []
    for entry in entries:
        trace = simulate(
            make_scheduler(entry, num_stages, arrivals, max_num_seqs), pipeline, arrivals
        )
        outcomes.append((summarize(entry.name, trace), trace))
        on_done()
    return outcomes


def make_scheduler(
    entry: PolicyEntry, num_stages: int, arrivals: Sequence[SimRequest], max_num_seqs: int
) -> Scheduler:
    """Make a scheduler whose cache holds ``max_num_seqs`` sequences of the longest kind; windows as
    in Mistral 7B v0.1.
    """
    max_len = max(arrival.prompt_tokens + arrival.new_tokens for arrival in arrivals) + 1
    ring = ring_pages(WINDOW, PAGE_SIZE, max_len)
    cache = CachePlan(PAGE_SIZE, (WindowClass(WINDOW, ring, ring * max_num_seqs),))
    return Scheduler(
        cache,
        SchedulerLimits(max_num_seqs, entry.max_tokens, max_len, 1000),
        entry.make(num_stages),
    )


def summarize(name: str, trace: SimTrace) -> Summary:
    """Return the figures of a run."""
    start, end = WARMUP_SHARE * trace.backlog_until, trace.backlog_until
    if not trace.backlog_until:
        start, end = trace.arrivals[0].at, trace.span_s
    return Summary(
        name,
        trace.bubble(start, end),
        trace.tokens_per_s,
        _percentiles(trace.ttft_s()),
        _percentiles(trace.itl_s()),
        _percentiles(trace.e2e_s()),
    )


def _percentiles(values: Sequence[float]) -> tuple[float, ...]:
    return (
        tuple(np.percentile(values, PERCENTILES).tolist()) if values else (0.0,) * len(PERCENTILES)
    )
