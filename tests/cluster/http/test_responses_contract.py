"""OpenAI's own client over ``/v1/responses``: whole, streamed, tools, schemas, errors; and the same
prompts as those of chats.
"""

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from client_events import parse_events
from event_loops import in_event_loop
from listening_server import CALLED, CONTEXT, KEY, TOWN, ListeningServer, ids_of
from openai import AsyncOpenAI, OpenAI
from openai.types.responses import (
    FunctionToolParam,
    Response,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseReasoningItem,
)
from pydantic import BaseModel
from scripted_token_source import FINGERPRINT, SAID, ScriptedSource, client_for, http_app_for
from thinking_models import thinking_model
from tokenizer_files import THINK

from tramontane.proto.errors import OverloadedError, PipelineError

WEATHER: FunctionToolParam = {
    "type": "function",
    "name": "weather",
    "description": "of a town",
    "parameters": TOWN,
    "strict": True,
}
LOGPROBS = "message.output_text.logprobs"


def test_a_response(server: ListeningServer, client: OpenAI) -> None:
    raw = client.responses.with_raw_response.create(
        model="tiny",
        input="Hello!",
        instructions="Be brief.",
        temperature=0,
        metadata={"who": "me"},
        store=False,
    )
    response = raw.parse()
    Response.model_validate(json.loads(raw.text))
    assert (response.output_text, response.status, response.object) == (
        SAID,
        "completed",
        "response",
    )
    assert (response.incomplete_details, response.error, response.previous_response_id) == (
        None,
        None,
        None,
    )
    assert (response.instructions, response.temperature, response.metadata) == (
        "Be brief.",
        0,
        {"who": "me"},
    )
    assert response.id.startswith("resp_")
    [item] = response.output
    assert isinstance(item, ResponseOutputMessage)
    assert (item.role, item.status, item.id) == (
        "assistant",
        "completed",
        f"msg_{response.id.removeprefix('resp_')}_0",
    )
    assert response.usage is not None
    assert response.usage.input_tokens == len(server.prompts[0])
    assert response.usage.output_tokens == len(server.source.token_ids)
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert raw.headers["x-tramontane-fingerprint"] == FINGERPRINT


def test_an_answer_that_is_cut_off(client: OpenAI) -> None:
    cut = client.responses.create(model="tiny", input="Hello!", max_output_tokens=2)
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    assert isinstance(cut.output[0], ResponseOutputMessage)
    assert cut.output[0].status == "incomplete"
    *_, last = client.responses.create(
        model="tiny", input="Hello!", max_output_tokens=2, stream=True
    )
    assert last.type == "response.incomplete"
    assert last.response.output_text == cut.output_text


def test_an_answer_of_nothing_is_an_empty_message(server: ListeningServer, client: OpenAI) -> None:
    server.says(2)
    response = client.responses.create(model="tiny", input="Hello!")
    assert isinstance(response.output[0], ResponseOutputMessage)
    assert (len(response.output), response.output_text, response.status) == (1, "", "completed")
    with client.responses.stream(model="tiny", input="Hello!") as stream:
        assert stream.get_final_response().output_text == ""


def test_a_streamed_response(client: OpenAI) -> None:
    events = list(client.responses.create(model="tiny", input="Hello!", stream=True))
    kinds = [event.type for event in events]
    opening = [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    ending = [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert (kinds[:4], kinds[-4:]) == (opening, ending)
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))  # type: ignore[union-attr]
    assert (
        "".join(event.delta for event in events if event.type == "response.output_text.delta")
        == SAID
    )
    with client.responses.stream(model="tiny", input="Hello!") as stream:
        assert stream.get_final_response().output_text == SAID


@in_event_loop
async def test_async(server: ListeningServer) -> None:
    async with AsyncOpenAI(api_key=KEY, base_url=f"{server.url}/v1", max_retries=0) as client:
        answers = await asyncio.gather(
            *(client.responses.create(model="tiny", input="Hello!") for _ in range(4))
        )
        assert {answer.output_text for answer in answers} == {SAID}
        assert len({answer.id for answer in answers}) == 4
        stream = await client.responses.create(model="tiny", input="Hello!", stream=True)
        assert [event async for event in stream][-1].type == "response.completed"


def test_tools_are_called_and_their_results_sent_back(
    server: ListeningServer, client: OpenAI
) -> None:
    """The second prompt is that of a chat with the same conversation."""
    server.calls("", CALLED)
    conversation: list[Any] = [{"role": "user", "content": "How is the weather?"}]
    response = client.responses.create(
        model="tiny", input=conversation, tools=[WEATHER], tool_choice="auto"
    )
    assert server.source.requested[0][0].sampling.grammar
    [call] = response.output
    assert isinstance(call, ResponseFunctionToolCall)
    assert (call.status, call.name, json.loads(call.arguments)) == (
        "completed",
        "weather",
        {"town": "Arles"},
    )
    conversation += [
        *response.output,
        {"type": "function_call_output", "call_id": call.call_id, "output": "windy"},
    ]
    server.says(*ids_of(SAID))
    assert (
        client.responses.create(model="tiny", input=conversation, tools=[WEATHER]).output_text
        == SAID
    )
    function = {key: value for key, value in WEATHER.items() if key != "type"}
    called = {"name": "weather", "arguments": call.arguments}
    client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "user", "content": "How is the weather?"},
            {
                "role": "assistant",
                "tool_calls": [{"id": call.call_id, "type": "function", "function": called}],  # type: ignore[typeddict-item]
            },
            {"role": "tool", "tool_call_id": call.call_id, "content": "windy"},
        ],
        tools=[{"type": "function", "function": function}],  # type: ignore[typeddict-item]
    )
    _, ours, chats = server.prompts
    assert ours == chats


def test_tools_in_a_stream(server: ListeningServer, client: OpenAI) -> None:
    two = (
        '[{"name": "weather", "arguments": {"town": "Arles"}}, {"name": "weather", "arguments":'
        ' {"town": "Nice"}}]'
    )
    server.calls("", two)
    events = list(
        client.responses.create(model="tiny", input="Hello!", tools=[WEATHER], stream=True)
    )
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [json.loads(event.arguments)["town"] for event in done] == ["Arles", "Nice"]
    assert [event.output_index for event in done] == [0, 1]
    last = events[-1]
    assert last.type == "response.completed"
    deltas = [
        event.delta
        for event in events
        if event.type == "response.function_call_arguments.delta" and not event.output_index
    ]
    assert isinstance(first := last.response.output[0], ResponseFunctionToolCall)
    assert "".join(deltas) == first.arguments
    added = next(event for event in events if event.type == "response.output_item.added")
    assert isinstance(added.item, ResponseFunctionToolCall)
    assert (added.item.call_id, added.item.id) == (first.call_id, first.id)
    items = [event.item.id for event in events if event.type == "response.output_item.done"]
    assert items == [item.id for item in last.response.output]
    assert len(set(items)) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_of_an_answer_that_is_cut_off_only_the_last_item_is_incomplete(
    server: ListeningServer, client: OpenAI, stream: bool
) -> None:
    server.calls("Well, ", CALLED)
    body: Any = {
        "model": "tiny",
        "input": "Hello!",
        "tools": [WEATHER],
        "max_output_tokens": len(server.source.token_ids) - 4,
    }
    if stream:
        *_, last = client.responses.create(**body, stream=True)
        assert last.type == "response.incomplete"
        response = last.response
    else:
        response = client.responses.create(**body)
    assert [(item.type, item.to_dict()["status"]) for item in response.output] == [
        ("message", "completed"),
        ("function_call", "incomplete"),
    ]


def test_calls_at_the_same_time_are_a_setting(server: ListeningServer, client: OpenAI) -> None:
    for parallel in (True, False):
        client.responses.create(
            model="tiny", input="a", tools=[WEATHER], parallel_tool_calls=parallel
        )
    several, one = (specs[0].sampling.grammar for specs in server.source.requested)
    assert several != one


@pytest.mark.parametrize(
    ("choice", "has_grammar"),
    [("none", False), ("required", True), ({"type": "function", "name": "weather"}, True)],
)
def test_the_choice_of_tools(
    server: ListeningServer, client: OpenAI, choice: Any, has_grammar: bool
) -> None:
    response = client.responses.create(
        model="tiny", input="Hello!", tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False
    )
    assert bool(server.source.requested[0][0].sampling.grammar) == has_grammar
    assert (
        response.tool_choice == choice
        if isinstance(choice, str)
        else response.to_dict()["tool_choice"] == choice
    )
    assert response.parallel_tool_calls is False


class Town(BaseModel):
    name: str


def test_answers_in_json(server: ListeningServer, client: OpenAI) -> None:
    server.says(*ids_of('{"name": "Arles"}'))
    parsed = client.responses.parse(model="tiny", input="Hello!", text_format=Town)
    assert parsed.output_parsed == Town(name="Arles")
    client.responses.create(model="tiny", input="Hello!", text={"format": {"type": "json_object"}})
    client.responses.create(model="tiny", input="Hello!", text={"format": {"type": "text"}})
    assert [bool(specs[0].sampling.grammar) for specs in server.source.requested] == [
        True,
        True,
        False,
    ]
    with client.responses.stream(model="tiny", input="Hello!", text_format=Town) as stream:
        assert stream.get_final_response().output_parsed == Town(name="Arles")


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(server: ListeningServer, client: OpenAI, stream: bool) -> None:
    body: Any = {
        "model": "tiny",
        "input": "Hello!",
        "include": [LOGPROBS],
        "top_logprobs": 2,
        "max_output_tokens": 3,
    }
    if stream:
        events = list(client.responses.create(**body, stream=True))
        reported: list[Any] = [
            token for e in events if e.type == "response.output_text.delta" for token in e.logprobs
        ]
    else:
        [item] = client.responses.create(**body).output
        assert isinstance(item, ResponseOutputMessage)
        assert item.content[0].type == "output_text"
        reported = list(item.content[0].logprobs or ())
    assert [token.logprob for token in reported] == [-0.5] * 3
    assert [[top.logprob for top in token.top_logprobs] for token in reported] == [[-0.5, -1.5]] * 3
    assert server.source.requested[0][0].sampling.logprobs == 2


def test_the_log_probability_of_a_last_token_without_text_is_streamed_too(
    server: ListeningServer, client: OpenAI
) -> None:
    server.says(*ids_of(SAID), 2)
    events = client.responses.create(
        model="tiny", input="Hello!", include=[LOGPROBS], top_logprobs=1, stream=True
    )
    reported = [
        token
        for event in events
        if event.type == "response.output_text.delta"
        for token in event.logprobs
    ]
    assert len(reported) == len(server.source.token_ids)


CONVERSATIONS: list[tuple[Any, str | None, list[Any]]] = [
    ("Hello!", None, [{"role": "user", "content": "Hello!"}]),
    (
        "Hello!",
        "Be brief.",
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}],
    ),
    (
        [
            {
                "role": "developer",
                "content": [
                    {"type": "input_text", "text": "Be"},
                    {"type": "input_text", "text": "brief."},
                ],
            },
            {"type": "message", "role": "user", "content": "Hello!"},
            {
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Hi.", "annotations": []}],
            },
            {"role": "user", "content": "What news?"},
        ],
        None,
        [
            {"role": "developer", "content": "Be\nbrief."},
            {"role": "user", "content": "Hello!"},
            {"role": "assistant", "content": "Hi."},
            {"role": "user", "content": "What news?"},
        ],
    ),
]


@pytest.mark.parametrize(("items", "instructions", "messages"), CONVERSATIONS)
def test_prompts_are_those_of_chats(
    server: ListeningServer,
    client: OpenAI,
    items: Any,
    instructions: str | None,
    messages: list[Any],
) -> None:
    client.responses.create(model="tiny", input=items, instructions=instructions)
    client.chat.completions.create(model="tiny", messages=messages)
    ours, chats = server.prompts
    assert ours == chats
    sampling = [specs[0].sampling for specs in server.source.requested]
    assert sampling[0].max_tokens == sampling[1].max_tokens == CONTEXT - len(ours), (
        "as much as there is room for"
    )


@in_event_loop
async def test_thoughts_are_items_that_can_be_sent_back() -> None:
    thinker = thinking_model("tekken")
    source = ScriptedSource(thinker.say("<think>340 + 51</think>391"))
    app = http_app_for(source, thinker.model, chat=thinker.chat).app()

    http_client = client_for(app)
    async with AsyncOpenAI(
        api_key=KEY, base_url="http://ingress/v1", max_retries=0, http_client=http_client
    ) as client:
        question: Any = {"role": "user", "content": "17 * 23?"}
        answer = await client.responses.create(model="thinker", input=[question])
        thought, message = answer.output
        assert isinstance(thought, ResponseReasoningItem)
        assert thought.content is not None
        assert ([part.text for part in thought.content], answer.output_text) == (
            ["340 + 51"],
            "391",
        )
        assert message.type == "message"
        assert answer.usage is not None
        assert answer.usage.output_tokens_details.reasoning_tokens == 2 + len(
            thinker.text_ids("340 + 51")
        )
        events = [
            event
            async for event in await client.responses.create(
                model="thinker", input=[question], stream=True
            )
        ]
        deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
        assert "".join(deltas) == "340 + 51"
        assert events[-1].type == "response.completed"
        assert events[-1].response.output_text == "391"
        again: Any = [question, *answer.output, question]
        await client.responses.create(model="thinker", input=again)
        reply: Any = {"role": "assistant", "content": "391", "reasoning_content": "340 + 51"}
        await client.chat.completions.create(model="thinker", messages=[question, reply, question])
        ours, chats = (specs[0].prompt_ids for specs in source.requested[-2:])
        assert ours == chats
        assert THINK in ours


# Errors


CALL = {"type": "function_call", "call_id": "abcdefghi", "name": "weather", "arguments": "{}"}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": "a" * 60_000}, "input"),
    ({"input": "la " * CONTEXT}, "input"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content",
    ),
    ({"input": [{"role": "narrator", "content": "a"}]}, "input[0].role"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"background": True}, "background"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    (
        {"tools": [{"type": "function", "name": "f", "parameters": {"type": "string"}}]},
        "tools[0].parameters",
    ),
    (
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}},
        "text.format.schema",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"messages": []}, "messages"),
    ({"seed": 1.5}, "seed"),
    ({"tool": []}, "tool"),
    ({"text": {"formatt": {}}}, "text.formatt"),
    ({"moderation": True}, "moderation"),
    ({"metadata": {str(number): "a" for number in range(17)}}, "metadata"),
    ({"metadata": {"a": "b" * 513}}, "metadata"),
    ({"metadata": {"a" * 65: "b"}}, "metadata"),
    ({"include": ["message.output_text.logprobs"] * 65}, "include"),
    ({"temperature": -0.1}, "temperature"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
]


@pytest.mark.parametrize(("change", "param"), BAD)
def test_what_is_refused_is_named(
    server: ListeningServer, client: OpenAI, change: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.post("/responses", body={"model": "tiny", "input": "a"} | change, cast_to=object)
    assert refused.value.param == param, str(refused.value)
    assert server.source.requested == []


def test_the_conversation_of_a_chat_is_named_as_such(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.post(
            "/responses",
            body={"model": "tiny", "messages": [{"role": "user", "content": "a"}]},
            cast_to=object,
        )
    assert refused.value.param == "messages"
    assert (
        "a conversation is input here; /v1/chat/completions and /v1/messages take messages"
        in str(refused.value)
    )


ACCEPTED: list[dict[str, Any]] = [
    *(
        {name: "a"}
        for name in ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
    ),
    *({"service_tier": tier} for tier in ("auto", "default", "flex", "scale", "priority", "fast")),
    *(
        {"store": False},
        {"background": False},
        {"truncation": "disabled"},
        {"max_tool_calls": 3},
        {"previous_response_id": None},
    ),
    *(
        {"tool_choice": "auto"},
        {"tools": [], "tool_choice": "auto"},
        {"text": {"verbosity": "medium"}},
        {"messages": None},
    ),
    *(
        {"reasoning": {"summary": "auto", "context": "auto", "mode": "standard"}},
        {"include": ["reasoning.encrypted_content"]},
    ),
    *(
        {"prompt_cache_options": {"mode": "explicit"}},
        {"stream_options": {"include_obfuscation": False}},
    ),
    {
        "input": [
            {
                "role": "user",
                "content": [
                    {
                        "type": "input_text",
                        "text": "a",
                        "prompt_cache_breakpoint": {"mode": "explicit"},
                    }
                ],
            }
        ]
    },
]


IGNORED: list[tuple[dict[str, Any], str]] = [
    ({"store": True}, "store"),
    ({"truncation": "auto"}, "truncation"),
    ({"tools": [{"type": "web_search"}]}, "tools[].type=web_search"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ({"n": 2}, "n"),
    ({"reasoning": {"mode": "pro", "context": "all_turns"}}, "reasoning.context, reasoning.mode"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ({"client_metadata": {"a": 1}}, "client_metadata"),
    (
        {
            "input": [
                {"type": "reasoning", "encrypted_content": "x"},
                {"type": "item_reference", "id": "msg_1"},
                {"role": "user", "content": "a"},
            ]
        },
        "input[].encrypted_content, input[].type=item_reference",
    ),
]


@pytest.mark.parametrize(("more", "ignored"), IGNORED)
@pytest.mark.parametrize("stream", [False, True])
def test_what_has_no_effect_is_ignored_and_named(
    server: ListeningServer, client: OpenAI, more: dict[str, Any], ignored: str, stream: bool
) -> None:
    for body in ({}, more):
        raw = client.responses.with_raw_response.create(
            model="tiny", input="a", stream=stream, extra_body=body
        )
        raw.parse()
    assert raw.headers["warning"] == f'299 - "ignored: {ignored}"'
    assert server.prompts[0] == server.prompts[1]
    plain, same = (specs[0].sampling for specs in server.source.requested)
    assert replace(same, seed=plain.seed) == plain


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_what_has_no_effect_may_be_no_number_of_json(server: ListeningServer, number: str) -> None:
    """An answer repeats the tools of its request, without such fields."""
    more = f'"x": {number}, "defer_loading": {number}'
    written = {"type": "grammar", "syntax": "regex", "definition": "a"}
    form = f'{json.dumps(written)[:-1]}, "x": {number}}}'
    tools = [
        f'{{"type": "web_search", {more}}}',
        f'{{"type": "custom", "name": "c", "format": {form}, {more}}}',
        f'{{"type": "function", "name": "f", {more}}}',
        f'{{"type": "namespace", "name": "n", "description": {number}, "tools": ['
        f'{{"type": "function", "name": "g", {more}}}, {{"type": "mcp", {more}}}]}}',
    ]
    response = httpx.post(
        f"{server.url}/v1/responses",
        content=f'{{"input": "a", "metadata": {{"a": "b"}}, "tools": [{", ".join(tools)}]}}',
        headers={"authorization": f"Bearer {KEY}", "content-type": "application/json"},
    )
    assert response.status_code == 200, response.text
    custom, function, namespace = response.json()["tools"]
    assert custom == {"type": "custom", "name": "c", "description": None, "format": written}
    bare = {"description": None, "parameters": None, "strict": None}
    assert function == {"type": "function", "name": "f", **bare}
    assert namespace == {
        **{"type": "namespace", "name": "n"},
        "tools": [{"type": "function", "name": "g", **bare}],
    }


@pytest.mark.parametrize("more", ACCEPTED)
def test_what_cannot_change_an_answer_is_accepted(
    server: ListeningServer, client: OpenAI, more: dict[str, Any]
) -> None:
    for body in ({}, more):
        client.post("/responses", body={"model": "tiny", "input": "a"} | body, cast_to=object)
    assert server.prompts[0] == server.prompts[1]
    plain, same = (specs[0].sampling for specs in server.source.requested)
    assert replace(same, seed=plain.seed) == plain


def test_items_of_calls_may_say_who_called(server: ListeningServer, client: OpenAI) -> None:
    question, result = (
        {"role": "user", "content": "a"},
        {"type": "function_call_output", "call_id": "abcdefghi", "output": "b"},
    )
    more = {"caller": {"type": "direct"}, "namespace": None}
    for extra, name in (({}, {}), (more, {"name": "weather"})):
        items: Any = [question, CALL | extra, result | extra | name]
        client.responses.create(model="tiny", input=items, tools=[WEATHER])
    assert server.prompts[0] == server.prompts[1]


def test_other_errors(server: ListeningServer, client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.responses.create(model="gpt", input="a")
    assert refused.value.param == "model"
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(
            openai.NotFoundError,
            match="this server stores no answers; send the whole conversation as input",
        ):
            call("resp_1")
    with (
        OpenAI(api_key="wrong", base_url=f"{server.url}/v1", max_retries=0) as other,
        pytest.raises(openai.AuthenticationError),
    ):
        other.responses.create(model="tiny", input="a")
    server.source.failure = OverloadedError("full", 3)
    with pytest.raises(openai.RateLimitError):
        client.responses.create(model="tiny", input="a")


def test_an_error_within_a_stream_is_its_last_event(
    server: ListeningServer, client: OpenAI
) -> None:
    server.source.failure, server.source.fails_at = PipelineError("gone"), 2
    events = list(client.responses.create(model="tiny", input="a", stream=True))
    *_, error, last = events
    assert error.type == "error"
    assert (error.message, error.code, error.sequence_number) == (
        "gone",
        "unavailable",
        len(events) - 2,
    )
    assert last.type == "response.failed"
    assert last.sequence_number == len(events) - 1
    assert (last.response.status, last.response.id) == ("failed", events[0].response.id)
    assert last.response.error is not None
    assert (last.response.error.code, last.response.error.message) == ("server_error", "gone")
    assert last.response.output_text == "".join(
        event.delta for event in events if event.type == "response.output_text.delta"
    )
    text = httpx.post(
        f"{server.url}/v1/responses",
        json={"input": "a", "stream": True},
        headers={"authorization": f"Bearer {KEY}"},
    ).text
    assert [event["type"] for event in parse_events("/v1/responses", text)[-2:]] == [
        "error",
        "response.failed",
    ]
