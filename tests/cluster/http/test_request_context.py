"""Of clients: ``x-request-timeout``, whose key a request came with, and refusals before anything is
tokenized.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from event_loops import in_event_loop
from pydantic import SecretStr
from running_router import new_scheduler, running
from scripted_chain import Gate, ScriptedChain, no_gate
from scripted_token_source import (
    CONTEXT,
    MODEL,
    TOKENIZER,
    VOCAB_SIZE,
    ScriptedSource,
    client_for,
    http_app_for,
)

from tramontane.cluster.config.api_keys import ApiKeys
from tramontane.proto.errors import QueueFullError
from tramontane.proto.plan import CachePlan, WindowClass
from tramontane.proto.step import MicroBatch
from tramontane.router.engine.router import Router

BODY: dict[str, Any] = {"prompt": "ROMEO:", "max_tokens": 8, "ignore_eos": True}
CHAT_BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What news?"}],
    "max_tokens": 8,
}
TIMEOUT = "x-request-timeout"


@asynccontextmanager
async def _harness(
    gate: Gate, places: int = 1
) -> AsyncIterator[tuple[httpx.AsyncClient, Router, ScriptedChain]]:
    cache = CachePlan(16, (WindowClass(None, CONTEXT // 16, 40),))
    sizes = {"num_seqs": places, "max_len": CONTEXT, "vocab_size": VOCAB_SIZE}
    chain = ScriptedChain(gate)
    router = Router(new_scheduler(cache, **sizes, in_flight=1, max_queued_seqs=4), chain)
    async with running(router), client_for(http_app_for(router).app()) as client:
        yield client, router, chain


async def _stuck(_batch: MicroBatch) -> None:
    await asyncio.Event().wait()


def _after(num_steps: int) -> Gate:
    """From this step on nothing comes back."""

    async def gate(batch: MicroBatch) -> None:
        if batch.step_id >= num_steps:
            await asyncio.Event().wait()

    return gate


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT_BODY)]
)
@in_event_loop
async def test_work_ends_with_the_time_that_was_given(
    path: str, body: dict[str, Any], stream: bool
) -> None:
    async with _harness(_stuck) as (client, router, _):
        response = await client.post(
            path, json=body | {"stream": stream}, headers={TIMEOUT: "0.05"}
        )
        assert (response.status_code, response.json()["error"]["code"]) == (
            504,
            "deadline_exceeded",
        )
        assert router.num_requests == 0


@in_event_loop
async def test_a_stream_that_has_begun_ends_with_an_error_in_it() -> None:
    async with _harness(_after(3)) as (client, router, _):
        response = await client.post(
            "/v1/completions", json=BODY | {"stream": True}, headers={TIMEOUT: "0.5"}
        )
        assert response.status_code == 200
        *reported, last = [
            json.loads(part.removeprefix("data: ")) for part in response.text.split("\n\n") if part
        ]
        assert reported
        assert last["error"]["code"] == "deadline_exceeded"
        assert router.num_requests == 0


@in_event_loop
async def test_a_request_whose_time_is_over_while_it_waits_is_never_begun() -> None:
    release = asyncio.Event()

    async def gate(_batch: MicroBatch) -> None:
        await release.wait()

    async with _harness(gate) as (client, router, chain):
        first = asyncio.create_task(client.post("/v1/completions", json=BODY))
        while not chain.submitted:
            await asyncio.sleep(0)
        late = await client.post("/v1/completions", json=BODY, headers={TIMEOUT: "0.05"})
        assert late.status_code == 504
        assert router.scheduler.num_waiting == 0
        release.set()
        assert (await first).status_code == 200
        assert {chunk.seq_id for batch in chain.submitted for chunk in batch.chunks} == {0}


@in_event_loop
async def test_a_request_within_its_deadline_is_answered() -> None:
    async with _harness(no_gate) as (client, _, _):
        response = await client.post("/v1/completions", json=BODY, headers={TIMEOUT: "3600"})
        assert response.json()["usage"]["completion_tokens"] == BODY["max_tokens"]


@pytest.mark.parametrize("value", ["", "0", "-1", "nan", "inf", "1e9", "soon", "1 s", "1,2"])
@in_event_loop
async def test_what_is_no_number_of_seconds_is_refused(value: str) -> None:
    source = ScriptedSource()
    async with client_for(http_app_for(source).app()) as client:
        for path, body in (("/v1/completions", BODY), ("/v1/chat/completions", CHAT_BODY)):
            response = await client.post(path, json=body, headers={TIMEOUT: value})
            assert (response.status_code, response.json()["error"]["param"]) == (400, TIMEOUT)
        twice = await client.post(
            "/v1/completions", json=BODY, headers=[(TIMEOUT, "5"), (TIMEOUT, "5")]
        )
        assert twice.status_code == 400
    assert not source.requested


def test_a_request_says_by_a_number_whose_key_it_came_with() -> None:
    async def scenario(*keys: str) -> list[int]:
        source = ScriptedSource()
        async with client_for(
            http_app_for(source, keys=ApiKeys(map(SecretStr, keys))).app()
        ) as client:
            for key in keys:
                for path, body in (("/v1/completions", BODY), ("/v1/chat/completions", CHAT_BODY)):
                    await client.post(path, json=body, headers={"authorization": f"Bearer {key}"})
        owners = [request.owner for request in source.requests]
        assert owners[::2] == owners[1::2], "of either endpoint"
        return owners[::2]

    assert sorted(asyncio.run(scenario("a", "b", "c"))) == [1, 2, 3]
    assert asyncio.run(scenario("a")) == [0], "a single key has the whole queue"


def test_requests_with_another_key_have_another_salt() -> None:
    """So that they share no cached pages; without keys all do, and a client cannot choose one."""

    async def salts(*keys: str) -> list[str]:
        source = ScriptedSource()
        app = (
            http_app_for(source, keys=ApiKeys(map(SecretStr, keys)))
            if keys
            else http_app_for(source)
        )
        async with client_for(app.app()) as client:
            for key in (*keys, *keys) or ("", ""):
                headers = {"authorization": f"Bearer {key}"} if key else {}
                for path, body in (("/v1/completions", BODY), ("/v1/chat/completions", CHAT_BODY)):
                    assert (await client.post(path, json=body, headers=headers)).status_code == 200
        found = [request.cache_salt for request in source.requests]
        assert found[::2] == found[1::2], "of either endpoint"
        return found[::2]

    first, second, *again = asyncio.run(salts("a", "b"))
    assert first != second
    assert again == [first, second]
    assert "" not in again
    assert asyncio.run(salts()) == ["", ""]


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT_BODY)]
)
@in_event_loop
async def test_what_cannot_wait_is_refused_before_it_is_tokenized(
    path: str, body: dict[str, Any]
) -> None:
    class NeverCalled(type(TOKENIZER)):  # type: ignore[misc]
        def encode(self, _text: str) -> tuple[int, ...]:
            raise AssertionError("tokenized")

    class NoChatCalled:
        tool_format = None

        def encode(self, _messages: Sequence[Any], _tools: Sequence[Any] = ()) -> tuple[int, ...]:
            raise AssertionError("tokenized")

    source = ScriptedSource(refusal=QueueFullError("too much waits", 3))
    tokenizer = NeverCalled.__new__(NeverCalled)
    server = http_app_for(source, replace(MODEL, tokenizer=tokenizer), chat=NoChatCalled())
    async with client_for(server.app()) as client:
        response = await client.post(path, json=body)
        assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert not source.requested


@in_event_loop
async def test_the_capacity_is_asked_for_one_sequence_before_the_body(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """How many there are is not known yet; ``generate`` asks for all of them."""
    source, asked = ScriptedSource(), list[int]()
    monkeypatch.setattr(source, "check_capacity", lambda number, _owner: asked.append(number))
    async with client_for(http_app_for(source).app()) as client:
        for body in (b"{", json.dumps(BODY | {"n": 3}).encode()):
            await client.post("/v1/completions", content=body)
    assert asked == [1, 1]
    assert [len(sequences) for sequences in source.requested] == [3]


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT_BODY)]
)
def test_a_requests_id_travels_with_the_first_piece_of_its_prompt(
    path: str, body: dict[str, Any]
) -> None:
    """And no further: stages remember it."""
    seen: list[str] = []

    async def look(batch: MicroBatch) -> None:
        seen.extend(chunk.request_id for chunk in batch.chunks)

    async def scenario() -> None:
        async with _harness(look) as (client, _, _):
            answer = await client.post(path, json=body | {"n": 2}, headers={"x-request-id": "mine"})
            assert answer.status_code == 200
            await client.post(path, json={**body, "max_tokens": 1})

    asyncio.run(scenario())
    assert seen[:2] == ["mine", "mine"], "of either choice"
    assert len(seen[-1]) == 32, "who brings none gets one"
