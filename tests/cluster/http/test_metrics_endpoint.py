"""``GET /metrics``: the gauges by which gateways route, as Prometheus' own parser reads them."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from activity_records import pipeline_activity
from event_loops import in_event_loop
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr
from scripted_token_source import ScriptedSource, client_for, http_app_for

from tramontane.cluster.config.api_keys import ApiKeys
from tramontane.cluster.http import status_endpoints
from tramontane.cluster.http.request_middleware import PUBLIC_PATHS
from tramontane.cluster.http.status_endpoints import (
    GAUGES,
    METRICS_OPERATIONS,
    MetricsEndpoint,
    render,
)
from tramontane.router.engine.activity_log import PipelineActivity


def _pipeline(name: str, **changes: Any) -> PipelineActivity:
    return pipeline_activity().model_copy(update={"name": name, **changes})


TWO = [
    _pipeline("a", running=2, waiting=1, pages_held=3, pages=40, last=7),
    _pipeline("b", running=5, waiting=0, pages_held=27, pages=60, last=9),
]


def _parsed(text: str) -> dict[str, tuple[dict[str, str], float]]:
    families = list(text_string_to_metric_families(text))
    assert [family.name for family in families] == [*GAUGES]
    assert {family.type for family in families} == {"gauge"}
    assert [family.documentation for family in families] == [*GAUGES.values()]
    [samples] = zip(*(family.samples for family in families), strict=True)
    return {sample.name: (sample.labels, sample.value) for sample in samples}


@pytest.mark.parametrize("model", ["tiny", 'a "b"\\c\nd'])
def test_gauges_are_those_of_all_pipelines(model: str) -> None:
    label = {"model_name": model}
    assert _parsed(render(TWO, model)) == {
        "tramontane_num_requests_running": (label, 7),
        "tramontane_num_requests_waiting": (label, 1),
        "tramontane_kv_cache_usage_perc": (label, 0.3),
    }


def test_a_server_without_a_pipeline_is_the_last_that_a_gateway_chooses() -> None:
    assert [value for _, value in _parsed(render([], "tiny")).values()] == [0, 0, 1]


def test_it_answers_without_a_key_where_its_path_is_public() -> None:
    async def report(_after: Mapping[str, int]) -> list[PipelineActivity]:
        return TWO

    async def statuses() -> dict[str, int]:
        keys = {"keys": ApiKeys([SecretStr("secret")]), "public_paths": PUBLIC_PATHS | {"/metrics"}}
        app = http_app_for(
            ScriptedSource(), extra_routes=MetricsEndpoint(report, "tiny").routes(), **keys
        ).app()
        async with client_for(app) as client:
            return {
                path: (await client.get(path)).status_code
                for path in ("/metrics", "/health", "/v1/models", "/metrics/")
            }

    assert asyncio.run(statuses()) == {
        "/metrics": 200,
        "/health": 200,
        "/v1/models": 401,
        "/metrics/": 401,
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
        "extra_routes": MetricsEndpoint(report, "tiny").routes(),
        "extra_operations": METRICS_OPERATIONS,
    }
    async with client_for(
        http_app_for(ScriptedSource(), keys=ApiKeys([SecretStr("secret")]), **more).app()
    ) as client:
        assert (await client.get("/metrics")).status_code == 401
        client.headers["authorization"] = "Bearer secret"
        answers = await asyncio.gather(*(client.get("/metrics") for _ in range(5)))
        assert {answer.text for answer in answers} == {render(TWO, "tiny")}
        assert answers[0].headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert asked == [{}], "five clients are answered by one question"
        monkeypatch.setattr(status_endpoints, "MAX_AGE_S", 0.0)
        await client.get("/metrics")
        assert asked == [{}, {"a": 7, "b": 9}]
