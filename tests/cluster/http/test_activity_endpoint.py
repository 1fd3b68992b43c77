"""``GET /activity``: what is requested of the routers, and what the API server reports."""

import asyncio
from collections.abc import Mapping
from typing import Any

import httpx
import pytest
from http_fuzz import check_error
from past_activity import pipeline_data
from pydantic import SecretStr
from scripted_token_source import ScriptedSource, client_for, http_app_for

from tramontane.cluster.config.api_keys import ApiKeys
from tramontane.cluster.http.activity_endpoint import ACTIVITY_OPERATIONS, ActivityEndpoint
from tramontane.router.engine.activity_log import Activity


def _answer(query: str, requested: list[Mapping[str, int]], key: str = "secret") -> httpx.Response:
    async def report(after: Mapping[str, int]) -> list[dict[str, Any]]:
        requested.append(after)
        return [pipeline_data()]

    async def scenario() -> httpx.Response:
        more = {"extra_routes": ActivityEndpoint(report).routes(), "extra_operations": ACTIVITY_OPERATIONS}
        async with client_for(http_app_for(ScriptedSource(), keys=ApiKeys([SecretStr("secret")]), **more).app()) as client:
            return await client.get("/activity" + query, headers={"authorization": f"Bearer {key}"})

    return asyncio.run(scenario())


def test_all_pipelines_are_reported() -> None:
    answer = _answer("", [])
    assert answer.status_code == 200
    assert Activity.model_validate_json(answer.content).pipelines[0].micro_batches[0].stages[1] == (1, 1000.5, 0.25, 0.5)


def test_what_follows_is_requested() -> None:
    requested: list[Mapping[str, int]] = []
    _answer("?after=app-1:7&after=a:b:0", requested)
    assert requested == [{"app-1": 7, "a:b": 0}]


@pytest.mark.parametrize("query", ["?after=7", "?after=app:", "?after=app:-1", "?after=:1", "?after=a:1&after=", "?since=1"])
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
