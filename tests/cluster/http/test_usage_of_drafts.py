"""What became of drafts in the usage of OpenAI's completions, whole and streamed; other APIs have
no place for it.
"""

import asyncio
import json
from typing import Any

import httpx
import pytest
from scripted_token_source import ScriptedSource, client_for, http_app_for

HELLO = [{"role": "user", "content": "Hello, who are you?"}]
COMPLETION = ("/v1/completions", {"prompt": "Hello, who are you?"})
CHAT = ("/v1/chat/completions", {"messages": HELLO})
RESPONSES = ("/v1/responses", {"input": "Hello, who are you?"})
MESSAGES = ("/v1/messages", {"messages": HELLO, "max_tokens": 9})
DRAFTS = (3, 1)  # with each token, all and right ones
DETAILS = "completion_tokens_details"


def _post(path: str, body: dict[str, Any], drafts: tuple[int, int] | None) -> httpx.Response:
    async def scenario() -> httpx.Response:
        source = ScriptedSource()
        source.drafts = drafts
        async with client_for(http_app_for(source).app()) as client:
            response = await client.post(path, json=body)
            assert response.status_code == 200, response.text
            return response

    return asyncio.run(scenario())


def _usage(
    path: str, body: dict[str, Any], drafts: tuple[int, int] | None = DRAFTS
) -> dict[str, Any]:
    usage: dict[str, Any] = _post(path, body, drafts).json()["usage"]
    return usage


def _events(
    path: str, body: dict[str, Any], drafts: tuple[int, int] | None = DRAFTS
) -> list[dict[str, Any]]:
    lines = _post(path, body | {"stream": True}, drafts).text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def _details(num_tokens: int) -> dict[str, int]:
    return {"accepted_prediction_tokens": num_tokens, "rejected_prediction_tokens": 2 * num_tokens}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("path", "body"), [COMPLETION, CHAT], ids=["completions", "chat"])
def test_openais_completions(path: str, body: dict[str, Any], n: int) -> None:
    body = body | {"n": n}
    without, usage = _usage(path, body, None), _usage(path, body)
    assert DETAILS not in without
    assert usage == without | {DETAILS: _details(usage["completion_tokens"])}, (
        "other numbers are as without"
    )
    streamed = body | {"stream_options": {"include_usage": True}}
    assert _events(path, streamed)[-1]["usage"] == usage
    assert _events(path, streamed, None)[-1]["usage"] == without


@pytest.mark.parametrize(("path", "body"), [COMPLETION, CHAT], ids=["completions", "chat"])
def test_where_all_chunks_have_a_usage_it_has_those_so_far(path: str, body: dict[str, Any]) -> None:
    chunks = _events(path, body | {"stream_options": {"continuous_usage_stats": True}})
    usages = [chunk["usage"] for chunk in chunks if chunk["choices"]]
    assert len(usages) > 2
    assert all(usage[DETAILS] == _details(usage["completion_tokens"]) for usage in usages)


@pytest.mark.parametrize(("path", "body"), [RESPONSES, MESSAGES], ids=["responses", "messages"])
def test_other_apis_are_as_without(path: str, body: dict[str, Any]) -> None:
    assert _usage(path, body) == _usage(path, body, None)
