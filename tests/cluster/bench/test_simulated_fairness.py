"""Fair shares in simulated time: against the order of arrival, for all prompts, for short ones, and
for equal ones.
"""

import statistics
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tramontane.cluster.bench.simulator import (
    LengthDistribution,
    PipelineModel,
    SimRequest,
    TrafficModel,
    simulate,
)
from tramontane.proto.plan import CachePlan, WindowClass, ring_pages
from tramontane.router.scheduling.balanced_policy import BalancedPolicy
from tramontane.router.scheduling.policy import BatchWork
from tramontane.router.scheduling.prefill_queue import PrefillQueue
from tramontane.router.scheduling.scheduler import Scheduler
from tramontane.router.scheduling.sequence import priority_key
from tramontane.router.scheduling.waiting_queue import SchedulerLimits

MIXED = TrafficModel(
    150, LengthDistribution(2000, 1.2, 30_000), LengthDistribution(100, 0.8, 400), rate=50.0
)
EQUAL = [SimRequest(0.0, 10_000, 4) for _ in range(8)]


def _seconds(work: BatchWork) -> list[float]:
    one = (
        4e-4
        + 4e-6 * (work.prefill_tokens + work.decodes)
        + 1e-10 * work.prefill_keys
        + 6e-9 * work.decode_keys
    )
    return [one, one]


def _ttft(arrivals: Sequence[SimRequest]) -> list[float]:
    ring = ring_pages(4096, 16, 32_768)
    cache = CachePlan(16, (WindowClass(4096, ring, ring * 256),))
    scheduler = Scheduler(cache, SchedulerLimits(256, 1024, 32_768, 1000), BalancedPolicy(2, 1024))
    return simulate(scheduler, PipelineModel(_seconds, hop_s=1e-4), arrivals).ttft_s()


def _by_arrival(monkeypatch: pytest.MonkeyPatch, arrivals: Sequence[SimRequest]) -> list[float]:
    with monkeypatch.context() as patched:
        patched.setattr(PrefillQueue, "_sort", lambda queue: queue.sequences.sort(key=priority_key))
        return _ttft(arrivals)


@pytest.mark.parametrize("num_keys", [0, 1, 4])
def test_a_mixed_load_waits_no_longer_on_average(
    monkeypatch: pytest.MonkeyPatch, num_keys: int
) -> None:
    arrivals = [
        replace(a, owner=1 + n % num_keys if num_keys else 0)
        for n, a in enumerate(MIXED.arrivals())
    ]
    assert statistics.fmean(_ttft(arrivals)) < 1.02 * statistics.fmean(
        _by_arrival(monkeypatch, arrivals)
    )


@pytest.mark.parametrize("num_keys", [0, 1, 8])
def test_equal_prompts_wait_no_longer_on_average(
    monkeypatch: pytest.MonkeyPatch, num_keys: int
) -> None:
    arrivals = [replace(a, owner=1 + n % num_keys if num_keys else 0) for n, a in enumerate(EQUAL)]
    assert statistics.fmean(_ttft(arrivals)) < 1.02 * statistics.fmean(
        _by_arrival(monkeypatch, arrivals)
    )


@pytest.mark.parametrize("owners", [(1, 2), (0, 0)])
def test_a_short_prompt_behind_long_ones(
    monkeypatch: pytest.MonkeyPatch, owners: tuple[int, int]
) -> None:
    """Ten prompts of 30,000 tokens, then one of 4: a fiftieth of the time that it waits in the
    order of arrival.
    """
    arrivals = [
        *(SimRequest(0.0, 30_000, 4, owner=owners[0]) for _ in range(10)),
        SimRequest(0.1, 4, 4, owner=owners[1]),
    ]
    assert _ttft(arrivals)[-1] < 0.02 * _by_arrival(monkeypatch, arrivals)[-1]
