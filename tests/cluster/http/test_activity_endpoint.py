"""``GET /activity``: what is requested of the routers, and what the API server reports."""

import asyncio
from collections.abc import Mapping

import httpx
import pytest
from activity_records import pipeline_activity
from http_fuzz import check_error
from pydantic import SecretStr
from scripted_token_source import ScriptedSource, client_for, http_app_for

from tramontane.cluster.config.api_keys import ApiKeys
from tramontane.cluster.http import status_endpoints
from tramontane.cluster.http.status_endpoints import ACTIVITY_OPERATIONS, ActivityEndpoint
from tramontane.router.engine.activity_log import Activity, PipelineActivity


def _answer(query: str, requested: list[Mapping[str, int]], key: str = "secret") -> httpx.Response:
    async def report(after: Mapping[str, int]) -> list[PipelineActivity]:
        requested.append(after)
        return [pipeline_activity()]

    async def scenario() -> httpx.Response:
        more = {
            "extra_routes": ActivityEndpoint(report).routes(),
            "extra_operations": ACTIVITY_OPERATIONS,
        }
        async with client_for(
            http_app_for(ScriptedSource(), keys=ApiKeys([SecretStr("secret")]), **more).app()
        ) as client:
            return await client.get("/activity" + query, headers={"authorization": f"Bearer {key}"})

    return asyncio.run(scenario())


def test_all_pipelines_are_reported() -> None:
    answer = _answer("", [])
    assert answer.status_code == 200
    assert Activity.model_validate_json(answer.content).pipelines[0].micro_batches[0].stages[1] == (
        1,
        1000.5,
        0.25,
        0.5,
    )


def test_a_response_has_every_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_endpoints, "steady_time", lambda: 1005.5)
    micro_batch = {"number": 1, "step": 0, "epoch": 5, "prefill_tokens": 8, "decodes": 0}
    second = {"number": 2, "step": 1, "epoch": 5, "prefill_tokens": 4, "decodes": 1}
    third = {"number": 3, "step": 2, "epoch": 5, "prefill_tokens": 0, "decodes": 2}
    pipeline = {
        "name": "app-1",
        "stages": [
            {"label": "Stage 1/2 layers 0-3", "stage": 0},
            {"label": "Stage 2/2 layers 4-7", "stage": 1},
        ],
        **{"running": 2, "waiting": 1, "pages_held": 3, "pages": 40, "pages_cached": 9},
        **{"prefix_cache_queries": 50, "prefix_cache_hits": 32, "epoch": 5, "recoveries": 1},
        **{"draft_tokens": 40, "accepted_tokens": 30},
        "busy": [0.375, 0.1875],
        "tokens_per_s": 1.25,
        **{"first_token_s": None, "inter_token_s": None},
        "micro_batches": [
            micro_batch | {"stages": [[0, 1000.0, 0.5, 0.5], [1, 1000.5, 0.25, 0.5]]},
            second | {"stages": [[0, 1001.0, 0.5, 0.5], [1, 1001.5, 0.25, 0.5]]},
            third | {"stages": [[0, 1002.0, 0.5, 0.5], [1, 1002.5, 0.25, 0.5]]},
        ],
        "last": 3,
    }
    answer = _answer("", [])
    assert answer.json() == {"now": 1005.5, "pipelines": [pipeline]}
    assert answer.headers["content-type"] == "application/json"


def test_what_follows_is_requested() -> None:
    requested: list[Mapping[str, int]] = []
    _answer("?after=app-1:7&after=a:b:0", requested)
    assert requested == [{"app-1": 7, "a:b": 0}]


@pytest.mark.parametrize(
    "query",
    ["?after=7", "?after=app:", "?after=app:-1", "?after=:1", "?after=a:1&after="],
)
def test_other_questions_are_refused(query: str) -> None:
    requested: list[Mapping[str, int]] = []
    answer = _answer(query, requested)
    assert answer.status_code == 400
    check_error(answer.content)
    assert not requested


def test_too_many_pipelines_are_refused() -> None:
    assert _answer("?" + "&".join(["after=a:1"] * 1001), []).status_code == 400


def test_it_is_behind_the_keys() -> None:
    requested: list[Mapping[str, int]] = []
    assert _answer("", requested, key="other").status_code == 401
    assert not requested
