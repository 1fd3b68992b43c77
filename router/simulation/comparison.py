"""Policies side by side: the same requests on the same modelled pipeline, and what came of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tramontane.proto.plan import CachePlan, WindowClass, ring_pages
from tramontane.router.scheduling.admission import SchedulerLimits
from tramontane.router.scheduling.balanced_policy import BalancedPolicy
from tramontane.router.scheduling.policy import Policy
from tramontane.router.scheduling.scheduler import Scheduler
from tramontane.router.simulation.baseline_policies import GllmPolicy, SarathiPolicy, VllmPolicy
from tramontane.router.simulation.simulator import PipelineModel, SimRequest, SimTrace, simulate

PAGE_SIZE, WINDOW = 16, 4096
PERCENTILES = (50, 90, 99)
WARMUP_SHARE = 0.1  # of the time with a backlog is left out at the start: pipelines fill, and ours learns


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    """A policy, made anew for every run, and the most tokens that it puts into a micro-batch."""

    name: str
    make: Callable[[int], Policy]  # from the number of stages
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Summary:
    """Of one run. ``bubble`` is the stages' idle share while requests waited for a place, or else over the whole run.

    Seconds by percentile (50, 90, 99): to the first token, between tokens, and from arrival to the end.
    """

    name: str
    bubble: float
    tokens_per_s: float
    ttft_s: tuple[float, ...]
    itl_s: tuple[float, ...]
    e2e_s: tuple[float, ...]


def all_policies(max_tokens: int, itl_target_s: float | None = None) -> list[PolicyEntry]:
    """Ours with these settings, and the published ones with theirs."""
    return [
        PolicyEntry("tramontane", lambda stages: BalancedPolicy(stages, max_tokens, itl_target_s), max_tokens),
        PolicyEntry("full budget (vLLM)", VllmPolicy, 2048),
        PolicyEntry("uniform budget (Sarathi-Serve)", SarathiPolicy, 512),
        PolicyEntry("token throttling (gLLM)", GllmPolicy, 8192),
    ]


def compare(
    chosen: Sequence[PolicyEntry],
    pipeline: PipelineModel,
    num_stages: int,
    arrivals: Sequence[SimRequest],
    max_num_seqs: int,
    on_done: Callable[[], None] = lambda: None,
) -> list[tuple[Summary, SimTrace]]:
    """All of them, one after the other. ``on_done`` hears of each."""
    outcomes = []
    for candidate in chosen:
        scheduler = make_scheduler(candidate, num_stages, arrivals, max_num_seqs)
        trace = simulate(scheduler, pipeline, arrivals)
        outcomes.append((summarize(candidate.name, trace), trace))
        on_done()
    return outcomes


def make_scheduler(candidate: PolicyEntry, num_stages: int, arrivals: Sequence[SimRequest], max_num_seqs: int) -> Scheduler:
    """With room in the caches for ``max_num_seqs`` sequences of the longest kind; windows as in Mistral 7B v0.1."""
    max_len = max(arrival.prompt_tokens + arrival.new_tokens for arrival in arrivals) + 1
    ring = ring_pages(WINDOW, PAGE_SIZE, max_len)
    cache = CachePlan(PAGE_SIZE, (WindowClass(WINDOW, ring, ring * max_num_seqs),))
    return Scheduler(cache, SchedulerLimits(max_num_seqs, candidate.max_tokens, max_len, 1000), candidate.make(num_stages))


def summarize(name: str, trace: SimTrace) -> Summary:
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
    return tuple(np.percentile(values, PERCENTILES).tolist()) if values else (0.0,) * len(PERCENTILES)
