"""A stream on which nothing is sent for long is kept alive, by what its clients ignore."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from anthropic import Anthropic
from listening_server import KEY, ListeningServer
from openai import OpenAI
from scripted_token_source import SAID, ScriptedSource, http_app_for
from starlette.types import Message
from virtual_time import in_virtual_time

from tramontane.cluster.http import sse, token_endpoints
from tramontane.cluster.http.failover import MESSAGE_UPDATES, SCOPE_RESUME, FailoverResponse
from tramontane.proto.errors import OverloadedError, PipelineError
from tramontane.router.openai.resume_state import ResumeState

COMMENT, PING = b": keep-alive\n\n", b'event: ping\ndata: {"type": "ping"}\n\n'
CHAT = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 3}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 3},
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT | {"model": "tiny"},
    "/v1/responses": {"input": "Hello!", "max_output_tokens": 3},
}


@dataclass
class _Call:
    """One streamed request; ``sent``: the messages to its client, each with its time."""

    source: ScriptedSource
    path: str = "/v1/completions"
    is_relayed: bool = False
    sent: list[tuple[float, Message]] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        body = json.dumps(BODIES[self.path] | {"stream": True}).encode()
        requests = iter([{"type": "http.request", "body": body, "more_body": False}])
        clock = asyncio.get_running_loop().time

        async def receive() -> Message:
            if (request := next(requests, None)) is not None:
                return request
            await self.left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            self.sent.append((clock(), message))

        scope = {
            **{"type": "http", "method": "POST", "path": self.path, "query_string": b""},
            **{"asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http"},
            "headers": [(b"host", b"ingress"), (b"content-type", b"application/json")],
        }
        scope |= {SCOPE_RESUME: ResumeState()} if self.is_relayed else {}
        await http_app_for(self.source).app()(scope, receive, send)

    @property
    def status(self) -> int:
        return int(self.sent[0][1]["status"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for _, message in self.sent)

    def times_of(self, piece: bytes) -> list[float]:
        return [at for at, message in self.sent if message.get("body") == piece]


@pytest.mark.parametrize("path", BODIES)
@in_virtual_time
async def test_before_and_between_tokens(path: str) -> None:
    call = _Call(ScriptedSource(pause_s=40.0), path)
    await call.run()
    comment = PING if path == "/v1/messages" else COMMENT
    # tokens at 40, 80 and 120 s
    expected = [15.0, 30.0, 55.0, 70.0, 95.0, 110.0]
    assert call.times_of(comment) == pytest.approx(expected)
    assert call.status == 200
    assert call.body.count(comment) == len(expected), "whole, and not inside of an event"


@in_virtual_time
async def test_no_two_messages_are_sent_at_once() -> None:
    """The client is slow: a write takes longer than the time after which a comment is due."""
    begun, ended, overlaps = list[Message](), list[Message](), list[bool]()

    async def send(message: Message) -> None:
        overlaps.append(len(begun) > len(ended))  # an assertion here would be suppressed
        begun.append(message)
        await asyncio.sleep(20.0)
        ended.append(message)

    comment = {"body": COMMENT}
    sender = sse.KeepAliveSender(send, lambda: comment)
    for pause_s in (0.0, 1.0, 16.0, 36.0):
        await asyncio.sleep(pause_s)
        await sender({"body": b"data"})
    sender.close()
    assert not any(overlaps)
    assert (begun.count(comment), begun.count({"body": b"data"})) == (2, 4)


@in_virtual_time
async def test_none_where_tokens_come() -> None:
    call = _Call(ScriptedSource(pause_s=14.9))
    await call.run()
    assert COMMENT not in call.body


@in_virtual_time
async def test_an_early_error_has_its_status_and_a_late_one_is_an_event() -> None:
    early = _Call(ScriptedSource(pause_s=14.0, failure=PipelineError("the pipeline is gone")))
    await early.run()
    late = _Call(ScriptedSource(pause_s=16.0, failure=PipelineError("the pipeline is gone")))
    await late.run()
    assert (early.status, late.status) == (503, 200)
    event = late.body.split(b"\n\n")[-2]
    assert json.loads(event.removeprefix(b"data: "))["error"] == json.loads(early.body)["error"]


@pytest.mark.parametrize("leaves_at", [5.0, 20.0, 45.0])
@in_virtual_time
async def test_a_client_that_leaves_ends_its_request(leaves_at: float) -> None:
    source = ScriptedSource(pause_s=30.0)
    call = _Call(source)
    calling = asyncio.create_task(call.run())
    await asyncio.sleep(leaves_at)
    assert source.num_open == 1
    call.left.set()
    if leaves_at < sse.KEEP_ALIVE_S:  # the proxy cancels a request without a response
        calling.cancel()
    await asyncio.wait({calling})
    assert source.num_open == 0
    num_sent = len(call.sent)
    await asyncio.sleep(100.0)
    assert len(call.sent) == num_sent


@in_virtual_time
async def test_comments_do_not_count_as_progress_of_an_ingress() -> None:
    """A request that crashes each ingress after a while would be given to one after the other."""
    call = _Call(ScriptedSource(pause_s=40.0), is_relayed=True)
    await call.run()
    comments = [message for _, message in call.sent if message.get("body") == COMMENT]
    assert all(message[MESSAGE_UPDATES] == [] for message in comments)

    async def ignore(_message: Message) -> None:
        pass

    response = FailoverResponse(ignore)
    for _, message in call.sent:
        await response.send(dict(message))
    assert response.num_updates == 3
    assert response.is_resumable


@pytest.fixture
def _after_10_ms(monkeypatch: pytest.MonkeyPatch, server: ListeningServer) -> None:
    for module in (sse, token_endpoints):
        monkeypatch.setattr(module, "KEEP_ALIVE_S", 0.01)
    server.source.pause_s = 0.03


@pytest.mark.usefixtures("_after_10_ms")
def test_openais_client_ignores_them(server: ListeningServer, client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hello!"}], stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text.strip() == SAID


@pytest.mark.usefixtures("_after_10_ms")
def test_anthropics_client_ignores_them(server: ListeningServer) -> None:
    with (
        Anthropic(api_key=KEY, base_url=server.url, max_retries=0) as client,
        client.messages.stream(
            model="tiny", messages=[{"role": "user", "content": "Hello!"}], max_tokens=100
        ) as stream,
    ):
        assert "".join(stream.text_stream).strip() == SAID


@pytest.mark.usefixtures("_after_10_ms")
def test_openais_client_raises_a_late_error(server: ListeningServer, client: OpenAI) -> None:
    server.source.failure = OverloadedError("too many requests wait", 1)
    with pytest.raises(Exception, match="too many requests wait"):
        list(client.completions.create(model="tiny", prompt="a", stream=True))
