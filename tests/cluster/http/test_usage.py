"""Cached tokens and drafts in the usage of every API, whole and streamed. Cached tokens are a part
of the prompt's; what became of drafts has a place in OpenAI's completions alone.
"""

import asyncio
import json
from functools import partial
from typing import Any

import httpx
import pytest
from scripted_token_source import ScriptedSource, client_for, http_app_for

NUM_CACHED = 5
CACHED = partial(ScriptedSource, num_cached=(NUM_CACHED,))
DRAFTING = partial(ScriptedSource, drafts=(3, 1))  # with each token, all and right ones
DRAFTED = "completion_tokens_details"
HELLO = [{"role": "user", "content": "Hello, who are you?"}]
COMPLETION = ("/v1/completions", {"prompt": "Hello, who are you?"})
CHAT = ("/v1/chat/completions", {"messages": HELLO})
RESPONSES = ("/v1/responses", {"input": "Hello, who are you?"})
MESSAGES = ("/v1/messages", {"messages": HELLO, "max_tokens": 9})
WITH_CHUNKS = {"stream_options": {"continuous_usage_stats": True}}
AT_THE_END = {"stream_options": {"include_usage": True}}

of_completions = pytest.mark.parametrize(
    ("path", "body"), [COMPLETION, CHAT], ids=["completions", "chat"]
)


def _post(source: ScriptedSource, path: str, body: dict[str, Any]) -> httpx.Response:
    async def scenario() -> httpx.Response:
        async with client_for(http_app_for(source).app()) as client:
            response = await client.post(path, json=body)
            assert response.status_code == 200, response.text
            return response

    return asyncio.run(scenario())


def _usage(source: ScriptedSource, path: str, body: dict[str, Any]) -> dict[str, Any]:
    usage: dict[str, Any] = _post(source, path, body).json()["usage"]
    return usage


def _events(source: ScriptedSource, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = _post(source, path, body | {"stream": True}).text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def _details(num_tokens: int) -> dict[str, int]:
    return {"accepted_prediction_tokens": num_tokens, "rejected_prediction_tokens": 2 * num_tokens}


# ---- cached tokens


@of_completions
def test_openais_completions_with_cached_tokens(path: str, body: dict[str, Any]) -> None:
    without, usage = _usage(ScriptedSource(), path, body), _usage(CACHED(), path, body)
    assert without["prompt_tokens_details"] == {"cached_tokens": 0}
    assert usage == without | {"prompt_tokens_details": {"cached_tokens": NUM_CACHED}}, (
        "other numbers are as without"
    )
    assert _events(CACHED(), path, body | AT_THE_END)[-1]["usage"] == usage


@of_completions
def test_every_chunk_with_tokens_has_them_where_all_have_a_usage(
    path: str, body: dict[str, Any]
) -> None:
    chunks = _events(CACHED(), path, body | WITH_CHUNKS)
    usages = [chunk["usage"] for chunk in chunks if chunk["choices"]]
    assert len(usages) > 2
    assert {
        usage["prompt_tokens_details"]["cached_tokens"]
        for usage in usages
        if usage["completion_tokens"]
    } == {NUM_CACHED}


def test_responses() -> None:
    without, usage = _usage(ScriptedSource(), *RESPONSES), _usage(CACHED(), *RESPONSES)
    assert without["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}
    assert usage == without | {
        "input_tokens_details": {"cached_tokens": NUM_CACHED, "cache_write_tokens": 0}
    }
    assert _events(CACHED(), *RESPONSES)[-1]["response"]["usage"] == usage


def test_messages_count_what_was_computed_and_what_was_cached_apart() -> None:
    without, usage = _usage(ScriptedSource(), *MESSAGES), _usage(CACHED(), *MESSAGES)
    assert (without["cache_read_input_tokens"], without["cache_creation_input_tokens"]) == (0, 0)
    apart = {
        "input_tokens": without["input_tokens"] - NUM_CACHED,
        "cache_read_input_tokens": NUM_CACHED,
    }
    assert usage == without | apart
    start = _events(CACHED(), *MESSAGES)[0]
    assert start["type"] == "message_start"
    assert {name: start["message"]["usage"][name] for name in apart} == apart


# ---- drafts


@pytest.mark.parametrize("n", [1, 3])
@of_completions
def test_openais_completions_with_drafts(path: str, body: dict[str, Any], n: int) -> None:
    body = body | {"n": n}
    without, usage = _usage(ScriptedSource(), path, body), _usage(DRAFTING(), path, body)
    assert DRAFTED not in without
    assert usage == without | {DRAFTED: _details(usage["completion_tokens"])}, (
        "other numbers are as without"
    )
    assert _events(DRAFTING(), path, body | AT_THE_END)[-1]["usage"] == usage
    assert _events(ScriptedSource(), path, body | AT_THE_END)[-1]["usage"] == without


@of_completions
def test_where_all_chunks_have_a_usage_it_has_those_so_far(path: str, body: dict[str, Any]) -> None:
    chunks = _events(DRAFTING(), path, body | WITH_CHUNKS)
    usages = [chunk["usage"] for chunk in chunks if chunk["choices"]]
    assert len(usages) > 2
    assert all(usage[DRAFTED] == _details(usage["completion_tokens"]) for usage in usages)


@pytest.mark.parametrize(("path", "body"), [RESPONSES, MESSAGES], ids=["responses", "messages"])
def test_other_apis_are_as_without_drafts(path: str, body: dict[str, Any]) -> None:
    assert _usage(DRAFTING(), path, body) == _usage(ScriptedSource(), path, body)
