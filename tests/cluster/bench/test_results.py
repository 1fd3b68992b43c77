"""What ``tramontane bench`` makes of traces: literal numbers, no clock."""

import asyncio
import itertools
import math
from dataclasses import replace

import pytest

from tramontane.cluster.bench.report import as_data
from tramontane.cluster.bench.results import (
    BenchMetrics,
    Failure,
    FailureCount,
    Latency,
    RequestTrace,
    Round,
    RoundPlan,
    Workload,
    arrivals,
    median_index,
)
from tramontane.proto.errors import ConfigError

# due at 10 and 11; the second one's last piece holds two tokens
TRACES = (RequestTrace(10.0, 4, 3, (12.0, 13.0, 15.0)), RequestTrace(11.0, 6, 3, (12.0, 14.0)))
FULL = Failure("HTTP 429", "too much is waiting")


def test_figures_of_two_requests() -> None:
    figures = BenchMetrics.of(TRACES)
    assert (figures.elapsed_s, figures.num_completed, figures.num_failed) == (5.0, 2, 0)
    assert (figures.num_prompt_tokens, figures.num_new_tokens) == (10, 6)
    assert (figures.tokens_per_s, figures.per_s(6)) == (3.2, 1.2)
    assert figures.ttft == Latency(1.5, (1.5, 1.9, 1.99))  # 2 and 1
    assert figures.e2e == Latency(4.0, (4.0, 4.8, 4.98))  # 5 and 3
    assert figures.itl is not None  # 1, 2 and 2
    assert figures.itl.mean_s == pytest.approx(5 / 3)
    assert figures.itl.percentiles_s == (2.0, 2.0, 2.0)
    # 3/2 and 2/2: not per piece
    assert figures.tpot == Latency(1.25, (1.25, pytest.approx(1.45), pytest.approx(1.495)))


def test_failures_are_counted_by_kind_and_have_no_part_in_the_rest() -> None:
    broken = RequestTrace(5.0, 100, 7, (6.0, 99.0), Failure("ReadError", "gone"))
    refused = [
        RequestTrace(12.0, 100, 0, (), replace(FULL, message=f"{FULL.message}: {i}"))
        for i in range(2)
    ]
    figures = BenchMetrics.of([*TRACES, broken, *refused])
    assert figures.failures == (
        FailureCount("HTTP 429", 2, "too much is waiting: 0"),
        FailureCount("ReadError", 1, "gone"),
    )
    assert (figures.num_completed, figures.num_failed, figures.num_new_tokens) == (2, 3, 6)
    assert figures.elapsed_s == 10.0  # it began when the broken one was due
    assert figures.ttft == BenchMetrics.of(TRACES).ttft


def test_nothing_answered_and_single_tokens_have_no_latencies() -> None:
    figures = BenchMetrics.of([RequestTrace(1.0, 5, 0, (), FULL)])
    assert (figures.elapsed_s, figures.tokens_per_s, figures.ttft, figures.e2e) == (
        0.0,
        0.0,
        None,
        None,
    )
    single = BenchMetrics.of([RequestTrace(1.0, 5, 1, (3.0,))])
    assert (single.tpot, single.itl, single.ttft) == (None, None, Latency(2.0, (2.0, 2.0, 2.0)))


@pytest.mark.parametrize(
    ("speeds", "chosen"),
    [
        ((5.0,), 0),
        ((5.0, 9.0, 7.0), 2),
        ((9.0, 5.0), 1),
        ((4.0, 1.0, 3.0, 2.0), 3),
        ((2.0, 2.0, 2.0), 1),
    ],
)
def test_the_middle_round_is_shown(speeds: tuple[float, ...], chosen: int) -> None:
    assert median_index(speeds) == chosen


def _round(slowness: float) -> Round:
    return Round([RequestTrace(0.0, 4, 4, (slowness,))])


def test_warmup_rounds_do_not_count_and_the_rest_are_reported() -> None:
    seen = []

    async def one(number: int) -> Round:
        seen.append(number)
        return _round((100.0, 2.0, 1.0, 4.0)[number])

    outcome = asyncio.run(RoundPlan(1, 3).run(one))
    assert seen == [0, 1, 2, 3]
    assert outcome.speeds == (4.0, 8.0, 2.0)
    assert outcome.figures.elapsed_s == 2.0
    data = as_data(outcome)
    assert list(data)[:5] == [
        "elapsed_time",
        "num_requests",
        "total_num_tokens",
        "requests_per_second",
        "tokens_per_second",
    ]
    assert [data[key] for key in list(data)[:5]] == [2.0, 1, 8, 0.5, 4.0]
    assert (data["repeats_tokens_per_second"], data["num_warmups"]) == ([4.0, 8.0, 2.0], 1)
    assert {"median_ttft_ms", "p99_e2el_ms", "mean_e2el_ms"} <= data.keys()
    assert data["median_ttft_ms"] == 2000.0
    assert data.keys().isdisjoint({"bubble", "stages", "mean_itl_ms"})


def test_work_is_the_seeds_and_every_round_has_other_tokens_of_the_same_lengths() -> None:
    work = Workload(num_prompts=50, input_len=10, output_len=4, range_ratio=0.5, seed=3)
    first, again, other = (work.requests(number, 20) for number in (0, 0, 1))
    assert first == again
    assert [r.prompt for r in first] != [r.prompt for r in other]
    assert [(r.num_prompt_tokens, r.num_new_tokens) for r in first] == [
        (r.num_prompt_tokens, r.num_new_tokens) for r in other
    ]
    assert {r.num_prompt_tokens for r in first} == set(range(5, 16))
    assert {r.num_new_tokens for r in first} == {2, 3, 4, 5, 6}
    assert work.max_positions == 15 + 6
    tokens = {token for r in first for token in r.prompt}
    assert tokens == set(range(20))
    assert all(len(r.prompt) == r.num_prompt_tokens for r in first)


def test_without_a_ratio_lengths_are_fixed_and_without_a_vocabulary_prompts_are_words() -> None:
    requests = Workload(num_prompts=3, input_len=7, output_len=2).requests(0, None)
    assert [(r.num_prompt_tokens, r.num_new_tokens) for r in requests] == [(7, 2)] * 3
    assert all(isinstance(r.prompt, str) and len(r.prompt.split()) == 7 for r in requests)


def test_arrivals_are_a_poisson_process_of_the_rate() -> None:
    assert arrivals(3, math.inf, 0) == [0.0, 0.0, 0.0]
    due = arrivals(4000, 8.0, 0)
    gaps = [b - a for a, b in itertools.pairwise(due)]
    assert due == sorted(due)
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 8, rel=0.05)
    # no fixed steps
    assert sum(gap > 1 / 8 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.03)
    assert arrivals(10, 8.0, 0) == due[:10]
    assert arrivals(10, 8.0, 1) != due[:10]


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Workload(num_prompts=0), "--num-prompts is 0"),
        (lambda: Workload(input_len=-1), "--input-len is -1"),
        (lambda: Workload(output_len=0), "--output-len is 0"),
        (lambda: Workload(range_ratio=1.0), "--range-ratio is 1.0"),
        (lambda: Workload(range_ratio=math.nan), "--range-ratio is nan"),
        (lambda: Workload(seed=-1), "--seed is -1"),
        (lambda: RoundPlan(-1, 1), "--warmups is -1"),
        (lambda: RoundPlan(0, 0), "--repeats is 0"),
        (lambda: arrivals(1, 0.0, 0), "--request-rate is 0"),
        (lambda: arrivals(1, math.nan, 0), "--request-rate is nan"),
    ],
)
def test_impossible_work_is_refused(make: "object", named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make()  # type: ignore[operator]
