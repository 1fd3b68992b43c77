"""Counters for Prometheus, with a stand-in for Ray's: what they are given, and under which tags."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from running_router import new_scheduler, running
from tiny_models import random_model, split_model, tiny_args, tiny_plan

from tramontane.cluster.observability.exporters import PipelineMetrics, RequestMetrics
from tramontane.cluster.observability.metrics import (
    METRICS,
    PIPELINE_METRICS,
    REQUEST_KINDS,
    REQUEST_METRICS,
    DeltaCounter,
    ExpertWorkMetrics,
    Metric,
    StageActorMetrics,
)
from tramontane.cluster.pipeline.local_chain import LocalStageChain
from tramontane.proto.errors import PipelineError
from tramontane.proto.request import FinishReason, Request, SamplingParams
from tramontane.router.engine.router import Router
from tramontane.router.openai.request_context import REFUSALS, RequestStats


class StandIn:
    """As Ray's counter, which refuses what is not positive."""

    def __init__(self, metric: Metric | None = None) -> None:
        self.metric = metric
        self.totals: Counter[tuple[tuple[str, str], ...]] = Counter()
        self.num_calls = 0

    def inc(self, value: float, tags: Mapping[str, str]) -> None:
        assert value > 0
        assert self.metric is None or set(tags) == set(self.metric.labels)
        assert all(isinstance(tag, str) for tag in tags.values())
        self.num_calls += 1
        self.totals[tuple(sorted(tags.items()))] += value  # type: ignore[assignment]


@given(st.lists(st.integers(0, 5)))
def test_a_counter_follows_what_was_counted(added: list[int]) -> None:
    """However often it is reported, and without a call where nothing was added."""
    counter, total = StandIn(), 0
    follower = DeltaCounter(counter)
    for number in added:
        total += number
        follower.update(total, {"of": "a"})
        follower.update(2 * total, {"of": "b"})
        assert counter.totals[("of", "a"),] == total
        assert counter.totals[("of", "b"),] == 2 * total
    assert counter.num_calls == 2 * sum(number > 0 for number in added)


def test_every_expert_of_a_stage_has_a_series() -> None:
    metrics = StandIns()
    tokens = StageActorMetrics(metrics, "app-0", 1)
    counter = metrics.counters["expert_tokens"]
    tokens.export({4: (1, 0), 5: (2, 3)}, {})
    tokens.export({4: (1, 7), 5: (2, 4)}, {})
    tags = {"pipeline": "app-0", "stage": "1"}
    expected = {("4", "0"): 1, ("4", "1"): 7, ("5", "0"): 2, ("5", "1"): 4}
    assert counter.totals == {
        tuple(sorted((tags | {"layer": layer, "expert": expert}).items())): n
        for (layer, expert), n in expected.items()
    }
    assert counter.num_calls == 5


def test_hidden_states_have_a_series_for_each_transport() -> None:
    """And, for one release, under their former names."""
    metrics = StandIns()
    stage = StageActorMetrics(metrics, "app-0", 1)
    stage.export({}, {"inline": (3, 3000)})
    stage.export({}, {"inline": (4, 4000), "plasma": (1, 2**21)})
    names = {
        "transport": ("hidden_state_transfers", "hidden_state_bytes"),
        "way": ("sent_hops", "sent_bytes"),
    }
    for label, (transfers, num_bytes) in names.items():
        series = [
            tuple(sorted({"pipeline": "app-0", "stage": "1", label: each}.items()))
            for each in ("inline", "plasma")
        ]
        assert metrics.counters[transfers].totals == dict(zip(series, (4, 1), strict=True))
        assert metrics.counters[num_bytes].totals == dict(zip(series, (4000, 2**21), strict=True))


def test_an_expert_actors_work_has_two_counters() -> None:
    metrics = StandIns()
    work = ExpertWorkMetrics(metrics, "app-0", 3)
    busy_s, rows = metrics.counters["expert_busy_seconds"], metrics.counters["expert_rows"]
    for seconds, number in ((0.0, 0), (0.5, 10), (0.5, 10), (2.0, 30)):
        work.export(seconds, number)
    series = (("actor", "3"), ("pipeline", "app-0"))
    assert (busy_s.totals, rows.totals) == ({series: 2.0}, {series: 30})
    assert busy_s.num_calls == rows.num_calls == 2


class StandIns:
    """As ``MetricFactory``; it keeps what is reported of every metric, by its name."""

    def __init__(self) -> None:
        self.counters: dict[str, StandIn] = {}
        self.gauges: dict[str, Gauges] = {}
        self.histograms: dict[str, Histograms] = {}

    def counter(self, metric: Metric) -> StandIn:
        return self.counters.setdefault(metric.name, StandIn(metric))

    def gauge(self, metric: Metric) -> "Gauges":
        return self.gauges.setdefault(metric.name, Gauges(metric))

    def histogram(self, metric: Metric) -> "Histograms":
        return self.histograms.setdefault(metric.name, Histograms(metric))

    def counted(self, name: str) -> dict[str, float]:
        """By the values of its labels but the pipeline and the kind."""
        of = self.counters[name]
        return {
            " ".join(v for k, v in tags if k not in ("pipeline", "kind")): number
            for tags, number in of.totals.items()
        }


class Gauges:
    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.values: dict[str, float] = {}

    def set(self, value: float, tags: Mapping[str, str]) -> None:
        assert set(tags) == set(self.metric.labels)
        self.values[tags.get("window", "")] = value


class Histograms:
    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self.values: list[float] = []

    def observe(self, value: float, tags: Mapping[str, str]) -> None:
        assert set(tags) == set(self.metric.labels)
        self.values.append(value)


ARGS = tiny_args(n_layers=2, window=16, max_seq_len=64)
PLAN = tiny_plan(ARGS, num_stages=2, max_num_seqs=8)


@pytest.fixture(scope="module")
def chain() -> Iterator[LocalStageChain]:
    stages = LocalStageChain(split_model(random_model(ARGS), PLAN))
    yield stages
    stages.close()


@asynccontextmanager
async def _running(
    chain: LocalStageChain, *, enable_prefix_caching: bool = False
) -> AsyncIterator[Router]:
    scheduler = new_scheduler(
        PLAN.cache,
        budget=32,
        max_len=64,
        vocab_size=ARGS.vocab_size,
        in_flight=2,
        enable_prefix_caching=enable_prefix_caching,
    )
    async with running(Router(scheduler, chain)) as router:
        while not router.is_ready:
            await asyncio.sleep(0)
        yield router


async def _generate(router: Router, num_prompt: int, num_tokens: int) -> None:
    request = Request.of(
        tuple(range(num_prompt)), SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    )
    async with aclosing(router.generate(request)) as batches:
        async for _ in batches:
            pass


def test_the_counts_of_a_router_are_reported_also_of_the_one_that_follows_it(
    chain: LocalStageChain,
) -> None:
    stand_ins = StandIns()
    metrics = PipelineMetrics(stand_ins, "app-0")

    async def drive() -> None:
        async with _running(chain) as first:
            await _generate(first, 20, 4)
            metrics.export(first)
            assert stand_ins.gauges["pipeline_running"].values == {"": 1.0}
            await _generate(first, 20, 4)  # the last of it is reported with the next router
        async with _running(chain) as second:
            metrics.export(second)
            await _generate(second, 20, 4)
            second.request_recovery(PipelineError("a stage has lost its sequences"))
            await _generate(second, 3, 2)
            metrics.export(second)
            metrics.export(second)

    asyncio.run(drive())
    reported = stand_ins.counted
    assert reported("scheduled_tokens") == {"prefill": 63.0, "decode": 10.0}
    assert reported("stage_tokens") == {"0": 73.0, "1": 73.0}
    assert reported("micro_batches") == {"": len(stand_ins.histograms["micro_batch_tokens"].values)}
    assert sum(stand_ins.histograms["micro_batch_tokens"].values) == 73
    assert reported("micro_batches") == {"": len(stand_ins.histograms["hop_seconds"].values)}, (
        "one hop between two stages"
    )
    assert reported("recoveries") == {"": 1.0}
    assert reported("recovery_pause_seconds")[""] > 0
    for stage in ("0", "1"):
        both = reported("stage_busy_seconds")[stage] + reported("stage_waiting_seconds")[stage]
        assert both == pytest.approx(reported("pipeline_active_seconds")[""], rel=0.05)
    (window,) = stand_ins.gauges["kv_cache_pages"].values
    assert stand_ins.gauges["kv_cache_pages"].values == {window: PLAN.cache.classes[0].num_pages}
    assert stand_ins.gauges["kv_cache_pages_in_use"].values == {window: 0.0}
    assert set(stand_ins.counters) | set(stand_ins.gauges) | set(stand_ins.histograms) == {
        m.name for m in PIPELINE_METRICS
    }


def test_drafts_are_counted_by_vllms_names(chain: LocalStageChain) -> None:
    """As often as sequences had any, and what there was and was right."""
    stand_ins = StandIns()
    metrics = PipelineMetrics(stand_ins, "app-0")

    async def drive() -> None:
        async with _running(chain) as router:
            metrics.export(router)
            assert not stand_ins.counted("spec_decode_num_drafts")
            router.scheduler.draft_counts.num_drafts = 3
            router.scheduler.draft_counts.num_draft_tokens = 12
            router.scheduler.draft_counts.num_accepted_tokens = 7
            metrics.export(router)

    asyncio.run(drive())
    counted = {
        name: stand_ins.counted(f"spec_decode_num_{name}")
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    }
    assert counted == {"drafts": {"": 3}, "draft_tokens": {"": 12}, "accepted_tokens": {"": 7}}


def test_what_is_cached_and_found_is_reported(chain: LocalStageChain) -> None:
    """Also of the router that follows; a prompt of 20 tokens has a page of 16 and four tokens, of
    which one is sampled from.
    """
    stand_ins, page_size = StandIns(), PLAN.cache.page_size
    metrics = PipelineMetrics(stand_ins, "app-0")
    counted, cached = (
        stand_ins.counted,
        lambda: sum(stand_ins.gauges["kv_cache_pages_cached"].values.values()),
    )

    async def drive() -> None:
        async with _running(chain, enable_prefix_caching=True) as first:
            metrics.export(first)
            assert cached() == 0
            await _generate(first, 20, 4)
            await _generate(first, 20, 4)
            metrics.export(first)
            assert cached() == 23 // page_size, "the last token is not in the cache"
            assert (counted("prefix_cache_queries"), counted("prefix_cache_hits")) == (
                {"": 40},
                {"": 19 // page_size * page_size},
            )
            [(window, in_use)] = stand_ins.gauges["kv_cache_pages_in_use"].values.items()
            assert (in_use, list(stand_ins.gauges["kv_cache_pages_cached"].values)) == (
                0.0,
                [window],
            ), "idle pages are not in use"
        async with _running(chain, enable_prefix_caching=True) as second:
            await _generate(second, 20, 4)
            metrics.export(second)
            assert (counted("prefix_cache_queries"), counted("prefix_cache_hits")) == (
                {"": 60},
                {"": 19 // page_size * page_size},
            )

    asyncio.run(drive())


def test_the_counts_of_an_ingress_are_reported_once() -> None:
    stand_ins, counts = StandIns(), RequestStats(lambda: 3.0)
    metrics = RequestMetrics(stand_ins, counts, "batch")
    samples = (counts.first_token_s, counts.inter_token_s, counts.whole_s, counts.queue_s)
    for number, buffer in enumerate(samples, 1):
        buffer.add(number / 2)
        buffer.add(float(number))
    counts.generation_tokens += 7
    counts.refused["full"] += 2
    counts.finished[FinishReason.STOP] += 3
    counts.prompt_tokens += 40
    metrics.export()
    metrics.export()
    counts.finished[FinishReason.ABORT] += 1
    metrics.export()
    assert {name: histogram.values for name, histogram in stand_ins.histograms.items()} == {
        "time_to_first_token_seconds": [0.5, 1.0],
        "inter_token_latency_seconds": [1.0, 2.0],
        "e2e_request_latency_seconds": [1.5, 3.0],
        "request_queue_time_seconds": [2.0, 4.0],
    }
    assert stand_ins.counted("requests_refused") == {"full": 2}
    assert stand_ins.counted("request_success") == {"stop": 3, "abort": 1}
    assert stand_ins.counted("prompt_tokens") == {"": 40}
    assert stand_ins.counted("generation_tokens") == {"": 7}
    assert set(stand_ins.counters) | set(stand_ins.histograms) == {
        metric.name for metric in REQUEST_METRICS
    }


def test_the_table_of_the_documentation_is_the_codes() -> None:
    page = (Path(__file__).parents[3] / "docs" / "observability.md").read_text(encoding="utf-8")
    table = page.split("<!-- metrics:")[1].split("<!-- end of metrics -->")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.splitlines()
        if line.startswith("| `ray_")
    ]
    reported = [
        [f"`{m.exported}`", m.unit, ", ".join(f"`{label}`" for label in m.labels), m.meaning]
        for m in METRICS
    ]
    assert [row[:4] for row in rows] == reported
    values = (
        {word for reason in FinishReason for word in [reason.value]}
        | set(REFUSALS.values())
        | set(REQUEST_KINDS)
    )
    assert all(f"`{value}`" in page for value in values), "what labels may say"
