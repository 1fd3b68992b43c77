"""The simulated pipeline keeps time as a real one would, and our policy keeps its stages at
work.
"""

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import replace

import pytest

from tramontane.cluster.bench.comparison import GllmPolicy, SarathiPolicy, VllmPolicy
from tramontane.cluster.bench.simulator import (
    LengthDistribution,
    PipelineModel,
    SimRequest,
    SimTrace,
    TrafficModel,
    simulate,
)
from tramontane.proto.plan import CachePlan, WindowClass, ring_pages
from tramontane.router.scheduling.balanced_policy import BalancedPolicy
from tramontane.router.scheduling.policy import BatchWork, FixedInFlightPolicy, Policy
from tramontane.router.scheduling.scheduler import Scheduler
from tramontane.router.scheduling.waiting_queue import SchedulerLimits

MAX_LEN, PAGE, WINDOW = 16384, 16, 4096
MIXED = TrafficModel(300, LengthDistribution(800, 1.0, 8000), LengthDistribution(200, 0.8, 1500))


def _scheduler(
    policy: Policy,
    budget: int,
    num_seqs: int = 256,
    window: int | None = WINDOW,
    max_len: int = MAX_LEN,
    pages: float = 1.0,
) -> Scheduler:
    """``pages``: for so large a part of all places there are enough."""
    ring = ring_pages(window, PAGE, max_len)
    cache = CachePlan(PAGE, (WindowClass(window, ring, int(ring * num_seqs * pages)),))
    return Scheduler(cache, SchedulerLimits(num_seqs, budget, max_len, 1000), policy)


def _like_a_gpu(
    num_stages: int, factors: tuple[float, ...] = ()
) -> Callable[[BatchWork], list[float]]:
    """Weights to be read whatever comes, then so much per token and per key: a 7B model over eight
    large GPUs.
    """

    def seconds(work: BatchWork) -> list[float]:
        prefill = 4e-6 * work.prefill_tokens + 1e-10 * work.prefill_keys
        one = 4e-4 + prefill + 4e-6 * work.decodes + 6e-9 * work.decode_keys
        return [one * factor for factor in factors or (1.0,) * num_stages]

    return seconds


def _saturated(policy: Policy, budget: int, stages: int, noise: float = 0.0) -> float:
    """The bubble while requests waited, after the start."""
    pipeline = PipelineModel(_like_a_gpu(stages), hop_s=2e-4, noise=noise)
    trace = simulate(_scheduler(policy, budget, 128), pipeline, MIXED.arrivals())
    return trace.bubble(0.1 * trace.backlog_until, trace.backlog_until)


def test_two_micro_batches_take_the_stages_in_turn() -> None:
    pipeline = PipelineModel(lambda work: [3.0 * (work.prefill_tokens > 0)] * 2, hop_s=1.0)
    scheduler = _scheduler(FixedInFlightPolicy(2, 10), 10)
    trace = simulate(scheduler, pipeline, [SimRequest(0.0, 20, 1)])
    assert [[(t.started_at, t.ended_at) for t in timings] for timings in trace.timings] == [
        [(1, 4), (5, 8)],
        [(4, 7), (8, 11)],
    ]
    assert trace.token_times == ((12.0,),)
    assert trace.bubble(0, 12) == pytest.approx(1 - 12 / 24)
    assert (trace.span_s, trace.ttft_s()) == (12.0, [12.0])


def test_every_request_gets_all_its_tokens_in_order() -> None:
    arrivals = TrafficModel(
        60, LengthDistribution(100, 1.0, 900), LengthDistribution(20, 1.0, 200), rate=50.0, burst=7
    ).arrivals(3)
    for policy in (BalancedPolicy(3, 64), VllmPolicy(3), SarathiPolicy(3), GllmPolicy(3)):
        scheduler = _scheduler(policy, 2048, 16)
        trace = simulate(scheduler, PipelineModel(_like_a_gpu(3), 1e-4, 0.2), arrivals)
        assert [len(times) for times in trace.token_times] == [
            arrival.new_tokens for arrival in trace.arrivals
        ]
        assert all(list(times) == sorted(times) for times in trace.token_times)
        scheduler.check_integrity()


def test_lengths_have_the_mean_that_was_requested() -> None:
    rng, lengths = random.Random(0), LengthDistribution(500, 0.8, 10**6)
    assert statistics.fmean(lengths.draw(rng) for _ in range(20_000)) == pytest.approx(
        500, rel=0.03
    )
    assert all(1 <= LengthDistribution(3, 3.0, 9).draw(rng) <= 9 for _ in range(1000))


def test_arrivals_have_the_rate_that_was_requested_also_in_bursts() -> None:
    for burst in (1, 8):
        arrivals = TrafficModel(
            4000,
            LengthDistribution(9, 1.0, 99),
            LengthDistribution(9, 1.0, 99),
            rate=20.0,
            burst=burst,
        ).arrivals()
        assert arrivals[-1].at == pytest.approx(4000 / 20, rel=0.1)
        assert len({arrival.at for arrival in arrivals}) == 4000 // burst


@pytest.mark.nightly
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_at_saturation_eight_stages_are_idle_for_less_than_five_percent_and_than_under_others(
    noise: float,
) -> None:
    ours = _saturated(BalancedPolicy(8, 1024), 1024, 8, noise)
    others = [
        _saturated(policy, 8192, 8, noise)
        for policy in (VllmPolicy(8), SarathiPolicy(8), GllmPolicy(8))
    ]
    assert ours < 0.05
    assert ours < min(others)


def _token_gaps(trace: SimTrace) -> list[float]:
    return sorted(trace.itl_s())


@pytest.mark.nightly
def test_a_target_for_the_time_between_tokens_is_kept() -> None:
    arrivals = TrafficModel(
        150, LengthDistribution(2000, 0.5, 8000), LengthDistribution(200, 0.5, 1500), rate=60.0
    ).arrivals(1)
    pipeline = PipelineModel(_like_a_gpu(4), hop_s=1e-4)
    free = _token_gaps(simulate(_scheduler(BalancedPolicy(4, 2048), 2048), pipeline, arrivals))
    bound = _token_gaps(
        simulate(_scheduler(BalancedPolicy(4, 2048, itl_target_s=0.008), 2048), pipeline, arrivals)
    )
    assert free[int(len(free) * 0.99)] > 0.010
    assert bound[int(len(bound) * 0.99)] < 0.0085


def test_a_lone_prompt_is_cut_where_that_brings_its_first_token_sooner() -> None:
    """Of 1600 tokens in one piece four stages take 4 x 6.8 ms; in pieces they overlap. Once the
    costs are known.
    """
    warm_up = [SimRequest(0.001 * i, 100 + 37 * i, 8) for i in range(20)]
    alone = SimRequest(5.0, 1600, 1)
    pipeline = PipelineModel(_like_a_gpu(4), hop_s=1e-4)
    trace = simulate(_scheduler(BalancedPolicy(4, 2048), 2048), pipeline, [*warm_up, alone])
    whole = 4 * _like_a_gpu(4)(BatchWork(1600, 1600 * 1601 // 2))[0] + 5e-4
    assert trace.ttft_s()[-1] < 0.65 * whole


def test_decodes_are_not_cut_where_a_stage_takes_as_long_for_half_of_them() -> None:
    """Two sequences, four stages whose time does not depend on their number: a round of both takes
    as long as one of each.
    """
    arrivals = [SimRequest(0.0, 4, 400), SimRequest(0.0, 4, 400)]
    pipeline = PipelineModel(lambda work: [1e-3] * 4, hop_s=1e-5)
    trace = simulate(_scheduler(BalancedPolicy(4, 512), 512), pipeline, arrivals)
    together = [timings[0].num_tokens == 2 for timings in trace.timings[-300:]]
    assert sum(together) > 0.9 * len(together), "all but when the other way is tried"


def test_decodes_are_not_cut_where_stages_share_what_computes() -> None:
    """Alone a stage takes 4 ms and half of the decodes 3 ms, so that cutting seems to pay; but all
    stages share one core.
    """
    arrivals = [SimRequest(0.0, 4, 600) for _ in range(8)]
    pipeline = PipelineModel(_mostly_fixed, hop_s=1e-5, shares_one_core=True)
    together, cut, ours = (
        simulate(_scheduler(policy, 512), pipeline, arrivals).span_s
        for policy in (
            FixedInFlightPolicy(1, 512),
            FixedInFlightPolicy(5, 512),
            BalancedPolicy(4, 512),
        )
    )
    assert cut > 1.8 * together
    assert ours < 1.3 * together, "trials included"


def test_stages_that_take_turns_get_one_micro_batch_and_whole_prompts() -> None:
    """Four stages of all cores each: what works at the same time only puts each other off."""
    warm_up = [SimRequest(0.001 * i, 100 + 37 * i, 8) for i in range(20)]
    alone = SimRequest(50.0, 400, 1)
    pipeline = PipelineModel(_like_a_gpu(4), hop_s=1e-4, shares_one_core=True)
    policy = BalancedPolicy(4, 2048, stages_at_once=1)
    trace = simulate(_scheduler(policy, 2048), pipeline, [*warm_up, alone])
    assert policy.max_in_flight == 1
    assert trace.timings[-1][0].num_tokens == alone.prompt_tokens


def _mostly_fixed(work: BatchWork) -> list[float]:
    return [(2e-3 + 2.5e-4 * work.decodes) * (work.decodes + work.prefill_tokens > 0)] * 4


def test_m_grows_while_the_slowest_stage_waits_and_there_is_more_to_do() -> None:
    """Hops as long as three steps: stages + 1 micro-batches leave gaps."""
    policy = BalancedPolicy(4, 512)
    arrivals = [SimRequest(0.0, 64, 400) for _ in range(64)]
    pipeline = PipelineModel(lambda work: [1e-3 + 1e-4 * work.decodes] * 4, hop_s=3e-3)
    simulate(_scheduler(policy, 512), pipeline, arrivals)
    assert policy.max_in_flight == 8


SATURATING = [
    SimRequest(0.0, 600 + 97 * i % 800, 100 + 31 * i % 200, priority=1) for i in range(100)
]
# while all of it lasts
INTERACTIVE = [SimRequest(0.25 + 0.0307 * i, (20, 200, 1000)[i % 3], 8) for i in range(21)]


def _first_tokens_next_to(
    batch: list[SimRequest], stages: int, window: int | None = WINDOW, pages: float = 1.0
) -> tuple[list[float], list[float]]:
    """How long interactive requests wait for their first tokens, and how long they may, with as
    many pages per place.

    They may take twice as long as with nothing else, and once the longest of the micro-batches in
    flight when they came.
    """
    pipeline = PipelineModel(_like_a_gpu(stages), hop_s=1e-4)
    schedulers = (
        _scheduler(BalancedPolicy(stages, 512), 512, 32, window, 2048, pages) for _ in range(2)
    )
    idle, full = (
        simulate(next(schedulers), pipeline, [*each, *INTERACTIVE]) for each in ([], batch)
    )
    assert full.backlog_until > INTERACTIVE[-1].at, (
        "there was always a batch sequence that waited for a place"
    )
    # while the costs are being learned it takes longer
    best = {a.prompt_tokens: math.inf for a in idle.arrivals}
    for took, arrival in zip(idle.ttft_s(), idle.arrivals, strict=True):
        best[arrival.prompt_tokens] = min(best[arrival.prompt_tokens], took)
    first = [
        took
        for took, arrival in zip(full.ttft_s(), full.arrivals, strict=True)
        if arrival in INTERACTIVE
    ]
    ahead = [
        max(back - sent for sent, back in full.in_flight if sent <= a.at < back)
        for a in INTERACTIVE
    ]
    return first, [
        2 * best[a.prompt_tokens] + took for a, took in zip(INTERACTIVE, ahead, strict=True)
    ]


@pytest.mark.nightly
@pytest.mark.parametrize(("window", "pages"), [(512, 1.0), (None, 0.4)])
@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_interactive_requests_hardly_wait_for_a_saturating_batch(
    stages: int, window: int | None, pages: float
) -> None:
    """All places are taken, or all pages, and many prompts wait: twice the idle time and one
    micro-batch.
    """
    first, allowed = _first_tokens_next_to(SATURATING, stages, window, pages)
    assert [took for took, most in zip(first, allowed, strict=True) if took > most] == []


def test_with_the_same_priority_they_would_wait_for_a_long_time() -> None:
    first, allowed = _first_tokens_next_to(
        [replace(arrival, priority=0) for arrival in SATURATING], 2
    )
    assert min(first) > 20 * max(allowed)
