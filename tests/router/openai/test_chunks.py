"""Chunks are dictionaries for speed; the models that describe them validate every one."""

import asyncio
import json
from typing import Any, get_type_hints

import httpx
import pytest
from scripted_token_source import CONTEXT, ScriptedSource, client_for, http_app_for
from tokenizer_files import SENTENCEPIECE

from tramontane.router.openai.response_models import (
    ChatAnswer,
    ChatChange,
    ChatChunk,
    ChatChunkChoice,
    CompletionChange,
    CompletionChoice,
)
from tramontane.router.openai.served_model import ServedModel
from tramontane.router.tokenization.backends import SentencePieceTokenizer
from tramontane.router.tokenization.mistral_chat import MistralChatTemplate

TOKENIZER = SentencePieceTokenizer(SENTENCEPIECE["v3"])
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = '[{"name": "f", "arguments": {"a": 1}}]'
REQUESTS: list[dict[str, Any]] = [
    {},
    {"n": 2, "logprobs": True, "top_logprobs": 2, "return_token_ids": True},
    {"stop": "day", "stream_options": {"include_usage": True}},
    {"tools": [TOOL]},
    {"tools": [TOOL], "tool_choice": "required", "logprobs": True},
]


def _post(body: dict[str, Any]) -> httpx.Response:
    calls = TOKENIZER.control_id("[TOOL_CALLS]")
    assert calls is not None
    said = (
        *TOKENIZER.encode("Good day")[1:],
        *((calls, *TOKENIZER.encode(CALL)[1:]) if "tools" in body else ()),
    )
    model = ServedModel("tiny", TOKENIZER, CONTEXT, 16, TOKENIZER.vocab_size)
    chat = MistralChatTemplate.from_sentencepiece(SENTENCEPIECE["v3"])

    async def scenario() -> httpx.Response:
        async with client_for(http_app_for(ScriptedSource(said), model, chat=chat).app()) as client:
            messages = [{"role": "user", "content": "Hello"}]
            return await client.post("/v1/chat/completions", json=body | {"messages": messages})

    return asyncio.run(scenario())


@pytest.mark.parametrize("body", REQUESTS)
def test_chat_answers_and_chunks_match_their_models(body: dict[str, Any]) -> None:
    settings = {key: value for key, value in body.items() if key != "stream_options"}
    answer = ChatAnswer.model_validate_json(_post(settings).content)
    events = [
        line.removeprefix("data: ")
        for line in _post(body | {"stream": True}).text.splitlines()
        if line
    ]
    assert events.pop() == "[DONE]"
    chunks = [ChatChunk.model_validate_json(event) for event in events]
    assert all(("usage" in json.loads(event)) == ("stream_options" in body) for event in events)
    assert (chunks[-1].usage == answer.usage) == ("stream_options" in body)
    for choice in answer.choices:
        own = [each for chunk in chunks for each in chunk.choices if each.index == choice.index]
        assert "".join(each.delta.content for each in own) == (choice.message.content or "")
        assert own[-1].finish_reason == choice.finish_reason
        arguments = "".join(
            call.function.arguments for each in own for call in each.delta.tool_calls
        )
        assert arguments == "".join(call.function.arguments for call in choice.message.tool_calls)
        assert [token_id for each in own for token_id in each.token_ids] == choice.token_ids


def test_calls_of_a_whole_answer_have_openais_shape() -> None:
    [choice] = _post({"tools": [TOOL]}).json()["choices"]
    [call] = choice["message"]["tool_calls"]
    assert call == {
        "id": call["id"],
        "type": "function",
        "function": {"name": "f", "arguments": '{"a": 1}'},
    }
    assert choice["message"] == {
        "role": "assistant",
        "content": "Good day",
        "refusal": None,
        "tool_calls": [call],
    }
    assert choice["finish_reason"] == "tool_calls"


def test_chunk_dictionaries_have_the_fields_of_their_models() -> None:
    assert get_type_hints(CompletionChange).keys() == CompletionChoice.model_fields.keys()
    assert get_type_hints(ChatChange).keys() == ChatChunkChoice.model_fields.keys()
