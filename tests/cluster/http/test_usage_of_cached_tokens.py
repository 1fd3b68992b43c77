"""Cached tokens in the usage of every API, whole and streamed: of the prompt, which they are a part
of.
"""

import asyncio
import json
from typing import Any

import httpx
import pytest
from scripted_token_source import ScriptedSource, client_for, http_app_for

NUM_CACHED = 5
HELLO = [{"role": "user", "content": "Hello, who are you?"}]
COMPLETION = ("/v1/completions", {"prompt": "Hello, who are you?"})
CHAT = ("/v1/chat/completions", {"messages": HELLO})
RESPONSES = ("/v1/responses", {"input": "Hello, who are you?"})
MESSAGES = ("/v1/messages", {"messages": HELLO, "max_tokens": 9})


def _post(path: str, body: dict[str, Any], num_cached: int = NUM_CACHED) -> httpx.Response:
    async def scenario() -> httpx.Response:
        source = ScriptedSource()
        source.num_cached = num_cached
        async with client_for(http_app_for(source).app()) as client:
            response = await client.post(path, json=body)
            assert response.status_code == 200, response.text
            return response

    return asyncio.run(scenario())


def _usage(path: str, body: dict[str, Any], num_cached: int = NUM_CACHED) -> dict[str, Any]:
    usage: dict[str, Any] = _post(path, body, num_cached).json()["usage"]
    return usage


def _events(path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = _post(path, body | {"stream": True}).text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize(("path", "body"), [COMPLETION, CHAT], ids=["completions", "chat"])
def test_openais_completions(path: str, body: dict[str, Any]) -> None:
    without, usage = _usage(path, body, 0), _usage(path, body)
    assert without["prompt_tokens_details"] == {"cached_tokens": 0}
    assert usage == without | {"prompt_tokens_details": {"cached_tokens": NUM_CACHED}}, (
        "other numbers are as without"
    )
    assert _events(path, body | {"stream_options": {"include_usage": True}})[-1]["usage"] == usage


@pytest.mark.parametrize(("path", "body"), [COMPLETION, CHAT], ids=["completions", "chat"])
def test_every_chunk_with_tokens_has_them_where_all_have_a_usage(
    path: str, body: dict[str, Any]
) -> None:
    chunks = _events(path, body | {"stream_options": {"continuous_usage_stats": True}})
    usages = [chunk["usage"] for chunk in chunks if chunk["choices"]]
    assert len(usages) > 2
    assert {
        usage["prompt_tokens_details"]["cached_tokens"]
        for usage in usages
        if usage["completion_tokens"]
    } == {NUM_CACHED}


def test_responses() -> None:
    without, usage = _usage(*RESPONSES, 0), _usage(*RESPONSES)
    assert without["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}
    assert usage == without | {
        "input_tokens_details": {"cached_tokens": NUM_CACHED, "cache_write_tokens": 0}
    }
    assert _events(*RESPONSES)[-1]["response"]["usage"] == usage


def test_messages_count_what_was_computed_and_what_was_cached_apart() -> None:
    without, usage = _usage(*MESSAGES, 0), _usage(*MESSAGES)
    assert (without["cache_read_input_tokens"], without["cache_creation_input_tokens"]) == (0, 0)
    apart = {
        "input_tokens": without["input_tokens"] - NUM_CACHED,
        "cache_read_input_tokens": NUM_CACHED,
    }
    assert usage == without | apart
    start = _events(*MESSAGES)[0]
    assert start["type"] == "message_start"
    assert {name: start["message"]["usage"][name] for name in apart} == apart
