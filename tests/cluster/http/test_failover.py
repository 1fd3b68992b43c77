"""Ingresses die while they answer, unseen by clients: the bytes are those of an undisturbed answer.
Without Ray.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from typing import Any

import pytest
from event_loops import in_event_loop
from failing_ingress import (
    Client,
    FailingIngresses,
    post_json,
    relay_to,
    resumable_source,
    seeds_of,
)
from running_router import new_scheduler, running
from scripted_chain import StatefulChain
from scripted_token_source import ScriptedSource, http_app_for
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from thinking_models import Kind, thinking_model
from tokenizer_files import SENTENCEPIECE

from tramontane.cluster.common import node_watch as lost_nodes
from tramontane.cluster.http import failover
from tramontane.cluster.http import failover as whole_answers
from tramontane.cluster.http.failover import LOST, FailoverMiddleware, NodeAnnouncer
from tramontane.proto.errors import (
    OverloadedError,
    PipelineError,
    PoisonRequestError,
    TramontaneError,
)
from tramontane.router.engine.router import Router
from tramontane.router.openai.served_model import ServedModel
from tramontane.router.tokenization.backends import SentencePieceTokenizer
from tramontane.router.tokenization.mistral_chat import MistralChatTemplate

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOKENIZER = SentencePieceTokenizer(SENTENCEPIECE["v3"])  # whose format has tools
MODEL = ServedModel("tiny", TOKENIZER, 512, 16, TOKENIZER.vocab_size)
FORMAT = MistralChatTemplate.from_sentencepiece(SENTENCEPIECE["v3"])
CALLS = 5  # [TOOL_CALLS]
CALLED = '[{"name": "w", "arguments": {"in": "Arles"}}, {"name": "x", "arguments": {}}]'
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in "wx"
]
USAGE = {"stream_options": {"include_usage": True}}
COUNTS = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
HELLO = {"messages": [{"role": "user", "content": "Hello!"}]}


def _ids(text: str) -> tuple[int, ...]:
    return TOKENIZER.encode(text)[1:]


SAYS = _ids("Bon \u00e9t\u00e9 \U0001f642, monde")  # characters of several tokens
ENDS = _ids("one tow, two STOP, three")
CALLING = (*_ids("STO"), CALLS, *_ids(CALLED))

CASES: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "text": (
        COMPLETIONS,
        SAYS,
        {"prompt": "Hello", "max_tokens": 100, **USAGE, "return_token_ids": True},
    ),
    "length": (COMPLETIONS, SAYS, {"prompt": "Hello", "max_tokens": 6, **USAGE}),
    "stops": (
        COMPLETIONS,
        ENDS,
        {"prompt": "Hello", "max_tokens": 100, "stop": ["STOP", "town"], "logprobs": 1, **USAGE},
    ),
    "choices": (
        COMPLETIONS,
        ENDS,
        {
            "prompt": ["Hello", "You"],
            "n": 2,
            "max_tokens": 9,
            "stop": "two",
            "logprobs": 0,
            **USAGE,
        },
    ),
    "echo": (
        COMPLETIONS,
        SAYS,
        {"prompt": ["Hello", "You"], "n": 2, "max_tokens": 5, "echo": True, "logprobs": 1},
    ),
    "score": (
        COMPLETIONS,
        SAYS,
        {"prompt": "Hello", "max_tokens": 0, "echo": True, "logprobs": 1, **USAGE},
    ),
    "chat": (CHAT, SAYS, HELLO | {"n": 2, **USAGE}),
    "chat, stops": (
        CHAT,
        ENDS,
        HELLO | {"stop": ["STOP", "town"], "logprobs": True, "top_logprobs": 1, **USAGE},
    ),
    "fim": ("/v1/fim/completions", SAYS, {"prompt": "Hello", "suffix": "You", "n": 2, **USAGE}),
    "prefix": (
        CHAT,
        SAYS,
        {
            "messages": [*HELLO["messages"], {"role": "assistant", "content": "a", "prefix": True}],
            **COUNTS,
        },
    ),
    "stop tokens": (
        CHAT,
        SAYS,
        HELLO | {"n": 2, "stop_token_ids": [SAYS[-1]], "logprobs": True, **USAGE},
    ),
    "tools": (CHAT, CALLING, HELLO | {"tools": TOOLS, "stop": ["STOP"], "logprobs": True, **USAGE}),
}

# Models that think: the answers of several choices begin at other tokens, of which the first begins
# a thought.
THINKERS: dict[str, Kind] = {
    **{
        "thoughts": "tekken",
        "thoughts, stops": "tekken",
        "thoughts as text": "text",
        "thoughts, stop token": "tekken",
    }
}
# the second choice ends a token earlier, in its thought
STOPPED = thinking_model("tekken").say("a<think>One, two, three")
THOUGHT = (
    "<think>One \u00e9t\u00e9 STOP,\n</think>\n\ntwo \U0001f642<think> three </think> four STOP"
    " five"
)
CASES |= {
    "thoughts": (
        CHAT,
        thinking_model("tekken").say(THOUGHT),
        HELLO | {"n": 2, **USAGE, "return_token_ids": True},
    ),
    "thoughts, stops": (
        CHAT,
        thinking_model("tekken").say(THOUGHT),
        HELLO | {"stop": ["STOP"], "logprobs": True, **USAGE},
    ),
    "thoughts as text": (
        CHAT,
        thinking_model("text").say(THOUGHT),
        HELLO | {"n": 2, "stop": ["STOP"], "logprobs": True, "top_logprobs": 1, **USAGE},
    ),
    "thoughts, stop token": (
        CHAT,
        STOPPED,
        HELLO | {"n": 2, "stop_token_ids": [STOPPED[-1]], "logprobs": True, **USAGE},
    ),
}
# After how many messages ingresses die that know of calls, of thoughts, and of a choice that has
# ended.
LATER = {"tools": [(15,), (8, 20)], **{name: [(7,), (5, 4)] for name in THINKERS}}
LATER |= {"thoughts, stop token": [(len(STOPPED) - 1,), (3, 1)]}


MARK = "a model"


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover, "ATTEMPT_PAUSES_S", (0.0, 0.0, 0.0))


def _ingress(source: Any, case: str = "") -> ASGIApp:
    if case not in THINKERS:
        return http_app_for(source, MODEL, chat=FORMAT).app()
    thinker = thinking_model(THINKERS[case])
    return http_app_for(source, thinker.model, chat=thinker.chat).app()


def _relayed(
    source: Any, lives: tuple[int, ...] = (), case: str = ""
) -> tuple[FailoverMiddleware, FailingIngresses]:
    ingresses = FailingIngresses(_ingress(source, case), lives)
    return relay_to(ingresses), ingresses


def _without_chance(text: str) -> str:
    """The answer's name, its age and where its time went, and ids of calls; the first two are the
    same in all of an answer.
    """
    assert (
        len(set(re.findall(r'"id":"(\w+-\w+)"', text)))
        == len(set(re.findall(r'"created":(\d+)', text)))
        == 1
    )
    for pattern in (r'"id":"\w{9}"', r'"id":"\w+-\w+"', r'"created":\d+', r'"timings":\{[^}]*\}'):
        text = re.sub(pattern, pattern.partition(":")[0], text)
    return text


async def _check(case: str, lives: tuple[int, ...], *, stream: bool) -> int:
    """Returns how many messages an undisturbed answer has."""
    path, token_ids, body = CASES[case]
    body = (
        body | {"stream": True}
        if stream
        else {name: body[name] for name in body if name != "stream_options"}
    )
    immortal, _ = _relayed(resumable_source(token_ids), case=case)
    undisturbed = await post_json(immortal, path, body)
    source = resumable_source(token_ids)
    relay, ingresses = _relayed(source, lives, case)
    client = await post_json(relay, path, body)
    assert client.is_answered
    assert client.status == undisturbed.status == 200
    assert _without_chance(client.text) == _without_chance(undisturbed.text)
    assert ingresses.num_calls == 1 + len(lives)
    assert len(seeds_of(source)) == 1, "drawn once"
    return len(undisturbed.messages)


@pytest.mark.parametrize("case", CASES)
@in_event_loop
async def test_a_stream_survives_an_ingress_that_dies_at_any_of_its_messages(case: str) -> None:
    for life in range(await _check(case, (), stream=True)):
        await _check(case, (life,), stream=True)


@pytest.mark.parametrize("case", CASES)
@in_event_loop
async def test_a_stream_survives_the_loss_of_an_ingress_for_each_of_its_pieces(case: str) -> None:
    num_messages = await _check(case, (), stream=True)
    await _check(case, (2,) * (num_messages - 2), stream=True)
    await _check(case, (0, 1, 0, *((2, 0, 1) if num_messages > 3 else ())), stream=True)


@pytest.mark.parametrize("case", CASES)
@in_event_loop
async def test_a_whole_answer_survives_ingresses_that_die_before_it_is_there(case: str) -> None:
    for lives in ((0,), (1,), (1, 0, 1)):
        await _check(case, lives, stream=False)


def _full_after_one(token_ids: Sequence[int]) -> ScriptedSource:
    """It refuses new requests after the first."""
    return resumable_source(token_ids, refusal=OverloadedError("full", 3), capacity=1)


@pytest.mark.parametrize("case", CASES)
def test_a_whole_answer_continues_where_its_proxy_knows_it_to_be(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_answers, "PROGRESS_INTERVAL_S", 0.0)
    path, token_ids, body = CASES[case]
    body = {name: body[name] for name in body if name != "stream_options"}

    async def scenario() -> None:
        undisturbed = await post_json(
            _relayed(resumable_source(token_ids), case=case)[0], path, body
        )
        for lives in ((), (1,), (2,), (1, 2), *LATER.get(case, [])):
            source = _full_after_one(token_ids)
            ingresses = FailingIngresses(NodeAnnouncer(_ingress(source, case), "node", MARK), lives)
            client = await post_json(relay_to(ingresses), path, body)
            assert (client.status, client.is_answered) == (200, True)
            assert _without_chance(client.text) == _without_chance(undisturbed.text)
            assert ingresses.num_calls == len(source.requests) == 1 + len(lives)
            first, *others = [
                sum(len(each.output_ids) for each in request.sequences)
                for request in source.requests
            ]
            assert first == 0
            assert all(others), "they begin further on"

    if case != "score":  # which has one token
        asyncio.run(scenario())


@pytest.mark.parametrize("lives", [(1,), (2, 1), (1, 1, 3)])
@in_event_loop
async def test_another_model_makes_the_whole_of_an_answer_of_which_nothing_was_sent(
    lives: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_answers, "PROGRESS_INTERVAL_S", 0.0)

    sources = [_full_after_one(SAYS), _full_after_one(ENDS)]
    apps = [
        NodeAnnouncer(_ingress(source), "node", mark)
        for source, mark in zip(sources, "ab", strict=True)
    ]

    async def rolled_in(scope: Scope, receive: Receive, send: Send) -> None:
        await apps[ingresses.num_calls > 1](scope, receive, send)

    ingresses = FailingIngresses(rolled_in, lives)
    client = await post_json(
        relay_to(ingresses), COMPLETIONS, {"prompt": "Hello", "max_tokens": 100}
    )
    assert json.loads(client.text)["choices"][0]["text"] == TOKENIZER.decode(ENDS)
    assert [each.output_ids for each in sources[1].requests[0].sequences] == [()]


# ---- with a router, which knows what of log-probabilities and experts is known already

DETAILS = {"prompt_logprobs": 0, "logprobs": 0, "return_experts": [3], "return_token_ids": True}


def _router() -> AbstractAsyncContextManager[Router]:
    return running(Router(new_scheduler(), StatefulChain(experts={3: 0}, logprobs=True)))


async def _whole(lives: tuple[int, ...]) -> list[dict[str, Any]]:
    """As ``_streamed_details``, but not streamed."""
    async with _router() as router:
        model = replace(MODEL, vocab_size=1000, expert_layers=range(4), experts_per_token=1)
        ingresses = FailingIngresses(
            NodeAnnouncer(http_app_for(router, model).app(), "node", MARK), lives
        )
        relay = relay_to(ingresses)
        client = await post_json(
            relay,
            COMPLETIONS,
            {"prompt": [[7, 8, 9], [9]], "n": 2, "max_tokens": 7, "seed": 1, **DETAILS},
        )
        choices: list[dict[str, Any]] = json.loads(client.text)["choices"]
        return choices


@pytest.mark.parametrize(
    ("max_bytes", "all_lives"),
    [
        (2**18, [(1,), (2,), (1, 1, 2), (3, 1), (1, 1, 1, 1)]),
        (0, [(1,), (4,), (3, 1)]),
        (300, [(1,), (4,), (3, 1)]),
    ],
)
@in_event_loop
async def test_log_probabilities_and_experts_of_a_whole_answer_are_those_of_any_number_of_ingresses(
    max_bytes: int, all_lives: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many are reported: what is not is computed again."""
    monkeypatch.setattr(whole_answers, "PROGRESS_INTERVAL_S", 0.0)
    monkeypatch.setattr(whole_answers, "MAX_PROGRESS_BYTES", max_bytes)

    undisturbed = await _whole(())
    for lives in all_lives:
        assert await _whole(lives) == undisturbed


@pytest.mark.parametrize(
    ("over", "num_reported"), [((0, 0, 0), 3), ((0, 1, 0), 1), ((1, 0, 0), 0), ((0, 0, 1), 2)]
)
def test_no_more_progress_is_reported_after_an_interval_with_too_many_log_probabilities(
    over: tuple[int, ...], num_reported: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is reported is always the beginning of the answer. ``over``: bytes above the bound, by
    interval.
    """
    monkeypatch.setattr(whole_answers, "PROGRESS_INTERVAL_S", 0.0)
    sent: list[Any] = []

    async def send(message: Message) -> None:
        sent.extend(message["updates"])

    async def scenario() -> None:
        report = whole_answers.ProgressReporter(send)
        for token_id, num_bytes in enumerate(over):
            await report(
                [(0, [token_id], None, [])], [], whole_answers.MAX_PROGRESS_BYTES + num_bytes
            )
        if num_reported < len(over):
            await report([(0, [9], None, [])], [], 0)

    asyncio.run(scenario())
    assert [ids for _, ids, _, _ in sent] == [[token_id] for token_id in range(num_reported)]


async def _streamed_details(lives: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return all details of each choice, merged; without text, as the tokens make none."""
    async with _router() as router:
        model = replace(MODEL, vocab_size=1000, expert_layers=range(4), experts_per_token=1)
        relay = relay_to(FailingIngresses(http_app_for(router, model).app(), lives))
        body = {
            "prompt": [[7, 8, 9], [9]],
            "n": 2,
            "max_tokens": 7,
            "stream": True,
            "seed": 1,
            **DETAILS,
        }
        client = await post_json(relay, COMPLETIONS, body)
        assert client.is_answered
        assert client.text.endswith("data: [DONE]\n\n")
        choices: list[dict[str, Any]] = [{} for _ in range(4)]
        for event in client.text.split("\n\n")[:-2]:
            for change in json.loads(event.removeprefix("data: "))["choices"]:
                _add(choices[change["index"]], change)
        while not router.scheduler.is_idle:
            await asyncio.sleep(0)
        router.scheduler.check_integrity()
        return choices


def _add(whole: dict[str, Any], part: dict[str, Any]) -> None:
    for name, value in part.items():
        if isinstance(value, dict):
            _add(whole.setdefault(name, {}), value)
        elif isinstance(value, list):
            whole[name] = whole.get(name, []) + value
        elif name == "finish_reason" and value is not None:
            whole[name] = value


@in_event_loop
async def test_log_probabilities_and_experts_are_sent_once_by_any_number_of_ingresses() -> None:
    undisturbed = await _streamed_details(())
    assert [len(choice["experts"]["3"]) for choice in undisturbed] == [6] * 4
    for lives in ((2,), (3, 2), (2, 2, 0, 2), (5, 1, 2)):
        assert await _streamed_details(lives) == undisturbed


# ---- what is not an ingress's death, and ingresses that do not exist


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (OverloadedError("full", 3), 429),
        (PipelineError("gone"), 503),
        (PoisonRequestError("no"), 400),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
@in_event_loop
async def test_the_answer_of_the_first_ingress_stands(
    failure: TramontaneError, status: int, stream: bool
) -> None:
    relay, ingresses = _relayed(ScriptedSource(failure=failure))
    client = await post_json(relay, COMPLETIONS, {"prompt": "Hello", "stream": stream})
    assert (client.status, client.is_answered, ingresses.num_calls) == (status, True, 1)
    relay, ingresses = _relayed(ScriptedSource(SAYS, failure, fails_at=2))
    client = await post_json(relay, COMPLETIONS, {"prompt": "Hello", "stream": True})
    assert client.is_answered
    assert (client.text.count("data: "), client.text.count('"error"'), ingresses.num_calls) == (
        3,
        1,
        1,
    )


def _failing(failure: TramontaneError, num_times: int) -> ScriptedSource:
    """It fails so often, from the second request on."""
    return resumable_source(SAYS, failure=failure, failing_requests=range(1, 1 + num_times))


@pytest.mark.parametrize("failure", [OverloadedError("full", 3), PipelineError("gone")])
@pytest.mark.parametrize("stream", [False, True])
@in_event_loop
async def test_an_ingress_that_is_to_continue_is_tried_again_where_it_is_full_or_failing(
    failure: TramontaneError, stream: bool
) -> None:
    relay, ingresses = _relayed(_failing(failure, 2), (3 if stream else 1,))
    client = await post_json(relay, COMPLETIONS, {"prompt": "Hello", "stream": stream})
    assert (client.status, client.is_answered, ingresses.num_calls) == (200, True, 4)
    relay, ingresses = _relayed(_failing(failure, 9), (3 if stream else 1,))
    client = await post_json(relay, COMPLETIONS, {"prompt": "Hello", "stream": stream})
    assert client.is_answered
    assert ingresses.num_calls == 1 + 3
    error = {"message": LOST, "type": "server_error", "param": None, "code": "unavailable"}
    assert json.loads(
        client.text.split("\n\n")[-2].removeprefix("data: ") if stream else client.text
    ) == {"error": error, "message": LOST}
    assert client.status == (200 if stream else 503)


@pytest.mark.parametrize("stream", [False, True])
@in_event_loop
async def test_an_ingress_that_refuses_after_long_has_tried_for_all_others(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them would try for minutes, and a client would wait for hours."""
    loop, source = asyncio.get_running_loop(), _failing(PipelineError("gone"), 99)
    real_time = loop.time
    monkeypatch.setattr(loop, "time", lambda: real_time() + 600.0 * len(source.requests))
    app = NodeAnnouncer(_ingress(source), "node", MARK)
    ingresses = FailingIngresses(app, (3 if stream else 1,))
    client = await post_json(
        relay_to(ingresses), COMPLETIONS, {"prompt": "Hello", "stream": stream}
    )
    assert client.is_answered
    assert LOST in client.text
    assert ingresses.num_calls == 2


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("stream", "life"), [(False, 0), (False, 1), (True, 0), (True, 2)])
@in_event_loop
async def test_an_answer_keeps_its_admission_when_its_ingress_dies(
    path: str, stream: bool, life: int
) -> None:
    """Also where nothing has been sent to its client."""
    source = _full_after_one(SAYS)
    ingresses = FailingIngresses(NodeAnnouncer(_ingress(source), "node", MARK), (life,))
    relay = relay_to(ingresses)
    body = {"prompt": "Hello"} if path == COMPLETIONS else HELLO
    client = await post_json(relay, path, body | {"stream": stream})
    assert (client.status, client.is_answered) == (200, True)
    assert [request.already_admitted for request in source.requests] == [False, True]


@in_event_loop
async def test_a_request_to_an_ingress_that_was_dead_already_is_new_to_the_next() -> None:
    """An ingress that dies under load must not let later requests past the limits of the next
    one.
    """
    source = _full_after_one(SAYS)
    source.capacity = 0  # another request has it
    relay, ingresses = _relayed(source, (0,))
    client = await post_json(relay, COMPLETIONS, {"prompt": "Hello"})
    assert source.requests == []
    assert (client.status, ingresses.num_calls) == (429, 2)


@in_event_loop
async def test_the_deadline_of_a_client_counts_from_its_request_and_not_from_the_next_ingress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, later = asyncio.get_running_loop(), 0.0
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + later)
    ingresses = FailingIngresses(_ingress(resumable_source(SAYS)), (0,))

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal later
        await ingresses(scope, receive, send)
        later += 40.0

    body = {"prompt": "Hello"}
    for seconds, status in ((100, 200), (30, 504)):
        ingresses.num_calls = 0
        client = await post_json(
            relay_to(slow), COMPLETIONS, body, {"x-request-timeout": str(seconds)}
        )
        assert (client.status, ingresses.num_calls) == (status, 2)


@pytest.mark.parametrize("stream", [False, True])
@in_event_loop
async def test_an_application_that_is_being_deployed_again_is_waited_for(stream: bool) -> None:
    """Ray Serve says that there is no such path."""
    ingress = _ingress(resumable_source(SAYS))
    _, ingresses = _relayed(resumable_source(SAYS), (2 if stream else 0,))

    async def no_application(scope: Scope, receive: Receive, send: Send) -> None:
        is_there = ingresses.num_calls != 1
        ingresses.num_calls += not is_there
        await (ingresses if is_there else PlainTextResponse("not found", 404))(scope, receive, send)

    body = {"prompt": "Hello", "stream": stream}
    client = await post_json(relay_to(no_application), COMPLETIONS, body)
    undisturbed = await post_json(ingress, COMPLETIONS, body)
    assert (client.status, client.is_answered, ingresses.num_calls) == (200, True, 3)
    assert _without_chance(client.text) == _without_chance(undisturbed.text)


@in_event_loop
async def test_what_another_ingress_refuses_ends_a_stream() -> None:
    relay, ingresses = _relayed(_failing(PoisonRequestError("no more"), 1), (3,))
    client = await post_json(relay, COMPLETIONS, {"prompt": "Hello", "stream": True})
    assert client.is_answered
    assert (
        json.loads(client.text.split("\n\n")[-2].removeprefix("data: "))["error"]["message"]
        == "no more"
    )
    assert ingresses.num_calls == 2


@pytest.mark.parametrize("num_parts", [0, 1, 2])
@in_event_loop
async def test_the_next_ingress_reads_the_whole_body_however_much_of_it_the_first_has_read(
    num_parts: int,
) -> None:
    read: list[bytes] = []

    async def dying(scope: Scope, receive: Receive, send: Send) -> None:
        if not read:
            read.append(b"".join([(await receive())["body"] for _ in range(num_parts)]))
            return
        read.append(await Request(scope, receive).body())
        await JSONResponse({})(scope, receive, send)

    client = Client(b"0123456789")
    await client.send_to(relay_to(dying), COMPLETIONS)
    assert read == [client.body[: 5 * num_parts], client.body]
    assert client.is_answered


@in_event_loop
async def test_a_body_that_comes_byte_by_byte_is_kept_in_one_piece() -> None:
    """A message for each of its bytes would take hundreds of times as much, and bodies have room by
    their bytes.
    """
    read: list[list[Message]] = []

    async def dying(_scope: Scope, receive: Receive, send: Send) -> None:
        read.append([await receive()])
        while read[-1][-1]["more_body"]:
            read[-1].append(await receive())
        if len(read) > 1:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    parts = iter(range(100))

    async def receive() -> Message:
        number = next(parts)
        return {"type": "http.request", "body": bytes([number]), "more_body": number < 99}

    scope = {
        "type": "http",
        "method": "POST",
        "path": COMPLETIONS,
        "headers": [],
        "query_string": b"",
        "root_path": "",
    }
    await relay_to(dying)(scope, receive, Client(b"").send)
    assert [len(messages) for messages in read] == [100, 1]
    assert read[1][0]["body"] == bytes(range(100))


@in_event_loop
async def test_a_client_that_has_left_is_not_answered_by_another_ingress() -> None:
    client, num_requests = Client(b'{"prompt": "Hello"}'), 0

    async def as_ray_serve(_scope: Scope, receive: Receive, _send: Send) -> None:
        nonlocal num_requests
        num_requests += 1
        while (await receive())["type"] != "http.disconnect":
            client.disconnects.set()

    await client.send_to(relay_to(as_ray_serve), COMPLETIONS)
    assert (num_requests, client.messages) == (1, [])


@pytest.mark.parametrize(
    ("bound", "first_size", "num_requests"),
    [("MAX_BODY", 41, [1, 2, 2]), ("MAX_BODIES", 30, [2, 1, 2])],
)
@in_event_loop
async def test_bodies_beyond_a_bound_pass_and_are_not_kept(
    monkeypatch: pytest.MonkeyPatch, bound: str, first_size: int, num_requests: list[int]
) -> None:
    """One request, another of 30 bytes while that is worked on, and one later, where there is room
    for 40 in one or in all.
    """
    monkeypatch.setattr(failover, bound, 40)
    read: list[bytes] = []
    others_are_done = asyncio.Event()

    async def dying_once(scope: Scope, receive: Receive, send: Send) -> None:
        body = b"".join([part async for part in Request(scope, receive).stream()])
        read.append(body)
        if read.count(body) > 1:
            await JSONResponse({})(scope, receive, send)
        elif len(read) == 1:
            await others_are_done.wait()

    relay = relay_to(dying_once)
    clients = [Client(b"x" * first_size), Client(b"y" * 30), Client(b"z" * 30)]
    first = asyncio.create_task(clients[0].send_to(relay, COMPLETIONS))
    while not read:
        await asyncio.sleep(0)
    await clients[1].send_to(relay, COMPLETIONS)
    others_are_done.set()
    await first
    await clients[2].send_to(relay, COMPLETIONS)
    assert [read.count(client.body) for client in clients] == num_requests
    assert [bool(client.messages) for client in clients] == [times > 1 for times in num_requests]


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/other"])
@in_event_loop
async def test_streams_of_others_pass_as_they_are(path: str) -> None:
    """Of another application, of which nothing is known."""
    num_requests = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal num_requests
        num_requests += 1

        async def parts() -> AsyncIterator[bytes]:
            yield b"one"
            raise ConnectionError

        with suppress(ConnectionError):
            await StreamingResponse(parts())(scope, receive, send)

    client = Client(b"{}")
    await client.send_to(relay_to(app), path)
    assert (client.text, client.is_answered_so_far, num_requests) == ("one", True, 1)


@in_event_loop
async def test_without_failover_an_ingress_sends_only_http() -> None:
    ingress = _ingress(resumable_source(SAYS))
    assert (await post_json(ingress, CHAT, HELLO | {"stream": True})).is_answered


@in_event_loop
async def test_every_ingress_gets_the_same_request_id() -> None:
    seen: list[bytes] = []

    async def dying(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend(value for name, value in scope["headers"] if name == b"x-request-id")
        if len(seen) > 1:
            await JSONResponse({})(scope, receive, send)

    await Client(b"{}").send_to(relay_to(dying), CHAT)
    assert seen == [seen[0]] * 2
    seen.clear()
    await Client(b"{}").send_to(relay_to(dying), CHAT, **{"x-request-id": "mine"})
    assert seen == [b"mine"] * 2


# ---- machines that are lost silently: nothing is closed, and nothing arrives any more


@pytest.fixture
def _soon_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_nodes, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(lost_nodes, "ACK_TIMEOUT_S", 0.05)


class SilentlyLostIngresses(FailingIngresses):
    """Ingresses whose loss is not reported. Each is on a node of its own, named by its number."""

    def __init__(self, ingress: Any, lives: tuple[int, ...]) -> None:  # an ASGIApp
        super().__init__(ingress, lives)
        self.dead: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        number = self.num_calls
        # it does not even get the request
        if number < len(self._lives) and self._lives[number] == 0:
            self.num_calls += 1
            self.dead.add(str(number))
        else:
            await NodeAnnouncer(super().__call__, str(number), MARK)(scope, receive, send)
            if number >= len(self._lives):
                return
            self.dead.add(str(number))
        await asyncio.Event().wait()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("lives", [(0,), (1,), (1, 0, 1)])
@in_event_loop
async def test_an_answer_survives_ingresses_whose_nodes_are_lost_silently(
    lives: tuple[int, ...], stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_nodes, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(lost_nodes, "ACK_TIMEOUT_S", 0.05)
    path, token_ids, body = CASES["stops"]
    body = {name: body[name] for name in body if name != "stream_options"} | {"stream": stream}

    undisturbed = await post_json(_relayed(resumable_source(token_ids))[0], path, body)
    ingresses = SilentlyLostIngresses(_ingress(resumable_source(token_ids)), lives)
    client = await post_json(relay_to(ingresses, lambda: ingresses.dead), path, body)
    assert client.is_answered
    assert _without_chance(client.text) == _without_chance(undisturbed.text)
    assert ingresses.num_calls == 1 + len(lives)


@pytest.mark.usefixtures("_soon_missed")
@in_event_loop
async def test_an_ingress_is_not_given_up_because_another_node_has_died() -> None:
    num_requests = 0
    looked = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal num_requests
        num_requests += 1
        await looked.wait()
        await JSONResponse({})(scope, receive, send)

    loop, num_looks = asyncio.get_running_loop(), 0

    def dead() -> set[str]:
        nonlocal num_looks
        num_looks += 1
        if num_looks == 5:
            loop.call_soon_threadsafe(looked.set)
        return {"other"}

    client = await post_json(
        relay_to(NodeAnnouncer(slow, "this", MARK), dead), COMPLETIONS, {"prompt": "Hello"}
    )
    assert client.status == 200
    assert num_requests == 1


@pytest.mark.usefixtures("_soon_missed")
@in_event_loop
async def test_lost_nodes_do_not_count_against_a_request() -> None:
    """More of them than the ingresses that may fail quickly."""
    path, token_ids, body = CASES["stops"]
    body = {name: body[name] for name in body if name != "stream_options"}
    lives = (0,) * (len(failover.ATTEMPT_PAUSES_S) + 2)

    ingresses = SilentlyLostIngresses(_ingress(resumable_source(token_ids)), lives)
    client = await post_json(relay_to(ingresses, lambda: ingresses.dead), path, body)
    assert client.status == 200
    assert ingresses.num_calls == 1 + len(lives)


@pytest.mark.parametrize(("soon_s", "num_requests"), [(0.0, failover.MAX_INGRESSES), (1e9, 4)])
def test_ingresses_that_worked_for_some_time_are_replaced_more_often(
    soon_s: float, num_requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole answer shows no progress: what counts is how long each ingress had it. But it may be
    what they die of.
    """
    monkeypatch.setattr(failover, "QUICK_FAILURE_S", soon_s)
    num_ingresses = 0

    async def dies(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal num_ingresses
        num_ingresses += 1
        await asyncio.sleep(0.001)

    client = asyncio.run(
        post_json(relay_to(NodeAnnouncer(dies, "this", MARK)), COMPLETIONS, {"prompt": "Hello"})
    )
    assert (client.status, num_ingresses) == (503, num_requests)


@in_event_loop
async def test_another_model_does_not_continue_an_answer_that_has_begun() -> None:
    """It may make one of which nothing has been sent to the client."""
    path, token_ids, body = CASES["stops"]

    def models(life: int) -> tuple[ASGIApp, list[str]]:
        ingress, requested = (_ingress(resumable_source(token_ids)), list[str]())

        async def first_old_then_new(scope: Scope, receive: Receive, send: Send) -> None:
            requested.append("old" if not requested else "new")
            await NodeAnnouncer(
                FailingIngresses(ingress, (life,) if requested == ["old"] else ()),
                "this",
                requested[-1],
            )(scope, receive, send)

        return first_old_then_new, requested

    ingress, requested = models(life=3)
    begun = await post_json(relay_to(ingress), path, body | {"stream": True})
    assert requested == ["old", "new", "new", "new"], "until no ingress is left to try"
    assert "could not take it up again" in begun.text.splitlines()[-2]
    ingress, requested = models(life=0)
    fresh = await post_json(relay_to(ingress), path, body | {"stream": True})
    assert (requested, fresh.text.splitlines()[-2]) == (["old", "new"], "data: [DONE]")
