"""Comparison of policies: the same requests on the same modelled pipeline."""

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
WARMUP_SHARE = 0.1  # of the time with a backlog, left out at the start: pipelines fill, and our policy learns


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    """A policy, of which every run makes a new one, and the most tokens that it puts into a micro-batch."""

    name: str
    make: Callable[[int], Policy]  # from the number of stages
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one run.

    ``bubble`` is the stages' idle share while requests waited for a slot, or over the whole run if none did. TTFT, ITL and
    the time from arrival to the end are in seconds, by percentile (50, 90, 99).
    """

    name: str
    bubble: float
    tokens_per_s: float
    ttft_s: tuple[float, ...]
    itl_s: tuple[float, ...]
    e2e_s: tuple[float, ...]


def all_policies(max_tokens: int, itl_target_s: float | None = None) -> list[PolicyEntry]:
    """Return our policy with these settings, and the published ones with theirs."""
    return [
        PolicyEntry("tramontane", lambda stages: BalancedPolicy(stages, max_tokens, itl_target_s), max_tokens),
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
        trace = simulate(make_scheduler(entry, num_stages, arrivals, max_num_seqs), pipeline, arrivals)
        outcomes.append((summarize(entry.name, trace), trace))
        on_done()
    return outcomes


def make_scheduler(entry: PolicyEntry, num_stages: int, arrivals: Sequence[SimRequest], max_num_seqs: int) -> Scheduler:
    """Make a scheduler whose cache holds ``max_num_seqs`` sequences of the longest kind; windows as in Mistral 7B v0.1."""
    max_len = max(arrival.prompt_tokens + arrival.new_tokens for arrival in arrivals) + 1
    ring = ring_pages(WINDOW, PAGE_SIZE, max_len)
    cache = CachePlan(PAGE_SIZE, (WindowClass(WINDOW, ring, ring * max_num_seqs),))
    return Scheduler(cache, SchedulerLimits(max_num_seqs, entry.max_tokens, max_len, 1000), entry.make(num_stages))


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
    return tuple(np.percentile(values, PERCENTILES).tolist()) if values else (0.0,) * len(PERCENTILES)
