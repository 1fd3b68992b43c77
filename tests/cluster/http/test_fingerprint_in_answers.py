"""Answers, chunks and headers name the pipeline that has made the tokens."""

import json
from typing import Any

import pytest
from event_loops import in_event_loop
from failing_ingress import FailingIngresses, post_json, relay_to, resumable_source
from scripted_token_source import (
    CHAT,
    MODEL,
    SAID,
    TOKENIZER,
    ScriptedSource,
    client_for,
    http_app_for,
)
from starlette.types import Receive, Scope, Send

from tramontane.cluster.http import failover
from tramontane.cluster.http.failover import NodeAnnouncer
from tramontane.proto.errors import PipelineError
from tramontane.proto.ports import TokenSource

HEADER = "x-tramontane-fingerprint"
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
TOKENS = TOKENIZER.encode(SAID)[1:]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": (COMPLETIONS, {"prompt": "What news?", "max_tokens": 6}),
    "choices": (COMPLETIONS, {"prompt": ["What news?", "Who?"], "n": 2, "max_tokens": 6}),
    "echo": (COMPLETIONS, {"prompt": "What news?", "echo": True, "max_tokens": 6, "logprobs": 1}),
    "score": (COMPLETIONS, {"prompt": "What news?", "echo": True, "max_tokens": 0}),
    "chat": (
        CHATS,
        {"messages": [{"role": "user", "content": "What news?"}], "max_tokens": 6, "n": 2},
    ),
}


def _chunks(text: str) -> list[dict[str, Any]]:
    return [
        json.loads(event.removeprefix("data: "))
        for event in text.split("\n\n")
        if event and "[DONE]" not in event
    ]


async def _post(source: TokenSource, case: str, **more: object) -> tuple[str | None, str]:
    """Return the header and the body of an answer."""
    path, body = BODIES[case]
    async with client_for(http_app_for(source).app()) as client:
        answer = await client.post(path, json=body | more)
        assert answer.status_code == 200, answer.text
        return answer.headers.get(HEADER), answer.text


@pytest.mark.parametrize("case", BODIES)
@in_event_loop
async def test_a_whole_answer_has_the_last_one(case: str) -> None:
    for named, expected in (
        (("fp_a",), "fp_a"),
        (("fp_a", "", "fp_b"), "fp_a" if case == "score" else "fp_b"),
    ):
        header, text = await _post(ScriptedSource(fingerprints=named), case)
        assert header == json.loads(text)["system_fingerprint"] == expected


@pytest.mark.parametrize("case", BODIES)
@in_event_loop
async def test_each_chunk_has_that_of_its_tokens_and_the_header_that_of_the_first(
    case: str,
) -> None:
    header, text = await _post(ScriptedSource(fingerprints=("fp_a", "", "fp_b")), case, **USAGE)
    seen = [chunk["system_fingerprint"] for chunk in _chunks(text)]
    assert header == seen[0] == "fp_a"
    assert seen == sorted(seen)
    assert seen[-1] == ("fp_a" if case == "score" else "fp_b"), "the one with the usage"
    assert seen.count("fp_a") == (2 if case == "score" else 3 if case == "chat" else 2), (
        "a chat begins with the role"
    )


@pytest.mark.parametrize("case", BODIES)
@in_event_loop
async def test_a_pipeline_that_is_not_known_is_null_and_has_no_header(case: str) -> None:
    header, text = await _post(ScriptedSource(), case)
    assert header is None
    assert json.loads(text)["system_fingerprint"] is None
    header, text = await _post(ScriptedSource(), case, **USAGE)
    assert header is None
    assert {chunk["system_fingerprint"] for chunk in _chunks(text)} == {None}


@in_event_loop
async def test_errors_have_none() -> None:
    gone = PipelineError("the pipeline is gone")
    failing = ScriptedSource(failure=gone, fails_at=2, fingerprints=("fp_a",))
    async with client_for(http_app_for(failing).app()) as client:
        for body in ({"prompt": ""}, BODIES["completion"][1]):
            answer = await client.post(COMPLETIONS, json=body)
            assert answer.status_code >= 400
            assert HEADER not in answer.headers
            assert answer.json().keys() == {"error", "message"}


@in_event_loop
async def test_the_description_has_the_field() -> None:
    async with client_for(http_app_for(ScriptedSource()).app()) as client:
        schemas = (await client.get("/openapi.json")).json()["components"]["schemas"]
    for name in ("CompletionAnswer", "ChatAnswer"):
        assert "system_fingerprint" in schemas[name]["required"]
        assert schemas[name]["properties"]["system_fingerprint"]["anyOf"] == [
            {"type": "string"},
            {"type": "null"},
        ]


# ---- where another ingress continues, at whose router another pipeline is


@pytest.mark.parametrize("case", ["completion", "chat"])
@pytest.mark.parametrize("stream", [True, False])
@in_event_loop
async def test_what_another_pipeline_continues_has_its_fingerprint(
    case: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failover, "ATTEMPT_PAUSES_S", (0.0,))
    monkeypatch.setattr(failover, "PROGRESS_INTERVAL_S", 0.0)

    apps = [
        NodeAnnouncer(http_app_for(source, MODEL, chat=CHAT).app(), "node", "a model")
        for name in ("fp_a", "fp_b")
        for source in [resumable_source(TOKENS, fingerprints=(name,))]
    ]

    async def one_after_the_other(scope: Scope, receive: Receive, send: Send) -> None:
        await apps[ingresses.num_calls > 1](scope, receive, send)

    ingresses = FailingIngresses(one_after_the_other, (3,))
    path, body = BODIES[case]
    answer = await post_json(relay_to(ingresses), path, body | {"stream": stream})
    assert ingresses.num_calls == 2
    header = dict(answer.messages[0]["headers"])[HEADER.encode()].decode()
    if not stream:
        assert header == json.loads(answer.text)["system_fingerprint"] == "fp_b"
        return
    seen = [chunk["system_fingerprint"] for chunk in _chunks(answer.text)]
    assert header == seen[0] == "fp_a"
    assert seen == sorted(seen)
    assert seen[-1] == "fp_b"
