"""Anthropic's own client over ``/v1/messages``: whole, streamed, tools, counts, errors; and prompts
like those of chats.
"""

import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic, AsyncAnthropic
from anthropic.types import Message, MessageParam, TextBlock, ThinkingBlock, ToolParam, ToolUseBlock
from client_events import parse_events, texts_of
from event_loops import in_event_loop
from listening_server import CALLED, CONTEXT, KEY, TOWN, ListeningServer, ids_of
from scripted_token_source import FINGERPRINT, SAID, ScriptedSource, client_for, http_app_for
from thinking_models import thinking_model
from tokenizer_files import SENTENCEPIECE, THINK, thinking_tekken

from tramontane.proto.errors import (
    DeadlineExceededError,
    DrainingError,
    OverloadedError,
    PipelineError,
    TramontaneError,
)
from tramontane.router.openai.served_model import ServedModel
from tramontane.router.tokenization.loader import load_chat_template, require_tokenizer

HELLO: list[MessageParam] = [{"role": "user", "content": "Hello!"}]
WEATHER: ToolParam = {
    "name": "weather",
    "description": "of a town",
    "input_schema": TOWN,
}


@pytest.fixture
def client(server: ListeningServer) -> Iterator[Anthropic]:
    with Anthropic(api_key=KEY, base_url=server.url, max_retries=0) as made:
        yield made


def _post(
    server: ListeningServer, body: dict[str, Any], path: str = "/v1/messages", **headers: str
) -> httpx.Response:
    return httpx.post(
        f"{server.url}{path}", json=body, headers={"authorization": f"Bearer {KEY}"} | headers
    )


def test_a_message(server: ListeningServer, client: Anthropic) -> None:
    raw = client.messages.with_raw_response.create(
        model="tiny", messages=HELLO, max_tokens=100, system="Be brief.", metadata={"user_id": "me"}
    )
    message = raw.parse()
    Message.model_validate(json.loads(raw.text()))
    [block] = message.content
    assert isinstance(block, TextBlock)
    assert (block.text, message.role, message.type, message.model) == (
        SAID,
        "assistant",
        "message",
        "tiny",
    )
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.input_tokens == len(server.prompts[0])
    assert message.usage.output_tokens == len(server.source.token_ids)
    assert message.id.startswith("msg_")
    assert raw.headers["x-tramontane-fingerprint"] == FINGERPRINT


def test_why_an_answer_ends(client: Anthropic) -> None:
    stopped = client.messages.create(
        model="tiny", messages=HELLO, max_tokens=100, stop_sequences=["other", "my"]
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "my")
    assert isinstance(stopped.content[0], TextBlock)
    assert stopped.content[0].text == "Good morrow, "
    cut = client.messages.create(model="tiny", messages=HELLO, max_tokens=2)
    assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)
    filled = client.messages.create(model="tiny", messages=HELLO, max_tokens=0)
    assert (filled.stop_reason, filled.usage.output_tokens) == ("max_tokens", 0)
    assert filled.usage.input_tokens == cut.usage.input_tokens
    assert "".join(block.to_dict()["text"] for block in filled.content) == ""
    with client.messages.stream(
        model="tiny", messages=HELLO, max_tokens=100, stop_sequences=["my"]
    ) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence, final.content[0].to_dict()["text"]) == (
        "stop_sequence",
        "my",
        "Good morrow, ",
    )


def test_an_answer_of_nothing_is_an_empty_text(server: ListeningServer, client: Anthropic) -> None:
    server.says(2)
    message = client.messages.create(model="tiny", messages=HELLO, max_tokens=100)
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": ""}]
    with client.messages.stream(model="tiny", messages=HELLO, max_tokens=100) as stream:
        assert stream.get_final_text() == ""


def test_a_streamed_message(server: ListeningServer, client: Anthropic) -> None:
    with client.messages.stream(model="tiny", messages=HELLO, max_tokens=100) as stream:
        assert "".join(stream.text_stream) == SAID
        final = stream.get_final_message()
    assert (final.stop_reason, final.usage.output_tokens) == (
        "end_turn",
        len(server.source.token_ids),
    )
    assert final.usage.input_tokens == len(server.prompts[0])
    events = list(client.messages.create(model="tiny", messages=HELLO, max_tokens=100, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    text = _post(server, {"messages": HELLO, "max_tokens": 3, "stream": True}).text
    assert [event["type"] for event in parse_events("/v1/messages", text)][-1] == "message_stop"


@in_event_loop
async def test_async(server: ListeningServer) -> None:
    async with AsyncAnthropic(api_key=KEY, base_url=server.url, max_retries=0) as client:
        create = client.messages.create
        answers = await asyncio.gather(
            *(create(model="tiny", messages=HELLO, max_tokens=100) for _ in range(4))
        )
        assert len({answer.id for answer in answers}) == 4
        async with client.messages.stream(model="tiny", messages=HELLO, max_tokens=100) as stream:
            assert await stream.get_final_text() == SAID


def test_tools_are_called_and_their_results_sent_back(
    server: ListeningServer, client: Anthropic
) -> None:
    """The second prompt is that of a chat with the same conversation."""
    server.calls("", CALLED)
    question: MessageParam = {"role": "user", "content": "How is the weather?"}
    message = client.messages.create(
        model="tiny", messages=[question], max_tokens=100, tools=[WEATHER]
    )
    assert server.source.requested[0][0].sampling.grammar
    [call] = message.content
    assert isinstance(call, ToolUseBlock)
    assert (message.stop_reason, call.name, call.input) == (
        "tool_use",
        "weather",
        {"town": "Arles"},
    )
    result: Any = {
        "type": "tool_result",
        "tool_use_id": call.id,
        "content": [{"type": "text", "text": "windy"}],
    }
    conversation: list[MessageParam] = [
        question,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    server.says(*ids_of(SAID))
    client.messages.create(model="tiny", messages=conversation, max_tokens=100, tools=[WEATHER])
    function = {
        "name": "weather",
        "description": "of a town",
        "parameters": WEATHER["input_schema"],
    }
    called = {
        "id": call.id,
        "type": "function",
        "function": {"name": "weather", "arguments": '{"town": "Arles"}'},
    }
    chat = [
        question,
        {"role": "assistant", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": call.id, "content": "windy"},
    ]
    body = {
        "messages": chat,
        "tools": [{"type": "function", "function": function}],
        "max_tokens": 3,
    }
    assert _post(server, body, "/v1/chat/completions").status_code == 200
    _, ours, chats = server.prompts
    assert ours == chats
    counted = client.messages.count_tokens(model="tiny", messages=conversation, tools=[WEATHER])
    assert counted.input_tokens == len(ours)
    tokens = _post(server, {key: body[key] for key in ("messages", "tools")}, "/tokenize").json()[
        "tokens"
    ]
    assert tuple(tokens) == ours


def test_tools_in_a_stream(server: ListeningServer, client: Anthropic) -> None:
    server.calls(
        "",
        '[{"name": "weather", "arguments": {"town": "Arles"}}, {"name": "weather", "arguments":'
        ' {"town": "Nice"}}]',
    )
    with client.messages.stream(
        model="tiny", messages=HELLO, max_tokens=100, tools=[WEATHER]
    ) as stream:
        final = stream.get_final_message()
    assert [block.to_dict()["input"] for block in final.content] == [
        {"town": "Arles"},
        {"town": "Nice"},
    ]
    assert final.stop_reason == "tool_use"
    assert len({block.to_dict()["id"] for block in final.content}) == 2


def test_a_call_that_is_cut_off_is_not_in_a_whole_message(
    server: ListeningServer, client: Anthropic
) -> None:
    server.calls("Well, ", CALLED)
    message = client.messages.create(
        model="tiny", messages=HELLO, max_tokens=len(server.source.token_ids) - 4, tools=[WEATHER]
    )
    assert message.stop_reason == "max_tokens"
    assert [block.type for block in message.content] == ["text"]


@pytest.mark.parametrize(
    ("choice", "has_grammar"),
    [
        ({"type": "none"}, False),
        ({"type": "any"}, True),
        ({"type": "tool", "name": "weather"}, True),
        ({"type": "auto"}, True),
    ],
)
def test_the_choice_of_tools(
    server: ListeningServer, client: Anthropic, choice: Any, has_grammar: bool
) -> None:
    client.messages.create(
        model="tiny", messages=HELLO, max_tokens=100, tools=[WEATHER], tool_choice=choice
    )
    grammar = server.source.requested[0][0].sampling.grammar
    assert bool(grammar) == has_grammar
    if has_grammar:
        one_call = {**choice, "disable_parallel_tool_use": True}
        client.messages.create(
            model="tiny", messages=HELLO, max_tokens=100, tools=[WEATHER], tool_choice=one_call
        )
        assert server.source.requested[1][0].sampling.grammar != grammar


def test_answers_in_json(server: ListeningServer, client: Anthropic) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    config: Any = {"format": {"type": "json_schema", "schema": schema}}
    client.messages.create(model="tiny", messages=HELLO, max_tokens=100, output_config=config)
    assert server.source.requested[0][0].sampling.grammar


SAMPLING = {"top_k": 3, "top_p": 0.5, "temperature": 0.5}  # which the client no longer names
CONVERSATIONS: list[tuple[Any, Any, list[Any]]] = [
    ("Be brief.", HELLO, [{"role": "system", "content": "Be brief."}, *HELLO]),
    (
        [
            {"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "brief."},
        ],
        [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "How is"},
                    {"type": "text", "text": "the weather?"},
                ],
            },
            {"role": "assistant", "content": [{"type": "text", "text": "Windy."}]},
            {"role": "user", "content": "And now?"},
        ],
        [
            {"role": "system", "content": "Be\nbrief."},
            {"role": "user", "content": "How is\nthe weather?"},
            {"role": "assistant", "content": "Windy."},
            {"role": "user", "content": "And now?"},
        ],
    ),
    (
        "Be brief.",
        [
            {
                "role": "system",
                "content": [{"type": "text", "text": "And"}, {"type": "text", "text": "kind."}],
            },
            *HELLO,
        ],
        [
            {"role": "system", "content": "Be brief."},
            {"role": "system", "content": "And\nkind."},
            *HELLO,
        ],
    ),
]


@pytest.mark.parametrize(("system", "messages", "chat"), CONVERSATIONS)
def test_prompts_are_those_of_chats(
    server: ListeningServer, client: Anthropic, system: Any, messages: Any, chat: list[Any]
) -> None:
    client.messages.create(
        model="tiny", system=system, messages=messages, max_tokens=5, extra_body=SAMPLING
    )
    assert _post(
        server, {"messages": chat, "max_tokens": 5, **SAMPLING}, "/v1/chat/completions"
    ).is_success
    ours, chats = (specs[0] for specs in server.source.requested)
    assert ours.prompt_ids == chats.prompt_ids
    assert (
        ours.sampling.top_k,
        ours.sampling.top_p,
        ours.sampling.temperature,
        ours.sampling.max_tokens,
    ) == (3, 0.5, 0.5, 5)
    counted = client.messages.count_tokens(model="tiny", system=system, messages=messages)
    assert counted.input_tokens == len(ours.prompt_ids)


def test_a_last_message_of_the_assistant_is_continued(
    server: ListeningServer, client: Anthropic
) -> None:
    begun: list[MessageParam] = [*HELLO, {"role": "assistant", "content": "Good"}]
    message = client.messages.create(model="tiny", messages=begun, max_tokens=100)
    assert message.content[0].to_dict()["text"].strip() == SAID, "without what the client has"
    assert _post(
        server, {"messages": begun, "continue_final_message": True}, "/v1/chat/completions"
    ).is_success
    ours, chats = server.prompts
    assert ours == chats
    assert client.messages.count_tokens(model="tiny", messages=begun).input_tokens == len(ours)
    assert _post(server, {"messages": HELLO}, "/v1/chat/completions").is_success
    assert server.prompts[2] != ours


@in_event_loop
async def test_thoughts_are_blocks_that_can_be_sent_back() -> None:
    thinker = thinking_model("tekken")
    source = ScriptedSource(thinker.say("<think>340 + 51</think>391"))
    app = http_app_for(source, thinker.model, chat=thinker.chat).app()

    async with client_for(app) as http:
        question = {"role": "user", "content": "17 * 23?"}
        body: dict[str, Any] = {"messages": [question], "max_tokens": 100}
        message = Message.model_validate((await http.post("/v1/messages", json=body)).json())
        thought, text = message.content
        assert isinstance(thought, ThinkingBlock)
        assert isinstance(text, TextBlock)
        assert (thought.thinking, text.text) == ("340 + 51", "391")
        num_thought = 2 + len(thinker.text_ids("340 + 51"))
        assert message.usage.output_tokens_details is not None
        assert message.usage.output_tokens_details.thinking_tokens == num_thought
        events = parse_events(
            "/v1/messages", (await http.post("/v1/messages", json=body | {"stream": True})).text
        )
        assert texts_of(events) == {0: "340 + 51", 1: "391"}
        assert events[0]["message"]["usage"]["output_tokens_details"] == {"thinking_tokens": 0}
        usage = {
            "output_tokens": message.usage.output_tokens,
            "output_tokens_details": {"thinking_tokens": num_thought},
        }
        assert events[-2]["usage"] == usage
        reply = {"role": "assistant", "content": [block.to_dict() for block in message.content]}
        assert (
            await http.post("/v1/messages", json=body | {"messages": [question, reply, question]})
        ).is_success
        chat = [
            question,
            {"role": "assistant", "content": "391", "reasoning_content": "340 + 51"},
            question,
        ]
        assert (await http.post("/v1/chat/completions", json={"messages": chat})).is_success
        ours, chats = (specs[0].prompt_ids for specs in source.requested[-2:])
        assert ours == chats
        assert THINK in ours
        for kind, warning in (("enabled", ""), ("disabled", '299 - "ignored: thinking"')):
            for path in ("/v1/messages", "/v1/messages/count_tokens"):
                given = {
                    key: body[key] for key in body if path == "/v1/messages" or key != "max_tokens"
                }
                answer = await http.post(path, json=given | {"thinking": {"type": kind}})
                assert answer.status_code == 200, path
                assert answer.headers.get("warning", "") == warning


@pytest.mark.parametrize("effort", [None, "high"])
@in_event_loop
async def test_thoughts_are_disabled_where_the_model_has_a_setting_for_it(
    tmp_path: Path, effort: str | None
) -> None:
    """By default this model thinks."""
    thinking_tekken(tmp_path, "v15", ("high", "none"))
    tokenizer = require_tokenizer(tmp_path, 10**6)
    model = ServedModel("thinker", tokenizer, 512, 16, tokenizer.vocab_size)
    source = ScriptedSource(tokenizer.encode("391")[1:])
    app = http_app_for(source, model, chat=load_chat_template(tmp_path, tokenizer)).app()
    disabled = {"thinking": {"type": "disabled"}, "output_config": {"effort": effort}}

    async with client_for(app) as http:
        for more in ({}, disabled):
            assert (
                await http.post("/v1/messages", json={"messages": HELLO, "max_tokens": 5} | more)
            ).is_success
        assert (
            await http.post(
                "/v1/chat/completions", json={"messages": HELLO, "reasoning_effort": "none"}
            )
        ).is_success
        default, ours, chats = (specs[0].prompt_ids for specs in source.requested)
        assert default != ours == chats
        counted = await http.post("/v1/messages/count_tokens", json={"messages": HELLO} | disabled)
        assert counted.json() == {"input_tokens": len(ours)}


# Errors


@in_event_loop
async def test_tools_are_refused_where_the_format_has_none(tmp_path: Path) -> None:
    """Also where tokens are only counted: without them the number would be another one."""
    shutil.copy(SENTENCEPIECE["v1"], tmp_path)
    tokenizer = require_tokenizer(tmp_path, 10**6)
    model = ServedModel("v1", tokenizer, 512, 16, tokenizer.vocab_size)
    app = http_app_for(
        ScriptedSource([]), model, chat=load_chat_template(tmp_path, tokenizer)
    ).app()
    function = {"name": "weather", "parameters": WEATHER["input_schema"]}

    async with client_for(app) as http:
        for path in ("/v1/messages/count_tokens", "/tokenize"):
            tool = WEATHER if "messages" in path else {"type": "function", "function": function}
            answer = await http.post(path, json={"messages": HELLO, "tools": [tool]})
            assert answer.status_code == 400, path
            assert "this model's chat format has no tools; leave tools out" in answer.text
            assert (await http.post(path, json={"messages": HELLO})).is_success


USE = {"type": "tool_use", "id": "123456789", "name": "f", "input": {}}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": "la " * CONTEXT}]}, "prompt is too long"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "messages[0].content: the model serves text only; images are not supported",
    ),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "tools[0].input_schema"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
        "output_config.format.schema",
    ),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ({"seed": 1}, "seed: this API has none"),
    ({"temperature": -0.1}, "temperature"),
    ({"stop_sequences": "a"}, "stop_sequences"),
    ({"stop_sequence": ["a"]}, "stop_sequence is not a parameter of this endpoint; did you mean"),
    ({"tools": [WEATHER | {"input_shema": {}}]}, "tools[0].input_shema is not a parameter"),
]


@pytest.mark.parametrize(("change", "name"), BAD)
def test_what_is_refused_is_named(
    server: ListeningServer, client: Anthropic, change: dict[str, Any], name: str
) -> None:
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 5} | change
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.post("/v1/messages", body=body, cast_to=object)
    error = refused.value.response.json()
    assert error.keys() == {"type", "error"}
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert name in error["error"]["message"], error
    assert server.source.requested == []


ACCEPTED: list[dict[str, Any]] = [
    *(
        {"metadata": {"user_id": "a"}},
        {"service_tier": "auto"},
        {"service_tier": "standard_only"},
        {"inference_geo": "eu"},
    ),
    *(
        {"cache_control": {"type": "ephemeral", "ttl": "1h"}},
        {"diagnostics": {"previous_message_id": None}},
        {"speed": "standard"},
    ),
    *(
        {"user_profile_id": "a"},
        {"thinking": {"type": "adaptive"}},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    ),
    *(
        {"thinking": {"type": "disabled"}},
        {"container": None},
        {"store": False},
        {"mcp_servers": []},
    ),
    *(
        {"tool_choice": {"type": "auto"}},
        {"tools": [], "tool_choice": {"type": "auto"}},
        {"output_config": {}},
    ),
    {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "Hello!", "cache_control": {"type": "ephemeral"}}
                ],
            }
        ]
    },
]


def _ended_by(*blocks: dict[str, Any]) -> list[dict[str, Any]]:
    return [*HELLO, {"role": "assistant", "content": [*blocks]}, *HELLO]


IGNORED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"stop_sequences": [""]}, ""),
    (
        {},
        {"tools": [{"type": "web_search_20250305", "name": "a"}]},
        "tools[].type=web_search_20250305",
    ),
    ({}, {"output_config": {"effort": "high"}}, "output_config.effort"),
    ({}, {"container": "a", "n": 2, "store": True}, "container, n, store"),
    ({}, {"speed": "fast"}, "speed"),
    ({}, {"context_management": {"edits": []}}, "context_management"),
    (
        {"tools": [WEATHER]},
        {"tools": [WEATHER | {"input_examples": [{}], "max_characters": 5}]},
        "tools[].input_examples, tools[].max_characters",
    ),
    (
        {"messages": _ended_by(USE)},
        {"messages": _ended_by(USE | {"caller": {"type": "code_execution_20260120"}})},
        "messages[].content[].caller",
    ),
    (
        {"messages": _ended_by({"type": "text", "text": "a"})},
        {
            "messages": _ended_by(
                {"type": "redacted_thinking", "data": ""}, {"type": "text", "text": "a"}
            )
        },
        "messages[].content[].type=redacted_thinking",
    ),
]


@pytest.mark.parametrize(("plain", "more", "ignored"), IGNORED)
@pytest.mark.parametrize("stream", [False, True])
def test_what_has_no_effect_is_ignored_and_named(
    server: ListeningServer, plain: Any, more: Any, ignored: str, stream: bool
) -> None:
    basis = {"messages": HELLO, "max_tokens": 5, "stream": stream}
    for body in (plain, more):
        response = _post(server, basis | body)
        assert response.status_code == 200, response.text
    assert response.headers.get("warning", "") == (f'299 - "ignored: {ignored}"' if ignored else "")
    assert server.prompts[0] == server.prompts[1]
    first, second = (specs[0].sampling for specs in server.source.requested)
    assert replace(second, seed=first.seed) == first


@pytest.mark.parametrize(
    "messages",
    [
        [*HELLO, {"role": "assistant", "content": [USE]}],
        [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1"}]}],
        [*HELLO, {"role": "assistant", "content": []}, *HELLO],
        [{"role": "user"}],
        [*HELLO, {"role": "system", "content": "a"}, *HELLO],
    ],
)
def test_no_history_is_refused(server: ListeningServer, messages: Any) -> None:
    response = _post(server, {"messages": messages, "max_tokens": 5})
    assert response.status_code == 200, response.text
    counted = _post(server, {"messages": messages}, "/v1/messages/count_tokens")
    assert counted.json() == {"input_tokens": len(server.prompts[0])}


@pytest.mark.parametrize("more", ACCEPTED)
def test_what_cannot_change_an_answer_is_accepted(
    server: ListeningServer, more: dict[str, Any]
) -> None:
    for body in ({}, more):
        response = _post(server, {"messages": HELLO, "max_tokens": 5} | body)
        assert response.status_code == 200, response.text
    assert server.prompts[0] == server.prompts[1]
    plain, same = (specs[0].sampling for specs in server.source.requested)
    assert replace(same, seed=plain.seed) == plain


def test_calls_and_tools_may_say_who_called(server: ListeningServer) -> None:
    result = {"type": "tool_result", "tool_use_id": USE["id"], "content": "b"}
    for use, tool in (
        (USE, WEATHER),
        (USE | {"caller": {"type": "direct"}}, WEATHER | {"allowed_callers": ["direct"]}),
    ):
        turns = [
            *HELLO,
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ]
        assert (
            _post(server, {"messages": turns, "max_tokens": 5, "tools": [tool]}).status_code == 200
        )
    assert server.prompts[0] == server.prompts[1]


FAILURES: list[tuple[TramontaneError, type[anthropic.APIStatusError], str]] = [
    (OverloadedError("full", 3), anthropic.RateLimitError, "rate_limit_error"),
    (PipelineError("gone"), anthropic.ServiceUnavailableError, "overloaded_error"),
    (
        DrainingError("the server is draining"),
        anthropic.ServiceUnavailableError,
        "overloaded_error",
    ),
    (DeadlineExceededError("too long"), anthropic.InternalServerError, "timeout_error"),
]


@pytest.mark.parametrize(("failure", "kind", "name"), FAILURES)
def test_failures_are_exceptions_of_the_client(
    server: ListeningServer,
    client: Anthropic,
    failure: TramontaneError,
    kind: type[anthropic.APIStatusError],
    name: str,
) -> None:
    server.source.failure = failure
    with pytest.raises(kind) as failed:
        client.messages.create(model="tiny", messages=HELLO, max_tokens=5)
    assert failed.value.response.json()["error"] == {"type": name, "message": str(failure)}


def test_other_errors(server: ListeningServer, client: Anthropic) -> None:
    for call in (client.messages.create, client.messages.count_tokens):
        with pytest.raises(anthropic.NotFoundError):
            call(
                model="claude",
                messages=HELLO,
                **({"max_tokens": 1} if call == client.messages.create else {}),
            )  # type: ignore[operator]
    with (
        Anthropic(api_key="wrong", base_url=server.url, max_retries=0) as other,
        pytest.raises(anthropic.AuthenticationError),
    ):
        other.messages.create(model="tiny", messages=HELLO, max_tokens=1)
    large = [{"role": "user", "content": "a" * 2**17}]
    with pytest.raises(anthropic.ContentTooLargeError) as refused:
        client.messages.create(model="tiny", messages=large, max_tokens=1)  # type: ignore[arg-type]
    assert refused.value.response.json()["error"]["type"] == "request_too_large"
    for path in ("/v1/messages/batches", "/v1/messages/"):
        elsewhere = _post(server, {}, path)
        assert (elsewhere.status_code, elsewhere.json()["error"]["type"]) == (
            404,
            "not_found_error",
        )
    wrong_method = httpx.get(f"{server.url}/v1/messages", headers={"x-api-key": KEY})
    assert (wrong_method.status_code, wrong_method.json()["type"]) == (405, "error")


def test_an_error_within_a_stream_is_its_last_event(
    server: ListeningServer, client: Anthropic
) -> None:
    server.source.failure, server.source.fails_at = PipelineError("gone"), 2
    with pytest.raises(anthropic.APIStatusError) as failed:
        list(client.messages.create(model="tiny", messages=HELLO, max_tokens=5, stream=True))
    assert "gone" in str(failed.value)
    events = parse_events(
        "/v1/messages", _post(server, {"messages": HELLO, "max_tokens": 5, "stream": True}).text
    )
    assert events[-1] == {"type": "error", "error": {"type": "overloaded_error", "message": "gone"}}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": KEY}, 200),
        ({"x-api-key": KEY, "authorization": f"Bearer {KEY}"}, 200),
        ({"x-api-key": KEY, "authorization": "Bearer other"}, 401),
        ({"x-api-key": "other", "authorization": f"Bearer {KEY}"}, 401),
        ({"x-api-key": "other"}, 401),
        ({"x-api-key": f"Bearer {KEY}"}, 401),
        ({}, 401),
    ],
)
def test_keys(server: ListeningServer, headers: dict[str, str], status: int) -> None:
    body = {"messages": HELLO, "max_tokens": 1}
    response = httpx.post(
        f"{server.url}/v1/messages",
        json=body,
        headers=headers | {"anthropic-version": "2023-06-01"},
    )
    assert response.status_code == status
    if status == 401:
        assert response.json()["error"]["type"] == "authentication_error"
    listed = httpx.get(f"{server.url}/v1/models", headers=headers)
    assert listed.status_code == status
