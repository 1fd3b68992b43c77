"""``GET /metrics`` and ``GET /load``: gauges by which gateways route, and requests by vLLM's names,
as Prometheus' own parser reads them.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from activity_records import pipeline_activity
from event_loops import in_event_loop
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr
from scripted_token_source import ScriptedSource, client_for, http_app_for

from tramontane.cluster.config.api_keys import ApiKeys
from tramontane.cluster.http import metrics_endpoint
from tramontane.cluster.http.metrics_endpoint import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    METRICS_OPERATIONS,
    MetricsEndpoint,
    render,
)
from tramontane.cluster.http.request_middleware import PUBLIC_PATHS
from tramontane.proto.request import FinishReason, RequestOutput, RequestTimings, TokenEvent
from tramontane.router.engine.activity_log import PipelineActivity
from tramontane.router.engine.stats import MAX_SAMPLES
from tramontane.router.openai.detokenizer import ChoiceDetokenizer
from tramontane.router.openai.request_context import RequestStats


def _pipeline(name: str, **changes: Any) -> PipelineActivity:
    return pipeline_activity().model_copy(update={"name": name, **changes})


TWO = [
    _pipeline("a", running=2, waiting=1, pages_held=3, pages=40, last=7),
    _pipeline("b", running=5, waiting=0, pages_held=27, pages=60, last=9),
]


def _families(text: str) -> dict[str, Metric]:
    """The families by their names, of which the parser takes ``_total``, after a check of what the
    tables say.
    """
    families = list(text_string_to_metric_families(text))
    tables = {"gauge": GAUGES, "counter": COUNTERS, "histogram": HISTOGRAMS}
    assert [(family.name, family.type, family.documentation) for family in families] == [
        (name.removesuffix("_total"), kind, meaning)
        for kind, table in tables.items()
        for name, meaning in table.items()
    ]
    return {family.name: family for family in families}


def _gauges(text: str) -> dict[str, tuple[dict[str, str], float]]:
    families = _families(text)
    [samples] = zip(*(families[name].samples for name in GAUGES), strict=True)
    return {sample.name: (sample.labels, sample.value) for sample in samples}


@pytest.mark.parametrize("model", ["tiny", 'a "b"\\c\nd'])
def test_gauges_are_those_of_all_pipelines(model: str) -> None:
    label = {"model_name": model}
    assert _gauges(render(TWO, model, RequestStats())) == {
        "tramontane_num_requests_running": (label, 7),
        "tramontane_num_requests_waiting": (label, 1),
        "tramontane_kv_cache_usage_perc": (label, 0.3),
        "vllm:num_requests_running": (label, 7),
        "vllm:num_requests_waiting": (label, 1),
        "vllm:kv_cache_usage_perc": (label, 0.3),
        "vllm:gpu_cache_usage_perc": (label, 0.3),
    }


def test_a_server_without_a_pipeline_is_the_last_that_a_gateway_chooses() -> None:
    values = [value for _, value in _gauges(render([], "tiny", RequestStats())).values()]
    assert values == [0, 0, 1, 0, 0, 1, 1]


class Clock:
    """Stands still until it is moved."""

    now = 10.0

    def __call__(self) -> float:
        return self.now


def _finished(num_tokens: int, reason: FinishReason) -> ChoiceDetokenizer:
    choice = ChoiceDetokenizer(None, ())
    for number in range(num_tokens):
        choice.push(TokenEvent(0, 7, reason if number == num_tokens - 1 else None))
    return choice


def _one_request(counts: RequestStats, clock: Clock) -> None:
    """A request of 30 tokens with two choices: it waits 0.4 s, and has tokens after 0.5 s, 0.52 s
    and 90.52 s.
    """
    choices = [_finished(2, FinishReason.STOP), _finished(1, FinishReason.LENGTH)]
    with counts.track(clock.now, 30, choices, has_begun=False) as recorder:
        for seconds in (0.5, 0.02, 90.0):
            clock.now += seconds
            events = (TokenEvent(0, 7, None),)
            recorder.observe(RequestOutput(events, RequestTimings(0.4, 0.0, 0.0)))


def test_requests_have_vllms_names() -> None:
    clock = Clock()
    counts = RequestStats(clock)
    _one_request(counts, clock)
    families = _families(render(TWO, "tiny", counts))
    values = {
        (sample.name, *(v for k, v in sample.labels.items() if k != "model_name")): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert values["vllm:prompt_tokens_total",] == 30
    assert values["vllm:generation_tokens_total",] == 3
    reasons = {reason.value: 0 for reason in FinishReason} | {"stop": 1, "length": 1}
    for reason, number in reasons.items():
        assert values["vllm:request_success_total", reason] == number
    for name, number, total in (
        ("time_to_first_token_seconds", 1, 0.5),
        ("inter_token_latency_seconds", 2, 90.02),
        ("e2e_request_latency_seconds", 1, 90.52),
        ("request_queue_time_seconds", 1, 0.4),
        ("request_prompt_tokens", 1, 30),
        ("request_generation_tokens", 1, 3),
    ):
        assert values[f"vllm:{name}_count",] == number
        assert values[f"vllm:{name}_sum",] == pytest.approx(total)
        assert values[f"vllm:{name}_bucket", "+Inf"] == number
    first = [
        values["vllm:time_to_first_token_seconds_bucket", le] for le in ("0.25", "0.5", "0.75")
    ]
    assert first == [0, 1, 1], "a value that equals a bound is below it"
    later = [
        values["vllm:inter_token_latency_seconds_bucket", le] for le in ("0.01", "0.025", "80.0")
    ]
    assert later == [0, 1, 1], "and 90 s is above all bounds"


def test_a_large_count_keeps_its_last_digit() -> None:
    counts = RequestStats()
    counts.generation_tokens = 123_456_789
    assert 'vllm:generation_tokens_total{model_name="tiny"} 123456789\n' in render(
        TWO, "tiny", counts
    )


def test_histograms_have_all_values_where_samples_are_dropped() -> None:
    clock = Clock()
    counts = RequestStats(clock)
    for _ in range(2 * MAX_SAMPLES):
        _one_request(counts, clock)
    assert sum(counts.first_token.counts) == 2 * MAX_SAMPLES
    assert len(counts.first_token_s.take()) == MAX_SAMPLES


def test_a_request_that_did_not_end_is_in_no_histogram_of_those_that_did() -> None:
    counts = RequestStats()
    with (
        pytest.raises(asyncio.CancelledError),
        counts.track(0.0, 30, [ChoiceDetokenizer(None, ())], has_begun=False),
    ):
        raise asyncio.CancelledError
    for histogram in (counts.whole, counts.request_prompt_tokens):
        assert sum(histogram.counts) == 0


@in_event_loop
async def test_the_load_is_what_runs_or_waits_in_all_pipelines() -> None:
    async def report(_after: Mapping[str, int]) -> list[PipelineActivity]:
        return TWO

    routes = MetricsEndpoint(report, "tiny", RequestStats()).routes()
    async with client_for(http_app_for(ScriptedSource(), extra_routes=routes).app()) as client:
        assert (await client.get("/load")).json() == {"server_load": 8}


def test_it_answers_without_a_key_where_its_path_is_public() -> None:
    async def report(_after: Mapping[str, int]) -> list[PipelineActivity]:
        return TWO

    async def statuses() -> dict[str, int]:
        keys = {"keys": ApiKeys([SecretStr("secret")]), "public_paths": PUBLIC_PATHS | {"/metrics"}}
        app = http_app_for(
            ScriptedSource(),
            extra_routes=MetricsEndpoint(report, "tiny", RequestStats()).routes(),
            **keys,
        ).app()
        async with client_for(app) as client:
            return {
                path: (await client.get(path)).status_code
                for path in ("/metrics", "/health", "/v1/models", "/metrics/", "/load")
            }

    assert asyncio.run(statuses()) == {
        "/metrics": 200,
        "/health": 200,
        "/v1/models": 401,
        "/metrics/": 401,
        "/load": 401,
    }


@in_event_loop
async def test_it_needs_a_key_and_asks_for_what_is_new_and_not_too_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Mapping[str, int]] = []

    async def report(after: Mapping[str, int]) -> list[PipelineActivity]:
        asked.append(after)
        await asyncio.sleep(0)
        return TWO

    more = {
        "extra_routes": MetricsEndpoint(report, "tiny", RequestStats()).routes(),
        "extra_operations": METRICS_OPERATIONS,
    }
    async with client_for(
        http_app_for(ScriptedSource(), keys=ApiKeys([SecretStr("secret")]), **more).app()
    ) as client:
        assert (await client.get("/metrics")).status_code == 401
        client.headers["authorization"] = "Bearer secret"
        answers = await asyncio.gather(*(client.get("/metrics") for _ in range(5)))
        assert {answer.text for answer in answers} == {render(TWO, "tiny", RequestStats())}
        assert answers[0].headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert asked == [{}], "five clients are answered by one question"
        monkeypatch.setattr(metrics_endpoint, "MAX_AGE_S", 0.0)
        await client.get("/metrics")
        assert asked == [{}, {"a": 7, "b": 9}]
