"""Ingresses die while they answer for Responses and Messages, unseen by clients: events are those
of an undisturbed answer.
"""

import json
import re
from typing import Any

import pytest
from client_events import parse_events, texts_of
from event_loops import in_event_loop
from failing_ingress import (
    Client,
    FailingIngresses,
    post_json,
    relay_to,
    resumable_source,
    seeds_of,
)
from scripted_token_source import ScriptedSource, http_app_for
from starlette.types import Receive, Scope, Send
from thinking_models import Kind, thinking_model
from tokenizer_files import SENTENCEPIECE

from tramontane.cluster.http import failover
from tramontane.cluster.http.failover import LOST, NodeAnnouncer
from tramontane.proto.errors import PipelineError
from tramontane.router.openai.served_model import ServedModel
from tramontane.router.tokenization.backends import SentencePieceTokenizer
from tramontane.router.tokenization.mistral_chat import MistralChatTemplate

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TOKENIZER = SentencePieceTokenizer(SENTENCEPIECE["v3"])  # whose format has tools
MODEL = ServedModel("tiny", TOKENIZER, 512, 16, TOKENIZER.vocab_size)
FORMAT = MistralChatTemplate.from_sentencepiece(SENTENCEPIECE["v3"])
CALLS = 5  # [TOOL_CALLS]
CALLED = '[{"name": "w", "arguments": {"in": "Arles"}}, {"name": "x", "arguments": {}}]'


def _ids(text: str) -> tuple[int, ...]:
    return TOKENIZER.encode(text)[1:]


SAYS = _ids("Bon \u00e9t\u00e9 \U0001f642, monde")  # characters of several tokens
ENDS = _ids("one tow, two STOP, three")
CALLING = (*_ids("Well STO"), CALLS, *_ids(CALLED))
FUNCTIONS = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in "wx"]
TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in "wx"]
HELLO = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 100}
SCORED = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}

CASES: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "response": (
        RESPONSES,
        SAYS,
        {"input": "Hello!", "instructions": "Be brief.", "metadata": {"a": "b"}},
    ),
    "response, cut off": (RESPONSES, SAYS, {"input": "Hello!", "max_output_tokens": 6}),
    "response, scored": (RESPONSES, SAYS, {"input": "Hello!", **SCORED}),
    "response, calls": (RESPONSES, CALLING, {"input": "Hello!", "tools": FUNCTIONS, **SCORED}),
    "response, call cut off": (
        RESPONSES,
        CALLING,
        {"input": "Hello!", "tools": FUNCTIONS, "max_output_tokens": 22},
    ),
    "message": (MESSAGES, SAYS, HELLO),
    "message, cut off": (MESSAGES, SAYS, HELLO | {"max_tokens": 6}),
    "message, stops": (MESSAGES, ENDS, HELLO | {"stop_sequences": ["STOP", "town"]}),
    "message, calls": (MESSAGES, CALLING, HELLO | {"tools": TOOLS, "stop_sequences": ["STOP"]}),
}
# Thoughts in their order: more than one, after text, and with text that may be a stop string before
# them.
THOUGHT = (
    "<think>One \u00e9t\u00e9 STOP,\n</think>\n\ntwo \U0001f642<think> three </think> four STO"
)
THINKERS: dict[str, Kind] = {
    "response, thoughts": "tekken",
    "response, thoughts, scored": "tekken",
    "response, thought cut off": "tekken",
    "response, thoughts as text": "text",
    "message, thoughts": "tekken",
    "message, thoughts as text": "text",
}
for name, kind in THINKERS.items():
    said = thinking_model(kind).say(THOUGHT)
    path = RESPONSES if name.startswith("response") else MESSAGES
    more = (
        SCORED
        if name.endswith("scored")
        else {"max_output_tokens": 4}
        if name.endswith("cut off")
        else {}
    )
    CASES[name] = (
        path,
        said,
        {"input": "Hello!", **more} if path == RESPONSES else HELLO | {"stop_sequences": ["STOP"]},
    )
# The type of each item or block, and its content.
CONTENTS: dict[str, list[tuple[str, str]]] = {
    "response": [("message", TOKENIZER.decode(SAYS).lstrip())],
    "response, cut off": [("message", TOKENIZER.decode(SAYS[:6]).lstrip())],
    "response, scored": [("message", TOKENIZER.decode(SAYS).lstrip())],
    "response, calls": [
        ("message", "Well STO"),
        ("function_call", '{"in": "Arles"}'),
        ("function_call", "{}"),
    ],
    "response, thoughts": [
        ("reasoning", "One \u00e9t\u00e9 STOP,\n"),
        ("message", "\n\ntwo \U0001f642"),
        ("reasoning", "\n three "),
        ("message", " four STO"),
    ],
    "message": [("text", TOKENIZER.decode(SAYS).lstrip())],
    "message, cut off": [("text", TOKENIZER.decode(SAYS[:6]).lstrip())],
    "message, stops": [("text", "one tow, two ")],
    "message, calls": [("text", "Well STO"), ("tool_use", '{"in": "Arles"}'), ("tool_use", "{}")],
}


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover, "ATTEMPT_PAUSES_S", (0.0, 0.0, 0.0))


async def _ask(
    case: str, lives: tuple[int, ...], *, stream: bool
) -> tuple[Client, FailingIngresses, ScriptedSource]:
    path, token_ids, body = CASES[case]
    source = resumable_source(token_ids)
    app = http_app_for(source, MODEL, chat=FORMAT).app()
    if case in THINKERS:
        thinker = thinking_model(THINKERS[case])
        app = http_app_for(source, thinker.model, chat=thinker.chat).app()
    ingresses = FailingIngresses(NodeAnnouncer(app, "node", "a model"), lives)
    client = await post_json(relay_to(ingresses), path, body | {"stream": stream})
    assert (client.status, client.is_answered) == (200, True)
    return client, ingresses, source


def _without_chance(client: Client) -> str:
    """The answer's name, which is the same in all of it, its age, and ids of calls, which follow
    from the name.
    """
    text = client.text
    assert len(set(re.findall(r"(?:resp|msg)_([0-9a-f]{32})", text))) == 1
    text = re.sub(r"[0-9a-f]{32}", "ID", text)
    calls = re.findall(r'"(?:call_)?id":"([a-zA-Z0-9]{9})"', text)
    for number, call in enumerate(dict.fromkeys(calls)):
        text = text.replace(call, f"call {number}")
    text = re.sub(r'"sequence_number":\d+', '"sequence_number":0', text)
    return re.sub(r'"created_at":\d+', '"created_at":0', text)


def _check_numbers(events: list[dict[str, Any]], *, consecutive: bool) -> None:
    numbers = [event["sequence_number"] for event in events if "sequence_number" in event]
    assert numbers == sorted(set(numbers)), "they increase"
    if consecutive and numbers:
        assert numbers == list(range(len(events)))


async def _check(case: str, lives: tuple[int, ...]) -> int:
    """Returns how many messages an undisturbed answer has."""
    path = CASES[case][0]
    undisturbed, _, _ = await _ask(case, (), stream=True)
    _check_numbers(parse_events(path, undisturbed.text), consecutive=True)
    client, ingresses, source = await _ask(case, lives, stream=True)
    assert _without_chance(client) == _without_chance(undisturbed)
    events = parse_events(path, client.text)
    _check_numbers(events, consecutive=False)
    if case in CONTENTS:
        starts = [
            event.get("item") or event["content_block"]
            for event in events
            if event["type"] in STARTS
        ]
        texts = texts_of(events)
        assert [(start["type"], texts[index]) for index, start in enumerate(starts)] == CONTENTS[
            case
        ]
    assert ingresses.num_calls == 1 + len(lives)
    assert len(seeds_of(source)) == 1, "drawn once"
    return len(undisturbed.messages)


STARTS = ("response.output_item.added", "content_block_start")


@pytest.mark.parametrize("case", CASES)
@in_event_loop
async def test_a_stream_of_events_survives_an_ingress_that_dies_at_any_of_its_messages(
    case: str,
) -> None:
    for life in range(await _check(case, ())):
        await _check(case, (life,))


@pytest.mark.parametrize("case", CASES)
@in_event_loop
async def test_a_stream_of_events_survives_the_loss_of_an_ingress_for_each_of_its_pieces(
    case: str,
) -> None:
    num_messages = await _check(case, ())
    await _check(case, (2,) * (num_messages - 2))
    await _check(case, (0, 1, 0, 2, 0, 1))


@pytest.mark.parametrize("case", CASES)
@in_event_loop
async def test_a_whole_answer_of_blocks_continues_where_its_proxy_knows_it_to_be(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failover, "PROGRESS_INTERVAL_S", 0.0)

    undisturbed, _, _ = await _ask(case, (), stream=False)
    for lives in ((0,), (1,), (3,), (1, 2)):
        client, ingresses, _ = await _ask(case, lives, stream=False)
        assert _without_chance(client) == _without_chance(undisturbed)
        assert ingresses.num_calls == 1 + len(lives)


@pytest.mark.parametrize("case", CASES)
@in_event_loop
async def test_a_stream_ends_with_what_the_whole_answer_is(case: str) -> None:
    whole = json.loads(_without_chance((await _ask(case, (), stream=False))[0]))
    client, _, _ = await _ask(case, (4,), stream=True)
    *_, last = parse_events(CASES[case][0], _without_chance(client))
    if "response" in last:
        for item in whole["output"]:
            for part in item.get("content", ()):
                # which came with the deltas
                part |= {"logprobs": []} if "logprobs" in part else {}
        assert last["response"] == whole


@pytest.mark.parametrize("later", [0, 1], ids=["none answers", "another model refuses"])
@pytest.mark.parametrize("case", ["response", "message"])
@in_event_loop
async def test_a_stream_that_no_ingress_can_continue_ends_with_an_error_of_its_api(
    case: str, later: int
) -> None:
    path, token_ids, body = CASES[case]
    dying = {"failure": PipelineError("gone"), "failing_requests": range(1, 99)}
    apps = [
        NodeAnnouncer(http_app_for(source, MODEL, chat=FORMAT).app(), "node", mark)
        for mark in "ab"
        for source in [resumable_source(token_ids, **dying)]
    ]
    turns = iter([apps[0]])

    async def rolled_in(scope: Scope, receive: Receive, send: Send) -> None:
        await next(turns, apps[later])(scope, receive, send)

    ingresses = FailingIngresses(rolled_in, (3,))
    client = await post_json(relay_to(ingresses), path, body | {"stream": True})
    assert client.is_answered
    events = parse_events(path, client.text)
    _check_numbers(events, consecutive=False)
    last = events[-1]
    assert last["type"] == "error"
    assert (last["message"] if path == RESPONSES else last["error"]["message"]) == LOST


@pytest.mark.parametrize("case", ["response", "message"])
@in_event_loop
async def test_a_whole_answer_that_no_ingress_can_make_is_an_error_of_its_api(case: str) -> None:
    path, _, body = CASES[case]
    source = resumable_source(CASES[case][1])
    ingresses = FailingIngresses(http_app_for(source, MODEL, chat=FORMAT).app(), (0,) * 30)
    client = await post_json(relay_to(ingresses), path, body)
    assert client.status == 503
    error = json.loads(client.text)
    message = {"type": "error", "error": {"type": "overloaded_error", "message": LOST}}
    openai = {
        "error": {"message": LOST, "type": "server_error", "param": None, "code": "unavailable"},
        "message": LOST,
    }
    assert error == (openai if path == RESPONSES else message)
