"""OpenAI's own client, sync and async, plain, streaming and raw, over everything that the API
server has of OpenAI's.
"""

import asyncio
import json
from dataclasses import replace
from typing import Any

import openai
import pytest
from event_loops import in_event_loop
from listening_server import (
    CALLED,
    CALLS,
    CONTEXT,
    KEY,
    TOKENIZER,
    TOWN,
    ListeningServer,
    ids_of,
)
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from pydantic import BaseModel
from scripted_token_source import FINGERPRINT, SAID, ScriptedSource, client_for, http_app_for
from thinking_models import thinking_model
from tokenizer_files import END_THINK, SENTENCEPIECE, THINK

from tramontane.proto.errors import OverloadedError, PipelineError
from tramontane.router.tokenization.chat import ChatMessage
from tramontane.router.tokenization.mistral_chat import MistralChatTemplate

HELLO: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello!"},
]
WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a town",
        "parameters": TOWN,
    },
}


# Completions and models


def test_completions(server: ListeningServer, client: OpenAI) -> None:
    plain = client.completions.create(
        model="tiny", prompt=["What", "news?"], n=2, max_tokens=100, logprobs=2, seed=1
    )
    assert [choice.index for choice in plain.choices] == [0, 1, 2, 3]
    assert {choice.text.strip() for choice in plain.choices} == {SAID}
    assert plain.choices[0].finish_reason == "stop"
    assert plain.system_fingerprint == FINGERPRINT
    assert plain.choices[0].logprobs is not None
    assert plain.choices[0].logprobs.token_logprobs == [-0.5] * len(server.source.token_ids)
    stream = client.completions.create(
        model="tiny",
        prompt="What news?",
        max_tokens=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == TOKENIZER.decoder().push(
        ids_of(SAID)[0]
    ) + TOKENIZER.decode(tuple(ids_of(SAID)[1:3]))
    assert chunks[-1].choices[0].finish_reason == "length"
    assert {chunk.system_fingerprint for chunk in (*chunks, last)} == {FINGERPRINT}
    assert last.usage is not None
    assert last.usage.completion_tokens == 3


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "tramontane"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")


def test_async_and_raw(server: ListeningServer) -> None:
    async def scenario(client: AsyncOpenAI) -> None:
        raw = await client.completions.with_raw_response.create(
            model="tiny", prompt="a", max_tokens=2, extra_headers={"x-request-id": "mine"}
        )
        assert raw.headers["x-request-id"] == "mine"
        assert raw.parse().choices[0].finish_reason == "length"
        chat = await client.chat.completions.create(model="tiny", messages=HELLO)
        assert chat._request_id
        assert chat.choices[0].message.content == SAID
        assert chat.system_fingerprint == FINGERPRINT
        async with client.chat.completions.with_streaming_response.create(
            model="tiny", messages=HELLO, stream=True
        ) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line async for line in response.iter_lines() if line]
        assert (
            json.loads(lines[0].removeprefix("data: "))["choices"][0]["delta"]["role"]
            == "assistant"
        )
        assert lines[-1] == "data: [DONE]"
        together = await asyncio.gather(
            *(client.chat.completions.create(model="tiny", messages=HELLO) for _ in range(4))
        )
        assert {answer.choices[0].message.content for answer in together} == {SAID}
        assert len({answer.id for answer in together}) == 4

    async def main() -> None:
        async with AsyncOpenAI(api_key=KEY, base_url=f"{server.url}/v1", max_retries=0) as client:
            await scenario(client)

    asyncio.run(main())


# Chat


def test_chat(server: ListeningServer, client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, n=2, temperature=0, user="somebody"
    )
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert (choice.message.role, choice.message.content, choice.finish_reason) == (
            "assistant",
            SAID,
            "stop",
        )
        assert (choice.message.tool_calls, choice.message.refusal, choice.logprobs) == (
            None,
            None,
            None,
        )
    [specs] = server.source.requested
    prompt = MistralChatTemplate.from_sentencepiece(SENTENCEPIECE["v3"]).encode
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(specs[0].prompt_ids)
    assert answer.usage.completion_tokens == 2 * len(server.source.token_ids)
    assert [spec.sampling.choice for spec in specs] == [0, 1]
    assert specs[0].sampling.max_tokens == CONTEXT - len(specs[0].prompt_ids), (
        "as much as there is room for"
    )
    assert specs[0].prompt_ids == prompt(
        [ChatMessage("system", "Be brief."), ChatMessage("user", "Hello!")]
    )


def test_a_chat_streams_the_role_first(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=HELLO, n=2, stream=True, stream_options={"include_usage": True}
    )
    first, *chunks, last = list(stream)
    assert [(c.index, c.delta.role, c.delta.content, c.finish_reason) for c in first.choices] == [
        (0, "assistant", "", None),
        (1, "assistant", "", None),
    ]
    for index in (0, 1):
        own = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(choice.delta.content or "" for choice in own) == SAID
        assert all(choice.delta.role is None for choice in own)
        assert [choice.finish_reason for choice in own] == [None] * (len(own) - 1) + ["stop"]
    assert {chunk.object for chunk in (first, *chunks, last)} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in (first, *chunks, last)}) == 1
    assert last.choices == []
    assert last.usage is not None


def test_a_chat_of_one_token_streams_too(client: OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=HELLO, max_completion_tokens=1, stream=True
        )
    )
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, "length"]


def test_stop_and_length(client: OpenAI) -> None:
    stopped = client.chat.completions.create(model="tiny", messages=HELLO, stop=["my"])
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == (
        "Good morrow, ",
        "stop",
    )
    cut = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=2)
    assert cut.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_chats(client: OpenAI, stream: bool) -> None:
    request_body: Any = {
        "model": "tiny",
        "messages": HELLO,
        "logprobs": True,
        "top_logprobs": 2,
        "max_tokens": 3,
    }
    if stream:
        choices = [
            chunk.choices[0]
            for chunk in client.chat.completions.create(**request_body, stream=True)
        ]
    else:
        choices = client.chat.completions.create(**request_body).choices
    reported = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    assert [bytes(token.bytes).decode() for token in reported] == [
        TOKENIZER.bytes_of(i).decode() for i in ids_of(SAID)[:3]
    ]
    assert {token.logprob for token in reported} == {-0.5}
    assert [[top.logprob for top in token.top_logprobs] for token in reported] == [[-0.5, -1.5]] * 3


def test_what_was_said_before_may_be_of_any_kind(server: ListeningServer, client: OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "How is"},
                {"type": "text", "text": "the weather?"},
            ],
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "abcdefghi",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"town": "Arles"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "windy"},
    ]
    answer = client.chat.completions.create(model="tiny", messages=messages, tools=[WEATHER])
    assert answer.choices[0].message.content == SAID
    prompt = TOKENIZER.decode(server.source.requested[0][0].prompt_ids)
    for part in ("Be brief.", "How is\nthe weather?", "Arles", "windy", "of a town"):
        assert part in prompt


def test_tools_are_called(server: ListeningServer, client: OpenAI) -> None:
    server.says(CALLS, *ids_of(CALLED))
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO[1:], tools=[WEATHER], tool_choice="required"
    )
    assert server.source.requested[0][0].sampling.grammar
    [choice] = answer.choices
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "weather",
        {"town": "Arles"},
    )
    with client.chat.completions.stream(
        model="tiny", messages=HELLO[1:], tools=[WEATHER]
    ) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert final.message.tool_calls is not None
    assert final.message.tool_calls[0].function.name == "weather"
    assert json.loads(final.message.tool_calls[0].function.arguments) == {"town": "Arles"}
    assert final.message.tool_calls[0].id
    client.chat.completions.create(
        model="tiny", messages=HELLO[1:], tools=[WEATHER], tool_choice="none"
    )
    assert not server.source.requested[-1][0].sampling.grammar


class Town(BaseModel):
    name: str


def test_answers_in_json(server: ListeningServer, client: OpenAI) -> None:
    server.says(*ids_of('{"name": "Arles"}'))
    parsed = client.chat.completions.parse(model="tiny", messages=HELLO, response_format=Town)
    assert parsed.choices[0].message.parsed == Town(name="Arles")
    assert server.source.requested[0][0].sampling.grammar
    client.chat.completions.create(
        model="tiny", messages=HELLO, response_format={"type": "json_object"}
    )
    assert server.source.requested[1][0].sampling.grammar
    client.chat.completions.create(model="tiny", messages=HELLO, response_format={"type": "text"})
    assert not server.source.requested[2][0].sampling.grammar


@in_event_loop
async def test_thoughts_are_read_as_clients_of_deepseek_and_vllm_read_them() -> None:
    """By fields that the client's types do not have; an answer is sent back as it is."""
    thinker = thinking_model("tekken")
    source = ScriptedSource(thinker.say("<think>340 + 51</think>391"))
    app = http_app_for(source, thinker.model, chat=thinker.chat).app()

    http_client = client_for(app)
    async with AsyncOpenAI(
        api_key=KEY, base_url="http://ingress/v1", max_retries=0, http_client=http_client
    ) as client:
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "17 * 23?"}]
        answer = await client.chat.completions.create(model="thinker", messages=messages)
        message: Any = answer.choices[0].message
        assert (message.content, message.reasoning_content, message.reasoning) == (
            "391",
            "340 + 51",
            "340 + 51",
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens_details is not None
        num_thought = 2 + len(thinker.text_ids("340 + 51"))
        assert answer.usage.completion_tokens_details.reasoning_tokens == num_thought
        stream = await client.chat.completions.create(
            model="thinker", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        *chunks, last = [chunk async for chunk in stream]
        deltas: list[Any] = [choice.delta for chunk in chunks for choice in chunk.choices]
        assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "340 + 51"
        assert "".join(delta.content or "" for delta in deltas) == "391"
        assert last.usage == answer.usage
        await client.chat.completions.create(
            model="thinker", messages=[*messages, message, *messages]
        )
        sent_back = source.requested[-1][0].prompt_ids
        assert [token_id for token_id in sent_back if token_id in (THINK, END_THINK)] == [
            THINK,
            END_THINK,
        ]


# Errors


def test_a_wrong_key(server: ListeningServer) -> None:
    with (
        OpenAI(api_key="wrong", base_url=f"{server.url}/v1", max_retries=0) as unauthorized,
        pytest.raises(openai.AuthenticationError) as refused,
    ):
        unauthorized.chat.completions.create(model="tiny", messages=HELLO)
    assert refused.value.code == "invalid_api_key"
    assert server.source.requested == []


def test_a_model_that_is_not_there(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="gpt", messages=HELLO)
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": "a" * 60_000}]}, "messages"),
    ({"messages": [{"role": "user", "content": "la " * CONTEXT}]}, "messages"),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
            ]
        },
        "messages[0].content",
    ),
    ({"messages": [{"role": "user", "content": "a", "name": 5}]}, "messages[0].name"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"add_generation_prompt": False}, "add_generation_prompt"),
    ({"chat_template_kwargs": {"a b": True}}, "chat_template_kwargs"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"safe_prompt": True}, "safe_prompt"),
    ({"stop_token_ids": [TOKENIZER.vocab_size]}, "stop_token_ids"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": {"not": {}}}, "guided_json"),
    ({"guided_choice": ["a"], "structured_outputs": {"regex": "a"}}, "guided_choice"),
    ({"guided_choice": ["a"], "response_format": {"type": "json_object"}}, "guided_choice"),
    ({"messages": [{"role": "narrator", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "a"}] * 2049}, "messages"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"reasoning_effort": "much"}, "reasoning_effort"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"prompt_mode": "reasoning"}, "prompt_mode"),
    ({"functions": [{"name": "f"}]}, "functions"),
]


@pytest.mark.parametrize(("changes", "param"), BAD)
def test_invalid_requests(
    server: ListeningServer, client: OpenAI, changes: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.post(
            "/chat/completions", cast_to=object, body={"model": "tiny", "messages": HELLO} | changes
        )
    assert refused.value.param == param
    assert server.source.requested == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"max_token": 5},
            "max_token is not a parameter of this endpoint; did you mean max_tokens?",
        ),
        (
            {"messages": [{"role": "robot", "content": "a"}]},
            (
                "messages[0].role is 'robot'; it must be one of 'system', 'developer', 'user',"
                " 'assistant', 'tool', 'function'"
            ),
        ),
        ({"messages": [{"content": "a"}]}, "messages[0].role is missing"),
        (
            {"messages": [{"role": "user", "contnet": "a"}]},
            "messages[0].contnet is not a parameter of this endpoint; did you mean content?",
        ),
        (
            {"messages": [{"content": "a", "rol": "user"}]},
            'messages[0].role is missing; unknown field "rol", did you mean "role"?',
        ),
    ],
)
def test_a_mistake_is_described_in_the_clients_words(
    client: OpenAI, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.post(
            "/chat/completions", cast_to=object, body={"model": "tiny", "messages": HELLO} | changes
        )
    assert refused.value.body["message"] == message  # type: ignore[index]


@pytest.mark.parametrize(
    ("changes", "ignored"),
    [
        ({"verbosity": "low"}, "verbosity"),
        ({"store": True}, "store"),
        ({"prompt": "a"}, "prompt"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"qqqq": 5, "null": None}, "qqqq"),
        ({"contnet": "a"}, "contnet"),
        ({"service_tier": "gold", "user": {"a": 1}}, "service_tier, user"),
        ({"messages": [HELLO[0], HELLO[1] | {"id": 7}]}, "messages[].id"),
        ({"messages": [HELLO[0] | {"id": 7}, HELLO[1] | {"id": 7}]}, "messages[].id"),
        ({"stop": ["", ""], "seed": 2**70, "tools": None, "logprobs": None}, ""),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_has_no_effect_is_ignored_and_named(
    server: ListeningServer, client: OpenAI, changes: dict[str, Any], ignored: str, stream: bool
) -> None:
    for more in ({}, changes):
        raw = client.chat.completions.with_raw_response.create(
            model="tiny", messages=HELLO, stream=stream, extra_body=more
        )
        raw.parse()
    assert raw.headers.get("warning", "") == (f'299 - "ignored: {ignored}"' if ignored else "")
    assert server.prompts[0] == server.prompts[1]
    plain, same = (specs[0].sampling for specs in server.source.requested)
    assert replace(same, seed=plain.seed) == plain


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "a"}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": None}],
        [{"role": "user"}],
        [{"role": "assistant", "content": "a", "prefix": True}, *HELLO],
        [{"role": "tool", "content": "a", "tool_call_id": "call_1"}, *HELLO],
        [{"role": "function", "name": "f", "content": "a"}, *HELLO],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}, *HELLO],
        [{"role": "assistant", "reasoning_content": "a", "content": "b"}, *HELLO],
    ],
)
def test_no_history_is_refused(server: ListeningServer, client: OpenAI, messages: Any) -> None:
    raw = client.chat.completions.with_raw_response.create(model="tiny", messages=messages)
    assert raw.parse().choices
    assert "warning" not in raw.headers


def test_an_image_of_an_earlier_question_is_a_text(server: ListeningServer, client: OpenAI) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    asked = {"role": "user", "content": [{"type": "text", "text": "What?"}, image]}
    answered = {"role": "assistant", "content": "A cat."}
    messages: Any = [asked, answered, *HELLO[1:]]
    raw = client.chat.completions.with_raw_response.create(model="tiny", messages=messages)
    assert raw.headers["warning"] == '299 - "ignored: messages[].content[].type=image_url"'
    written = TOKENIZER.decode(server.prompts[0])
    assert "What?\n[image omitted]" in written
    assert "AAAA" not in written
    for last in ([asked], [asked, *HELLO[1:]], [*messages, asked]):
        with pytest.raises(openai.BadRequestError, match="images are not supported"):
            client.chat.completions.create(model="tiny", messages=last)
    assert len(server.prompts) == 1


def test_a_body_that_is_too_large(client: OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        client.completions.create(model="tiny", prompt="a" * 70_000)
    assert refused.value.status_code == 413


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_is_full(server: ListeningServer, client: OpenAI, stream: bool) -> None:
    server.source.failure = OverloadedError("too much waits", 7)
    with pytest.raises(openai.RateLimitError) as refused:
        client.chat.completions.create(model="tiny", messages=HELLO, stream=stream)
    assert refused.value.response.headers["retry-after"] == "7"
    assert refused.value.code == "rate_limit_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_a_pipeline_that_is_lost(server: ListeningServer, client: OpenAI, stream: bool) -> None:
    server.source.failure = PipelineError("stage 1 died")
    with pytest.raises(openai.InternalServerError, match="stage 1 died") as refused:
        client.chat.completions.create(model="tiny", messages=HELLO, stream=stream)
    assert refused.value.status_code == 503
    assert refused.value.request_id


def test_a_pipeline_that_dies_in_the_middle(server: ListeningServer, client: OpenAI) -> None:
    server.source.failure, server.source.fails_at = PipelineError("stage 1 died"), 2
    stream = client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
    with pytest.raises(openai.APIError, match="stage 1 died"):
        list(stream)


def test_a_client_that_tries_again_gets_its_answer(server: ListeningServer, client: OpenAI) -> None:
    """What OpenAI's client does by itself when it is to try again later."""
    server.source.failure = OverloadedError("too much waits", 0)
    reported: list[int] = []

    class Recovering(list[Any]):
        def append(self, specs: Any) -> None:
            super().append(specs)
            reported.append(len(self))
            server.source.failure = OverloadedError("too much waits", 0) if len(self) < 2 else None

    server.source.requests = Recovering()
    try:
        client = client.with_options(max_retries=2)
        assert (
            client.chat.completions.create(model="tiny", messages=HELLO).choices[0].message.content
            == SAID
        )
        assert reported == [1, 2]
    finally:
        server.source.requests = []
