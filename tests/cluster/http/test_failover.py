"""Doors die while they answer, and nobody sees it: the client's bytes are those of an undisturbed answer. Without Ray."""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
from failing_ingress import Client, FailingIngresses, ResumableSource, post_json
from scripted_chain import ReportingChain, no_gate
from scripted_token_source import ScriptedSource, http_app_for
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from tokenizer_files import SENTENCEPIECE

from tramontane.cluster.common import node_watch as lost_nodes
from tramontane.cluster.common.node_watch import DeadNodeWatcher
from tramontane.cluster.http import failover as door_relay
from tramontane.cluster.http import failover_response as whole_answers
from tramontane.cluster.http.failover import FailoverMiddleware
from tramontane.cluster.http.failover_response import LOST, NodeAnnouncer
from tramontane.proto.errors import OverloadedError, PipelineError, PoisonRequestError, TramontaneError
from tramontane.proto.plan import CachePlan, WindowClass
from tramontane.proto.request import RequestOutput, SequenceRequest
from tramontane.router.engine.router import Router
from tramontane.router.openai.served_model import ServedModel
from tramontane.router.scheduling.admission import SchedulerLimits
from tramontane.router.scheduling.policy import FixedInFlightPolicy
from tramontane.router.scheduling.scheduler import Scheduler
from tramontane.router.tokenization.backends import SentencePieceTokenizer
from tramontane.router.tokenization.mistral_chat import MistralChatTemplate

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOKENIZER = SentencePieceTokenizer(SENTENCEPIECE["v3"])  # whose format has tools
MODEL = ServedModel("tiny", TOKENIZER, 512, 16, TOKENIZER.vocab_size)
FORMAT = MistralChatTemplate.from_sentencepiece(SENTENCEPIECE["v3"])
CALLS = 5  # [TOOL_CALLS]
CALLED = '[{"name": "w", "arguments": {"in": "Arles"}}, {"name": "x", "arguments": {}}]'
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "wx"]
USAGE = {"stream_options": {"include_usage": True}}
HELLO = {"messages": [{"role": "user", "content": "Hello!"}]}


def _ids(text: str) -> tuple[int, ...]:
    return TOKENIZER.encode(text)[1:]


SAYS = _ids("Bon \u00e9t\u00e9 \U0001f642, monde")  # characters of several tokens
ENDS = _ids("one tow, two STOP, three")
CALLING = (*_ids("STO"), CALLS, *_ids(CALLED))

CASES: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "text": (COMPLETIONS, SAYS, {"prompt": "Hello", "max_tokens": 100, **USAGE, "return_token_ids": True}),
    "length": (COMPLETIONS, SAYS, {"prompt": "Hello", "max_tokens": 6, **USAGE}),
    "stops": (COMPLETIONS, ENDS, {"prompt": "Hello", "max_tokens": 100, "stop": ["STOP", "town"], "logprobs": 1, **USAGE}),
    "choices": (
        COMPLETIONS,
        ENDS,
        {"prompt": ["Hello", "You"], "n": 2, "max_tokens": 9, "stop": "two", "logprobs": 0, **USAGE},
    ),
    "echo": (COMPLETIONS, SAYS, {"prompt": ["Hello", "You"], "n": 2, "max_tokens": 5, "echo": True, "logprobs": 1}),
    "score": (COMPLETIONS, SAYS, {"prompt": "Hello", "max_tokens": 0, "echo": True, "logprobs": 1, **USAGE}),
    "chat": (CHAT, SAYS, HELLO | {"n": 2, **USAGE}),
    "chat, stops": (CHAT, ENDS, HELLO | {"stop": ["STOP", "town"], "logprobs": True, "top_logprobs": 1, **USAGE}),
    "tools": (CHAT, CALLING, HELLO | {"tools": TOOLS, "stop": ["STOP"], "logprobs": True, **USAGE}),
}


MARK = "a model"


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_relay, "PAUSES_S", (0.0, 0.0, 0.0))


def _relayed(source: Any, lives: tuple[int, ...] = ()) -> tuple[FailoverMiddleware, FailingIngresses]:  # noqa: ANN401
    doors = FailingIngresses(http_app_for(source, MODEL, chat=FORMAT).app(), lives)
    return FailoverMiddleware(doors), doors


def _without_chance(text: str) -> str:
    """The answer's name, its age and where its time went, and ids of calls; the first two are the same in all of an answer."""
    assert len(set(re.findall(r'"id":"(\w+-\w+)"', text))) == len(set(re.findall(r'"created":(\d+)', text))) == 1
    for pattern in (r'"id":"\w{9}"', r'"id":"\w+-\w+"', r'"created":\d+', r'"timings":\{[^}]*\}'):
        text = re.sub(pattern, pattern.partition(":")[0], text)
    return text


async def _check(case: str, lives: tuple[int, ...], *, stream: bool) -> int:
    """Returns how many messages an undisturbed answer has."""
    path, token_ids, body = CASES[case]
    body = body | {"stream": True} if stream else {name: body[name] for name in body if name != "stream_options"}
    immortal, _ = _relayed(ResumableSource(token_ids))
    undisturbed = await post_json(immortal, path, body)
    source = ResumableSource(token_ids)
    relay, doors = _relayed(source, lives)
    client = await post_json(relay, path, body)
    assert client.is_answered
    assert client.status == undisturbed.status == 200
    assert _without_chance(client.text) == _without_chance(undisturbed.text)
    assert doors.num_calls == 1 + len(lives)
    assert len(set(source.seeds)) == 1, "drawn once"
    return len(undisturbed.messages)


@pytest.mark.parametrize("case", CASES)
def test_a_stream_survives_a_door_that_dies_at_any_of_its_messages(case: str) -> None:
    async def scenario() -> None:
        for life in range(await _check(case, (), stream=True)):
            await _check(case, (life,), stream=True)

    asyncio.run(scenario())


@pytest.mark.parametrize("case", CASES)
def test_a_stream_survives_a_door_for_each_of_its_pieces(case: str) -> None:
    async def scenario() -> None:
        num_messages = await _check(case, (), stream=True)
        await _check(case, (2,) * (num_messages - 2), stream=True)
        await _check(case, (0, 1, 0, *((2, 0, 1) if num_messages > 3 else ())), stream=True)

    asyncio.run(scenario())


@pytest.mark.parametrize("case", CASES)
def test_a_whole_answer_survives_doors_that_die_before_it_is_there(case: str) -> None:
    async def scenario() -> None:
        for lives in ((0,), (1,), (1, 0, 1)):
            await _check(case, lives, stream=False)

    asyncio.run(scenario())


class Counting(ResumableSource):
    """Has no room for whoever is new; the first to come had some. Remembers what it was asked for."""

    def __init__(self, token_ids: tuple[int, ...]) -> None:
        super().__init__(token_ids)
        self.has_room = True
        self.asked: list[Sequence[SequenceRequest]] = []

    def check_capacity(self, num_sequences: int, owner: int = 0) -> None:
        if not self.has_room:
            raise OverloadedError("full", 3)

    async def generate(self, specs: Sequence[SequenceRequest]) -> AsyncGenerator[RequestOutput, None]:
        self.asked.append(specs)
        self.has_room = False
        async for batch in super().generate(specs):
            yield batch


@pytest.mark.parametrize("case", CASES)
def test_a_whole_answer_goes_on_where_its_proxy_knows_it_to_be(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_answers, "PROGRESS_INTERVAL_S", 0.0)
    path, token_ids, body = CASES[case]
    body = {name: body[name] for name in body if name != "stream_options"}

    async def scenario() -> None:
        undisturbed = await post_json(_relayed(ResumableSource(token_ids))[0], path, body)
        for lives in ((), (1,), (2,), (1, 2), *([(15,), (8, 20)] if case == "tools" else [])):  # where calls are known already
            source = Counting(token_ids)
            doors = FailingIngresses(NodeAnnouncer(http_app_for(source, MODEL, chat=FORMAT).app(), "node", MARK), lives)
            client = await post_json(FailoverMiddleware(doors), path, body)
            assert (client.status, client.is_answered) == (200, True)
            assert _without_chance(client.text) == _without_chance(undisturbed.text)
            assert doors.num_calls == len(source.asked) == 1 + len(lives)
            first, *others = [sum(len(spec.output_ids) for spec in specs) for specs in source.asked]
            assert first == 0
            assert all(others), "they begin further on"

    if case != "score":  # which has one token
        asyncio.run(scenario())


@pytest.mark.parametrize("lives", [(1,), (2, 1), (1, 1, 3)])
def test_another_model_makes_the_whole_of_an_answer_that_nobody_was_told(
    lives: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_answers, "PROGRESS_INTERVAL_S", 0.0)

    async def scenario() -> None:
        sources = [Counting(SAYS), Counting(ENDS)]
        apps = [
            NodeAnnouncer(http_app_for(source, MODEL, chat=FORMAT).app(), "node", mark)
            for source, mark in zip(sources, "ab", strict=True)
        ]

        async def rolled_in(scope: Scope, receive: Receive, send: Send) -> None:
            await apps[doors.num_calls > 1](scope, receive, send)

        doors = FailingIngresses(rolled_in, lives)
        client = await post_json(FailoverMiddleware(doors), COMPLETIONS, {"prompt": "Hello", "max_tokens": 100})
        assert json.loads(client.text)["choices"][0]["text"] == TOKENIZER.decode(ENDS)
        assert [spec.output_ids for spec in sources[1].asked[0]] == [()]

    asyncio.run(scenario())


# ---- with a router, which knows what of log-probabilities and experts is known already

TOLD = {"prompt_logprobs": 0, "logprobs": 0, "return_experts": [3], "return_token_ids": True}


@asynccontextmanager
async def _router() -> AsyncIterator[Router]:
    cache = CachePlan(16, (WindowClass(64, 5, 10),))
    router = Router(Scheduler(cache, SchedulerLimits(8, 64, 256, 1000), FixedInFlightPolicy(3, 64)), ReportingChain(no_gate))
    running = asyncio.create_task(router.run())
    yield router
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def _whole(lives: tuple[int, ...]) -> list[dict[str, Any]]:
    """As ``_told``, but not streamed."""
    async with _router() as router:
        model = replace(MODEL, vocab_size=1000, num_layers=4, experts_per_token=1)
        relay = FailoverMiddleware(FailingIngresses(NodeAnnouncer(http_app_for(router, model).app(), "node", MARK), lives))
        client = await post_json(relay, COMPLETIONS, {"prompt": [[7, 8, 9], [9]], "n": 2, "max_tokens": 7, "seed": 1, **TOLD})
        choices: list[dict[str, Any]] = json.loads(client.text)["choices"]
        return choices


def test_log_probabilities_and_experts_of_a_whole_answer_are_those_of_however_many_doors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_answers, "PROGRESS_INTERVAL_S", 0.0)

    async def scenario() -> None:
        undisturbed = await _whole(())
        for lives in ((1,), (2,), (1, 1, 2), (3, 1), (1, 1, 1, 1)):
            assert await _whole(lives) == undisturbed

    asyncio.run(scenario())


async def _told(lives: tuple[int, ...]) -> list[dict[str, Any]]:
    """Of each choice all that was told of it, put together; text apart, as the tokens make none."""
    async with _router() as router:
        model = replace(MODEL, vocab_size=1000, num_layers=4, experts_per_token=1)
        relay = FailoverMiddleware(FailingIngresses(http_app_for(router, model).app(), lives))
        body = {"prompt": [[7, 8, 9], [9]], "n": 2, "max_tokens": 7, "stream": True, "seed": 1, **TOLD}
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


def test_log_probabilities_and_experts_are_told_once_by_however_many_doors() -> None:
    async def scenario() -> None:
        undisturbed = await _told(())
        assert [len(choice["experts"]["3"]) for choice in undisturbed] == [6] * 4
        for lives in ((2,), (3, 2), (2, 2, 0, 2), (5, 1, 2)):
            assert await _told(lives) == undisturbed

    asyncio.run(scenario())


# ---- what is not a door's death, and doors that are not there


@pytest.mark.parametrize(
    ("failure", "status"), [(OverloadedError("full", 3), 429), (PipelineError("gone"), 503), (PoisonRequestError("no"), 400)]
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_first_door_answers_stands(failure: TramontaneError, status: int, stream: bool) -> None:
    async def scenario() -> None:
        relay, doors = _relayed(ScriptedSource(failure=failure))
        client = await post_json(relay, COMPLETIONS, {"prompt": "Hello", "stream": stream})
        assert (client.status, client.is_answered, doors.num_calls) == (status, True, 1)
        relay, doors = _relayed(ScriptedSource(SAYS, failure, fails_at=2))
        client = await post_json(relay, COMPLETIONS, {"prompt": "Hello", "stream": True})
        assert client.is_answered
        assert (client.text.count("data: "), client.text.count('"error"'), doors.num_calls) == (3, 1, 1)

    asyncio.run(scenario())


class Failing:
    """Fails whoever asks from the second time on, ``num_times``; else tokens."""

    def __init__(self, failure: TramontaneError, num_times: int) -> None:
        self._source, self._failure, self._num_times, self._num_asked = ResumableSource(SAYS), failure, num_times, 0

    def check_capacity(self, num_sequences: int, owner: int = 0) -> None:
        """There always is."""

    async def generate(self, specs: Sequence[SequenceRequest]) -> AsyncGenerator[RequestOutput, None]:
        self._num_asked += 1
        if 1 < self._num_asked <= 1 + self._num_times:
            raise self._failure
        async for batch in self._source.generate(specs):
            yield batch


@pytest.mark.parametrize("failure", [OverloadedError("full", 3), PipelineError("gone")])
@pytest.mark.parametrize("stream", [False, True])
def test_a_door_that_is_to_go_on_is_asked_again_where_it_is_full_or_failing(failure: TramontaneError, stream: bool) -> None:
    async def scenario() -> None:
        relay, doors = _relayed(Failing(failure, 2), (3 if stream else 1,))
        client = await post_json(relay, COMPLETIONS, {"prompt": "Hello", "stream": stream})
        assert (client.status, client.is_answered, doors.num_calls) == (200, True, 4)
        relay, doors = _relayed(Failing(failure, 9), (3 if stream else 1,))
        client = await post_json(relay, COMPLETIONS, {"prompt": "Hello", "stream": stream})
        assert client.is_answered
        assert doors.num_calls == 1 + 3
        error = {"message": LOST, "type": "server_error", "param": None, "code": "unavailable"}
        assert json.loads(client.text.split("\n\n")[-2].removeprefix("data: ") if stream else client.text) == {"error": error}
        assert client.status == (200 if stream else 503)

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_a_door_that_refuses_after_long_has_tried_for_all_others(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them would try for minutes, and a client would wait for hours."""

    async def scenario() -> None:
        loop, later_s = asyncio.get_running_loop(), 0.0
        real_time = loop.time
        monkeypatch.setattr(loop, "time", lambda: real_time() + later_s)

        class Trying(Failing):
            async def generate(self, specs: Sequence[SequenceRequest]) -> AsyncGenerator[RequestOutput, None]:
                nonlocal later_s
                later_s += 600.0
                async for batch in super().generate(specs):
                    yield batch

        app = NodeAnnouncer(http_app_for(Trying(PipelineError("gone"), 99), MODEL, chat=FORMAT).app(), "node", MARK)
        doors = FailingIngresses(app, (3 if stream else 1,))
        client = await post_json(FailoverMiddleware(doors), COMPLETIONS, {"prompt": "Hello", "stream": stream})
        assert client.is_answered
        assert LOST in client.text
        assert doors.num_calls == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("stream", "life"), [(False, 0), (False, 1), (True, 0), (True, 2)])
def test_an_answer_keeps_its_place_when_its_door_dies(path: str, stream: bool, life: int) -> None:
    """Also where its client has been told nothing."""

    async def scenario() -> None:
        source = Counting(SAYS)
        relay = FailoverMiddleware(
            FailingIngresses(NodeAnnouncer(http_app_for(source, MODEL, chat=FORMAT).app(), "node", MARK), (life,))
        )
        body = {"prompt": "Hello"} if path == COMPLETIONS else HELLO
        client = await post_json(relay, path, body | {"stream": stream})
        assert (client.status, client.is_answered) == (200, True)
        assert [[spec.already_admitted for spec in specs] for specs in source.asked] == [[False], [True]]

    asyncio.run(scenario())


def test_who_has_met_a_door_that_was_dead_already_is_new_to_the_next() -> None:
    """A door that falls under load must not open the next one to all who come after."""

    async def scenario() -> None:
        source = Counting(SAYS)
        source.has_room = False  # somebody else has the room
        relay, doors = _relayed(source, (0,))
        client = await post_json(relay, COMPLETIONS, {"prompt": "Hello"})
        assert source.asked == []
        assert (client.status, doors.num_calls) == (429, 2)

    asyncio.run(scenario())


def test_the_time_that_a_client_gives_counts_from_its_request_and_not_from_the_next_door(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        loop, later = asyncio.get_running_loop(), 0.0
        now = loop.time
        monkeypatch.setattr(loop, "time", lambda: now() + later)
        doors = FailingIngresses(http_app_for(ResumableSource(SAYS), MODEL, chat=FORMAT).app(), (0,))

        async def slow(scope: Scope, receive: Receive, send: Send) -> None:
            nonlocal later
            await doors(scope, receive, send)
            later += 40.0

        body = {"prompt": "Hello"}
        for seconds, status in ((100, 200), (30, 504)):
            doors.num_calls = 0
            client = await post_json(FailoverMiddleware(slow), COMPLETIONS, body, {"x-request-timeout": str(seconds)})
            assert (client.status, doors.num_calls) == (status, 2)

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_an_application_that_is_being_deployed_again_is_waited_for(stream: bool) -> None:
    """Ray Serve says that there is no such path."""

    async def scenario() -> None:
        door = http_app_for(ResumableSource(SAYS), MODEL, chat=FORMAT).app()
        _, doors = _relayed(ResumableSource(SAYS), (2 if stream else 0,))

        async def no_application(scope: Scope, receive: Receive, send: Send) -> None:
            is_there = doors.num_calls != 1
            doors.num_calls += not is_there
            await (doors if is_there else PlainTextResponse("not found", 404))(scope, receive, send)

        body = {"prompt": "Hello", "stream": stream}
        client = await post_json(FailoverMiddleware(no_application), COMPLETIONS, body)
        undisturbed = await post_json(door, COMPLETIONS, body)
        assert (client.status, client.is_answered, doors.num_calls) == (200, True, 3)
        assert _without_chance(client.text) == _without_chance(undisturbed.text)

    asyncio.run(scenario())


def test_what_another_door_refuses_ends_a_stream() -> None:
    async def scenario() -> None:
        relay, doors = _relayed(Failing(PoisonRequestError("no more"), 1), (3,))
        client = await post_json(relay, COMPLETIONS, {"prompt": "Hello", "stream": True})
        assert client.is_answered
        assert json.loads(client.text.split("\n\n")[-2].removeprefix("data: "))["error"]["message"] == "no more"
        assert doors.num_calls == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("num_parts", [0, 1, 2])
def test_the_next_door_reads_the_whole_body_however_much_of_it_the_first_has_read(num_parts: int) -> None:
    read: list[bytes] = []

    async def dying(scope: Scope, receive: Receive, send: Send) -> None:
        if not read:
            read.append(b"".join([(await receive())["body"] for _ in range(num_parts)]))
            return
        read.append(await Request(scope, receive).body())
        await JSONResponse({})(scope, receive, send)

    async def scenario() -> None:
        client = Client(b"0123456789")
        await client.ask(FailoverMiddleware(dying), COMPLETIONS)
        assert read == [client.body[: 5 * num_parts], client.body]
        assert client.is_answered

    asyncio.run(scenario())


def test_a_body_that_comes_byte_by_byte_is_kept_in_one_piece() -> None:
    """A message for each of its bytes would take hundreds of times as much, and bodies have room by their bytes."""
    read: list[list[Message]] = []

    async def dying(_scope: Scope, receive: Receive, send: Send) -> None:
        read.append([await receive()])
        while read[-1][-1]["more_body"]:
            read[-1].append(await receive())
        if len(read) > 1:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def scenario() -> None:
        parts = iter(range(100))

        async def receive() -> Message:
            number = next(parts)
            return {"type": "http.request", "body": bytes([number]), "more_body": number < 99}

        scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": [], "query_string": b"", "root_path": ""}
        await FailoverMiddleware(dying)(scope, receive, Client(b"").send)
        assert [len(messages) for messages in read] == [100, 1]
        assert read[1][0]["body"] == bytes(range(100))

    asyncio.run(scenario())


def test_who_has_left_is_not_answered_by_another_door() -> None:
    async def scenario() -> None:
        client, num_asked = Client(b'{"prompt": "Hello"}'), 0

        async def as_ray_serve(_scope: Scope, receive: Receive, _send: Send) -> None:
            nonlocal num_asked
            num_asked += 1
            while (await receive())["type"] != "http.disconnect":
                client.disconnects.set()

        await client.ask(FailoverMiddleware(as_ray_serve), COMPLETIONS)
        assert (num_asked, client.messages) == (1, [])

    asyncio.run(scenario())


@pytest.mark.parametrize(("bound", "first_size", "times_asked"), [("MAX_BODY", 41, [1, 2, 2]), ("MAX_BODIES", 30, [2, 1, 2])])
def test_bodies_beyond_a_bound_pass_and_are_not_kept(
    monkeypatch: pytest.MonkeyPatch, bound: str, first_size: int, times_asked: list[int]
) -> None:
    """One request, another of 30 bytes while that is worked on, and one later, where there is room for 40 in one or in all."""
    monkeypatch.setattr(door_relay, bound, 40)
    read: list[bytes] = []
    others_are_done = asyncio.Event()

    async def dying_once(scope: Scope, receive: Receive, send: Send) -> None:
        body = b"".join([part async for part in Request(scope, receive).stream()])
        read.append(body)
        if read.count(body) > 1:
            await JSONResponse({})(scope, receive, send)
        elif len(read) == 1:
            await others_are_done.wait()

    async def scenario() -> None:
        relay = FailoverMiddleware(dying_once)
        clients = [Client(b"x" * first_size), Client(b"y" * 30), Client(b"z" * 30)]
        first = asyncio.create_task(clients[0].ask(relay, COMPLETIONS))
        while not read:
            await asyncio.sleep(0)
        await clients[1].ask(relay, COMPLETIONS)
        others_are_done.set()
        await first
        await clients[2].ask(relay, COMPLETIONS)
        assert [read.count(client.body) for client in clients] == times_asked
        assert [bool(client.messages) for client in clients] == [times > 1 for times in times_asked]

    asyncio.run(scenario())


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/other"])
def test_streams_of_others_pass_as_they_are(path: str) -> None:
    """Of another application, of which nothing is known."""
    num_asked = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal num_asked
        num_asked += 1

        async def parts() -> AsyncIterator[bytes]:
            yield b"one"
            raise ConnectionError

        with suppress(ConnectionError):
            await StreamingResponse(parts())(scope, receive, send)

    async def scenario() -> None:
        client = Client(b"{}")
        await client.ask(FailoverMiddleware(app), path)
        assert (client.text, client.is_answered_so_far, num_asked) == ("one", True, 1)

    asyncio.run(scenario())


def test_without_a_relay_a_door_says_nothing_beside_http() -> None:
    async def scenario() -> None:
        door = http_app_for(ResumableSource(SAYS), MODEL, chat=FORMAT).app()
        assert (await post_json(door, CHAT, HELLO | {"stream": True})).is_answered

    asyncio.run(scenario())


def test_every_door_is_told_the_same_request_id() -> None:
    seen: list[bytes] = []

    async def dying(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend(value for name, value in scope["headers"] if name == b"x-request-id")
        if len(seen) > 1:
            await JSONResponse({})(scope, receive, send)

    async def scenario() -> None:
        await Client(b"{}").ask(FailoverMiddleware(dying), CHAT)
        assert seen == [seen[0]] * 2
        seen.clear()
        await Client(b"{}").ask(FailoverMiddleware(dying), CHAT, **{"x-request-id": "mine"})
        assert seen == [b"mine"] * 2

    asyncio.run(scenario())


# ---- machines that vanish: nothing is closed, and nothing comes any more


@pytest.fixture
def _soon_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_nodes, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(lost_nodes, "ACK_TIMEOUT_S", 0.05)


class VanishingDoors(FailingIngresses):
    """Of which nobody is told that one is gone. Each is on a node of its own, named by its number."""

    def __init__(self, door: Any, lives: tuple[int, ...]) -> None:  # noqa: ANN401 - an ASGIApp
        super().__init__(door, lives)
        self.dead: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        number = self.num_calls
        if number < len(self._lives) and self._lives[number] == 0:  # it does not even hear of the request
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
def test_an_answer_survives_doors_whose_nodes_vanish(
    lives: tuple[int, ...], stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_nodes, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(lost_nodes, "ACK_TIMEOUT_S", 0.05)
    path, token_ids, body = CASES["stops"]
    body = {name: body[name] for name in body if name != "stream_options"} | {"stream": stream}

    async def scenario() -> None:
        undisturbed = await post_json(_relayed(ResumableSource(token_ids))[0], path, body)
        doors = VanishingDoors(http_app_for(ResumableSource(token_ids), MODEL, chat=FORMAT).app(), lives)
        client = await post_json(FailoverMiddleware(doors, DeadNodeWatcher(lambda: doors.dead)), path, body)
        assert client.is_answered
        assert _without_chance(client.text) == _without_chance(undisturbed.text)
        assert doors.num_calls == 1 + len(lives)

    asyncio.run(scenario())


@pytest.mark.usefixtures("_soon_missed")
def test_a_door_is_not_given_up_because_another_node_has_died() -> None:
    num_asked = 0
    looked = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal num_asked
        num_asked += 1
        await looked.wait()
        await JSONResponse({})(scope, receive, send)

    async def scenario() -> None:
        loop, num_looks = asyncio.get_running_loop(), 0

        def dead() -> set[str]:
            nonlocal num_looks
            num_looks += 1
            if num_looks == 5:
                loop.call_soon_threadsafe(looked.set)
            return {"other"}

        client = await post_json(
            FailoverMiddleware(NodeAnnouncer(slow, "this", MARK), DeadNodeWatcher(dead)), COMPLETIONS, {"prompt": "Hello"}
        )
        assert client.status == 200
        assert num_asked == 1

    asyncio.run(scenario())


@pytest.mark.usefixtures("_soon_missed")
def test_nodes_that_vanish_are_no_sign_against_an_answer() -> None:
    """More of them than doors may be gone soon."""
    path, token_ids, body = CASES["stops"]
    body = {name: body[name] for name in body if name != "stream_options"}
    lives = (0,) * (len(door_relay.PAUSES_S) + 2)

    async def scenario() -> None:
        doors = VanishingDoors(http_app_for(ResumableSource(token_ids), MODEL, chat=FORMAT).app(), lives)
        client = await post_json(FailoverMiddleware(doors, DeadNodeWatcher(lambda: doors.dead)), path, body)
        assert client.status == 200
        assert doors.num_calls == 1 + len(lives)

    asyncio.run(scenario())


@pytest.mark.parametrize(("soon_s", "num_asked"), [(0.0, door_relay.MAX_INGRESSES), (1e9, 4)])
def test_doors_that_were_well_for_some_time_are_replaced_more_often(
    soon_s: float, num_asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole answer tells nothing on its way: what counts is how long each door had it. But it may be what they die of."""
    monkeypatch.setattr(door_relay, "QUICK_FAILURE_S", soon_s)
    num_doors = 0

    async def dies(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal num_doors
        num_doors += 1
        await asyncio.sleep(0.001)

    client = asyncio.run(
        post_json(FailoverMiddleware(NodeAnnouncer(dies, "this", MARK), DeadNodeWatcher(set)), COMPLETIONS, {"prompt": "Hello"})
    )
    assert (client.status, num_doors) == (503, num_asked)


def test_another_model_does_not_go_on_with_an_answer_that_has_begun() -> None:
    """It may give one of which the client has been told nothing."""
    path, token_ids, body = CASES["stops"]

    def models(life: int) -> tuple[ASGIApp, list[str]]:
        door, asked = http_app_for(ResumableSource(token_ids), MODEL, chat=FORMAT).app(), list[str]()

        async def first_old_then_new(scope: Scope, receive: Receive, send: Send) -> None:
            asked.append("old" if not asked else "new")
            await NodeAnnouncer(FailingIngresses(door, (life,) if asked == ["old"] else ()), "this", asked[-1])(
                scope, receive, send
            )

        return first_old_then_new, asked

    async def scenario() -> None:
        door, asked = models(life=3)
        begun = await post_json(FailoverMiddleware(door, DeadNodeWatcher(set)), path, body | {"stream": True})
        assert asked == ["old", "new", "new", "new"], "until nobody is left to ask"
        assert "could not take it up again" in begun.text.splitlines()[-2]
        door, asked = models(life=0)
        fresh = await post_json(FailoverMiddleware(door, DeadNodeWatcher(set)), path, body | {"stream": True})
        assert (asked, fresh.text.splitlines()[-2]) == (["old", "new"], "data: [DONE]")

    asyncio.run(scenario())
