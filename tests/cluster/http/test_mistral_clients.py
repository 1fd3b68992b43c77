"""What Mistral's clients need of streams: tool calls whole, in one chunk, and the usage in the last
chunk.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest
from scripted_token_source import SAID, ScriptedSource, client_for, http_app_for
from tokenizer_files import SENTENCEPIECE

from tramontane.proto.request import FinishReason, TokenEvent
from tramontane.router.openai.detokenizer import ChatDetokenizer
from tramontane.router.openai.resume_state import ChoiceState
from tramontane.router.openai.served_model import ServedModel
from tramontane.router.tokenization.backends import SentencePieceTokenizer
from tramontane.router.tokenization.mistral_chat import MistralChatTemplate
from tramontane.router.tokenization.tool_parser import CallDelta, ToolCallParser, call_ids

TOKENIZER = SentencePieceTokenizer(SENTENCEPIECE["v3"])
MODEL = ServedModel("demo", TOKENIZER, 512, 16, TOKENIZER.vocab_size)
FORMAT = MistralChatTemplate.from_sentencepiece(SENTENCEPIECE["v3"])
CALLS = 5  # [TOOL_CALLS]
ARLES, NOTHING = '{"town": "Arles", "of": {"deep": "}"}}', "{}"
CALLED = f'[{{"name": "w", "arguments": {ARLES}}}, {{"name": "x", "arguments": {NOTHING}}}]'
IDS = (*TOKENIZER.encode("Well")[1:], CALLS, *TOKENIZER.encode(CALLED)[1:])
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in "wx"
]
BODY = {"messages": [{"role": "user", "content": "Hello!"}], "tools": TOOLS, "stream": True}
MISTRALS = {"user-agent": "mistral-client-python/3.7.0"}
# as httpx-sse sends them, by which langchain-mistralai reads streams
HTTPX_SSE = {
    "user-agent": "python-httpx/0.28.1",
    "accept": "text/event-stream",
    "cache-control": "no-store",
}
OPENAIS = {"user-agent": "OpenAI/Python 3.57.0"}
WHOLE, PIECES = {"stream_tool_calls": False}, {"stream_tool_calls": True}
NO_FIELDS: Mapping[str, Any] = MappingProxyType({})


def _chunks(
    headers: Mapping[str, str], fields: Mapping[str, Any], ids: Sequence[int] = IDS
) -> list[dict[str, Any]]:
    async def scenario() -> str:
        app = http_app_for(ScriptedSource(ids), MODEL, chat=FORMAT).app()
        async with client_for(app) as client:
            body = BODY | dict(fields)
            answer = await client.post("/v1/chat/completions", json=body, headers=dict(headers))
            assert answer.status_code == 200, answer.text
            return answer.text

    *events, done = filter(None, asyncio.run(scenario()).split("\n\n"))
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def _deltas(chunks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        call
        for chunk in chunks
        for choice in chunk["choices"]
        for call in choice["delta"].get("tool_calls", ())
    ]


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        (MISTRALS, {}),
        ({"user-agent": "Mistral-Vibe/3.0.2"}, {}),
        (HTTPX_SSE, {}),
        (OPENAIS, {"stream_options": WHOLE}),
        (OPENAIS, {"safe_prompt": False}),
        (OPENAIS, {"random_seed": 1}),
    ],
)
def test_a_call_reaches_mistrals_clients_whole(
    headers: Mapping[str, str], fields: Mapping[str, Any]
) -> None:
    first, second = _deltas(_chunks(headers, fields))
    assert [first["index"], second["index"]] == [0, 1]
    assert [call["function"]["name"] for call in (first, second)] == ["w", "x"]
    assert [call["function"]["arguments"] for call in (first, second)] == [ARLES, NOTHING]
    assert len({call["id"] for call in (first, second)}) == 2


def test_a_call_does_not_wait_for_the_next_one() -> None:
    chunks = _chunks(MISTRALS, NO_FIELDS)
    [first, second] = [at for at, chunk in enumerate(chunks) if _deltas([chunk])]
    num_tokens = len(TOKENIZER.encode(', {"name": "x", "arguments": ')[1:])
    assert second - first >= num_tokens


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        (OPENAIS, {}),
        (MISTRALS, {"stream_options": PIECES}),
        ({**HTTPX_SSE, "accept": "*/*"}, {}),
        (OPENAIS, {"stream_options": PIECES}),
        (OPENAIS, {"random_seed": None, "safe_prompt": None}),
    ],
)
def test_a_call_reaches_other_clients_in_pieces(
    headers: Mapping[str, str], fields: Mapping[str, Any]
) -> None:
    deltas = _deltas(_chunks(headers, fields))
    assert len(deltas) > 5
    for index, arguments in enumerate((ARLES, NOTHING)):
        own = [delta for delta in deltas if delta["index"] == index]
        assert "".join(delta["function"]["arguments"] for delta in own) == arguments


def test_a_call_that_is_cut_off_is_sent_as_far_as_it_goes() -> None:
    last = _chunks(MISTRALS, {"max_tokens": len(IDS) - 25})[-1]
    [call] = _deltas([last])
    assert ARLES.startswith(call["function"]["arguments"])
    assert len(call["function"]["arguments"]) > 5
    assert last["choices"][0]["finish_reason"] == "length"


def test_the_last_chunk_has_the_usage_for_mistrals_clients_alone() -> None:
    says = TOKENIZER.encode(SAID)[1:]
    *others, last = _chunks(MISTRALS, NO_FIELDS, says)
    assert last["choices"][0]["finish_reason"] == "stop"
    assert last["usage"]["completion_tokens"] == len(says)
    assert not any("usage" in chunk for chunk in others)
    assert not any("usage" in chunk for chunk in _chunks(OPENAIS, NO_FIELDS, says))
    *others, last = _chunks(MISTRALS, {"stream_options": {"include_usage": True}}, says)
    assert last["choices"] == []
    assert [chunk["usage"] for chunk in others] == [None] * len(others)


def _detokenizer() -> ChatDetokenizer:
    tool_format = FORMAT.tool_format
    assert tool_format is not None
    parser = ToolCallParser(TOKENIZER, tool_format, call_ids("answer"))
    return ChatDetokenizer(TOKENIZER, (), tools=parser, whole_calls=True)


def _push(choice: ChatDetokenizer, ids: Sequence[int], *, ends: bool) -> list[CallDelta]:
    taken: list[CallDelta] = []
    for number, token_id in enumerate(ids, start=1):
        is_last = ends and number == len(ids)
        choice.push(TokenEvent(0, token_id, FinishReason.STOP if is_last else None))
        taken += choice.take_calls()
    return taken


@pytest.mark.parametrize("cut", range(1, len(IDS)))
def test_another_ingress_sends_the_calls_that_the_client_has_not_received(cut: int) -> None:
    before = _push(_detokenizer(), IDS[:cut], ends=False)
    other = _detokenizer()
    other.resume(ChoiceState(list(IDS[:cut])))
    sent = [*before, *_push(other, IDS[cut:], ends=True)]
    assert [(call.index, call.name, call.arguments) for call in sent] == [
        (0, "w", ARLES),
        (1, "x", NOTHING),
    ]


def test_a_list_of_models_is_anthropics_for_anthropics_clients() -> None:
    # One application for all requests: a model is created when its application is.
    app = http_app_for(ScriptedSource(), MODEL, chat=FORMAT).app()

    async def listed(headers: Mapping[str, str], path: str) -> dict[str, Any]:
        async with client_for(app) as client:
            answer: dict[str, Any] = (await client.get(path, headers=dict(headers))).json()
            return answer

    anthropics = {"anthropic-version": "2023-06-01"}
    page = asyncio.run(listed(anthropics, "/v1/models"))
    assert page.keys() == {"data", "has_more", "first_id", "last_id"}
    assert page["data"] == [asyncio.run(listed(anthropics, "/v1/models/demo"))]
    assert page["data"][0]["type"] == "model"
    [model] = asyncio.run(listed(OPENAIS, "/v1/models"))["data"]
    assert (model["object"], model["type"], model["max_context_length"]) == ("model", "base", 512)
    can = {name for name, is_able in model["capabilities"].items() if is_able}
    assert can == {"completion_chat", "completion_fim", "function_calling"}
