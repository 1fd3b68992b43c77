"""Thoughts in answers to Mistral's clients: parts of the content, as Mistral's API has them."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest
from mistral_common.protocol.instruct.chunk import ThinkChunk
from scripted_token_source import ScriptedSource, client_for, http_app_for
from thinking_models import KINDS, Kind, ThinkingModel, thinking_model

THOUGHT, TEXT = "17 * 20 = 340, and 51.", "391"
MISTRALS = {"user-agent": "mistral-client-python/3.7.0"}
OPENAIS = {"user-agent": "OpenAI/Python 3.57.0"}
HTTPX_SSE = {
    "user-agent": "python-httpx/0.28.1",
    "accept": "text/event-stream",
    "cache-control": "no-store",
}
PARTS = [
    {"type": "thinking", "thinking": [{"type": "text", "text": THOUGHT}]},
    {"type": "text", "text": TEXT},
]
QUESTION = {"role": "user", "content": "17 * 23?"}


def _said(thinker: ThinkingModel, text: str) -> tuple[int, ...]:
    return thinker.say(
        f"{THOUGHT}</think>{text}" if thinker.is_open else f"<think>{THOUGHT}</think>{text}"
    )


def _posted(
    thinker: ThinkingModel,
    ids: tuple[int, ...],
    headers: Mapping[str, str],
    fields: Mapping[str, Any],
) -> tuple[str, list[tuple[int, ...]]]:
    """Return the response, and the prompts that the source has got."""
    source = ScriptedSource(ids)

    async def scenario() -> str:
        app = http_app_for(source, thinker.model, chat=thinker.chat).app()
        async with client_for(app) as client:
            body = {"messages": [QUESTION], "max_tokens": 100} | dict(fields)
            answer = await client.post("/v1/chat/completions", json=body, headers=dict(headers))
            assert answer.status_code == 200, answer.text
            return answer.text

    text = asyncio.run(scenario())
    return text, [
        sequence.prompt_ids for request in source.requests for sequence in request.sequences
    ]


def _deltas(text: str) -> list[dict[str, Any]]:
    *events, done = filter(None, text.split("\n\n"))
    assert done == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    return [choice["delta"] for chunk in chunks for choice in chunk["choices"]]


def _joined(deltas: list[dict[str, Any]]) -> tuple[str, str]:
    """Return thought and text as Mistral's clients join them."""
    thought = text = ""
    for delta in deltas:
        content = delta.get("content", "")
        for part in content if isinstance(content, list) else [{"type": "text", "text": content}]:
            if part["type"] == "thinking":
                ThinkChunk.model_validate(part | {"thinking": part["thinking"][0]["text"]})
                assert not text, "the thought comes first"
                thought += part["thinking"][0]["text"]
            else:
                text += part["text"]
    return thought, text


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_answer_has_the_thought_as_a_part_of_its_content(kind: Kind) -> None:
    thinker = thinking_model(kind)
    ids = _said(thinker, TEXT)
    [choice] = json.loads(_posted(thinker, ids, MISTRALS, {})[0])["choices"]
    assert choice["message"] == {"role": "assistant", "content": PARTS, "refusal": None}
    [choice] = json.loads(_posted(thinker, ids, OPENAIS, {})[0])["choices"]
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == (TEXT, THOUGHT)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_has_the_thought_in_parts_and_then_the_text(kind: Kind) -> None:
    thinker = thinking_model(kind)
    text, _ = _posted(thinker, _said(thinker, TEXT), MISTRALS, {"stream": True})
    deltas = _deltas(text)
    assert _joined(deltas) == (THOUGHT, TEXT)
    assert not any("reasoning" in delta or "reasoning_content" in delta for delta in deltas)


@pytest.mark.parametrize(
    ("headers", "fields", "has_parts"),
    [
        (MISTRALS, {}, True),
        (OPENAIS, {"random_seed": 3}, True),
        (OPENAIS, {}, False),
        # which may be any client; langchain-mistralai loses the thought, and others read a text
        (HTTPX_SSE, {}, False),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_other_clients_get_a_text(
    headers: Mapping[str, str], fields: Mapping[str, Any], has_parts: bool, stream: bool
) -> None:
    thinker = thinking_model("tekken")
    fields = {**fields, "stream": stream}
    text, _ = _posted(thinker, _said(thinker, TEXT), headers, fields)
    made = _deltas(text) if stream else [json.loads(text)["choices"][0]["message"]]
    assert any(isinstance(each.get("content"), list) for each in made) == has_parts
    assert any(bool(each.get("reasoning")) for each in made) != has_parts


def test_an_answer_without_a_thought_is_a_text() -> None:
    thinker = thinking_model("tekken")
    ids = thinker.say(TEXT)
    [choice] = json.loads(_posted(thinker, ids, MISTRALS, {})[0])["choices"]
    assert choice["message"]["content"] == TEXT
    assert not any(
        isinstance(delta.get("content"), list)
        for delta in _deltas(_posted(thinker, ids, MISTRALS, {"stream": True})[0])
    )


@pytest.mark.parametrize("kind", ["tekken", "added", "text", "opened"])
def test_the_answer_is_the_same_history_in_both_forms(kind: Kind) -> None:
    thinker = thinking_model(kind)
    as_parts = {"role": "assistant", "content": PARTS}
    as_fields = {"role": "assistant", "content": TEXT, "reasoning_content": THOUGHT}
    ids = thinker.say("</think>Yes." if thinker.is_open else "Yes.")
    prompts = [
        _posted(thinker, ids, headers, {"messages": [QUESTION, answer, QUESTION]})[1]
        for headers, answer in ((MISTRALS, as_parts), (OPENAIS, as_fields))
    ]
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize(
    "parts",
    [
        [{"type": "redacted_thinking", "data": "EuYB"}, {"type": "text", "text": TEXT}],
        [{"type": "redacted_thinking", "data": "EuYB"}, *PARTS],
    ],
)
def test_a_thought_that_another_server_has_encrypted_is_left_out(parts: list[Any]) -> None:
    thinker = thinking_model("tekken")
    prompts = [
        _posted(thinker, thinker.say("Yes."), OPENAIS, {"messages": [QUESTION, answer, QUESTION]})[
            1
        ]
        for answer in (
            {"role": "assistant", "content": parts},
            {"role": "assistant", "content": parts[1:]},
        )
    ]
    assert prompts[0] == prompts[1]
